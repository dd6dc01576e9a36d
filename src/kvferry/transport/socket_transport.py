"""How two sides of a socket transport become a connection, whatever the kind of socket.

    connecting side: greeting, what it says of itself -> accepting side
    accepting side:  builds its connection, then the token, what it says of itself -> connecting side;
                     or REFUSED, and why it cannot
    connecting side: builds its connection, opens the first data channels with the token

The token goes out last, so a data channel always finds its connection.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import weakref
from abc import abstractmethod
from collections.abc import AsyncIterator

from kvferry.errors import KVFerryError, PeerError
from kvferry.transport.address import Address
from kvferry.transport.base import Guard, Memory, OnConnection, Transport
from kvferry.transport.channel import Channel
from kvferry.transport.connection import OpenChannel, SocketConnection
from kvferry.transport.control import broken
from kvferry.transport.greeting import (
    TOKEN_NBYTES,
    Role,
    cannot_connect,
    read_greeting,
    read_refusal,
    tell_refused,
    write_greeting,
    wrong_kind,
)
from kvferry.transport.serving import Slots

__all__ = ["SocketTransport", "given_up_on_failure", "unknown_token"]


class SocketTransport(Transport):
    """A transport with the two hooks below; it opens and accepts sockets itself."""

    def __init__(self, memory: Memory, guard: Guard) -> None:
        super().__init__(memory, guard)
        self._slots: weakref.WeakValueDictionary[str, Slots] = weakref.WeakValueDictionary()
        self._accepted: weakref.WeakValueDictionary[bytes, SocketConnection] = weakref.WeakValueDictionary()

    def slots_of(self, peer: str) -> Slots:
        """What all connections of one peer share, as long as there is one."""
        slots = self._slots.get(peer)
        if slots is None:
            slots = self._slots[peer] = Slots()
        return slots

    @abstractmethod
    async def _say(self, sock: socket.socket) -> None:
        """Send what the peer must know beside the greeting. Raises OSError."""

    @abstractmethod
    async def _hear(
        self, sock: socket.socket, peer: str, address: Address, open_channel: OpenChannel | None
    ) -> SocketConnection:
        """Receive what the peer says, and build a connection that is not yet started."""

    async def _begin(
        self, sock: socket.socket, address: Address, open_channel: OpenChannel, token: bytearray
    ) -> SocketConnection:
        """Become a connection over a fresh control socket; fills ``token`` for ``open_channel``."""
        peer = str(address)
        try:
            with contextlib.suppress(ConnectionError):  # a peer that has hung up may have said why
                await write_greeting(sock, Role.CONTROL)
                await self._say(sock)
            role, token[:] = await read_greeting(sock, peer)
            if role is Role.REFUSED:
                raise await read_refusal(sock, peer)
            if role is not Role.ACCEPTED:
                raise wrong_kind(role, peer)
            connection = await self._hear(sock, peer, address, open_channel)
        except OSError as error:
            raise cannot_connect(peer, error) from error
        async with given_up_on_failure(connection):
            await connection.start(sock)
        return connection

    async def _accept(
        self, sock: socket.socket, peer: str, address: Address, on_connection: OnConnection
    ) -> None:
        """Take over an accepted socket: a new connection, or a data channel of one."""
        await self._take_in(sock, await read_greeting(sock, peer), peer, address, on_connection)

    async def _take_in(
        self,
        sock: socket.socket,
        greeting: tuple[Role, bytes],
        peer: str,
        address: Address,
        on_connection: OnConnection,
    ) -> None:
        """``_accept``, once the greeting was read."""
        role, token = greeting
        if role is not Role.CONTROL:
            self._attach(token, sock, role, peer)
            return
        try:
            connection = await self._hear(sock, peer, address, None)
        except KVFerryError as error:
            await tell_refused(sock, error)
            raise
        async with given_up_on_failure(connection):
            token = secrets.token_bytes(TOKEN_NBYTES)
            self._accepted[token] = connection
            await write_greeting(sock, Role.ACCEPTED, token)
            await self._say(sock)
            await connection.start(sock)
            on_connection(connection)

    def _attach(self, token: bytes, sock: socket.socket, role: Role, peer: str) -> None:
        connection = self._accepted.get(token)
        # Through a plain listener of this side nobody joins an encrypted connection.
        is_plain_role = role in (Role.OPENER_ASKS, Role.OPENER_SERVES)
        if connection is None or connection.is_sealed or not is_plain_role:
            raise unknown_token(peer)
        connection.attach(Channel(sock), role)


@contextlib.asynccontextmanager
async def given_up_on_failure(connection: SocketConnection) -> AsyncIterator[None]:
    """If the block raises, nothing is left of the connection."""
    try:
        yield
    except BaseException as error:
        reason = broken(f"it could not be set up: {type(error).__name__}", connection.peer_address)
        connection.abort(error if isinstance(error, KVFerryError) else reason)
        await connection.close()
        raise


def unknown_token(peer: str) -> PeerError:
    """The error for a data channel that belongs to nobody."""
    return PeerError(
        "the peer shows a token of no connection",
        phase="connect",
        peer=peer,
        now_true="the channel was dropped",
        next_step="connect again",
    )
