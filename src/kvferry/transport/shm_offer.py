"""What two processes of one host tell each other about their memory, and how each may read the other's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.errors import CapacityError, KVFerryError, PeerError, TransportError
from kvferry.transport.base import Memory
from kvferry.transport.board import BOARD_NBYTES, SLOT_NBYTES, Board, PeerBoard
from kvferry.transport.memory import address_of, check_peer_memory, map_shared, read_only_fd
from kvferry.transport.shared_copy import Mapped, OtherProcess, Source
from kvferry.transport.vectored import copy_from_process, iovecs

__all__ = ["Cookie", "Offer", "board_of", "check_same_user", "receive_offer", "send_offer", "source_for"]

COOKIE_NBYTES = 16
# Processors on which loads of one thread are seen in their order: the slot is looked at after the bytes.
ORDERED_MACHINES = ("x86_64", "AMD64", "i686", "s390x")

_OFFER = struct.Struct(f"<4sBBBBQQQ{COOKIE_NBYTES}s")
_MAGIC = b"KVFO"
_CREDENTIALS = struct.Struct("3i")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Offer:
    """A peer's memory: mapped by ``fd`` if it has one, else at ``address`` of process ``pid``.

    ``pid`` is the kernel's word, not the peer's; None where the memory is another process's.
    ``cookie`` stands at ``cookie_address`` of that process. ``board_fd`` is its board, if it has one.
    """

    nbytes: int
    address: int
    cookie_address: int
    cookie: bytes
    pid: int | None
    fd: int | None
    board_fd: int | None

    def close(self) -> None:
        """Give the descriptors back; maps of them stay."""
        for fd in (self.fd, self.board_fd):
            if fd is not None:
                os.close(fd)


class Cookie:
    """Random bytes at a fixed address, to show that a reader reads the right process."""

    def __init__(self) -> None:
        self.value = secrets.token_bytes(COOKIE_NBYTES)
        self._array = np.frombuffer(bytearray(self.value), np.uint8)
        self.address = address_of(self._array)


def check_same_user(sock: socket.socket, peer: str) -> int:
    """The peer's process id as the kernel says it. Raises TransportError for another user's process.

    That is no fault of the peer: another transport may reach it.
    """
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.geteuid():
        raise TransportError(
            # In the same words at both sides: who is refused is told it.
            f"shm is for processes of one user: process {pid} runs as user {uid}, "
            f"process {os.getpid()} as {os.geteuid()}",
            phase="connect",
            peer=peer,
            now_true="nothing is held",
            next_step="run both sides as one user, or use tcp",
        )
    return int(pid)


def send_offer(sock: socket.socket, memory: Memory, cookie: Cookie, board: Board | None) -> None:
    """Tell the peer about ``memory`` and ``board``; its descriptors of them can only read. Raises OSError."""
    board_fd = None if board is None else board.memory.fd
    message = _OFFER.pack(
        _MAGIC,
        memory.fd is not None,
        memory.owner_pid == os.getpid(),
        board_fd is not None,
        0,
        memory.nbytes,
        memory.owner_address,
        cookie.address,
        cookie.value,
    )
    with _lent(memory.fd) as pool, _lent(board_fd) as boards:
        # A fresh socket takes these bytes whole.
        socket.send_fds(sock, [message], [*pool, *boards])


async def receive_offer(sock: socket.socket, peer: str) -> Offer:
    """The peer's offer; the caller closes it. Raises PeerError for anything else, CapacityError, OSError."""
    await _wait_readable(sock)
    data, fds, flags, _ = socket.recv_fds(sock, _OFFER.size, 2, socket.MSG_CMSG_CLOEXEC)
    try:
        if flags & socket.MSG_CTRUNC and len(fds) < 2:
            raise CapacityError(
                "this process may open no more descriptors, and the peer's memory needs two",
                phase="connect",
                peer=peer,
                now_true="nothing is held",
                next_step="raise the limit of open files (ulimit -n), or use tcp",
            )
        return _parse_offer(data, fds, check_same_user(sock, peer), peer)
    except KVFerryError:
        for fd in fds:
            os.close(fd)
        raise


def source_for(offer: Offer, wanted: str | None, peer: str) -> Source:
    """How to read the offered memory: mapped where there is a descriptor, else from the process.

    ``wanted`` is ``mapped`` or ``cma`` to have only that one. Raises TransportError saying why
    there is no way, PeerError for a descriptor that is not safe to map.
    """
    if wanted != "cma" and offer.fd is not None:
        check_peer_memory(offer.fd, offer.nbytes, peer)
        try:
            return Mapped(map_shared(offer.fd, offer.nbytes, writable=False))
        except OSError as error:
            raise _no_way(f"its memory cannot be mapped: {error.strerror}", peer) from error
    if wanted == "mapped":
        raise _no_way("its memory is private and cannot be mapped", peer)
    if offer.pid is None and offer.fd is not None:
        raise _no_way(
            "path=cma reads a process's own memory, and this one is shared with a third process",
            peer,
            "leave path=cma out of the address",
        )
    if offer.pid is None:
        raise _no_way("its memory belongs to a third process and has no descriptor", peer)
    _probe(offer, offer.pid, peer)
    return OtherProcess(offer.pid, offer.address)


def board_of(offer: Offer, peer: str) -> PeerBoard | None:
    """The peer's board, mapped; None where it has none, it cannot be mapped, or looks may come out of order.

    Raises PeerError for a descriptor that is not safe to map.
    """
    if offer.board_fd is None or platform.machine() not in ORDERED_MACHINES:
        return None
    check_peer_memory(offer.board_fd, BOARD_NBYTES, peer)
    try:
        view = map_shared(offer.board_fd, BOARD_NBYTES, writable=False).data
    except OSError as error:
        _log.info("%s: its board cannot be mapped, each copy is asked for: %s", peer, error.strerror)
        return None
    return PeerBoard(lambda place, _patience: bytes(view[place : place + SLOT_NBYTES]))


def _probe(offer: Offer, pid: int, peer: str) -> None:
    """Read the bytes that are known to be there. Raises TransportError."""
    found = np.zeros(COOKIE_NBYTES, np.uint8)
    whole = np.zeros(1, np.int64), np.array([COOKIE_NBYTES], np.int64)
    try:
        copy_from_process(
            pid, iovecs(address_of(found), *whole), iovecs(offer.cookie_address, *whole), lambda: None
        )
    except OSError as error:
        raise _no_way(
            f"process {pid} cannot be read: {error.strerror} (ptrace rights; see Yama's ptrace_scope)", peer
        ) from error
    if found.tobytes() != offer.cookie:
        raise _no_way(f"process {pid} is not the peer (another PID namespace?)", peer)


def _parse_offer(data: bytes, fds: list[int], pid: int, peer: str) -> Offer:
    if len(data) == _OFFER.size:
        magic, has_fd, is_own, has_board, zero, nbytes, address, cookie_address, cookie = _OFFER.unpack(data)
        is_whole = max(has_fd, has_board) <= 1 and len(fds) == has_fd + has_board and not zero
        is_somewhere = max(address, cookie_address) < 1 << 62  # sums with it do not wrap
        if magic == _MAGIC and is_whole and is_somewhere and 0 < nbytes < 1 << 62:
            # Process 0 is the kernel's word for a process outside of this PID namespace.
            return Offer(
                nbytes,
                address,
                cookie_address,
                cookie,
                (pid or None) if is_own else None,
                fds[0] if has_fd else None,
                fds[-1] if has_board else None,
            )
    raise PeerError(
        "the peer does not say what memory it has",
        phase="connect",
        peer=peer,
        now_true="nothing is held",
        next_step="run the same kvferry on both sides",
    )


async def _wait_readable(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def is_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, is_ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


@contextlib.contextmanager
def _lent(fd: int | None) -> Iterator[list[int]]:
    """A read-only descriptor of the same memory for as long as it takes to send it."""
    if fd is None:
        yield []
        return
    lent = read_only_fd(fd)
    try:
        yield [lent]
    finally:
        os.close(lent)


def _no_way(
    reason: str, peer: str, next_step: str = "put the peer's pool into shared memory, or use tcp"
) -> TransportError:
    return TransportError(
        f"no way to read the peer's memory: {reason}",
        phase="connect",
        peer=peer,
        now_true="nothing was read",
        next_step=next_step,
    )
