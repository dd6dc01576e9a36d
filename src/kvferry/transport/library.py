"""A peer whose bytes are moved by a library with an engine of its own, beside kvferry's connection.

Greeting, control, requests and admission are those of ``tcp``, encrypted where that is. On the
control socket, before the first frame, both sides say who they are to the library, and each reads
a few known bytes of the other by it: a connection exists only where the library really works.

The library itself neither encrypts nor asks anybody who may read or write. Off this host it is
used only where plain traffic is allowed anywhere, or where this side listens with ``?plain=yes``.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, PeerError, TransportError
from kvferry.transport.address import Address
from kvferry.transport.base import Copy, Direction
from kvferry.transport.channel import Channel
from kvferry.transport.connection import OpenChannel
from kvferry.transport.device import pool_bytes
from kvferry.transport.greeting import GREETING_SECONDS, read_exactly
from kvferry.transport.patience import Patience
from kvferry.transport.security import Plain
from kvferry.transport.serving import Handler
from kvferry.transport.small import SMALL_NBYTES, ask_small, serve_small
from kvferry.transport.staged import ask_pushed, serve_pushed
from kvferry.transport.table import Part, first_outside, outside_of_peer
from kvferry.transport.tcp import TcpConnection, TcpTransport
from kvferry.transport.tcp_socket import stays_here
from kvferry.transport.windows import Arena, Mover, Progressing
from kvferry.transport.wire import Operation, Request

if TYPE_CHECKING:
    from kvferry.transport.tcp_sealed import Sealing

__all__ = ["LibraryConnection", "LibraryTransport", "in_thread"]

MAX_RECORD_NBYTES = 1 << 20

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class Proof(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether this side could read the other's known bytes, by which path, or why not."""

    path: str = ""
    problem: str = ""


class LibraryConnection(TcpConnection):
    """One peer by a library. Decode carries out what is pushed: ``read`` is all there is."""

    can_write = False

    #: Set by ``_meet``.
    arena: Arena
    mover: Mover
    #: Drives a library that has no thread of its own.
    progress: Callable[[], None] | None = None
    #: Bytes of the peer's pool.
    peer_nbytes: int

    @abstractmethod
    def _hello(self) -> bytes:
        """Who this side is to the library. Called in a thread; may raise KVFerryError."""

    @abstractmethod
    def _meet(self, hello: bytes) -> None:
        """Get to know the peer by its hello. Called in a thread; raises PeerError, TransportError."""

    @abstractmethod
    def _read_known_bytes(self, limits: Progressing) -> str:
        """Read the peer's known bytes by the library; the path that they took. Raises KVFerryError."""

    async def start(self, sock: socket.socket) -> None:
        hello = await in_thread(self._hello)
        await self._tell(sock, hello)
        theirs = await self._hear(sock)
        await in_thread(lambda: self._meet(theirs))
        await self._prove(sock)
        await super().start(sock)

    def _handlers(self) -> dict[Operation, Handler]:
        return {Operation.PUSH: self._serve_push, Operation.READ: self._serve_small}

    def _ask(
        self, direction: Direction, copy: Copy, part: Part, patience: Patience
    ) -> NDArray[np.uint64] | None:
        del direction  # reads are all there is
        bad = first_outside(part.there, part.nbytes, self.peer_nbytes)
        if bad is not None:
            raise outside_of_peer(bad, self.peer_nbytes, self.peer_address)
        return self._read_part(copy, part, patience)

    def _read_part(self, copy: Copy, part: Part, patience: Patience) -> NDArray[np.uint64] | None:
        if part.total_nbytes <= SMALL_NBYTES:
            with self._asking.channel(patience) as channel:
                return ask_small(channel, self.memory, copy, part, patience)
        limits = Progressing.of(patience, self.progress)
        with self._asking.channel(limits) as channel:
            pool = pool_bytes(self.memory)
            return ask_pushed(channel, pool, copy, part, patience=limits, arena=self.arena)

    def _serve_small(self, channel: Channel, request: Request, patience: Patience) -> None:
        serve_small(channel, self.memory, request, patience)

    def _serve_push(self, channel: Channel, request: Request, patience: Patience) -> None:
        limits = Progressing.of(patience, self.progress)
        pool = pool_bytes(self.memory)
        serve_pushed(channel, pool, request, patience=limits, arena=self.arena, mover=self.mover)

    async def _prove(self, sock: socket.socket) -> None:
        """Read the peer's known bytes while it reads ours; each drives its library until both are done."""
        stop = threading.Event()
        told: asyncio.Future[Proof] = self._loop.create_future()
        proving = asyncio.ensure_future(in_thread(lambda: self._prove_in_thread(told, stop)))
        try:
            ours = await told
            await self._tell(sock, msgspec.msgpack.encode(ours))
            theirs = decode_record(await self._hear(sock), Proof, self.peer_address)
        finally:
            stop.set()
            await proving
        problem = ours.problem or theirs.problem
        if problem:
            raise TransportError(
                f"{self.scheme} cannot reach the peer's memory: {problem}",
                phase="connect",
                peer=self.peer_address,
                now_true="nothing is held",
                next_step=f"see that both hosts share what {self.scheme} is told to use, or use tcp",
            )
        self.path = f"{self.scheme}-{ours.path}"

    def _prove_in_thread(self, told: asyncio.Future[Proof], stop: threading.Event) -> None:
        limits = Progressing.of(
            Patience(time.monotonic() + GREETING_SECONDS / 2, (self._ended,), self.peer_address, "connect"),
            self.progress,
        )
        try:
            proof = Proof(path=self._read_known_bytes(limits))
        except KVFerryError as error:
            proof = Proof(problem=error.message)
        self._in_loop(_set, told, proof)
        while self.progress is not None and not stop.wait(1e-4):
            self.progress()

    async def _tell(self, sock: socket.socket, record: bytes) -> None:
        data = _LENGTH.pack(len(record)) + record
        if self._tls is not None:
            await self._tls.send(sock, data)
        else:
            await self._loop.sock_sendall(sock, data)

    async def _hear(self, sock: socket.socket) -> bytes:
        (nbytes,) = _LENGTH.unpack(await self._exactly(sock, _LENGTH.size))
        if nbytes > MAX_RECORD_NBYTES:
            raise not_ours(f"a record of {nbytes} bytes", self.peer_address)
        return await self._exactly(sock, nbytes)

    async def _exactly(self, sock: socket.socket, nbytes: int) -> bytes:
        return await (read_exactly(sock, nbytes) if self._tls is None else self._tls.receive(sock, nbytes))


class LibraryTransport(TcpTransport):
    """The checks that both libraries share."""

    takes_device = True

    def _connection(
        self,
        sock: socket.socket,
        peer: str,
        address: Address,
        open_channel: OpenChannel | None,
        sealing: Sealing | None = None,
    ) -> TcpConnection:
        self._check_way(sock, address, is_ours=open_channel is None)  # whether it is sealed or not
        return super()._connection(sock, peer, address, open_channel, sealing)

    def _check_way(self, sock: socket.socket, address: Address, *, is_ours: bool) -> None:
        """Raise InputError where payload in plain may not cross the network."""
        is_said = is_ours and address.options.get("plain") == "yes"
        if not (stays_here(sock.getpeername()) or is_said or self.security.plain is Plain.ANYWHERE):
            raise InputError(
                f"address: {address}: {self.scheme} moves payload in plain, and this endpoint does so on "
                "this host only; where the whole network is trusted, allow plain traffic anywhere"
            )


def decode_record(record: bytes, kind: type[T], peer: str) -> T:
    """A record that the peer sent while connecting. Raises PeerError for anything else."""
    try:
        return msgspec.msgpack.decode(record, type=kind)
    except msgspec.DecodeError as error:
        raise not_ours(f"what is no {kind.__name__}: {error}", peer) from error


def not_ours(what: str, peer: str) -> PeerError:
    """The error for a greeting that no kvferry of this version sends."""
    return PeerError(
        f"the peer greets with {what}",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="run the same kvferry on both sides",
    )


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread of its own, which is gone with it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            outcome.append(error)
        loop.call_soon_threadsafe(_set, done, None)

    thread = threading.Thread(target=run, name="kvferry library", daemon=True)
    thread.start()
    await asyncio.shield(done)
    thread.join()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result


def _set(future: asyncio.Future[T], value: T) -> None:
    if not future.done():  # whoever waited was cancelled
        future.set_result(value)
