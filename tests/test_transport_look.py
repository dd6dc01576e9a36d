"""A one-sided read is sound: whoever reads reused memory knows it before the read counts."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.errors import KVFerryError, PeerError, TransportError
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import TRANSFER_ID, WAIT_SECONDS
from kvferry.transport.base import CancelToken, Copy, Direction
from kvferry.transport.board import Board, PeerBoard
from kvferry.transport.channel import Channel
from kvferry.transport.look import Looking, serve_look
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part, split_copy
from kvferry.transport.wire import REQUEST, Kind, Operation
from transport_raw import asking_channel, mark, new_board, new_pair, reader_of, request

COPY = Copy(TRANSFER_ID, make_plan([0], [0], [4096]), time.monotonic() + 3600)
REQUEST_NBYTES = REQUEST.size + 16
ADMITTED, RELEASE = mark(Kind.ADMITTED, 0), mark(Kind.RELEASE, 0)


def part() -> Part:
    return split_copy(COPY, Direction.READ, 4096, "peer")[0]


def patience(*tokens: CancelToken) -> Patience:
    return Patience(time.monotonic() + WAIT_SECONDS, tokens, "peer")


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A reader's channel, and the server's end of it to speak by hand."""
    here, there = socket.socketpair()
    channel = Channel(here)
    there.settimeout(WAIT_SECONDS)
    yield channel, there
    channel.close()
    there.close()


def ended(reason: KVFerryError) -> bytes:
    """ENDED with its reason, as a server writes it."""
    here, there = socket.socketpair()
    channel = Channel(here)
    channel.write_ended(reason, patience())
    channel.close()
    with there:
        return there.recv(1 << 16)


def test_an_end_during_the_copy_is_seen_when_it_is_over(ends: tuple[Channel, socket.socket]) -> None:
    """Even a reader that never checked learns of it before the copy counts."""
    channel, server = ends
    server.sendall(ADMITTED)
    with pytest.raises(PeerError, match="the lease is over"), Looking(channel, COPY, part(), patience()):
        server.sendall(ended(KVFerryError("the lease is over")))
    assert not channel.is_in_step


def test_a_hang_up_during_the_copy_is_seen_when_it_is_over(ends: tuple[Channel, socket.socket]) -> None:
    """A server that is gone may have reused the memory: TransportError."""
    channel, server = ends
    server.sendall(ADMITTED)
    with pytest.raises(TransportError), Looking(channel, COPY, part(), patience()):
        server.close()


@pytest.mark.parametrize("what", ["end", "token"])
def test_the_check_ends_a_copy_early(ends: tuple[Channel, socket.socket], what: str) -> None:
    """``check`` raises for the server's word and for this side's own token."""
    channel, server = ends
    token = CancelToken()
    server.sendall(ADMITTED)
    checks = []

    def copy() -> None:
        with Looking(channel, COPY, part(), patience(token)) as check:
            checks.append(check())
            if what == "end":
                server.sendall(ended(KVFerryError("stop")))
            else:
                token.cancel(KVFerryError("stop"))
            checks.append(check())

    with pytest.raises(KVFerryError, match="stop"):
        copy()
    assert len(checks) == 1
    assert not channel.is_in_step


def test_a_release_is_settled_by_its_answer(ends: tuple[Channel, socket.socket]) -> None:
    """The reader does not wait for the answer to a release, but uses the channel again only with it."""
    channel, server = ends
    server.sendall(ADMITTED)
    with Looking(channel, COPY, part(), patience()):
        pass
    assert server.recv(REQUEST_NBYTES, socket.MSG_WAITALL)[:4] == b"KVFQ"
    assert server.recv(16, socket.MSG_WAITALL) == RELEASE
    server.sendall(mark(Kind.DONE, 4096))
    assert channel.settle(patience())


@pytest.mark.parametrize("answer", [mark(Kind.DONE, 4095), ended(KVFerryError("too late")), b""])
def test_a_channel_whose_release_came_too_late_is_not_used_again(
    ends: tuple[Channel, socket.socket], answer: bytes
) -> None:
    """An end that crossed the release, or a hang-up: the copy counts, the channel does not."""
    channel, server = ends
    server.sendall(ADMITTED)
    with Looking(channel, COPY, part(), patience()):
        pass
    server.sendall(answer)
    server.shutdown(socket.SHUT_WR)
    assert not channel.settle(patience())
    assert not channel.is_in_step


class Late(CancelToken):
    """Is set after it was looked at once."""

    def raise_if_cancelled(self) -> None:
        super().raise_if_cancelled()
        self.cancel(KVFerryError("the lease is over"))


def test_a_grant_that_ends_while_it_is_admitted_is_told_after_the_admission() -> None:
    """ENDED in its place is a refusal, behind which the channel is used again; this one is shut."""
    here, reader = socket.socketpair()
    channel = Channel(here)
    with reader:
        with pytest.raises(KVFerryError, match="the lease is over"):
            serve_look(channel, patience(CancelToken(), Late()))
        assert reader.recv(16, socket.MSG_WAITALL) == ADMITTED
        assert np.frombuffer(reader.recv(16, socket.MSG_WAITALL), "<u4")[1] == Kind.ENDED
    channel.close()


def test_the_reader_is_told_before_the_guard_is_left() -> None:
    """When ``leave`` is called because the grant ended, ENDED lies in the reader's socket already."""
    pair = new_pair("shm")
    guard = pair.listening.guard
    look = request(Operation.LOOK, ((0, 4096),), seconds=60.0)
    said: list[bytes] = []
    with asking_channel(pair) as channel:
        guard.on_leave = lambda: said.append(channel.recv(16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        channel.sendall(look)
        assert channel.recv(16, socket.MSG_WAITALL) == ADMITTED
        guard.end_all(KVFerryError("the lease is over"))
        guard.wait_until_idle()
    assert np.frombuffer(said[0], "<u4")[1] == Kind.ENDED
    pair.close()


# By the board.


def posted() -> tuple[Board, PeerBoard]:
    board, whole = new_board(), (np.array([0]), np.array([4096]))
    board.post(TRANSFER_ID, *whole, whole)
    return board, reader_of(board)


def test_a_posted_copy_says_nothing_on_the_channel(ends: tuple[Channel, socket.socket]) -> None:
    channel, server = ends
    with Looking(channel, COPY, part(), patience(), posted()[1]) as check:
        check()
    assert channel.is_in_step
    assert channel.settle(patience())
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.recv(1)


@pytest.mark.parametrize("when", ["at a check", "at the end"])
def test_a_peer_that_goes_ends_a_posted_copy(ends: tuple[Channel, socket.socket], when: str) -> None:
    """Its board may stay readable when it is gone: nobody takes the posting off then."""
    channel, server = ends

    def copy() -> None:
        with Looking(channel, COPY, part(), patience(), posted()[1]) as check:
            server.close()
            if when == "at a check":
                check()
                raise AssertionError("the check was passed")

    with pytest.raises(TransportError):
        copy()
    assert not channel.is_in_step


def test_a_check_during_a_long_copy_sees_that_the_posting_is_gone(
    ends: tuple[Channel, socket.socket],
) -> None:
    """Not at each check, but soon; the reason is asked for."""
    channel, server = ends
    board, reader = posted()

    def copy() -> None:
        with Looking(channel, COPY, part(), patience(), reader) as check:
            board.withdraw(TRANSFER_ID)
            deadline = time.monotonic() + WAIT_SECONDS
            while time.monotonic() < deadline:
                check()

    def answer() -> bytes:
        asked = server.recv(4)
        server.sendall(ended(KVFerryError("the lease is over")))
        return asked

    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(answer)
        with pytest.raises(PeerError, match="the lease is over"):
            copy()
        assert asked.result() == b"KVFQ"


def test_a_failed_copy_is_not_looked_at_again(ends: tuple[Channel, socket.socket]) -> None:
    """What it raised itself is its error; the channel was not used, and stays usable."""
    channel, _ = ends
    board, reader = posted()

    def copy() -> None:
        with Looking(channel, COPY, part(), patience(), reader):
            board.withdraw(TRANSFER_ID)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        copy()
    assert channel.is_in_step
