"""Reads that this side posts. With integrity they land in windows, are summed there, and scattered.

Without, they land in the pool at once. NIXL has no cancel, and giving a request back does not stop
it: seen over tcp, nine tenths of a copy landed after the request and its peer had been let go of.
So such a read ends when the library is through with the pool, which may be after its deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DeadlineError, KVFerryError, LocalError, TransportError
from kvferry.transport.device import PoolBytes
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.memory import address_of
from kvferry.transport.nixl_agent import NixlPeer, NixlPosted, rows
from kvferry.transport.patience import Patience
from kvferry.transport.staged import Steps
from kvferry.transport.staging import step_starts
from kvferry.transport.table import Part, split_pieces
from kvferry.transport.windows import NUDGE_SECONDS, Arena, Progressing

__all__ = ["Reading"]

Int64 = NDArray[np.int64]
Check = Callable[[], None]

# Over cma a post lasts as long as its bytes, and no look at the limits comes between: these take 15 to 25 ms,
# and 4 KiB pieces at most 50 ms. What ends nothing before its time may be late by so much.
SLICE_NBYTES = 128 << 20
# Over tcp these take as long, and of what a peer stalls in, no more is waited for.
LIVELY_SLICE_NBYTES = 32 << 20
SLICE_PIECES = 8192
# A NIC ends what it cannot finish within seconds. After this long a person has to look.
SETTLE_SECONDS = 120.0

_log = logging.getLogger(__name__)


class Reading:
    """One copy's reads from the peer's pool at address ``base`` into ``pool``.

    ``check`` is called between pieces of work; it raises when the copy must end.
    """

    def __init__(
        self, peer: NixlPeer, base: int, pool: PoolBytes, patience: Progressing, check: Check
    ) -> None:
        self._peer = peer
        self._base = base
        self._pool = pool
        self._patience = patience
        self._check = check

    def staged(self, part: Part, arena: Arena, *, is_summed: bool) -> NDArray[np.uint64] | None:
        """Read one part through windows; the digests of its chunks where they are wanted."""
        steps = Steps(self._pool, part.here, part.nbytes)
        _, (there,) = split_pieces(part.nbytes, part.there)
        sums = ChunkDigests(part.chunk_end) if is_summed else None
        ring = arena.take(self._patience)
        posted: NixlPosted | None = None

        def post(index: int) -> NixlPosted:
            pieces = slice(*steps.borders[index])
            nbytes = steps.nbytes[pieces]
            window = rows(ring.addresses[index % len(ring.addresses)], nbytes.cumsum() - nbytes, nbytes)
            return self._peer.post("READ", window, rows(self._base, there[pieces], nbytes))

        try:
            for index, (first, last) in enumerate(steps.borders):
                posted = posted or post(index)
                self._patience.until_done(posted)
                posted = None
                self._check()
                if index + 1 < len(steps.borders):
                    posted = post(index + 1)
                landed = ring.arrays[index % len(ring.arrays)][: steps.step_nbytes[index]]
                if sums is not None:
                    sums.feed(landed)
                steps.pieces.scatter(first, last, landed)
        finally:
            if posted is None:
                arena.give_back(ring)
            else:
                arena.give_back_after(posted, ring)
        return sums.digests() if sums is not None else None

    def direct(self, part: Part) -> None:
        """Read one part straight into the pool, which is in this process."""
        assert isinstance(self._pool, np.ndarray)
        limit = LIVELY_SLICE_NBYTES if self._patience.is_lively else SLICE_NBYTES
        nbytes, here, there = part.nbytes, part.here, part.there
        slices: Iterable[tuple[int, int]] = ((0, len(nbytes)),)
        if part.total_nbytes > limit or len(nbytes) > SLICE_PIECES:
            nbytes, (here, there) = split_pieces(nbytes, here, there, limit=limit)
            slices = _slices(nbytes, limit)
        for first, last in slices:
            if first:  # before the first and after the last the caller looks
                self._check()
            pieces = slice(first, last)
            posted = self._peer.post(
                "READ",
                rows(address_of(self._pool), here[pieces], nbytes[pieces]),
                rows(self._base, there[pieces], nbytes[pieces]),
            )
            try:
                self._patience.until_done(posted)
            except TransportError:
                raise
            except KVFerryError:
                self._settle(posted)
                raise

    def _settle(self, posted: NixlPosted) -> None:
        """Wait until the library is through with the pool, whatever the limits say."""
        peer, until = self._patience.peer, time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < until:
            self._peer.nudge()
            limits = Patience(time.monotonic() + NUDGE_SECONDS, (), peer)
            try:
                Progressing.of(limits, self._peer.progress).until_done(posted)
            except DeadlineError:
                continue
            except TransportError:
                pass  # it failed: that is an end too
            return
        _log.critical("%s: NIXL does not end a read after %g s", peer, SETTLE_SECONDS)
        raise LocalError(
            f"NIXL does not end a read that was given up {SETTLE_SECONDS:g} s ago",
            phase="move",
            peer=peer,
            now_true="it may still write into the destination blocks: they must not be used",
            next_step="restart this process",
        )


def _slices(nbytes: Int64, limit: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 piece of each post."""
    for first, last in pairwise(step_starts(nbytes, limit).tolist()):
        for start in range(first, last, SLICE_PIECES):
            yield start, min(start + SLICE_PIECES, last)
