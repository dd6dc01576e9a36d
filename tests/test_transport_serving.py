"""What the serving side of a connection says when an admission ends, and when the connection does."""

from __future__ import annotations

import ctypes
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvferry.errors import CapacityError, KVFerryError, PeerError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.transport.base import CancelToken, Copy, Direction
from kvferry.transport.channel import Channel, make_marks
from kvferry.transport.greeting import Role
from kvferry.transport.look import serve_look
from kvferry.transport.memory import address_of, create_shared
from kvferry.transport.patience import Patience
from kvferry.transport.seal import SECRET_NBYTES, ConnectionKeys
from kvferry.transport.serving import Served, Serving, Slots
from kvferry.transport.staged import ask_pushed, serve_pushed
from kvferry.transport.table import split_copy
from kvferry.transport.users import Users
from kvferry.transport.windows import Arena, PoolMover, Progressing
from kvferry.transport.wire import MARK_NBYTES, REQUEST, Kind, Operation, Request, decode, decode_head
from transport_raw import POOL_NBYTES, TRANSFER_ID, request


@pytest.mark.parametrize("ends", ["admission", "connection"])
def test_the_end_of_a_connection_is_no_refusal(ends: str) -> None:
    """A reader is told why its admission ended; the end of the connection it sees by the hang-up alone."""
    ended, left, guard = CancelToken(), threading.Event(), ScriptedGuard()
    memory, users = create_shared(POOL_NBYTES), Users(left.set)
    served = Served(
        memory, guard, {Operation.LOOK: lambda channel, _, limits: serve_look(channel, limits)}, Slots()
    )
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(20.0)
        serving = Serving(served, "peer", users, ended)
        assert serving.start(Channel(theirs))
        ours.sendall(request(Operation.LOOK))
        assert len(ours.recv(MARK_NBYTES, socket.MSG_WAITALL)) == MARK_NBYTES  # admitted
        if ends == "admission":
            guard.tokens[0].cancel(CapacityError("no room"))
        else:
            ended.cancel(KVFerryError("gone"))
        told = b"".join(iter(lambda: ours.recv(4096), b""))
    assert b"no room" in told if ends == "admission" else told == b""
    serving.join()
    users.end(KVFerryError("over"))
    assert left.wait(20.0)
    memory.close()


class Mover:
    """A library that moves nothing, and is done when it is told to."""

    def __init__(self) -> None:
        self.posted, self.done = threading.Event(), False

    def write(self, here: int, there: int, nbytes: int) -> Mover:  # noqa: ARG002 - the signature is Mover's
        self.posted.set()
        return self

    def is_done(self) -> bool:
        return self.done


def test_a_pushed_copy_that_ends_waits_for_the_readers_last_word() -> None:
    """The grant ends while bytes move: the reader is told why, and the channel stays whole for its answer.

    Closed before that, it would break under what the reader says, who then never reads why.
    """
    grant, mover = CancelToken(), Mover()
    ask = Request(Operation.PUSH, TRANSFER_ID, 20.0, False, *np.array([[0], [4096], [0], [0]]))
    limits = Progressing.of(Patience(time.monotonic() + 20.0, (CancelToken(), grant), "peer"), None)
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, ThreadPoolExecutor(1) as thread:
        ours.settimeout(20.0)
        serving = thread.submit(
            serve_pushed, channel, np.zeros(8192, np.uint8), ask,
            patience=limits, arena=Arena("test"), mover=mover,
        )  # fmt: skip
        assert mover.posted.wait(20.0)
        grant.cancel(KVFerryError("the lease is over"))
        mover.done = True
        told = b""
        while b"the lease is over" not in told:
            told += ours.recv(4096)
        for mark in (make_marks(Kind.FREE, 4096), make_marks(Kind.RELEASE, 0)):
            ours.sendall(mark.tobytes())
        serving.result(20.0)
    assert channel.is_in_step
    channel.close()


def test_a_grant_that_ends_behind_the_last_word_brings_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """ENDED behind DONE would be the answer to the next request, and that one's to the one after it."""
    grant, mover, write_mark = CancelToken(), Mover(), Channel.write_mark
    mover.done = True

    def then_end(channel: Channel, kind: Kind, *more: object) -> None:
        write_mark(channel, kind, *more)  # type: ignore[arg-type]
        if kind is Kind.DONE:
            grant.cancel(KVFerryError("the lease is over"))

    monkeypatch.setattr(Channel, "write_mark", then_end)
    ask = Request(Operation.PUSH, TRANSFER_ID, 20.0, False, *np.array([[0], [4096], [0], [0]]))
    limits = Progressing.of(Patience(time.monotonic() + 20.0, (CancelToken(), grant), "peer"), None)
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, ThreadPoolExecutor(1) as thread:
        ours.settimeout(20.0)
        serving = thread.submit(
            serve_pushed, channel, np.zeros(8192, np.uint8), ask,
            patience=limits, arena=Arena("test"), mover=mover,
        )  # fmt: skip
        told = ours.recv(3 * MARK_NBYTES, socket.MSG_WAITALL)
        assert np.frombuffer(told, "<u4")[1::4].tolist() == [Kind.ADMITTED, Kind.DATA, Kind.DONE]
        ours.sendall(make_marks(Kind.RELEASE, 0).tobytes())
        serving.result(20.0)
        assert channel.is_in_step
        channel.close()
        assert ours.recv(4096) == b""


class Late(CancelToken):
    """Is set after it was looked at once."""

    def raise_if_cancelled(self) -> None:
        super().raise_if_cancelled()
        self.cancel(KVFerryError("enough"))


def test_a_request_that_was_not_said_leaves_its_windows() -> None:
    """Nobody will write into them; a cancelled copy takes none with it for good."""
    arena, plan = Arena("test"), make_plan([0], [0], [4096])
    copy = Copy(TRANSFER_ID, plan, time.monotonic() + 20.0)
    limits = Progressing.of(Patience(copy.deadline, (Late(),), "peer"), None)
    (part,) = split_copy(copy, Direction.READ, POOL_NBYTES, "peer")
    ours, theirs = socket.socketpair()
    channel = Channel(theirs)
    with ours, pytest.raises(KVFerryError, match="enough"):
        ask_pushed(channel, np.zeros(POOL_NBYTES, np.uint8), copy, part, patience=limits, arena=arena)
    channel.close()
    assert arena.num_quarantined == 0


@pytest.mark.parametrize("is_sealed", [False, True], ids=["plain", "sealed"])
def test_words_that_the_limits_cut_off_cost_none_of_the_others(is_sealed: bool) -> None:
    """What was held goes before the reason that is told next, and the reason can be read."""
    keys = ConnectionKeys(bytes(SECRET_NBYTES), bytes(SECRET_NBYTES))
    here, there = (
        Channel(sock, keys.seals(0, Role.OPENER_ASKS, "peer", is_opener=is_here) if is_sealed else None)
        for sock, is_here in zip(socket.socketpair(), (True, False), strict=True)
    )
    enough, limits = CancelToken(), Patience(time.monotonic() + 20.0, (), "peer")
    enough.cancel(KVFerryError("the lease is over"))
    here.hold_mark(Kind.ADMITTED, limits)
    with pytest.raises(KVFerryError) as caught:
        here.write_mark(Kind.DATA, Patience(limits.deadline, (enough,), "peer"), 4096)
    here.write_ended(caught.value, limits)
    there.read_mark(Kind.ADMITTED, limits)
    with pytest.raises(PeerError, match="the lease is over"):
        there.read_mark(Kind.DATA, limits, 4096)
    here.close()
    there.close()


class LateLibrary(PoolMover):
    """Moves bytes within this process, at the last moment; what it will write to is spoilt at the first.

    So a window that is used again too early, at either side, shows.
    """

    min_piece_nbytes = 256 << 10

    def __init__(self) -> None:
        self.num_from_pool, self.num_moving, self.most_moving = 0, 0, 0

    def write(self, here: int, there: int, nbytes: int) -> LatePosted:
        return LatePosted(self, [(here, there, nbytes)])

    def write_from(self, pool: np.ndarray, offset: np.ndarray, nbytes: np.ndarray, there: int) -> LatePosted:
        self.num_from_pool += 1
        ends = there + nbytes.cumsum()
        return LatePosted(self, [*zip(address_of(pool) + offset, ends - nbytes, nbytes, strict=True)])


class LatePosted:
    def __init__(self, library: LateLibrary, pieces: list[tuple[int, int, int]]) -> None:
        self._library, self._left, self._looks = library, pieces, 0
        library.num_moving += 1
        library.most_moving = max(library.most_moving, library.num_moving)
        for _, there, nbytes in pieces:
            ctypes.memset(int(there), 0xEE, int(nbytes))

    def is_done(self) -> bool:
        self._looks += 1
        if self._looks >= 3 and self._left:
            for here, there, nbytes in self._left:
                ctypes.memmove(int(there), int(here), int(nbytes))
            self._left = []
            self._library.num_moving -= 1
        return not self._left


@pytest.mark.parametrize(
    ("sizes", "num_from_pool"),
    [
        ([(17 << 20) + 5], 9),  # eight full windows, and what is left
        ([(17 << 20) + 4096], 9),
        ([300 << 10] * 40, 12),  # no full windows: half ones, all of them
        ([48 << 10] * 200, 0),
        ([1 << 20, 7, 1 << 20, 3 << 20, 4096, 100] * 2, 10),  # all but the last two pieces
    ],
)
def test_windows_are_used_by_turns_and_large_pieces_go_straight_from_the_pool(
    sizes: list[int], num_from_pool: int
) -> None:
    """Two steps are on their way at once, each window is one step's at a time, every byte is right."""
    total, rng = sum(sizes), np.random.default_rng(5)
    sent, landed = rng.integers(0, 256, total + 3, np.uint8), np.zeros(total + 3, np.uint8)
    ends = np.cumsum(sizes)
    plan = make_plan([*(ends - sizes + 3)], [*(total - ends)], sizes)
    copy = Copy(TRANSFER_ID, plan, time.monotonic() + 20.0, True)
    (part,) = split_copy(copy, Direction.READ, landed.nbytes, "peer")
    limits = Progressing.of(Patience(copy.deadline, (CancelToken(),), "peer"), None)
    library, arenas = LateLibrary(), (Arena("here"), Arena("there"))
    pair = socket.socketpair()
    here, there = Channel(pair[0]), Channel(pair[1])

    def serve() -> None:
        head = decode_head(there.read_start(REQUEST.size, REQUEST.size, limits), "peer")
        request = decode(head, there.read(head.tables_nbytes, limits), sent.nbytes, "peer")
        serve_pushed(there, sent, request, patience=limits, arena=arenas[1], mover=library)

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(serve)
        ask_pushed(here, landed, copy, part, patience=limits, arena=arenas[0])
        serving.result(20.0)
    for at, there_at, size in zip(plan.dst_offset, plan.src_offset, sizes, strict=True):
        assert np.array_equal(landed[at : at + size], sent[there_at : there_at + size])
    assert (library.num_from_pool, library.most_moving) == (num_from_pool, 2)
    assert here.is_in_step
    assert there.is_in_step
    here.close()
    there.close()
