"""Raw sockets that speak to a kvferry transport by hand, byte by byte, and boards without a peer."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np

from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import TRANSFER_ID, WAIT_SECONDS, TransportPair
from kvferry.transport.base import Direction
from kvferry.transport.board import BOARD_NBYTES, SLOT_NBYTES, Board, PeerBoard
from kvferry.transport.memory import create_shared, private
from kvferry.transport.shm import NAMESPACE, ShmTransport
from kvferry.transport.tcp import TcpTransport
from kvferry.transport.wire import REQUEST, Operation

POOL_NBYTES = 1 << 20
_count = itertools.count()


def shm_address() -> str:
    return f"shm://hostile-{os.getpid()}-{next(_count)}"


def new_pair(scheme: str) -> TransportPair:
    """A pair of sides with small pools, over tcp or shm."""
    pools = create_shared(POOL_NBYTES), create_shared(POOL_NBYTES)
    if scheme == "tcp":
        return TransportPair(TcpTransport, "tcp://127.0.0.1:0", *pools)
    return TransportPair(ShmTransport, shm_address(), *pools)


def new_board() -> Board:
    return Board(private(np.zeros(BOARD_NBYTES, np.uint8)))


def reader_of(board: Board) -> PeerBoard:
    return PeerBoard(lambda place, _: board.memory.array[place : place + SLOT_NBYTES].tobytes())


def raw_socket(address: str) -> socket.socket:
    """A plain socket to a listener."""
    scheme, _, rest = address.partition("?")[0].partition("://")
    if scheme == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WAIT_SECONDS)
        sock.connect(NAMESPACE + rest)
        return sock
    host, _, port = rest.partition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_SECONDS)


def read_to_end(sock: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while got := sock.recv(1 << 16):
            data += got
    return data


def greet(role: int, token: bytes = bytes(16), magic: bytes = b"KVFERRY", version: int = 1) -> bytes:
    return struct.pack("<7sBB16s", magic, version, role, token)


def offer(**says: object) -> bytes:
    values = {"magic": b"KVFO", "fd": 0, "own": 1, "zero": 0, "nbytes": 4096, "address": 0, "board": 0} | says
    return struct.pack(
        "<4sBBBBQQQ16s",
        values["magic"],
        values["fd"],
        values["own"],
        values["board"],
        values["zero"],
        values["nbytes"],
        values["address"],
        0,
        bytes(16),
    )


def connection_token(sock: socket.socket) -> bytes:
    """Become a connection by hand; the token of it."""
    sock.sendall(greet(1))
    if sock.family == socket.AF_UNIX:
        sock.sendall(offer())
    answer = sock.recv(25, socket.MSG_WAITALL)
    if sock.family == socket.AF_UNIX:
        for fd in socket.recv_fds(sock, 1 << 10, 4)[1]:
            os.close(fd)
    return answer[9:]


def request(
    operation: int = Operation.READ,
    pieces: tuple[tuple[int, int], ...] = ((0, 4096),),
    chunks: tuple[tuple[int, int], ...] = (),
    **head: object,
) -> bytes:
    """A request by hand; ``head`` overrides what its head says."""
    says = {"magic": b"KVFQ", "integrity": 0, "zero": 0, "seconds": 5.0} | head
    packed = REQUEST.pack(
        says["magic"],
        operation,
        says["integrity"],
        says["zero"],
        TRANSFER_ID,
        says["seconds"],
        says.get("num_pieces", len(pieces)),
        says.get("num_chunks", len(chunks)),
    )
    columns = [*zip(*pieces, strict=True), *zip(*chunks, strict=True)]
    return packed + b"".join(np.array(column, "<i8").tobytes() for column in columns)


def mark(kind: int, nbytes: int, magic: bytes = b"KVFM") -> bytes:
    return struct.pack("<4sIQ", magic, kind, nbytes)


@contextlib.contextmanager
def asking_channel(pair: TransportPair) -> Iterator[socket.socket]:
    """A data channel opened by hand, on which the listening side serves."""
    with raw_socket(pair.listener.address) as control_socket:
        token = connection_token(control_socket)
        accepted = pair.next_accepted()
        with raw_socket(pair.listener.address) as channel:
            channel.sendall(greet(2, token))
            yield channel
    pair.loop.run(accepted.close())


def still_serves(pair: TransportPair) -> None:
    """The pair that was there before works on, and newcomers get in."""
    for listening_side, connecting_side in (pair.sides, pair.connect()):
        listening_side.memory.array[:] = 9
        connecting_side.memory.array[:] = 0
        connecting_side.copy(Direction.READ, make_plan([0], [0], [5000]))
        assert connecting_side.memory.array[:5000].sum() == 9 * 5000
