"""The guard: every field is read, known to be harmless, or refused by name; every layer is accounted for."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvferry.errors import InputError
from kvferry.model import FAMILIES, LayerKind, ModelShape
from kvferry.model.draft_count import draft_count
from kvferry.model.fields import Fields
from kvferry.model.harmless import is_harmless, is_other_part
from kvferry.model.registry import Family, FamilyShape, Heads, heads_group
from kvferry.model.source import language_part
from kvferry.model.wrappers import WRAPPERS
from kvferry.size import kv_size
from size_cases import golden_cases

ROOT = Path(__file__).parents[1]
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_size": 512,
    "torch_dtype": "bfloat16",
}
PER_TOKEN = 4 * 2 * 2 * 64 * 2

SAYS_SOMETHING: dict[str, object] = {
    "hybrid_layer_pattern": [1, 1, 1, 0],
    "attn_layer_indices": [1, 3],
    "attn_type_list": [0, 0, 0, 1],
    "attn_types": [0, 0, 0, 0],
    "compress_ratios": [0, 4, 128, 4],
    "cross_attention_layers": [1],
    "full_attn_idxs": [3],
    "block_configs": [{"attention": {"no_op": True}}] * 4,
    "sliding_window": [None, 128, None, 128],
    "num_kv_heads_per_layer": [2, 1, 1, 1],
    "linear_attn_layers": [0],
    "kv_n_heads": 4,
    "kv_heads": 4,
    "num_query_groups": 4,
    "num_key_value_groups": 4,
    "num_attention_groups": 4,
    "share_kv": True,
    "window": 128,
    "local_window": 128,
    "global_layers": [0, 2],
    "use_mla": True,
    "d_kv": 32,
    "attention_kind": "local",
    "nHeadKV": 1,
    "cacheLayout": {"every": [2]},
    "layer_repeats": 2,
    "total_ut_steps": 4,
    "num_iterations": 2,
    "token_mixer": "gla",
    "alternating": [0, 1],
    "layerwise_widths": {"0": 1},
    "per_layer_config": {"3": {"head_dim": 128}},
    "widths_by_depth": [1.0, 0.5, 0.5, 1.0],
    "extras": {"notes": {"sliding_window_size": 64}},
    "parts": [{"name": "a"}, {"window_length": 8}],
    "attention_bias_layers": {"1": True},
    "layer_types": "full_attention",
    "use_bidirectional_attention": True,
}


def sized(config: Mapping[str, object], tokens: int = 1) -> int:
    shape = ModelShape.from_config(config)
    has_cross = any(group.kind is LayerKind.CROSS for group in shape.groups)
    return kv_size(shape, tokens, encoder_tokens=5 if has_cross else None).logical_bytes


def golden_models() -> Iterator[tuple[Family, dict[str, object]]]:
    """The language part of each golden config, flat, with the family that reads it."""
    for case in golden_cases():
        outer = Fields(case.config)
        f, model_type = language_part(outer)
        left_out = {} if f is outer else f.class_defaults
        if model_type in FAMILIES:
            yield FAMILIES[model_type], {**left_out, **f.raw, "model_type": model_type}


def refusal(config: Mapping[str, object]) -> str | None:
    """The one line that a config is refused with; None where it is sized."""
    try:
        sized(config)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", SAYS_SOMETHING)
@pytest.mark.parametrize("model_type", ["llama", "brand_new"])
def test_a_field_that_says_something_is_refused_whatever_its_type(name: str, model_type: str) -> None:
    """Number, list of numbers, of nulls and numbers, of objects, object in object: refused by its name."""
    with pytest.raises(InputError, match=re.escape(name)):
        sized({**LLAMA, "model_type": model_type, name: SAYS_SOMETHING[name]})


def test_a_field_deep_inside_is_named_with_its_path() -> None:
    """The path of a refused field leads to it through objects and lists."""
    deep = {"extras": {"notes": [{"a": 1}, {"sliding_window_size": 64}]}}
    with pytest.raises(InputError, match=re.escape("extras.notes[1].sliding_window_size")):
        sized({**LLAMA, **deep})
    with pytest.raises(InputError, match=re.escape("text_config.extras.notes[1].sliding_window_size")):
        sized({"model_type": "llava", "text_config": {**LLAMA, **deep}})


def test_a_field_beside_those_that_are_read_inside_an_object_is_refused() -> None:
    """An object that a family reads is judged field by field: MPT's window lies inside attn_config."""
    mpt = {"model_type": "mpt", "n_layers": 2, "n_heads": 8, "d_model": 512}
    assert sized({**mpt, "attn_config": {"kv_n_heads": 2, "sliding_window_size": -1, "qk_ln": True}}) > 0
    with pytest.raises(InputError, match=re.escape("attn_config.sliding_window_size")):
        sized({**mpt, "attn_config": {"kv_n_heads": 2, "sliding_window_size": 128}})
    block = {"attention": {"n_heads_in_group": 4, "window_length": 64}}
    plain = {"attention": {"n_heads_in_group": 4, "window_length": None}}
    with pytest.raises(InputError, match=re.escape("block_configs[1].attention.window_length")):
        sized({**LLAMA, "model_type": "deci", "num_hidden_layers": 2, "block_configs": [plain, block]})


@pytest.mark.parametrize("value", [None, False, 0, -1, 0.0, "", [], {}, [None] * 4, {"a": None, "b": {}}])
def test_a_value_that_says_nothing_is_let_pass(value: object) -> None:
    """Null, false, zero, negative, empty, and nulls all through suggest nothing, under any name."""
    for name in ("window", "attn_layer_map", "use_cla", "extras", "kv_n_heads"):
        assert sized({**LLAMA, name: value}) == PER_TOKEN


ORDINARY: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.1,
    "attn_logit_softcapping": 50.0,
    "auto_map": {"AutoConfig": "configuration_cache.WindowConfig"},
    "eos_token_id": [1, 2, 3, 4],
    "id2label": {"0": "LABEL_0"},
    "moe_layer_freq": [0, 1, 1, 1],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "mtp_hybrid_override_pattern": "*E",
    "n_shared_experts": 2,
    "no_rope_layers": [1, 1, 1, 0],
    "num_local_experts": 8,
    "quantization_config": {"ignore": ["attn"], "kv_cache_dtype": "fp8"},
    "qk_norm": True,
    "query_pre_attn_scalar": 128,
    "rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}},
    "shared_expert_intermediate_size": 64,
    "swiglu_limits": [0.0, 7.0, 7.0, 7.0],
    "topk_group": 1,
    "use_cache": True,
    "vision_config": {"window_size": 112, "fullatt_block_indexes": [7, 15]},
}


HUB: dict[str, dict[str, object]] = {
    "bart-large 100": {
        "add_final_layer_norm": False,
        "classif_dropout": 0.1,
        "encoder_ffn_dim": 4096,
        "encoder_layerdrop": 0.0,
        "encoder_layers": 12,
        "decoder_start_token_id": 2,
        "no_repeat_ngram_size": 3,
        "num_hidden_layers": 12,
    },
    "bamba": {
        "attn_rotary_emb": 64,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    "bloom": {
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "masked_softmax_fusion": True,
        "skip_bias_add": True,
        "skip_bias_add_qkv": False,
    },
    "chatglm3": {
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "ffn_hidden_size": 13696,
        "post_layer_norm": True,
    },
    "command-r7b": {
        "cache_implementation": "hybrid",
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "use_embedding_sharing": True,
        "use_parallel_block": True,
    },
    "falcon-7b": {"parallel_attn": True, "bias": False, "alibi": False},
    "gemma-2 shape": {"sliding_window_size": 128, "cache_implementation": "hybrid"},
    "hunyuan-a13b": {
        "dense_list": [4096, 0],
        "moe_intermediate_size": [3072] * 32,
        "moe_topk": [8] * 32,
        "num_shared_expert": [1] * 32,
        "pool_type": "last",
        "use_mla": False,
    },
    "jamba": {
        "calc_logits_for_entire_prompt": False,
        "mamba_inner_layernorms": True,
        "use_mamba_kernels": True,
    },
    "lfm2 shape, 6": {
        "block_dim": 512,
        "block_ff_dim": 1024,
        "block_mlp_init_scale": 1.0,
        "block_norm_eps": 1e-05,
        "block_use_swiglu": True,
        "conv_dim": 512,
        "conv_dim_out": 512,
        "conv_use_xavier_init": True,
        "num_heads": 16,
        "use_pos_enc": True,
    },
    "longcat": {"attention_method": "MLA", "mla_scale_kv_lora": True, "mla_scale_q_lora": True},
    "mamba-2.8b": {"d_inner": 5120, "fused_add_norm": True, "rms_norm": True, "ssm_cfg": {}},
    "paligemma": {"projection_dim": 2304, "num_image_tokens": 256},
    "minimax-text-01": {
        "layernorm_full_attention_alpha": 3.5,
        "layernorm_linear_attention_beta": 1.0,
        "postnorm": True,
        "shared_moe_mode": "sigmoid",
    },
    "opt-13b": {"do_layer_norm_before": True, "word_embed_proj_dim": 5120, "_remove_final_layer_norm": False},
    "phi-3-mini": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    "starcoder mqa": {
        "attention_softmax_in_fp32": True,
        "pad_key_length": True,
        "pre_allocate_kv_cache": False,
        "scale_attention_softmax_in_fp32": True,
        "summary_first_dropout": 0.1,
    },
    "step-3.5": {"att_impl_type": "GQA", "moe_layers_enum": "3,4", "use_head_wise_attn_gate": True},
    "t5-11b": {"relative_attention_num_buckets": 32, "scalable_attention": True, "output_past": True},
    "whisper": {
        "forced_decoder_ids": [[1, 50259], [2, 50359]],
        "mask_time_length": 10,
        "suppress_tokens": [1, 2],
    },
    "zamba2 shape by": {
        "attention_hidden_size": 512,
        "gated_linear_unit": True,
        "lora_rank": 128,
        "num_query_groups": 4,
        "use_shared_block_lora": True,
        "use_shared_mlp_adapter": True,
    },
    "llama-2-7b": {
        "eagle_config": {"use_aux_hidden_state": True},
        "quantization": {"group_size": 64, "bits": 4},
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "compression_ratio": 1.0,
    },
}


@pytest.mark.parametrize("start", HUB)
def test_fields_that_listed_models_have_beside_their_geometry_pass(start: str) -> None:
    """What published files of listed models hold besides, of older model code too, changes no size."""
    names = {case.name: case.config for case in golden_cases()}
    config = next(config for name, config in names.items() if name.startswith(start))
    assert refusal({**config, **HUB[start]}) is None
    assert sized({**config, **HUB[start]}, 100) == sized(config, 100)


@pytest.mark.parametrize(
    ("start", "extra"),
    [
        ("command-r7b", {"order_of_interleaved_layers": "global_attn_first"}),
        ("command-r7b", {"layer_switch": 2}),
        ("phi-3-mini", {"full_attn_mod": 2}),
        ("step-3.5", {"att_impl_type": "MLA"}),
        ("longcat", {"attention_method": "GQA"}),
        ("hunyuan-a13b", {"use_mla": True}),
        ("lfm2 shape, 6", {"conv_dim": 256}),
        ("lfm2 shape, 6", {"num_heads": 8}),
        ("gemma-2 shape", {"sliding_window_size": 1024}),
        ("qwen2.5-7b window", {"layer_types": ["sliding_attention"] * 28}),
        ("llama-2-7b", {"compression_ratio": 0.5}),
    ],
)
def test_the_same_fields_at_another_value_are_refused(start: str, extra: dict[str, object]) -> None:
    """A field that says nothing at its usual value says something at another: refused by its name."""
    config = next(case.config for case in golden_cases() if case.name.startswith(start))
    said = refusal({**config, **extra})
    assert said is not None
    assert next(iter(extra)) in said


def test_a_huge_or_deep_config_is_refused_in_one_line() -> None:
    """Names of a megabyte, objects in objects, millions of layers: one short line, and soon."""
    said = refusal({**LLAMA, "window_" + "x" * 10**6: 1})
    assert said is not None
    assert len(said) < 500
    deep: dict[str, object] = {"window": 1}
    for _ in range(900):
        deep = {"a": deep}
    said = refusal({**LLAMA, "extras": deep})
    assert said is not None
    assert len(said) < 500
    for config in ({**LLAMA, "num_hidden_layers": 10**7}, {"model_type": "t5", "num_layers": 10**7}):
        said = refusal({**config, "num_heads": 2, "d_kv": 8})
        assert said is not None
        assert "100000" in said


@pytest.mark.parametrize("model_type", ["llama", "brand_new"])
def test_ordinary_fields_of_published_configs_pass(model_type: str) -> None:
    """Fields of arithmetic, experts, rotary positions, other parts and generation are no obstacle."""
    assert sized({**LLAMA, **ORDINARY, "model_type": model_type}) == PER_TOKEN


def names_read(function: Family) -> set[str]:
    """Fields of the top level that a family reads or understands on its golden configs."""
    names: set[str] = set()
    for family, config in golden_models():
        if family is function:
            f, _ = language_part(Fields(config))
            draft_count(f)  # read for every model
            family(f)
            names |= f.read
    return names


# Widths and lengths that belong to other parts than a cache as well.
NOT_OF_A_CACHE = {
    *("dim", "d_model", "d_inner", "expand", "hidden_size", "n_embd", "n_embed", "vocab_size"),
    "max_source_positions",
}


def test_no_family_passes_over_a_field_that_another_one_reads() -> None:
    """For each family: every field that some other family reads is refused by name, as a list too."""
    read = {function: names_read(function) for function in set(FAMILIES.values())}
    of_any = set().union(*read.values()) - NOT_OF_A_CACHE - {"model_type", "dtype", "torch_dtype"}
    passed = []
    for function, config in dict(golden_models()).items():
        f, _ = language_part(Fields(config))
        draft_count(f)
        function(f)
        for name in sorted(of_any - f.read - set(config)):
            for value in ([1, 0], 3, {"a": 3}):
                if is_harmless(name, value) or is_other_part(name, value):
                    continue
                said = refusal({**config, name: value})
                if said is None or name not in said:
                    passed.append((config["model_type"], name, value, said))
    assert not passed


KIND_OF_WORD = {
    "chunked_attention": LayerKind.CHUNKED,
    "sliding_attention": LayerKind.WINDOW,
    "conv": LayerKind.SHORT_CONV,
}
PER_LAYER = ("layer_types", "layers_block_type", "attn_type_list", "hybrid_layer_pattern", "no_rope_layers")


@pytest.mark.parametrize(
    "entry", ["mystery", "chunked_attention", "sliding_attention", "conv", "Hybrid", "mamba3", 2, None, True]
)
def test_a_layer_type_that_the_family_does_not_handle_is_refused(entry: object) -> None:
    """One entry of another word in any per-layer list: refused with the list's name and the place."""
    checked = 0
    for _, config in golden_models():
        for name in PER_LAYER:
            if not isinstance(config.get(name), list):
                continue
            changed = copy.deepcopy(config)
            entries = changed[name]
            assert isinstance(entries, list)
            if entry in entries and type(entry) is type(entries[0]):
                continue
            entries[1] = entry
            said = refusal(changed)
            if said is None:  # the family handles this word; then the layer is of that kind
                kinds = [g.kind for g in ModelShape.from_config(changed).groups if 1 in g.layers]
                assert KIND_OF_WORD[entry] in kinds, (config, entry)
            else:
                assert name in said
            checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("model_type", "extra", "named"),
    [
        (
            "glm_moe_dsa",
            {"layer_types": ["deepseek_sparse_attention"] * 3 + ["sliding_attention"]},
            "layer_types",
        ),
        ("deepseek_v3", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
        ("gpt_bigcode", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("granite", {"layer_types": ["mamba"] * 4}, "layer_types"),
    ],
)
def test_a_family_of_one_kind_reads_a_list_of_layer_types_all_the_same(
    model_type: str, extra: dict[str, object], named: str
) -> None:
    """Families without a choice of layers refuse a list that gives them one."""
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    config = {**LLAMA, "model_type": model_type} | (latent if "kv" not in model_type else {}) | extra
    if model_type in {"gpt_bigcode", "granite"}:
        config = {name: value for name, value in config.items() if name not in latent}
    with pytest.raises(InputError, match=named):
        sized(config)


def test_two_fields_that_tell_the_layers_must_agree() -> None:
    """Where two fields say which layer is what, unlike answers are refused, like ones pass."""
    lfm2 = {**LLAMA, "model_type": "lfm2", "conv_L_cache": 3, "full_attn_idxs": [2]}
    types = ["conv", "conv", "full_attention", "conv"]
    assert sized({**lfm2, "layer_types": types}) == sized(lfm2)
    with pytest.raises(InputError, match="full_attn_idxs"):
        sized({**lfm2, "layer_types": types[::-1]})
    nemotron = next(config for _, config in golden_models() if "mtp_hybrid_override_pattern" in config)
    names = ["mamba", "attention", "mlp", "moe"]
    assert sized({**nemotron, "layers_block_type": names}) == sized(nemotron)
    with pytest.raises(InputError, match="hybrid_override_pattern"):
        sized({**nemotron, "layers_block_type": names[::-1]})


def test_several_names_of_one_field_must_agree() -> None:
    """KV heads under two names with unlike values: refused, not the first of them taken."""
    assert sized({**LLAMA, "n_kv_heads": 2}) == PER_TOKEN
    with pytest.raises(InputError, match="n_kv_heads: 4, but num_key_value_heads is 2"):
        sized({**LLAMA, "n_kv_heads": 4})


def broken(cacheless: tuple[int, ...], *layers: int) -> Family:
    """A family's function with a fault: these layers own a cache, those none, of four."""

    def function(f: Fields) -> FamilyShape:
        f.understands("num_attention_heads", "num_key_value_heads", "head_dim")
        return FamilyShape(4, (heads_group(LayerKind.FULL, layers, Heads(2, 64, 64)),), cacheless)

    return function


@pytest.mark.parametrize(
    ("cacheless", "layers", "named"),
    [
        ((), (0, 1, 3), "2"),
        ((2,), (0, 1), "3"),
        ((3,), (0, 1, 2, 3), "3"),
        ((), (0, 1, 2, 3, 4), "4"),
        ((), (0, 1, 1, 2, 3), "2 times"),
    ],
)
def test_every_layer_is_accounted_for(
    cacheless: tuple[int, ...], layers: tuple[int, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family that drops a layer, counts one twice, or both owns and disowns one, is never believed."""
    monkeypatch.setitem(FAMILIES, "llama", broken(cacheless, *layers))
    with pytest.raises(InputError, match=named):
        sized(LLAMA)


def test_accounting_lets_a_sound_family_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Owners and cacheless layers that make up all layers are believed."""
    monkeypatch.setitem(FAMILIES, "llama", broken((2,), 0, 1, 3))
    assert sized(LLAMA) == PER_TOKEN * 3 // 4


ENCODERS: dict[str, dict[str, object]] = {
    "bert": {"type_vocab_size": 2},
    "my_encoder": {},
    "distilbert": {},
    "vit": {"image_size": 224, "patch_size": 16, "num_channels": 3},
    "clip_text_model": {"projection_dim": 512},
    "brand_new": {"architectures": ["BrandNewForMaskedLM"]},
    "brand_newer": {"is_causal": False},
}


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_keeps_no_cache_and_is_refused(model_type: str) -> None:
    """An unknown model that is an encoder by its config is not sized as if it kept K and V."""
    with pytest.raises(InputError, match="no KV cache"):
        sized({**LLAMA, "model_type": model_type, **ENCODERS[model_type]})


def test_an_encoder_in_a_wrapper_is_refused() -> None:
    """CLIP's text part has no field of its own that tells; its wrapper has."""
    with pytest.raises(InputError, match="no KV cache"):
        sized({"model_type": "clip", "projection_dim": 512, "text_config": {**LLAMA, "model_type": "new"}})
    with pytest.raises(InputError, match="no KV cache"):
        sized({"model_type": "x", "architectures": ["XModel"], "text_config": {**LLAMA, "model_type": "new"}})


def test_fields_beside_the_text_part_of_an_unknown_wrapper_are_judged() -> None:
    """Copies of the text part's fields pass, other fields that say something are refused by name."""
    wrapper = {"model_type": "new_vlm", "text_config": LLAMA, "num_key_value_heads": 2, "vision_config": {}}
    assert sized(wrapper) == PER_TOKEN
    with pytest.raises(InputError, match="sliding_window"):
        sized({**wrapper, "sliding_window": 128})


def test_a_prompt_read_both_ways_still_leaves_a_cache() -> None:
    """PaliGemma's prompt attends in both directions and is cached; a Gemma that does so is an encoder."""
    text = {**LLAMA, "model_type": "gemma2", "sliding_window": 8, "use_bidirectional_attention": True}
    assert sized({"model_type": "paligemma", "text_config": text}) == PER_TOKEN
    for model_type in ("gemma2", "gemma3_text", "gemma"):
        assert "use_bidirectional_attention" in str(refusal({**text, "model_type": model_type}))


def test_known_wrappers_hold_a_known_text_part() -> None:
    """The text type that stands for one left out is a family, so that no known wrapper warns."""
    assert {text for text in WRAPPERS.values() if text not in FAMILIES} == set()
    for wrapper in WRAPPERS:
        config = {"model_type": wrapper, "text_config": {**LLAMA, "model_type": "llama"}}
        assert ModelShape.from_config(config).warnings == ()


def test_every_field_that_a_family_names_is_in_the_table_of_the_docs() -> None:
    """No name read in a family's source is missing from docs/models.md, fallbacks included."""
    documented = set(re.findall(r"[\w.\[\]]+", (ROOT / "docs" / "models.md").read_text("utf-8")))
    documented |= {part for path in documented for part in path.split(".")}
    readers = {"get", "has", "count", "optional", "flag", "text", "entries", "indices", "nested", "objects"}
    missing = set()
    for path in (ROOT / "src" / "kvferry" / "model" / "families").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            is_reader = isinstance(node.func, ast.Attribute) and node.func.attr in readers
            is_listing = isinstance(node.func, ast.Name) and node.func.id == "listed_layers"
            if is_reader or is_listing:
                names = [
                    a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
                ]
                missing |= {name for name in names if name and name not in documented}
    assert not missing


def test_configs_stay_json() -> None:
    """What the guard is tried with can be written as JSON, as every config can."""
    assert json.loads(json.dumps(SAYS_SOMETHING)) == SAYS_SOMETHING
