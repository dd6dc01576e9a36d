"""NIXL: bytes by the library that clusters run already, over whatever UCX finds between two hosts.

NIXL's own listener is never used, and its metadata goes over kvferry's connection. ``move=`` says
who moves:

- ``read``: this side posts the reads. The default where UCX reads by itself (cma, RDMA).
- ``push``: the peer writes into windows of this side. The default over tcp, where UCX has no real
  read and its writes are two to three times as fast; see staged.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, LocalError, TransportError
from kvferry.transport.address import Address
from kvferry.transport.base import Copy, Guard, Listener, Memory, OnConnection
from kvferry.transport.board import SLOT_NBYTES, PeerBoard
from kvferry.transport.channel import Channel
from kvferry.transport.control import Signal
from kvferry.transport.device import pool_bytes
from kvferry.transport.library import LibraryConnection, LibraryTransport, decode_record, in_thread
from kvferry.transport.look import Looking, serve_look
from kvferry.transport.memory import address_of
from kvferry.transport.nixl_agent import NixlAgent, NixlPeer, missing, shared_agent
from kvferry.transport.nixl_paths import UNKNOWN
from kvferry.transport.nixl_reading import Reading
from kvferry.transport.patience import Patience
from kvferry.transport.serving import Handler
from kvferry.transport.table import Part
from kvferry.transport.windows import Progressing
from kvferry.transport.wire import Operation, Request

__all__ = ["NixlTransport"]

COOKIE_NBYTES = 16
DRIVE_SECONDS = 1.0
AGENT_SECONDS = 20.0
# Sums of two of them are addresses too.
_Address = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who a side is to NIXL, and where its pool, its board and a few known bytes lie in its process.

    A pool on a device is at no address: such a side pushes, out of windows in host memory.
    """

    agent: str
    metadata: bytes
    address: _Address | None
    nbytes: _Address
    cookie_address: _Address
    cookie: bytes
    board_address: _Address | None


class NixlConnection(LibraryConnection):
    """One peer over NIXL. ``path`` is ``nixl-`` and what UCX took: cma, tcp, rc_mlx5, ..."""

    scheme = "nixl"

    #: None for the better way on the path that is found.
    move: str | None = None
    agent: NixlAgent
    hello: Hello
    peer: NixlPeer | None = None
    #: What is registered for this connection: the pool, if it is in this process's memory, and the board.
    regions: tuple[tuple[int, int], ...] = ()
    #: The peer's board, where it can be read without the peer's doing.
    board: PeerBoard | None = None
    _drive_until = 0.0
    _is_driving = False

    def heed(self, address: Address, sock: socket.socket) -> None:
        super().heed(address, sock)
        self.move = address.options.get("move")

    def _hello(self) -> bytes:
        self.agent = shared_agent()
        pool = _region_of(self.memory)
        # Of a pool that nobody reads by himself the board is nobody's business.
        board = None if pool is None else _region_of_board(self.guard)
        regions = tuple(region for region in (pool, board) if region is not None)
        for region in regions:
            self.agent.register(*region)
            self.regions = (*self.regions, region)
        return msgspec.msgpack.encode(
            Hello(
                self.agent.name,
                self.agent.metadata(*regions),
                pool[0] if pool else None,
                self.memory.nbytes,
                self.agent.cookie_address,
                self.agent.cookie,
                board[0] if board else None,
            )
        )

    def _meet(self, hello: bytes) -> None:
        self.hello = decode_record(hello, Hello, self.peer_address)
        peer = self.agent.meet(self.hello.agent, self.hello.metadata, self.peer_address)
        peer.nudge = lambda: self._in_loop(self.control.signal, Signal.DRIVE)
        self.peer = self.mover = peer
        self.progress = peer.progress
        self.arena, self.peer_nbytes = self.agent.arena, self.hello.nbytes

    async def start(self, sock: socket.socket) -> None:
        await super().start(sock)
        if self.move is None:
            is_read = self.path != f"nixl-{UNKNOWN}" and "tcp" not in self.path
            self.move = "read" if is_read else "push"
        if self.hello.address is None:  # nothing of the peer's to read
            self.move = "push"
        if self.hello.board_address is not None and not self._is_lively:
            self.board = PeerBoard(self._read_slot)

    def _handlers(self) -> dict[Operation, Handler]:
        return {**super()._handlers(), Operation.LOOK: self._serve_look}

    def _read_part(self, copy: Copy, part: Part, patience: Patience) -> NDArray[np.uint64] | None:
        if self.move == "push":
            return super()._read_part(copy, part, patience)
        limits = self._driving(patience)
        with (
            self._asking.channel(limits) as channel,
            Looking(channel, copy, part, limits, self.board) as check,
        ):
            assert self.peer is not None
            assert self.hello.address is not None
            reading = Reading(self.peer, self.hello.address, pool_bytes(self.memory), limits, check)
            if copy.integrity or self.memory.device is not None:
                return reading.staged(part, self.arena, is_summed=copy.integrity)
            reading.direct(part)
            return None

    def _read_slot(self, place: int, patience: Patience) -> bytes:
        assert self.peer is not None
        assert self.hello.board_address is not None
        return self._read_bytes(self.hello.board_address + place, SLOT_NBYTES, self._driving(patience))

    def _read_bytes(self, there: int, nbytes: int, limits: Progressing) -> bytes:
        """A few bytes at an address of the peer's, by way of a window here."""
        assert self.peer is not None
        peeks = self.agent.peeks
        ring = peeks.take(limits)
        posted = None
        try:
            posted = self.peer.read(ring.addresses[0], there, nbytes)
            limits.until_done(posted)
            found, posted = ring.arrays[0][:nbytes].tobytes(), None
        finally:
            if posted is None:
                peeks.give_back(ring)
            else:
                peeks.give_back_after(posted, ring)
        return found

    def _serve_look(self, channel: Channel, _request: Request, patience: Patience) -> None:
        serve_look(channel, self._driving(patience))

    @property
    def _is_lively(self) -> bool:
        """Reads need the library of both sides all the time."""
        return "tcp" in self.path or UNKNOWN in self.path

    def _driving(self, patience: Patience) -> Progressing:
        """Limits for reads: over tcp they need this library all the time, else to set up an endpoint."""
        assert self.peer is not None
        is_lively = self._is_lively
        nudge = None if is_lively else self.peer.nudge
        return Progressing.of(patience, self.progress, is_lively=is_lively, nudge=nudge)

    def _on_signal(self, kind: Signal, payload: bytes) -> None:
        if kind is not Signal.DRIVE:
            super()._on_signal(kind, payload)
            return
        self._drive_until = time.monotonic() + DRIVE_SECONDS
        if not self._is_driving:
            self._is_driving = True
            threading.Thread(target=self._drive, name="kvferry drives nixl", daemon=True).start()

    def _drive(self) -> None:
        """The peer waits for an end of what it gave up; that may need this side's library."""
        with contextlib.suppress(KVFerryError), self._users.one():
            while time.monotonic() < self._drive_until and not self._ended.is_cancelled:
                self.agent.progress()
                time.sleep(1e-4)
        self._is_driving = False

    def _let_go(self) -> None:
        peer, self.peer = self.peer, None
        if peer is not None:
            self.agent.part(peer)
        for region in self.regions:
            self.agent.deregister(*region)

    def _read_known_bytes(self, limits: Progressing) -> str:
        with self.agent.proving:
            self.agent.paths.news(is_self=False)
            found = self._read_bytes(self.hello.cookie_address, COOKIE_NBYTES, limits)
            path = self.agent.paths.news(is_self=self.hello.agent == self.agent.name)
        if found != self.hello.cookie:
            raise TransportError(
                "what was read is not what is there", phase="connect", peer=self.peer_address
            )
        return path


def _region_of(memory: Memory) -> tuple[int, int] | None:
    """What NIXL is told of a pool: address and bytes, or nothing of one on a device."""
    return (address_of(memory.array), memory.nbytes) if memory.device is None else None


def _region_of_board(guard: Guard) -> tuple[int, int] | None:
    return None if guard.board is None else _region_of(guard.board.memory)


async def _agent() -> NixlAgent:
    """The agent. Raises LocalError when NIXL cannot make one, or does not come to an end with it."""
    try:
        async with asyncio.timeout(AGENT_SECONDS):
            return await in_thread(shared_agent)
    except TimeoutError as error:
        raise LocalError(
            f"NIXL has made no agent within {AGENT_SECONDS:g} s",
            phase="listen",
            peer="this process",
            now_true="nothing is held, but NIXL still tries",
            next_step="see that UCX can reach this host itself: is the interface lo up, and is the one that "
            "UCX_NET_DEVICES names?",
        ) from error


class NixlListener(Listener):
    """Keeps the pool registered while it listens."""

    def __init__(self, inner: Listener, agent: NixlAgent, region: tuple[int, int] | None) -> None:
        self.address = inner.address
        self._inner = inner
        self._agent = agent
        self._region = region

    async def close(self) -> None:
        region, self._region = self._region, None
        await self._inner.close()
        if region is not None:
            self._agent.deregister(*region)


class NixlTransport(LibraryTransport):
    """``nixl://HOST:PORT``, options ``move=read|push``, ``plain=yes|no`` and ``streams=N``."""

    scheme = "nixl"
    options = ("plain", "streams", "move")
    connection = NixlConnection

    @classmethod
    def unavailable(cls) -> str | None:
        return missing()

    def _parse(self, address: str) -> Address:
        parsed = super()._parse(address)
        parsed.choice("move", "read", "push")
        return parsed

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        self._parse(address)
        # The agent is made and the pool registered before the first peer comes, which then waits for neither.
        agent = await _agent()
        region = _region_of(self.memory)
        if region is not None:
            await in_thread(lambda: agent.register(*region))
        try:
            listener = await super().listen(address, on_connection)
        except BaseException:
            if region is not None:
                agent.deregister(*region)
            raise
        return NixlListener(listener, agent, region)
