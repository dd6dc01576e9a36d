"""Hostile and broken peers: sockets that say the wrong thing, too much, half of it, or nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import KVFerryError, PeerError, TransportError
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.transport import address as address_module
from kvferry.transport import listening, serving
from kvferry.transport.base import MAX_FRAME_NBYTES, CancelToken
from kvferry.transport.table import MAX_PIECES
from kvferry.transport.wire import Kind, Operation
from transport_raw import (
    POOL_NBYTES,
    asking_channel,
    connection_token,
    greet,
    mark,
    new_pair,
    raw_socket,
    read_to_end,
    request,
    still_serves,
)

WRITE_4096 = request(Operation.WRITE, ((0, 4096),), ((4096, 0),))
BAD_REQUESTS = {
    "magic": request(magic=b"XXXX"),
    "operation": request(9),
    "integrity": request(integrity=2),
    "reserved bits": request(zero=1),
    "endless": request(seconds=float("inf")),
    "not a time": request(seconds=float("nan")),
    "negative time": request(seconds=-1.0),
    "no pieces": request(pieces=()),
    "too many pieces": request(pieces=(), num_pieces=MAX_PIECES + 1),
    "all pieces that a number holds": request(pieces=(), num_pieces=(1 << 64) - 1),
    "too many chunks": request(Operation.WRITE, num_chunks=MAX_PIECES + 1),
    "chunks of a read": request(chunks=((4096, 1),)),
    "write without chunks": request(Operation.WRITE),
    "outside": request(pieces=((POOL_NBYTES - 4095, 4096),)),
    "before the start": request(pieces=((-1, 4096),)),
    "empty piece": request(pieces=((0, 0),)),
    "negative size": request(pieces=((5, -3),)),
    "wrapping sum": request(pieces=(((1 << 63) - 1, (1 << 63) - 1),)),
    "chunks go back": request(Operation.WRITE, ((0, 4096),), ((4096, 0), (4000, 1))),
    "chunks miss bytes": request(Operation.WRITE, ((0, 4096),), ((4000, 0),)),
    "operation of shm": request(Operation.LOOK),
}


@pytest.fixture(params=["tcp", "shm"])
def pair(request: pytest.FixtureRequest) -> Iterator[TransportPair]:
    pair = new_pair(request.param)
    yield pair
    pair.close()


@pytest.fixture
def tcp_pair() -> Iterator[TransportPair]:
    pair = new_pair("tcp")
    yield pair
    pair.close()


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
        bytes(1000),
        greet(1, version=2),
        greet(99),
        greet(2, os.urandom(16)),
        greet(3, os.urandom(16)),
        greet(4, os.urandom(16)),
    ],
    ids=["http", "tls", "zeros", "version", "role", "token asks", "token serves", "accepted"],
)
def test_a_wrong_greeting_is_dropped(pair: TransportPair, first: bytes) -> None:
    """The socket is closed without a word, and nobody else notices."""
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(first)
        assert read_to_end(sock) == b""
    still_serves(pair)


@pytest.mark.parametrize("first", [b"", greet(1)[:10]], ids=["nothing", "half a greeting"])
def test_a_silent_peer_is_dropped_by_deadline(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """While it is waited for, others get in; then it is dropped."""
    with raw_socket(pair.listener.address) as early:
        early.sendall(first)
        still_serves(pair)
        monkeypatch.setattr(listening, "GREETING_SECONDS", 0.1)
        with raw_socket(pair.listener.address) as late:
            late.sendall(first)
            assert read_to_end(late) == b""


def test_a_flood_of_silent_peers_keeps_nobody_out(
    pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More silent peers than are waited for: the oldest go, a real peer gets in."""
    monkeypatch.setattr(listening, "MAX_GREETING", 4)
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(raw_socket(pair.listener.address)) for _ in range(12)]
        assert read_to_end(socks[0]) == b""
        still_serves(pair)


@pytest.mark.parametrize(
    ("head", "word"),
    [
        (struct.pack("<IB", MAX_FRAME_NBYTES + 1, 0), "above the limit"),
        (struct.pack("<IB", 0xFFFFFFFF, 0), "above the limit"),
        (struct.pack("<IB", 1025, 1), "above the limit"),
        (struct.pack("<IB", 0, 77), "unknown kind"),
    ],
    ids=["one byte over", "4 GiB", "long signal", "kind"],
)
def test_a_control_frame_over_its_bounds_ends_the_connection(
    tcp_pair: TransportPair, head: bytes, word: str
) -> None:
    """PeerError at this side, before anything is allocated by the peer's number; the socket is closed."""
    with raw_socket(tcp_pair.listener.address) as sock:
        connection_token(sock)
        accepted = tcp_pair.next_accepted()
        sock.sendall(head)
        with pytest.raises(PeerError, match=word) as caught:
            tcp_pair.loop.run(accepted.receive())
        assert caught.value.peer
        assert read_to_end(sock) == b""
        tcp_pair.loop.run(accepted.close())
    still_serves(tcp_pair)


def test_a_frame_cut_by_the_peers_end_is_not_delivered(tcp_pair: TransportPair) -> None:
    """Half a frame, then the end: whole frames arrive, then TransportError."""
    with raw_socket(tcp_pair.listener.address) as sock:
        connection_token(sock)
        accepted = tcp_pair.next_accepted()
        sock.sendall(struct.pack("<IB", 3, 0) + b"one" + struct.pack("<IB", 10, 0) + b"half")
    assert tcp_pair.loop.run(accepted.receive()) == b"one"
    with pytest.raises(TransportError):
        tcp_pair.loop.run(accepted.receive())
    tcp_pair.loop.run(accepted.close())


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_the_guard_not_asked(tcp_pair: TransportPair, name: str) -> None:
    """The answer is ENDED with a reason; no guard was entered, no byte changed."""
    guard, before = tcp_pair.listening.guard, tcp_pair.listening.memory.array.copy()
    with asking_channel(tcp_pair) as channel:
        channel.sendall(BAD_REQUESTS[name])
        channel.shutdown(socket.SHUT_WR)
        answer = read_to_end(channel)
    assert answer[:16] == mark(Kind.ENDED, len(answer) - 16)
    assert b"the peer sent" in answer
    assert guard.entered == []
    assert np.array_equal(tcp_pair.listening.memory.array, before)
    still_serves(tcp_pair)


@pytest.mark.parametrize(
    "frames",
    [
        mark(Kind.DATA, 4096, magic=b"XXXX") + bytes(4096) + mark(Kind.DONE, 4096),
        mark(Kind.DATA, 4095) + bytes(4096) + mark(Kind.DONE, 4096),
        mark(Kind.DONE, 4096) + bytes(4096) + mark(Kind.DONE, 4096),
        mark(Kind.DATA, 4096) + bytes(4096) + mark(Kind.DATA, 4096),
        mark(Kind.DATA, 4096) + bytes(4096) + mark(Kind.DONE, 4097),
        mark(77, 4096) + bytes(4096) + mark(Kind.DONE, 4096),
    ],
    ids=["magic", "size", "done at once", "no end", "sum", "kind"],
)
def test_frames_out_of_place_never_count_as_landed(tcp_pair: TransportPair, frames: bytes) -> None:
    """The guard is left without ``landed``, the sender is told, and nothing outside the grant changed."""
    side = tcp_pair.listening
    side.memory.array[:] = 7
    with asking_channel(tcp_pair) as channel:
        channel.sendall(WRITE_4096 + frames)
        channel.shutdown(socket.SHUT_WR)
        answer = read_to_end(channel)
    assert answer[:16] == mark(Kind.ENDED, len(answer) - 16)
    side.guard.wait_until_idle()
    assert len(side.guard.entered) == 1
    assert side.guard.landed_copies == []
    assert (side.memory.array[4096:] == 7).all()
    still_serves(tcp_pair)


@pytest.mark.parametrize(
    "sent", [0, 10, 16, 1000], ids=["nothing", "half a mark", "a mark", "half the bytes"]
)
def test_a_writer_that_hangs_up_leaves_the_guard(tcp_pair: TransportPair, sent: int) -> None:
    """A write that breaks off is not landed, and its grant is free again."""
    side = tcp_pair.listening
    with asking_channel(tcp_pair) as channel:
        channel.sendall((WRITE_4096 + mark(Kind.DATA, 4096) + bytes(4096))[: len(WRITE_4096) + sent])
        channel.shutdown(socket.SHUT_WR)
        assert read_to_end(channel) == b""
    side.guard.wait_until_idle()
    assert side.guard.landed_copies == []
    still_serves(tcp_pair)


def test_a_reader_that_stalls_is_left_at_its_own_deadline(tcp_pair: TransportPair) -> None:
    """A peer that asks and does not take the bytes loses its grant when its time is over."""
    side = tcp_pair.listening
    entered = threading.Event()
    side.guard.on_enter = lambda _token: entered.set()
    pieces = tuple((0, POOL_NBYTES) for _ in range(100))
    with asking_channel(tcp_pair) as channel:
        channel.sendall(request(pieces=pieces, seconds=0.2))
        assert entered.wait(WAIT_SECONDS)
        side.guard.wait_until_idle()
    still_serves(tcp_pair)


def test_a_stalled_reader_is_left_when_its_grant_ends(tcp_pair: TransportPair) -> None:
    """A peer that does not take the bytes cannot hold the memory: the token frees it at once."""
    side = tcp_pair.listening
    tokens: list[CancelToken] = []
    entered = threading.Event()

    def on_enter(token: CancelToken) -> None:
        tokens.append(token)
        entered.set()

    side.guard.on_enter = on_enter
    pieces = tuple((0, POOL_NBYTES) for _ in range(100))
    with asking_channel(tcp_pair) as channel:
        channel.sendall(request(pieces=pieces, seconds=3600.0))
        assert entered.wait(WAIT_SECONDS)
        tokens[0].cancel(KVFerryError("the lease is over"))
        side.guard.wait_until_idle()
    still_serves(tcp_pair)


def test_a_request_that_does_not_end_is_dropped(
    tcp_pair: TransportPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request, then silence: the channel is closed after the request's deadline."""
    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.1)
    with asking_channel(tcp_pair) as channel:
        channel.sendall(request()[:30])
        assert read_to_end(channel) == b""
    still_serves(tcp_pair)


def test_channels_of_one_connection_are_bounded(tcp_pair: TransportPair) -> None:
    """One more channel than a connection may have is closed, the others serve."""
    with raw_socket(tcp_pair.listener.address) as sock, contextlib.ExitStack() as stack:
        token = connection_token(sock)
        accepted = tcp_pair.next_accepted()
        channels = []
        for _ in range(address_module.MAX_STREAMS):
            channel = stack.enter_context(raw_socket(tcp_pair.listener.address))
            channel.sendall(greet(2, token) + request())
            assert channel.recv(16, socket.MSG_WAITALL) == mark(Kind.DATA, 4096)
            channels.append(channel)
        extra = stack.enter_context(raw_socket(tcp_pair.listener.address))
        extra.sendall(greet(2, token))
        assert read_to_end(extra) == b""
    tcp_pair.loop.run(accepted.close())
