"""Leave to read a peer's memory, and holding it: the one-sided copy's guard.

The peer does not see the reads. Where its board has the grant (board.py) the board is the witness, together
with the channel, which breaks when the peer is gone. Else the peer is asked, and the channel is
the witness: the server says ENDED, or hangs up, before it lets its guard reuse the memory; the reader looks
at the channel during the copy and once after its last read. Finding nothing there, it knows that no byte it
read was of reused memory. The answer to the release is read when the channel is used next: by
then it is known whether the release or an end came first. docs/decisions/0053-admission-over-shm.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

from kvferry.errors import KVFerryError, TransportError
from kvferry.transport.base import Copy, CopyEndedError
from kvferry.transport.board import PeerBoard, Posting
from kvferry.transport.channel import Channel
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part
from kvferry.transport.wire import Kind, Operation, Request, malformed

__all__ = ["Looking", "serve_look"]

_TELL_SECONDS = 0.5
# Between two looks at the board during a copy: over a network each takes a few microseconds.
_BOARD_SECONDS = 5e-3


class Looking:
    """While the block runs, the peer lets this side read the part; its value is the check to call meanwhile.

    Raises PeerError when the peer refuses or ends it, at the latest when the block is left.
    """

    def __init__(
        self, channel: Channel, copy: Copy, part: Part, patience: Patience, board: PeerBoard | None = None
    ) -> None:
        self._channel = channel
        self._copy = copy
        self._part = part
        self._patience = patience
        self._board = board
        self._posting: Posting | None = None
        self._looked_at = 0.0

    def __enter__(self) -> Callable[[], None]:
        if self._board is not None:
            part = self._part
            self._posting = self._board.look(self._copy.transfer_id, part.there, part.nbytes, self._patience)
        if self._posting is None:
            self._ask()
        else:
            self._looked_at = time.monotonic()
        return self.check

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self._channel.has_input():
            self._raise_ended()
        if self._posting is None:
            self._release()
        elif not self._posting.stands(self._patience):
            self._raise_withdrawn()

    def check(self) -> None:
        """Raise what ends the copy, if anything has."""
        self._patience.check()
        if self._channel.has_input():
            self._raise_ended()
        if self._posting is not None and time.monotonic() - self._looked_at >= _BOARD_SECONDS:
            if not self._posting.stands(self._patience):
                self._raise_withdrawn()
            self._looked_at = time.monotonic()

    def _ask(self) -> None:
        request = Request.of(Operation.LOOK, self._copy, self._part)
        self._channel.is_in_step = False
        self._channel.write(self._patience, *request.encode())
        self._channel.read_mark(Kind.ADMITTED, self._patience)

    def _release(self) -> None:
        channel = self._channel
        with contextlib.suppress(TransportError):  # gone since then: what was read is none the worse
            channel.write_mark(Kind.RELEASE, self._patience)
            channel.owed_nbytes = self._part.total_nbytes
            channel.is_in_step = True

    def _raise_ended(self) -> NoReturn:
        try:
            # Never sent by a server: ENDED, or a hang-up.
            self._channel.read_mark(Kind.RELEASE, self._patience)
        finally:
            self._channel.is_in_step = False
        raise malformed("a release, which is for this side to say", self._patience.peer)

    def _raise_withdrawn(self) -> NoReturn:
        """The board no longer has it: asked now, the peer says why."""
        self._posting = None
        self._ask()
        self._release()
        raise CopyEndedError(
            "the peer ended this copy's leave to read, and gave another",
            phase="move",
            peer=self._patience.peer,
            now_true="some of the destination bytes may have changed",
            next_step="ask again",
        )


def serve_look(channel: Channel, patience: Patience) -> None:
    """Admit, then wait for the release; if the admission ends before it, the reader is told first."""
    patience.check()
    channel.is_in_step = False
    try:
        # Said even if the grant has ended just now: a reader takes ENDED in its place for a refusal, after
        # which the channel is used again, and would use the one that is shut below.
        channel.write_mark(Kind.ADMITTED, patience.politely())
        channel.wait_said(patience)
        channel.read_mark(Kind.RELEASE, patience)
    except BaseException as error:
        if isinstance(error, KVFerryError):
            # The connection's own end is no refusal: the reader sees that by the hang-up.
            limits = Patience(time.monotonic() + _TELL_SECONDS, patience.tokens[:1], patience.peer)
            with contextlib.suppress(KVFerryError):  # gone, or not reading: the hang-up tells it too
                channel.write_ended(error, limits)
        channel.shut()
        raise
