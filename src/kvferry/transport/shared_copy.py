"""Copies out of memory that this process can read itself: mapped, or another process's.

Nothing on the other side notices such a copy, so ``check`` is called every few megabytes; it
raises when the copy must end. With integrity the bytes go through a cache-hot staging buffer,
where they are summed: what is summed is what lands, even if the source changes meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import StridedPlan
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.memory import address_of
from kvferry.transport.staging import FEW, Pieces, step_starts, thread_staging
from kvferry.transport.table import Part, split_pieces, sum_of
from kvferry.transport.vectored import IOVecs, copy_from_process, iovecs, merge_touching

__all__ = [
    "LARGE_STRIDED_NBYTES",
    "Mapped",
    "OtherProcess",
    "Source",
    "copy_part",
    "copy_strided",
    "pays_strided",
]

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]
Check = Callable[[], None]
#: Copies pieces first to last - 1 into a buffer.
Gather = Callable[[int, int, Bytes], None]

# Between two checks: under a millisecond of copying, beside which a check costs nothing.
CHECK_NBYTES = 4 << 20
# Mapped pieces of this mean size and more are copied by a NumPy call each; below it the calls, which
# two threads cannot make at once, cost more than a second copy through staging (decision 168).
LARGE_NBYTES = 32 << 10
# Likewise strided copies, of which each takes more Python than a slice.
LARGE_STRIDED_NBYTES = 128 << 10


class Source(ABC):
    """Memory to copy from."""

    path: str

    @abstractmethod
    def gatherer(self, offset: Int64, nbytes: Int64) -> Gather:
        """A call that copies a run of the pieces into a buffer of exactly their bytes. It raises OSError."""

    @abstractmethod
    def copy(self, part: Part, into: Bytes, check: Check) -> None:
        """Each piece to its place in ``into``, without sums. Raises OSError, or what ``check`` raises."""


class Mapped(Source):
    """Memory that this process has mapped, or its own."""

    path = "mapped"

    def __init__(self, array: Bytes) -> None:
        self.array = array

    def gatherer(self, offset: Int64, nbytes: Int64) -> Gather:
        return Pieces(self.array, offset, nbytes).gather

    def copy(self, part: Part, into: Bytes, check: Check) -> None:
        if len(part.nbytes) > FEW and part.total_nbytes < LARGE_NBYTES * len(part.nbytes):
            _copy_staged(self, part, into, check, None)
            return
        unchecked = 0
        for here, there, nbytes in zip(*(column.tolist() for column in _columns(part)), strict=True):
            if unchecked >= CHECK_NBYTES:
                check()
                unchecked = 0
            into[here : here + nbytes] = self.array[there : there + nbytes]
            unchecked += nbytes


class OtherProcess(Source):
    """Memory of another process, by ``process_vm_readv``."""

    path = "cma"

    def __init__(self, pid: int, address: int) -> None:
        self.pid = pid
        self.address = address

    def gatherer(self, offset: Int64, nbytes: Int64) -> Gather:
        def gather(first: int, last: int, out: Bytes) -> None:
            whole = iovecs(address_of(out), np.zeros(1, np.int64), np.array([out.nbytes], np.int64))
            copy_from_process(
                self.pid, whole, self._vector(offset[first:last], nbytes[first:last]), _no_check
            )

        return gather

    def copy(self, part: Part, into: Bytes, check: Check) -> None:
        local = merge_touching(iovecs(address_of(into), part.here, part.nbytes))
        copy_from_process(self.pid, local, self._vector(part.there, part.nbytes), check)

    def _vector(self, offset: Int64, nbytes: Int64) -> IOVecs:
        return merge_touching(iovecs(self.address, offset, nbytes))


def copy_part(
    source: Source, part: Part, into: Bytes, check: Check, *, integrity: bool
) -> NDArray[np.uint64] | None:
    """Copy one part into ``into``; the digests of its chunks with integrity. Raises as ``Source.copy``."""
    if not integrity:
        source.copy(part, into, check)
        return None
    sums = ChunkDigests(part.chunk_end)
    _copy_staged(source, part, into, check, sums)
    return sums.digests()


def pays_strided(plan: StridedPlan, total_nbytes: int) -> bool:
    """Whether its copies are large enough for a call each."""
    return total_nbytes >= LARGE_STRIDED_NBYTES * len(plan)


def copy_strided(plan: StridedPlan, source: Bytes, into: Bytes, check: Check) -> None:
    """Copy a plan's product form between two mapped memories: one NumPy call for many tensors."""
    unchecked = 0
    for dst, src in plan.views(source, into):
        if unchecked >= CHECK_NBYTES:
            check()
            unchecked = 0
        np.copyto(dst, src)
        unchecked += dst.nbytes


def _copy_staged(source: Source, part: Part, into: Bytes, check: Check, sums: ChunkDigests | None) -> None:
    here, there, nbytes = _columns(part)
    gather, target = source.gatherer(there, nbytes), Pieces(into, here, nbytes)
    staging = thread_staging(into)
    for first, last in pairwise(step_starts(nbytes).tolist()):
        check()
        staged = staging[: sum_of(nbytes[first:last])]
        gather(first, last, staged)
        if sums is not None:
            sums.feed(staged)
        target.scatter(first, last, staged)


def _columns(part: Part) -> tuple[Int64, Int64, Int64]:
    """Offsets here and there and sizes, with pieces above the staging step cut."""
    nbytes, (here, there) = split_pieces(part.nbytes, part.here, part.there)
    return here, there, nbytes


def _no_check() -> None:
    """Staging gathers at most two steps at a time, and its caller checks between them."""
