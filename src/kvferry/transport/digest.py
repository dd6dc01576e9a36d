"""xxh3-64 of each chunk of a plan, over the bytes in plan order.

The same sums are made where the bytes are exported and where they arrive; only equal bytes in
equal order give equal sums, wherever either pool keeps them. xxh3 finds damage and reuse, not
forgery; docs/decisions/0051-digests.md.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.transport.device import PoolBytes, pieces_of
from kvferry.transport.staging import step_starts, thread_staging
from kvferry.transport.table import split_pieces

__all__ = ["ChunkDigests", "digest_chunks"]


class ChunkDigests:
    """Sums the chunks of a byte stream that arrives in slices cut anywhere.

    ``chunk_end`` is int64, ascending: where each chunk ends in the stream, in bytes.
    """

    def __init__(self, chunk_end: NDArray[np.int64]) -> None:
        self._ends = chunk_end.tolist()
        self._digests = np.zeros(len(chunk_end), np.uint64)
        self._at = 0
        self._chunk = 0
        self._partial: xxhash.xxh3_64 | None = None

    def feed(self, data: NDArray[np.uint8]) -> None:
        """Take the next bytes of the stream: uint8, contiguous."""
        view = data.data
        while view:
            left = self._ends[self._chunk] - self._at
            piece, view = view[:left], view[left:]
            self._at += len(piece)
            if len(piece) < left or self._partial is not None:
                self._partial = self._partial or xxhash.xxh3_64()
                self._partial.update(piece)
                if len(piece) == left:
                    self._store(self._partial.intdigest())
            else:
                self._store(xxhash.xxh3_64_intdigest(piece))

    def digests(self) -> NDArray[np.uint64]:
        """One sum a chunk, once all bytes were fed."""
        while self._chunk < len(self._ends):
            assert self._ends[self._chunk] == self._at  # else bytes are missing
            self._store(xxhash.xxh3_64_intdigest(b""))
        return self._digests

    def _store(self, digest: int) -> None:
        self._digests[self._chunk] = digest
        self._chunk += 1
        self._partial = None


def digest_chunks(
    pool: PoolBytes,
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    chunk_start: NDArray[np.int64],
) -> NDArray[np.uint64]:
    """xxh3-64 over each chunk's bytes in ``pool``, in order.

    Args:
        pool: uint8, one dimension, or a device.
        offset, nbytes: int64, one entry a descriptor; every descriptor lies inside ``pool``.
        chunk_start: int64, one a chunk and one more: chunk i is descriptors
            ``chunk_start[i]:chunk_start[i + 1]``, as in ``CopyPlan`` and ``PieceTable``.

    Scattered pieces are gathered into a cache-hot buffer and summed there, one call a chunk:
    a call for each 4 KiB piece would cost more than the sum.
    """
    if not len(nbytes):
        return ChunkDigests(np.zeros(len(chunk_start) - 1, np.int64)).digests()
    sums = ChunkDigests(np.concatenate(([0], nbytes.cumsum()))[chunk_start[1:]])
    piece_nbytes, (piece_offset,) = split_pieces(nbytes, offset)
    pieces = pieces_of(pool, piece_offset, piece_nbytes)
    staging = thread_staging(pool if isinstance(pool, np.ndarray) else None)
    for first, last in pairwise(step_starts(piece_nbytes).tolist()):
        staged = staging[: int(piece_nbytes[first:last].sum())]
        pieces.gather(first, last, staged)
        sums.feed(staged)
    return sums.digests()
