"""The conformance suite of transports. Subclass it in a test file of your own:

    class TestMine(TransportSuite):
        transport = MyTransport
        malformed_addresses = ("mine:", "mine://no such place")

        @classmethod
        def listen_address(cls) -> str:
            return f"mine://{uuid.uuid4().hex}"

pytest then collects some sixty tests: frames, copies against plain loops, digests, guards, boards, every
way for a copy or a connection to end, leaks, and a peer in another process. ``make_memory`` may be
overridden where a transport needs memory of its own kind; ``reads_boards = True`` says that copies which
the peer has posted ask nobody. Needs pytest and hypothesis.
"""

from __future__ import annotations

import sys

import pytest

PARTS = [
    f"kvferry.testing.transport_{part}"
    for part in ("boards", "copies", "ends", "fixture", "frames", "processes")
]
pytest.register_assert_rewrite(*(part for part in PARTS if part not in sys.modules))

from kvferry.testing.transport_boards import BoardTests  # noqa: E402 - after its asserts are registered
from kvferry.testing.transport_copies import CopyTests  # noqa: E402
from kvferry.testing.transport_ends import EndTests  # noqa: E402
from kvferry.testing.transport_frames import FrameTests  # noqa: E402
from kvferry.testing.transport_processes import ProcessTests  # noqa: E402

__all__ = ["BoardTests", "CopyTests", "EndTests", "FrameTests", "ProcessTests", "TransportSuite"]


class TransportSuite(FrameTests, CopyTests, BoardTests, EndTests, ProcessTests):
    """All parts; a transport that passes them can carry every transfer of kvferry."""
