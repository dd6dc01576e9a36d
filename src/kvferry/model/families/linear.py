"""Families with linear attention or short convolutions between attention layers."""

from __future__ import annotations

from kvferry.model.families.heads import LAYER_TYPES, head_shape, layers_of, typed_layers
from kvferry.model.families.latent import latent_group
from kvferry.model.families.state import conv_tensor, state_tensor
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, family, group, heads_group, layer_count
from kvferry.model.shape import LayerKind

__all__: list[str] = []


@family("lfm2", "lfm2_moe")
def lfm2(f: Fields) -> FamilyShape:
    """LFM2: short convolutions over the hidden width, attention in between; no other state."""
    num_layers = layer_count(f)
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        full_layers = f.counts("full_attn_idxs")
        if full_layers is None:
            raise f.error("layer_types", "missing, and so is full_attn_idxs")
        types = ["full_attention" if i in full_layers else "conv" for i in range(num_layers)]
    by_kind = typed_layers(f, types, LAYER_TYPES | {"conv": LayerKind.SHORT_CONV})
    conv = conv_tensor(f.count("hidden_size"), 1, f.count("conv_L_cache"))
    full = heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), head_shape(f))
    return FamilyShape(
        num_layers, (full, group(LayerKind.SHORT_CONV, by_kind.get(LayerKind.SHORT_CONV, ()), conv))
    )


@family("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "olmo_hybrid")
def gated_delta(f: Fields) -> FamilyShape:
    """Qwen3-Next and Qwen3.5: gated delta net, every ``full_attention_interval``-th layer full."""
    num_layers = layer_count(f)
    period = f.optional("full_attention_interval") or 4
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        types = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(num_layers)]
    by_kind = typed_layers(f, types, LAYER_TYPES | {"linear_attention": LayerKind.GATED_DELTA})
    k_heads, k_dim = f.count("linear_num_key_heads"), f.count("linear_key_head_dim")
    v_heads, v_dim = f.count("linear_num_value_heads"), f.count("linear_value_head_dim")
    kernel = f.count("linear_conv_kernel_dim")
    state = state_tensor(f, v_heads, v_dim * k_dim, "fp32")
    linear = group(
        LayerKind.GATED_DELTA,
        by_kind.get(LayerKind.GATED_DELTA, ()),
        conv_tensor(k_heads, 2 * k_dim, kernel),
        conv_tensor(v_heads, v_dim, kernel),
        state,
    )
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), head_shape(f)), linear)
    )


@family("kimi_linear")
def kimi_linear(f: Fields) -> FamilyShape:
    """Kimi-Linear: KDA with a float32 state, MLA at ``full_attn_layers`` (counted from 1)."""
    num_layers = layer_count(f)
    inner = f.nested("linear_attn_config")
    if inner is None:  # as transformers writes it back
        types = layers_of(f, num_layers, "layer_types") or []
        by_kind = typed_layers(f, types, LAYER_TYPES | {"linear_attention": LayerKind.KDA})
        full, kda = by_kind.get(LayerKind.FULL, []), by_kind.get(LayerKind.KDA, [])
        heads, width = f.count("linear_num_heads"), f.count("linear_head_dim")
        kernel = f.count("linear_conv_kernel_dim")
    else:
        full = [i - 1 for i in inner.counts("full_attn_layers") or ()]
        kda = [i - 1 for i in inner.counts("kda_layers") or ()]
        heads, width = inner.count("num_heads"), inner.count("head_dim")
        kernel = inner.count("short_conv_kernel_size")
    if sorted(full + kda) != list(range(num_layers)):
        raise f.error("linear_attn_config", f"each of the {num_layers} layers must be full or KDA, once")
    conv, state = conv_tensor(heads, 3 * width, kernel), state_tensor(f, heads, width**2, "fp32")
    return FamilyShape(
        num_layers, (latent_group(f, sorted(full)), group(LayerKind.KDA, sorted(kda), conv, state))
    )


@family("minimax", "minimax_text_01", "minimax_m1")
def minimax(f: Fields) -> FamilyShape:
    """MiniMax-01: lightning attention (one state per head, no convolution) and softmax layers."""
    num_layers = layer_count(f)
    types = layers_of(f, num_layers, "layer_types")
    if types is None:
        numbers = f.counts("attn_type_list")
        if numbers is None or len(numbers) != num_layers:
            raise f.error("layer_types", "missing, and so is an attn_type_list of that many layers")
        types = ["full_attention" if number else "linear_attention" for number in numbers]
    by_kind = typed_layers(f, types, LAYER_TYPES | {"linear_attention": LayerKind.LIGHTNING})
    shape = head_shape(f)
    heads = f.count("num_attention_heads")
    state = state_tensor(f, heads, shape.k_dim**2, "fp32")
    full = heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), shape)
    return FamilyShape(
        num_layers, (full, group(LayerKind.LIGHTNING, by_kind.get(LayerKind.LIGHTNING, ()), state))
    )
