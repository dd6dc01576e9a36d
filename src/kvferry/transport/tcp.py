"""TCP: one control connection, and data sockets beside it that only its token can open.

Not encrypted, hence for loopback; another address is refused unless it says ``?plain=yes``.
"""

from __future__ import annotations

import asyncio
import socket

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.transport.address import Address, parse_address, parse_host_port
from kvferry.transport.base import (
    Arrived,
    Connection,
    Copy,
    Direction,
    Listener,
    OnConnection,
)
from kvferry.transport.channel import Channel
from kvferry.transport.connection import OpenChannel, SocketConnection
from kvferry.transport.greeting import (
    Role,
    closing_on_failure,
    connect_timed_out,
    join,
)
from kvferry.transport.listening import SocketListener
from kvferry.transport.patience import Patience
from kvferry.transport.serving import Handler
from kvferry.transport.socket_transport import SocketTransport
from kvferry.transport.table import Part
from kvferry.transport.tcp_data import ask_read, ask_write, serve_read, serve_write
from kvferry.transport.tcp_socket import (
    congestion_notes,
    dial,
    host_port,
    listening_socket,
    resolve,
    set_options,
)
from kvferry.transport.wire import Operation, Request

__all__ = ["TcpTransport"]

OPTIONS = ("plain", "streams")


class TcpConnection(SocketConnection):
    """One peer over TCP."""

    scheme = "tcp"
    can_write = True
    path = "tcp"

    def write(self, copy: Copy) -> Arrived:
        return self._copy(Direction.WRITE, copy)

    def _handlers(self) -> dict[Operation, Handler]:
        return {Operation.READ: self._serve_read, Operation.WRITE: self._serve_write}

    def _ask(
        self, direction: Direction, copy: Copy, part: Part, patience: Patience
    ) -> NDArray[np.uint64] | None:
        with self._asking.channel(patience) as channel:
            if direction is Direction.READ:
                return ask_read(channel, self.memory.array, copy, part, patience)
            ask_write(channel, self.memory.array, copy, part, patience)
            return None

    def _serve_read(self, channel: Channel, request: Request, patience: Patience) -> None:
        serve_read(channel, self.memory.array, request, patience)

    def _serve_write(self, channel: Channel, request: Request, patience: Patience) -> None:
        serve_write(channel, self.memory.array, request, patience, self.guard)


class TcpTransport(SocketTransport):
    """``tcp://HOST:PORT``, options ``plain=yes`` and ``streams=N``."""

    scheme = "tcp"

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        parsed = parse_address(address, self.scheme, OPTIONS)
        sock = listening_socket((await resolve(parsed))[0], address)
        bound = Address(self.scheme, host_port(sock.getsockname()), parsed.options)

        async def greet(accepted: socket.socket) -> None:
            set_options(accepted)
            peer = f"{self.scheme}://{host_port(accepted.getpeername())}"
            await self._accept(accepted, peer, bound, on_connection)

        return SocketListener(sock, str(bound), greet)

    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        parsed = parse_address(address, self.scheme, OPTIONS)
        if parse_host_port(parsed)[1] == 0:
            raise InputError("address: port 0 is for listening; a peer has a port of its own")
        try:
            async with asyncio.timeout(timeout_seconds):
                return await self._connect(parsed)
        except TimeoutError as error:
            raise connect_timed_out(address, timeout_seconds) from error

    async def _connect(self, address: Address) -> Connection:
        sock, place = await dial(await resolve(address), str(address))
        token = bytearray()

        async def open_channel(role: Role) -> socket.socket:
            data, _ = await dial([place], str(address))
            await join(data, role, bytes(token), str(address))
            return data

        with closing_on_failure(sock):
            return await self._begin(sock, address, open_channel, token)

    async def _say(self, sock: socket.socket) -> None:
        """The greeting is all."""

    async def _hear(
        self, sock: socket.socket, peer: str, address: Address, open_channel: OpenChannel | None
    ) -> SocketConnection:
        connection = TcpConnection(
            self.memory, self.guard, peer, streams=address.streams, open_channel=open_channel
        )
        connection.notes = congestion_notes(sock)
        return connection
