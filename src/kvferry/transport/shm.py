"""Same host: this side reads the peer's memory itself, mapped or by ``process_vm_readv``.

Addresses are names of abstract Unix sockets, so both sides must share a network namespace and,
for ``process_vm_readv``, see each other's process ids. Only processes of one user talk.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError, InputError, KVFerryError, TransportError
from kvferry.transport.address import Address, parse_address
from kvferry.transport.base import Connection, Copy, Direction, Guard, Listener, Memory, OnConnection
from kvferry.transport.board import PeerBoard
from kvferry.transport.channel import Channel
from kvferry.transport.connection import OpenChannel, SocketConnection
from kvferry.transport.copying import run_lanes
from kvferry.transport.greeting import (
    Role,
    cannot_connect,
    closing_on_failure,
    connect_timed_out,
    join,
    tell_refused,
)
from kvferry.transport.listening import BACKLOG, SocketListener
from kvferry.transport.look import Looking, serve_look
from kvferry.transport.memory import create_shared
from kvferry.transport.patience import Patience
from kvferry.transport.serving import Handler
from kvferry.transport.shared_copy import (
    LARGE_STRIDED_NBYTES,
    Mapped,
    Source,
    copy_part,
    copy_strided,
    pays_strided,
)
from kvferry.transport.shm_offer import (
    Cookie,
    board_of,
    check_same_user,
    receive_offer,
    send_offer,
    source_for,
)
from kvferry.transport.socket_transport import SocketTransport
from kvferry.transport.table import Part, first_outside, lanes_for, outside_of_peer, split_copy
from kvferry.transport.wire import Operation, Request

__all__ = ["ShmTransport"]

OPTIONS = ("path", "streams")
PATHS = ("mapped", "cma")
NAMESPACE = "\0kvferry/"

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")


class ShmConnection(SocketConnection):
    """One peer of this host. ``path`` is how this side reads it; ``none`` where it cannot."""

    scheme = "shm"
    can_write = False

    def use(self, source: Source | KVFerryError, peer_nbytes: int, board: PeerBoard | None) -> None:
        """How to read the peer's memory, or why that is impossible: then only ``read`` says so."""
        self._source: Source | KVFerryError | None = source
        self._board = board
        self._peer_nbytes = peer_nbytes
        self.path = source.path if isinstance(source, Source) else "none"
        self.notes = (source.message,) if isinstance(source, KVFerryError) else ()

    def _handlers(self) -> dict[Operation, Handler]:
        return {Operation.LOOK: _serve_look}

    def _move(self, direction: Direction, copy: Copy, patience: Patience) -> NDArray[np.uint64]:
        source, total = self._checked_source(copy), copy.plan.total_nbytes
        may_pay = not copy.integrity and isinstance(source, Mapped) and total >= LARGE_STRIDED_NBYTES
        strided = copy.plan.product if may_pay else None
        if strided is None or not pays_strided(strided, total):
            return super()._move(direction, copy, patience)
        assert isinstance(source, Mapped)
        parts = split_copy(copy, direction, self.memory.nbytes, self.peer_address)
        if len(parts) != 1:
            return super()._move(direction, copy, patience)
        lanes = lanes_for(total, self.streams)
        with (
            self._asking.channel(patience) as channel,
            Looking(channel, copy, parts[0], patience, self._board) as check,
        ):
            # One thread reads the channel; it stops the others, and leaving the block looks again.
            run_lanes(
                lanes,
                patience,
                lambda lane, limits: copy_strided(
                    strided[lane::lanes], source.array, self.memory.array, limits.check if lane else check
                ),
            )
        return np.empty(0, np.uint64)

    def _ask(
        self, _direction: Direction, copy: Copy, part: Part, patience: Patience
    ) -> NDArray[np.uint64] | None:
        source = self._source
        assert isinstance(source, Source)  # checked with the whole plan
        try:
            with (
                self._asking.channel(patience) as channel,
                Looking(channel, copy, part, patience, self._board) as check,
            ):
                return copy_part(source, part, self.memory.array, check, integrity=copy.integrity)
        except OSError as error:
            raise patience.lost(str(error)) from error

    def _checked_source(self, copy: Copy) -> Source:
        source = self._source
        if isinstance(source, KVFerryError):
            raise source
        assert source is not None  # let go only when nobody copies
        bad = first_outside(copy.plan.src_offset, copy.plan.nbytes, self._peer_nbytes)
        if bad is not None:
            raise outside_of_peer(bad, self._peer_nbytes, self.peer_address)
        return source

    def _let_go(self) -> None:
        self._source = self._board = None


class ShmTransport(SocketTransport):
    """``shm://NAME``, options ``path=mapped|cma`` and ``streams=N``."""

    scheme = "shm"

    def __init__(self, memory: Memory, guard: Guard) -> None:
        super().__init__(memory, guard)
        self._cookie = Cookie()

    @classmethod
    def unavailable(cls) -> str | None:
        try:
            create_shared(1).close()
        except CapacityError as error:
            return f"{error.message}; allow memfd_create, or use tcp"
        return None

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        parsed = _parse(address)
        sock = _new_socket()
        with closing_on_failure(sock):
            try:
                sock.bind(NAMESPACE + parsed.rest)
                sock.listen(BACKLOG)
            except OSError as error:
                raise TransportError(
                    f"cannot listen at {address}: {error.strerror}",
                    phase="listen",
                    peer=address,
                    now_true="nothing is held",
                    next_step="choose another name, or end the process that has this one",
                ) from error

        async def greet(accepted: socket.socket) -> None:
            try:
                pid = check_same_user(accepted, str(parsed))
            except TransportError as error:
                await tell_refused(accepted, error)  # at once: another user's processes hold up nobody
                raise
            peer = f"shm://{parsed.rest} (process {pid})"
            await self._accept(accepted, peer, parsed, on_connection)

        return SocketListener(sock, str(parsed), greet)

    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        parsed = _parse(address)
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._connect(parsed)
        except TimeoutError as error:
            raise connect_timed_out(address, timeout_seconds) from error

    async def _connect(self, address: Address) -> Connection:
        token = bytearray()

        async def open_channel(role: Role) -> Channel:
            data = await _dial(address)
            await join(data, role, bytes(token), str(address))
            return Channel(data)

        sock = await _dial(address)
        with closing_on_failure(sock):
            return await self._begin(sock, address, open_channel, token)

    async def _say(self, sock: socket.socket) -> None:
        send_offer(sock, self.memory, self._cookie, self.guard.board)

    async def _hear(
        self, sock: socket.socket, peer: str, address: Address, open_channel: OpenChannel | None
    ) -> SocketConnection:
        offer = await receive_offer(sock, peer)
        wanted = address.options.get("path")
        board = None
        try:
            source: Source | KVFerryError = source_for(offer, wanted, peer)
            board = board_of(offer, peer)
        except TransportError as error:
            # Often only the other side will read; a path that was asked for must be there.
            if wanted is not None:
                raise
            source = error
        finally:
            offer.close()
        connection = ShmConnection(
            self.memory, self.guard, peer, streams=address.streams_or(_threads()), open_channel=open_channel
        )
        connection.use(source, offer.nbytes, board)
        return connection


def _threads() -> int:
    """Threads of one copy: two of them move 1.8 times the bytes of one, where they can run side by side."""
    return min(2, len(os.sched_getaffinity(0)))


def _serve_look(channel: Channel, _request: Request, patience: Patience) -> None:
    serve_look(channel, patience)


def _parse(address: str) -> Address:
    parsed = parse_address(address, "shm", OPTIONS)
    parsed.choice("path", *PATHS)
    if not _NAME.fullmatch(parsed.rest):
        raise InputError(
            f"address: {parsed.rest!r} is no shm name: 1 to 80 letters, digits, dots, dashes, underscores"
        )
    return parsed


def _new_socket() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    return sock


async def _dial(address: Address) -> socket.socket:
    """A connected socket to a process of this user. Raises TransportError."""
    sock = _new_socket()
    with closing_on_failure(sock):
        try:
            await asyncio.get_running_loop().sock_connect(sock, NAMESPACE + address.rest)
            sock.getpeername()  # a full backlog looks connected, but has no peer
        except OSError as error:
            raise cannot_connect(str(address), error) from error
        check_same_user(sock, str(address))
    return sock
