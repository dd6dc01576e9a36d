"""What the parts of the transport suite share: how sides are made, and what every error must say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, PeerError
from kvferry.layout import CopyPlan
from kvferry.testing.plans import expected_copy, make_plan
from kvferry.testing.transport_pair import Side, TransportPair
from kvferry.transport.base import Arrived, Connection, Direction, Memory, Transport
from kvferry.transport.memory import create_shared

__all__ = [
    "LARGE_POOL_NBYTES",
    "POOL_NBYTES",
    "Case",
    "TransportFixture",
    "check_error",
    "fill",
    "interrupted",
    "long_plan",
    "refused",
    "until_interrupted",
]

POOL_NBYTES = 4 << 20
LARGE_POOL_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One way to copy: who asks for which direction, and where the bytes come from and go to."""

    direction: Direction
    asking: Side
    other: Side
    source: Side
    destination: Side

    def copy(self, plan: CopyPlan, **limits: Any) -> Arrived:
        return self.asking.copy(self.direction, plan, **limits)

    def check_landed(self, plan: CopyPlan) -> None:
        """Copy by ``plan`` and compare the whole destination with plain loops."""
        sent, before = fill(self.source, 1), fill(self.destination, 2)
        self.copy(plan)
        assert np.array_equal(self.destination.memory.array, expected_copy(plan, sent, before))


class TransportFixture:
    """What an implementer says about a transport. See ``TransportSuite``."""

    #: The class under test.
    transport: type[Transport]
    #: Addresses that must be refused with InputError.
    malformed_addresses: tuple[str, ...]
    #: Sides can be in different processes.
    has_processes = True
    #: A copy that is on the peer's board is made without asking the peer.
    reads_boards = False
    #: It moves bytes by a library that opens and keeps sockets as it likes: only others are counted.
    library_sockets = False

    @classmethod
    def listen_address(cls) -> str:
        """An address to listen at, free and not used before."""
        raise NotImplementedError

    @classmethod
    def make_memory(cls, nbytes: int) -> Memory:
        """A zeroed pool that this transport can serve."""
        return create_shared(nbytes)

    @classmethod
    def make_pair(cls, nbytes: int = POOL_NBYTES) -> TransportPair:
        memories = cls.make_memory(nbytes), cls.make_memory(nbytes)
        return TransportPair(cls.transport, cls.listen_address(), *memories)

    @pytest.fixture
    def pair(self) -> Iterator[TransportPair]:
        """A pair that the test may break."""
        pair = self.make_pair()
        yield pair
        pair.close()

    @pytest.fixture(scope="class")
    @classmethod
    def steady_pair(cls) -> Iterator[TransportPair]:
        """A pair that tests share and must leave as they found it."""
        pair = cls.make_pair()
        yield pair
        pair.close()

    @pytest.fixture(scope="class")
    @classmethod
    def large_pair(cls) -> Iterator[TransportPair]:
        """A pair with pools that take a while to copy; tests break connections of their own."""
        pair = cls.make_pair(LARGE_POOL_NBYTES)
        yield pair
        pair.close()

    def directions(self, connection: Connection) -> tuple[Direction, ...]:
        return (Direction.READ, Direction.WRITE) if connection.can_write else (Direction.READ,)

    def cases(self, sides: tuple[Side, Side]) -> Iterator[Case]:
        """Each direction that the transport has, asked from each side."""
        for asking, other in (sides, sides[::-1]):
            for direction in self.directions(asking.connection):
                reads = direction is Direction.READ
                source, destination = (other, asking) if reads else (asking, other)
                yield Case(direction, asking, other, source, destination)


def fill(side: Side, seed: int) -> NDArray[np.uint8]:
    """Random bytes in a pool; returns them, read-only."""
    content = _random_bytes(seed, side.memory.nbytes)
    np.copyto(side.memory.array, content)
    return content


@lru_cache(maxsize=16)
def _random_bytes(seed: int, nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def long_plan(repeats: int = 24) -> CopyPlan:
    """A copy that takes a while: the whole large pool, several times over, in chunks of 1 MiB.

    A peer looks at its tokens every 50 ms, so a copy that ends must take longer than that.
    """
    piece_nbytes = 16 << 10
    offsets = range(0, LARGE_POOL_NBYTES, piece_nbytes)
    count, per_chunk = len(offsets) * repeats, (1 << 20) // piece_nbytes
    return make_plan(
        [*offsets] * repeats,
        [*offsets[::-1]] * repeats,
        [piece_nbytes] * count,
        [*range(0, count, per_chunk), count],
    )


def check_error(error: KVFerryError) -> None:
    """Every error of a transport says to whom, in which phase, and what to do next."""
    assert error.peer, f"{error!r} names no peer"
    assert error.phase, f"{error!r} names no phase"
    assert error.next_step, f"{error!r} names no next step"


def interrupted(case: Case, interrupt: Callable[[], object], **limits: Any) -> KVFerryError | None:
    """Start a long copy, interrupt when its first bytes have landed, and return the copy's error.

    None if the copy was over before the interruption came; then it has moved every byte.
    """
    plan = long_plan()
    case.source.memory.array[:] = 0xA5
    case.destination.memory.array[:] = 0
    outcome: list[KVFerryError | None] = []

    def run() -> None:
        try:
            case.copy(plan, **limits)
            outcome.append(None)
        except KVFerryError as error:
            outcome.append(error)

    first = case.destination.memory.array[int(plan.dst_offset[0]) :][:1]
    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive() and not first[0]:
        thread.join(1e-4)
    interrupt()
    thread.join()
    if outcome[0] is None:
        assert (case.destination.memory.array == 0xA5).all()
    return outcome[0]


def until_interrupted(attempt: Callable[[], KVFerryError | None]) -> KVFerryError:
    """Repeat an attempt whose copy may win the race, until one is interrupted."""
    for _ in range(20):
        error = attempt()
        if error is not None:
            return error
    raise AssertionError("no copy was interrupted in 20 attempts")


def refused(error: KVFerryError, reason: str) -> None:
    """The error is the peer's refusal, with its words."""
    assert isinstance(error, PeerError)
    assert reason in error.message
    check_error(error)
