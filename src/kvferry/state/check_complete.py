"""Check 7: everything that this engine needs is there, nothing else, and in the right form.

The list comes from decode's own configuration. A peer that exports half a state, from a version
that forgot a kind of layer for instance, is found out here: engines' own import calls take
a recurrent model's state without the recurrent part and decode on.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.layout import LayerKind
from kvferry.state.cache import LayerState, TensorEntry, TensorKey
from kvferry.state.check import Case, Refusal
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import LayerNeed, Requirements, TensorSpec, TokenSource

__all__ = ["check_completeness", "layer_refusals", "tensor_refusals"]

_RECURRENT = (LayerKind.LINEAR, LayerKind.CONV)


def check_completeness(case: Case) -> Iterator[Refusal]:
    """Check 7: layers, scalars, tensors, groups and sections, compared both ways."""
    state, local = case.state, case.local
    yield from layer_refusals("layers", state.layers, local.layers, state.kv_tokens)
    yield from _encoder(state, local)
    encoder_tokens = 0 if state.encoder is None else state.encoder.cross_tokens
    yield from tensor_refusals("tensors", state.tensors, local.tensors(state.kv_tokens, encoder_tokens))
    yield from _groups(state, local)
    yield from _sections(state, local)


def layer_refusals(
    where: str, layers: tuple[LayerState, ...], needs: tuple[LayerNeed, ...], kv_tokens: int
) -> Iterator[Refusal]:
    """Layers against layers; also for a draft model."""
    found = {(layer.layer, layer.kind): layer for layer in layers}
    wanted = {(need.layer, need.kind): need for need in needs}
    if len(found) != len(layers):
        yield Refusal(where, "a layer and kind twice", "each once")
    for layer, kind in sorted(wanted.keys() - found.keys()):
        yield Refusal(f"{where} {layer}", "missing", kind.value)
    for layer, kind in sorted(found.keys() - wanted.keys()):
        yield Refusal(f"{where} {layer}", kind.value, "none of this kind")
    for key in sorted(found.keys() & wanted.keys()):
        yield from _layer(f"{where} {key[0]}", found[key], wanted[key], kv_tokens)


def _layer(where: str, layer: LayerState, need: LayerNeed, kv_tokens: int) -> Iterator[Refusal]:
    if layer.window != need.window:
        yield Refusal(f"{where}.window", layer.window, need.window)
    if need.record_past is not None and layer.record_past != need.record_past:
        yield Refusal(f"{where}.record_past", layer.record_past, need.record_past)
    if need.kind is LayerKind.SLIDING and layer.cumulative_length is None:
        yield Refusal(f"{where}.cumulative_length", "missing", f"{kv_tokens}, the tokens seen")
    if need.kind is LayerKind.COMPRESSED and layer.entry_count is None:
        yield Refusal(f"{where}.entry_count", "missing", "the rows of the compressed cache")
    if need.kind in _RECURRENT and kv_tokens and layer.has_previous_state is not True:
        why = "without it the layer starts anew, as if its state were lost"
        yield Refusal(f"{where}.has_previous_state", layer.has_previous_state, True, why)


def tensor_refusals(
    where: str, entries: tuple[TensorEntry, ...], specs: tuple[TensorSpec, ...]
) -> Iterator[Refusal]:
    """Tensors against tensors; also for a draft model."""
    found = {entry.key: entry for entry in entries}
    wanted = {spec.key: spec for spec in specs}
    if len(found) != len(entries):
        yield Refusal(where, "a tensor twice", "each once")
    for key, spec in wanted.items():
        if key not in found:
            yield Refusal(name_tensor(where, key), "missing", f"{spec.dtype}{list(spec.shape)}")
    for key, entry in found.items():
        if key not in wanted:
            yield Refusal(name_tensor(where, key), f"{entry.dtype}{list(entry.shape)}", "no such tensor")
        else:
            yield from _tensor(name_tensor(where, key), entry, wanted[key])


def _tensor(where: str, entry: TensorEntry, spec: TensorSpec) -> Iterator[Refusal]:
    scheme = None if entry.quantisation is None else entry.quantisation.scheme
    for field, found, expected in (
        ("dtype", entry.dtype, spec.dtype),
        ("axes", _words(entry.axes), _words(spec.axes)),
        ("shape", list(entry.shape), list(spec.shape)),
        ("quantisation", scheme, spec.scheme),
        ("group", entry.group, spec.group),
        ("alias_of", _name(entry.alias_of), _name(spec.alias_of)),
    ):
        if found != expected:
            yield Refusal(f"{where}.{field}", found, expected)
    places = [place for place in (entry.group, entry.section, entry.alias_of) if place is not None]
    if len(places) != 1:
        yield Refusal(f"{where} bytes", f"in {len(places)} places", "one of group, section and alias_of")


def _encoder(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    needs_encoder = any(need.rows.of_encoder for need in local.cache)
    if needs_encoder != (state.encoder is not None):
        found = "missing" if state.encoder is None else "there"
        yield Refusal(
            "encoder", found, "there" if needs_encoder else "none: there is no cross attention here"
        )


def _groups(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    names = [blocks.group for blocks in state.blocks]
    drafts = state.draft is not None
    wanted = {need.group: need for need in local.groups if drafts or need.covers is not TokenSource.DRAFT}
    if len(set(names)) != len(names):
        yield Refusal("blocks", "a group twice", "each once")
    for name in sorted(wanted.keys() - set(names)):
        yield Refusal(f"blocks {name!r}", "missing", "a block table")
    for blocks in state.blocks:
        if (need := wanted.get(blocks.group)) is None:
            yield Refusal(f"blocks {blocks.group!r}", "there", "no such group")
        elif (blocks.block_tokens is None) != (need.block_tokens is None):
            yield Refusal(f"blocks {blocks.group!r}.block_tokens", blocks.block_tokens, need.block_tokens)


def _sections(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    """Every section is the place of exactly one tensor, or its scales, or is opaque and expected."""
    tensors = state.tensors + (() if state.draft is None else state.draft.tensors)
    places = [entry.section for entry in tensors]
    places += [entry.quantisation.scales for entry in tensors if entry.quantisation is not None]
    used = [*(place for place in places if place is not None), *local.sections]
    names = [section.name for section in state.sections]
    for name in dict.fromkeys(used + names):
        found, expected = names.count(name), used.count(name)
        if (found, expected) != (1, 1):
            yield Refusal(f"section {name!r}", f"there {found} times, named {expected} times", "once each")


def name_tensor(where: str, key: TensorKey) -> str:
    """A tensor in words."""
    return f"{where} layer {key.layer} {key.role.value}" + (f" part {key.part}" if key.part else "")


def _words(axes: tuple[object, ...]) -> str:
    return " ".join(str(axis) for axis in axes)


def _name(key: TensorKey | None) -> str | None:
    return None if key is None else name_tensor("", key).strip()
