"""Staging: the end of a pool's memory, where what a conversion packs waits for the wire or comes off it.

It is a fixed number of windows. Each copy thread of this side has one to land in, so nothing waits
for those; the rest are given to transfers that pack, two at a time (one is read while the next is
filled), in the order in which they ask.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Iterator

__all__ = ["ALIGNMENT", "DEFAULT_STAGING_NBYTES", "MIN_WINDOW_NBYTES", "Staging", "window_nbytes"]

ALIGNMENT = 64
#: Of a pool that was asked for conversions: eight windows of 4 MiB.
DEFAULT_STAGING_NBYTES = 32 << 20
MIN_WINDOW_NBYTES = 4096
# A window costs a round trip; at 4 MiB that is little beside packing it.
_MAX_WINDOW_NBYTES = 4 << 20
_PACKING_WINDOWS = 2


def window_nbytes(staging_nbytes: int, copy_threads: int) -> int:
    """The size of one window: beside those that land, at least one pair is left to pack in."""
    share = staging_nbytes // (copy_threads + _PACKING_WINDOWS)
    return min(share, _MAX_WINDOW_NBYTES) // ALIGNMENT * ALIGNMENT


class Staging:
    """The windows of one node, by their offsets in the pool's memory.

    ``landing`` is for copy threads; everything else runs on the node's loop.
    """

    def __init__(self, offset: int, nbytes: int, copy_threads: int) -> None:
        self.window_nbytes = window_nbytes(nbytes, copy_threads) if nbytes else 0
        count = nbytes // self.window_nbytes if self.window_nbytes else 0
        offsets = [offset + index * self.window_nbytes for index in range(count)]
        self._lock = threading.Lock()
        self._landing = offsets[:copy_threads]
        packing = offsets[copy_threads:]
        self._pairs = list(zip(packing[::2], packing[1::2], strict=False))
        self._waiting: deque[asyncio.Future[tuple[int, int]]] = deque()
        self._num_taken = 0

    @property
    def num_taken(self) -> int:
        """Pairs of windows that transfers hold."""
        return self._num_taken

    @contextlib.contextmanager
    def landing(self) -> Iterator[int]:
        """A window for what comes in, while a copy thread uses it."""
        with self._lock:
            offset = self._landing.pop()
        try:
            yield offset
        finally:
            with self._lock:
                self._landing.append(offset)

    async def take(self) -> tuple[int, int]:
        """Two windows to pack in, as soon as there are any; ``give_back`` ends it."""
        if self._pairs and not self._waiting:
            self._num_taken += 1
            return self._pairs.pop()
        waiter: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            raise

    def give_back(self, pair: tuple[int, int]) -> None:
        """Nothing reads or writes these two any more."""
        self._num_taken -= 1
        self._pairs.append(pair)
        while self._pairs and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                self._num_taken += 1
                waiter.set_result(self._pairs.pop())
