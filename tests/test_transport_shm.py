"""What only shm has: two paths, one user, offers of memory, and the probe."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import select
import socket
from dataclasses import replace

import numpy as np
import pytest

from conftest import held_by_this_process, wait_until
from kvferry.errors import CapacityError, TransportError
from kvferry.layout import BlockTable, PoolLayout, copy_plan
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import expected_digests, make_plan, random_plan
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread, TransportPair
from kvferry.transport import shm, shm_offer, socket_transport
from kvferry.transport.base import Connection, Direction, Memory
from kvferry.transport.board import BOARD_NBYTES
from kvferry.transport.greeting import Role
from kvferry.transport.memory import create_shared, private
from kvferry.transport.shared_copy import copy_strided
from kvferry.transport.shm import ShmTransport
from transport_raw import (
    POOL_NBYTES,
    greet,
    offer,
    raw_socket,
    read_to_end,
    shm_address,
    still_serves,
)


def shm_pair(listening: Memory, connecting: Memory, options: str = "") -> TransportPair:
    return TransportPair(ShmTransport, shm_address() + options, listening, connecting)


def test_private_memory_is_read_from_its_process() -> None:
    """Without a descriptor the path is cma, from either side, and it is recorded."""
    pair = shm_pair(private(bytearray(POOL_NBYTES)), private(np.zeros(POOL_NBYTES // 4, np.float32)))
    plan = random_plan(1, POOL_NBYTES, [4096] * 50 + [77] * 9, 3)
    for asking, other in (pair.sides, pair.sides[::-1]):
        assert asking.connection.path == "cma"
        other.memory.array[:] = np.frombuffer(os.urandom(POOL_NBYTES), np.uint8)
        arrived = asking.copy(Direction.READ, plan)
        assert arrived.path == "cma"
        assert arrived.digests is not None
        assert arrived.digests.tolist() == expected_digests(plan, other.memory.array)
    pair.close()


@pytest.mark.parametrize(("layers_a_table", "is_strided"), [(8, True), (1, False)])
def test_blocks_of_all_layers_are_copied_at_once_only_where_that_is_much(
    layers_a_table: int, is_strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads where two can run; every byte in its place by either form, and no other byte touched."""
    layers, blocks, size = 8, 64, 16 << 10
    layout = PoolLayout.beside(
        *(
            PoolLayout.paged(
                range(first, first + layers_a_table),
                kv_heads=1,
                head_dim=size // 4,
                dtype="float32",
                block_size=1,
                num_blocks=2 * blocks,
                name=f"from-{first}",
            )
            for first in range(0, layers, layers_a_table)
        )
    )
    rng = np.random.default_rng(5)
    tables = [[BlockTable(0, 2 * rng.permutation(blocks) + side) for _ in layout.groups] for side in range(2)]
    plan = copy_plan(layout, layout, *tables, blocks)
    calls: list[int] = []
    monkeypatch.setattr(shm, "copy_strided", lambda *args: (calls.append(1), copy_strided(*args)))
    pair = shm_pair(create_shared(layout.nbytes), create_shared(layout.nbytes))
    here, there = pair.connecting, pair.listening
    assert here.connection.streams == min(2, len(os.sched_getaffinity(0)))
    there.memory.array[:] = np.frombuffer(rng.bytes(layout.nbytes), np.uint8)
    here.copy(Direction.READ, plan, integrity=False)
    assert len(calls) == (here.connection.streams if is_strided else 0)
    expected = np.zeros(layout.nbytes, np.uint8)
    for dst, src, nbytes in zip(plan.dst_offset, plan.src_offset, plan.nbytes, strict=True):
        expected[dst : dst + nbytes] = there.memory.array[src : src + nbytes]
    assert np.array_equal(here.memory.array, expected)
    pair.close()


def test_memory_that_cannot_be_read_is_said_and_only_a_read_fails() -> None:
    """Private memory of a third process: the other direction works, a read says why not."""
    foreign = Memory(np.zeros(POOL_NBYTES, np.uint8), owner_pid=os.getppid(), owner_address=4096)
    pair = shm_pair(foreign, create_shared(POOL_NBYTES))
    assert pair.connecting.connection.path == "none"
    assert "third process" in pair.connecting.connection.notes[0]
    with pytest.raises(TransportError, match="third process") as caught:
        pair.connecting.copy(Direction.READ, make_plan([0], [0], [4096]))
    assert caught.value.next_step
    pair.connecting.memory.array[:] = 3
    assert pair.listening.copy(Direction.READ, make_plan([0], [0], [4096])).path == "mapped"
    assert foreign.array[:4096].sum() == 3 * 4096
    pair.close()


def test_shm_says_why_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """It works here; where memfd_create is forbidden, the reason comes with the way out."""
    assert ShmTransport.unavailable() is None

    def forbidden(*_arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", forbidden)
    why = ShmTransport.unavailable()
    assert why is not None
    assert "Operation not permitted" in why
    assert "use tcp" in why


def test_a_path_that_was_asked_for_must_be_there() -> None:
    """``?path=mapped`` to private memory fails at connect, and nothing is held."""
    loop = LoopThread()
    memory = private(bytearray(POOL_NBYTES))
    transport = ShmTransport(memory, ScriptedGuard())
    listener = loop.run(transport.listen(shm_address(), lambda _connection: None))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransportError, match="private"):
        loop.run(transport.connect(listener.address + "?path=mapped", WAIT_SECONDS))
    loop.run(listener.close())
    assert len(os.listdir("/proc/self/fd")) == before - 1
    loop.close()


def test_a_path_that_the_listening_side_asks_for_in_vain_is_told_to_both(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``?path=cma`` where the peer's pool is shared with its engine: who connects hears why, as the log does.

    A TransportError: another way to that peer may do.
    """
    caplog.set_level("INFO", "kvferry")
    loop, memory = LoopThread(), create_shared(POOL_NBYTES)
    shared_with_an_engine = replace(memory, owner_pid=os.getppid())
    listener = loop.run(
        ShmTransport(memory, ScriptedGuard()).listen(f"{shm_address()}?path=cma", lambda _connection: None)
    )
    why = "path=cma reads a process's own memory, and this one is shared with a third process"
    for asked in (listener.address, listener.address.partition("?")[0]):
        with pytest.raises(TransportError, match=f"the peer refuses this side: .*{why}"):
            loop.run(ShmTransport(shared_with_an_engine, ScriptedGuard()).connect(asked, WAIT_SECONDS))
    wait_until(lambda: caplog.text.count("dropped a peer: no way to read the peer's memory") == 2)
    loop.run(listener.close())
    loop.close()
    memory.close()


def test_another_users_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's word about the peer's user decides, at both sides."""
    loop, memory = LoopThread(), create_shared(POOL_NBYTES)
    transport = ShmTransport(memory, ScriptedGuard())
    accepted: list[Connection] = []
    listener = loop.run(transport.listen(shm_address(), accepted.append))
    monkeypatch.setattr(shm_offer.os, "geteuid", lambda: 12_345)
    with pytest.raises(TransportError, match="user") as caught:
        loop.run(transport.connect(listener.address, WAIT_SECONDS))
    assert caught.value.next_step
    with raw_socket(listener.address) as sock:  # a stranger that says nothing is not waited for
        assert read_to_end(sock).startswith(greet(Role.REFUSED))
    assert accepted == []
    loop.run(listener.close())
    loop.close()
    memory.close()


@pytest.mark.parametrize("is_late", [False, True], ids=["greets first", "is refused first"])
def test_who_is_of_another_user_by_the_listeners_word_alone_is_told(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where numbers of users differ between the two: both users' are named, whoever is heard first."""
    loop, memory = LoopThread(), create_shared(POOL_NBYTES)
    transport = ShmTransport(memory, ScriptedGuard())
    listener = loop.run(transport.listen(shm_address(), lambda _connection: None))
    real_check, real_greeting = shm_offer.check_same_user, socket_transport.write_greeting

    def check(sock: socket.socket, peer: str) -> int:
        return real_check(sock, peer) if sock.getsockname() else 7  # only the listener's have a name

    async def write_greeting(sock: socket.socket, role: Role, *more: bytes) -> None:
        poller = select.poll()
        poller.register(sock, 0)
        while is_late and not poller.poll(0):  # until the listener has hung up
            await asyncio.sleep(0)
        await real_greeting(sock, role, *more)

    monkeypatch.setattr(shm_offer.os, "geteuid", lambda: 12_345)
    monkeypatch.setattr(shm, "check_same_user", check)
    monkeypatch.setattr(socket_transport, "write_greeting", write_greeting)
    with pytest.raises(TransportError, match="the peer refuses this side") as caught:
        loop.run(transport.connect(listener.address, WAIT_SECONDS))
    assert f"runs as user {os.getuid()}, process {os.getpid()} as 12345" in caught.value.message
    loop.run(listener.close())
    loop.close()
    memory.close()


def memfd(nbytes: int, seals: int = 0) -> int:
    fd = os.memfd_create("hostile", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@pytest.mark.parametrize(
    ("message", "sizes"),
    [
        (offer(magic=b"XXXX"), []),
        (offer(zero=1), []),
        (offer(nbytes=0), []),
        (offer(nbytes=1 << 63), []),
        (offer(address=(1 << 64) - 1), []),
        (offer()[:20], []),
        (offer(fd=1), []),
        (offer(), [4096]),
        (offer(fd=1), [4096, 4096]),
        (offer(fd=1), [4096]),
        (offer(fd=1), [4095]),
    ],
    ids=[
        "magic",
        "reserved",
        "empty",
        "huge",
        "beyond all memory",
        "cut",
        "fd missing",
        "fd unsaid",
        "two fds",
        "unsealed",
        "too small",
    ],
)
def test_a_bad_offer_is_dropped_with_its_descriptors(message: bytes, sizes: list[int]) -> None:
    """A peer that lies about its memory is refused, and every descriptor that it passed is closed."""
    pair = shm_pair(create_shared(POOL_NBYTES), create_shared(POOL_NBYTES))
    still_serves(pair)
    fds = [memfd(4096, fcntl.F_SEAL_SHRINK if nbytes < 4096 else 0) for nbytes in sizes]
    if sizes == [4095]:
        os.close(fds.pop())
        fds = [memfd(4000, fcntl.F_SEAL_SHRINK)]
    before = len(os.listdir("/proc/self/fd"))
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(greet(1))
        socket.send_fds(sock, [message], fds)
        assert read_to_end(sock).startswith(greet(Role.REFUSED))
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in fds:
        os.close(fd)
    pair.close()


@pytest.mark.parametrize(
    ("says", "board"),
    [
        ({"board": 1}, None),
        ({"board": 1}, (BOARD_NBYTES - 1, fcntl.F_SEAL_SHRINK)),
        ({"board": 1}, (BOARD_NBYTES, 0)),
        ({"board": 1}, (0, 0)),
        ({"board": 0}, (BOARD_NBYTES, fcntl.F_SEAL_SHRINK)),
        ({"board": 2}, (BOARD_NBYTES, fcntl.F_SEAL_SHRINK)),
    ],
    ids=["missing", "too small", "unsealed", "no memfd", "unsaid", "two of them"],
)
def test_a_bad_board_is_refused_with_the_pool(says: dict, board: tuple[int, int] | None) -> None:
    """Beside a pool that is in order; every descriptor is closed, and nothing stays mapped."""
    pair = shm_pair(create_shared(POOL_NBYTES), create_shared(POOL_NBYTES))
    still_serves(pair)
    fds = [memfd(4096, fcntl.F_SEAL_SHRINK)]
    if board is not None:
        fds.append(memfd(*board) if board[0] else os.open("/dev/zero", os.O_RDONLY))
    before = held_by_this_process()
    with raw_socket(pair.listener.address) as sock:
        sock.sendall(greet(1))
        socket.send_fds(sock, [offer(fd=1, **says)], fds)
        assert read_to_end(sock).startswith(greet(Role.REFUSED))
    assert held_by_this_process() == before
    for fd in fds:
        os.close(fd)
    still_serves(pair)
    pair.close()


def test_a_side_without_descriptors_left_says_so_of_itself() -> None:
    """The kernel drops what does not fit; it is not the peer that passed too few."""
    fds = [memfd(size, fcntl.F_SEAL_SHRINK) for size in (4096, BOARD_NBYTES)]
    here, there = socket.socketpair()
    socket.send_fds(there, [offer(fd=1, board=1)], fds)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def receive() -> None:
        lowest = os.dup(here.fileno())
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        await shm_offer.receive_offer(here, "peer")

    try:
        with pytest.raises(CapacityError, match="may open no more descriptors") as caught:
            asyncio.run(receive())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caught.value.next_step
    for fd in (*fds, here.detach(), there.detach()):
        os.close(fd)


def test_a_board_that_cannot_be_mapped_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """This side has no room for one more map: it asks for each copy, as of a peer without a board."""
    real_map = shm_offer.map_shared

    def map_shared(fd: int, nbytes: int, *, writable: bool) -> np.ndarray:
        if nbytes == BOARD_NBYTES:
            raise OSError(12, "Cannot allocate memory")
        return real_map(fd, nbytes, writable=writable)

    monkeypatch.setattr(shm_offer, "map_shared", map_shared)
    pools = create_shared(POOL_NBYTES), create_shared(POOL_NBYTES)
    pair = TransportPair(ShmTransport, shm_address(), *pools, with_board=True)
    assert pair.connecting.connection.path == "mapped"
    pair.connecting.copy(Direction.READ, make_plan([0], [0], [4096]))
    assert len(pair.listening.guard.entered) == 1
    pair.close()


@pytest.mark.parametrize(
    ("says", "wanted", "word"),
    [
        ({"pid": None}, None, "third process"),
        ({"pid": 1 << 22}, None, "cannot be read"),
        ({"cookie": bytes(16)}, None, "is not the peer"),
        ({}, "mapped", "private"),
    ],
    ids=["no pid", "no process", "another process", "not mapped"],
)
def test_the_probe_finds_memory_that_cannot_be_read(says: dict, wanted: str | None, word: str) -> None:
    """Known bytes are read before anything is promised; what fails says why."""
    cookie = shm_offer.Cookie()
    values = {
        "nbytes": 4096,
        "address": 0,
        "cookie_address": cookie.address,
        "cookie": cookie.value,
        "pid": os.getpid(),
        "fd": None,
        "board_fd": None,
    } | says
    with pytest.raises(TransportError, match=word) as caught:
        shm_offer.source_for(shm_offer.Offer(**values), wanted, "peer")
    assert (caught.value.peer, caught.value.phase) == ("peer", "connect")
    assert caught.value.next_step
