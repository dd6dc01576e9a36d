"""The part of the transport suite about ends: of grants, deadlines, connections and listeners."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

from kvferry.errors import DeadlineError, InputError, KVFerryError, PeerError, TransportError
from kvferry.testing.plans import make_plan, random_plan
from kvferry.testing.transport_fixture import (
    POOL_NBYTES,
    Case,
    TransportFixture,
    check_error,
    fill,
    interrupted,
    refused,
    until_interrupted,
)
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.transport.base import CancelToken, Connection

__all__ = ["EndTests", "held"]


def held() -> Counter[str]:
    """What this process holds that a connection could leave: open files, threads, shared maps, each by name.

    Take the difference of two: what earlier tests let go of meanwhile then does not count.
    """
    names = [
        f"thread {t.name} {t.ident}" for t in threading.enumerate() if not t.name.startswith("kvferry test")
    ]
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the folder
            status = os.fstat(int(fd))
            names.append(f"file {os.readlink(f'/proc/self/fd/{fd}')} {status.st_ino}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    return Counter(names + [f"map {line}" for line in maps if line.split()[1].endswith("s")])


def idle_switches() -> dict[int, int]:
    """How often each thread of this process has gone to sleep so far; an idle one stays asleep."""
    counts = {}
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.native_id is not None:
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            line = next(line for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
            counts[thread.native_id] = int(line.split()[1])
    return counts


class EndTests(TransportFixture):
    """Whatever ends a copy, a connection or a listener, the right error says so and nothing is left."""

    def fresh_cases(self, pair: TransportPair) -> list[int]:
        """Numbers of the cases; each is then made on a connection of its own."""
        return list(range(len(list(self.cases(pair.sides)))))

    def fresh_case(self, pair: TransportPair, number: int) -> Case:
        return list(self.cases(pair.connect()))[number]

    def test_a_grant_that_ends_stops_the_copy(self, large_pair: TransportPair) -> None:
        """The token is set while bytes move: PeerError with the reason, and the guard is left."""
        for case in self.cases(large_pair.sides):
            guard = case.other.guard

            def attempt(case: Case = case) -> KVFerryError | None:
                end = KVFerryError("the lease is over")
                return interrupted(case, lambda: case.other.guard.end_all(end))

            refused(until_interrupted(attempt), "the lease is over")
            guard.wait_until_idle()
            guard.tokens.clear()
            case.check_landed(make_plan([0], [4096], [100_000]))

    def test_a_cancelled_copy_raises_the_tokens_error(self, large_pair: TransportPair) -> None:
        """Set from another thread, before or while bytes move: the very error, and the guard is left."""
        for case in self.cases(large_pair.sides):
            early = CancelToken()
            early.cancel(KVFerryError("before"))
            early.cancel(KVFerryError("too late"))
            with pytest.raises(KVFerryError, match="before"):
                case.copy(make_plan([0], [0], [4096]), cancel=early)

            def attempt(case: Case = case) -> KVFerryError | None:
                token, error = CancelToken(), KVFerryError("not wanted any more")
                found = interrupted(case, lambda: token.cancel(error), cancel=token)
                assert found is None or found is error
                return found

            until_interrupted(attempt)
            case.other.guard.wait_until_idle()
            case.check_landed(make_plan([0], [4096], [100_000]))

    def test_a_deadline_that_passed_moves_nothing(self, steady_pair: TransportPair) -> None:
        """A copy without time left raises DeadlineError, and the connection works on."""
        for case in self.cases(steady_pair.sides):
            fill(case.source, 1)
            before = fill(case.destination, 2)
            with pytest.raises(DeadlineError) as caught:
                case.copy(make_plan([0], [0], [4096]), seconds=-1.0)
            check_error(caught.value)
            assert (case.destination.memory.array == before).all()
            case.other.guard.wait_until_idle()
            case.check_landed(make_plan([0], [4096], [100_000]))

    def test_an_abort_ends_copies_with_its_error(self, large_pair: TransportPair) -> None:
        """Abort from another thread while bytes move: the copy raises the very error."""
        for number in self.fresh_cases(large_pair):

            def attempt(number: int = number) -> KVFerryError | None:
                case, error = self.fresh_case(large_pair, number), KVFerryError("shutting down")
                found = interrupted(case, lambda: case.asking.connection.abort(error))
                assert found is None or found is error
                return found

            until_interrupted(attempt)
        self._check_all_left(large_pair)

    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_a_peer_that_goes_ends_copies(self, large_pair: TransportPair, how: str) -> None:
        """The peer closes or aborts while bytes move: TransportError, and no guard is held."""
        for number in self.fresh_cases(large_pair):

            def attempt(number: int = number) -> KVFerryError | None:
                case = self.fresh_case(large_pair, number)
                peer = case.other.connection
                if how == "close":
                    return interrupted(case, lambda: large_pair.loop.run(peer.close()))
                return interrupted(case, lambda: peer.abort(KVFerryError("gone")))

            error = until_interrupted(attempt)
            assert isinstance(error, TransportError)
            check_error(error)
        self._check_all_left(large_pair)

    def _check_all_left(self, pair: TransportPair) -> None:
        for side in pair.sides:
            side.guard.wait_until_idle()

    def test_connections_of_one_listener_are_apart(self, steady_pair: TransportPair) -> None:
        """Three connections to one listener: ending one leaves frames and copies of the others alone."""
        first, second, third = (steady_pair.connect() for _ in range(3))
        steady_pair.loop.run(first[0].connection.close())
        second[1].connection.abort(KVFerryError("gone"))
        for case in self.cases(third):
            case.check_landed(random_plan(21, POOL_NBYTES, [4096] * 100))
        steady_pair.loop.run(third[0].connection.send(b"still here"))
        assert steady_pair.loop.run(third[1].connection.receive()) == b"still here"
        for side in (*first, *second, *third):
            steady_pair.loop.run(side.connection.close())

    def test_a_closed_listener_keeps_its_connections(self, pair: TransportPair) -> None:
        """Connections stay and work; nobody new gets in; the address is free again."""
        address = pair.listener.address
        pair.loop.run(pair.listener.close())
        for case in self.cases(pair.sides):
            case.check_landed(random_plan(22, POOL_NBYTES, [4096] * 100))
        with pytest.raises(TransportError) as caught:
            pair.loop.run(pair.connecting.transport.connect(address, WAIT_SECONDS))
        check_error(caught.value)
        pair.listener = pair.loop.run(pair.listening.transport.listen(address, pair.accepted.put))
        assert pair.listener.address == address
        for case in self.cases(pair.connect()):
            case.check_landed(random_plan(23, POOL_NBYTES, [4096] * 100))

    def test_an_address_in_use_cannot_be_had_twice(self, steady_pair: TransportPair) -> None:
        """Listening where somebody listens is a TransportError and takes nothing away."""
        address = steady_pair.listener.address
        with pytest.raises(TransportError) as caught:
            steady_pair.loop.run(steady_pair.connecting.transport.listen(address, steady_pair.accepted.put))
        check_error(caught.value)
        for side in steady_pair.connect():
            steady_pair.loop.run(side.connection.close())

    def test_a_malformed_address_is_named(self, steady_pair: TransportPair) -> None:
        """Neither listen nor connect takes it: InputError, one line, about the address."""
        for address in self.malformed_addresses:
            for call in (
                steady_pair.listening.transport.listen(address, steady_pair.accepted.put),
                steady_pair.connecting.transport.connect(address, WAIT_SECONDS),
            ):
                with pytest.raises(InputError) as caught:
                    steady_pair.loop.run(call)
                assert caught.value.message.startswith("address: "), address
                assert "\n" not in caught.value.message

    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_nothing_is_left_of_a_connection(self, pair: TransportPair, how: str) -> None:
        """Sockets, threads and maps of a connection that worked, and failed, are gone after its end."""
        for case in self.cases(pair.sides):  # from here on the pair itself holds what it needs
            case.check_landed(random_plan(24, POOL_NBYTES, [4096] * 100))
        before = held()
        sides = pair.connect()
        for case in self.cases(sides):
            case.check_landed(random_plan(24, POOL_NBYTES, [4096] * 100))
            case.other.guard.refusal = KVFerryError("no")
            with pytest.raises(PeerError):
                case.copy(make_plan([0], [0], [4096]))
            case.other.guard.refusal = None
        ends: list[Connection] = [side.connection for side in sides]
        if how == "abort":
            ends[0].abort(KVFerryError("gone"))
        for connection in ends:
            pair.loop.run(connection.close())
        left = held() - before
        assert not [name for name in left if not (self.library_sockets and name.startswith("file socket:"))]

    def test_an_idle_connection_sleeps(self, steady_pair: TransportPair) -> None:
        """While nothing is asked, no thread of either side wakes up."""
        for case in self.cases(steady_pair.sides):
            case.check_landed(make_plan([0], [4096], [100_000]))
            case.other.guard.wait_until_idle()
        steady_pair.loop.run(steady_pair.listening.connection.send(b"x"))
        steady_pair.loop.run(steady_pair.connecting.connection.receive())
        threading.Event().wait(0.1)  # what just ran goes to sleep
        before = idle_switches()
        threading.Event().wait(0.5)
        # A thread of an earlier test may end meanwhile; none wakes up, and none is new.
        assert idle_switches().items() <= before.items()
