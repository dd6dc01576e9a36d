"""The part of the transport suite about boards: what is posted may be read, and only as long as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvferry.errors import KVFerryError, PeerError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import expected_copy, expected_digests, make_plan, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, TransportFixture, check_error, fill, refused
from kvferry.testing.transport_pair import TRANSFER_ID, Side, TransportPair
from kvferry.transport.base import Direction
from kvferry.transport.board import Board, PeerBoard

__all__ = ["BoardTests"]

# Enough turns that both orders of a load and a store come up, in a second.
NUM_LIVES = 300
BLOCK_NBYTES = 64 << 10


class BoardTests(TransportFixture):
    """Reads beside a guard that posts. A transport that reads no boards asks, and the outcome is equal."""

    @pytest.fixture
    def board_pair(self) -> Iterator[TransportPair]:
        """A pair whose listening side posts, and admits or refuses whoever asks."""
        memories = self.make_memory(POOL_NBYTES), self.make_memory(POOL_NBYTES)
        pair = TransportPair(self.transport, self.listen_address(), *memories, with_board=True)
        yield pair
        pair.close()

    @pytest.mark.parametrize("integrity", [True, False], ids=["summed", "plain"])
    def test_what_is_posted_is_read(self, board_pair: TransportPair, integrity: bool) -> None:
        """Every byte is where it belongs, whether or not the peer was asked."""
        there, here = board_pair.sides
        post(there.guard, (0, POOL_NBYTES))
        for seed, sizes in ((41, [4096]), (42, [9000] * 200), (43, [1 << 20, 7, 600_000])):
            plan = random_plan(seed, POOL_NBYTES, sizes, 1)
            sent, before = fill(there, 1), fill(here, 2)
            arrived = here.copy(Direction.READ, plan, integrity=integrity)
            assert np.array_equal(here.memory.array, expected_copy(plan, sent, before))
            assert not integrity or arrived.digests is not None
            assert arrived.digests is None or arrived.digests.tolist() == expected_digests(plan, sent)
        assert (not there.guard.entered) == self.reads_boards

    def test_what_is_not_posted_is_asked_for(self, board_pair: TransportPair) -> None:
        """A piece that leaves its range by one byte, another transfer: the guard decides, with its words."""
        there, here = board_pair.sides
        post(there.guard, (0, 4096), (8192, 12_288))
        there.guard.refusal = PeerError("stay inside")
        before = fill(here, 3)
        for pieces in ([4000], [97], [4096 - 8, 8192 - 8]):
            plan = make_plan([at + 1 for at in pieces], [0, 8192][: len(pieces)], [4000] * len(pieces))
            with pytest.raises(KVFerryError) as caught:
                here.copy(Direction.READ, plan)
            refused(caught.value, "stay inside")
        assert np.array_equal(here.memory.array, before)

    def test_what_was_withdrawn_is_refused(self, board_pair: TransportPair) -> None:
        """With the guard's reason, and the connection stays usable."""
        there, here = board_pair.sides
        plan, sent = make_plan([0], [0], [4096]), fill(there, 1)
        board = post(there.guard, (0, 4096))
        here.copy(Direction.READ, plan)
        board.withdraw(TRANSFER_ID)
        there.guard.refusal = PeerError("the lease is over")
        with pytest.raises(KVFerryError) as caught:
            here.copy(Direction.READ, plan)
        refused(caught.value, "the lease is over")
        there.guard.refusal = None
        here.memory.array[:] = 0
        here.copy(Direction.READ, plan)
        assert np.array_equal(here.memory.array[:4096], sent[:4096])

    @pytest.mark.parametrize("and_then", ["it is gone", "it is posted again"])
    def test_a_posting_that_goes_during_the_copy_is_found(
        self, board_pair: TransportPair, monkeypatch: pytest.MonkeyPatch, and_then: str
    ) -> None:
        """What was read between does not count: another posting of the same transfer is another leave."""
        there, here = board_pair.sides
        board = post(there.guard, (0, 4096))

        def withdraw() -> None:
            board.withdraw(TRANSFER_ID)
            if and_then == "it is posted again":
                post(there.guard, (0, 4096))
            else:
                there.guard.refusal = PeerError("the lease is over")

        after_look(monkeypatch, withdraw)
        if not self.reads_boards:
            here.copy(Direction.READ, make_plan([0], [0], [4096]))
            return
        reason = "gave another" if "again" in and_then else "the lease is over"
        with pytest.raises(PeerError, match=reason) as caught:
            here.copy(Direction.READ, make_plan([0], [0], [4096]))
        check_error(caught.value)

    @pytest.mark.parametrize("integrity", [True, False], ids=["summed", "plain"])
    def test_memory_that_is_used_again_is_never_taken_for_its_grant(
        self, board_pair: TransportPair, integrity: bool
    ) -> None:
        """The peer posts, withdraws and scribbles as fast as it can: a copy that counts is of one life."""
        there, here = board_pair.sides
        there.guard.refusal = PeerError("not posted")
        stop = threading.Event()
        thread = threading.Thread(target=live, args=(there, stop))
        thread.start()
        plan, num_good = make_plan([0], [0], [BLOCK_NBYTES]), 0
        try:
            for _ in range(NUM_LIVES):
                try:
                    here.copy(Direction.READ, plan, integrity=integrity)
                except PeerError:
                    continue
                num_good += 1
                found = here.memory.array[:BLOCK_NBYTES]
                assert found[0]
                assert (found == found[0]).all(), "bytes of two lives of the memory, or of none"
        finally:
            stop.set()
            thread.join()
        assert bool(num_good) == self.reads_boards


def live(side: Side, stop: threading.Event) -> None:
    """Memory of one grant after the other; between grants it holds what nobody may read."""
    block, value = side.memory.array[:BLOCK_NBYTES], 0
    board = board_of(side.guard)
    while not stop.is_set():
        value = value % 200 + 1
        block[:] = value
        post(side.guard, (0, BLOCK_NBYTES))
        stop.wait(2e-4)
        board.withdraw(TRANSFER_ID)
        block[::4096] = 0


def board_of(guard: ScriptedGuard) -> Board:
    assert guard.board is not None
    return guard.board


def post(guard: ScriptedGuard, *ranges: tuple[int, int]) -> Board:
    """Post the transfer of the tests for these ranges."""
    start, stop = (np.array(column, np.int64) for column in zip(*ranges, strict=True))
    assert board_of(guard).post(TRANSFER_ID, start, stop - start, (start, stop))
    return board_of(guard)


def after_look(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """``call`` happens once, right after a reader has found a posting."""
    look, calls = PeerBoard.look, [call]

    def patched(*arguments: object) -> object:
        found = look(*arguments)  # type: ignore[arg-type]
        if calls:
            calls.pop()()
        return found

    monkeypatch.setattr(PeerBoard, "look", patched)
