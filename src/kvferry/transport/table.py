"""The tables of a copy: cut for several channels, cut for staging, checked against a memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LocalError
from kvferry.layout import CopyPlan
from kvferry.transport.base import Copy, Direction
from kvferry.transport.staging import FEW, STEP_NBYTES

__all__ = [
    "MAX_PIECES",
    "Part",
    "chunk_nbytes",
    "first_outside",
    "lanes_for",
    "outside_of_peer",
    "sizes_between",
    "split_copy",
    "split_pieces",
    "sum_of",
]

Int64 = NDArray[np.int64]

# Pieces of one request on one channel: 16 MiB of tables, 4 GiB of 4 KiB blocks.
MAX_PIECES = 1 << 20
# Where a part is cut: a chunk, of at most about 1 MiB, still fits above it with pieces of 16 bytes.
_PART_PIECES = MAX_PIECES - (MAX_PIECES >> 4)
# A copy is spread over several channels only where each gets enough to be worth a thread.
MIN_PART_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Whole chunks of a plan, in plan order: what one request moves over one channel.

    ``here`` and ``there``: int64 offsets of each piece in this side's and the peer's memory;
    ``nbytes``: int64, above 0. ``chunk_end``: int64, where each chunk ends in the stream of the
    pieces' bytes; ``chunk_id``: int64.
    """

    here: Int64
    there: Int64
    nbytes: Int64
    chunk_end: Int64
    chunk_id: Int64

    def swapped(self) -> Part:
        """The same copy as the other side sees it."""
        return replace(self, here=self.there, there=self.here)

    @property
    def total_nbytes(self) -> int:
        return int(self.chunk_end[-1]) if len(self.chunk_end) else 0


def chunk_nbytes(plan: CopyPlan) -> Int64:
    """Bytes of each chunk of a plan, int64."""
    borders = _chunk_borders(plan)
    return borders[1:] - borders[:-1]


def _chunk_borders(plan: CopyPlan) -> Int64:
    """Where each chunk begins in the stream of the pieces' bytes, and where the last one ends."""
    if len(plan.nbytes) <= FEW >= len(plan.chunk_id):
        ends = [0, *accumulate(plan.nbytes.tolist())]
        return np.array([ends[at] for at in plan.chunk_start.tolist()], np.int64)
    return np.concatenate(([0], plan.nbytes.cumsum()))[plan.chunk_start]


def sizes_between(ends: Int64) -> Int64:
    """Bytes of each chunk, int64, by where each ends."""
    if len(ends) <= FEW:
        return np.array([end - start for start, end in pairwise([0, *ends.tolist()])], np.int64)
    return np.diff(ends, prepend=0)


def sum_of(nbytes: Int64) -> int:
    """Bytes of all pieces; exact below 2**62, about right where int64 may not hold them."""
    if len(nbytes) <= FEW:
        return sum(nbytes.tolist())
    # 2**20 pieces of up to 2**47 bytes pass int64.
    about = float(nbytes.sum(dtype=np.float64))
    return int(about) if abs(about) >= 2.0**62 else int(nbytes.sum())


def split_copy(copy: Copy, direction: Direction, here_nbytes: int, peer: str, streams: int = 1) -> list[Part]:
    """Cut a plan into parts for ``streams`` channels, at chunk borders; an empty plan has none.

    Raises LocalError when a piece lies outside of this side's memory of ``here_nbytes``.
    """
    plan = copy.plan
    reads = direction is Direction.READ
    here, there = (plan.dst_offset, plan.src_offset) if reads else (plan.src_offset, plan.dst_offset)
    bad = first_outside(here, plan.nbytes, here_nbytes)
    if bad is not None:
        raise LocalError(
            f"piece {bad} of the copy plan, {plan.nbytes[bad]} bytes at {here[bad]}, lies outside of "
            f"this side's memory of {here_nbytes} bytes",
            phase="move",
            peer=peer,
            now_true="nothing was moved",
            next_step="make the plan with the layout of this memory",
        )
    chunk_at = _chunk_borders(plan)
    total = plan.total_nbytes
    count = lanes_for(total, streams)
    if count == 1 and len(plan.nbytes) <= _PART_PIECES:
        return [Part(here, there, plan.nbytes, chunk_at[1:], plan.chunk_id)] if total else []
    share = np.minimum(chunk_at[:-1] * count // max(total, 1), count - 1)
    window = plan.chunk_start[:-1] // _PART_PIECES
    cut = np.flatnonzero((share[1:] != share[:-1]) | (window[1:] != window[:-1])) + 1
    borders = np.concatenate(([0], cut, [len(plan.chunk_id)])).tolist()
    parts = []
    for first, last in pairwise(borders):
        pieces = slice(int(plan.chunk_start[first]), int(plan.chunk_start[last]))
        parts.append(
            Part(
                here[pieces],
                there[pieces],
                plan.nbytes[pieces],
                chunk_at[first + 1 : last + 1] - chunk_at[first],
                plan.chunk_id[first:last],
            )
        )
    return [part for part in parts if part.total_nbytes]


def lanes_for(total_nbytes: int, streams: int) -> int:
    """How many of ``streams`` threads a copy of so many bytes is worth."""
    return max(1, min(streams, total_nbytes // MIN_PART_NBYTES))


def split_pieces(nbytes: Int64, *offsets: Int64, limit: int = STEP_NBYTES) -> tuple[Int64, tuple[Int64, ...]]:
    """Cut pieces above ``limit`` bytes into several; the bytes and their order stay."""
    if not len(nbytes) or _max_of(nbytes) <= limit:
        return nbytes, offsets
    counts = np.maximum(-(-nbytes // limit), 1)
    first = counts.cumsum() - counts
    within = (np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)) * limit
    sizes = np.minimum(np.repeat(nbytes, counts) - within, limit)
    return sizes, tuple(np.repeat(offset, counts) + within for offset in offsets)


def first_outside(offset: Int64, nbytes: Int64, limit: int) -> int | None:
    """Index of the first piece that is empty or does not lie inside [0, limit); None if all do."""
    if len(nbytes) <= FEW:
        for piece, (at, n) in enumerate(zip(offset.tolist(), nbytes.tolist(), strict=True)):
            if n < 1 or at < 0 or at + n > limit:
                return piece
        return None
    # The usual answer from the extremes alone: a tenth of the time of looking at each.
    largest = int(nbytes.max())
    if int(nbytes.min()) > 0 and int(offset.min()) >= 0 and int(offset.max()) <= limit - largest:
        return None
    # No sum of two numbers from the peer: it could wrap around.
    bad = (nbytes < 1) | (offset < 0) | (nbytes > limit) | (offset > limit - np.minimum(nbytes, limit))
    return int(bad.argmax()) if bad.any() else None


def _max_of(nbytes: Int64) -> int:
    """The size of the largest piece; there is one."""
    return max(nbytes.tolist()) if len(nbytes) <= FEW else int(nbytes.max())


def outside_of_peer(piece: int, nbytes: int, peer: str) -> LocalError:
    """The error for a plan that does not fit the peer's memory of ``nbytes``."""
    return LocalError(
        f"piece {piece} of the plan lies outside of the peer's memory of {nbytes} bytes",
        phase="move",
        peer=peer,
        now_true="nothing was moved",
        next_step="make the plan with the peer's own layout",
    )
