"""Peers of transports by libraries: copies to be in the middle of, and two hosts in network namespaces."""

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
from kvferry.errors import KVFerryError
from kvferry.layout import CopyPlan
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_fixture import POOL_NBYTES
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread, Side
from kvferry.testing.transport_peer import pattern
from kvferry.testing.transport_processes import PeerProcess
from kvferry.transport.base import Arrived, Direction, Transport
from kvferry.transport.memory import create_shared

# The lower half of the pools, 200 times over: long enough to be in the middle of.
HALF = POOL_NBYTES // 2
LONG = make_plan([0, HALF // 2] * 200, [0, HALF // 2] * 200, [HALF // 2] * 400)
MARK = 0x5A


class Meeting:
    """This process's side of a connection to a peer process, and copies that run beside the test."""

    def __init__(self, transport_class: type[Transport], address: str) -> None:
        self.peer = PeerProcess(transport_class, address)
        self.loop = LoopThread()
        self.memory, guard = create_shared(POOL_NBYTES), ScriptedGuard()
        transport = transport_class(self.memory, guard)
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


READER = """
import sys, threading, time
from kvferry.errors import KVFerryError
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import LoopThread, Side
from kvferry.transport.base import Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.registry import transport_for
from kvferry.transport.security import Plain, Security

half, loop = {half}, LoopThread()
memory = create_shared(2 * half)
transport = transport_for(sys.argv[1])(memory, ScriptedGuard())
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


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
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


def ending_of_a_cut_copy(
    names: tuple[str, str], transport: type[Transport], rest: str
) -> tuple[str, str, float]:
    """Copy between two namespaces, take the link down in the middle: path, error, seconds until it came.

    ``rest`` is what follows the host and port in the listener's address.
    """
    peer = in_namespace(
        names[1],
        "b0",
        "-m",
        "kvferry.testing.transport_peer",
        f"{transport.__module__}:{transport.__qualname__}",
        f"{transport.scheme}://10.77.0.2:0?plain=yes{rest}",
        str(POOL_NBYTES),
    )
    try:
        assert peer.stdout is not None
        address = peer.stdout.readline().strip()
        assert address
        with in_namespace(names[0], "a0", "-c", READER.format(half=HALF), address) as reader:
            assert reader.stdout is not None
            moving, path = reader.stdout.readline().split()
            assert moving == "moving"
            subprocess.run(["ip", "-n", names[0], "link", "set", "a0", "down"], check=True)
            kind, seconds = reader.stdout.readline().split()
        return path, kind, float(seconds)
    finally:
        peer.kill()
        peer.wait()
        for pipe in (peer.stdin, peer.stdout):
            if pipe is not None:
                pipe.close()
