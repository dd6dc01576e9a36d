"""Sizes against cache tensors of transformers: models on the meta device, one forward pass.

Needs the extra ``verify`` (transformers and torch); skipped with the reason where it is missing.
MLP and MoE blocks are replaced by identities, because they hold no cache and MoE routing
cannot run on the meta device.

The cache of transformers is not what engines store and move, so four adjustments are made to
its byte count, each only where a case names it:

- ``window``: transformers keeps W-1 rows of a full window, because the next token adds its own
  before attending; engines hold W. Counted as W.
- ``conv``: transformers keeps K columns of a convolution's input; the next step needs K-1.
- ``state``: transformers keeps recurrent states in float32 (MiniMax: in the model's dtype);
  counted in the dtype that the config or the family's rule names.
- ``indexer``: transformers keeps DSA indexer keys in bf16; engines keep fp8 with a scale (132 bytes).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.model import ModelShape, TensorRole
from kvferry.model.class_defaults import CLASS_DEFAULTS
from kvferry.size import kv_size

pytest.importorskip("torch", reason="extra [verify] is not installed: no torch")
pytest.importorskip("transformers", reason="extra [verify] is not installed: no transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

HEADS: dict[str, object] = {
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_size": 512,
    "vocab_size": 128,
    "intermediate_size": 64,
}
MAMBA2: dict[str, object] = {
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
LATENT: dict[str, object] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": 64,
    "first_k_dense_replace": 8,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Case:
    """A model, how many tokens, and the adjustments that its cache needs."""

    model_type: str
    config: dict[str, object]
    tokens: int = 300
    adjustments: frozenset[str] = frozenset()
    only_transformers: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.model_type


def case(
    model_type: str, *parts: dict[str, object], adjust: str = "", tokens: int = 300, **more: object
) -> Case:
    merged: dict[str, object] = {}
    for part in parts:
        merged |= part
    return Case(model_type, merged | more, tokens, frozenset(adjust.split()))


CASES = [
    case("llama", HEADS),
    case("qwen2", HEADS, use_sliding_window=True, sliding_window=64, max_window_layers=5, adjust="window"),
    case("qwen3", HEADS, head_dim=128),
    case("gemma", HEADS, head_dim=256),
    case("gemma2", HEADS, head_dim=64, sliding_window=128, adjust="window"),
    case("gemma3_text", HEADS, head_dim=64, sliding_window=128, adjust="window"),
    case(
        "gemma3n_text",
        HEADS,
        num_hidden_layers=10,
        num_kv_shared_layers=5,
        head_dim=64,
        sliding_window=128,
        laurel_rank=8,
        adjust="window",
    ),
    case(
        "gemma4_text",
        HEADS,
        head_dim=64,
        global_head_dim=128,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        sliding_window=128,
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        adjust="window",
    ),
    case("mistral", HEADS, sliding_window=128, adjust="window"),
    case("phi3", HEADS, sliding_window=2047, pad_token_id=0),
    case("gpt_oss", HEADS, head_dim=64, sliding_window=128, adjust="window"),
    case("cohere2", HEADS, sliding_window=128, adjust="window"),
    case("exaone4", HEADS, sliding_window=128, sliding_window_pattern=4, adjust="window"),
    case("olmo3", HEADS, sliding_window=128, adjust="window"),
    case(
        "mimo_v2_flash",
        HEADS,
        head_dim=96,
        v_head_dim=64,
        sliding_window=128,
        adjust="window",
        swa_num_key_value_heads=8,
        layer_types=["full_attention", *["sliding_attention"] * 6, "full_attention"],
    ),
    case("llama4_text", HEADS, head_dim=64, attention_chunk_size=8192, intermediate_size_mlp=64),
    case(
        "falcon",
        HEADS,
        multi_query=True,
        new_decoder_architecture=False,
        alibi=False,
        num_key_value_heads=None,
    ),
    case("gpt_bigcode", {"n_layer": 4, "n_head": 8, "n_embd": 256, "vocab_size": 128, "multi_query": True}),
    case("bloom", {"n_layer": 4, "n_head": 8, "hidden_size": 256, "vocab_size": 128}),
    case(
        "opt",
        {
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "hidden_size": 256,
            "ffn_dim": 64,
            "word_embed_proj_dim": 256,
            "vocab_size": 128,
        },
    ),
    case("deepseek_v2", HEADS, LATENT),
    case("deepseek_v3", HEADS, LATENT),
    case("deepseek_v32", HEADS, LATENT, index_head_dim=128, index_n_heads=4, index_topk=64, adjust="indexer"),
    case(
        "glm_moe_dsa",
        HEADS,
        LATENT,
        index_head_dim=128,
        index_n_heads=4,
        index_topk=64,
        adjust="indexer",
        indexer_types=["full", "shared"] * 4,
    ),
    case(
        "longcat_flash",
        LATENT,
        num_layers=3,
        num_attention_heads=8,
        hidden_size=512,
        vocab_size=128,
        ffn_hidden_size=64,
        expert_ffn_hidden_size=64,
    ),
    case(
        "jamba",
        HEADS,
        attn_layer_period=4,
        attn_layer_offset=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=16,
        adjust="conv state",
    ),
    case("bamba", HEADS, MAMBA2, attn_layer_indices=[2, 5], adjust="conv state"),
    case(
        "granitemoehybrid",
        HEADS,
        MAMBA2,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        adjust="conv state",
    ),
    case("falcon_h1", HEADS, MAMBA2, mamba_d_ssm=1024, head_dim=32, adjust="conv state"),
    case(
        "nemotron_h",
        HEADS,
        hybrid_override_pattern="M-M*M-M*",
        mamba_num_heads=16,
        mamba_head_dim=64,
        n_groups=2,
        ssm_state_size=32,
        conv_kernel=4,
        head_dim=32,
        adjust="conv",
    ),
    case(
        "mamba",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "state_size": 16,
            "conv_kernel": 4,
            "expand": 2,
            "vocab_size": 128,
        },
        adjust="conv state",
    ),
    case(
        "mamba2",
        {
            "num_hidden_layers": 4,
            "hidden_size": 256,
            "state_size": 32,
            "conv_kernel": 4,
            "expand": 2,
            "num_heads": 8,
            "head_dim": 64,
            "n_groups": 2,
            "vocab_size": 128,
        },
        adjust="conv state",
    ),
    case(
        "zamba2",
        HEADS,
        num_key_value_heads=16,
        layers_block_type=["mamba", "mamba", "hybrid", "mamba"] * 2,
        mamba_d_state=32,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=2,
        n_mamba_heads=16,
        num_mem_blocks=1,
        adjust="conv state",
    ),
    case("lfm2", HEADS, full_attn_idxs=[2, 5], conv_L_cache=3, adjust="conv"),
    case(
        "qwen3_next",
        HEADS,
        head_dim=64,
        full_attention_interval=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        adjust="conv",
    ),
    case(
        "qwen3_5_text",
        HEADS,
        head_dim=64,
        layer_types=["linear_attention", "full_attention"] * 4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        mamba_ssm_dtype="float32",
        adjust="conv",
    ),
    case(
        "kimi_linear",
        HEADS,
        LATENT,
        adjust="conv",
        linear_attn_config={
            "full_attn_layers": [4, 8],
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "head_dim": 32,
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
    ),
    case(
        "minimax", HEADS, head_dim=32, layer_types=["linear_attention", "full_attention"] * 4, adjust="state"
    ),
    case(
        "whisper",
        {
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "d_model": 128,
            "num_mel_bins": 80,
            "vocab_size": 128,
            "pad_token_id": 0,
            "decoder_start_token_id": 1,
        },
    ),
    case(
        "t5",
        {
            "num_layers": 3,
            "num_decoder_layers": 3,
            "num_heads": 8,
            "d_kv": 64,
            "d_model": 128,
            "vocab_size": 128,
        },
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cache_tensors_have_the_size_computed(case: Case) -> None:
    """The bytes of the cache that transformers builds are logical_bytes, after the adjustments named."""
    shape = ModelShape.from_config({"model_type": case.model_type, **case.config})
    encoder = 77 if case.model_type == "t5" else None
    size = kv_size(shape, case.tokens, kv_dtype="bf16", encoder_tokens=encoder)
    cache = run_model(case)
    used: set[str] = set()
    total = sum(adjusted_nbytes(path, tensor, layer, shape, used) for path, tensor, layer in cache)
    assert (total, used) == (size.logical_bytes, set(case.adjustments))


@pytest.mark.parametrize("model_type", CLASS_DEFAULTS)
def test_class_defaults_are_those_of_the_config_class(model_type: str) -> None:
    """Every value that stands in for a field left out is the attribute of the model's config class."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    for name, value in CLASS_DEFAULTS[model_type].items():
        assert getattr(config_class, name) == value


def test_deepseek_v4_grows_by_its_slope_and_keeps_its_window() -> None:
    """From 2,048 to 4,096 tokens the cache of transformers grows by exactly 2,048 times the slope."""
    ratios = [0, 0, 4, 128, 4, 128]
    config: dict[str, object] = {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "head_dim": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "index_head_dim": 128,
        "index_n_heads": 4,
        "index_topk": 64,
        "compress_ratios": ratios,
        "sliding_window": 128,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 2,
        "vocab_size": 128,
        "moe_intermediate_size": 32,
    }
    shape = ModelShape.from_config({"model_type": "deepseek_v4", **config})
    totals = []
    for tokens in (2048, 4096):
        cache = run_model(Case("deepseek_v4", config, tokens))
        rows = [(path, tensor) for path, tensor, _ in cache if "keys" not in path]
        totals.append(sum(tensor.numel() * tensor.element_size() for _, tensor in rows))
        windows = [tensor.shape[-2] for path, tensor, _ in cache if "keys" in path]
        assert windows == [127] * 6
    grown = totals[1] - totals[0]
    ours = kv_size(shape, 4096, kv_dtype="bf16"), kv_size(shape, 2048, kv_dtype="bf16")
    assert grown == ours[0].logical_bytes - ours[1].logical_bytes
    assert grown == 2048 * ours[0].bytes_per_token


def adjusted_nbytes(path: str, tensor: Any, layer: Any, shape: ModelShape, used: set[str]) -> int:
    """Bytes of one cache tensor as engines store it; ``used`` collects the adjustments made."""
    count = tensor.numel()
    if "conv_states" in path:
        used.add("conv")
        return count // tensor.shape[-1] * (tensor.shape[-1] - 1) * tensor.element_size()
    if "recurrent_states" in path or "linear_cache" in path:
        itemsize = 4 if state_dtype(shape) == "fp32" else 2
        if itemsize != tensor.element_size():
            used.add("state")
        return count * itemsize
    if "indexer_keys" in path:
        used.add("indexer")
        return count // 128 * 132
    window = getattr(layer, "sliding_window", None)
    if window is not None and tensor.shape[-2] == window - 1:
        used.add("window")
        return count // (window - 1) * window * tensor.element_size()
    return count * tensor.element_size()


def state_dtype(shape: ModelShape) -> str | None:
    dtypes = {
        "fp32" if tensor.dtype in {"fp32", "float32"} else tensor.dtype
        for group in shape.groups
        for tensor in group.tensors
        if tensor.role is TensorRole.STATE
    }
    assert len(dtypes) == 1
    return dtypes.pop()


def run_model(case: Case) -> list[tuple[str, Any, Any]]:
    """One forward pass on the meta device; every cache tensor with its path and its cache layer."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(case.model_type, **case.config, **case.only_transformers)
    is_pair = case.model_type in {"whisper", "t5"}
    auto = transformers.AutoModel if is_pair else transformers.AutoModelForCausalLM
    with warnings.catch_warnings(), torch.device("meta"), torch.no_grad():
        warnings.simplefilter("ignore")
        model = auto.from_config(config, dtype=torch.bfloat16).eval()
        drop_mlps(model)
        ids = torch.zeros((1, case.tokens), dtype=torch.long)
        if case.model_type == "whisper":
            sound = torch.zeros((1, 80, 3000), dtype=torch.bfloat16)
            output = model(input_features=sound, decoder_input_ids=ids, use_cache=True)
        elif case.model_type == "t5":
            output = model(
                input_ids=torch.zeros((1, 77), dtype=torch.long), decoder_input_ids=ids, use_cache=True
            )
        else:
            output = model(input_ids=ids, use_cache=True)
    cache = output.get("past_key_values", None)
    cache = output.cache_params if cache is None else cache
    seen: set[int] = set()
    return list(cache_tensors(cache, "", None, seen))


def drop_mlps(model: Any) -> None:
    import torch

    class Identity(torch.nn.Module):
        def __init__(self, is_pair: bool) -> None:
            super().__init__()
            self.is_pair = is_pair

        def forward(self, *args: Any, **named: Any) -> Any:
            hidden_states = args[0] if args else next(iter(named.values()))
            return (hidden_states, None) if self.is_pair else hidden_states

    is_pair = model.config.model_type in {"gpt_oss", "llama4_text"}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child).__name__.lower()
            if kind.endswith(("mlp", "moe", "moeblock", "experts")):
                setattr(parent, name, Identity(is_pair))


def cache_tensors(value: Any, path: str, layer: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """All tensors of a cache, each once (DeepSeek V4's values are its keys)."""
    import torch

    if isinstance(value, torch.Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield path, value, layer
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from cache_tensors(entry, f"{path}.{name}", layer, seen)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from cache_tensors(entry, path, layer, seen)
    elif type(value).__module__.startswith("transformers"):
        inner = value if "Layer" in type(value).__name__ or hasattr(value, "lazy_initialization") else layer
        for name, entry in vars(value).items():
            if not name.startswith("_") and name != "config":
                yield from cache_tensors(entry, f"{path}.{name}", inner, seen)
