"""Servers that answer wrong, and code of the caller that fails inside a transport."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvferry.errors import KVFerryError, PeerError, TransportError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import TRANSFER_ID, WAIT_SECONDS, LoopThread, TransportPair
from kvferry.transport.base import CancelToken, Connection, Copy, Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.tcp import TcpTransport
from kvferry.transport.wire import REQUEST, Kind
from transport_raw import (
    POOL_NBYTES,
    greet,
    mark,
    new_pair,
    read_to_end,
    still_serves,
)


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


class FakeServer:
    """Accepts one tcp connection by the book, then answers its first request with ``answer``."""

    def __init__(self, answer: bytes) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(WAIT_SECONDS)
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._answer = answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            socks = []
            for _ in range(3):
                sock = stack.enter_context(self._listening.accept()[0])
                sock.settimeout(WAIT_SECONDS)
                role = sock.recv(25, socket.MSG_WAITALL)[8]
                if role == 1:
                    sock.sendall(greet(4, bytes(16)))
                socks.append((role, sock))
            asked = next(sock for role, sock in socks if role == 2)
            asked.recv(REQUEST.size + 16, socket.MSG_WAITALL)
            asked.sendall(self._answer)
            asked.shutdown(socket.SHUT_WR)
            for _, sock in socks:
                read_to_end(sock)

    def close(self) -> None:
        self._thread.join()
        self._listening.close()


@pytest.mark.parametrize(
    ("answer", "kind", "word"),
    [
        (b"", TransportError, "closed"),
        (b"HTTP/1.1 400 Bad", PeerError, "no mark"),
        (mark(Kind.DATA, 4095) + bytes(4112), PeerError, "4095"),
        (mark(Kind.DONE, 4096), PeerError, "DATA"),
        (mark(Kind.DATA, 4096) + bytes(100), TransportError, "closed"),
        (mark(Kind.DATA, 4096) + bytes(4096) + mark(Kind.DONE, 5), PeerError, "DONE"),
        (mark(Kind.ENDED, 1 << 40), PeerError, "reason"),
        (mark(Kind.ENDED, 5) + b"\xc1\xc1\xc1\xc1\xc1", PeerError, "cannot be read"),
        (mark(Kind.ENDED, 5) + b"\x80", TransportError, "closed"),
    ],
    ids=[
        "nothing",
        "http",
        "frame size",
        "done at once",
        "cut",
        "sum",
        "huge reason",
        "garbled reason",
        "cut reason",
    ],
)
def test_a_server_that_answers_wrong_is_a_clear_error(
    answer: bytes, kind: type[KVFerryError], word: str
) -> None:
    """The reader gets the fitting error, changes nothing outside of its pieces, and holds nothing."""
    server, loop, memory = FakeServer(answer), LoopThread(), create_shared(POOL_NBYTES)
    transport = TcpTransport(memory, ScriptedGuard())
    connection = loop.run(transport.connect(server.address, WAIT_SECONDS))
    try:
        with pytest.raises(kind, match=word) as caught:
            copy_once(connection, make_plan([0], [8192], [4096]))
        assert caught.value.peer == server.address
        assert caught.value.next_step
        assert not memory.array[:8192].any()
        assert not memory.array[12_288:].any()
    finally:
        connection.abort(KVFerryError("the test is over"))
        loop.run(connection.close())
        server.close()
        loop.close()
        memory.close()


def copy_once(connection: Connection, plan: object, seconds: float = WAIT_SECONDS) -> object:
    return connection.read(Copy(TRANSFER_ID, plan, time.monotonic() + seconds))


def test_a_guard_that_fails_is_reported_and_logged(
    pair: TransportPair, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug in the guard ends the copy with a PeerError, is logged with its traceback, and breaks no more."""

    def bug(_token: CancelToken) -> None:
        raise ZeroDivisionError("a bug")

    pair.listening.guard.on_enter = bug
    with pytest.raises(PeerError, match="ZeroDivisionError"):
        pair.connecting.copy(Direction.READ, make_plan([0], [0], [4096]))
    assert any(record.exc_info for record in caplog.records)
    pair.listening.guard.on_enter = None
    still_serves(pair)


def test_channels_that_the_peer_closed_are_replaced(pair: TransportPair) -> None:
    """A server may give up idle channels; the next copies open new ones, from either side."""
    for asking, other in (pair.sides, pair.sides[::-1]):
        asking.copy(Direction.READ, make_plan([0], [0], [4096]))
        other.guard.wait_until_idle()
        other.connection._serving.shut()
        other.connection._serving.join()
        arrived = asking.copy(Direction.READ, make_plan([0], [0], [4096]))
        assert arrived.nbytes == 4096


def test_a_callback_that_fails_costs_only_its_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``on_connection`` raises: that peer is dropped, it is logged, and the listener goes on."""
    loop, memory = LoopThread(), create_shared(POOL_NBYTES)
    transport = TcpTransport(memory, ScriptedGuard())
    accepted: list[Connection] = []

    def on_connection(connection: Connection) -> None:
        accepted.append(connection)
        if len(accepted) == 1:
            raise ZeroDivisionError("a bug")

    listener = loop.run(transport.listen("tcp://127.0.0.1:0", on_connection))
    first = loop.run(transport.connect(listener.address, WAIT_SECONDS))
    with pytest.raises(TransportError):
        loop.run(first.receive())
    second = loop.run(transport.connect(listener.address, WAIT_SECONDS))
    loop.run(second.send(b"hello"))
    assert loop.run(accepted[1].receive()) == b"hello"
    assert any(record.exc_info for record in caplog.records)
    for connection in (first, second, *accepted):
        loop.run(connection.close())
    loop.run(listener.close())
    loop.close()
    memory.close()
