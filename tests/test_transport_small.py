"""Small copies take short ways through the same functions: the same bytes, the same refusals, by either."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import KVFerryError, PeerError
from kvferry.layout import CopyPlan
from kvferry.testing.transport_pair import TRANSFER_ID, WAIT_SECONDS
from kvferry.transfer import lease
from kvferry.transfer.lease import Grants
from kvferry.transport import frames, staging, table, vectored, wire
from kvferry.transport.base import Copy, Direction
from kvferry.transport.channel import Channel
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.frames import Frames, receive_frames, send_frames
from kvferry.transport.patience import Patience
from kvferry.transport.wire import REQUEST, Kind, Operation, Request
from transport_raw import mark

POOL_NBYTES = 4096
EDGES = [0, 1, -1, POOL_NBYTES, POOL_NBYTES + 1, 2**62, 2**63 - 1, -(2**63)]
NUMBERS = st.one_of(st.integers(-10, POOL_NBYTES + 10), st.sampled_from(EDGES))
ROWS = st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=staging.FEW)
GOOD_ROWS = st.lists(
    st.tuples(st.integers(0, POOL_NBYTES - 300), st.integers(1, 300)), min_size=1, max_size=staging.FEW
)


def columns(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    first, second = zip(*rows, strict=True)
    return np.array(first, np.int64), np.array(second, np.int64)


def patience() -> Patience:
    return Patience(time.monotonic() + WAIT_SECONDS, (), "peer")


def outcome(call: Callable[[], Any]) -> object:
    """What came of it, arrays as lists, errors as their words."""
    try:
        found = call()
    except KVFerryError as error:
        return type(error), error.message
    return [np.asarray(one).tolist() for one in found] if isinstance(found, tuple | list) else found


def by_both(call: Callable[[], Any]) -> tuple[object, object]:
    """In Python's own numbers, and in NumPy's as tables of any length."""
    few = outcome(call)
    with contextlib.ExitStack() as stack:
        for module in (staging, table, vectored, wire, lease):
            stack.enter_context(mock.patch.object(module, "FEW", -1))
        return few, outcome(call)


@settings(max_examples=150, deadline=None)
@given(rows=ROWS, ends=st.lists(NUMBERS, min_size=1, max_size=4), operation=st.sampled_from(Operation))
def test_a_request_of_few_pieces_is_taken_or_refused_as_one_of_many(
    rows: list[tuple[int, int]], ends: list[int], operation: Operation
) -> None:
    """Any table of a peer, the last chunk right as often as not: the guard is asked about the same."""
    offset, nbytes = columns(rows)
    total = min(max(sum(size for _, size in rows), -(2**63)), 2**63 - 1)
    chunk_end = np.array([*ends, total] if len(ends) % 2 else ends, np.int64)
    chunks = {Operation.WRITE: chunk_end, Operation.PUSH: np.array([1, 2])}.get(operation, offset[:0])
    request = Request(operation, TRANSFER_ID, 1.0, True, offset, nbytes, chunks, np.arange(len(chunks)))

    def served() -> tuple[Any, ...]:
        said = b"".join(bytes(part) for part in request.encode())
        head = wire.decode_head(said[: REQUEST.size], "peer")
        tables = np.frombuffer(said[REQUEST.size :], np.uint8)
        made = wire.decode(head, tables, POOL_NBYTES, "peer")
        return made.offset, made.nbytes, made.chunk_end, made.chunk_id, [made.total_nbytes], [*said]

    few, many = by_both(served)
    assert few == many


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(
            st.one_of(st.sampled_from([63, 64, 65, 263, 264, 299, 300, 500, 799, 800]), NUMBERS),
            st.one_of(st.sampled_from([-1, 0, 1, 36, 37, 200, 236, 237, 300, 301]), NUMBERS),
        ),
        min_size=1,
        max_size=3,
    )
)
@example(rows=[(64, 236), (500, 300)])
@example(rows=[(64, 237)])
def test_the_guard_takes_few_pieces_as_it_takes_many(rows: list[tuple[int, int]]) -> None:
    """Exactly what lies inside the grant, whatever the numbers."""
    grants = Grants()
    granted = np.array([64, 264, 500]), np.array([200, 36, 300])
    grants.open(TRANSFER_ID, Direction.READ, *granted, lambda _: None)

    def entered() -> tuple[Any, ...]:
        grants.enter(TRANSFER_ID, Direction.READ, *columns(rows))
        return ()

    few, many = by_both(entered)
    # An error is a tuple; a descriptor below 0 is told apart from one outside only in tables of many.
    assert isinstance(few, tuple) == isinstance(many, tuple)


@settings(max_examples=150, deadline=None)
@given(rows=GOOD_ROWS, data=st.data(), limit=st.integers(1, 400))
def test_tables_of_few_pieces_are_cut_as_those_of_many(
    rows: list[tuple[int, int]], data: st.DataObject, limit: int
) -> None:
    """Parts, chunks, steps, I/O vectors, and what is gathered and scattered by them."""
    offset, nbytes = columns(rows)
    inner = data.draw(st.lists(st.integers(0, len(rows)), max_size=3))
    start = np.array([0, *sorted(inner), len(rows)])
    plan = CopyPlan(offset, offset, nbytes, start, np.arange(len(start) - 1), np.ones(len(start) - 1, bool))
    copy = Copy(TRANSFER_ID, plan, time.monotonic())
    pool = np.random.default_rng(1).integers(0, 256, POOL_NBYTES, np.uint8)
    first = data.draw(st.integers(0, len(rows) - 1))

    def cut() -> list[Any]:
        (part,) = table.split_copy(copy, Direction.READ, POOL_NBYTES, "peer")
        sizes, (places,) = table.split_pieces(nbytes, offset, limit=limit)
        return [
            part.here, part.chunk_end, part.chunk_id, table.chunk_nbytes(plan), sizes, places,
            staging.step_starts(nbytes, limit), vectored.iovecs(7, offset, nbytes), [table.sum_of(nbytes)],
            table.sizes_between(part.chunk_end),
        ]  # fmt: skip

    def moved() -> list[Any]:
        pieces, into = staging.Pieces(pool, offset, nbytes), np.zeros_like(pool)
        gathered = np.zeros(int(nbytes[first:].sum()), np.uint8)
        pieces.gather(first, len(rows), gathered)
        staging.Pieces(into, offset, nbytes).scatter(first, len(rows), gathered)
        return [gathered, into]

    for call in (cut, moved):
        few, many = by_both(call)
        assert few == many


class Dribble:
    """A socket that gives a few bytes at a time."""

    def __init__(self, sock: socket.socket, nbytes: int) -> None:
        self._sock = sock
        self._nbytes = nbytes

    def recv(self, nbytes: int, *flags: int) -> bytes:
        return self._sock.recv(min(nbytes, self._nbytes), *flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@contextlib.contextmanager
def channels(nbytes: int = 1 << 20) -> Iterator[tuple[Channel, socket.socket]]:
    """A channel that hears at most so many bytes at once, and the other end to speak by hand."""
    here, there = socket.socketpair()
    there.settimeout(WAIT_SECONDS)
    channel = Channel(here)
    channel._sock = Dribble(here, nbytes)  # type: ignore[assignment]
    yield channel, there
    channel.close()
    there.close()


FRAMES_ALONE = mock.patch.object(frames, "SAID_NBYTES", 0)


@settings(max_examples=60, deadline=None)
@given(rows=GOOD_ROWS)
def test_a_small_table_is_the_same_bytes_in_one_word(rows: list[tuple[int, int]]) -> None:
    """Marks and payload by one call, and by frames."""
    pool = np.random.default_rng(1).integers(0, 256, POOL_NBYTES, np.uint8)

    def said() -> bytes:
        with channels() as (channel, peer):
            send_frames(channel, Frames(pool, *columns(rows)), patience())
            assert channel.is_in_step
            channel.shut()
            return b"".join(iter(lambda: peer.recv(1 << 16), b""))

    word = said()
    with FRAMES_ALONE:
        assert not Frames(pool, *columns(rows)).is_word
        assert said() == word


def reason(text: str) -> bytes:
    encoded = wire.encode_reason(PeerError(text))
    return mark(Kind.ENDED, len(encoded)) + encoded


@settings(max_examples=150, deadline=None)
@given(
    rows=GOOD_ROWS,
    said=st.tuples(
        st.sampled_from([(Kind.DATA, 0), (Kind.DATA, 1), (Kind.DONE, 0), (Kind.ENDED, 0)]),
        st.sampled_from([(Kind.DONE, 0), (Kind.DONE, -1), (Kind.DATA, 0), (Kind.ENDED, 0)]),
    ),
    cut=st.one_of(st.none(), st.integers(0, 3000)),
    nbytes=st.integers(1, 5000),
    is_summed=st.booleans(),
)
def test_what_a_peer_sends_in_place_of_a_small_table_ends_it_alike(
    rows: list[tuple[int, int]],
    said: tuple[tuple[Kind, int], tuple[Kind, int]],
    cut: int | None,
    nbytes: int,
    is_summed: bool,
) -> None:
    """Wrong marks, reasons in their places, an end anywhere: the same bytes, sums and errors as by frames."""
    offset = np.cumsum([0, *(size for _, size in rows)])[:-1]
    sizes = columns(rows)[1]
    total = int(sizes.sum())
    payload = np.random.default_rng(2).integers(0, 256, total, np.uint8)
    marks = [reason("no") if kind is Kind.ENDED else mark(kind, total + more) for kind, more in said]
    stream = (marks[0] if said[0][0] is Kind.ENDED else marks[0] + payload.tobytes() + marks[1])[:cut]

    def received() -> tuple[Any, ...]:
        pool = np.zeros(POOL_NBYTES, np.uint8)
        sums = ChunkDigests(np.array([total])) if is_summed else None
        with channels(nbytes) as (channel, peer):
            channel.is_in_step = False
            peer.sendall(stream)
            peer.shutdown(socket.SHUT_WR)
            try:
                receive_frames(channel, Frames(pool, offset, sizes), patience(), sums)
            except KVFerryError as error:
                return type(error), error.message, channel.is_in_step
            return pool.tobytes(), sums.digests().tolist() if sums else None, channel.is_in_step

    word = received()
    with FRAMES_ALONE:
        assert received() == word


@settings(max_examples=60, deadline=None)
@given(stream=st.binary(min_size=20, max_size=200), data=st.data(), nbytes=st.integers(1, 300))
def test_a_request_is_heard_whole_however_it_comes(stream: bytes, data: st.DataObject, nbytes: int) -> None:
    """Its head, what is there of its tables, and the rest: never a byte of what follows."""
    least = data.draw(st.integers(1, 10))
    most = data.draw(st.integers(least, 20))
    whole = data.draw(st.integers(most, len(stream)))
    with channels(nbytes) as (channel, peer):
        peer.sendall(stream)
        start = channel.read_start(least, most, patience(), is_there=True)
        assert least <= len(start) <= most
        rest = channel.read(whole - least, patience(), start[least:])
        assert start[:least] + rest.tobytes() == stream[:whole]
        assert channel._sock.recv(1 << 16) == stream[whole:][:nbytes] if whole < len(stream) else True


def has_input(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def test_what_is_held_is_said_in_its_turn_and_before_any_wait() -> None:
    """With the next words, or when this side waits: never after, and never while the peer is waited for."""
    with channels() as (channel, peer):
        channel.hold_mark(Kind.ADMITTED, patience())
        assert not has_input(peer)
        channel.write_mark(Kind.DATA, patience(), 5)
        assert peer.recv(1 << 10) == mark(Kind.ADMITTED, 0) + mark(Kind.DATA, 5)
        channel.hold_mark(Kind.FREE, patience(), 5)
        peer.sendall(mark(Kind.DONE, 5))
        channel.read_mark(Kind.DONE, patience(), 5, is_there=True)
        assert not has_input(peer)
        peer.sendall(mark(Kind.DONE, 5))
        channel.read_mark(Kind.DONE, patience(), 5)
        assert peer.recv(1 << 10) == mark(Kind.FREE, 5)
        channel.hold_mark(Kind.FREE, patience(), 6)
        channel.write(patience(), np.zeros(1 << 16, np.uint8))
        assert peer.recv(16, socket.MSG_WAITALL) == mark(Kind.FREE, 6)
