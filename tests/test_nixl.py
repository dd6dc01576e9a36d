"""NIXL as a transport, on CPU memory: the public suite over each path that UCX has here, and its traps.

Run by ``make test-nixl``, once for each of two settings of UCX: a process has one agent.
"""

from __future__ import annotations

import os

import pytest

from kvferry.testing.transport_suite import CopyTests, EndTests, ProcessTests, TransportSuite
from kvferry.transport.nixl import NixlTransport

PROBLEM = NixlTransport.unavailable()
IS_TCP = os.environ.get("UCX_TLS") == "tcp"
pytestmark = [pytest.mark.skipif(PROBLEM is not None, reason=f"{PROBLEM}")]


class TestNixl(TransportSuite):
    """By the way that is the default on this path: reads over cma, pushes over tcp."""

    transport = NixlTransport
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


class TestNixlTheOtherWay(CopyTests, EndTests, ProcessTests):
    """Pushes over cma, reads over tcp."""

    transport = NixlTransport
    malformed_addresses = ("nixl:",)

    @classmethod
    def listen_address(cls) -> str:
        return f"nixl://127.0.0.1:0?move={'read' if IS_TCP else 'push'}"
