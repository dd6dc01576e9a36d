"""Grants: a peer touches the bytes of a live transfer, in one direction, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import DeadlineError, PeerError
from kvferry.transfer.lease import Grants
from kvferry.transport.base import Direction

ID = b"t" * 16
NONE = np.empty(0, np.int64)
PIECES = (np.array([100, 0, 40]), np.array([50, 40, 10]))  # 0..50 in two touching pieces, and 100..150


def grants(direction: Direction = Direction.READ) -> Grants:
    made = Grants()
    made.open(ID, direction, *PIECES, [].append)
    return made


def enter(made: Grants, offset: list[int], nbytes: list[int], direction: Direction = Direction.READ) -> None:
    made.enter(ID, direction, np.array(offset, np.int64), np.array(nbytes, np.int64))


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200)), min_size=1, max_size=5))
def test_exactly_the_granted_bytes_are_admitted(pieces: list[tuple[int, int]]) -> None:
    """A copy is admitted if and only if every byte of every descriptor lies in a granted piece."""
    granted = set(range(50)) | set(range(100, 150))
    made, (offset, nbytes) = grants(), (list(part) for part in zip(*pieces, strict=True))
    if all(set(range(at, at + size)) <= granted for at, size in pieces):
        enter(made, offset, nbytes)
    else:
        with pytest.raises(PeerError, match="outside the grant"):
            enter(made, offset, nbytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (0, -1), (2**62 + 1, 1), (0, 2**63 - 1), (49, 2), (150, 1), (60, 1)]
)
def test_numbers_that_would_wrap_or_reach_out_are_refused(offset: int, nbytes: int) -> None:
    """Negative, huge and border-crossing descriptors are refused, and hold nothing."""
    made = grants()
    with pytest.raises(PeerError, match="refused"):
        enter(made, [offset], [nbytes])
    assert made.when_empty(ID, lambda: None)


def test_only_in_its_direction_and_while_it_lives() -> None:
    """A read grant admits no write; an unknown transfer and a closed grant admit nothing."""
    made = grants()
    with pytest.raises(PeerError, match="not to write"):
        enter(made, [0], [10], Direction.WRITE)
    with pytest.raises(PeerError, match="no live grant"):
        made.enter(b"u" * 16, Direction.READ, np.array([0]), np.array([1]))
    enter(made, [0], [10])
    made.close(ID)
    with pytest.raises(PeerError, match="no live grant"):
        enter(made, [0], [10])


def test_a_refused_copy_leaves_nothing_behind() -> None:
    """Neither a copy inside nor, once it is closed, the grant; one without bytes admits nobody."""
    made, told = grants(), []
    for offset, nbytes in (([0, 45], [10, 11]), ([0], [-1]), ([1 << 62], [10])):
        with pytest.raises(PeerError):
            enter(made, offset, nbytes)
    assert made.when_empty(ID, lambda: told.append("empty")) is True
    made.open(b"e" * 16, Direction.READ, NONE, NONE, lambda _: None)
    with pytest.raises(PeerError, match="outside the grant"):
        made.enter(b"e" * 16, Direction.READ, np.array([0]), np.array([1]))
    for each in (ID, b"e" * 16):
        made.close(each)
    assert made.num_open == 0
    assert not told


def test_memory_is_free_when_the_last_copy_has_left() -> None:
    """Two copies inside: the grant is empty, and says so once, only when both have left."""
    made, told = grants(), []
    enter(made, [0], [10])
    enter(made, [20], [10])
    made.close(ID)
    assert made.when_empty(ID, lambda: told.append("empty")) is False
    made.leave(ID)
    assert not told
    assert made.num_open == 1
    made.leave(ID)
    assert told == ["empty"]
    assert made.num_open == 0
    assert made.when_empty(ID, lambda: None) is True


def test_all_who_wait_for_the_memory_are_told() -> None:
    """Two ask to be called when the last copy has left: both are, once."""
    made, told = grants(), []
    enter(made, [0], [10])
    for name in ("one", "two"):
        assert made.when_empty(ID, lambda name=name: told.append(name)) is False
    made.leave(ID)
    assert told == ["one", "two"]
    enter(made, [0], [10])
    made.leave(ID)
    assert told == ["one", "two"]


def test_closing_with_an_error_ends_the_copies_inside() -> None:
    """The token of an admitted copy is set with the reason when the grant ends; closing well leaves it."""
    made = grants()
    token = made.enter(ID, Direction.READ, np.array([0]), np.array([10]))
    made.close(ID)
    assert not token.is_cancelled
    made.close(ID, error := DeadlineError("the lease ended"))
    assert token.error is error
