"""Scattered pieces to and from one contiguous buffer, in NumPy, whatever their sizes and offsets.

Pieces are handled in items of their greatest common size, so pieces of one size are one item each
and a mix of block sizes still is one NumPy call a step. Items of 2 KiB and more move at the speed
of memory; below that, each item costs about as much as copying 2 KiB.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

__all__ = ["FEW", "LINE_NBYTES", "STEP_NBYTES", "Pieces", "aligned_buffer", "step_starts", "thread_staging"]

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

# What is staged at once. The bytes of a step stay in cache between gather, checksum and scatter;
# smaller steps gain nothing and cost more calls.
STEP_NBYTES = 1 << 20
# A table of so few rows is worked in Python's own numbers: a call of NumPy costs as much as ten of these.
FEW = 8
# Tables of unlike sizes are turned into items once, where these are large enough to be few.
FEW_ITEM_NBYTES = 2048

PAGE_NBYTES = 4096
LINE_NBYTES = 64

_local = threading.local()


def step_starts(nbytes: Int64, step_nbytes: int = STEP_NBYTES) -> Int64:
    """Cut a table into steps: the index of the first piece of each step, and the table's length.

    A step holds the pieces that start inside one window of ``step_nbytes``, so with pieces of at
    most that size a step has less than twice as many bytes. Steps nest: each border of a multiple
    of ``step_nbytes`` is a border of ``step_nbytes`` too.
    """
    if not len(nbytes):
        return np.zeros(1, np.int64)
    if len(nbytes) <= FEW and sum(nbytes.tolist()) <= step_nbytes:
        return np.array([0, len(nbytes)])
    ends = nbytes.cumsum()
    if ends[-1] <= step_nbytes:
        return np.array([0, len(nbytes)])
    window = (ends - nbytes) // step_nbytes
    borders = np.flatnonzero(window[1:] != window[:-1]) + 1
    return np.concatenate(([0], borders, [len(nbytes)])).astype(np.int64)


def thread_staging(pool: Bytes | None) -> Bytes:
    """This thread's staging buffer for pieces of ``pool`` (None: on a device), which holds any step: uint8.

    Kept as long as the thread, so that its pages are touched once. One use at a time. It lies to its
    cache lines as the pool does to its own: copies between unlike places take up to twice as long.
    """
    buffer: Bytes | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = aligned_buffer(2 * STEP_NBYTES + LINE_NBYTES)
    lead = 0 if pool is None else pool.ctypes.data % LINE_NBYTES
    return buffer[lead:][: 2 * STEP_NBYTES]


def aligned_buffer(nbytes: int) -> Bytes:
    """Uninitialised uint8 that starts on a page; NumPy's own large arrays start 16 bytes behind one."""
    buffer = np.empty(nbytes + PAGE_NBYTES, np.uint8)
    return buffer[-buffer.ctypes.data % PAGE_NBYTES :][:nbytes]


class Pieces:
    """The pieces of a table in one memory, ready to be gathered and scattered run by run.

    ``array``: uint8, one dimension. ``offset``, ``nbytes``: int64, one entry a piece, all inside it.
    """

    def __init__(self, array: Bytes, offset: Int64, nbytes: Int64) -> None:
        self.array = array
        self.offset = offset
        self.nbytes = nbytes
        # Where each of a few pieces begins and ends: slices of the memory, of any sizes.
        self._few: list[tuple[int, int]] | None = None
        if len(nbytes) <= FEW:
            self._few = [(at, at + n) for at, n in zip(offset.tolist(), nbytes.tolist(), strict=True)]
            return
        is_uniform = bool(nbytes.min() == nbytes.max())
        item = int(nbytes[0]) if is_uniform else int(np.gcd.reduce(nbytes))
        self._all = _Items(array, offset, nbytes, item) if is_uniform or item >= FEW_ITEM_NBYTES else None
        # Where each piece's items begin among all items.
        self._first = None if is_uniform else np.concatenate(([0], (nbytes // item).cumsum()))

    def gather(self, first: int, last: int, out: Bytes) -> None:
        """Copy pieces ``first`` to ``last - 1``, in order, into ``out``, which holds exactly their bytes."""
        if self._few is None:
            items, run = self._run(first, last)
            items.gather(run, out)
            return
        done = 0
        for start, stop in self._few[first:last]:
            out[done : done + stop - start] = self.array[start:stop]
            done += stop - start

    def scatter(self, first: int, last: int, data: Bytes) -> None:
        """Copy ``data``, which holds exactly the bytes of these pieces in order, to their places."""
        if self._few is None:
            items, run = self._run(first, last)
            items.scatter(run, data)
            return
        done = 0
        for start, stop in self._few[first:last]:
            self.array[start:stop] = data[done : done + stop - start]
            done += stop - start

    def _run(self, first: int, last: int) -> tuple[_Items, slice]:
        if self._all is None:
            offset, nbytes = self.offset[first:last], self.nbytes[first:last]
            return _Items(self.array, offset, nbytes, int(np.gcd.reduce(nbytes))), slice(None)
        if self._first is None:
            return self._all, slice(first, last)
        return self._all, slice(int(self._first[first]), int(self._first[last]))


class _Items:
    """Pieces as items of one size, which divides the size of every piece."""

    def __init__(self, array: Bytes, offset: Int64, nbytes: Int64, item: int) -> None:
        self._dtype = np.dtype((np.void, item))
        self._start = _item_starts(offset, nbytes, item)
        self._windows = as_strided(
            array[:item].view(self._dtype), shape=(array.nbytes - item + 1,), strides=(1,)
        )
        self._rows = None if (self._start % item).any() else self._start // item
        self._table = array[: array.nbytes // item * item].view(self._dtype)

    def gather(self, run: slice, out: Bytes) -> None:
        items = out.view(self._dtype)
        if self._rows is None:
            items[:] = self._windows[self._start[run]]
        else:
            # mode="clip" keeps NumPy from buffering ``out``; the offsets were checked before.
            np.take(self._table, self._rows[run], out=items, mode="clip")

    def scatter(self, run: slice, data: Bytes) -> None:
        self._windows[self._start[run]] = data.view(self._dtype)


def _item_starts(offset: Int64, nbytes: Int64, item: int) -> Int64:
    counts = nbytes // item
    if (counts == 1).all():
        return offset
    first = counts.cumsum() - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
    return np.repeat(offset, counts) + within * item
