"""What the transformers engine needs of a state, and what it says of a cache in one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.engines.base import BlockTables
from kvferry.engines.grammar import grammar_kinds
from kvferry.engines.record import Cache
from kvferry.engines.transformers.assisted import DRAFT_PREFIX, Drafter
from kvferry.engines.transformers.form import LAYOUT, CacheForm
from kvferry.engines.transformers.model import ModelCache, TransformersModel
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout
from kvferry.state import (
    Conversion,
    Encoder,
    GroupBlocks,
    GroupNeed,
    Requirements,
    RngKind,
    SequencePosition,
    TokenSource,
)

__all__ = ["describe_cache", "positions", "requirements"]


def requirements(
    model: TransformersModel, layout: PoolLayout, drafter: Drafter | None = None
) -> Requirements:
    """From the local model alone. Layout and block size keep the bits: tensors are put together first."""
    form = model.form.beside(model.cross_form)
    return Requirements(
        fingerprint=model.fingerprint(),
        layers=form.layers,
        cache=tuple(tensor.need() for tensor in form.tensors),
        groups=tuple(GroupNeed.of(group, layout=LAYOUT, covers=_covers(group)) for group in layout.groups),
        rng_kinds=(RngKind.TORCH_MT19937_CPU,),
        grammar_kinds=grammar_kinds(),
        draft=None if drafter is None else drafter.need(),
        proven=(Conversion.LAYOUT, Conversion.BLOCK_TOKENS),
    )


def describe_cache(
    model: TransformersModel, layout: PoolLayout, tables: BlockTables, tokens: int, held: ModelCache
) -> Cache:
    """A cache that lies in ``tables`` and has seen ``tokens`` tokens, as it goes into the record."""
    form = model.form.beside(model.cross_form)
    cross_tokens = held.cross_tokens
    encoder = Encoder(cross_tokens=cross_tokens, digest=held.encoder_digest) if held.cross else None
    return Cache(
        layers=form.layer_states(tokens, cross_tokens),
        tensors=form.entries(tokens, cross_tokens),
        blocks=tuple(
            GroupBlocks.of(
                group.name, _covered(group, table, tokens), block_tokens=group.block_size, layout=LAYOUT
            )
            for group, table in zip(layout.groups, tables, strict=True)
        ),
        encoder=encoder,
    )


def positions(
    model: TransformersModel,
    layout: PoolLayout,
    held: ModelCache,
    tokens: int,
    drafter: Drafter | None = None,
) -> tuple[SequencePosition, ...]:
    """How far each group reaches by the word of the rebuilt layers themselves."""
    found = []
    for group in layout.groups:
        form, layers = model.form, held.layers
        if group.kind is LayerKind.CROSS:
            form, layers = model.cross_form, held.cross
        elif drafter is not None and held.draft is not None and group.name.startswith(DRAFT_PREFIX):
            form, layers = drafter.form, held.draft.layers
        found.append(_position(form, layers, group, tokens))
    return tuple(found)


def _position(form: CacheForm, layers: list[Any], group: GroupLayout, tokens: int) -> SequencePosition:
    at = {tensor.at for tensor in form.tensors if tensor.group == group.name}
    seen = {count for index in at for count in _seen(layers[index], group, tokens)}
    if len(seen) != 1:
        return SequencePosition(group=group.name, first_token=None, num_tokens=None)
    reached = seen.pop()
    first = 0 if group.window is None else max(0, reached - group.window)
    return SequencePosition(group=group.name, first_token=first, num_tokens=reached)


def _seen(layer: Any, group: GroupLayout, tokens: int) -> Iterator[int]:
    """Tokens that a layer says it has seen; a recurrent one only knows that it has seen some."""
    if getattr(layer, "keys", None) is not None:
        yield int(layer.get_seq_length())
    if group.is_state and hasattr(layer, "has_previous_state"):
        yield tokens if all(layer.has_previous_state.values()) else 0


def _covers(group: GroupLayout) -> TokenSource:
    if group.kind is LayerKind.CROSS:
        return TokenSource.ENCODER
    return TokenSource.DRAFT if group.name.startswith(DRAFT_PREFIX) else TokenSource.REQUEST


def _covered(group: GroupLayout, table: BlockTable, tokens: int) -> BlockTable:
    """The part of a table that holds ``tokens`` tokens."""
    if group.block_size is None or group.kind is LayerKind.CROSS:
        return table
    stop = -(-tokens // group.block_size) - table.first_block
    return BlockTable(table.first_block, table.ids[:stop])
