"""What families read: heads by other names, class defaults, widths that must divide, indices, dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from kvferry.errors import InputError
from kvferry.model import FAMILIES, ModelShape, load_shape, with_draft
from kvferry.model.class_defaults import CLASS_DEFAULTS, class_defaults
from kvferry.size import kv_size
from size_cases import golden_cases

HEADS: dict[str, object] = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
S, F = "sliding_attention", "full_attention"


def sized(config: Mapping[str, object], tokens: int = 1, **options: object) -> int:
    return kv_size(ModelShape.from_config(config), tokens, **options).logical_bytes  # type: ignore[arg-type]


def golden(start: str) -> dict[str, object]:
    return dict(next(case.config for case in golden_cases() if case.name.startswith(start)))


def test_kv_heads_by_the_name_that_step_publishes() -> None:
    """Step 3.5: 8 attention groups, not 64 query heads; the list may go on into the declared MTP layers."""
    step = golden("step-3.5-flash")
    assert sized(step, 1000) == 118_358_016
    with pytest.raises(InputError, match="layer_types: 48 entries for 45 layers"):
        sized({**step, "num_nextn_predict_layers": 2})
    assert ModelShape.from_config({"model_type": "step3p7", "text_config": step}).warnings == ()


@pytest.mark.parametrize("name", ["num_kv_heads", "n_kv_heads", "n_kv_head"])
def test_kv_heads_by_other_plain_names(name: str) -> None:
    """A known other name of the KV head count is read, so they are never the query heads in silence."""
    bare = {"model_type": "llama", **HEADS, "dtype": "bfloat16"}
    assert sized({**bare, name: 2}) == 4 * 2 * 2 * 64 * 2
    assert sized({**bare, name: 2, "num_key_value_heads": 2}) == sized({**bare, name: 2})


def test_class_defaults_stand_in_only_for_what_is_left_out() -> None:
    """A left-out head width is the class's, with a warning; a null one is hidden width over heads."""
    gemma = {"model_type": "gemma", **HEADS, "num_key_value_heads": 8, "dtype": "bfloat16"}
    shape = ModelShape.from_config(gemma)
    assert kv_size(shape, 1).logical_bytes == 4 * 2 * 8 * 256 * 2
    assert shape.warnings == ("not in the config, taken from the model class: head_dim=256",)
    assert sized({**gemma, "head_dim": None}) == 4 * 2 * 8 * 64 * 2
    assert ModelShape.from_config({**gemma, "head_dim": 64}).warnings == ()


def test_a_flat_config_without_layers_or_heads_is_refused_not_filled() -> None:
    """Only a text config inside a wrapper is written as a difference; a flat one lost its layers."""
    with pytest.raises(InputError, match="num_hidden_layers: missing"):
        sized({"model_type": "llama"})
    inner = ModelShape.from_config({"model_type": "llava", "text_config": {"model_type": "llama"}})
    assert (inner.num_layers, inner.groups[0].tensors[0].heads) == (32, 32)
    for default in ("text_config.num_hidden_layers=32", "text_config.hidden_size=4096"):
        assert default in inner.warnings[0]


def test_class_defaults_are_of_known_families_and_positive() -> None:
    """Each row of the table is for a registered model type; a flat config gets no layer count from it."""
    assert set(CLASS_DEFAULTS) <= set(FAMILIES)
    assert class_defaults("gemma", is_nested=True)["num_hidden_layers"] == 28
    assert dict(class_defaults("gemma", is_nested=False)) == {"head_dim": 256, "num_key_value_heads": 16}
    assert class_defaults("brand_new", is_nested=True) == {}


UNEVEN: dict[str, tuple[dict[str, object], str]] = {
    "whisper": ({"decoder_layers": 2, "decoder_attention_heads": 128, "d_model": 64}, "d_model"),
    "bart": ({"decoder_layers": 2, "decoder_attention_heads": 3, "d_model": 64}, "d_model"),
    "gpt_bigcode": ({"n_layer": 2, "n_head": 128, "n_embd": 64}, "n_embd"),
    "falcon": ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "hidden_size"),
    "qwen": ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "hidden_size"),
    "dbrx": ({"n_layers": 2, "n_heads": 3, "d_model": 64}, "d_model"),
    "llama": ({"num_hidden_layers": 2, "num_attention_heads": 3, "hidden_size": 64}, "hidden_size"),
    "zamba2": ({**HEADS, "num_attention_heads": 3, "layers_block_type": ["mamba"] * 4}, "hidden_size"),
    "minicpm3": (
        {**HEADS, "num_attention_heads": 3, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
        "hidden_size",
    ),
    "chatglm": ({**HEADS, "multi_query_attention": True, "multi_query_group_num": 3}, "num_attention_heads"),
    "mpt": ({"n_layers": 2, "n_heads": 8, "d_model": 64, "attn_config": {"kv_n_heads": 3}}, "n_heads"),
    "step1": ({**HEADS, "num_attention_groups": 3}, "num_attention_heads"),
}


@pytest.mark.parametrize("model_type", UNEVEN)
def test_a_width_that_leaves_a_rest_is_refused_by_name(model_type: str) -> None:
    """Hidden width over heads, and query over KV heads, are never rounded down, least of all to zero."""
    config, named = UNEVEN[model_type]
    with pytest.raises(InputError, match=rf"^{named}: .* is not a multiple of"):
        sized({"model_type": model_type, **config})


@pytest.mark.parametrize("shared", [3, 16])
def test_query_heads_in_a_group_must_divide(shared: int) -> None:
    """Nemotron NAS: 8 heads in groups of 3, or of 16, are no number of KV heads."""
    block = {"attention": {"n_heads_in_group": shared}}
    with pytest.raises(InputError, match=r"block_configs\[0\].attention.n_heads_in_group: 8"):
        sized({"model_type": "deci", **HEADS, "block_configs": [block] * 4})


INDICES: dict[str, tuple[dict[str, object], str]] = {
    "bamba": (golden("bamba shape, inner"), "attn_layer_indices"),
    "mllama_text_model": (
        {"model_type": "mllama_text_model", **HEADS, "num_key_value_heads": 2},
        "cross_attention_layers",
    ),
    "lfm2": ({"model_type": "lfm2", **HEADS, "num_key_value_heads": 2, "conv_L_cache": 3}, "full_attn_idxs"),
    "zamba2": (golden("zamba2 shape by hybrid"), "hybrid_layer_ids"),
}


@pytest.mark.parametrize("family", INDICES)
@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([1, 1], "layer 1 is listed twice"),
        ([0, 99], "99 is no layer"),
        ([-1], "less than 0"),
        ([True], "whole"),
    ],
)
def test_layer_indices_name_each_layer_once(family: str, indices: list[object], said: str) -> None:
    """An index twice, past the last layer, negative, or no number: refused with the list's name."""
    config, name = INDICES[family]
    with pytest.raises(InputError, match=rf"^{name}\[.\]: .*{said}"):
        sized({**config, name: indices})


def test_kimi_layers_are_counted_from_one() -> None:
    """Kimi's lists name each layer once, counted from 1; a layer in none of them, or in both, is refused."""
    kimi = {"model_type": "kimi_linear", "num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    inner = {"num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4}
    lists = {"full_attn_layers": [2], "kda_layers": [1]}
    shape = ModelShape.from_config({**kimi, "linear_attn_config": {**inner, **lists}})
    assert {str(group.kind): group.layers for group in shape.groups} == {"mla": (1,), "kda": (0,)}
    for kda in ([], [1, 2], [2]):
        with pytest.raises(InputError, match=r"linear_attn_config.kda_layers"):
            sized({**kimi, "linear_attn_config": {**inner, **lists, "kda_layers": kda}})


def test_the_list_named_in_an_error_is_the_one_in_the_file() -> None:
    """An unknown layer type is reported under the name of the list that has it."""
    nemotron = golden("nemotron-3 shape")
    names = ["mamba", "attention", "mlp", "mystery"]
    by_names = {**nemotron, "layers_block_type": names, "hybrid_override_pattern": None}
    with pytest.raises(InputError, match=r"^layers_block_type\[3\]: 'mystery'"):
        sized(by_names)
    with pytest.raises(InputError, match=r"^hybrid_override_pattern\[1\]: '\?'"):
        sized({**nemotron, "hybrid_override_pattern": "M?-E"})
    with pytest.raises(InputError, match=r"^num_kv_heads: 3"):
        sized({"model_type": "llama", **HEADS, "num_kv_heads": 3})


def test_letters_of_a_window_pattern_are_read_one_by_one() -> None:
    """Exaone 4: L and G by place, not by the length of the pattern; the last is global; others refused."""
    config = {"model_type": "exaone4", **HEADS, "num_key_value_heads": 2, "sliding_window": 8}
    shape = ModelShape.from_config({**config, "sliding_window_pattern": "GL"})
    assert [(str(group.kind), group.layers) for group in shape.groups] == [
        ("full_attention", (0, 2, 3)),
        ("sliding_window", (1,)),
    ]
    with pytest.raises(InputError, match="sliding_window_pattern"):
        sized({**config, "sliding_window_pattern": "LLX"})


def test_window_list_of_sambay_must_fit_its_layers() -> None:
    """A list of windows that is not at the layers that the architecture has them is refused."""
    config = golden("phi-4-mini-flash shape")
    with pytest.raises(InputError, match="sliding_window"):
        sized({**config, "sliding_window": [16, None, 16, None, None, None, None, None]})


def test_rates_of_compressed_layers_are_read() -> None:
    """DeepSeek V4 by names: a rate of the config's own counts, and an unknown type is refused."""
    config = golden("deepseek-v4 shape by layer_types")
    slope = sized(config, 256) - sized(config, 128)
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 64}
    doubled = {**config, "compress_rates": rates}
    assert sized(doubled, 256) - sized(doubled, 128) == slope + 512 * 2
    with pytest.raises(InputError, match=r"compress_rates.mystery"):
        sized({**config, "compress_rates": {"mystery": 2}})
    with pytest.raises(InputError, match="layer_types"):
        sized({**config, "compress_ratios": [0, 128, 4]})


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "nvfp4", "fp8", "q8_0", "foo"])
def test_a_state_dtype_must_be_a_plain_float(dtype: str) -> None:
    """The recurrent state's dtype is checked where it is read, and blamed by its own name."""
    config = golden("bamba shape, inner")
    with pytest.raises(InputError, match=r"^mamba_ssm_dtype:"):
        sized({**config, "mamba_ssm_dtype": dtype})
    with pytest.raises(InputError, match=r"^torch_dtype:"):
        sized({"model_type": "llama", **HEADS, "torch_dtype": dtype})


def test_a_draft_has_the_dtype_of_its_own_config(tmp_path: Path) -> None:
    """A float32 draft beside a bf16 target is counted in float32, unless one dtype is asked for all."""
    target = ModelShape.from_config({"model_type": "llama", **HEADS, "dtype": "bfloat16"})
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps({"model_type": "llama", **HEADS, "dtype": "float32"}))
    per_layer = 2 * 8 * 64
    both = with_draft(target, str(draft))
    assert kv_size(both, 1).logical_bytes == 4 * per_layer * 2 + 4 * per_layer * 4
    assert kv_size(both, 1, kv_dtype="fp8").logical_bytes == 8 * per_layer
    draft.write_text(json.dumps({"model_type": "llama", **HEADS}))
    undeclared = with_draft(target, str(draft))
    assert kv_size(undeclared, 1).logical_bytes == 8 * per_layer * 2
    assert "draft: no dtype" in undeclared.warnings[-1]


def test_a_draft_that_is_neither_word_nor_file_is_blamed_on_the_option() -> None:
    """The error of a draft names the draft, and a number of layers below one is called that."""
    for name in ("nope", "eagle3"):
        with pytest.raises(InputError, match=f"^draft: {name}: "):
            with_draft(load_shape("shape:2x2x8"), name)
    with pytest.raises(InputError, match=r"^draft_layers: 0 is less than 1"):
        with_draft(load_shape("shape:2x2x8"), "mtp", 0)


def test_quantised_cache_of_the_text_part_is_said() -> None:
    """A quantised KV cache that the inner config asks for is said as one of the outer config is."""
    quantised = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}
    text = {"model_type": "llama", **HEADS, "dtype": "bfloat16"}
    for config in ({"text_config": {**text, **quantised}}, {"text_config": text, **quantised}):
        warnings = ModelShape.from_config({"model_type": "llava", **config}).warnings
        assert sum("kv_cache_scheme" in warning for warning in warnings) == 1


def test_strangers_types_are_input_errors() -> None:
    """Whatever is given instead of a config, a name or a dtype, the answer is an InputError."""
    for config in ([], None, 5, "llama", [("model_type", "llama")]):
        with pytest.raises(InputError, match="config"):
            ModelShape.from_config(config)  # type: ignore[arg-type]
    for model in (5, None, "", "  "):
        with pytest.raises(InputError, match="model"):
            load_shape(model)  # type: ignore[arg-type]
    shape = load_shape("shape:2x2x8")
    for option in ("kv_dtype", "k_dtype", "v_dtype"):
        for value in (5, [], True):
            with pytest.raises(InputError, match=f"^{option}:"):
                kv_size(shape, 1, **{option: value})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="draft"):
        with_draft(shape, 5)  # type: ignore[arg-type]


def test_surrogates_in_a_text_field_are_refused() -> None:
    """A lone surrogate, which no text can hold, is refused where it is read."""
    with pytest.raises(InputError, match="model_type"):
        sized({"model_type": "\ud800", **HEADS})


def test_shapes_compare_and_encode() -> None:
    """A shape is a plain record: equal when read twice, and JSON in and out."""
    config = golden("step3 shape")
    shape = ModelShape.from_config(config)
    assert shape == ModelShape.from_config(config)
    assert msgspec.json.decode(msgspec.json.encode(shape), type=ModelShape) == shape
