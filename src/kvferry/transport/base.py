"""What every transport is: control frames both ways, and one payload copy at a time by table.

The rules that all of them share:

- A transport decides nothing. The protocol says when bytes move; the transport moves them.
- The side that starts a copy has both tables (a ``CopyPlan``). The other side serves it only
  inside a grant: it asks its ``Guard`` about every descriptor, in one call, before one byte moves.
  A side that reads the peer's memory itself may find the grant on the peer's board instead.
- Control is async (asyncio, one loop a node). Payload calls block, run in data threads, and end
  by their deadline or soon after their cancel token is set, whatever the peer does.
- Where integrity is on, the receiving side returns one xxh3-64 a chunk over the bytes that
  arrived, in plan order. Nothing is compared here: the commit does it.
- After ``read`` or ``write`` raises, some, all or none of the destination bytes may have changed.
"""

from __future__ import annotations

import enum
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, PeerError
from kvferry.layout import CopyPlan
from kvferry.transport.device import DeviceBytes
from kvferry.transport.security import HOST_ONLY, Security

if TYPE_CHECKING:
    from kvferry.transport.board import Board

__all__ = [
    "MAX_FRAME_NBYTES",
    "TRANSFER_ID_NBYTES",
    "Arrived",
    "CancelToken",
    "Connection",
    "Copy",
    "CopyEndedError",
    "Direction",
    "Guard",
    "Listener",
    "Memory",
    "OnConnection",
    "Transport",
]

# One control frame. The largest holds a state record: 1 M token ids (4 MB) and one row of
# fp32 logits over a vocabulary of 256 Ki (1 MB) fit with room to spare.
MAX_FRAME_NBYTES = 16 << 20
TRANSFER_ID_NBYTES = 16


class Direction(enum.StrEnum):
    """What a peer may do with the granted byte ranges of this side's memory."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True, eq=False)
class Memory:
    """A pool's bytes as this process sees them, and how others may reach them.

    ``array`` is uint8, one dimension, writable. ``fd`` is a sealed memfd that holds the same
    bytes, or None for private memory; it is owned, ``close`` gives it back. ``owner_pid`` and
    ``owner_address`` say where the bytes lie for ``process_vm_readv``: the engine process, which
    need not be this process.
    """

    array: NDArray[np.uint8]
    owner_pid: int
    owner_address: int
    fd: int | None = None
    #: Where the bytes are if not in this process's memory; ``array`` is empty then.
    device: DeviceBytes | None = None

    @property
    def nbytes(self) -> int:
        return self.array.nbytes if self.device is None else self.device.nbytes

    def close(self) -> None:
        """Give the descriptor back and let go of the bytes; close the connections first. Safe to call twice.

        Shared memory is unmapped when the last array over it goes, so no array ever dangles.
        """
        fd, self.fd = self.fd, None
        self.array = np.empty(0, np.uint8)
        if fd is not None:
            os.close(fd)


class CopyEndedError(PeerError):
    """The data path's word that the peer let no copy in, or ended it.

    Why the peer did so it says itself, by the control path; that may come after this.
    """


class CancelToken:
    """Set once, from any thread, to end a copy early; the first reason stays."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: KVFerryError | None = None

    def cancel(self, error: KVFerryError) -> None:
        with self._lock:
            if self._error is None:
                self._error = error

    @property
    def is_cancelled(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> KVFerryError | None:
        """The reason given first; None while the token is not set."""
        return self._error

    def raise_if_cancelled(self) -> None:
        if self._error is not None:
            raise self._error


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One payload copy, asked of a connection.

    In ``plan`` the source is the peer for a read and this side for a write; offsets count from
    the start of either pool. ``transfer_id`` names the grant at the peer. ``deadline`` is
    ``time.monotonic()`` seconds.
    """

    transfer_id: bytes
    plan: CopyPlan
    deadline: float
    integrity: bool = True
    cancel: CancelToken = field(default_factory=CancelToken)


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """What came of a copy: filled by the side where the bytes landed.

    ``digests`` are xxh3-64, one for each entry of ``chunk_id``, over the bytes at the
    destination in plan order; None when integrity was off, or, for a write, at the side that
    sent (the receiver's guard has them). ``path`` names what really carried the bytes.

    ``piece_offset`` and ``piece_nbytes``, int64, say where at the destination the bytes went, in
    the order in which they were summed; ``chunk_nbytes``, int64, how that order falls into chunks.
    """

    path: str
    seconds: float
    piece_offset: NDArray[np.int64]
    piece_nbytes: NDArray[np.int64]
    chunk_id: NDArray[np.int64]
    chunk_nbytes: NDArray[np.int64]
    digests: NDArray[np.uint64] | None

    @property
    def nbytes(self) -> int:
        """Bytes that arrived."""
        return int(self.piece_nbytes.sum())

    @property
    def descriptors(self) -> int:
        """Pieces that they came in."""
        return len(self.piece_nbytes)


class Guard(Protocol):
    """Asked by a transport before it serves a peer. Called from data threads; must not block long."""

    @property
    def board(self) -> Board | None:
        """Where what may be read is posted, for peers that move the bytes themselves; None: they ask."""

    def enter(
        self, transfer_id: bytes, direction: Direction, offset: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> CancelToken:
        """Admit one copy by the peer: every descriptor lies in the live grant of that transfer.

        Until ``leave``, the granted memory is not reused. The token is set when the grant ends
        meanwhile: the transport stops touching the memory and leaves. Several copies of one
        transfer may be inside at once, also parts of one copy; each ``enter`` has one ``leave``.

        Raises:
            PeerError, DeadlineError: no such grant, another direction, outside it, or expired.
        """

    def landed(self, transfer_id: bytes, arrived: Arrived) -> None:
        """A peer's write is complete in this side's memory: whole chunks, perhaps one of several parts."""

    def leave(self, transfer_id: bytes) -> None:
        """The transport no longer touches the memory of the copy that ``enter`` admitted."""


class Connection(ABC):
    """One peer. Owns its sockets, maps and data threads; all of them are gone after close or abort."""

    scheme: ClassVar[str]
    #: ``write`` exists: the peer's process receives without its protocol being asked each time.
    can_write: ClassVar[bool]

    peer_address: str
    #: What carries payload here: ``tcp``, ``tcp-sealed``, ``tcp-plain``, ``mapped``, ``cma``, ``inproc``.
    #: Recorded with each transfer.
    path: str
    #: The names in the peer's certificate, proven; none where the transport knows no certificates.
    peer_names: tuple[str, ...] = ()
    #: What a record of a transfer should say beside ``path``: whatever is not as one would want it.
    notes: tuple[str, ...] = ()

    @abstractmethod
    async def send(self, frame: bytes) -> None:
        """Queue and flush one control frame of at most MAX_FRAME_NBYTES.

        Raises TransportError when the connection is gone; then it may have been delivered or not.
        """

    @abstractmethod
    async def receive(self) -> bytes:
        """Wait for the next control frame.

        Raises TransportError when the peer closed or broke the connection, PeerError for a
        frame over the limit. Waits as long as the caller lets it: wrap it in a deadline.
        """

    @abstractmethod
    def read(self, copy: Copy) -> Arrived:
        """Copy from the peer's memory into this side's; blocks; call it from a data thread.

        Raises:
            PeerError: the peer's guard refused, with its reason.
            TransportError, DeadlineError, or the error given to the cancel token.
        """

    def write(self, copy: Copy) -> Arrived:
        """Copy from this side's memory into the peer's; returns once all of it has landed there.

        Raises as ``read`` does. Only where ``can_write``.
        """
        raise NotImplementedError(f"{self.scheme} has no write; check can_write")

    @abstractmethod
    async def close(self) -> None:
        """Flush what was sent, then release everything. Safe to call twice."""

    @abstractmethod
    def abort(self, error: KVFerryError) -> None:
        """Break the connection now, from any thread; waiting calls raise ``error``. Safe to call twice.

        Copies that run end soon; ``close`` afterwards waits until all of it is gone.
        """


OnConnection = Callable[[Connection], None]


class Listener(ABC):
    """An open address. ``address`` is what peers connect to (port 0 resolved)."""

    address: str

    @abstractmethod
    async def close(self) -> None:
        """Stop accepting and free the address; connections that were accepted stay."""


class Transport(ABC):
    """One way to reach peers, bound to one memory and one guard."""

    scheme: ClassVar[str]
    #: Moves the bytes of a pool that lies on a device, through staging of its own.
    takes_device: ClassVar[bool] = False
    #: Who this side is, and what may leave the host in plain; set before ``listen`` and ``connect``.
    security: Security = HOST_ONLY

    def __init__(self, memory: Memory, guard: Guard) -> None:
        """Raises InputError where the pool lies on a device and the transport cannot reach it."""
        if memory.device is not None and not self.takes_device:
            raise InputError(
                f"transport: {self.scheme} moves host memory, and this pool lies on {memory.device.name}",
                next_step="use nixl or mooncake, or a pool in host memory that the engine copies to and from",
            )
        self.memory = memory
        self.guard = guard

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this transport cannot work on this machine, in words with the fix; None if it can."""
        return None

    @abstractmethod
    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        """Listen at ``scheme://...``; each accepted, transport-level complete peer is handed over.

        Peers that do not complete the transport's own preamble within its deadline are dropped.
        Raises InputError for a malformed address, TransportError when it cannot be had.
        """

    @abstractmethod
    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        """Reach a peer, the transport's own preamble included, within the timeout.

        Raises InputError, TransportError, DeadlineError; after any of them nothing is held.
        """
