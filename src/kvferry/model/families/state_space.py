"""Families with Mamba layers, alone or between attention layers."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.model.families.heads import LAYER_TYPES, head_shape, layers_of, typed_layers
from kvferry.model.families.state import conv_tensor, state_tensor
from kvferry.model.fields import Fields
from kvferry.model.registry import FamilyShape, Heads, family, group, heads_group, layer_count
from kvferry.model.shape import LayerGroup, LayerKind

__all__: list[str] = []


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
        inner = f.count("mamba_expand") * f.count("hidden_size") if inner is None else inner
        if inner % heads:
            raise f.error("mamba_n_heads", f"{heads} does not divide the inner width {inner}")
        width = inner // heads
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
    full = f.counts("attn_layer_indices")
    if full is None or any(i >= num_layers for i in full):
        raise f.error("attn_layer_indices", f"layer indices below {num_layers} are needed")
    rest = sorted(set(range(num_layers)) - set(full))
    cell = _prefixed_mamba2(f).layer_group(f, rest)
    return FamilyShape(num_layers, (heads_group(LayerKind.FULL, sorted(full), head_shape(f)), cell))


@family("granitemoehybrid")
def granite_hybrid(f: Fields) -> FamilyShape:
    """Granite 4: ``layer_types`` of ``mamba`` and ``attention``."""
    num_layers = layer_count(f)
    types = layers_of(f, num_layers, "layer_types", "layers_block_type")
    if types is None:
        raise f.error("layer_types", "missing from the config")
    by_kind = typed_layers(
        f, types, LAYER_TYPES | {"mamba": LayerKind.MAMBA2, "linear_attention": LayerKind.MAMBA2}
    )
    full = heads_group(LayerKind.FULL, by_kind.get(LayerKind.FULL, ()), head_shape(f))
    layers = by_kind.get(LayerKind.MAMBA2)
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
    types = layers_of(f, num_layers, "layers_block_type")
    if types is None:
        raise f.error("layers_block_type", "missing from the config")
    hybrid = [i for i, name in enumerate(types) if name == "hybrid"]
    heads = f.count("num_attention_heads")
    hidden = f.count("hidden_size")
    width = f.optional("attention_head_dim") or 2 * hidden // heads
    kv_heads = f.optional("num_key_value_heads") or heads
    f.read.add("kv_channels")  # derived, and not what the shared block uses
    mamba_heads = f.count("n_mamba_heads")
    head_dim = f.optional("mamba_headdim") or f.count("mamba_expand") * hidden // mamba_heads
    cell = _Mamba2(
        mamba_heads, head_dim, f.count("mamba_ngroups"), f.count("mamba_d_state"), f.count("mamba_d_conv")
    )
    full = heads_group(LayerKind.FULL, hybrid, Heads(kv_heads, width, width))
    return FamilyShape(num_layers, (full, cell.layer_group(f, range(num_layers))))


_NEMOTRON_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_NEMOTRON_KINDS = {
    "mamba": LayerKind.MAMBA2,
    "linear_attention": LayerKind.MAMBA2,
    "attention": LayerKind.FULL,
    "full_attention": LayerKind.FULL,
    "mlp": None,
    "moe": None,
}


@family("nemotron_h")
def nemotron_h(f: Fields) -> FamilyShape:
    """Nemotron-H: ``hybrid_override_pattern`` of M (Mamba 2), * (attention), - and E (no cache)."""
    kinds = _nemotron_kinds(f, "hybrid_override_pattern", "layers_block_type", "layer_types")
    if kinds is None:
        raise f.error("hybrid_override_pattern", "missing from the config")
    declared = f.optional("num_hidden_layers")
    if declared is not None and declared != len(kinds):
        raise f.error("hybrid_override_pattern", f"{len(kinds)} entries for {declared} layers")
    draft = _nemotron_kinds(f, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    draft_groups = () if draft is None else _nemotron_groups(f, draft)
    return FamilyShape(
        len(kinds), _nemotron_groups(f, kinds), draft_layer=tuple(g for g in draft_groups if g.layers)
    )


def _nemotron_kinds(f: Fields, pattern: str, *lists: str) -> list[LayerKind | None] | None:
    """The kind of each layer (None: no cache), by a list of names or by a pattern of letters."""
    types = f.texts(*lists)
    if types is None:
        letters = f.text(pattern)
        if not letters:
            return None
        types = [_NEMOTRON_LETTERS.get(letter, letter) for letter in letters]
    for i, name in enumerate(types):
        if name not in _NEMOTRON_KINDS:
            raise f.error(pattern, f"layer {i} is of an unknown type {name!r}")
    return [_NEMOTRON_KINDS[name] for name in types]


def _nemotron_groups(f: Fields, kinds: list[LayerKind | None]) -> tuple[LayerGroup, ...]:
    cell = _Mamba2(
        f.count("mamba_num_heads"),
        f.count("mamba_head_dim"),
        f.count("n_groups", "mamba_n_groups"),
        f.count("ssm_state_size"),
        f.count("conv_kernel", "mamba_d_conv"),
    )
    full = [i for i, kind in enumerate(kinds) if kind is LayerKind.FULL]
    recurrent = [i for i, kind in enumerate(kinds) if kind is LayerKind.MAMBA2]
    return (heads_group(LayerKind.FULL, full, head_shape(f)), cell.layer_group(f, recurrent, "fp32"))


@family("phi4flash")
def samba_y(f: Fields) -> FamilyShape:
    """Phi-4-mini-flash (SambaY): Mamba 1 and windows, then one full layer that the second half reads."""
    num_layers = layer_count(f)
    half = num_layers // 2
    every = f.count("mb_per_layer", default=2)
    if num_layers % 4:
        raise f.error("num_hidden_layers", f"{num_layers} is not a multiple of 4")
    recurrent = [i for i in range(half + 1) if i % every == 0]
    windows = [i for i in range(half + 1) if i % every]
    inner = f.count("mamba_expand", default=2) * f.count("hidden_size")
    cell = _mamba1(
        f, recurrent, inner, f.count("mamba_d_state", default=16), f.count("mamba_d_conv", default=4)
    )
    shape = head_shape(f)
    _, listed = f.get("sliding_window")
    window = _one_window(f) if isinstance(listed, list) else f.count("sliding_window")
    f.notes.append("phi4flash: the split of layers follows the published model code; it was not run")
    return FamilyShape(
        num_layers,
        (
            heads_group(LayerKind.FULL, (half + 1,), shape),
            heads_group(LayerKind.WINDOW, windows, shape, limit_tokens=window),
            cell,
        ),
    )


def _one_window(f: Fields) -> int:
    """The one window of a per-layer list whose other entries are null."""
    _, listed = f.get("sliding_window")
    windows = {entry for entry in listed if entry is not None} if isinstance(listed, list) else set()
    if len(windows) != 1:
        raise f.error("sliding_window", "one width for all its window layers is needed")
    return Fields({"sliding_window": windows.pop()}, f.path).count("sliding_window")
