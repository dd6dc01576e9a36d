"""A data channel: one non-blocking stream socket that blocking data threads talk on by turns."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, PeerError, TransportError
from kvferry.transport.memory import address_of
from kvferry.transport.patience import Patience
from kvferry.transport.staging import STEP_NBYTES
from kvferry.transport.vectored import IOVecs, read_vectored, write_vectored
from kvferry.transport.wire import (
    MARK_MAGIC,
    MARK_NBYTES,
    MAX_REASON_NBYTES,
    Kind,
    decode_reason,
    encode_reason,
    malformed,
)

if TYPE_CHECKING:
    from kvferry.transport.seal import ChannelSeals

__all__ = ["SAID_NBYTES", "Channel", "Unsettled", "make_marks", "mark_of", "vector_of"]


class Unsettled(Protocol):
    """Memory that a peer writes into without this side's doing."""

    was_admitted: bool

    def settled(self) -> None:
        """The peer has said that it is over."""

    def abandoned(self) -> None:
        """The channel is gone before the peer has said so."""


# Up to this much is said in one buffer: an I/O vector costs more than the copy into it.
SAID_NBYTES = 32 << 10
_MARK = struct.Struct("<IIQ")


def vector_of(*buffers: NDArray[np.generic]) -> IOVecs:
    """One entry for each contiguous array; the arrays must outlive the call that uses it."""
    rows = [(address_of(buffer), buffer.nbytes) for buffer in buffers if buffer.nbytes]
    return np.array(rows, np.uint64).reshape(-1, 2)


def make_marks(kind: Kind, nbytes: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """Marks of one kind, one for each entry of ``nbytes``: uint64, [marks, 2], as they go over the wire."""
    marks = np.empty((np.size(nbytes), 2), "<u8")
    marks[:, 0] = MARK_MAGIC | kind << 32
    marks[:, 1] = nbytes
    return marks


def mark_of(kind: Kind, nbytes: int) -> bytes:
    """One mark."""
    return _MARK.pack(MARK_MAGIC, kind, nbytes)


class Channel:
    """Takes over a connected socket. Not for two threads at once, save ``shut`` which ends both.

    With ``seals`` everything said on it is encrypted and authenticated, by records (seal.py).
    """

    def __init__(self, sock: socket.socket, seals: ChannelSeals | None = None) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._seals = seals
        self.fd = sock.fileno()
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        #: Both sides are between requests; only such a channel may be used again.
        self.is_in_step = True
        #: The peer still owes a DONE of so many bytes; None when it owes nothing.
        self.owed_nbytes: int | None = None
        #: What the peer may still write into, until its DONE or ENDED.
        self.unsettled: Unsettled | None = None
        # Said with the next words.
        self._held = b""

    @property
    def is_sealed(self) -> bool:
        """Pieces cannot go straight from and into the pools."""
        return self._seals is not None

    def write(
        self,
        patience: Patience,
        *buffers: bytes | NDArray[np.generic],
        on_input: Callable[[], NoReturn] | None = None,
    ) -> None:
        """Send the buffers one after the other. The peer reads each as a whole: see ``read_into``.

        ``on_input`` is called when the peer says something before all is sent, which ends the copy.
        """
        if self._seals is None:
            said = [b if isinstance(b, bytes) else b.data for b in buffers]
            nbytes = sum([part.nbytes if isinstance(part, memoryview) else len(part) for part in said])
            if nbytes <= SAID_NBYTES:
                self._say(b"".join(said), patience, on_input)
                return
        self.flush(patience)
        arrays = [np.frombuffer(b, np.uint8) if isinstance(b, bytes) else b for b in buffers if len(b)]
        if self._seals is None:
            write_vectored(self.fd, vector_of(*arrays), patience, on_input)
            return
        if not patience.is_polite:
            patience.check()
        # A record that is made and not sent would break the seal of the next.
        polite = replace(patience, is_polite=True)
        for records in self._seals.sealed([array.reshape(-1).view(np.uint8) for array in arrays]):
            write_vectored(self.fd, vector_of(*records), polite, on_input)

    def write_vector(
        self, vector: IOVecs, patience: Patience, on_input: Callable[[], NoReturn] | None = None
    ) -> None:
        """Send pieces from where they are. Not where it is sealed."""
        self.flush(patience)
        write_vectored(self.fd, vector, patience, on_input)

    def read_vector(self, vector: IOVecs, patience: Patience) -> None:
        """Receive pieces to where they belong. Not where it is sealed."""
        self.flush(patience)
        read_vectored(self.fd, vector, patience)

    def hold(self, patience: Patience, *buffers: bytes | NDArray[np.generic]) -> None:
        """Say something with the next words, or at the latest when this side waits for the peer's."""
        if self._seals is None:
            self._held = b"".join((self._held, *(b if isinstance(b, bytes) else b.data for b in buffers)))
        else:
            self.write(patience, *buffers)

    def flush(self, patience: Patience) -> None:
        """Say what is held."""
        if self._held:
            self._say(b"", patience)

    def read(self, nbytes: int, patience: Patience, start: bytes = b"") -> NDArray[np.uint8]:
        """Receive exactly ``nbytes``, which the peer wrote as one buffer; the caller has bounded them.

        ``start`` is what came of them already.
        """
        if self._seals is None and nbytes <= SAID_NBYTES:
            left = nbytes - len(start)
            heard = start + self._hear(left, left, patience, is_there=bool(start)) if left else start
            return np.frombuffer(heard, np.uint8)
        data = np.empty(nbytes, np.uint8)
        data[: len(start)] = np.frombuffer(start, np.uint8)
        self.read_into(patience, data[len(start) :])
        return data

    def read_start(self, least: int, most: int, patience: Patience, *, is_there: bool = False) -> bytes:
        """Receive at least ``least`` bytes, and what is there behind them, up to ``most`` in all.

        The peer wrote the least as one buffer; over a sealed channel nothing more is taken.
        ``is_there``: they have come, as far as is known, so that no wait is begun for them.
        """
        if self._seals is not None:
            return self.read(least, patience).tobytes()
        return self._hear(least, most, patience, is_there=is_there)

    def read_into(self, patience: Patience, *arrays: NDArray[np.generic]) -> None:
        """Fill arrays, each of which the peer wrote as one buffer. Raises CorruptError for a broken seal."""
        self.flush(patience)
        if self._seals is None:
            read_vectored(self.fd, vector_of(*arrays), patience)
            return
        self._seals.open_into(
            [array.reshape(-1).view(np.uint8) for array in arrays if array.nbytes],
            lambda records: read_vectored(self.fd, vector_of(*records), patience),
        )

    def wait_said(self, patience: Patience) -> None:
        """Wait, within the limits, until the peer says something or hangs up."""
        self.flush(patience)
        patience.wait(self._readable)

    def write_mark(self, kind: Kind, patience: Patience, nbytes: int = 0) -> None:
        if self._seals is None:
            self._say(mark_of(kind, nbytes), patience)
        else:
            self.write(patience, mark_of(kind, nbytes))

    def hold_mark(self, kind: Kind, patience: Patience, nbytes: int = 0) -> None:
        self.hold(patience, mark_of(kind, nbytes))

    def write_ended(self, error: KVFerryError, patience: Patience) -> None:
        """Tell the peer why its copy ended."""
        reason = encode_reason(error)
        self.write(patience, mark_of(Kind.ENDED, len(reason)), reason)

    def read_mark(self, kind: Kind, patience: Patience, nbytes: int = 0, *, is_there: bool = False) -> None:
        """Receive the mark that must come now. Raises PeerError with the reason for ENDED."""
        mark = self.read_start(MARK_NBYTES, MARK_NBYTES, patience, is_there=is_there)
        self.check_mark(mark, kind, patience, nbytes)

    def check_mark(
        self, mark: bytes, kind: Kind, patience: Patience, nbytes: int, behind: bytes = b""
    ) -> None:
        """Accept a mark that arrived if it is the expected one, else raise as ``read_mark`` does.

        ``behind``: what came with it.
        """
        magic, found, length = _MARK.unpack(mark)
        if (magic, found, length) == (MARK_MAGIC, kind, nbytes):
            return
        if magic != MARK_MAGIC:
            raise malformed("bytes that are no mark", patience.peer)
        if found == Kind.ENDED:
            self.raise_reason(length, patience, behind)
        raise malformed(f"mark {found} of {length} bytes, not {kind.name}", patience.peer)

    def read_word(self, patience: Patience, *expected: Kind) -> Kind:
        """Receive one of the expected marks, of any number of bytes. Raises as ``read_mark`` does."""
        mark = self.read_start(MARK_NBYTES, MARK_NBYTES, patience)
        magic, found, nbytes = _MARK.unpack(mark)
        if magic == MARK_MAGIC and found in expected:
            return Kind(found)
        self.check_mark(mark, expected[0], patience, nbytes)
        return expected[0]

    def raise_reason(self, nbytes: int, patience: Patience, start: bytes = b"") -> NoReturn:
        """The error that the peer tells in so many bytes; ``start`` is what came of them, and behind them."""
        if nbytes > MAX_REASON_NBYTES:
            raise malformed(f"a reason of {nbytes} bytes", patience.peer)
        reason = self.read(nbytes, patience, start[:nbytes]).tobytes()
        self.is_in_step = len(start) <= nbytes
        raise decode_reason(reason, patience.peer)

    def settle(self, patience: Patience) -> bool:
        """Take what the peer owes; False if the channel is of no more use. Raises at the limits."""
        owed, self.owed_nbytes = self.owed_nbytes, None
        self.is_in_step = False
        try:
            if owed is not None:
                self.read_mark(Kind.DONE, patience, owed, is_there=True)
            if self.unsettled is not None:
                self._read_to_end(self.unsettled, patience)
        except (PeerError, TransportError):
            self.is_in_step = False  # the reason may have come whole: the peer hangs up behind it
            return False
        # Between requests the peer has nothing to say: input means that it hung up.
        self.is_in_step = not self.has_input()
        return self.is_in_step

    def _take_held(self) -> bytes:
        held, self._held = self._held, b""
        return held

    def _say(self, data: bytes, patience: Patience, on_input: Callable[[], NoReturn] | None = None) -> None:
        """Send a few bytes, behind what is held; the socket nearly always has room, so that is tried.

        At the limits what was held before stays held, and so does the rest of what was begun: the next words
        stand behind it, and none is lost or cut.
        """
        if not patience.is_polite:
            patience.check()
        data = self._take_held() + data
        left = memoryview(data)
        poll: select.poll | None = None
        try:
            while left:
                try:
                    left = left[self._sock.send(left) :]
                except (BlockingIOError, InterruptedError):
                    if poll is None:
                        poll = select.poll()
                        poll.register(self.fd, select.POLLOUT | (select.POLLIN if on_input else 0))
                    ((_, events),) = patience.wait(poll)
                    if on_input and events & select.POLLIN:
                        on_input()
                except OSError as error:
                    raise patience.lost(str(error.strerror), len(data) - len(left)) from None
        except KVFerryError:
            self._held = bytes(left)
            raise

    def _hear(self, least: int, most: int, patience: Patience, *, is_there: bool = False) -> bytes:
        """Receive ``least`` to ``most`` bytes; the first try waits for none where they are there."""
        heard = b""
        while len(heard) < least:
            if not is_there:
                self.flush(patience)
                patience.wait(self._readable)
            is_there = False
            try:
                got = self._sock.recv(most - len(heard))
            except (BlockingIOError, InterruptedError):
                continue
            except OSError as error:
                raise patience.lost(str(error.strerror), len(heard)) from None
            if not got:
                raise patience.lost("the peer closed it", len(heard))
            heard = heard + got if heard else got
        return heard

    def take_settled(self) -> None:
        """The peer has said its last word: whatever it wrote into is free."""
        unsettled, self.unsettled = self.unsettled, None
        if unsettled is not None:
            unsettled.settled()

    def _read_to_end(self, unsettled: Unsettled, patience: Patience) -> None:
        """Pass over what comes before the peer's last word. At the limits the channel can try again."""
        word = Kind.DATA
        while word is not Kind.DONE:
            self.is_in_step = True
            patience.wait(self._readable)
            self.is_in_step = False
            try:
                word = self.read_word(patience, Kind.ADMITTED, Kind.DATA, Kind.DONE)
            except PeerError:
                if not self.is_in_step:
                    raise  # no mark
                if not unsettled.was_admitted:  # refused: nobody will read what was said after the request
                    self.take_settled()
                    raise
                word = Kind.DONE
            if word is Kind.ADMITTED:
                unsettled.was_admitted = True
        self.take_settled()

    def has_input(self) -> bool:
        """The peer said something, or is gone; never waits."""
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def wait_input(self) -> None:
        """Wait, however long, for the peer to say something, or to hang up."""
        self._readable.poll()

    def drain(self, seconds: float) -> None:
        """Throw away what still comes until the peer hangs up, so that it reads what was said to it.

        A socket closed over unread bytes resets the connection, and the reset can overtake the
        last words.
        """
        scratch = bytearray(STEP_NBYTES)
        deadline = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            while poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                if not self._sock.recv_into(scratch):
                    return

    def shut(self) -> None:
        """End both directions, from any thread; whoever waits on the channel wakes up."""
        with contextlib.suppress(OSError):  # the peer was faster, or it is closed
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        unsettled, self.unsettled = self.unsettled, None
        if unsettled is not None:
            unsettled.abandoned()
        self._sock.close()
