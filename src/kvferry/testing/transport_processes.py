"""The part of the transport suite with a peer in another process: real bytes, freezing, death."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import expected_copy, expected_digests, make_plan, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, TransportFixture, check_error, fill
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread, Side
from kvferry.testing.transport_peer import pattern
from kvferry.transport.base import Arrived, CancelToken, Direction, Transport

__all__ = ["PeerProcess", "ProcessTests"]


class PeerProcess:
    """A peer that admits everything and sends each control frame back; see ``transport_peer``."""

    def __init__(self, transport: type[Transport], listen_address: str, *, posts: bool = False) -> None:
        name = f"{transport.__module__}:{transport.__qualname__}"
        command = [sys.executable, "-m", "kvferry.testing.transport_peer", name, listen_address]
        self._process = subprocess.Popen(
            [*command, str(POOL_NBYTES), *(["posts"] if posts else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the peer process did not come up"

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped, from before the block to its end."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class ProcessTests(TransportFixture):
    """Skipped, and counted as such, only where a transport cannot leave its process."""

    @pytest.fixture(scope="class")
    @classmethod
    def peer(cls) -> Iterator[PeerProcess]:
        """A peer that tests share; they thaw what they freeze."""
        peer = cls.make_peer()
        yield peer
        peer.close()

    @pytest.fixture
    def mortal_peer(self) -> Iterator[PeerProcess]:
        """A peer of the test's own."""
        peer = self.make_peer()
        yield peer
        peer.close()

    @pytest.fixture
    def posting_peer(self) -> Iterator[PeerProcess]:
        """A peer of the test's own, whose whole pool is on its board."""
        peer = self.make_peer(posts=True)
        yield peer
        peer.close()

    @classmethod
    def make_peer(cls, *, posts: bool = False) -> PeerProcess:
        if not cls.has_processes:
            pytest.skip(f"{cls.transport.scheme} stays in one process")
        return PeerProcess(cls.transport, cls.listen_address(), posts=posts)

    @contextlib.contextmanager
    def connected(self, peer: PeerProcess) -> Iterator[tuple[LoopThread, Side]]:
        """This process's side of a connection to the peer; closed at the end."""
        loop, memory, guard = LoopThread(), self.make_memory(POOL_NBYTES), ScriptedGuard()
        try:
            transport = self.transport(memory, guard)
            connection = loop.run(transport.connect(peer.address, WAIT_SECONDS))
            yield loop, Side(memory, guard, transport, connection)
            loop.run(connection.close())
        finally:
            loop.close()
            memory.close()

    def test_frames_and_copies_cross_processes(self, mortal_peer: PeerProcess) -> None:
        """Frames come back as sent; reads bring the peer's bytes; what is written can be read back."""
        plan = random_plan(31, POOL_NBYTES, [32_768] * 40 + [5000] * 40, 6)
        with self.connected(mortal_peer) as (loop, here):

            async def echo() -> bytes:
                await here.connection.send(b"to and fro" * 1000)
                return await here.connection.receive()

            assert loop.run(echo()) == b"to and fro" * 1000
            theirs, before = pattern(POOL_NBYTES), here.memory.array.copy()
            arrived = here.copy(Direction.READ, plan)
            assert np.array_equal(here.memory.array, expected_copy(plan, theirs, before))
            assert arrived.digests is not None
            assert arrived.digests.tolist() == expected_digests(plan, theirs)
            if here.connection.can_write:
                self._check_write(here, theirs)

    @staticmethod
    def _check_write(here: Side, theirs: NDArray[np.uint8]) -> None:
        plan = random_plan(32, POOL_NBYTES, [32_768] * 40 + [5000] * 40, 6)
        sent = fill(here, 33)
        here.copy(Direction.WRITE, plan)
        here.copy(Direction.READ, make_plan([0], [0], [POOL_NBYTES]))
        assert np.array_equal(here.memory.array, expected_copy(plan, sent, theirs))

    def test_a_frozen_peer_is_found_by_the_deadline(self, peer: PeerProcess) -> None:
        """Copies to a stopped process raise DeadlineError, a connect too; thawed, it serves again."""
        with self.connected(peer) as (loop, here):
            with peer.frozen():
                for direction in self.directions(here.connection):
                    with pytest.raises(DeadlineError) as caught:
                        here.copy(direction, random_plan(34, POOL_NBYTES, [1 << 19] * 6), seconds=0.2)
                    check_error(caught.value)
                with pytest.raises(DeadlineError) as caught:
                    loop.run(here.transport.connect(peer.address, 0.2))
                check_error(caught.value)
            arrived = here.copy(Direction.READ, random_plan(35, POOL_NBYTES, [4096] * 10))
            assert arrived.nbytes == 40_960

    @pytest.mark.parametrize("how", ["cancel", "abort"])
    def test_a_copy_from_a_frozen_peer_can_be_ended(self, peer: PeerProcess, how: str) -> None:
        """A cancel or an abort from another thread ends it with the very error."""
        with self.connected(peer) as (_, here), peer.frozen():
            token, error = CancelToken(), KVFerryError("enough")
            copying = [self._start(here, direction, token) for direction in self.directions(here.connection)]
            if how == "cancel":
                token.cancel(error)
            else:
                here.connection.abort(error)
            for future in copying:
                with pytest.raises(KVFerryError) as caught:
                    future.result(WAIT_SECONDS)
                assert caught.value is error

    def test_a_killed_peer_ends_everything(self, mortal_peer: PeerProcess) -> None:
        """Kill -9 under a copy and a waiting receive: TransportError for both, and for what comes after."""
        with self.connected(mortal_peer) as (loop, here), mortal_peer.frozen():
            waiting = loop.start(here.connection.receive())
            copying = self._start(here, Direction.READ, CancelToken())
            mortal_peer.kill()
            for future in (waiting, copying):
                with pytest.raises(TransportError) as caught:
                    future.result(WAIT_SECONDS)
                check_error(caught.value)
            with pytest.raises(TransportError):
                here.copy(Direction.READ, random_plan(36, POOL_NBYTES, [4096]))
            with pytest.raises(TransportError):
                loop.run(here.connection.send(b"late"))
            with pytest.raises(TransportError):
                loop.run(here.transport.connect(mortal_peer.address, WAIT_SECONDS))

    def test_a_posting_outlives_no_peer(self, posting_peer: PeerProcess) -> None:
        """What is posted is read while the peer stands still, and not once it is gone."""
        with self.connected(posting_peer) as (_, here):
            theirs, plan = pattern(POOL_NBYTES), make_plan([4096], [0], [POOL_NBYTES // 2])
            here.copy(Direction.READ, plan)
            here.memory.array[:] = 0
            with posting_peer.frozen():
                if self.reads_boards:
                    here.copy(Direction.READ, plan)
                    assert np.array_equal(
                        here.memory.array[: POOL_NBYTES // 2], theirs[4096:][: POOL_NBYTES // 2]
                    )
                posting_peer.kill()
                with pytest.raises(TransportError):
                    here.copy(Direction.READ, plan)

    @staticmethod
    def _start(here: Side, direction: Direction, token: CancelToken) -> Future[Arrived]:
        """Copy in a thread of its own."""
        plan = random_plan(37, POOL_NBYTES, [1 << 19] * 6)
        copying: Future[Arrived] = Future()

        def run() -> None:
            try:
                copying.set_result(here.copy(direction, plan, cancel=token))
            except KVFerryError as error:
                copying.set_exception(error)

        threading.Thread(target=run, name="kvferry test copy").start()
        return copying
