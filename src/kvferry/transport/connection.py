"""A connection over sockets: control on the event loop, copies in blocking threads, one end for all.

``tcp`` and ``shm`` share this. The side that connected opens every data channel, also those that
the other side asks on, so that only one side needs an address that can be reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, TransportError
from kvferry.transport.address import MAX_STREAMS
from kvferry.transport.asking import Asking
from kvferry.transport.base import (
    Arrived,
    CancelToken,
    Connection,
    Copy,
    Direction,
    Guard,
    Memory,
)
from kvferry.transport.channel import Channel
from kvferry.transport.control import Control, Signal, broken
from kvferry.transport.copying import run_parts
from kvferry.transport.greeting import Role
from kvferry.transport.patience import Patience
from kvferry.transport.serving import Handler, Served, Serving, Slots
from kvferry.transport.table import Part, chunk_nbytes, split_copy
from kvferry.transport.users import Users, forget_locals
from kvferry.transport.wire import Operation

if TYPE_CHECKING:
    from kvferry.transport.tls import TlsStream

__all__ = ["OpenChannel", "SocketConnection"]

#: Opens one more channel to the peer and greets with the given role.
OpenChannel = Callable[[Role], Awaitable[Channel]]


class SocketConnection(Connection):
    """The parts that do not depend on the kind of socket.

    A subclass says which operations it serves and how it asks for one part of a copy.
    """

    def __init__(
        self,
        memory: Memory,
        guard: Guard,
        peer_address: str,
        *,
        streams: int,
        open_channel: OpenChannel | None = None,
        tls: TlsStream | None = None,
        slots: Slots | None = None,
    ) -> None:
        self.peer_address = peer_address
        self.memory = memory
        self.guard = guard
        self.streams = streams
        self._tls = tls
        self.peer_names = () if tls is None else tls.peer_names
        self._open_channel = open_channel
        self._loop = asyncio.get_running_loop()
        self._ended = CancelToken()
        self._released = asyncio.Event()
        self._users = Users(self._release)
        self._opening: set[asyncio.Task[None]] = set()
        self._asking = Asking(self._request_channel, num_opening=1)
        self._serving = Serving(
            Served(memory, guard, self._handlers(), slots or Slots()), peer_address, self._users, self._ended
        )
        self.control = Control(peer_address, self._on_signal, self._end, tls)

    @abstractmethod
    def _handlers(self) -> dict[Operation, Handler]:
        """What this side serves."""

    @abstractmethod
    def _ask(
        self, direction: Direction, copy: Copy, part: Part, patience: Patience
    ) -> NDArray[np.uint64] | None:
        """Move one part; the digests of its chunks if they were made here."""

    def _let_go(self) -> None:
        """Give up what the subclass owns; nobody uses it any more."""

    @property
    def is_sealed(self) -> bool:
        """Control goes through TLS, and data channels are sealed."""
        return self._tls is not None

    async def start(self, sock: socket.socket) -> None:
        """Take over the greeted control socket. The connecting side also opens the first channels."""
        await self._loop.create_connection(lambda: self.control, sock=sock)
        if self._open_channel is not None:
            await self._open(Role.OPENER_ASKS)
            await self._open(Role.OPENER_SERVES)

    def attach(self, channel: Channel, role: Role) -> None:
        """A data channel that the peer opened."""
        wanted = self._serving.start(channel) if role is Role.OPENER_ASKS else self._asking.adopt(channel)
        if not wanted:
            channel.close()

    async def send(self, frame: bytes) -> None:
        await self.control.send(frame)

    async def receive(self) -> bytes:
        return await self.control.receive()

    def read(self, copy: Copy) -> Arrived:
        return self._copy(Direction.READ, copy)

    async def close(self) -> None:
        await self.control.close()
        self._end(broken("this side closed the connection", self.peer_address))
        await self._released.wait()
        self._serving.join()

    def abort(self, error: KVFerryError) -> None:
        self._end(error)
        self._in_loop(self.control.abort, error)

    def _copy(self, direction: Direction, copy: Copy) -> Arrived:
        started = time.monotonic()
        try:
            self._users.enter()
            try:
                patience = Patience(copy.deadline, (copy.cancel, self._ended), self.peer_address)
                digests = self._move(direction, copy, patience)
            finally:
                self._users.leave()
        except KVFerryError as error:
            forget_locals(error)
            # The connection's own end breaks its channels; its reason says more than theirs.
            if isinstance(error, TransportError) and self._users.error is not None:
                raise self._users.error from None
            raise
        return Arrived(
            path=self.path,
            seconds=time.monotonic() - started,
            piece_offset=copy.plan.dst_offset,
            piece_nbytes=copy.plan.nbytes,
            chunk_id=copy.plan.chunk_id,
            chunk_nbytes=chunk_nbytes(copy.plan),
            digests=digests if copy.integrity and direction is Direction.READ else None,
        )

    def _move(self, direction: Direction, copy: Copy, patience: Patience) -> NDArray[np.uint64]:
        """Move the whole plan; the digests that were made here, in plan order."""
        return run_parts(
            split_copy(copy, direction, self.memory.nbytes, self.peer_address, self.streams),
            self.streams,
            patience,
            lambda part, limits: self._ask(direction, copy, part, limits),
        )

    def _on_signal(self, kind: Signal, payload: bytes) -> None:
        if kind is Signal.OPEN_CHANNEL:
            self._open_soon(Role.OPENER_SERVES)
        elif kind is Signal.CANNOT_OPEN:
            self._asking.failed(self._cannot_open(payload.decode(errors="replace")))

    def _request_channel(self) -> None:
        """Have one more channel opened to ask on; from any thread."""
        if self._open_channel is not None:
            self._in_loop(self._open_soon, Role.OPENER_ASKS)
        else:
            self._in_loop(self.control.signal, Signal.OPEN_CHANNEL)

    def _open_soon(self, role: Role) -> None:
        if self._open_channel is None or self._users.error is not None or len(self._opening) >= MAX_STREAMS:
            return
        task = self._loop.create_task(self._open_or_tell(role))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open_or_tell(self, role: Role) -> None:
        try:
            await self._open(role)
        except KVFerryError as error:
            if role is Role.OPENER_ASKS:
                self._asking.failed(error)
            else:
                self.control.signal(Signal.CANNOT_OPEN, error.message.encode())

    async def _open(self, role: Role) -> None:
        assert self._open_channel is not None
        channel = await self._open_channel(role)
        wanted = self._asking.adopt(channel) if role is Role.OPENER_ASKS else self._serving.start(channel)
        if not wanted:
            channel.close()

    def _cannot_open(self, reason: str) -> TransportError:
        return TransportError(
            f"the peer cannot open another data channel: {reason}",
            phase="move",
            peer=self.peer_address,
            next_step="ask again when a copy has ended, or connect again",
        )

    def _end(self, error: KVFerryError) -> None:
        """Let nobody new in, and make whoever is inside leave; from any thread, once."""
        if self._users.error is None:
            self._ended.cancel(error)
        if self._users.end(error):
            self._asking.shut()
            self._serving.shut()
            self._in_loop(self._cancel_opening)

    def _cancel_opening(self) -> None:
        for task in self._opening:
            task.cancel()

    def _release(self) -> None:
        """The last user left."""
        self._asking.close()
        self._let_go()
        self._in_loop(self._released.set)

    def _in_loop(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all that it had
            self._loop.call_soon_threadsafe(call, *args)
