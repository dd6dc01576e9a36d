"""The board: what it says is what was posted, whatever is written there."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvferry.errors import KVFerryError
from kvferry.testing.transport_pair import TRANSFER_ID, WAIT_SECONDS
from kvferry.transfer.lease import MAX_POSTED_PIECES, Grants
from kvferry.transport.base import CancelToken, Direction
from kvferry.transport.board import MAX_RANGES, SLOT_NBYTES, PeerBoard
from kvferry.transport.patience import Patience
from transport_raw import new_board, reader_of

WHOLE = np.array([0]), np.array([4096])
RANGE = np.array([0]), np.array([4096])


def patience(*tokens: CancelToken) -> Patience:
    return Patience(time.monotonic() + WAIT_SECONDS, tokens, "peer")


IDS = st.integers(0, 5).map(lambda number: number.to_bytes(16, "big"))
RANGES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=MAX_RANGES + 2)
PIECES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 6)), min_size=1, max_size=10)


@given(steps=st.lists(st.tuples(IDS, st.one_of(st.none(), RANGES, PIECES.map(tuple))), max_size=12))
@example(steps=[(bytes(16), [(0, 4)]), (bytes(16), None), (bytes(16), ((0, 1),))])
@example(
    steps=[(bytes(16), [(9 * n, 2) for n in range(7)]), (bytes(16), tuple((9 * n, 2) for n in range(7)))]
)
def test_a_reader_finds_what_is_posted_and_nothing_else(
    steps: list[tuple[bytes, list[tuple[int, int]] | tuple[tuple[int, int], ...] | None]],
) -> None:
    """Any order of posting (a list), withdrawing (None) and looking (a tuple), against sets of bytes."""
    board, posted = new_board(), dict[bytes, list[tuple[int, int]]]()
    for name, what in steps:
        if what is None:
            board.withdraw(name)
            posted.pop(name, None)
        elif isinstance(what, list):
            start, nbytes = (np.array(column) for column in zip(*what, strict=True))
            if board.post(name, start, nbytes, (start, start + nbytes)):
                assert name not in posted
                posted[name] = what
        else:
            offset, nbytes = (np.array(column) for column in zip(*what, strict=True))
            found = reader_of(board).look(name, offset, nbytes, patience())
            ranges = posted.get(name, [])
            is_in = all(any(a <= at and at + n <= a + size for a, size in ranges) for at, n in what)
            is_few = 0 < len(ranges) <= MAX_RANGES
            assert (found is not None) == ((is_few and is_in) or ranges == list(what))
            assert found is None or found.stands(patience())


def test_ids_of_one_place_share_it_one_at_a_time() -> None:
    """Of two grants whose names fall on one slot the second is not posted, and does not disturb the first."""
    board, by_place = new_board(), dict[bool, list[bytes]]()
    taken = [number.to_bytes(16, "big") for number in range(3000)]
    for name in taken:
        by_place.setdefault(board.post(name, *WHOLE, RANGE), []).append(name)
    reader, one = reader_of(board), (np.array([0]), np.array([1]))
    assert all(reader.look(name, *one, patience()) for name in by_place[True])
    assert not any(reader.look(name, *one, patience()) for name in by_place[False])
    for name in taken:
        board.withdraw(name)
    assert not board.memory.array.reshape(-1, SLOT_NBYTES)[:, :16].any()


def test_a_board_does_not_tell_the_ids() -> None:
    """Whoever reads it could claim by them at another door."""
    board = new_board()
    board.post(TRANSFER_ID, *WHOLE, RANGE)
    assert board.memory.array.any()
    assert TRANSFER_ID not in board.memory.array.tobytes()


@settings(max_examples=200)
@given(
    damage=st.lists(st.tuples(st.integers(0, SLOT_NBYTES - 1), st.integers(1, 255)), min_size=1, max_size=6)
)
def test_a_slot_that_is_half_written_is_no_leave(damage: list[tuple[int, int]]) -> None:
    """Any bytes that differ from what was posted: not posted, and nothing raises."""
    board = new_board()
    board.post(TRANSFER_ID, *WHOLE, RANGE)
    (place,) = np.flatnonzero(board.memory.array.reshape(-1, SLOT_NBYTES).any(axis=1)) * SLOT_NBYTES
    before = board.memory.array.copy()
    for at, flip in damage:
        board.memory.array[place + at] ^= flip
    found = reader_of(board).look(TRANSFER_ID, np.array([0]), np.array([1]), patience())
    assert (found is not None) == np.array_equal(before, board.memory.array)


def test_a_new_name_over_what_was_withdrawn_is_no_leave() -> None:
    """As where the same grant is posted again, and its poster stands still after the first bytes."""
    board = new_board()
    board.post(TRANSFER_ID, *WHOLE, RANGE)
    before = board.memory.array.copy()
    (place,) = np.flatnonzero(before.reshape(-1, SLOT_NBYTES).any(axis=1)) * SLOT_NBYTES
    board.withdraw(TRANSFER_ID)
    board.memory.array[place : place + 16] = before[place : place + 16]
    assert reader_of(board).look(TRANSFER_ID, *WHOLE, patience()) is None


@given(slot=st.binary(min_size=SLOT_NBYTES, max_size=SLOT_NBYTES))
def test_a_peer_may_write_what_it_likes(slot: bytes) -> None:
    assert PeerBoard(lambda _, __: slot).look(TRANSFER_ID, *WHOLE, patience()) is None


def test_a_posting_stands_until_it_is_withdrawn_and_never_again() -> None:
    """The same grant, posted again: bytes that lie between are of neither."""
    board = new_board()
    board.post(TRANSFER_ID, *WHOLE, RANGE)
    found = reader_of(board).look(TRANSFER_ID, np.array([0]), np.array([1]), patience())
    assert found is not None
    assert found.stands(patience())
    board.withdraw(TRANSFER_ID)
    assert not found.stands(patience())
    board.post(TRANSFER_ID, *WHOLE, RANGE)
    assert not found.stands(patience())


@pytest.mark.parametrize(
    ("offset", "finds_all", "finds_some"),
    [
        ([0], True, True),
        ([*range(0, 64 * 8, 8)], True, True),  # many pieces, one range
        ([*range(0, MAX_RANGES * 16, 16)], True, True),
        ([*range(0, (MAX_RANGES + 1) * 16, 16)], True, False),  # too many ranges
        ([*range(0, 65 * 8, 8)], True, False),  # not looked at more closely
        ([*range(0, MAX_POSTED_PIECES * 8, 8)], True, False),
        ([*range(0, MAX_POSTED_PIECES * 8 + 8, 8)], False, False),  # not posted
    ],
)
def test_grants_to_read_are_posted_while_they_are_open(
    offset: list[int], finds_all: bool, finds_some: bool
) -> None:
    """All pieces in their order can be read, unless they are very many; some of them where ranges are few."""
    board = new_board()
    grants, reader = Grants(board), reader_of(board)
    pieces = np.array(offset, np.int64), np.full(len(offset), 8)
    part_of_them = np.array(offset[-1:]), np.array([7])

    def finds() -> tuple[bool, bool]:
        looks = (
            reader.look(TRANSFER_ID, *pieces, patience()),
            reader.look(TRANSFER_ID, *part_of_them, patience()),
        )
        return looks[0] is not None, looks[1] is not None

    for error in (None, KVFerryError("over")):
        grants.open(TRANSFER_ID, Direction.READ, *pieces, lambda _: None)
        assert finds() == (finds_all, finds_some)
        grants.close(TRANSFER_ID, error)
        assert finds() == (False, False)
    grants.open(TRANSFER_ID, Direction.WRITE, *pieces, lambda _: None)
    assert finds() == (False, False)


def test_a_copy_that_was_let_in_by_the_channel_ends_the_posting_too() -> None:
    """A grant that is closed while somebody is inside is off the board at once."""
    board = new_board()
    grants = Grants(board)
    grants.open(TRANSFER_ID, Direction.READ, np.array([0]), np.array([8]), lambda _: None)
    grants.enter(TRANSFER_ID, Direction.READ, np.array([0]), np.array([8]))
    grants.close(TRANSFER_ID)
    assert reader_of(board).look(TRANSFER_ID, np.array([0]), np.array([8]), patience()) is None
    grants.leave(TRANSFER_ID)
