"""Families with Mamba layers, alone or between attention layers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.model.families.heads import (
    FULL_WORDS,
    Layers,
    agreed_layers,
    head_shape,
    listed_layers,
    split_evenly,
    split_layers,
)
from kvferry.model.families.state import ARITHMETIC, conv_tensor, state_tensor
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, group, heads_group, layer_count
from kvferry.model.shape import LayerGroup, LayerKind

__all__: list[str] = []

# transformers 5 calls every recurrent layer "linear_attention"; before it said "mamba".
_MAMBA2_WORDS: dict[str | int, LayerKind | None] = {
    "mamba": LayerKind.MAMBA2,
    "linear_attention": LayerKind.MAMBA2,
}


def _mamba1(f: Fields, layers: Iterable[int], inner: int, state: int, kernel: int) -> LayerGroup:
    tensors = conv_tensor(inner, 1, kernel), state_tensor(f, inner, state, None)
    return group(LayerKind.MAMBA1, layers, *tensors)


class _Mamba2(msgspec.Struct, frozen=True):
    """The numbers of a Mamba 2 layer, which every family names in its own way."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    def layer_group(self, f: Fields, layers: Iterable[int], rule: str | None = None) -> LayerGroup:
        """The convolution over x, B and C (B and C per group, replicated beyond them), and the state."""
        x = conv_tensor(self.heads, self.head_dim, self.kernel)
        b_and_c = conv_tensor(self.groups, 2 * self.state, self.kernel, is_replicable=True)
        state = state_tensor(f, self.heads, self.head_dim * self.state, rule)
        return group(LayerKind.MAMBA2, layers, x, b_and_c, state)


def _prefixed_mamba2(f: Fields, inner: int | None = None) -> _Mamba2:
    """Mamba 2 by the names of Bamba, Granite and Falcon-H1 (``mamba_n_heads``, ``mamba_d_head``, ...)."""
    heads = f.count("mamba_n_heads")
    _, head_dim = f.get("mamba_d_head")
    if head_dim is None or head_dim == "auto":
        name = "mamba_expand" if inner is None else "mamba_d_ssm"
        inner = f.count("mamba_expand") * f.count("hidden_size") if inner is None else inner
        width = split_evenly(f, name, inner, heads, "mamba_n_heads")
    else:
        width = f.count("mamba_d_head")
    return _Mamba2(heads, width, f.count("mamba_n_groups"), f.count("mamba_d_state"), f.count("mamba_d_conv"))


@family("mamba", "falcon_mamba")
def mamba(f: Fields) -> FamilyShape:
    """Mamba 1 in every layer."""
    num_layers = layer_count(f)
    inner = f.optional("intermediate_size", "d_inner") or f.count("expand", default=2) * f.count(
        "hidden_size"
    )
    state, kernel = f.count("state_size", default=16), f.count("conv_kernel", default=4)
    return FamilyShape(num_layers, (_mamba1(f, range(num_layers), inner, state, kernel),))


@family("mamba2")
def mamba2(f: Fields) -> FamilyShape:
    """Mamba 2 in every layer."""
    num_layers = layer_count(f)
    cell = _Mamba2(
        f.count("num_heads"),
        f.count("head_dim"),
        f.count("n_groups"),
        f.count("state_size"),
        f.count("conv_kernel"),
    )
    return FamilyShape(num_layers, (cell.layer_group(f, range(num_layers)),))


@family("jamba")
def jamba(f: Fields) -> FamilyShape:
    """Jamba: attention at ``attn_layer_offset`` of every ``attn_layer_period``, Mamba 1 elsewhere."""
    num_layers = layer_count(f)
    period, offset = f.count("attn_layer_period"), f.count("attn_layer_offset", minimum=0)
    full = [i for i in range(num_layers) if i % period == offset]
    rest = [i for i in range(num_layers) if i % period != offset]
    inner = f.count("mamba_expand") * f.count("hidden_size")
    cell = _mamba1(f, rest, inner, f.count("mamba_d_state"), f.count("mamba_d_conv"))
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, full, head_shape(f)), cell))


@family("bamba")
def bamba(f: Fields) -> FamilyShape:
    """Bamba: attention at ``attn_layer_indices``, Mamba 2 elsewhere."""
    num_layers = layer_count(f)
    listed = listed_layers(f, num_layers, _MAMBA2_WORDS | FULL_WORDS, "layers_block_type", "layer_types")
    full = f.indices("attn_layer_indices", num_layers)
    by_index = None
    if full is not None:
        by_index = ("attn_layer_indices", split_layers(num_layers, full, LayerKind.FULL, LayerKind.MAMBA2))
    told = agreed_layers(f, by_index, listed)
    if told is None:
        raise f.error("attn_layer_indices", "missing, and so is layers_block_type")
    cell = _prefixed_mamba2(f).layer_group(f, told[1][LayerKind.MAMBA2])
    return FamilyShape(
        num_layers, (heads_group(LayerKind.FULL, told[1][LayerKind.FULL], head_shape(f)), cell)
    )


@family("granitemoehybrid")
def granite_hybrid(f: Fields) -> FamilyShape:
    """Granite 4: ``layer_types`` of ``mamba`` and ``attention``."""
    num_layers = layer_count(f)
    told = listed_layers(f, num_layers, _MAMBA2_WORDS | FULL_WORDS, "layer_types", "layers_block_type")
    if told is None:
        raise f.error("layer_types", "missing from the config")
    layers = told[1][LayerKind.MAMBA2]
    full = heads_group(LayerKind.FULL, told[1][LayerKind.FULL], head_shape(f))
    f.understands("mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_n_heads")
    f.understands(*ARITHMETIC)
    # Without Mamba layers the file may leave their fields out.
    cell = _prefixed_mamba2(f).layer_group(f, layers) if layers else group(LayerKind.MAMBA2, ())
    return FamilyShape(num_layers, (full, cell))


@family("falcon_h1")
def falcon_h1(f: Fields) -> FamilyShape:
    """Falcon-H1: every layer has both attention and Mamba 2."""
    layers = range(layer_count(f))
    cell = _prefixed_mamba2(f, f.optional("mamba_d_ssm")).layer_group(f, layers)
    return FamilyShape(len(layers), (heads_group(LayerKind.FULL, layers, head_shape(f)), cell))


@family("zamba2")
def zamba2(f: Fields) -> FamilyShape:
    """Zamba 2: Mamba 2 in every layer; each call of the shared attention block owns its own cache."""
    num_layers = layer_count(f)
    listed = listed_layers(f, num_layers, _MAMBA2_WORDS | {"hybrid": LayerKind.FULL}, "layers_block_type")
    hybrid = f.indices("hybrid_layer_ids", num_layers)
    by_index = None
    if hybrid is not None:
        by_index = ("hybrid_layer_ids", split_layers(num_layers, hybrid, LayerKind.FULL, LayerKind.MAMBA2))
    told = agreed_layers(f, listed, by_index)
    if told is None:
        raise f.error("layers_block_type", "missing from the config")
    heads = f.count("num_attention_heads")
    hidden = f.count("hidden_size")
    width = f.optional("attention_head_dim") or split_evenly(f, "hidden_size", 2 * hidden, heads, "heads / 2")
    kv_heads = f.optional("num_key_value_heads", "num_query_groups") or heads
    # Of the shared block's weights and adapters; kv_channels is derived, and not what it uses.
    f.understands("attention_hidden_size", "kv_channels", "num_mem_blocks", "use_mem_rope")
    f.understands("use_shared_attention_adapter", "use_shared_attention_lora", "use_shared_block_lora")
    f.understands("gated_linear_unit", "use_mem_eff_path", "use_shared_mlp_adapter", "use_shared_mlp_lora")
    mamba_heads = f.count("n_mamba_heads")
    inner = f.count("mamba_expand") * hidden
    head_dim = f.optional("mamba_headdim") or split_evenly(
        f, "mamba_expand", inner, mamba_heads, "n_mamba_heads"
    )
    cell = _Mamba2(
        mamba_heads,
        head_dim,
        f.count("mamba_ngroups"),
        f.count("mamba_d_state", "state_size"),
        f.count("mamba_d_conv"),
    )
    full = heads_group(LayerKind.FULL, told[1][LayerKind.FULL], Heads(kv_heads, width, width, heads))
    return FamilyShape(num_layers, (full, cell.layer_group(f, range(num_layers))))


_NEMOTRON_WORDS: dict[str | int, LayerKind | None] = {
    **_MAMBA2_WORDS,
    **FULL_WORDS,
    "mlp": None,
    "moe": None,
}
_NEMOTRON_LETTERS: dict[str | int, LayerKind | None] = {
    "M": LayerKind.MAMBA2,
    "*": LayerKind.FULL,
    "-": None,
    "E": None,
}


@family("nemotron_h")
def nemotron_h(f: Fields) -> FamilyShape:
    """Nemotron-H: ``hybrid_override_pattern`` of M (Mamba 2), * (attention), - and E (no cache)."""
    declared = f.optional("num_hidden_layers")
    told = _nemotron_layers(f, declared, "hybrid_override_pattern", "layers_block_type", "layer_types")
    if told is None:
        raise f.error("hybrid_override_pattern", "missing from the config")
    num_layers, layers = told
    f.understands("expand")
    draft = _nemotron_layers(f, None, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    draft_groups = () if draft is None else _nemotron_groups(f, draft[1])
    return FamilyShape(
        num_layers,
        _nemotron_groups(f, layers),
        tuple(layers.get(None, ())),
        draft_layer=tuple(g for g in draft_groups if g.layers),
    )


def _nemotron_layers(f: Fields, declared: int | None, pattern: str, *lists: str) -> tuple[int, Layers] | None:
    """How many layers, and which are what: by a list of names, by a pattern of letters, or by both alike."""
    letters = f.text(pattern) or ""
    found = f.entries(*lists)
    if not letters and found is None:
        return None
    num_layers = declared or len(letters) or len(found[1] if found else ())
    spelt = Fields({**f.raw, pattern: list(letters) or None}, f.path)
    told = agreed_layers(
        f,
        listed_layers(f, num_layers, _NEMOTRON_WORDS, *lists),
        listed_layers(spelt, num_layers, _NEMOTRON_LETTERS, pattern),
    )
    return None if told is None else (num_layers, told[1])


def _nemotron_groups(f: Fields, layers: Layers) -> tuple[LayerGroup, ...]:
    cell = _Mamba2(
        f.count("mamba_num_heads"),
        f.count("mamba_head_dim"),
        f.count("n_groups", "mamba_n_groups"),
        f.count("ssm_state_size"),
        f.count("conv_kernel", "mamba_d_conv"),
    )
    full = heads_group(LayerKind.FULL, layers.get(LayerKind.FULL, ()), head_shape(f))
    return (full, cell.layer_group(f, layers.get(LayerKind.MAMBA2, ()), "fp32"))


@family("phi4flash")
def samba_y(f: Fields) -> FamilyShape:
    """Phi-4-mini-flash (SambaY): Mamba 1 and windows, then one full layer that the second half reads."""
    num_layers = layer_count(f)
    half = num_layers // 2
    every = f.count("mb_per_layer", default=2, minimum=2)
    if num_layers % 4:
        raise f.error("num_hidden_layers", f"{num_layers} is not a multiple of 4")
    recurrent = [i for i in range(half + 1) if i % every == 0]
    windows = [i for i in range(half + 1) if i % every]
    inner = f.count("mamba_expand", default=2) * f.count("hidden_size")
    cell = _mamba1(
        f, recurrent, inner, f.count("mamba_d_state", default=16), f.count("mamba_d_conv", default=4)
    )
    shape = head_shape(f)
    f.notes.append("phi4flash: the split of layers follows the published model code; it was not run")
    return FamilyShape(
        num_layers,
        (
            heads_group(LayerKind.FULL, (half + 1,), shape),
            heads_group(LayerKind.WINDOW, windows, shape, _samba_window(f, num_layers, windows)),
            cell,
        ),
        tuple(range(half + 2, num_layers)),
    )


def _samba_window(f: Fields, num_layers: int, windows: list[int]) -> int:
    """The one width: a number, or a list with it at every window layer and null elsewhere."""
    name, value = f.get("sliding_window")
    if not isinstance(value, list):
        return f.count("sliding_window")
    width = value[windows[0]] if len(value) > windows[0] else None
    if value != [width if i in windows else None for i in range(num_layers)]:
        raise f.error(name, f"needed: one width at the layers {windows}, null at the others")
    return f.whole(name, width, 1)
