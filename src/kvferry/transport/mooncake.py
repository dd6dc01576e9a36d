"""Mooncake's transfer engine as a transport: the peer pushes steps into windows of this side.

The engine has no cancel, no answer to whether memory may be used again, and asks nobody who may
write; so it sees windows only, and admission, sums and ends are kvferry's: see staged.py. It listens
on every address of the host whatever it is told, which has to be allowed: ``?wildcard=yes``.
"""

from __future__ import annotations

import ipaddress
import re
import socket

import msgspec

from kvferry.errors import InputError, TransportError
from kvferry.transport.address import Address
from kvferry.transport.base import Listener, OnConnection
from kvferry.transport.library import LibraryConnection, LibraryTransport, decode_record, in_thread
from kvferry.transport.mooncake_engine import MooncakeEngine, MooncakePeer, missing, shared_engine
from kvferry.transport.tcp_socket import resolve
from kvferry.transport.windows import Progressing

__all__ = ["MooncakeTransport"]

COOKIE_NBYTES = 16


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A side's segment, the size of its pool, and where a few known bytes lie in its process."""

    segment: str
    nbytes: int
    cookie_address: int
    cookie: bytes


class MooncakeConnection(LibraryConnection):
    """One peer over Mooncake. ``path`` is ``mooncake-tcp`` or ``mooncake-rdma``."""

    scheme = "mooncake"

    #: How the engine is made: protocol, device.
    wanted: tuple[str, str]
    engine: MooncakeEngine
    hello: Hello
    peer: MooncakePeer
    #: This side's address on the control connection.
    host: str

    def heed(self, address: Address, sock: socket.socket) -> None:
        super().heed(address, sock)
        self.wanted, self.host = _wanted(address), sock.getsockname()[0]

    def _hello(self) -> bytes:
        self.engine = shared_engine(self.host, *self.wanted)
        return msgspec.msgpack.encode(
            Hello(self.engine.segment, self.memory.nbytes, self.engine.cookie_address, self.engine.cookie)
        )

    def _meet(self, hello: bytes) -> None:
        self.hello = decode_record(hello, Hello, self.peer_address)
        self.peer = self.mover = MooncakePeer(self.engine, self.hello.segment, self.peer_address)
        self.arena, self.peer_nbytes = self.engine.arena, self.hello.nbytes

    def _read_known_bytes(self, limits: Progressing) -> str:
        ring = self.arena.take(limits)
        self.peer.read_now(ring.addresses[0], self.hello.cookie_address, COOKIE_NBYTES)
        found = ring.arrays[0][:COOKIE_NBYTES].tobytes()
        self.arena.give_back(ring)
        if found != self.hello.cookie:
            raise TransportError(
                "what was read is not what is there", phase="connect", peer=self.peer_address
            )
        return self.wanted[0]


class MooncakeTransport(LibraryTransport):
    """``mooncake://HOST:PORT?wildcard=yes``, options ``protocol=tcp|rdma``, ``device=NAME``, and tcp's."""

    scheme = "mooncake"
    options = ("plain", "streams", "wildcard", "protocol", "device")
    connection = MooncakeConnection

    @classmethod
    def unavailable(cls) -> str | None:
        return missing()

    def _parse(self, address: str) -> Address:
        parsed = super()._parse(address)
        parsed.choice("protocol", "tcp", "rdma")
        if not re.fullmatch(r"[A-Za-z0-9_.,-]*", parsed.options.get("device", "")):
            raise InputError(f"address: device={parsed.options['device']} is no name of a device")
        if parsed.choice("wildcard", "yes", "no") != "yes":
            raise InputError(
                f"address: {address}: Mooncake's engine listens on every address of this host and asks "
                "nobody who may write to its windows; where the network is trusted, add wildcard=yes"
            )
        return parsed

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        parsed = self._parse(address)
        place = (await resolve(parsed))[0]
        self._identity_for(parsed, [place], is_ours=True)
        host = place[1][0]
        if ipaddress.ip_address(host).is_unspecified:
            raise InputError(f"address: {address}: peers need an address of this host, not {host}")
        # The engine comes up before the first peer does, which then need not wait for it.
        await in_thread(lambda: shared_engine(host, *_wanted(parsed)))
        return await super().listen(address, on_connection)


def _wanted(address: Address) -> tuple[str, str]:
    return address.options.get("protocol", "tcp"), address.options.get("device", "")
