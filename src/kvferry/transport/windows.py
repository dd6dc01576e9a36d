"""Staging memory that a foreign library reads and writes in our place: the pools stay ours.

Such libraries have no cancel: one that was told to stop may go on writing for as long as its peer
lives (docs/decisions/0131). So they write into windows, and the pool gets the bytes from there, by
our own copy. A window whose last use is not known to be over is never used again.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError
from kvferry.transport.memory import address_of
from kvferry.transport.patience import SLICE_SECONDS, Patience
from kvferry.transport.staging import STEP_NBYTES

__all__ = [
    "MAX_RINGS",
    "NUDGE_SECONDS",
    "PEEK_NBYTES",
    "WINDOWS",
    "WINDOW_NBYTES",
    "Arena",
    "Mover",
    "PoolMover",
    "Posted",
    "Progressing",
    "Ring",
]

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]

# Any staging step fits: steps of STEP_NBYTES with pieces of at most that are below twice of it.
WINDOW_NBYTES = 2 * STEP_NBYTES
# Of one copy: one that is on its way, one behind it, one that is being scattered.
WINDOWS = 3
# A slot of a board, or the bytes by which a peer is known.
PEEK_NBYTES = 128
# Of one process: 192 MiB of addresses, of which only what is used gets pages.
MAX_RINGS = 32
# Between two looks a wait gives way at first, then sleeps, which is 0.1 ms at least: shortly while things
# move, and longer after a while. It gives way as long as a step takes where nothing moves but by this
# side's looks, and less where a library has threads of its own, which want the processor.
_GIVE_WAY_SECONDS, _GIVE_WAY_TO_THREADS_SECONDS = 4e-4, 1e-4
_SHORT_SECONDS, _LONG_SECONDS = 5e-5, 1e-3
_BUSY_SECONDS = 0.05
# What moves without the peer's doing is over by then, save where an endpoint is not set up yet. The peer
# then drives for longer than it takes until it is asked again.
_NUDGE_AFTER_SECONDS = 2e-3
NUDGE_SECONDS = 0.5


class Posted(Protocol):
    """A transfer that a library was asked for."""

    def is_done(self) -> bool:
        """The library touches neither side's memory for it any more. Raises TransportError if it failed."""


class Mover(Protocol):
    """A library that moves bytes to one peer. Any thread may call."""

    def write(self, here: int, there: int, nbytes: int) -> Posted:
        """From address ``here`` to ``there`` in the peer's memory. Raises TransportError."""


class PoolMover(ABC):
    """A Mover that may read pools too: it is spared the gather where pieces are large."""

    #: Pieces that are smaller than this, on average, are gathered sooner than it takes them.
    min_piece_nbytes: int

    @abstractmethod
    def write(self, here: int, there: int, nbytes: int) -> Posted:
        """As Mover's."""

    @abstractmethod
    def write_from(self, pool: Bytes, offset: Int64, nbytes: Int64, there: int) -> Posted:
        """Pieces of a pool, one after the other, to address ``there``. Raises TransportError.

        The pool stays mapped, and known to the library, until that is over.
        """


@dataclass(frozen=True, slots=True, eq=False)
class Progressing(Patience):
    """Limits whose waits drive a library, by which alone the peer gets on."""

    #: None for a library with threads of its own.
    progress: Callable[[], None] | None = None
    #: Bytes move only while it is driven; else a wait for a word drives it now and then, and hears at once.
    is_lively: bool = True
    #: Has the peer drive its library for a while; None where it does so anyway.
    nudge: Callable[[], None] | None = None

    @classmethod
    def of(
        cls,
        patience: Patience,
        progress: Callable[[], None] | None,
        *,
        is_lively: bool = True,
        nudge: Callable[[], None] | None = None,
    ) -> Progressing:
        """The same limits."""
        return cls(
            patience.deadline,
            patience.tokens,
            patience.peer,
            patience.phase,
            patience.is_polite,
            progress,
            is_lively,
            nudge,
        )

    def wait(self, poll: select.poll) -> list[tuple[int, int]]:
        if self.progress is None:
            return Patience.wait(self, poll)
        started = time.monotonic()
        while True:
            events = poll.poll(0 if self.is_lively else _LONG_SECONDS * 1e3)
            if events:
                return events
            if self.is_lively:
                waited = self.pause(started)
            else:
                self.progress()
                waited = time.monotonic() - started
            if self.is_polite and waited < SLICE_SECONDS:
                self.check_deadline()
            else:
                self.check()

    def until_done(self, posted: Posted) -> None:
        """Wait for a posted transfer. Raises at the limits, or what broke it; then it may not be over."""
        started = time.monotonic()
        nudge_at = started + _NUDGE_AFTER_SECONDS
        while not posted.is_done():
            self.pause(started)
            self.check()
            if self.nudge is not None and time.monotonic() >= nudge_at:
                self.nudge()
                nudge_at = time.monotonic() + NUDGE_SECONDS

    def pause(self, started: float) -> float:
        """Drive the library, sleep a little; how long the wait has been, in seconds."""
        if self.progress is not None:
            self.progress()
        waited = time.monotonic() - started
        if waited < (_GIVE_WAY_TO_THREADS_SECONDS if self.progress is None else _GIVE_WAY_SECONDS):
            os.sched_yield()
        else:
            time.sleep(_SHORT_SECONDS if waited < _BUSY_SECONDS else _LONG_SECONDS)
        return waited


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """Windows of one copy, used by turns. ``arrays``: uint8, as many bytes each as the arena's windows."""

    arrays: tuple[Bytes, ...]
    addresses: tuple[int, ...]


class Arena:
    """All windows of a process, in one region that is registered once with the library.

    ``window_nbytes``: of each window.
    """

    def __init__(self, name: str, window_nbytes: int = WINDOW_NBYTES) -> None:
        self._name = name
        self._window_nbytes = window_nbytes
        self.nbytes = MAX_RINGS * WINDOWS * window_nbytes + mmap.PAGESIZE
        self.array = np.frombuffer(mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE), np.uint8)
        self.address = address_of(self.array)
        self._changed = threading.Condition()
        self._idle = [self._ring(index) for index in range(MAX_RINGS)]
        self._quarantined = 0
        # Transfers that nobody waits for any more, and what their end sets free.
        self._unsettled: list[tuple[Posted, Ring]] = []

    def keep(self, data: bytes) -> int:
        """Put a few known bytes, at most a page, beside the windows; where they lie."""
        start = self.nbytes - mmap.PAGESIZE
        self.array[start : start + len(data)] = np.frombuffer(data, np.uint8)
        return self.address + start

    @property
    def num_quarantined(self) -> int:
        """Rings that are never used again."""
        return self._quarantined

    def take(self, patience: Patience) -> Ring:
        """A ring that nothing touches. Raises CapacityError when all are quarantined, or at the limits."""
        with self._changed:
            while True:
                patience.check()
                self._settle()
                if self._idle:
                    return self._idle.pop()
                if self._quarantined >= MAX_RINGS:
                    raise CapacityError(
                        f"all {MAX_RINGS} sets of staging windows of {self._name} were left to peers "
                        "that went in the middle of a copy",
                        phase="move",
                        peer=patience.peer,
                        now_true="nothing was moved",
                        next_step="restart this process",
                    )
                self._changed.wait(SLICE_SECONDS)

    def give_back(self, ring: Ring) -> None:
        """Nothing touches it any more."""
        with self._changed:
            self._idle.append(ring)
            self._changed.notify()

    def give_back_after(self, posted: Posted, ring: Ring) -> None:
        """It is free once ``posted``, which this side started, is done; nobody waits for that."""
        with self._changed:
            self._unsettled.append((posted, ring))

    def quarantine(self, ring: Ring) -> None:  # noqa: ARG002 - dropping it is all there is to do
        """The peer may still write into it, and nothing will tell when it has stopped."""
        with self._changed:
            self._quarantined += 1
            self._changed.notify()

    def _settle(self) -> None:
        still = []
        for posted, ring in self._unsettled:
            try:
                is_over = posted.is_done()
            except Exception:  # noqa: BLE001 - whatever the library says of a failure, it is over
                is_over = True
            if is_over:
                self._idle.append(ring)
            else:
                still.append((posted, ring))
        self._unsettled = still

    def _ring(self, index: int) -> Ring:
        nbytes = self._window_nbytes
        starts = [(WINDOWS * index + turn) * nbytes for turn in range(WINDOWS)]
        return Ring(
            tuple(self.array[start : start + nbytes] for start in starts),
            tuple(self.address + start for start in starts),
        )
