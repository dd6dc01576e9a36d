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
from kvferry.layout import PieceTable
from kvferry.transport.base import Arrived
from kvferry.transport.digest import digest_chunks

__all__ = ["DigestTable", "compare_digests", "digest_pieces", "join_arrived"]

DigestTable = tuple[NDArray[np.int64], NDArray[np.uint64]]
"""Chunk ids, ascending, and the xxh3-64 of each chunk's bytes in source order."""

NO_DIGESTS: DigestTable = (np.empty(0, np.int64), np.empty(0, np.uint64))


def digest_pieces(memory: NDArray[np.uint8], pieces: PieceTable) -> DigestTable:
    """Digests of a request's chunks where they lie now. Releases the GIL; run it in a thread."""
    digests = digest_chunks(memory, pieces.offset, pieces.nbytes, pieces.chunk_start)
    order = np.argsort(pieces.chunk_id, kind="stable")
    return pieces.chunk_id[order], digests[order]


def join_arrived(arrived: Sequence[Arrived]) -> DigestTable:
    """The digests of several copies of one transfer as one table."""
    ids = [part.chunk_id for part in arrived if part.digests is not None]
    sums = [part.digests for part in arrived if part.digests is not None]
    if not ids:
        return NO_DIGESTS
    chunk_id = np.concatenate(ids)
    order = np.argsort(chunk_id, kind="stable")
    return chunk_id[order], np.concatenate(sums)[order]


def compare_digests(exported: DigestTable, arrived: DigestTable) -> None:
    """Raise CorruptError unless exactly the exported chunks arrived, each with its digest."""
    want_id, want = exported
    got_id, got = arrived
    if len(want_id) != len(got_id) or not np.array_equal(want_id, got_id):
        missing = np.setdiff1d(want_id, got_id)
        extra = np.setdiff1d(got_id, want_id)
        twice = len(got_id) - len(np.unique(got_id))
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
