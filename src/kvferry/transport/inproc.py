"""Both sides in one process: the reference for the others, and the fake for tests.

Control frames cross a real socket pair and copies are real copies inside a grant, so what fails
elsewhere fails here: a peer that is gone, refuses, ends its grant, or lets a deadline pass.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, TransportError
from kvferry.transport.address import parse_address
from kvferry.transport.base import (
    Arrived,
    CancelToken,
    Connection,
    Copy,
    Direction,
    Guard,
    Listener,
    Memory,
    OnConnection,
    Transport,
)
from kvferry.transport.control import Control, broken
from kvferry.transport.greeting import connect_timed_out
from kvferry.transport.patience import Patience
from kvferry.transport.shared_copy import Mapped, copy_part
from kvferry.transport.table import Part, chunk_nbytes, first_outside, sizes_between, split_copy
from kvferry.transport.users import Users, forget_locals
from kvferry.transport.wire import malformed, refusal

__all__ = ["InprocTransport"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")

_lock = threading.Lock()
_listeners: dict[str, InprocListener] = {}


class InprocConnection(Connection):
    """One side of a pair; ``peer`` is the other side's connection."""

    scheme = "inproc"
    can_write = True
    path = "inproc"

    def __init__(self, memory: Memory, guard: Guard, peer_address: str) -> None:
        self.peer_address = peer_address
        self.memory = memory
        self.guard = guard
        self.peer: InprocConnection | None = None
        self.ended = CancelToken()
        self.users = Users(self._release)
        self._loop = asyncio.get_running_loop()
        self._released = asyncio.Event()
        self._control = Control(peer_address, lambda _kind, _payload: None, self._end)

    async def start(self, sock: socket.socket) -> None:
        await self._loop.create_connection(lambda: self._control, sock=sock)

    async def send(self, frame: bytes) -> None:
        await self._control.send(frame)

    async def receive(self) -> bytes:
        return await self._control.receive()

    def read(self, copy: Copy) -> Arrived:
        return self._copy(Direction.READ, copy)

    def write(self, copy: Copy) -> Arrived:
        return self._copy(Direction.WRITE, copy)

    async def close(self) -> None:
        await self._control.close()
        self._end(broken("this side closed the connection", self.peer_address))
        await self._released.wait()

    def abort(self, error: KVFerryError) -> None:
        self._end(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it the control socket
            self._loop.call_soon_threadsafe(self._control.abort, error)

    def _copy(self, direction: Direction, copy: Copy) -> Arrived:
        started = time.monotonic()
        try:
            with self.users.one(), self._peer_in_use() as peer:
                parts = split_copy(copy, direction, self.memory.nbytes, self.peer_address)
                found = [self._copy_part(direction, copy, part, peer) for part in parts]
        except KVFerryError as error:
            forget_locals(error)
            raise
        return Arrived(
            path=self.path,
            seconds=time.monotonic() - started,
            piece_offset=copy.plan.dst_offset,
            piece_nbytes=copy.plan.nbytes,
            chunk_id=copy.plan.chunk_id,
            chunk_nbytes=chunk_nbytes(copy.plan),
            digests=np.concatenate([np.empty(0, np.uint64), *(d for d in found if d is not None)])
            if copy.integrity and direction is Direction.READ
            else None,
        )

    def _copy_part(
        self, direction: Direction, copy: Copy, part: Part, peer: InprocConnection
    ) -> NDArray[np.uint64] | None:
        started = time.monotonic()
        patience = Patience(copy.deadline, (copy.cancel, self.ended), self.peer_address)
        with self._admitted(direction, copy, part, peer) as token:

            def check() -> None:
                patience.check()
                if token.error is not None:
                    raise refusal(token.error.to_record(), self.peer_address)
                if peer.ended.is_cancelled:
                    raise _gone(self.peer_address)

            check()
            source, into, moved = self.memory.array, peer.memory.array, part.swapped()
            if direction is Direction.READ:
                source, into, moved = into, source, part
            digests = copy_part(Mapped(source), moved, into, check, integrity=copy.integrity)
            if direction is Direction.WRITE:
                arrived = Arrived(
                    self.path,
                    time.monotonic() - started,
                    part.there,
                    part.nbytes,
                    part.chunk_id,
                    sizes_between(part.chunk_end),
                    digests,
                )
                peer.guard.landed(copy.transfer_id, arrived)
        return digests

    @contextlib.contextmanager
    def _admitted(
        self, direction: Direction, copy: Copy, part: Part, peer: InprocConnection
    ) -> Iterator[CancelToken]:
        """Inside a grant of the peer's guard. Raises PeerError for what it refuses."""
        bad = first_outside(part.there, part.nbytes, peer.memory.nbytes)
        if bad is not None:
            raise malformed(
                f"piece {bad}, outside of the memory of {peer.memory.nbytes} bytes", self.peer_address
            )
        try:
            token = peer.guard.enter(copy.transfer_id, direction, part.there, part.nbytes)
        except KVFerryError as error:
            raise refusal(error.to_record(), self.peer_address) from error
        try:
            yield token
        finally:
            peer.guard.leave(copy.transfer_id)

    @contextlib.contextmanager
    def _peer_in_use(self) -> Iterator[InprocConnection]:
        """The other side, whose close waits for the block. Raises TransportError when it is gone."""
        peer = self.peer
        if peer is None:
            raise _gone(self.peer_address)
        try:
            peer.users.enter()
        except KVFerryError:
            raise _gone(self.peer_address) from None
        try:
            yield peer
        finally:
            peer.users.leave()

    def _end(self, error: KVFerryError) -> None:
        self.ended.cancel(error)
        self.users.end(error)

    def _release(self) -> None:
        self.peer = None
        with contextlib.suppress(RuntimeError):  # the loop is closed, nobody waits
            self._loop.call_soon_threadsafe(self._released.set)


class InprocListener(Listener):
    """A name in this process."""

    def __init__(self, name: str, transport: InprocTransport, on_connection: OnConnection) -> None:
        self.address = f"inproc://{name}"
        self.loop = asyncio.get_running_loop()
        self._name = name
        self._transport = transport
        self._on_connection = on_connection

    async def accept(self, sock: socket.socket, other: InprocConnection) -> None:
        """Make this side of a pair; runs on the listener's loop."""
        connection = InprocConnection(self._transport.memory, self._transport.guard, self.address)
        connection.peer, other.peer = other, connection
        await connection.start(sock)
        self._on_connection(connection)

    async def close(self) -> None:
        with _lock:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]


class InprocTransport(Transport):
    """``inproc://NAME``."""

    scheme = "inproc"

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        name = _parse(address)
        listener = InprocListener(name, self, on_connection)
        with _lock:
            if name in _listeners:
                raise TransportError(
                    f"cannot listen at {address}: the name is in use in this process",
                    phase="listen",
                    peer=address,
                    now_true="nothing is held",
                    next_step="choose another name, or close the listener that has this one",
                )
            _listeners[name] = listener
        return listener

    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        name = _parse(address)
        with _lock:
            listener = _listeners.get(name)
        if listener is None or listener.loop.is_closed():
            raise TransportError(
                "cannot connect: nobody in this process listens at this name",
                phase="connect",
                peer=address,
                now_true="nothing is held",
                next_step="listen first",
            )
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._pair(listener)
        except TimeoutError as error:
            raise connect_timed_out(address, timeout_seconds) from error

    async def _pair(self, listener: InprocListener) -> Connection:
        connection = InprocConnection(self.memory, self.guard, listener.address)
        here, there = socket.socketpair()
        try:
            here.setblocking(False)
            there.setblocking(False)
            await connection.start(here)
            accepted = asyncio.run_coroutine_threadsafe(listener.accept(there, connection), listener.loop)
            await asyncio.wrap_future(accepted)
        except BaseException:
            connection.abort(broken("it could not be set up", listener.address))
            await connection.close()
            here.close()
            there.close()
            raise
        return connection


def _parse(address: str) -> str:
    name = parse_address(address, "inproc", ()).rest
    if not _NAME.fullmatch(name):
        raise InputError(
            f"address: {name!r} is no inproc name: 1 to 80 letters, digits, dots, dashes, underscores"
        )
    return name


def _gone(peer: str) -> TransportError:
    return broken("the peer closed the connection", peer)
