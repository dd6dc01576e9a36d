"""What NIXL does when a peer stops, dies or is cut off, and that none of it reaches a pool."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import numpy as np
import pytest

from conftest import wait_until
from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.layout import CopyPlan
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import expected_copy, expected_digests, make_plan, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, check_error
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread, Side
from kvferry.testing.transport_peer import pattern
from kvferry.testing.transport_processes import PeerProcess
from kvferry.transport.base import Arrived, Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.nixl_agent import shared_agent

PROBLEM = NixlTransport.unavailable()
IS_TCP = os.environ.get("UCX_TLS") == "tcp"
pytestmark = [pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}")]

# The lower half of the pools, 200 times over: long enough to be in the middle of.
HALF = POOL_NBYTES // 2
LONG = make_plan([0, HALF // 2] * 200, [0, HALF // 2] * 200, [HALF // 2] * 400)
MARK = 0x5A


class Meeting:
    """This process's side of a connection to a peer process, and copies that run beside the test."""

    def __init__(self, options: str = "") -> None:
        self.peer = PeerProcess(NixlTransport, f"nixl://127.0.0.1:0{options}")
        self.loop = LoopThread()
        self.memory, guard = create_shared(POOL_NBYTES), ScriptedGuard()
        transport = NixlTransport(self.memory, guard)
        self.side = Side(
            self.memory, guard, transport, self.loop.run(transport.connect(self.peer.address, WAIT_SECONDS))
        )

    def start(self, plan: CopyPlan, seconds: float, *, integrity: bool) -> Future[Arrived]:
        """Copy in a thread; returns once the first bytes have landed."""
        self.memory.array[:] = 0
        outcome: Future[Arrived] = Future()

        def run() -> None:
            try:
                outcome.set_result(self.side.copy(Direction.READ, plan, seconds=seconds, integrity=integrity))
            except KVFerryError as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="kvferry test copy").start()
        wait_until(lambda: self.memory.array[:4096].any() or outcome.done())
        assert not outcome.done()
        return outcome

    def check_nothing_comes(self) -> None:
        """Bytes that nobody waits for any more do not come into the pool, whatever else is copied."""
        self.memory.array[:HALF] = MARK
        plan = make_plan([HALF], [HALF], [HALF])
        for _ in range(3):
            self.side.copy(Direction.READ, plan)
        assert (self.memory.array[:HALF] == MARK).all()
        assert np.array_equal(self.memory.array[HALF:], pattern(POOL_NBYTES)[HALF:])

    def close(self) -> None:
        self.loop.run(self.side.connection.close())
        self.peer.close()
        self.loop.close()
        self.memory.close()


@pytest.fixture
def meet() -> Iterator[type[Meeting]]:
    made: list[Meeting] = []

    class Kept(Meeting):
        def __init__(self, options: str = "") -> None:
            super().__init__(options)
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

    Over cma the peer is not needed once it has admitted the read, so that goes through.
    """
    meeting = meet("?move=read")
    copying = meeting.start(LONG, 1.0, integrity=True)
    with meeting.peer.frozen():
        with pytest.raises(DeadlineError) if IS_TCP else contextlib.nullcontext():
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


PROGRAM = """
import sys
from kvferry.transport.nixl_agent import shared_agent
shared_agent()
sys.exit(3)
"""


def test_a_process_with_an_agent_ends_as_it_says() -> None:
    """Its exit status is its own, and nothing of the library is on its standard output."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")


READER = """
import sys, threading, time
from kvferry.errors import KVFerryError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import LoopThread, Side
from kvferry.transport.base import Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.security import Plain, Security

half, loop = {half}, LoopThread()
memory = create_shared(2 * half)
transport = NixlTransport(memory, ScriptedGuard())
transport.security = Security(plain=Plain.ANYWHERE)
side = Side(memory, transport.guard, transport, loop.run(transport.connect(sys.argv[1], 10.0)))
outcome = []

def copy():
    try:
        plan = make_plan([0] * 2000, [0] * 2000, [half] * 2000)
        outcome.append(side.copy(Direction.READ, plan, seconds=2.0).path)
    except KVFerryError as error:
        outcome.append(type(error).__name__)

thread = threading.Thread(target=copy)
thread.start()
while thread.is_alive() and not memory.array[:4096].any():
    thread.join(1e-3)
print("moving", side.connection.path, flush=True)
started = time.monotonic()
thread.join()
print(outcome[0], round(time.monotonic() - started, 1), flush=True)
import os
os._exit(0)
"""


@pytest.fixture
def link() -> Iterator[tuple[str, str]]:
    """Names of two network namespaces joined by a pair of interfaces, ``a0`` and ``b0``."""
    names = f"kvferry-a{os.getpid()}", f"kvferry-b{os.getpid()}"
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    made = subprocess.run(["ip", "netns", "add", names[0]], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
    try:
        for command in (
            f"netns add {names[1]}",
            f"-n {names[0]} link add a0 type veth peer name b0 netns {names[1]}",
            f"-n {names[0]} addr add 10.77.0.1/24 dev a0",
            f"-n {names[1]} addr add 10.77.0.2/24 dev b0",
            # Without it UCX cannot reach itself, and NIXL waits for that for ever.
            f"-n {names[0]} link set lo up",
            f"-n {names[1]} link set lo up",
            f"-n {names[0]} link set a0 up",
            f"-n {names[1]} link set b0 up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        # UCX sees the interfaces that are up when the agent is made.
        for name, device in zip(names, ("a0", "b0"), strict=True):
            show = ["ip", "-n", name, "link", "show", device]
            wait_until(lambda show=show: b"state UP" in subprocess.check_output(show))
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def in_namespace(name: str, device: str, *command: str) -> subprocess.Popen[str]:
    """A Python process there, whose UCX may use tcp over one interface only."""
    settings = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": device}
    return subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, *command],
        env={**os.environ, **settings},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(IS_TCP, reason="one run is enough: this test sets UCX itself")
def test_a_link_that_goes_down_is_found_by_the_deadline(link: tuple[str, str]) -> None:
    """Both peers live, nothing comes through any more: DeadlineError when the copy's time is over."""
    peer = in_namespace(
        link[1],
        "b0",
        "-m",
        "kvferry.testing.transport_peer",
        "kvferry.transport.nixl:NixlTransport",
        "nixl://10.77.0.2:0?plain=yes",
        str(POOL_NBYTES),
    )
    try:
        assert peer.stdout is not None
        address = peer.stdout.readline().strip()
        assert address
        with in_namespace(link[0], "a0", "-c", READER.format(half=HALF), address) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "moving nixl-tcp\n"
            subprocess.run(["ip", "-n", link[0], "link", "set", "a0", "down"], check=True)
            kind, seconds = reader.stdout.readline().split()
        assert kind == "DeadlineError"
        assert float(seconds) < WAIT_SECONDS
    finally:
        peer.kill()
        peer.wait()
        for pipe in (peer.stdin, peer.stdout):
            if pipe is not None:
                pipe.close()
