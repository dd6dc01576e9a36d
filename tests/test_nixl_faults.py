"""What NIXL does when a peer stops, dies or is cut off, and that none of it reaches a pool."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.errors import DeadlineError, TransportError
from kvferry.testing.plans import expected_copy, expected_digests, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, check_error
from kvferry.testing.transport_pair import WAIT_SECONDS
from kvferry.testing.transport_peer import pattern
from kvferry.transport.base import Direction
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


@pytest.mark.skipif(IS_TCP, reason="one run is enough: this test sets UCX itself")
def test_a_link_that_goes_down_is_found_by_the_deadline() -> None:
    """Both peers live, nothing comes through any more: DeadlineError when the copy's time is over."""
    with two_hosts() as names:
        path, kind, seconds = ending_of_a_cut_copy(names, NixlTransport, "")
    assert (path, kind) == ("nixl-tcp", "DeadlineError")
    assert seconds < WAIT_SECONDS
