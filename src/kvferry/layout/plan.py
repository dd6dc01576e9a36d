"""The copy plan: which bytes of the source's pool go where in the destination's, for one request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.clusters import ChunkGrid
from kvferry.layout.pieces import Template, coalesced, in_source_order, limited, paged_rows, slot_rows
from kvferry.layout.product import StridedPlan, strided_plan
from kvferry.layout.records import PoolLayout
from kvferry.layout.route import Part, Run, Selection, Shape, route
from kvferry.layout.segments import Blocks, Extent, Segments, held_blocks, live_entries, segments
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import Role

__all__ = ["CopyPlan", "PieceTable", "check_tables", "copy_plan", "source_pieces"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PieceTable:
    """The bytes of a request in the source's pool, in source order; the digests at export follow it.

    ``offset`` and ``nbytes``: int64, one a piece, coalesced. ``chunk_start``: int64, one a chunk and
    one more: chunk i is pieces ``chunk_start[i]:chunk_start[i + 1]``. ``chunk_id``: int64, names the
    chunk for this layout whatever part of the request moves. ``chunk_complete``: whether all bytes that
    the request has in that chunk are here.
    """

    offset: Int64
    nbytes: Int64
    chunk_start: Int64
    chunk_id: Int64
    chunk_complete: NDArray[np.bool_]

    @property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())


@dataclass(frozen=True, eq=False)
class CopyPlan:
    """Copies of ``nbytes[i]`` bytes from ``src_offset[i]`` to ``dst_offset[i]``, in source order.

    Offsets count from the start of either pool; neighbours that touch on both sides inside a
    chunk are one piece. Destination pieces never overlap. Chunks are as in ``PieceTable``: the
    destination's pieces of a complete chunk, in this order, are the same bytes as the source's.
    """

    src_offset: Int64
    dst_offset: Int64
    nbytes: Int64
    chunk_start: Int64
    chunk_id: Int64
    chunk_complete: NDArray[np.bool_]
    runs: tuple[tuple[Run, Template], ...] = ()

    @cached_property
    def total_nbytes(self) -> int:
        return int(self.nbytes.sum())

    @property
    def num_pieces(self) -> int:
        return self.nbytes.size

    @cached_property
    def product(self) -> StridedPlan | None:
        """The same copies as strided ones over many tensors at once, or None where that saves nothing."""
        plan = strided_plan([(run.src_offset, run.dst_offset, template) for run, template in self.runs])
        return plan if 0 < 2 * len(plan) <= self.num_pieces else None


def copy_plan(
    src: PoolLayout,
    dst: PoolLayout,
    src_tables: Sequence[BlockTable],
    dst_tables: Sequence[BlockTable],
    tokens: int,
    *,
    first_token: int = 0,
    layers: Collection[int] | None = None,
    parts: Collection[tuple[Role, int]] | None = None,
    head_range: tuple[int, int] | None = None,
    token_range: tuple[int, int] | None = None,
) -> CopyPlan:
    """Plan the copy of a request of ``tokens`` tokens between two pools, however unlike.

    Args:
        src, dst: the two layouts. What both hold moves: the layers and heads in common.
        src_tables, dst_tables: one table a group, in the order of that layout's groups.
        tokens: tokens that the request's cache covers.
        first_token: tokens [0, first_token) are at the destination already; what moves whole
            whatever decode holds (window tails, state, cross attention) moves all the same.
        layers: only these; None for all that both hold.
        parts: only these (role, part) pairs.
        head_range: only the model's heads [start, stop).
        token_range: only what tokens [start, stop) add, to push a request in parts while it is
            computed: parts that follow each other move each byte once. State and cross attention
            move with the part that ends at ``tokens``.

    Raises:
        IncompatibleError: the pair has no plan; the tensor and the field are named.
        InputError: a table is too short, has an id twice or out of range, or a number is wrong.
    """
    if head_range is not None and not 0 <= head_range[0] < head_range[1]:
        raise InputError(f"head_range: {head_range} is not a range of heads")
    selection = Selection(
        None if layers is None else tuple(sorted(layers)),
        None if parts is None else frozenset(parts),
        head_range,
    )
    extent = Extent(tokens, first_token, (0, tokens) if token_range is None else token_range)
    request = _Request(
        _Side("source", src, tuple(src_tables)), _Side("destination", dst, tuple(dst_tables)), extent
    )
    return _plan([(run, request.template(run.shape)) for run in route(src, dst, selection)])


def source_pieces(
    layout: PoolLayout,
    tables: Sequence[BlockTable],
    tokens: int,
    *,
    first_token: int = 0,
    layers: Collection[int] | None = None,
    parts: Collection[tuple[Role, int]] | None = None,
    head_range: tuple[int, int] | None = None,
    token_range: tuple[int, int] | None = None,
) -> PieceTable:
    """The pieces of a request in its own pool, in the order of every plan that reads from it.

    Arguments and errors as in ``copy_plan``.
    """
    plan = copy_plan(
        layout,
        layout,
        tables,
        tables,
        tokens,
        first_token=first_token,
        layers=layers,
        parts=parts,
        head_range=head_range,
        token_range=token_range,
    )
    return PieceTable(plan.src_offset, plan.nbytes, plan.chunk_start, plan.chunk_id, plan.chunk_complete)


def check_tables(layout: PoolLayout, tables: Sequence[BlockTable], tokens: int) -> None:
    """Raise InputError, as ``copy_plan`` would, unless ``tables`` hold a request of ``tokens`` tokens."""
    side, extent = _Side("block", layout, tuple(tables)), Extent(tokens, 0, (0, tokens))
    for index in range(len(layout.groups)):
        side.blocks(index, side.live(index, extent))


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    layout: PoolLayout
    tables: tuple[BlockTable, ...]

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.layout.groups):
            raise InputError(f"{self.name} tables: {len(self.tables)} for {len(self.layout.groups)} groups")

    def live(self, group: int, extent: Extent) -> tuple[int, int]:
        return live_entries(self.layout.groups[group], self.tables[group], extent)

    def blocks(self, group: int, span: tuple[int, int]) -> Blocks:
        return held_blocks(self.name, self.layout.groups[group], self.tables[group], span)


@dataclass(frozen=True, slots=True)
class _Request:
    """One call's tables and extent; templates and segments that shapes share are made once."""

    src: _Side
    dst: _Side
    extent: Extent
    templates: dict[Shape, Template] = field(default_factory=dict)
    cuts: dict[tuple[int, int, ChunkGrid], Segments] = field(default_factory=dict)

    def template(self, shape: Shape) -> Template:
        if shape not in self.templates:
            self.templates[shape] = self._template(shape)
        return self.templates[shape]

    def _template(self, shape: Shape) -> Template:
        start, stop = self.src.live(shape.src_group, self.extent.whole)
        if self.src.layout.groups[shape.src_group].is_state:
            stop *= shape.grid.entries_per_block  # a slot's entries are its bytes
            rows = [slot_rows(part, *self._blocks(shape, part)[1:], shape.grid) for part in shape.parts]
        else:
            rows = [paged_rows(part, self._cut(shape, part)) for part in shape.parts]
        return coalesced(in_source_order(rows, shape.grid), shape.grid, (start, stop))

    def _cut(self, shape: Shape, part: Part) -> Segments:
        key = (shape.src_group, part.dst_group, shape.grid)
        if key not in self.cuts:
            span, src, dst = self._blocks(shape, part)
            self.cuts[key] = segments(src, dst, shape.grid, span)
        return self.cuts[key]

    def _blocks(self, shape: Shape, part: Part) -> tuple[tuple[int, int], Blocks, Blocks]:
        """The entries that move, and the blocks that hold them on both sides."""
        span = self.src.live(shape.src_group, self.extent)
        there = self.dst.live(part.dst_group, self.extent)
        if there != span:
            raise InputError(
                f"destination table of group {self.dst.layout.groups[part.dst_group].name!r}:"
                f" it is for {there[1]} entries, the source has {span[1]}"
            )
        return span, self.src.blocks(shape.src_group, span), self.dst.blocks(part.dst_group, span)


def _plan(runs: Sequence[tuple[Run, Template]]) -> CopyPlan:
    """Shift each template by the offsets of its run's clusters, and put all one after the other."""
    runs = tuple((run, template) for run, template in runs if template.nbytes.size)
    counts = [run.src_offset.size * template.nbytes.size for run, template in runs]
    limited(sum(counts))
    first = np.cumsum([0, *counts])
    starts = [
        np.add.outer(at + np.arange(run.src_offset.size) * template.nbytes.size, template.chunk_start)
        for at, (run, template) in zip(first, runs, strict=False)
    ]
    return CopyPlan(
        src_offset=_flat([np.add.outer(run.src_offset, template.src) for run, template in runs]),
        dst_offset=_flat([np.add.outer(run.dst_offset, template.dst) for run, template in runs]),
        nbytes=_flat([_each_plane(run, template.nbytes) for run, template in runs]),
        chunk_start=_flat([*starts, first[-1:]]),
        chunk_id=_flat([np.add.outer(run.first_chunk_id, template.chunk_index) for run, template in runs]),
        chunk_complete=_flat([_each_plane(run, template.chunk_complete) for run, template in runs], np.bool_),
        runs=runs,
    )


def _each_plane(run: Run, column: NDArray[Any]) -> NDArray[Any]:
    return np.broadcast_to(column, (run.src_offset.size, column.size))


def _flat(arrays: list[NDArray[Any]], dtype: type[np.generic] = np.int64) -> NDArray[Any]:
    if len(arrays) == 1:  # one cluster: no copy of what ``ravel`` has just made
        return arrays[0].ravel()
    return np.concatenate([np.empty(0, dtype), *(array.ravel() for array in arrays)])
