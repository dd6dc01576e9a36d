"""Copies that the peer pushes through windows: its library writes into ours, pools are copied by us.

    asker:  request with two window addresses     FREE for each step, or STOP      RELEASE
    server:     ADMITTED, DATA for each step that landed       DONE, or ENDED

The server gathers a step into a window of its own and has its library write it into the asker's;
when that is over it says so on the channel. The asker sums, scatters, and says that the window is
free. Two windows are used by turns, so both sides work at once.

After ADMITTED the server's last word is DONE or ENDED, and it says neither while anything is on its
way; the asker's last word is RELEASE, or STOP where a limit of its own ended the copy. Until the
server's last word has come the windows stay with the channel; a channel that breaks before takes
them with it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.transport.base import Copy
from kvferry.transport.channel import Channel
from kvferry.transport.device import PoolBytes, pieces_of
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.patience import SLICE_SECONDS, Patience
from kvferry.transport.staging import step_starts
from kvferry.transport.table import Part, split_pieces, sum_of
from kvferry.transport.windows import Arena, Mover, Pair, Posted, Progressing
from kvferry.transport.wire import Kind, Operation, Request

__all__ = ["Steps", "ask_pushed", "serve_pushed"]

Int64 = NDArray[np.int64]
# A server whose copy has ended waits so long for what it had posted; then it hangs up instead.
_SETTLE_SECONDS = 0.25
_TELL_SECONDS = 2.0

_log = logging.getLogger(__name__)


class Steps:
    """A table cut into steps that each fit a window; both sides cut the same way."""

    def __init__(self, pool: PoolBytes, offset: Int64, nbytes: Int64) -> None:
        self.nbytes, (self.offset,) = split_pieces(nbytes, offset)
        self.pieces = pieces_of(pool, self.offset, self.nbytes)
        self.borders = list(pairwise(step_starts(self.nbytes).tolist()))
        self.step_nbytes = [sum_of(self.nbytes[first:last]) for first, last in self.borders]
        self.total_nbytes = sum(self.step_nbytes)


class _Settling:
    """Windows that wait on a channel for the server's last word."""

    def __init__(self, arena: Arena, pair: Pair) -> None:
        self._arena = arena
        self._pair = pair
        self.was_admitted = False

    def settled(self) -> None:
        self._arena.give_back(self._pair)

    def abandoned(self) -> None:
        self._arena.quarantine(self._pair)


def ask_pushed(
    channel: Channel, pool: PoolBytes, copy: Copy, part: Part, *, patience: Progressing, arena: Arena
) -> NDArray[np.uint64] | None:
    """Have the peer write one part into windows here; sum it and bring it to its places.

    A refusal or a limit leaves the channel usable, any other failure does not.
    """
    steps = Steps(pool, part.here, part.nbytes)
    sums = ChunkDigests(part.chunk_end) if copy.integrity else None
    pair = arena.take(patience)
    settling = _Settling(arena, pair)
    channel.unsettled = settling
    channel.is_in_step = False
    _request(channel, copy, part, patience, pair)
    try:
        channel.read_mark(Kind.ADMITTED, patience)
        settling.was_admitted = True
        for index, (first, last) in enumerate(steps.borders):
            patience.check()
            nbytes = steps.step_nbytes[index]
            channel.read_mark(Kind.DATA, patience, nbytes, is_there=not index)
            landed = pair.arrays[index % 2][:nbytes]
            if sums is not None:
                sums.feed(landed)
            steps.pieces.scatter(first, last, landed)
            # The server waits for no word of the last step; it is said with the release.
            say = channel.write_mark if index + 1 < len(steps.borders) else channel.hold_mark
            say(Kind.FREE, patience, nbytes)
        channel.read_mark(Kind.DONE, patience, steps.total_nbytes, is_there=True)
        channel.is_in_step = True
    finally:
        _last_word(channel, settling, patience)
    return sums.digests() if sums else None


def _request(channel: Channel, copy: Copy, part: Part, patience: Patience, pair: Pair) -> None:
    request = Request(
        Operation.PUSH,
        copy.transfer_id,
        copy.deadline - time.monotonic(),
        copy.integrity,
        part.there,
        part.nbytes,
        np.array(pair.addresses, np.int64),
        np.zeros(2, np.int64),
    )
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

    However it ends, nothing reads this side's pool any more when it returns. Raises only what makes
    the channel useless, or what came up before the peer was told that it is admitted.
    """
    patience.check()
    steps = Steps(pool, request.offset, request.nbytes)
    pair = arena.take(patience)
    channel.is_in_step = False
    pushing = _Pushing(channel, patience, mover, pair, request.chunk_end.tolist())
    try:
        # It goes with the first step's word, or with why there is none.
        channel.hold_mark(Kind.ADMITTED, patience)
        pushing.push(steps)
        channel.write_mark(Kind.DONE, patience, steps.total_nbytes)
        pushing.read_last_word(patience)
    except TransportError:
        raise
    except KVFerryError as error:
        _log.debug("%s: %s", patience.peer, error)
        if not pushing.settle():
            raise TransportError("what was posted does not end", phase="move", peer=patience.peer) from error
        # Without the grant's token, which may be what ended it: a channel that is closed before the
        # reader has spoken its last word breaks under it, and it never reads why.
        limits = Progressing.of(
            Patience(time.monotonic() + _TELL_SECONDS, patience.tokens[:1], patience.peer), patience.progress
        )
        channel.write_ended(error, limits)
        if not isinstance(error, _StoppedError):
            pushing.read_last_word(limits)
    finally:
        if pushing.posted is None:
            arena.give_back(pair)
        else:
            arena.give_back_after(pushing.posted, pair)
    channel.is_in_step = True


class _Pushing:
    """The server's side of one copy."""

    def __init__(
        self, channel: Channel, patience: Progressing, mover: Mover, pair: Pair, there: list[int]
    ) -> None:
        self.posted: Posted | None = None
        self._channel = channel
        self._patience = patience
        self._mover = mover
        self._pair = pair
        self._there = there

    def push(self, steps: Steps) -> None:
        nbytes_before = 0
        for index, (first, last) in enumerate(steps.borders):
            turn, nbytes = index % 2, steps.step_nbytes[index]
            steps.pieces.gather(first, last, self._pair.arrays[turn][:nbytes])
            self._finish(nbytes_before)
            if index >= 2:
                self._read_word(self._patience, Kind.FREE)
            self.posted = self._mover.write(self._pair.addresses[turn], self._there[turn], nbytes)
            nbytes_before = nbytes
        self._finish(nbytes_before, is_last=True)

    def settle(self) -> bool:
        """Nothing is on its way: true at once, or when what was posted is done or has failed."""
        limits = Progressing.of(
            Patience(time.monotonic() + _SETTLE_SECONDS, self._patience.tokens[:1], self._patience.peer),
            self._patience.progress,
        )
        if self.posted is not None:
            try:
                limits.until_done(self.posted)
            except TransportError:
                pass  # failed: that is an end too
            except KVFerryError:
                return False
            self.posted = None
        return True

    def read_last_word(self, limits: Patience) -> None:
        """RELEASE or STOP, after whatever FREE the asker still says."""
        with contextlib.suppress(_StoppedError):
            while self._read_word(limits, Kind.FREE, Kind.RELEASE) is not Kind.RELEASE:
                pass

    def _finish(self, nbytes: int, *, is_last: bool = False) -> None:
        if self.posted is not None:
            self._patience.until_done(self.posted)
            self.posted = None
            say = self._channel.hold_mark if is_last else self._channel.write_mark  # DONE follows the last
            say(Kind.DATA, self._patience, nbytes)

    def _read_word(self, limits: Patience, *expected: Kind) -> Kind:
        word = self._channel.read_word(limits, *expected, Kind.STOP)
        if word is Kind.STOP:
            raise _StoppedError("the reader stopped")
        return word
