"""The pieces of one cluster, from segments of the request: contiguous bytes on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.clusters import ChunkGrid
from kvferry.layout.route import Part
from kvferry.layout.segments import Blocks, Segments

__all__ = [
    "MAX_PIECES",
    "Pieces",
    "Template",
    "coalesced",
    "in_source_order",
    "limited",
    "paged_rows",
    "slot_rows",
]

Int64 = NDArray[np.int64]

# 3 x 8 bytes a piece: 800 MB of plan. The worst case, NHD to HND, has a piece for each token, head
# and tensor: 26,000 tokens of 8 heads and 160 tensors. Longer requests move some layers at a time.
MAX_PIECES = 1 << 25


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Pieces of a cluster in source order; int64. ``entry`` is the first entry, which tells the chunk."""

    src: Int64
    dst: Int64
    nbytes: Int64
    entry: Int64


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Coalesced pieces of a cluster and their chunks; int64 and bool arrays.

    Chunk i holds pieces ``chunk_start[i]`` to the next start; ``chunk_index`` is its number in the
    cluster; ``chunk_complete`` is False where the whole request has more bytes in that chunk.
    """

    src: Int64
    dst: Int64
    nbytes: Int64
    chunk_start: Int64
    chunk_index: Int64
    chunk_complete: NDArray[np.bool_]


def limited(count: int) -> None:
    """Raise InputError where a plan would take more memory than any transfer deserves."""
    if count > MAX_PIECES:
        raise InputError(
            f"tokens: the plan would have {count} pieces, more than {MAX_PIECES};"
            " move fewer tokens or layers at once"
        )


def paged_rows(part: Part, cut: Segments) -> Pieces:
    """Pieces of one tensor, each segment's in the order of the source's addresses.

    Heads are merged where they touch on both sides, then entries; what is left is spread out.
    """
    src = part.src.offset + cut.src_block * part.src.block + cut.src_entry * part.src.token
    dst = part.dst.offset + cut.dst_block * part.dst.block + cut.dst_entry * part.dst.token
    width, heads = part.run_nbytes, part.heads
    if part.dims == 1 and part.src.head == part.dst.head == width:
        width, heads = width * heads, 1
    if part.src.token == part.dst.token == width:
        return _spread_heads(Pieces(src, dst, cut.count * width, cut.start), part, heads)
    limited(int(cut.count.sum()) * heads * part.dims)
    rows = Pieces(src, dst, np.full(src.size, width), cut.start)
    if heads > 1 and part.src.head > part.src.token:  # in the source's order, which saves sorting
        rows = _spread_heads(rows, part, heads)
        return _spread_entries(rows, part, np.repeat(cut.count, heads * part.dims))
    return _spread_heads(_spread_entries(rows, part, cut.count), part, heads)


def _spread_heads(rows: Pieces, part: Part, heads: int) -> Pieces:
    """Each piece once for each head, and for each element where those lie apart."""
    runs = heads * part.dims
    if runs == 1:
        return rows
    limited(rows.src.size * runs)
    head, dim = np.divmod(np.arange(runs), part.dims)
    return Pieces(
        np.add.outer(rows.src, head * part.src.head + dim * part.src.dim).ravel(),
        np.add.outer(rows.dst, head * part.dst.head + dim * part.dst.dim).ravel(),
        np.repeat(rows.nbytes, runs),
        np.repeat(rows.entry, runs),
    )


def _spread_entries(rows: Pieces, part: Part, counts: Int64) -> Pieces:
    # 0, 1, .. counts[0]-1, 0, 1, .. counts[1]-1, ..
    step = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return Pieces(
        np.repeat(rows.src, counts) + step * part.src.token,
        np.repeat(rows.dst, counts) + step * part.dst.token,
        np.repeat(rows.nbytes, counts),
        np.repeat(rows.entry, counts),
    )


def slot_rows(part: Part, src: Blocks, dst: Blocks, grid: ChunkGrid) -> Pieces:
    """Pieces of one state tensor: each slot's heads, cut where a chunk ends. Entries are bytes."""
    row = part.run_nbytes
    rows = _spread_heads(
        Pieces(
            part.src.offset + src.ids * part.src.block,
            part.dst.offset + dst.ids * part.dst.block,
            np.full(src.ids.size, row),
            np.arange(src.ids.size) * grid.entries_per_block,
        ),
        part,
        part.heads,
    )
    head = part.first_head + np.arange(rows.src.size) % part.heads
    entry = rows.entry + head * row
    first = grid.index(entry)
    cuts = grid.index(entry + (row - 1)) - first + 1
    limited(int(cuts.sum()))
    nth = np.arange(cuts.sum()) - np.repeat(np.cumsum(cuts) - cuts, cuts)
    entry, first = np.repeat(entry, cuts), np.repeat(first, cuts) + nth
    start = np.maximum(entry, grid.start(first))
    stop = np.minimum(entry + row, grid.start(first + 1))
    shift = start - entry
    return Pieces(np.repeat(rows.src, cuts) + shift, np.repeat(rows.dst, cuts) + shift, stop - start, start)


def in_source_order(tensors: list[Pieces], grid: ChunkGrid) -> Pieces:
    """Pieces of all tensors of a cluster by (block, address), or (chunk, address) where chunks cut blocks."""
    rows = tensors[0]
    if len(tensors) > 1:
        rows = Pieces(*(np.concatenate(column) for column in zip(*map(_columns, tensors), strict=True)))
    unit = grid.index(rows.entry) if grid.cuts_blocks else rows.entry // grid.entries_per_block
    unit_step = np.diff(unit)
    if np.all((unit_step > 0) | ((unit_step == 0) & (rows.src[1:] > rows.src[:-1]))):
        return rows
    order = np.lexsort((rows.src, unit))
    return Pieces(*(column[order] for column in _columns(rows)))


def _columns(rows: Pieces) -> tuple[Int64, Int64, Int64, Int64]:
    return rows.src, rows.dst, rows.nbytes, rows.entry


def coalesced(rows: Pieces, grid: ChunkGrid, whole: tuple[int, int]) -> Template:
    """Merge neighbours that touch on both sides and lie in one chunk.

    ``whole`` are the first and one past the last entry that the request has in this cluster when
    all of it moves: a chunk is complete if it has every byte of those.
    """
    if not rows.entry.size:
        empty = np.empty(0, np.int64)
        return Template(empty, empty, empty, empty, empty, np.empty(0, np.bool_))
    chunk = grid.index(rows.entry)
    new_chunk = np.ones(chunk.size, np.bool_)
    np.not_equal(chunk[1:], chunk[:-1], out=new_chunk[1:])
    new = new_chunk.copy()
    new[1:] |= rows.src[1:] != rows.src[:-1] + rows.nbytes[:-1]
    new[1:] |= rows.dst[1:] != rows.dst[:-1] + rows.nbytes[:-1]
    piece_start = np.flatnonzero(new)
    chunk_first = np.flatnonzero(new_chunk)
    index = chunk[chunk_first]
    live = np.minimum(whole[1], grid.start(index + 1)) - np.maximum(whole[0], grid.start(index))
    moved = np.add.reduceat(rows.nbytes, chunk_first)
    return Template(
        rows.src[piece_start],
        rows.dst[piece_start],
        np.add.reduceat(rows.nbytes, piece_start),
        np.cumsum(new)[chunk_first] - 1,
        index,
        moved == live * grid.entry_nbytes,
    )
