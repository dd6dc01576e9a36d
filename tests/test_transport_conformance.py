"""Every transport of kvferry passes the public suite."""

from __future__ import annotations

import itertools
import os

import pytest

from kvferry.testing.transport_suite import BoardTests, CopyTests, EndTests, ProcessTests, TransportSuite
from kvferry.transport import shm_offer
from kvferry.transport.inproc import InprocTransport
from kvferry.transport.shm import ShmTransport
from kvferry.transport.tcp import TcpTransport
from tls_kit import SealedTcpTransport

_count = itertools.count()


def unique_name() -> str:
    return f"test-{os.getpid()}-{next(_count)}"


class TestInproc(TransportSuite):
    transport = InprocTransport
    has_processes = False
    malformed_addresses = (
        "inproc:",
        "inproc://",
        "shm://x",
        "inproc://a b",
        "inproc://a?streams=2",
        "inproc://a/b",
    )

    @classmethod
    def listen_address(cls) -> str:
        return f"inproc://{unique_name()}"


class TestShmMapped(TransportSuite):
    transport = ShmTransport
    reads_boards = True
    malformed_addresses = (
        "shm:x",
        "shm://",
        "tcp://x",
        "shm://a/b",
        "shm://a?path=rdma",
        "shm://a?x",
        "shm://" + 81 * "a",
    )

    @classmethod
    def listen_address(cls) -> str:
        return f"shm://{unique_name()}?path=mapped"


class TestShmCma(CopyTests, BoardTests, EndTests, ProcessTests):
    transport = ShmTransport
    reads_boards = True
    malformed_addresses = ("shm:",)

    @classmethod
    def listen_address(cls) -> str:
        return f"shm://{unique_name()}?path=cma"


class TestShmTwoThreads(CopyTests):
    transport = ShmTransport
    malformed_addresses = ("shm:",)

    @classmethod
    def listen_address(cls) -> str:
        return f"shm://{unique_name()}?streams=2"


class TestShmOutOfOrder(BoardTests):
    """On a processor whose loads may be seen out of order the board is not read; everything is asked for."""

    transport = ShmTransport

    @pytest.fixture(autouse=True)
    def other_machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shm_offer.platform, "machine", lambda: "aarch64")

    @classmethod
    def listen_address(cls) -> str:
        return f"shm://{unique_name()}"


class TestTcp(TransportSuite):
    transport = TcpTransport
    malformed_addresses = (
        "tcp:127.0.0.1:1",
        "tcp://",
        "tcp://127.0.0.1",
        "tcp://:7400",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:x",
        "tcp://::1:7400",
        "tcp://127.0.0.1:7400?streams=0",
        "tcp://127.0.0.1:7400?plain=maybe",
        "tcp://127.0.0.1:7400?colour=red",
        "tcp://0.0.0.0:7400",
        "tcp://192.0.2.1:7400",
        "tcp://[2001:db8::1]:7400",
        "tcp://127.0.0.1:7400/path",
    )

    @classmethod
    def listen_address(cls) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpTwoStreams(CopyTests, EndTests):
    transport = TcpTransport
    malformed_addresses = ("tcp:",)

    @classmethod
    def listen_address(cls) -> str:
        return "tcp://[::1]:0?streams=2"


class TestTcpSealed(TransportSuite):
    """Encrypted, on loopback."""

    transport = SealedTcpTransport
    malformed_addresses = ("tcp:", "tcp://127.0.0.1:7400?plain=yes", "tcp://127.0.0.1:7400?tls=yes")

    @classmethod
    def listen_address(cls) -> str:
        return "tcp://127.0.0.1:0"


class TestTcpSealedTwoStreams(CopyTests):
    transport = SealedTcpTransport
    malformed_addresses = ("tcp:",)

    @classmethod
    def listen_address(cls) -> str:
        return "tcp://[::1]:0?streams=2"
