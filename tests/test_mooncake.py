"""Mooncake as a transport, over its tcp: the public suite, and its traps. Run by ``make test-mooncake``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from kvferry.cli import run
from kvferry.errors import DeadlineError, TransportError
from kvferry.testing.plans import expected_copy, expected_digests, random_plan
from kvferry.testing.transport_fixture import POOL_NBYTES, check_error
from kvferry.testing.transport_pair import WAIT_SECONDS
from kvferry.testing.transport_peer import pattern
from kvferry.testing.transport_suite import TransportSuite
from kvferry.transport.base import Direction
from kvferry.transport.mooncake import MooncakeTransport
from kvferry.transport.mooncake_engine import MooncakeEngine, shared_engine
from library_kit import LONG, MARK, Meeting, ending_of_a_cut_copy, two_hosts
from probe_kit import agents, probe

PROBLEM = MooncakeTransport.unavailable()
pytestmark = [pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}")]


class TestMooncake(TransportSuite):
    """Two engines' worth of peers: one in this process, one in another."""

    transport = MooncakeTransport
    library_sockets = True
    malformed_addresses = (
        "mooncake:127.0.0.1:1",
        "mooncake://?wildcard=yes",
        "mooncake://127.0.0.1:7400",
        "mooncake://127.0.0.1:7400?wildcard=no",
        "mooncake://127.0.0.1:7400?wildcard=yes&protocol=smoke",
        "mooncake://127.0.0.1:7400?wildcard=yes&device=a/b",
        "mooncake://192.0.2.1:7400?wildcard=yes",
    )

    @classmethod
    def listen_address(cls) -> str:
        return "mooncake://127.0.0.1:0?wildcard=yes"


ADDRESS = "mooncake://127.0.0.1:0?wildcard=yes"


def engine() -> MooncakeEngine:
    return shared_engine("127.0.0.1", "tcp", "")


@pytest.fixture
def meet() -> Iterator[type[Meeting]]:
    made: list[Meeting] = []

    class Kept(Meeting):
        def __init__(self) -> None:
            super().__init__(MooncakeTransport, ADDRESS)
            made.append(self)

    yield Kept
    for meeting in made:
        meeting.close()


@pytest.mark.parametrize("integrity", [True, False])
def test_a_peer_that_freezes_in_the_middle(meet: type[Meeting], integrity: bool) -> None:
    """DeadlineError by the deadline, the pool is the caller's at once, and thawed all goes on."""
    meeting = meet()
    before = engine().arena.num_quarantined
    copying = meeting.start(LONG, 1.0, integrity=integrity)
    with meeting.peer.frozen():
        with pytest.raises(DeadlineError) as caught:
            copying.result(WAIT_SECONDS)
        check_error(caught.value)
        meeting.memory.array[:] = MARK
    meeting.check_nothing_comes()
    assert engine().arena.num_quarantined == before


def test_a_peer_that_is_killed_in_the_middle(meet: type[Meeting]) -> None:
    """TransportError for the copy; another peer is served; at most one pair of windows is given up."""
    meeting = meet()
    before = engine().arena.num_quarantined
    copying = meeting.start(LONG, WAIT_SECONDS, integrity=True)
    meeting.peer.kill()
    with pytest.raises(TransportError) as caught:
        copying.result(WAIT_SECONDS)
    check_error(caught.value)
    meet().check_nothing_comes()
    assert engine().arena.num_quarantined <= before + 1


def test_a_block_that_changes_under_the_copy_is_found(meet: type[Meeting]) -> None:
    """Digests are of what landed: they differ from those at export where the source was reused."""
    meeting = meet()
    plan = random_plan(3, POOL_NBYTES, [32_768] * 20, 5)
    sent = pattern(POOL_NBYTES)
    torn = sent.copy()
    torn[plan.src_offset[7]] ^= 1
    arrived = meeting.side.copy(Direction.READ, plan)
    assert arrived.path == "mooncake-tcp"
    assert arrived.digests is not None
    assert arrived.digests.tolist() == expected_digests(plan, sent) != expected_digests(plan, torn)
    assert np.array_equal(meeting.memory.array, expected_copy(plan, sent, np.zeros(POOL_NBYTES, np.uint8)))


def test_a_link_that_goes_down_is_found_by_the_deadline() -> None:
    """Both peers live, nothing comes through any more: DeadlineError when the copy's time is over."""
    with two_hosts() as names:
        path, kind, seconds = ending_of_a_cut_copy(names, MooncakeTransport, "&wildcard=yes")
    assert (path, kind) == ("mooncake-tcp", "DeadlineError")
    assert seconds < WAIT_SECONDS


PROGRAM = """
import sys
from kvferry.transport.mooncake_engine import shared_engine
shared_engine("127.0.0.1", "tcp", "")
sys.exit(3)
"""


def test_a_process_with_an_engine_ends_as_it_says() -> None:
    """Its exit status is its own, and nothing of the library is on its standard output."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")


def test_agents_that_allow_it_are_probed_over_it(capsys: pytest.CaptureFixture[str]) -> None:
    """``--data`` says so, for the wildcard that the engine listens at; without it the reason is told.

    The doctor has no word about its own host, and says what to do instead.
    """
    data = "mooncake://127.0.0.1:0?wildcard=yes"
    more = [["--listen", "127.0.0.1:0", "--name", name, "--data", data] for name in "ab"]
    small = ("--bytes", "64KiB", "--repeat", "1", "--mode", "pull", "--transport", "mooncake", "--json")
    with agents(*more, more[0][:4]) as found:
        done = probe(found[0].address, found[1].address, *small)
        assert done.returncode == 0, done.stderr
        assert {row["path"] for row in json.loads(done.stdout)["pairs"]} == {"mooncake-tcp"}
        assert run(["doctor", found[0].address, "--json"]) == 0
        (peer,) = json.loads(capsys.readouterr().out)["peers"]
        (why,) = [state["why"] for state in peer["transports"] if state["scheme"] == "mooncake"]
        assert why.startswith("not tried from here: ")
        assert "agents whose --data says so" in why
        done = probe(found[0].address, found[2].address, *small)
        assert done.returncode == 2
        assert "add wildcard=yes" in done.stderr
