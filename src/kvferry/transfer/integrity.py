"""Digests: taken at prefill when the state is exported, compared at decode before commit.

A digest taken at export stays true only while the exported blocks stay as they are. So it also
catches what a checksum on the wire cannot: a block that was reused, zeroed or pushed too early
between export and move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CorruptError
from kvferry.layout import CopyPlan, PieceTable
from kvferry.transport.base import Arrived
from kvferry.transport.device import PoolBytes
from kvferry.transport.digest import digest_chunks
from kvferry.transport.table import chunk_nbytes

__all__ = [
    "NO_DIGESTS",
    "DigestTable",
    "check_coverage",
    "compare_digests",
    "digest_pieces",
    "digest_plan",
    "join_arrived",
    "join_digests",
    "nothing_arrived",
    "select_digests",
]

DigestTable = tuple[NDArray[np.int64], NDArray[np.uint64]]
"""Chunk ids, ascending, and the xxh3-64 of each chunk's bytes in source order."""

NO_DIGESTS: DigestTable = (np.empty(0, np.int64), np.empty(0, np.uint64))
_NONE = np.empty(0, np.int64)


def nothing_arrived(path: str) -> Arrived:
    """What comes of a copy without a piece."""
    return Arrived(path, 0.0, _NONE, _NONE, _NONE, _NONE, NO_DIGESTS[1])


def digest_pieces(
    memory: PoolBytes, pieces: PieceTable, *, only: NDArray[np.int64] | None = None
) -> DigestTable:
    """Digests of a request's chunks where they lie now, or ``only`` of some. Releases the GIL."""
    if only is not None:
        pieces = _some_chunks(pieces, only)
    digests = digest_chunks(memory, pieces.offset, pieces.nbytes, pieces.chunk_start)
    return join_digests([(pieces.chunk_id, digests)])


def digest_plan(memory: PoolBytes, plan: CopyPlan) -> DigestTable:
    """Digests of a plan's chunks at its source, in the plan's own order."""
    return plan.chunk_id, digest_chunks(memory, plan.src_offset, plan.nbytes, plan.chunk_start)


def join_digests(tables: Sequence[DigestTable]) -> DigestTable:
    """One table, by chunk id; chunks that moved in several parts stay in the order of the parts."""
    if not tables:
        return NO_DIGESTS
    chunk_id = np.concatenate([ids for ids, _ in tables])
    order = np.argsort(chunk_id, kind="stable")
    return chunk_id[order], np.concatenate([digests for _, digests in tables])[order]


def join_arrived(arrived: Sequence[Arrived]) -> DigestTable:
    """The digests of several copies of one transfer, in the order in which they moved."""
    return join_digests([(part.chunk_id, part.digests) for part in arrived if part.digests is not None])


def select_digests(table: DigestTable, chunk_id: NDArray[np.int64]) -> DigestTable:
    """The entries of ``chunk_id`` out of a table that has each once."""
    ids, digests = table
    wanted = np.sort(chunk_id)
    at = np.searchsorted(ids, wanted)
    return ids[at], digests[at]


def check_coverage(plan: CopyPlan, arrived: Sequence[Arrived]) -> None:
    """Raise CorruptError unless each byte of ``plan`` arrived once, in its place, under its chunk's name.

    The peer may have chosen where its pieces went. Digests say that the right bytes arrived; this
    says that they lie where this side's own plan wants them, and that none is missing.
    """
    if _is_as_planned(plan, arrived):
        return
    offset, nbytes, chunk_id = _landed_pieces(arrived)
    starts, sizes, at, ids = _merged_destination(plan)
    order = np.argsort(starts, kind="stable")
    which = np.searchsorted(starts[order], offset, side="right") - 1
    mine = order[np.maximum(which, 0)] if len(order) else np.zeros(len(offset), np.int64)
    if len(offset) and (not len(order) or (which < 0).any()):
        raise _misplaced("bytes arrived where none belong")
    into = offset - starts[mine]
    if (into + nbytes > sizes[mine]).any():
        raise _misplaced("bytes arrived across the border of a piece")
    if (ids[mine] != chunk_id).any():
        raise _misplaced("bytes of one chunk arrived in another's place")
    position = at[mine] + into
    by_position = np.argsort(position, kind="stable")
    ends = (position + nbytes)[by_position]
    expected = np.concatenate(([0], ends))
    if not np.array_equal(np.append(position[by_position], plan.total_nbytes), expected):
        got = int(nbytes.sum())
        raise _misplaced(f"{got} bytes arrived, {plan.total_nbytes} are needed, each once", got)
    same_chunk = chunk_id[1:] == chunk_id[:-1]
    if (same_chunk & (position[1:] < position[:-1])).any():
        raise _misplaced("the pieces of a chunk arrived in another order than the plan's")


def _is_as_planned(plan: CopyPlan, arrived: Sequence[Arrived]) -> bool:
    """The very pieces of the plan, in its order: the usual case, seen without a search for each piece."""
    wanted = {
        "piece_offset": plan.dst_offset,
        "piece_nbytes": plan.nbytes,
        "chunk_id": plan.chunk_id,
        "chunk_nbytes": chunk_nbytes(plan),
    }
    return all(
        np.array_equal(np.concatenate([_NONE, *(getattr(part, name) for part in arrived)]), column)
        for name, column in wanted.items()
    )


def _landed_pieces(
    arrived: Sequence[Arrived],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Offset, size and chunk name of every piece that arrived, in the order of arrival."""
    offsets, sizes, ids = [_NONE], [_NONE], [_NONE]
    for part in arrived:
        chunk_stop = np.cumsum(part.chunk_nbytes)
        piece_start = np.cumsum(part.piece_nbytes) - part.piece_nbytes
        offsets.append(part.piece_offset)
        sizes.append(part.piece_nbytes)
        ids.append(part.chunk_id[np.searchsorted(chunk_stop, piece_start, side="right")])
    return np.concatenate(offsets), np.concatenate(sizes), np.concatenate(ids)


def _merged_destination(plan: CopyPlan) -> tuple[NDArray[np.int64], ...]:
    """Offset, size, place in the stream and chunk of pieces, joined where only the source breaks."""
    ids = np.repeat(plan.chunk_id, np.diff(plan.chunk_start))
    stop = plan.dst_offset + plan.nbytes
    first = np.ones(plan.num_pieces, bool)
    first[1:] = (plan.dst_offset[1:] != stop[:-1]) | (ids[1:] != ids[:-1])
    index = np.flatnonzero(first)
    at = np.cumsum(plan.nbytes) - plan.nbytes
    sizes = np.add.reduceat(plan.nbytes, index) if len(index) else plan.nbytes
    return plan.dst_offset[index], sizes, at[index], ids[index]


def _misplaced(what: str, bytes_done: int = 0) -> CorruptError:
    return CorruptError(
        what,
        phase="verify",
        bytes_done=bytes_done,
        next_step="the sides planned unlike copies, or a part was never pushed: compare versions and calls",
    )


def _some_chunks(pieces: PieceTable, chunk_id: NDArray[np.int64]) -> PieceTable:
    keep = np.isin(pieces.chunk_id, chunk_id)
    sizes = np.diff(pieces.chunk_start)
    rows = np.repeat(keep, sizes)
    return PieceTable(
        pieces.offset[rows],
        pieces.nbytes[rows],
        np.concatenate(([0], np.cumsum(sizes[keep]))),
        pieces.chunk_id[keep],
        pieces.chunk_complete[keep],
    )


def compare_digests(exported: DigestTable, arrived: DigestTable) -> None:
    """Raise CorruptError unless exactly the exported chunks arrived, each with its digest."""
    want_id, want = exported
    got_id, got = arrived
    if len(want_id) != len(got_id) or not np.array_equal(want_id, got_id):
        missing = np.setdiff1d(want_id, got_id)
        extra = np.setdiff1d(got_id, want_id)
        twice = max(0, len(got_id) - len(want_id) + len(missing) - len(extra))
        raise CorruptError(
            f"chunks: {len(want_id)} were exported, {len(got_id)} arrived "
            f"({len(missing)} missing, {len(extra)} unexpected, {twice} twice)",
            phase="verify",
        )
    wrong = np.flatnonzero(want != got)
    if wrong.size:
        raise CorruptError(
            f"digest: {wrong.size} of {len(want)} chunks are not the bytes that were exported "
            f"(first: chunk {int(want_id[wrong[0]])})",
            phase="verify",
            next_step="the blocks changed after export or were damaged on the way: export again or recompute",
        )
