"""TCP: one control connection, and data sockets beside it that only its peer can open.

Off loopback it is encrypted, both sides with certificates (tcp_sealed.py); plain traffic may leave
the host only where the address says ``?plain=yes`` and this side allows it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, LocalError, PeerError
from kvferry.transport.address import Address, parse_address, parse_host_port
from kvferry.transport.base import (
    Arrived,
    Connection,
    Copy,
    Direction,
    Guard,
    Listener,
    Memory,
    OnConnection,
)
from kvferry.transport.channel import Channel
from kvferry.transport.connection import OpenChannel, SocketConnection
from kvferry.transport.greeting import (
    Role,
    cannot_connect,
    closing_on_failure,
    connect_timed_out,
    join,
    read_greeting,
    write_greeting,
)
from kvferry.transport.listening import SocketListener
from kvferry.transport.patience import Patience
from kvferry.transport.security import Identity
from kvferry.transport.serving import Handler, Slots
from kvferry.transport.socket_transport import SocketTransport, given_up_on_failure, unknown_token
from kvferry.transport.table import Part
from kvferry.transport.tcp_data import ask_read, ask_write, serve_read, serve_write
from kvferry.transport.tcp_socket import (
    Place,
    congestion_notes,
    dial,
    host_port,
    is_plain,
    listening_socket,
    resolve,
    set_options,
    stays_here,
)
from kvferry.transport.wire import Operation, Request

if TYPE_CHECKING:
    from kvferry.transport.tcp_sealed import Sealing

__all__ = ["TcpTransport"]

OPTIONS = ("plain", "streams", "contact")
# What a peer that takes this address for one of the other kind is told.
_HINTS = {(Role.SEALED_CONTROL, False): Role.IS_PLAIN, (Role.CONTROL, True): Role.NEEDS_TLS}

_log = logging.getLogger(__name__)


class TcpConnection(SocketConnection):
    """One peer over TCP; with ``sealing``, encrypted."""

    scheme = "tcp"
    can_write = True

    def __init__(
        self,
        memory: Memory,
        guard: Guard,
        peer_address: str,
        sock: socket.socket,
        *,
        streams: int,
        open_channel: OpenChannel | None = None,
        sealing: Sealing | None = None,
        slots_of: Callable[[str], Slots] | None = None,
    ) -> None:
        where = sock.getpeername()
        # Who it is by certificate, else from where: however many connections that has.
        peer = where[0] if sealing is None else ",".join(sealing.tls.peer_names)
        super().__init__(
            memory,
            guard,
            peer_address,
            streams=streams,
            open_channel=open_channel,
            tls=None if sealing is None else sealing.tls,
            slots=None if slots_of is None else slots_of(peer),
        )
        self.sealing = sealing
        plain_path = "tcp" if stays_here(where) else "tcp-plain"
        self.path = plain_path if sealing is None else "tcp-sealed"
        self.notes = congestion_notes(sock)

    def heed(self, address: Address, sock: socket.socket) -> None:
        """Take what the address asks of a connection, before it starts over ``sock``."""

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
        serve_write(channel, self.memory.array, request, patience, guard=self.guard, path=self.path)


class TcpTransport(SocketTransport):
    """``tcp://HOST:PORT``, options ``plain=yes|no``, ``streams=N`` and ``contact=HOST:PORT``.

    ``contact`` is what peers are told to connect to instead: a port that is forwarded here, a proxy, or
    the host's own address where it listens on all of them.
    """

    scheme = "tcp"
    #: What an address may say after the question mark.
    options: ClassVar[tuple[str, ...]] = OPTIONS
    #: What its connections are.
    connection: ClassVar[type[TcpConnection]] = TcpConnection

    def _parse(self, address: str) -> Address:
        return parse_address(address, self.scheme, self.options)

    def _connection(
        self,
        sock: socket.socket,
        peer: str,
        address: Address,
        open_channel: OpenChannel | None,
        sealing: Sealing | None = None,
    ) -> TcpConnection:
        """A connection that is not yet started; the accepting side opens no channels."""
        connection = self.connection(
            self.memory,
            self.guard,
            peer,
            sock,
            streams=address.streams,
            open_channel=open_channel,
            sealing=sealing,
            slots_of=self.slots_of,
        )
        connection.heed(address, sock)
        return connection

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        parsed = self._parse(address)
        place = (await resolve(parsed))[0]
        identity = self._identity_for(parsed, [place], is_ours=True)
        is_local = stays_here(place[1])
        # Peers go by what the address says, so it says what is not the rule.
        said = {"plain": "no"} if identity is not None and is_local else {}
        options = {**parsed.options, **said}
        contact = options.pop("contact", None)
        if contact is not None:
            parse_host_port(Address(self.scheme, contact))
            options["plain"] = "yes" if identity is None else "no"  # the rule would go by another place
        sock = listening_socket(place, address)
        bound = Address(self.scheme, contact or host_port(sock.getsockname()), options)
        if identity is None and not is_local:
            _log.warning("%s: listens without encryption; KV blocks cross the network in plain", bound)
        return SocketListener(sock, str(bound), partial(self._greet, bound, identity, on_connection))

    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        parsed = self._parse(address)
        if parse_host_port(parsed)[1] == 0:
            raise InputError("address: port 0 is for listening; a peer has a port of its own")
        try:
            async with asyncio.timeout(timeout_seconds):
                places = await resolve(parsed)
                identity = self._identity_for(parsed, places, is_ours=False)
                sock, place = await dial(places, address)
                if identity is None and not stays_here(place[1]):
                    _log.warning("%s: connected without encryption", address)
                with closing_on_failure(sock):
                    if identity is None:
                        return await self._connect_plain(sock, place, parsed)
                    return await self._connect_sealed(sock, place, parsed, identity)
        except TimeoutError as error:
            raise connect_timed_out(address, timeout_seconds) from error

    def _identity_for(self, address: Address, places: list[Place], *, is_ours: bool) -> Identity | None:
        """With what to encrypt an address; None for a plain one. Raises InputError, LocalError."""
        if is_plain(address, places, self.security, is_ours=is_ours):
            return None
        try:
            import kvferry.transport.tcp_sealed  # noqa: F401, PLC0415 - an extra: found out before anything is opened
        except ImportError as error:
            raise LocalError(
                f"{address}: encrypted transfers need the package cryptography ({error})",
                phase="connect",
                peer=str(address),
                now_true="nothing is held",
                next_step="pip install 'kvferry[tls]'",
            ) from error
        return self.security.identity

    def _check_way(self, sock: socket.socket, address: Address, *, is_ours: bool) -> None:
        """Raise InputError where payload may not go the way that this transport has to the peer.

        ``is_ours``: the address is where this side listens. The peer is told.
        """

    # Connecting.

    async def _connect_plain(self, sock: socket.socket, place: Place, address: Address) -> Connection:
        token = bytearray()

        async def open_channel(role: Role) -> Channel:
            data, _ = await dial([place], str(address))
            await join(data, role, bytes(token), str(address))
            return Channel(data)

        return await self._begin(sock, address, open_channel, token)

    async def _connect_sealed(
        self, sock: socket.socket, place: Place, address: Address, identity: Identity
    ) -> Connection:
        from kvferry.transport.tcp_sealed import open_connection  # noqa: PLC0415 - an extra

        async def open_channel(role: Role) -> Channel:
            data, _ = await dial([place], str(address))
            return await sealing.open_channel(data, role)

        try:
            sealing = await open_connection(
                sock,
                identity,
                parse_host_port(address)[0],
                str(address),
                lambda: self._check_way(sock, address, is_ours=False),
            )
        except OSError as error:
            raise cannot_connect(str(address), error) from error
        connection = self._connection(sock, str(address), address, open_channel, sealing)
        async with given_up_on_failure(connection):
            await connection.start(sock)
        return connection

    # Accepting.

    async def _greet(
        self, bound: Address, identity: Identity | None, on_connection: OnConnection, sock: socket.socket
    ) -> None:
        """A fresh socket; what speaks plain to an encrypted address, or the other way, is told so."""
        set_options(sock)
        where = sock.getpeername()
        is_marked = identity is None and not stays_here(where)
        peer = str(Address(self.scheme, host_port(where), {"plain": "yes"} if is_marked else {}))
        role, token = await read_greeting(sock, peer)
        hint = _HINTS.get((role, identity is not None))
        if hint is not None:
            await write_greeting(sock, hint)
            raise PeerError(
                "the peer speaks " + ("plain" if identity else "TLS") + ", this address does not",
                phase="connect",
                peer=peer,
                now_true="it was told so and dropped",
                next_step="use one address, with its options, on both sides",
            )
        if identity is None:
            await self._take_in(sock, (role, token), peer, bound, on_connection)
        elif role is Role.SEALED_CONTROL:
            await self._accept_sealed(sock, peer, bound, identity, on_connection)
        else:
            await self._attach_sealed(sock, role, token, peer)

    async def _accept_sealed(
        self,
        sock: socket.socket,
        peer: str,
        bound: Address,
        identity: Identity,
        on_connection: OnConnection,
    ) -> None:
        from kvferry.transport.tcp_sealed import begin_accepted  # noqa: PLC0415 - an extra

        sealing, word = await begin_accepted(
            sock, identity, peer, lambda: self._check_way(sock, bound, is_ours=True)
        )
        connection = self._connection(sock, peer, bound, None, sealing)
        async with given_up_on_failure(connection):
            self._accepted[sealing.keys.id] = connection
            await sealing.tls.send(sock, word)
            await connection.start(sock)
            on_connection(connection)

    async def _attach_sealed(self, sock: socket.socket, role: Role, token: bytes, peer: str) -> None:
        from kvferry.transport.tcp_sealed import SEALED_ROLES  # noqa: PLC0415 - an extra

        connection = self._accepted.get(token)
        plain_role = SEALED_ROLES.get(role)
        if not isinstance(connection, TcpConnection) or connection.sealing is None or plain_role is None:
            raise unknown_token(peer)
        connection.attach(await connection.sealing.accept_channel(sock, plain_role), plain_role)

    async def _say(self, sock: socket.socket) -> None:
        """The greeting is all."""

    async def _hear(
        self, sock: socket.socket, peer: str, address: Address, open_channel: OpenChannel | None
    ) -> SocketConnection:
        return self._connection(sock, peer, address, open_channel)
