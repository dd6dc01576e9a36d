"""What NIXL does when a peer stops, dies or is cut off, and that none of it reaches a pool."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import CapacityError, DeadlineError, TransportError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import expected_copy, expected_digests, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, check_error
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread
from kvferry.testing.transport_peer import pattern
from kvferry.transport.base import Connection, Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.nixl_agent import shared_agent
from library_kit import LONG, MARK, Meeting, ending_of_a_cut_copy, two_hosts

PROBLEM = NixlTransport.unavailable()
IS_TCP = os.environ.get("UCX_TLS") == "tcp"
pytestmark = [pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}")]


@pytest.fixture
def meet() -> Iterator[type[Meeting]]:
    made: list[Meeting] = []

    class Kept(Meeting):
        def __init__(self, options: str = "") -> None:
            super().__init__(NixlTransport, f"nixl://127.0.0.1:0{options}")
            made.append(self)

    yield Kept
    for meeting in made:
        meeting.close()


def test_the_path_is_what_ucx_took(meet: type[Meeting]) -> None:
    """Read back from UCX's own log, for this process's endpoint to another process."""
    expected = "nixl-tcp" if IS_TCP else "nixl-cma"
    meeting = meet()
    assert meeting.side.connection.path == expected
    assert meeting.side.copy(Direction.READ, random_plan(1, POOL_NBYTES, [4096])).path == expected


@pytest.mark.parametrize("integrity", [True, False])
def test_a_peer_that_freezes_in_the_middle_of_a_push(meet: type[Meeting], integrity: bool) -> None:
    """DeadlineError by the deadline, the pool is the caller's at once, and thawed all goes on."""
    before = shared_agent().arena.num_quarantined
    meeting = meet("?move=push")
    copying = meeting.start(LONG, 1.0, integrity=integrity)
    with meeting.peer.frozen():
        with pytest.raises(DeadlineError) as caught:
            copying.result(WAIT_SECONDS)
        check_error(caught.value)
        meeting.memory.array[:] = MARK
    meeting.check_nothing_comes()
    assert shared_agent().arena.num_quarantined == before


@pytest.mark.skipif(not IS_TCP, reason="reads over cma need nothing of the peer: they do not stop with it")
def test_a_read_into_the_pool_ends_when_the_library_is_through(meet: type[Meeting]) -> None:
    """It has no cancel: past its deadline the copy waits for the library, and only then says so."""
    meeting = meet("?move=read")
    copying = meeting.start(LONG, 0.5, integrity=False)
    with meeting.peer.frozen(), pytest.raises(TimeoutError):
        copying.result(1.0)
    with pytest.raises(DeadlineError):
        copying.result(WAIT_SECONDS)
    meeting.check_nothing_comes()


def test_a_summed_read_from_a_frozen_peer(meet: type[Meeting]) -> None:
    """With integrity the library reads into windows: the deadline holds, and nothing comes late.

    Over cma the peer is not needed once the endpoint is set up, so that goes through; on a busy machine that
    may be after the first bytes, and then the deadline holds there too.
    """
    meeting = meet("?move=read")
    copying = meeting.start(LONG, 1.0, integrity=True)
    with meeting.peer.frozen():
        with pytest.raises(DeadlineError) if IS_TCP else contextlib.suppress(DeadlineError):
            copying.result(WAIT_SECONDS)
        meeting.memory.array[:] = MARK
    meeting.check_nothing_comes()


@pytest.mark.parametrize("move", ["push", "read"])
def test_a_peer_that_is_killed_in_the_middle(meet: type[Meeting], move: str) -> None:
    """TransportError for the copy; another peer is served; at most one pair of windows is given up."""
    before = shared_agent().arena.num_quarantined
    meeting = meet(f"?move={move}")
    copying = meeting.start(LONG, WAIT_SECONDS, integrity=True)
    meeting.peer.kill()
    with pytest.raises(TransportError) as caught:
        copying.result(WAIT_SECONDS)
    check_error(caught.value)
    another = meet(f"?move={move}")
    another.check_nothing_comes()
    assert shared_agent().arena.num_quarantined <= before + 1


def test_a_block_that_changes_under_the_copy_is_found(meet: type[Meeting]) -> None:
    """Digests are of what landed: they differ from those at export where the source was reused."""
    meeting = meet()
    plan = random_plan(3, POOL_NBYTES, [32_768] * 20, 5)
    sent = pattern(POOL_NBYTES)
    torn = sent.copy()
    torn[plan.src_offset[7]] ^= 1
    arrived = meeting.side.copy(Direction.READ, plan)
    assert arrived.digests is not None
    assert arrived.digests.tolist() == expected_digests(plan, sent) != expected_digests(plan, torn)
    assert np.array_equal(meeting.memory.array, expected_copy(plan, sent, np.zeros(POOL_NBYTES, np.uint8)))


READER = """
import sys, threading
from kvferry.errors import KVFerryError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import LoopThread, Side
from kvferry.transport.base import Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.nixl import NixlTransport

memory, loop = create_shared(int(sys.argv[2])), LoopThread()
transport = NixlTransport(memory, ScriptedGuard())
side = Side(memory, transport.guard, transport, loop.run(transport.connect(sys.argv[1], 10.0)))
outcome = []

def copy():
    try:
        plan = make_plan([0] * 400, [0] * 400, [memory.nbytes] * 400)
        outcome.append(side.copy(Direction.READ, plan, seconds=20.0, integrity=False).path)
    except KVFerryError as error:
        outcome.append(type(error).__name__)

thread = threading.Thread(target=copy)
thread.start()
while thread.is_alive() and not memory.array.all():
    thread.join(1e-3)
print("moving", flush=True)
thread.join()
side.copy(Direction.READ, make_plan([0], [0], [4096]))  # the connection is whole, the library works
print(outcome[0], set(memory.array[4096:].tolist()), memory.array[0], flush=True)
import os
os._exit(0)
"""


@pytest.mark.skipif(not IS_TCP, reason="writes over cma are over when they are posted")
def test_a_reader_that_freezes_gets_nothing_of_what_is_written_after_it() -> None:
    """The library reads large pieces from the pool, and goes on when nobody waits for it any more.

    What it sends of blocks that were given away does not come into the reader's pool.
    """
    memory, guard, loop = create_shared(POOL_NBYTES), ScriptedGuard(), LoopThread()
    memory.array[:] = 1
    accepted: list[Connection] = []
    transport = NixlTransport(memory, guard)
    listener = loop.run(transport.listen("nixl://127.0.0.1:0", accepted.append))
    command = [sys.executable, "-c", READER, listener.address, str(POOL_NBYTES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "moving\n"
        os.kill(reader.pid, signal.SIGSTOP)
        try:
            os.waitid(os.P_PID, reader.pid, os.WSTOPPED)
            guard.end_all(CapacityError("the lease is over"))
            guard.wait_until_idle()
            memory.array[:] = MARK
        finally:
            reader.send_signal(signal.SIGCONT)
        told = reader.stdout.readline()
    assert told in {f"TransportError {{1}} {MARK}\n", f"CopyEndedError {{1}} {MARK}\n"}
    for connection in accepted:
        loop.run(connection.close())
    loop.run(listener.close())
    loop.close()
    memory.close()


PROGRAM = """
import sys, threading
from kvferry.transport.nixl_agent import shared_agent
agent, driven = shared_agent(), threading.Event()

def drive():
    while True:
        agent.progress()
        driven.set()

threading.Thread(target=drive, daemon=True).start()
driven.wait()
sys.exit(3)
"""


def test_a_process_with_an_agent_ends_as_it_says() -> None:
    """Its exit status is its own, though a thread is in the library; nothing of that is on its output."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")


@pytest.mark.skipif(IS_TCP, reason="one run is enough: this test sets UCX itself")
def test_a_link_that_goes_down_is_found_by_the_deadline() -> None:
    """Both peers live, nothing comes through any more: DeadlineError when the copy's time is over."""
    with two_hosts() as names:
        path, kind, seconds = ending_of_a_cut_copy(names, NixlTransport, "")
    assert (path, kind) == ("nixl-tcp", "DeadlineError")
    assert seconds < WAIT_SECONDS
