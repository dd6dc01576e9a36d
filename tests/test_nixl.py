"""NIXL as a transport, on CPU memory: the public suite over each path that UCX has here, and its traps.

Run by ``make test-nixl``, once for each of two settings of UCX: a process has one agent.
"""

from __future__ import annotations

import json
import os
import time

import msgspec
import numpy as np
import pytest

from device_kit import FakeDevice
from kvferry.cli import run
from kvferry.errors import PeerError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_boards import post
from kvferry.testing.transport_fixture import POOL_NBYTES
from kvferry.testing.transport_pair import WAIT_SECONDS, TransportPair
from kvferry.testing.transport_suite import BoardTests, CopyTests, EndTests, ProcessTests, TransportSuite
from kvferry.transport import look
from kvferry.transport.base import Direction
from kvferry.transport.board import Board
from kvferry.transport.library import decode_record
from kvferry.transport.memory import private
from kvferry.transport.nixl import Hello, NixlConnection, NixlTransport
from kvferry.transport.nixl_agent import shared_agent
from kvferry.transport.patience import Patience
from probe_kit import agents, probe

PROBLEM = NixlTransport.unavailable()
IS_TCP = os.environ.get("UCX_TLS") == "tcp"
pytestmark = [pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}")]


class TestNixl(TransportSuite):
    """By the way that is the default on this path: reads over cma, pushes over tcp."""

    transport = NixlTransport
    reads_boards = not IS_TCP
    malformed_addresses = (
        "nixl:127.0.0.1:1",
        "nixl://",
        "tcp://127.0.0.1:1",
        "nixl://127.0.0.1:7400?move=write",
        "nixl://127.0.0.1:7400?path=cma",
        "nixl://192.0.2.1:7400",
    )

    @classmethod
    def listen_address(cls) -> str:
        return "nixl://127.0.0.1:0"


class TestNixlTheOtherWay(CopyTests, BoardTests, EndTests, ProcessTests):
    """Pushes over cma, reads over tcp."""

    transport = NixlTransport
    malformed_addresses = ("nixl:",)

    @classmethod
    def listen_address(cls) -> str:
        return f"nixl://127.0.0.1:0?move={'read' if IS_TCP else 'push'}"


@pytest.mark.skipif(IS_TCP, reason="over tcp nobody reads a board")
def test_copies_that_hold_all_windows_still_look_at_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks in its middle, and none waits for a window that another of them has."""
    monkeypatch.setattr(look, "_BOARD_SECONDS", 0.0)
    pools = private(np.ones(POOL_NBYTES, np.uint8)), private(np.zeros(POOL_NBYTES, np.uint8))
    pair = TransportPair(NixlTransport, "nixl://127.0.0.1:0?move=read", *pools, with_board=True)
    arena, limits = shared_agent().arena, Patience(time.monotonic() + WAIT_SECONDS, (), "test")
    # Tests before it in this process may have left some to peers that are gone.
    taken = [arena.take(limits) for _ in range(len(arena._idle) - 1)]
    try:
        post(pair.listening.guard, (0, POOL_NBYTES))
        pair.connecting.copy(Direction.READ, make_plan([0], [0], [POOL_NBYTES]), seconds=5.0)
        assert pair.connecting.memory.array.all()
        assert not pair.listening.guard.entered
    finally:
        for one in taken:
            arena.give_back(one)
        pair.close()


@pytest.mark.parametrize("field", ["address", "nbytes", "cookie_address", "board_address"])
@pytest.mark.parametrize("number", [-1, 1 << 62, (1 << 64) - 1])
def test_a_hello_with_what_is_no_address_is_the_peers_fault(field: str, number: int) -> None:
    """It is found while connecting, and not by an overflow in the first copy."""
    says = {"agent": "a", "metadata": b"", "address": 1, "nbytes": 1, "cookie_address": 1, "cookie": b""}
    hello = msgspec.msgpack.encode({**says, "board_address": None, field: number})
    with pytest.raises(PeerError, match="Hello"):
        decode_record(hello, Hello, "peer")


def test_a_pool_on_a_device_shows_no_board() -> None:
    """It is pushed, so its board helps nobody, and says which blocks others move."""
    guard = ScriptedGuard(Board.create())
    device = private(FakeDevice(np.zeros(4096, np.uint8)))
    connection = object.__new__(NixlConnection)
    connection.guard, connection.memory = guard, device
    hello = decode_record(connection._hello(), Hello, "peer")
    assert (hello.address, hello.board_address, connection.regions) == (None, None, ())


def test_the_doctor_and_a_probe_try_it_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    """With an agent, whose endpoint listens beside it; the path that was really taken is told."""
    with agents(
        ["--listen", "127.0.0.1:0", "--name", "a"], ["--listen", "127.0.0.1:0", "--name", "b"]
    ) as found:
        assert run(["doctor", found[0].address, "--json"]) == 0
        (peer,) = json.loads(capsys.readouterr().out)["peers"]
        (state,) = [state for state in peer["transports"] if state["scheme"] == "nixl"]
        assert state["works"], state
        assert state["path"].startswith("nixl-")
        small = ("--bytes", "64KiB", "--repeat", "1", "--mode", "pull", "--transport", "nixl", "--json")
        done = probe(*(agent.address for agent in found), *small)
        assert done.returncode == 0, done.stderr
        assert {row["path"] for row in json.loads(done.stdout)["pairs"]} == {state["path"]}
