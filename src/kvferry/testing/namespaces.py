"""Several hosts on one machine: network namespaces on a bridge, with shaped, asymmetric or cut links.

Linux, as root, with iproute2 (``ip`` and ``tc``) and the kernel's veth and tbf. Rates are of what a node
sends. Everything is removed at the end, on SIGTERM too; processes that were started inside are their
starter's to end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from types import FrameType, TracebackType
from typing import NoReturn, Self

__all__ = ["Namespaces", "why_no_namespaces"]

# A token bucket lets its burst through at once, which is a second, faster link for small payloads. It
# has to hold a few packets, and what the rate brings between two ticks of a timer.
_BURST_BYTES, _BURST_SECONDS = 6000, 0.00026
_LATENCY = "50ms"
_SECONDS = 30
_CLONE_NEWNET = 0x40000000


def why_no_namespaces() -> str:
    """Why this machine cannot make them, with the fix; "" where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool} here: install iproute2"
    name = f"kvferry-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    try:
        _run("ip", "-n", name, "link", "add", "veth-a", "type", "veth", "peer", "name", "veth-b")
        _run("tc", "-n", name, "qdisc", "add", "dev", "veth-a", "root", *_shape(1e9))
        _run("ip", "-n", name, "link", "add", "bridge", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"this kernel lacks veth, bridge or tbf: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return ""


class Namespaces:
    """``count`` namespaces, 10.99.0.1 and on, on one bridge in a namespace of its own."""

    def __init__(self, count: int) -> None:
        stem = f"kvferry-{os.getpid()}"
        self.names = [f"{stem}-{number}" for number in range(count)]
        self.hosts = [f"10.99.0.{number + 1}" for number in range(count)]
        self._switch = f"{stem}-switch"
        self._made: list[str] = []
        self._took_sigterm = False

    def __enter__(self) -> Self:
        # Untouched, SIGTERM ends a program without its __exit__, and namespaces outlive their maker.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            signal.signal(signal.SIGTERM, _end)
            self._took_sigterm = True
        try:
            self._make(self._switch)
            _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
            for number, (name, host) in enumerate(zip(self.names, self.hosts, strict=True)):
                self._make(name)
                port = f"port{number}"
                _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port)
                _run("ip", "-n", name, "link", "set", port, "netns", self._switch)
                _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
                _run("ip", "-n", name, "addr", "add", f"{host}/24", "dev", "eth0")
                _run("ip", "-n", name, "link", "set", "eth0", "up")
                _run("ip", "-n", name, "link", "set", "lo", "up")
            for number in range(len(self.names)):
                self._wait_plugged(number)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            while self._made:
                _run("ip", "netns", "del", self._made.pop())
        finally:
            if self._took_sigterm:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._took_sigterm = False

    def inside(self, number: int) -> list[str]:
        """The command that runs another one in a namespace."""
        return ["ip", "netns", "exec", self.names[number]]

    def enter(self, number: int) -> None:
        """The calling thread, and whatever it starts from now on, is in a namespace. Raises OSError."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[number]}", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {self.names[number]}")

    def shape(self, number: int, bits_per_second: float) -> None:
        """What the node sends is held to this rate."""
        _run(
            "tc",
            "-n",
            self.names[number],
            "qdisc",
            "replace",
            "dev",
            "eth0",
            "root",
            *_shape(bits_per_second),
        )

    def cut(self, number: int, host: str) -> None:
        """The node sends nothing to ``host`` any more, and is not told so by the network."""
        _run("ip", "-n", self.names[number], "route", "replace", "blackhole", f"{host}/32")

    def unplug(self, number: int) -> None:
        """The node's cable is pulled (``ip link set down`` at the switch)."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def plug(self, number: int) -> None:
        """The cable is in again, and both ends of it have noticed. Raises TimeoutError."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "up")
        self._wait_plugged(number)

    def _wait_plugged(self, number: int) -> None:
        """The kernel tells of a link by and by; a library that looks at it before finds no device."""
        until = time.monotonic() + _SECONDS
        ends = ((self._switch, f"port{number}"), (self.names[number], "eth0"))
        while not all("state UP" in _run("ip", "-n", name, "link", "show", device) for name, device in ends):
            if time.monotonic() > until:
                raise TimeoutError(f"the link of {self.names[number]} did not come up")
            time.sleep(0.01)

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # a second one does not end what the first one began
    raise SystemExit(128 + number)


def _shape(bits_per_second: float) -> list[str]:
    burst = max(_BURST_BYTES, int(bits_per_second / 8 * _BURST_SECONDS))
    return ["tbf", "rate", f"{bits_per_second:.0f}bit", "burst", f"{burst}b", "latency", _LATENCY]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
