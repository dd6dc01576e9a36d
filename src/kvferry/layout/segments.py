"""A request's live entries, cut where either side's blocks or the source's chunks end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.clusters import ChunkGrid
from kvferry.layout.records import GroupLayout
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import LayerKind

__all__ = ["Blocks", "Segments", "held_blocks", "live_entries", "segments"]

Int64 = NDArray[np.int64]


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


def live_entries(group: GroupLayout, table: BlockTable, tokens: int, first_token: int) -> tuple[int, int]:
    """First and one past the last entry that moves.

    A prefix that decode already holds (``first_token``) shortens only groups that keep every
    token. The window's tail, cross attention and recurrent state always move whole.
    """
    if group.is_state:
        if not table.ids.size:
            raise InputError(f"group {group.name!r}: the block table names no state slot")
        return 0, table.ids.size
    if group.kind is LayerKind.CROSS:
        if table.tokens is None:
            raise InputError(f"group {group.name!r}: a cross-attention table must state its tokens")
        return 0, table.tokens // group.tokens_per_entry
    if table.tokens is not None:
        raise InputError(f"group {group.name!r}: only a cross-attention table states its own tokens")
    if group.window is not None:
        return max(0, tokens - group.window), tokens
    return first_token // group.tokens_per_entry, tokens // group.tokens_per_entry


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
