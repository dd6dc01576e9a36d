"""TCP sockets as kvferry wants them: resolved, plain or not, with the options that were measured."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from typing import Any

from kvferry.errors import InputError, TransportError
from kvferry.transport.address import Address, parse_host_port
from kvferry.transport.greeting import cannot_connect, closing_on_failure
from kvferry.transport.listening import BACKLOG
from kvferry.transport.security import Plain, Security

__all__ = [
    "Place",
    "congestion_notes",
    "dial",
    "host_port",
    "is_plain",
    "listening_socket",
    "resolve",
    "set_options",
    "stays_here",
]

CONGESTION = "cubic"
# An unanswered byte breaks the connection after this; an idle one is probed every few seconds.
USER_TIMEOUT_MS = 20_000
KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_COUNT = 3

#: Address family and socket address.
Place = tuple[int, tuple[Any, ...]]


async def resolve(address: Address) -> list[Place]:
    """Where an address leads. Raises InputError for a malformed one, TransportError for an unknown host."""
    host, port = parse_host_port(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await _look_up(host, port, str(address))
    return list(dict.fromkeys((int(family), where) for family, _, _, _, where in found))


def stays_here(where: tuple[Any, ...]) -> bool:
    """Whether a socket address is of the loopback interface, so that its bytes never leave the host."""
    return ipaddress.ip_address(where[0].partition("%")[0]).is_loopback


def is_plain(address: Address, places: list[Place], security: Security, *, is_ours: bool) -> bool:
    """Whether an address is spoken to in plain: as it says, else exactly where it never leaves the host.

    ``is_ours``: this side listens there, so the address is its own word; an address to connect to
    may have come from anywhere, and cannot by itself make this side send in plain.

    Raises InputError where that is not allowed, or where there is no identity to encrypt with.
    """
    said = address.choice("plain", "yes", "no")
    is_local = all(stays_here(where) for _, where in places)
    if said is None and is_ours and security.plain is Plain.NEVER:
        said = "no"
    if said == "no" or (said is None and not is_local):
        if security.identity is None:
            raise InputError(
                f"address: {address} must be encrypted, and this endpoint has no identity; "
                "give it one (see `kvferry certs`), or, where the whole network is trusted, "
                "add ?plain=yes and allow plain traffic anywhere"
            )
        return False
    if security.plain is Plain.NEVER or not (is_local or is_ours or security.plain is Plain.ANYWHERE):
        raise InputError(
            f"address: {address} is plain, and this endpoint "
            + ("never talks plain" if security.plain is Plain.NEVER else "talks plain on loopback only")
            + "; let the peer listen encrypted, or allow plain traffic anywhere"
        )
    return True


async def _look_up(host: str, port: int, address: str) -> list[Any]:
    try:
        return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise TransportError(
            f"host {host!r} is not known: {error.strerror}",
            phase="connect",
            peer=address,
            now_true="nothing is held",
            next_step="check the name, or give the IP address",
        ) from error


def listening_socket(place: Place, address: str) -> socket.socket:
    """A socket that listens at one place only. Raises TransportError."""
    family, where = place
    sock = _new_socket(family)
    with closing_on_failure(sock):
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError as error:
            raise TransportError(
                f"cannot listen at {address}: {error.strerror}",
                phase="listen",
                peer=address,
                now_true="nothing is held",
                next_step="choose another address, or end the process that has this one",
            ) from error
    return sock


async def dial(places: list[Place], address: str) -> tuple[socket.socket, Place]:
    """The first place that answers. Raises TransportError with the last failure."""
    failure = OSError("no address")
    for place in places:
        sock = _new_socket(place[0])
        with closing_on_failure(sock):
            try:
                await asyncio.get_running_loop().sock_connect(sock, place[1])
            except OSError as error:
                failure = error
                sock.close()
                continue
        return sock, place
    raise cannot_connect(address, failure) from failure


def host_port(where: tuple[Any, ...]) -> str:
    """A socket address as it stands in a kvferry address."""
    return f"[{where[0]}]:{where[1]}" if ":" in where[0] else f"{where[0]}:{where[1]}"


def set_options(sock: socket.socket) -> None:
    """No Nagle delay, a dead peer found, cubic where it can be had. Buffers stay with autotuning."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT),
    ):
        sock.setsockopt(level, option, value)
    with contextlib.suppress(OSError):
        # bbr, a common default, costs up to half of the speed inside a cluster. Where cubic is
        # missing or not permitted the default stays, and the connection's notes say so.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION.encode())


def congestion_notes(sock: socket.socket) -> tuple[str, ...]:
    """What to record about the socket's congestion control: nothing where it is the wanted one."""
    used = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
    return () if used == CONGESTION else (f"congestion control is {used}: {CONGESTION} could not be set",)


def _new_socket(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    with closing_on_failure(sock):
        sock.setblocking(False)
        set_options(sock)
    return sock
