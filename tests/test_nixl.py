"""NIXL as a transport, on CPU memory: the public suite over each path that UCX has here, and its traps.

Run by ``make test-nixl``, once for each of two settings of UCX: a process has one agent.
"""

from __future__ import annotations

import json
import os

import pytest

from kvferry.cli import run
from kvferry.testing.transport_suite import BoardTests, CopyTests, EndTests, ProcessTests, TransportSuite
from kvferry.transport.nixl import NixlTransport
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
