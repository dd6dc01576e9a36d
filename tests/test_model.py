"""Reading configs: field traps, wrappers, drafts, the guard against guesses, and the registry."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvferry.errors import InputError
from kvferry.model import FAMILIES, LayerKind, ModelShape, load_shape, with_draft
from kvferry.model.fields import Fields
from kvferry.model.source import language_part
from kvferry.model.wrappers import WRAPPERS
from kvferry.size import kv_size
from size_cases import golden_cases

HEADS: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "dtype": "bfloat16",
}
PER_TOKEN = 4 * 2 * 2 * 32 * 2


def sized(config: Mapping[str, object], tokens: int = 1) -> int:
    return kv_size(ModelShape.from_config(config), tokens).logical_bytes


def test_every_family_has_a_golden_case() -> None:
    """Each family function is exercised by at least one golden case, through one of its model types."""
    seen = set()
    for case in golden_cases():
        _, model_type = language_part(Fields(case.config))
        seen.add(FAMILIES.get(model_type))
    assert seen - {None} == set(FAMILIES.values())


def test_model_table_is_fresh() -> None:
    """``docs/models.md`` is what ``docs/make_models.py`` writes now."""
    script = Path(__file__).parents[1] / "docs" / "make_models.py"
    spec = importlib.util.spec_from_file_location("make_models", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text() == module.markdown()


def test_golden_rows_name_their_source() -> None:
    """Every golden row has a name of its own and says where its figure comes from."""
    cases = golden_cases()
    assert len({case.name for case in cases}) == len(cases) >= 67
    assert all(case.source for case in cases)


@pytest.mark.parametrize(
    ("extra", "factor"),
    [
        ({}, 1),
        ({"head_dim": 64}, 2),
        ({"num_key_value_heads": None}, 4),
        ({"v_head_dim": 96}, 2),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 4}, 1),
    ],
)
def test_heads_by_the_ordinary_fields(extra: dict[str, object], factor: int) -> None:
    """An explicit head width wins, missing KV heads are the query heads, V may be wider than K."""
    assert sized({"model_type": "llama", **HEADS, **extra}) == factor * PER_TOKEN


def test_width_that_does_not_divide_is_refused() -> None:
    """hidden_size / heads that leaves a rest is refused, and so are KV heads that do not divide."""
    with pytest.raises(InputError, match="hidden_size: 255 is not a multiple of 8 heads"):
        sized({"model_type": "llama", **HEADS, "hidden_size": 255})
    with pytest.raises(InputError, match="num_key_value_heads"):
        sized({"model_type": "llama", **HEADS, "num_key_value_heads": 3})


def test_default_dtype_is_the_config_s_own() -> None:
    """K and V have the config's dtype, wherever it is named; without one bf16 is assumed aloud."""
    assert sized({"model_type": "llama", **HEADS, "dtype": "float32"}) == 2 * PER_TOKEN
    bare = {name: value for name, value in HEADS.items() if name != "dtype"}
    outer = {"model_type": "llava", "torch_dtype": "float32"}
    assert sized({**outer, "text_config": {"model_type": "llama", **HEADS}}) == PER_TOKEN
    assert sized({**outer, "text_config": {"model_type": "llama", **bare}}) == 2 * PER_TOKEN
    size = kv_size(ModelShape.from_config({"model_type": "llama", **bare}), 1)
    assert size.logical_bytes == PER_TOKEN
    assert any("bf16" in warning for warning in size.warnings)
    asked = kv_size(ModelShape.from_config({"model_type": "llama", **bare}), 1, kv_dtype="fp8")
    assert asked.warnings == ()


def test_shape_by_hand_is_fp16_full_attention(tmp_path: Path) -> None:
    """``shape:LxHxD`` is full attention in fp16; a folder and its config.json are one model."""
    assert kv_size(load_shape("shape:4x2x32"), 1).logical_bytes == PER_TOKEN
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **HEADS}))
    assert load_shape(str(tmp_path)) == load_shape(str(tmp_path / "config.json"))


def test_infinity_elsewhere_in_a_config_is_no_obstacle(tmp_path: Path) -> None:
    """Published Mamba configs hold ``Infinity``; a field that is not read may hold anything."""
    text = json.dumps({"model_type": "llama", **HEADS, "time_step_limit": [0.0, float("inf")]})
    (tmp_path / "config.json").write_text(text)
    assert kv_size(load_shape(str(tmp_path)), 1).logical_bytes == PER_TOKEN


def test_unknown_model_with_plain_fields_is_sized_aloud() -> None:
    """An unknown model type with the plain fields is full attention, with a warning that names both."""
    shape = ModelShape.from_config(
        {"model_type": "brand_new", **HEADS, "num_shared_experts": 2, "qk_norm": True}
    )
    assert kv_size(shape, 1).logical_bytes == PER_TOKEN
    assert len(shape.warnings) == 1
    assert "brand_new" in shape.warnings[0]
    assert "full attention" in shape.warnings[0]


@pytest.mark.parametrize(
    "field",
    [
        *("sliding_window", "kv_lora_rank", "ssm_state_size", "mamba_d_conv", "linear_num_key_heads"),
        *("compress_ratios", "index_topk", "num_kv_shared_layers", "use_cla", "hybrid_layer_pattern"),
        *("cross_attention_layers", "is_encoder_decoder", "attention_chunk_size", "block_configs"),
        *(
            "full_attention_interval",
            "attn_layer_period",
            "multi_query",
            "swa_head_dim",
            "linear_attn_config",
        ),
        *("conv_kernel", "sparse_attention_config", "rwkv_head_size", "attn_type_list", "lightning_dim"),
    ],
)
@pytest.mark.parametrize("model_type", ["brand_new", "llama"])
def test_field_that_suggests_another_cache_is_refused(field: str, model_type: str) -> None:
    """A field that hints at another cache is refused by name, for unknown and for known model types."""
    with pytest.raises(InputError, match=field):
        ModelShape.from_config({"model_type": model_type, **HEADS, field: 4})


@pytest.mark.parametrize("value", [None, False, 0, [], ""])
def test_hint_that_says_nothing_is_let_pass(value: object) -> None:
    """The same fields, null, false, zero or empty, suggest nothing."""
    for field in ("sliding_window", "use_cla", "attention_chunk_size"):
        assert sized({"model_type": "brand_new", **HEADS, field: value}) == PER_TOKEN


@pytest.mark.parametrize("value", [None, [], ["full_attention"] * 4, ["attention"] * 4])
def test_layer_types_that_are_all_full_are_read_as_such(value: object) -> None:
    """Every model may list its layers; where all are full attention, it is what it was without the list."""
    assert sized({"model_type": "brand_new", **HEADS, "layer_types": value}) == PER_TOKEN


def test_fields_of_the_draft_suggest_nothing() -> None:
    """Fields of MTP layers say nothing about the target's cache."""
    assert sized({"model_type": "llama", **HEADS, "mtp_hybrid_override_pattern": "*E"}) == PER_TOKEN


def test_config_without_model_type_says_so() -> None:
    """A config without model_type is sized by its plain fields, with a warning."""
    assert "no model_type" in ModelShape.from_config(HEADS).warnings[0]


def test_wrappers_are_sized_from_their_language_model() -> None:
    """Known wrappers pass silently, unknown ones with a warning; an inner type may be left out."""
    text = {"model_type": "llama", **HEADS}
    known = ModelShape.from_config({"model_type": min(WRAPPERS), "text_config": text})
    assert known.warnings == ()
    unknown = ModelShape.from_config({"model_type": "new_vlm", "text_config": text, "vision_config": {}})
    assert "new_vlm" in unknown.warnings[0]
    assert kv_size(known, 1).logical_bytes == kv_size(unknown, 1).logical_bytes == PER_TOKEN
    deep = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": {**HEADS}}}
    assert sized(deep) == PER_TOKEN


def test_defaults_of_the_model_class_are_said() -> None:
    """Published Gemma 3 files leave fields out; the class defaults that stand in are listed once."""
    shape = ModelShape.from_config(
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 12}}
    )
    assert len(shape.warnings) == 1
    for default in ("head_dim=256", "num_key_value_heads=4", "sliding_window=4096"):
        assert default in shape.warnings[0]


def test_per_layer_lists_must_fit_the_layers() -> None:
    """A list of layer types of another length, or with an unknown name, is refused with its name."""
    config = {"model_type": "gemma2", **HEADS, "sliding_window": 8}
    with pytest.raises(InputError, match="layer_types: 3 entries for 4 layers"):
        sized({**config, "layer_types": ["full_attention"] * 3})
    with pytest.raises(InputError, match="'mystery' is not one of"):
        sized({**config, "layer_types": ["full_attention"] * 3 + ["mystery"]})


def test_a_quantised_cache_in_the_checkpoint_is_said() -> None:
    """A checkpoint that asks for a quantised KV cache gets a warning, not a silent dtype."""
    config = {"model_type": "llama", **HEADS, "quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    assert "kv_cache_scheme" in ModelShape.from_config(config).warnings[0]


def test_mtp_draft_is_as_declared_or_as_told() -> None:
    """``mtp`` adds the layers that the config declares; a number given counts instead."""
    config = {"model_type": "glm4_moe", **HEADS, "num_nextn_predict_layers": 1}
    shape = ModelShape.from_config(config)
    assert kv_size(with_draft(shape, "mtp"), 1).logical_bytes == PER_TOKEN * 5 // 4
    assert kv_size(with_draft(shape, "mtp", 3), 1).logical_bytes == PER_TOKEN * 7 // 4
    modules = ModelShape.from_config({**config, "num_nextn_predict_layers": None, "num_mtp_modules": 2})
    assert kv_size(with_draft(modules, "mtp"), 1).logical_bytes == PER_TOKEN * 6 // 4
    with pytest.raises(InputError, match="draft-layers"):
        with_draft(ModelShape.from_config({"model_type": "llama", **HEADS}), "mtp")


def test_draft_with_its_own_config() -> None:
    """A draft may be any model; its groups are marked, its layers follow the target's."""
    shape = with_draft(load_shape("shape:4x2x32"), "shape:1x8x16")
    assert [(group.layers, group.is_draft) for group in shape.groups] == [((0, 1, 2, 3), False), ((4,), True)]
    with pytest.raises(InputError, match="draft_layers"):
        with_draft(load_shape("shape:4x2x32"), "shape:1x8x16", 2)


def test_eagle_says_what_it_assumes() -> None:
    """``eagle`` is one layer like the target's, with a warning that its own config is exact."""
    shape = with_draft(load_shape("shape:4x2x32"), "eagle")
    assert kv_size(shape, 1).logical_bytes == PER_TOKEN * 5 // 4
    assert "eagle" in shape.warnings[-1]


def test_draft_is_like_the_last_attention_layer() -> None:
    """Where layers differ in KV heads, the draft has those of the last one with attention."""
    blocks: list[object] = [{"attention": {"no_op": False, "n_heads_in_group": n}} for n in (2, 8, 4)]
    blocks.append({"attention": {"no_op": True, "n_heads_in_group": None}})
    shape = ModelShape.from_config({"model_type": "nemotron-nas", **HEADS, "block_configs": blocks})
    draft = [group for group in with_draft(shape, "eagle").groups if group.is_draft]
    assert [tensor.heads for group in draft for tensor in group.tensors] == [2, 2]


def test_draft_of_a_hybrid_is_its_attention_layer() -> None:
    """The draft of a hybrid has the attention layer's shape, not the recurrent one's."""
    config = next(case.config for case in golden_cases() if case.name.startswith("qwen3.5-27b state"))
    shape = with_draft(ModelShape.from_config(config), "mtp")
    assert [group.kind for group in shape.groups if group.is_draft] == [LayerKind.FULL]


def test_deepseek_v4_constants_follow_from_the_config() -> None:
    """V4 keeps a window in every layer and the compressor's open rows in float32; another ratio is said."""
    config = next(case.config for case in golden_cases() if case.name.startswith("deepseek-v4-flash"))
    size = kv_size(ModelShape.from_config(config), 4096, kv_dtype="bf16")
    window = 43 * 128 * 512 * 2
    ratio_4 = 21 * 8 * (2 * 2 * 512 + 2 * 2 * 128) * 4
    ratio_128 = 20 * 128 * (2 * 512) * 4
    assert size.constant_bytes == window + ratio_4 + ratio_128
    strange = ModelShape.from_config({**config, "compress_ratios": [0, 0, *[16] * 41]})
    assert "only the slope" in strange.warnings[0]


def test_state_dtype_is_the_config_s_key() -> None:
    """The recurrent state has the dtype that the config names; a family rule that stands in is said."""
    config = dict(next(case.config for case in golden_cases() if case.name.startswith("bamba")))
    ruled = ModelShape.from_config(config)
    named = ModelShape.from_config({**config, "mamba_ssm_dtype": "float32"})
    state = 29 * 128 * 64 * 128
    grown = (
        kv_size(named, 1, kv_dtype="bf16").logical_bytes - kv_size(ruled, 1, kv_dtype="bf16").logical_bytes
    )
    assert grown == 2 * state
    assert any("mamba_ssm_dtype" in warning for warning in ruled.warnings)
    assert not any("mamba_ssm_dtype" in warning for warning in named.warnings)
