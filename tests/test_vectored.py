"""Vectored I/O: every byte in its place after any pattern of short counts, and every limit seen."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.transport.base import CancelToken
from kvferry.transport.memory import address_of
from kvferry.transport.patience import Patience
from kvferry.transport.vectored import (
    IOV_MAX,
    copy_from_process,
    iovecs,
    merge_touching,
    read_vectored,
    write_vectored,
)

Pieces = list[tuple[int, int]]

PIECES = st.lists(st.tuples(st.integers(0, 50_000), st.integers(0, 9_000)), min_size=1, max_size=60)


def patience(seconds: float = 20.0, *tokens: CancelToken) -> Patience:
    return Patience(time.monotonic() + seconds, tokens, "peer")


def tiny_pair(buffer_nbytes: int) -> tuple[socket.socket, socket.socket]:
    """A connected pair whose kernel buffers hold next to nothing, so that every call is short."""
    pair = socket.socketpair()
    for sock in pair:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
    return pair


def vector(array: np.ndarray, pieces: Pieces) -> np.ndarray:
    offset, nbytes = (np.array(column, np.int64) for column in zip(*pieces, strict=True))
    return iovecs(address_of(array), offset, nbytes)


def laid_out(sizes: list[int], order: list[int]) -> Pieces:
    """Disjoint pieces of these sizes, their places in this order, with gaps of three bytes."""
    at, places = 0, dict.fromkeys(range(len(sizes)), 0)
    for index in order:
        places[index] = at
        at += sizes[index] + 3
    return [(places[i], size) for i, size in enumerate(sizes)]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), buffer_nbytes=st.sampled_from([1, 2048, 20_000]))
def test_scattered_bytes_cross_a_socket_in_order(data: st.DataObject, buffer_nbytes: int) -> None:
    """What one vector sends, another one, cut elsewhere, receives: byte for byte, through tiny buffers."""
    source_pieces = data.draw(PIECES)
    total = sum(nbytes for _, nbytes in source_pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=40)))
    sizes = np.diff([0, *cuts, total]).tolist()
    order = data.draw(st.permutations(range(len(sizes))))
    source = np.random.default_rng(1).integers(0, 256, 60_000, np.uint8)
    target = np.zeros(total + 3 * len(sizes) + 1, np.uint8)
    target_pieces = laid_out(sizes, list(order))
    left, right = tiny_pair(buffer_nbytes)
    with left, right, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(write_vectored, left.fileno(), vector(source, source_pieces), patience())
        read_vectored(right.fileno(), vector(target, target_pieces), patience())
        sending.result()
    stream = b"".join(source[at : at + nbytes].tobytes() for at, nbytes in source_pieces)
    expected, taken = np.zeros_like(target), 0
    for at, nbytes in target_pieces:
        expected[at : at + nbytes] = np.frombuffer(stream[taken : taken + nbytes], np.uint8)
        taken += nbytes
    assert np.array_equal(target, expected)


def test_more_pieces_than_one_call_takes() -> None:
    """Several times IOV_MAX pieces go through, also where a short count ends inside a call's batch."""
    count = 3 * IOV_MAX + 17
    source = np.random.default_rng(2).integers(0, 256, count * 8, np.uint8)
    target = np.zeros_like(source)
    places = np.random.default_rng(3).permutation(count)
    left, right = tiny_pair(4096)
    with left, right, ThreadPoolExecutor(1) as pool:
        pieces = [(i * 8, 8) for i in range(count)]
        sending = pool.submit(write_vectored, left.fileno(), vector(source, pieces), patience())
        read_vectored(right.fileno(), vector(target, [(i * 8, 8) for i in places.tolist()]), patience())
        sending.result()
    assert np.array_equal(target.reshape(-1, 8)[places], source.reshape(-1, 8))


@settings(max_examples=100, deadline=None)
@given(pieces=PIECES)
def test_merging_touching_pieces_keeps_the_bytes(pieces: Pieces) -> None:
    """The merged vector names the same addresses in the same order, and no two neighbours touch."""
    array = np.zeros(60_000, np.uint8)
    plain = vector(array, pieces)
    merged = merge_touching(plain)

    def addresses(v: np.ndarray) -> list[int]:
        return [byte for base, nbytes in v.tolist() for byte in range(base, base + nbytes)]

    assert addresses(merged) == addresses(plain)
    assert np.all(merged[:-1].sum(axis=1) != merged[1:, 0])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_process_memory_is_copied_by_two_vectors_cut_differently(data: st.DataObject) -> None:
    """``process_vm_readv`` between unlike cuts of as many bytes lands every byte in order."""
    source_pieces = data.draw(PIECES.filter(lambda pieces: sum(n for _, n in pieces) > 0))
    total = sum(nbytes for _, nbytes in source_pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=40)))
    sizes = np.diff([0, *cuts, total]).tolist()
    source = np.random.default_rng(4).integers(0, 256, 60_000, np.uint8)
    target = np.zeros(total + 3 * len(sizes) + 1, np.uint8)
    target_pieces = laid_out(sizes, list(range(len(sizes)))[::-1])
    copy_from_process(os.getpid(), vector(target, target_pieces), vector(source, source_pieces), lambda: None)
    stream = b"".join(source[at : at + nbytes].tobytes() for at, nbytes in source_pieces)
    assert b"".join(target[at : at + nbytes].tobytes() for at, nbytes in target_pieces) == stream


def test_process_memory_that_is_not_there_is_an_os_error() -> None:
    """An address that nobody has mapped raises OSError naming the call, and so does a dead process."""
    target = np.zeros(8, np.uint8)
    nowhere = iovecs(4096, np.zeros(1, np.int64), np.array([8], np.int64))
    with pytest.raises(OSError, match="process_vm_readv"):
        copy_from_process(os.getpid(), vector(target, [(0, 8)]), nowhere, lambda: None)
    with pytest.raises(ProcessLookupError):
        copy_from_process(2**22 - 1, vector(target, [(0, 8)]), vector(target, [(0, 8)]), lambda: None)


def test_the_check_of_a_process_copy_ends_it() -> None:
    """Whatever ``check`` raises comes out before a byte moves."""
    target, source = np.zeros(8, np.uint8), np.ones(8, np.uint8)

    def check() -> None:
        raise KVFerryError("enough")

    with pytest.raises(KVFerryError, match="enough"):
        copy_from_process(os.getpid(), vector(target, [(0, 8)]), vector(source, [(0, 8)]), check)
    assert not target.any()


@pytest.fixture
def stalled() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair where nobody reads or writes the other end."""
    left, right = tiny_pair(2048)
    with left, right:
        yield left, right


def calls(sock: socket.socket, limits: Patience) -> list:
    array = np.zeros(1 << 20, np.uint8)
    return [
        lambda: read_vectored(sock.fileno(), vector(array, [(0, 1 << 20)]), limits),
        lambda: write_vectored(sock.fileno(), vector(array, [(0, 1 << 20)]), limits),
    ]


@pytest.mark.parametrize("which", [0, 1], ids=["read", "write"])
def test_a_stalled_peer_is_left_at_the_deadline(
    stalled: tuple[socket.socket, socket.socket], which: int
) -> None:
    """DeadlineError that names the peer and the phase."""
    with pytest.raises(DeadlineError) as caught:
        calls(stalled[0], patience(0.15))[which]()
    assert (caught.value.peer, caught.value.phase) == ("peer", "move")


@pytest.mark.parametrize("which", [0, 1], ids=["read", "write"])
def test_a_token_ends_a_stalled_call(stalled: tuple[socket.socket, socket.socket], which: int) -> None:
    """Set from another thread while the call waits, any of several tokens gives its very error."""
    token, error = CancelToken(), KVFerryError("stop")
    threading.Timer(0.05, token.cancel, [error]).start()
    with pytest.raises(KVFerryError) as caught:
        calls(stalled[0], patience(20.0, CancelToken(), token))[which]()
    assert caught.value is error


@pytest.mark.parametrize("which", [0, 1], ids=["read", "write"])
def test_a_peer_that_hangs_up_is_a_transport_error(
    stalled: tuple[socket.socket, socket.socket], which: int
) -> None:
    """End of file while reading, a broken pipe while writing."""
    stalled[1].close()
    with pytest.raises(TransportError) as caught:
        calls(stalled[0], patience())[which]()
    assert caught.value.peer == "peer"
    assert caught.value.next_step


def test_a_polite_sender_finishes_what_flows_and_leaves_what_stalls() -> None:
    """With the token set, bytes that the peer takes still go; a peer that takes none ends the call."""
    token, error = CancelToken(), KVFerryError("stop")
    token.cancel(error)
    limits = patience(20.0, token).politely()
    array = np.arange(1 << 18, dtype=np.uint8)
    left, right = tiny_pair(4096)
    with left, right, ThreadPoolExecutor(1) as pool:
        received = np.zeros_like(array)
        reading = pool.submit(read_vectored, right.fileno(), vector(received, [(0, len(array))]), patience())
        write_vectored(left.fileno(), vector(array, [(0, len(array))]), limits)
        reading.result()
        assert np.array_equal(received, array)
        with pytest.raises(KVFerryError) as caught:
            write_vectored(left.fileno(), vector(array, [(0, len(array))]), limits)
        assert caught.value is error


def test_input_while_sending_is_looked_at() -> None:
    """The peer's word in the middle of a send reaches ``on_input``, whose error ends it."""
    left, right = tiny_pair(2048)

    def on_input() -> None:
        raise KVFerryError(left.recv(10).decode())

    with left, right:
        right.send(b"no more")
        with pytest.raises(KVFerryError, match="no more"):
            write_vectored(
                left.fileno(), vector(np.zeros(1 << 20, np.uint8), [(0, 1 << 20)]), patience(), on_input
            )
