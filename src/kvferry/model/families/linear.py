"""Families with linear attention or short convolutions between attention layers."""

from __future__ import annotations

from kvferry.model.families.heads import (
    Layers,
    agreed_layers,
    check_same,
    head_shape,
    listed_layers,
    split_layers,
)
from kvferry.model.families.latent import latent_group
from kvferry.model.families.state import conv_tensor, state_tensor
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, family, group, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__: list[str] = []

_FULL: dict[str | int, LayerKind | None] = {"full_attention": LayerKind.FULL}

# A "block" is an MLP here.
_LFM2_MLP = (
    "block__name_mlp",
    "block_auto_adjust_ff_dim",
    "block_dim",
    "block_ff_dim",
    "block_ffn_dim_multiplier",
    "block_ffn_te_autocast",
    "block_ffn_use_quantized_params",
    "block_mlp_init_scale",
    "block_multiple_of",
    "block_out_init_scale",
    "block_sequence_parallel_norm_across_tp",
    "block_use_swiglu",
    "block_use_xavier_init",
)


@family("lfm2", "lfm2_moe")
def lfm2(f: Fields) -> FamilyShape:
    """LFM2: short convolutions over the hidden width, attention in between; no other state."""
    num_layers = layer_count(f)
    listed = listed_layers(f, num_layers, _FULL | {"conv": LayerKind.SHORT_CONV}, "layer_types")
    full = f.indices("full_attn_idxs", num_layers)
    by_index = None
    if full is not None:
        layers = split_layers(num_layers, full, LayerKind.FULL, LayerKind.SHORT_CONV)
        by_index = ("full_attn_idxs", layers)
    told = agreed_layers(f, listed, by_index)
    if told is None:
        raise f.error("layer_types", "missing, and so is full_attn_idxs")
    f.understands(*_LFM2_MLP, "conv_bias", "conv_use_xavier_init")
    width = f.count("hidden_size", "conv_dim", "conv_dim_out")
    conv = conv_tensor(width, 1, f.count("conv_L_cache"))
    heads = head_shape(f)
    if (f.optional("num_heads") or heads.query_heads) != heads.query_heads:
        raise f.error("num_heads", f"is not num_attention_heads {heads.query_heads}")
    groups = (
        heads_group(LayerKind.FULL, told[1][LayerKind.FULL], heads),
        group(LayerKind.SHORT_CONV, told[1][LayerKind.SHORT_CONV], conv),
    )
    return FamilyShape(num_layers, groups)


@family("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
def gated_delta(f: Fields) -> FamilyShape:
    """Qwen3-Next and Qwen3.5: gated delta net, every ``full_attention_interval``-th layer full."""
    num_layers = layer_count(f)
    period = f.optional("full_attention_interval") or 4
    told = listed_layers(f, num_layers, _FULL | {"linear_attention": LayerKind.GATED_DELTA}, "layer_types")
    layers = told[1] if told is not None else _every(num_layers, period)
    k_heads, k_dim = f.count("linear_num_key_heads"), f.count("linear_key_head_dim")
    v_heads, v_dim = f.count("linear_num_value_heads"), f.count("linear_value_head_dim")
    kernel = f.count("linear_conv_kernel_dim")
    f.understands("linear_a_log_max", "linear_allow_neg_eigval")  # of OLMo hybrid: how the state decays
    f.understands("linear_dt_init_floor", "linear_dt_max", "linear_dt_min")
    state = state_tensor(f, v_heads, v_dim * k_dim, "fp32")
    linear = group(
        LayerKind.GATED_DELTA,
        layers[LayerKind.GATED_DELTA],
        conv_tensor(k_heads, 2 * k_dim, kernel),
        conv_tensor(v_heads, v_dim, kernel),
        state,
    )
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, layers[LayerKind.FULL], head_shape(f)), linear)
    )


def _every(num_layers: int, period: int) -> Layers:
    full = range(period - 1, num_layers, period)
    return split_layers(num_layers, full, LayerKind.FULL, LayerKind.GATED_DELTA)


@family("kimi_linear")
def kimi_linear(f: Fields) -> FamilyShape:
    """Kimi-Linear: KDA with a float32 state, MLA at ``full_attn_layers`` (counted from 1)."""
    num_layers = layer_count(f)
    listed = listed_layers(f, num_layers, _FULL | {"linear_attention": LayerKind.KDA}, "layer_types")
    inner = f.nested("linear_attn_config")
    if inner is None:  # as transformers writes it back
        if listed is None:
            raise f.error("linear_attn_config", "missing, and so is layer_types")
        layers = listed[1]
        heads, width = f.count("linear_num_heads"), f.count("linear_head_dim")
        kernel = f.count("linear_conv_kernel_dim")
    else:
        layers = _kimi_layers(inner, num_layers)
        if listed is not None:
            check_same(f, "layer_types", listed[1], "linear_attn_config", layers)
        heads, width = inner.count("num_heads"), inner.count("head_dim")
        kernel = inner.count("short_conv_kernel_size")
        inner.understands("use_full_rank_gate")
        f.understands("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    f.understands("mla_use_nope")  # the cached part for positions stays, without rotation
    conv, state = conv_tensor(heads, 3 * width, kernel), state_tensor(f, heads, width**2, "fp32")
    groups = (
        latent_group(f, layers[LayerKind.FULL]),
        group(LayerKind.KDA, layers[LayerKind.KDA], conv, state),
    )
    return FamilyShape(num_layers, groups)


def _kimi_layers(inner: Fields, num_layers: int) -> Layers:
    """The layers by ``full_attn_layers`` and ``kda_layers``, both counted from 1; each layer is in one."""
    full = [i - 1 for i in inner.indices("full_attn_layers", num_layers + 1) or ()]
    kda = [i - 1 for i in inner.indices("kda_layers", num_layers + 1) or ()]
    if sorted(full + kda) != list(range(num_layers)):
        raise inner.error(
            "kda_layers", f"with full_attn_layers it must name each of {num_layers} layers once"
        )
    return split_layers(num_layers, full, LayerKind.FULL, LayerKind.KDA)


@family("minimax", "minimax_text_01", "minimax_m1")
def minimax(f: Fields) -> FamilyShape:
    """MiniMax-01: lightning attention (one state per head, no convolution) and softmax layers."""
    num_layers = layer_count(f)
    words: dict[str | int, LayerKind | None] = {1: LayerKind.FULL, 0: LayerKind.LIGHTNING}
    told = agreed_layers(
        f,
        listed_layers(f, num_layers, _FULL | {"linear_attention": LayerKind.LIGHTNING}, "layer_types"),
        listed_layers(f, num_layers, words, "attn_type_list"),
    )
    if told is None:
        raise f.error("layer_types", "missing, and so is attn_type_list")
    f.understands("block_size")  # of the kernel
    for kind in ("full", "linear"):  # residual weights, by both generations' names
        f.understands(f"{kind}_attn_alpha_factor", f"{kind}_attn_beta_factor")
    for kind in ("full_attention", "linear_attention"):
        f.understands(f"layernorm_{kind}_alpha", f"layernorm_{kind}_beta")
    shape = head_shape(f)
    state = state_tensor(f, f.count("num_attention_heads"), shape.k_dim**2, "fp32")
    groups = (
        heads_group(LayerKind.FULL, told[1][LayerKind.FULL], shape),
        group(LayerKind.LIGHTNING, told[1][LayerKind.LIGHTNING], state),
    )
    return FamilyShape(num_layers, groups)
