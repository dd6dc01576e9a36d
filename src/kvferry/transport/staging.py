"""Scattered pieces to and from one contiguous buffer, in NumPy, whatever their sizes and offsets.

A run of pieces is handled in items of their greatest common size, so pieces of one size are one
item each and a mix of block sizes still is one NumPy call. Items of 2 KiB and more move at the
speed of memory; below that, each item costs about as much as copying 2 KiB.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

__all__ = ["STEP_NBYTES", "gather", "scatter", "step_starts", "thread_staging"]

# What is staged at once: small enough to stay in a core's L2 between gather, checksum and scatter.
STEP_NBYTES = 1 << 20

_local = threading.local()


def step_starts(nbytes: NDArray[np.int64], step_nbytes: int = STEP_NBYTES) -> NDArray[np.int64]:
    """Cut a table into steps: the index of the first piece of each step, and the table's length.

    A step holds the pieces that start inside one window of ``step_nbytes``, so with pieces of at
    most that size a step has less than twice as many bytes. Steps nest: each border of a multiple
    of ``step_nbytes`` is a border of ``step_nbytes`` too.
    """
    if not len(nbytes):
        return np.zeros(1, np.int64)
    window = (np.cumsum(nbytes) - nbytes) // step_nbytes
    borders = np.flatnonzero(window[1:] != window[:-1]) + 1
    return np.concatenate(([0], borders, [len(nbytes)])).astype(np.int64)


def thread_staging() -> NDArray[np.uint8]:
    """This thread's staging buffer, which holds any step of pieces of at most STEP_NBYTES: uint8.

    Kept as long as the thread, so that its pages are touched once. One use at a time.
    """
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None:
        buffer = _local.buffer = np.empty(2 * STEP_NBYTES, np.uint8)
    return buffer


def gather(
    array: NDArray[np.uint8],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None:
    """Copy the pieces of ``array``, in order, into ``out``, which holds exactly their bytes."""
    if len(offset) == 1:
        out[:] = array[offset[0] : offset[0] + nbytes[0]]
        return
    item, start = _items(offset, nbytes)
    rows = out.view(np.dtype((np.void, item)))
    if not np.any(start % item):
        table = array[: array.nbytes // item * item].view(rows.dtype)
        # mode="clip" keeps NumPy from buffering ``out``; the offsets were checked before.
        np.take(table, start // item, out=rows, mode="clip")
    else:
        rows[:] = _windows(array, item)[start]


def scatter(
    array: NDArray[np.uint8],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    data: NDArray[np.uint8],
) -> None:
    """Copy ``data``, which holds exactly the bytes of the pieces in order, to their places in ``array``."""
    if len(offset) == 1:
        array[offset[0] : offset[0] + nbytes[0]] = data
        return
    item, start = _items(offset, nbytes)
    _windows(array, item)[start] = data.view(np.dtype((np.void, item)))


def _items(offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """The common item size of the pieces, and where each item starts."""
    item = int(np.gcd.reduce(nbytes))
    if np.all(nbytes == item):
        return item, offset
    counts = nbytes // item
    first = np.cumsum(counts) - counts
    within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
    return item, np.repeat(offset, counts) + within * item


def _windows(array: NDArray[np.uint8], item: int) -> NDArray[np.void]:
    """``array`` seen as overlapping items, one for each offset where one fits."""
    items = array[:item].view(np.dtype((np.void, item)))
    return as_strided(items, shape=(array.nbytes - item + 1,), strides=(1,))
