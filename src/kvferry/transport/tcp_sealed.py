"""How two sides become an encrypted tcp connection: TLS for control, keys from it for data channels.

    opener:   greeting SEALED_CONTROL                      -> acceptor
    acceptor: greeting SEALED_CONTROL, or IS_PLAIN         -> opener
    both:     TLS 1.3, both certificates, names checked
    opener:   SECRET, or REFUSED and why                   -> acceptor    inside TLS
    acceptor: SECRET, or REFUSED and why                   -> opener      inside TLS
    opener:   greeting SEALED_ASKS or SEALED_SERVES, number, proof  -> acceptor    each data channel

The acceptor knows the connection by its id before its secret goes out, so a data channel always
finds it. A number opens one channel, once.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvferry.errors import KVFerryError, PeerError
from kvferry.transport.channel import Channel
from kvferry.transport.greeting import (
    Role,
    join,
    read_exactly,
    read_greeting,
    refused,
    write_greeting,
    wrong_kind,
)
from kvferry.transport.seal import PROOF_NBYTES, SECRET_NBYTES, ConnectionKeys
from kvferry.transport.security import Identity
from kvferry.transport.socket_transport import unknown_token
from kvferry.transport.tls import TlsStream
from kvferry.transport.wire import MAX_REASON_NBYTES, encode_reason

__all__ = ["SEALED_ROLES", "Sealing", "begin_accepted", "open_connection"]

SEALED_ROLES = {Role.SEALED_ASKS: Role.OPENER_ASKS, Role.SEALED_SERVES: Role.OPENER_SERVES}
_SAYS = {plain: sealed for sealed, plain in SEALED_ROLES.items()}
# Channels are numbered as they are opened, and a few are opened at once: of older numbers none is taken.
NUMBER_WINDOW = 1024

_WORD = struct.Struct(f"<4sBxxxI{SECRET_NBYTES}s")
_JOIN = struct.Struct(f"<Q{PROOF_NBYTES}s")
_MAGIC = b"KVFP"
_SECRET, _REFUSED = 1, 2

Admit = Callable[[], None]


@dataclass(slots=True, eq=False)
class Sealing:
    """The protection of one connection at one side, from its handshake on."""

    tls: TlsStream
    keys: ConnectionKeys
    peer: str
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _used: set[int] = field(default_factory=set)
    _highest: int = 0

    async def open_channel(self, sock: socket.socket, role: Role) -> Channel:
        """Opener: greet on a fresh socket. Raises TransportError; then it is closed."""
        number = next(self._numbers)
        proof = _JOIN.pack(number, self.keys.proof(number, role))
        await join(sock, _SAYS[role], self.keys.id, self.peer, proof)
        return Channel(sock, self.keys.seals(number, role, self.peer, is_opener=True))

    async def accept_channel(self, sock: socket.socket, role: Role) -> Channel:
        """Acceptor: a socket that greeted with this connection's id; its proof follows. Raises PeerError."""
        number, proof = _JOIN.unpack(await read_exactly(sock, _JOIN.size))
        is_new = number > self._highest - NUMBER_WINDOW and number not in self._used
        if not hmac.compare_digest(proof, self.keys.proof(number, role)) or not is_new:
            raise unknown_token(self.peer)
        self._highest = max(self._highest, number)
        self._used = {used for used in (*self._used, number) if used > self._highest - NUMBER_WINDOW}
        return Channel(sock, self.keys.seals(number, role, self.peer, is_opener=False))


async def open_connection(
    sock: socket.socket, identity: Identity, host: str, peer: str, admit: Admit
) -> Sealing:
    """Opener: from a fresh socket to keys. Raises PeerError, LocalError, TransportError, OSError.

    ``admit``: raises what else this side has against the peer, which is told so.
    """
    tls = TlsStream(identity, peer, host=host)
    await write_greeting(sock, Role.SEALED_CONTROL)
    role, _ = await read_greeting(sock, peer)
    if role is not Role.SEALED_CONTROL:
        raise wrong_kind(role, peer)
    await tls.handshake(sock)
    secret = await _introduce(tls, sock, admit)
    await tls.send(sock, _WORD.pack(_MAGIC, _SECRET, 0, secret))
    theirs = await _hear_secret(tls, sock, peer)
    return Sealing(tls, ConnectionKeys(secret, theirs), peer)


async def begin_accepted(
    sock: socket.socket, identity: Identity, peer: str, admit: Admit
) -> tuple[Sealing, bytes]:
    """Acceptor: from the greeting to keys; and the words to send once the connection can be joined.

    ``admit`` and errors as in ``open_connection``.
    """
    tls = TlsStream(identity, peer, host=None)
    await write_greeting(sock, Role.SEALED_CONTROL)
    await tls.handshake(sock)
    secret = await _introduce(tls, sock, admit)
    theirs = await _hear_secret(tls, sock, peer)
    return Sealing(tls, ConnectionKeys(theirs, secret), peer), _WORD.pack(_MAGIC, _SECRET, 0, secret)


async def _introduce(tls: TlsStream, sock: socket.socket, admit: Admit) -> bytes:
    """This side's secret, if the peer is one that it wants; else the peer is told why not."""
    try:
        tls.check_names()
        admit()
    except KVFerryError as error:
        reason = encode_reason(error)
        await tls.send_last(sock, _WORD.pack(_MAGIC, _REFUSED, len(reason), bytes(SECRET_NBYTES)) + reason)
        raise
    return secrets.token_bytes(SECRET_NBYTES)


async def _hear_secret(tls: TlsStream, sock: socket.socket, peer: str) -> bytes:
    magic, kind, nbytes, secret = _WORD.unpack(await tls.receive(sock, _WORD.size))
    if magic == _MAGIC and kind == _SECRET and nbytes == 0:
        return bytes(secret)
    if magic == _MAGIC and kind == _REFUSED and nbytes <= MAX_REASON_NBYTES:
        reason = await tls.receive(sock, nbytes)
        raise refused(reason, peer, "see the names in this side's certificate, and what the peer allows")
    raise PeerError(
        "the peer says nothing of this protocol after TLS was set up",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="run the same kvferry on both sides",
    )
