"""Control frames over one stream socket of an event loop: length, kind, bytes.

Kind 0 carries a frame of the protocol. The other kinds are the transport's own signals, taken as
they arrive, and never wait for a reader of frames, save behind a reader that has 1 MiB unread.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError, LocalError, PeerError, TransportError
from kvferry.transport.base import MAX_FRAME_NBYTES

if TYPE_CHECKING:
    from kvferry.transport.tls import TlsStream

__all__ = ["CLOSE_SECONDS", "Control", "Signal", "broken"]

HEAD = struct.Struct("<IB")
MAX_SIGNAL_NBYTES = 1024
# A peer that sends faster than this side reads is held back by the socket from here on.
UNREAD_NBYTES = 1 << 20
# How long a close waits for the peer to take what was sent and to close its side.
CLOSE_SECONDS = 2.0


class Signal(enum.IntEnum):
    """What a control frame is for."""

    FRAME = 0
    OPEN_CHANNEL = 1
    CANNOT_OPEN = 2
    DRIVE = 3


_SIGNALS = frozenset(Signal)


def broken(reason: str, peer: str) -> TransportError:
    """The error for a control connection that is gone."""
    return TransportError(
        reason,
        phase="control",
        peer=peer,
        now_true="the connection is closed; what was sent last may or may not have been delivered",
        next_step="connect again",
    )


class Control(asyncio.Protocol):
    """Frames both ways. Every method is for the event loop's thread.

    ``on_signal`` gets the transport's own signals; ``on_lost`` is called once, with the reason,
    when the connection is gone for whatever cause. With ``tls``, whose handshake is over, all of it
    is encrypted.
    """

    def __init__(
        self,
        peer: str,
        on_signal: Callable[[Signal, bytes], None],
        on_lost: Callable[[KVFerryError], None],
        tls: TlsStream | None = None,
    ) -> None:
        self._peer = peer
        self._on_signal = on_signal
        self._on_lost = on_lost
        self._tls = tls
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()
        self._unread_nbytes = 0
        self._error: KVFerryError | None = None
        self._arrival = asyncio.Event()
        self._can_write = asyncio.Event()
        self._lost = asyncio.Event()
        self._is_closing = False

    async def send(self, frame: bytes) -> None:
        """Returns once the kernel has the frame. Raises LocalError, or what broke the connection."""
        if len(frame) > MAX_FRAME_NBYTES:
            raise LocalError(
                f"a control frame of {len(frame)} bytes is above the limit of {MAX_FRAME_NBYTES}",
                phase="control",
                peer=self._peer,
                now_true="nothing was sent",
                next_step="send less in one frame",
            )
        self._write(Signal.FRAME, frame)
        await self._can_write.wait()
        if self._error is not None:
            raise self._error

    def signal(self, kind: Signal, payload: bytes = b"") -> None:
        """Send a signal if the connection still stands."""
        if self._error is None:
            self._write(kind, payload[:MAX_SIGNAL_NBYTES])

    async def receive(self) -> bytes:
        """The next frame; frames that came before the end are still given. Safe to cancel."""
        while not self._frames:
            if self._error is not None:
                raise self._error
            self._arrival.clear()
            await self._arrival.wait()
        frame = self._frames.popleft()
        self._unread_nbytes -= len(frame)
        self._regulate()
        return frame

    async def close(self) -> None:
        """Flush, say that nothing more comes, and wait for the peer's end, for a bounded time."""
        transport = self._transport
        if transport is None or self._lost.is_set():
            return
        self._is_closing = True
        self._drop_frames()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._can_write.wait()
                if not transport.is_closing():
                    if self._tls is not None:
                        transport.write(self._tls.end())
                    transport.write_eof()
                await self._lost.wait()
        except TimeoutError:
            transport.abort()
        await self._lost.wait()

    def abort(self, error: KVFerryError) -> None:
        """Break the connection now; whoever waits gets ``error``."""
        self._fail(error)
        self._drop_frames()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        # No buffer above the kernel's: a send that returned is out of this process.
        transport.set_write_buffer_limits(high=0)
        self._can_write.set()
        if self._tls is not None:
            self.data_received(b"")  # what came behind the handshake

    def data_received(self, data: bytes) -> None:
        self._buffer += data if self._tls is None else self._decrypted(data, self._tls)
        while len(self._buffer) >= HEAD.size and self._error is None:
            nbytes, kind = HEAD.unpack_from(self._buffer)
            problem = _head_problem(nbytes, kind)
            if problem:
                self._buffer.clear()
                self.abort(
                    PeerError(
                        f"the peer sent {problem}",
                        phase="control",
                        peer=self._peer,
                        now_true="the connection was dropped",
                        next_step="run the same kvferry on both sides",
                    )
                )
                return
            end = HEAD.size + nbytes
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[HEAD.size : end])
            del self._buffer[:end]
            self._take(Signal(kind), payload)

    def eof_received(self) -> bool:
        return False  # close this side too: half-open connections have no use here

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_closing:
            reason = "this side closed the connection"
        elif exc is None:
            reason = "the peer closed the connection"
        else:
            reason = f"the connection broke: {exc}"
        self._fail(broken(reason, self._peer))
        self._lost.set()

    def pause_writing(self) -> None:
        if self._error is None:
            self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def _write(self, kind: Signal, payload: bytes) -> None:
        if self._error is not None:
            raise self._error
        if self._transport is None or self._is_closing:
            raise broken("the connection is not open", self._peer)
        data = HEAD.pack(len(payload), kind) + payload
        self._transport.write(data if self._tls is None else self._tls.wrap(data))

    def _decrypted(self, data: bytes, tls: TlsStream) -> bytes:
        assert self._transport is not None
        try:
            plain = tls.feed(data)
        except KVFerryError as error:
            self.abort(error)
            return b""
        if answer := tls.wrap(b""):  # TLS has its own to say, as when keys change
            self._transport.write(answer)
        return plain

    def _take(self, kind: Signal, payload: bytes) -> None:
        if kind is not Signal.FRAME:
            self._on_signal(kind, payload)
        elif not self._is_closing:
            self._frames.append(payload)
            self._unread_nbytes += len(payload)
            self._arrival.set()
            self._regulate()

    def _regulate(self) -> None:
        """Read from the socket only while few bytes wait to be received."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._unread_nbytes >= UNREAD_NBYTES:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _drop_frames(self) -> None:
        self._frames.clear()
        self._unread_nbytes = 0
        self._regulate()

    def _fail(self, error: KVFerryError) -> None:
        if self._error is None:
            self._error = error
            self._arrival.set()
            self._can_write.set()
            self._on_lost(error)


def _head_problem(nbytes: int, kind: int) -> str | None:
    if kind not in _SIGNALS:
        return f"a control frame of unknown kind {kind}"
    limit = MAX_FRAME_NBYTES if kind == Signal.FRAME else MAX_SIGNAL_NBYTES
    return f"a control frame of {nbytes} bytes, above the limit of {limit}" if nbytes > limit else None
