"""A request's live entries, cut where either side's blocks or the source's chunks end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.bounds import check_int
from kvferry.layout.clusters import ChunkGrid
from kvferry.layout.records import GroupLayout
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import LayerKind

__all__ = ["Blocks", "Extent", "Segments", "held_blocks", "live_entries", "segments"]

Int64 = NDArray[np.int64]
MAX_TOKENS = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The blocks that hold a span on one side: ids (int64), from the block of the span's start on."""

    entries: int
    ids: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Runs of entries that lie in one block on both sides and in one chunk; int64 arrays, in order.

    ``start`` and ``count`` are entries of the request; ``*_block`` is a block id and ``*_entry``
    the place of the first entry inside that block.
    """

    start: Int64
    count: Int64
    src_block: Int64
    src_entry: Int64
    dst_block: Int64
    dst_entry: Int64


@dataclass(frozen=True, slots=True)
class Extent:
    """Which tokens move: of ``tokens``, decode holds [0, first_token), and this move is for ``token_range``.

    Raises InputError for numbers that contradict each other.
    """

    tokens: int
    first_token: int
    token_range: tuple[int, int]

    def __post_init__(self) -> None:
        check_int("tokens", self.tokens, 0, MAX_TOKENS)
        check_int("first_token", self.first_token, 0, self.tokens)
        start, stop = self.token_range
        check_int("token_range stop", stop, 0, self.tokens)
        check_int("token_range start", start, 0, stop)

    @property
    def whole(self) -> Extent:
        """The same request when all of it moves at once."""
        return Extent(self.tokens, 0, (0, self.tokens))


def live_entries(group: GroupLayout, table: BlockTable, extent: Extent) -> tuple[int, int]:
    """First and one past the last entry that moves.

    A prefix that decode already holds shortens only groups that keep every token: the window's
    tail, cross attention and recurrent state always move whole. Those that are not one entry a
    token (state, cross attention) are complete, and move, with the last part.
    """
    once = _entries_once(group, table)
    if once is not None:
        return (0, once if extent.token_range[1] == extent.tokens else 0)
    if table.tokens is not None:
        raise InputError(f"group {group.name!r}: only a cross-attention table states its own tokens")
    start = extent.first_token if group.window is None else group.first_live_token(extent.tokens)
    start, stop = max(start, extent.token_range[0]), extent.token_range[1]
    start, stop = start // group.tokens_per_entry, stop // group.tokens_per_entry
    return (start, stop) if start < stop else (0, 0)


def _entries_once(group: GroupLayout, table: BlockTable) -> int | None:
    """Entries of a group whose length is not the request's; None for the others."""
    if group.is_state:
        if not table.ids.size:
            raise InputError(f"group {group.name!r}: the block table names no state slot")
        return table.ids.size
    if group.kind is LayerKind.CROSS:
        if table.tokens is None:
            raise InputError(f"group {group.name!r}: a cross-attention table must state its tokens")
        return table.tokens
    return None


def held_blocks(side: str, group: GroupLayout, table: BlockTable, span: tuple[int, int]) -> Blocks:
    """The blocks that hold entries [start, stop). Raises InputError naming side and group."""
    where, entries, (start, stop) = f"{side} table of group {group.name!r}", group.entries_per_block, span
    if start == stop:
        return Blocks(entries, np.empty(0, np.int64))
    first, last = start // entries - table.first_block, -(-stop // entries) - table.first_block
    if first < 0 or last > table.ids.size:
        raise InputError(
            f"{where}: {table.ids.size} blocks from block {table.first_block} on,"
            f" but the request needs blocks {start // entries} to {(stop - 1) // entries}"
        )
    ids = table.ids[first:last].astype(np.int64)
    if ids.max() >= group.num_blocks:
        raise InputError(f"{where}: block id {ids.max()} is not below num_blocks {group.num_blocks}")
    ordered = np.sort(ids)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if twice.size:
        raise InputError(f"{where}: block id {twice[0]} comes twice")
    return Blocks(entries, ids)


def segments(src: Blocks, dst: Blocks, grid: ChunkGrid, span: tuple[int, int]) -> Segments:
    """Cut the span where a block of either side or a chunk ends."""
    start, stop = span
    if start == stop:
        return Segments(*[np.empty(0, np.int64)] * 6)
    edges = _block_edges(span, src.entries)
    if dst.entries != src.entries:
        edges = np.union1d(edges, _block_edges(span, dst.entries))
    if grid.cuts_blocks:
        first, last = grid.index(np.array([start, stop - 1]))
        edges = np.union1d(edges, grid.start(np.arange(first + 1, last + 1)))
    at = edges[:-1]
    src_index, src_entry = np.divmod(at, src.entries)
    dst_index, dst_entry = np.divmod(at, dst.entries)
    return Segments(
        start=at,
        count=np.diff(edges),
        src_block=src.ids[src_index - start // src.entries],
        src_entry=src_entry,
        dst_block=dst.ids[dst_index - start // dst.entries],
        dst_entry=dst_entry,
    )


def _block_edges(span: tuple[int, int], entries: int) -> Int64:
    """The start, the block borders after it, and the stop."""
    start, stop = span
    edges = np.arange(start // entries, -(-stop // entries) + 1, dtype=np.int64) * entries
    edges[0], edges[-1] = span
    return edges
