"""The first bytes on every socket: who I am and what this socket is for.

The side that connects greets. A control socket is answered with the connection's token, 16
random bytes; whoever opens a data channel shows it, so a channel joins only its own connection.
A peer with whom there can be no connection is answered REFUSED, and why: length, reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import struct
from collections.abc import Iterator

import msgspec

from kvferry.errors import DeadlineError, ErrorRecord, KVFerryError, PeerError, TransportError
from kvferry.transport.wire import MAX_REASON_NBYTES, encode_reason

__all__ = [
    "GREETING_SECONDS",
    "TOKEN_NBYTES",
    "Role",
    "cannot_connect",
    "closing_on_failure",
    "connect_timed_out",
    "join",
    "read_exactly",
    "read_greeting",
    "read_refusal",
    "refused",
    "tell_refused",
    "write_greeting",
    "wrong_kind",
]

GREETING_SECONDS = 5.0
TOKEN_NBYTES = 16

_GREETING = struct.Struct(f"<7sBB{TOKEN_NBYTES}s")
_MAGIC = b"KVFERRY"
_VERSION = 1
_REASON = struct.Struct("<I")


class Role(enum.IntEnum):
    """What a socket is for, in the words of the side that opened it."""

    CONTROL = 1
    OPENER_ASKS = 2
    OPENER_SERVES = 3
    ACCEPTED = 4
    # The same over encrypted tcp, and what a listener of the other kind answers to them.
    SEALED_CONTROL = 5
    SEALED_ASKS = 6
    SEALED_SERVES = 7
    NEEDS_TLS = 8
    IS_PLAIN = 9
    REFUSED = 10


async def join(sock: socket.socket, role: Role, token: bytes, peer: str, more: bytes = b"") -> None:
    """Greet as a data channel of the connection with ``token``. On failure closes ``sock``."""
    with closing_on_failure(sock):
        try:
            await write_greeting(sock, role, token, more)
        except OSError as error:
            raise cannot_connect(peer, error) from error


async def write_greeting(
    sock: socket.socket, role: Role, token: bytes = bytes(TOKEN_NBYTES), more: bytes = b""
) -> None:
    """Send the greeting, and ``more`` right behind it. Raises OSError."""
    greeting = _GREETING.pack(_MAGIC, _VERSION, role, token)
    await asyncio.get_running_loop().sock_sendall(sock, greeting + more)


async def read_greeting(sock: socket.socket, peer: str) -> tuple[Role, bytes]:
    """Role and token. Raises PeerError for anything else than a greeting of this version, OSError."""
    data = await read_exactly(sock, _GREETING.size)
    magic, version, role, token = _GREETING.unpack(data)
    if magic != _MAGIC or version != _VERSION or role not in set(Role):
        raise _not_a_greeting(repr(data[:8]), peer)
    return Role(role), token


async def tell_refused(sock: socket.socket, error: KVFerryError) -> None:
    """Answer a greeting with why nothing comes of it; a peer that is gone need not hear it."""
    reason = encode_reason(error)
    with contextlib.suppress(OSError):
        await write_greeting(sock, Role.REFUSED, more=_REASON.pack(len(reason)) + reason)


async def read_refusal(sock: socket.socket, peer: str) -> KVFerryError:
    """What stands behind REFUSED. Raises OSError."""
    (nbytes,) = _REASON.unpack(await read_exactly(sock, _REASON.size))
    reason = await read_exactly(sock, nbytes) if nbytes <= MAX_REASON_NBYTES else b""
    return refused(reason, peer, "change that at either side, or use another transport")


async def read_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """``nbytes`` from a non-blocking socket. Raises ConnectionError when it ends before."""
    loop = asyncio.get_running_loop()
    data = bytearray(nbytes)
    view = memoryview(data)
    while view:
        got = await loop.sock_recv_into(sock, view)
        if not got:
            raise ConnectionResetError("the peer hung up")
        view = view[got:]
    return bytes(data)


def cannot_connect(peer: str, error: OSError) -> TransportError:
    """The error for a peer that cannot be reached."""
    return TransportError(
        f"cannot connect: {error.strerror or error}",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="check that the peer listens at this address",
    )


def connect_timed_out(peer: str, seconds: float) -> DeadlineError:
    """The error for a peer that did not answer in time."""
    return DeadlineError(
        f"no connection within {seconds:g} s",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="check that the peer is alive, or allow more time",
    )


@contextlib.contextmanager
def closing_on_failure(sock: socket.socket) -> Iterator[None]:
    """Close ``sock`` if the block raises."""
    try:
        yield
    except BaseException:
        sock.close()
        raise


def wrong_kind(role: Role, peer: str) -> PeerError:
    """The error for a listener that answered by another role than the opener's kind expects."""
    said, next_step = {
        Role.NEEDS_TLS: (
            "the peer takes encrypted connections only at this address",
            "give this endpoint an identity, and leave plain=yes out of the address",
        ),
        Role.IS_PLAIN: (
            "the peer takes plain connections only at this address",
            "give the peer an identity, or say plain=yes where the whole network is trusted",
        ),
    }.get(
        role,
        (
            "the peer greets as one that connects",
            "check the address, and run the same kvferry on both sides",
        ),
    )
    return PeerError(said, phase="connect", peer=peer, now_true="nothing is held", next_step=next_step)


def refused(reason: bytes, peer: str, next_step: str) -> KVFerryError:
    """The error for a peer that said, as ``encode_reason``, why it wants no connection.

    TransportError where it has nothing against this side, but there is no connection this way.
    """
    try:
        said = msgspec.msgpack.decode(reason, type=ErrorRecord)
    except msgspec.DecodeError:
        said = ErrorRecord(PeerError.kind, "it gives no reason that can be read")
    kind = PeerError if said.kind == PeerError.kind else TransportError
    return kind(
        f"the peer refuses this side: {said.message}",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step=next_step,
    )


def _not_a_greeting(what: str, peer: str) -> PeerError:
    return PeerError(
        f"the peer greets with {what}, not as kvferry transport version {_VERSION}",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="check the address, and run the same kvferry on both sides",
    )
