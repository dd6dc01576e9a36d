"""Which tensor of one layout is which of another, and why a pair of layouts has no plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import MappingProxyType

from kvferry.layout.conversion import Conversions, conversion_refusals
from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout
from kvferry.layout.words import Role

__all__ = ["Key", "Place", "layer_ranges", "mismatches", "places"]

Key = tuple[int, Role, int]
Place = tuple[int, TensorLayout]


@lru_cache(maxsize=16)
def places(layout: PoolLayout) -> MappingProxyType[Key, Place]:
    """(layer, role, part) -> (index of its group, the tensor)."""
    return MappingProxyType(
        {
            (tensor.layer, tensor.role, tensor.part): (index, tensor)
            for index, group in enumerate(layout.groups)
            for tensor in group.tensors
        }
    )


def mismatches(src: PoolLayout, dst: PoolLayout, allowed: Conversions | None = None) -> tuple[str, ...]:
    """Why no plan can copy between two layouts, in words, each naming the tensor and the field.

    Empty when a plan exists for the layers that both hold, or, with ``allowed``, one that converts.
    Without conversions the order of the two does not matter except in the wording ("this against
    that"); with them it does: bfloat16 widens to float32 exactly and not back. Unlike block sizes,
    strides, axis orders, head ranges and layer sets are no mismatch. That ranks together cover every
    layer and head is ``rank_plan``'s to say. Raises nothing.
    """
    ours, theirs = places(src), places(dst)
    shared = {layer for layer, _, _ in ours} & {layer for layer, _, _ in theirs}
    if not shared:
        return (f"layers: {layer_ranges(src.layers)} against {layer_ranges(dst.layers)}, none in common",)
    found: defaultdict[str, set[int]] = defaultdict(set)
    for key in sorted(ours.keys() | theirs.keys()):
        layer, role, part = key
        if layer not in shared:
            continue
        name = role.value + (f" part {part}" if part else "")
        if key in ours and key in theirs:
            for reason in _unlike(src, ours[key], dst, theirs[key], allowed):
                found[f"{name} {reason}"].add(layer)
        else:
            found[
                f"{name}: {'held' if key in ours else 'none'} against {'held' if key in theirs else 'none'}"
            ].add(layer)
    return tuple(f"{reason} (layers {layer_ranges(layers)})" for reason, layers in found.items())


def _unlike(
    src: PoolLayout, ours: Place, dst: PoolLayout, theirs: Place, allowed: Conversions | None
) -> Iterator[str]:
    (group_index, a), (other_index, b) = ours, theirs
    group, other = src.groups[group_index], dst.groups[other_index]
    yield from conversion_refusals(a, b, allowed)
    for field, this, that in (
        ("head_dim", a.head_dim, b.head_dim),
        ("kind", group.kind.value, other.kind.value),
        ("window", group.window, other.window),
        ("tokens_per_entry", group.tokens_per_entry, other.tokens_per_entry),
        ("block_size", _form(group), _form(other)),
    ):
        if this != that:
            yield f"{field}: {this} against {that}"


def _form(group: GroupLayout) -> str:
    return "state slots" if group.is_state else "blocks of tokens"


def layer_ranges(layers: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
