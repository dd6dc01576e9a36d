"""Copies that the peer pushes through windows: its library writes into ours, pools are copied by us.

    asker:  request with window addresses     FREE for each window to be used again, or STOP      RELEASE
    server:     ADMITTED, DATA for each step that landed       DONE, or ENDED

The server gathers a step into a window of its own and has its library write it into the asker's;
when that is over it says so on the channel. A few large pieces the library takes from the pool, where
it can. The asker sums, scatters, and says that the window is free. Windows are used by turns, and of
three two are on their way: a step that waits behind another one spares the library a pause between.

After ADMITTED the server's last word is DONE or ENDED, and it says neither while anything is on its
way; the asker's last word is RELEASE, or STOP where a limit of its own ended the copy. Until the
server's last word has come the windows stay with the channel; a channel that breaks before takes
them with it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.transport.base import Copy
from kvferry.transport.channel import Channel
from kvferry.transport.device import DeviceBytes, PoolBytes, pieces_of
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.patience import SLICE_SECONDS, Patience
from kvferry.transport.staging import STEP_NBYTES, step_starts
from kvferry.transport.table import Part, split_pieces, sum_of
from kvferry.transport.windows import WINDOW_NBYTES, Arena, Mover, PoolMover, Posted, Progressing, Ring
from kvferry.transport.wire import Kind, Operation, Request

__all__ = ["Steps", "ask_pushed", "serve_pushed"]

Int64 = NDArray[np.int64]
# Full windows spare words, where pieces fill them.
_PUSHED_NBYTES = (WINDOW_NBYTES, STEP_NBYTES)
# A server whose copy has ended waits so long for what it had posted; then it hangs up instead.
_SETTLE_SECONDS = 0.25
_TELL_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Steps:
    """A table cut into steps that each fit a window; both sides cut the same way.

    Of about ``nbytes_each``, the first of these that makes no step larger than a window: one of
    STEP_NBYTES never does.
    """

    def __init__(
        self, pool: PoolBytes, offset: Int64, nbytes: Int64, nbytes_each: Sequence[int] = (STEP_NBYTES,)
    ) -> None:
        for each in nbytes_each:
            self.nbytes, (self.offset,) = split_pieces(nbytes, offset, limit=each)
            self.borders = list(pairwise(step_starts(self.nbytes, each).tolist()))
            self.step_nbytes = [sum_of(self.nbytes[first:last]) for first, last in self.borders]
            if max(self.step_nbytes, default=0) <= WINDOW_NBYTES:
                break
        self.pieces = pieces_of(pool, self.offset, self.nbytes)
        self.total_nbytes = sum(self.step_nbytes)


class _Settling:
    """Windows that wait on a channel for the server's last word."""

    def __init__(self, arena: Arena, ring: Ring) -> None:
        self._arena = arena
        self._ring = ring
        self.was_admitted = False

    def settled(self) -> None:
        self._arena.give_back(self._ring)

    def abandoned(self) -> None:
        self._arena.quarantine(self._ring)


def ask_pushed(
    channel: Channel, pool: PoolBytes, copy: Copy, part: Part, *, patience: Progressing, arena: Arena
) -> NDArray[np.uint64] | None:
    """Have the peer write one part into windows here; sum it and bring it to its places.

    A refusal or a limit leaves the channel usable, any other failure does not.
    """
    steps = Steps(pool, part.here, part.nbytes, _PUSHED_NBYTES)
    sums = ChunkDigests(part.chunk_end) if copy.integrity else None
    ring = arena.take(patience)
    channel.is_in_step = False
    try:
        _request(channel, copy, part, patience, ring)
    except BaseException:
        arena.give_back(ring)  # nobody serves a request that is not whole
        raise
    channel.unsettled = settling = _Settling(arena, ring)
    try:
        channel.read_mark(Kind.ADMITTED, patience)
        settling.was_admitted = True
        for index, (first, last) in enumerate(steps.borders):
            patience.check()
            nbytes = steps.step_nbytes[index]
            channel.read_mark(Kind.DATA, patience, nbytes, is_there=not index)
            landed = ring.arrays[index % len(ring.arrays)][:nbytes]
            if sums is not None:
                sums.feed(landed)
            steps.pieces.scatter(first, last, landed)
            if index + len(ring.arrays) < len(steps.borders):  # no other step waits for this window
                channel.write_mark(Kind.FREE, patience, nbytes)
        channel.read_mark(Kind.DONE, patience, steps.total_nbytes, is_there=True)
        channel.is_in_step = True
    finally:
        _last_word(channel, settling, patience)
    return sums.digests() if sums else None


def _request(channel: Channel, copy: Copy, part: Part, patience: Patience, ring: Ring) -> None:
    windows = np.array(ring.addresses, np.int64), np.zeros(len(ring.addresses), np.int64)
    request = Request.of(Operation.PUSH, copy, part, *windows)
    channel.write(patience, *request.encode())


def _last_word(channel: Channel, settling: _Settling, patience: Progressing) -> None:
    """RELEASE where the server's last word has come, STOP and a short wait for it where a limit was met."""
    is_settled, channel.is_in_step = channel.is_in_step, False
    if is_settled:
        channel.take_settled()
        if not settling.was_admitted:  # refused: a request is all that the server has heard
            channel.is_in_step = True
            return
    elif not patience.is_over():
        return  # the channel broke, or the peer is not to be trusted with it
    limits = Progressing.of(Patience(time.monotonic() + SLICE_SECONDS, (), patience.peer), patience.progress)
    with contextlib.suppress(TransportError, DeadlineError):  # then it is closed, and windows go with it
        channel.write_mark(Kind.RELEASE if is_settled else Kind.STOP, limits)
        channel.is_in_step = True
    if channel.is_in_step and not is_settled:
        with contextlib.suppress(DeadlineError):  # it settles when it is used next
            channel.settle(limits)


class _StoppedError(KVFerryError):
    """The asker said STOP."""


def serve_pushed(
    channel: Channel,
    pool: PoolBytes,
    request: Request,
    *,
    patience: Progressing,
    arena: Arena,
    mover: Mover,
) -> None:
    """Write what an admitted peer reads into its windows, step by step; tells the peer how it ended.

    However it ends, nothing reads this side's pool any more when it returns, but for what a library that
    reads pools has not ended a quarter of a second after a copy that failed: that may still read its
    pieces, into windows which the peer does not look into. Raises only what makes the channel useless, or
    what came up before the peer was told that it is admitted.
    """
    patience.check()
    steps = Steps(pool, request.offset, request.nbytes, _PUSHED_NBYTES)
    ring = arena.take(patience)
    channel.is_in_step = False
    pushing = _Pushing(channel, patience, ring, request.chunk_end.tolist(), mover=mover, pool=pool)
    try:
        # It goes with the first step's word, or with why there is none.
        channel.hold_mark(Kind.ADMITTED, patience)
        pushing.push(steps)
    except TransportError:
        pushing.settle()
        raise
    except KVFerryError as error:
        _log.debug("%s: %s", patience.peer, error)
        if not pushing.settle():
            raise TransportError("what was posted does not end", phase="move", peer=patience.peer) from error
        # Without the grant's token, which may be what ended it: a channel that is closed before the
        # reader has spoken its last word breaks under it, and it never reads why.
        limits = _telling(patience)
        channel.write_ended(error, limits)
        if not isinstance(error, _StoppedError):
            pushing.read_last_word(limits)
    else:
        # That the grant ends from here on is for the protocol to say: ENDED behind DONE would be taken for
        # the answer to the next request.
        limits = _telling(patience)
        channel.write_mark(Kind.DONE, limits, steps.total_nbytes)
        pushing.read_last_word(limits)
    finally:
        if pushing.posted:
            arena.give_back_after(_All(list(pushing.posted)), ring)
        else:
            arena.give_back(ring)
    channel.is_in_step = True


def _telling(patience: Progressing) -> Progressing:
    """Limits for the last words of both sides, whatever has become of the grant."""
    limits = Patience(time.monotonic() + _TELL_SECONDS, patience.tokens[:1], patience.peer)
    return Progressing.of(limits, patience.progress)


class _All:
    """Transfers of one copy, over when each of them is."""

    def __init__(self, posted: list[Posted]) -> None:
        self._left = posted

    def is_done(self) -> bool:
        while self._left:
            try:
                if not self._left[-1].is_done():
                    return False
            except TransportError:
                pass  # failed: that is an end too
            self._left.pop()
        return True


class _Pushing:
    """The server's side of one copy. ``there``: addresses of the reader's windows."""

    def __init__(
        self,
        channel: Channel,
        patience: Progressing,
        ring: Ring,
        there: list[int],
        *,
        mover: Mover,
        pool: PoolBytes,
    ) -> None:
        #: What is on its way, the oldest first: one less than there are windows, which that one waits for.
        self.posted: deque[Posted] = deque()
        self._channel = channel
        self._patience = patience
        self._mover = mover
        self._ring = ring
        self._there = there
        self._most = min(len(there), len(ring.arrays)) - 1
        # What takes steps of large pieces straight from the pool.
        self._source: tuple[PoolMover, NDArray[np.uint8]] | None = None
        if isinstance(mover, PoolMover) and not isinstance(pool, DeviceBytes):
            self._source = mover, pool
        # Steps that the reader was told of.
        self._said = 0

    def push(self, steps: Steps) -> None:
        for index in range(len(steps.borders)):
            post = self._prepare(steps, index)
            self._say_landed(steps, self._most - 1)
            if index >= len(self._there):
                self._read_word(self._patience, Kind.FREE)
            self.posted.append(post())
        self._say_landed(steps, 0)

    def _prepare(self, steps: Steps, index: int) -> Callable[[], Posted]:
        """Make one step ready beside those that are on their way; what posts it."""
        (first, last), step_nbytes = steps.borders[index], steps.step_nbytes[index]
        there = self._there[index % len(self._there)]
        if self._source is not None and step_nbytes >= (last - first) * self._source[0].min_piece_nbytes:
            mover, pool = self._source
            return partial(mover.write_from, pool, steps.offset[first:last], steps.nbytes[first:last], there)
        turn = index % len(self._ring.arrays)
        window = self._ring.arrays[turn][:step_nbytes]
        steps.pieces.gather(first, last, window)
        return partial(self._mover.write, self._ring.addresses[turn], there, window.nbytes)

    def _say_landed(self, steps: Steps, most: int) -> None:
        """Tell of steps that have landed; wait until at most so many are on their way."""
        while self.posted and (len(self.posted) > most or self.posted[0].is_done()):
            self._patience.until_done(self.posted[0])
            self.posted.popleft()
            nbytes = steps.step_nbytes[self._said]
            self._said += 1
            is_last = self._said == len(steps.borders)
            say = self._channel.hold_mark if is_last else self._channel.write_mark  # DONE follows the last
            say(Kind.DATA, self._patience, nbytes)

    def settle(self) -> bool:
        """Nothing is on its way: true at once, or when what was posted is done or has failed."""
        limits = Progressing.of(
            Patience(time.monotonic() + _SETTLE_SECONDS, self._patience.tokens[:1], self._patience.peer),
            self._patience.progress,
        )
        while self.posted:
            try:
                limits.until_done(self.posted[0])
            except TransportError:
                pass  # failed: that is an end too
            except KVFerryError:
                return False
            self.posted.popleft()
        return True

    def read_last_word(self, limits: Patience) -> None:
        """RELEASE or STOP, after whatever FREE the asker still says."""
        with contextlib.suppress(_StoppedError):
            while self._read_word(limits, Kind.FREE, Kind.RELEASE) is not Kind.RELEASE:
                pass

    def _read_word(self, limits: Patience, *expected: Kind) -> Kind:
        word = self._channel.read_word(limits, *expected, Kind.STOP)
        if word is Kind.STOP:
            raise _StoppedError("the reader stopped")
        return word
