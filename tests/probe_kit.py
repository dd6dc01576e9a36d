"""Agents as real processes, on loopback or each in a network namespace of its own with a shaped link."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import pytest

__all__ = ["AgentProcess", "Namespaces", "agents", "probe", "why_no_namespaces"]

COMMAND = [sys.executable, "-m", "kvferry"]
READY_SECONDS = 60


@dataclass(slots=True, eq=False)
class AgentProcess:
    """A running agent; ``ready`` is the object of its ready line."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@contextlib.contextmanager
def agents(*arguments: Sequence[str], inside: Sequence[Sequence[str]] = ()) -> Iterator[list[AgentProcess]]:
    """One agent for each list of arguments; ``inside``: the command to start each one with, if any.

    Ended by SIGTERM at the end; one that does not end by itself fails the test.
    """
    started: list[subprocess.Popen[str]] = []
    try:
        for index, options in enumerate(arguments):
            prefix = inside[index] if inside else ()
            command = [*prefix, *COMMAND, "agent", "--json", *options]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        found = []
        for process in started:
            assert process.stdout is not None
            found.append(AgentProcess(process, json.loads(process.stdout.readline() or "{}")))
        yield found
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        left = []
        for process in started:
            assert process.stdout is not None
            process.stdout.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                left.append(process.args)
        assert not left, f"agents did not end: {left}"


def probe(*arguments: str, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Run ``kvferry probe``."""
    return subprocess.run(
        [*COMMAND, "probe", *arguments], capture_output=True, text=True, timeout=timeout, check=False
    )


def why_no_namespaces() -> str:
    """Why this machine cannot make network namespaces, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no {tool}: apt-get install iproute2"
    name = f"kvferry-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    try:
        _run("ip", "-n", name, "link", "add", "veth-a", "type", "veth", "peer", "name", "veth-b")
        _run("tc", "-n", name, "qdisc", "add", "dev", "veth-a", "root", "tbf", *_shape("1gbit"))
    except subprocess.CalledProcessError as error:
        return f"veth or tbf is not in this kernel: {error.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return ""


class Namespaces:
    """``count`` namespaces on one bridge, 10.99.0.1 and on; gone at the end, with all that is in them."""

    def __init__(self, count: int) -> None:
        if why := why_no_namespaces():
            pytest.skip(why)
        self._stem = f"kvferry-{os.getpid()}"
        self.names = [f"{self._stem}-{number}" for number in range(count)]
        self.hosts = [f"10.99.0.{number + 1}" for number in range(count)]
        self._switch = f"{self._stem}-switch"
        self._made: list[str] = []

    def __enter__(self) -> Self:
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
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            _run("ip", "netns", "del", name)

    def inside(self, number: int) -> list[str]:
        """The command that runs another one in a namespace."""
        return ["ip", "netns", "exec", self.names[number]]

    def shape_out(self, number: int, rate: str) -> None:
        """What the node sends is held to ``rate`` (``100mbit``)."""
        _run("tc", "-n", self.names[number], "qdisc", "replace", "dev", "eth0", "root", "tbf", *_shape(rate))

    def cut(self, number: int) -> None:
        """The node's cable is pulled."""
        _run("ip", "-n", self._switch, "link", "set", f"port{number}", "down")

    def block(self, number: int, host: str) -> None:
        """The node sends nothing to ``host`` any more."""
        _run("ip", "-n", self.names[number], "route", "add", "blackhole", f"{host}/32")

    def agent_options(self, number: int, *more: str) -> list[str]:
        """Of an agent in the namespace."""
        return ["--listen", f"tcp://{self.hosts[number]}:0?plain=yes", "--name", f"n{number}", *more]

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", name)
        self._made.append(name)


def _shape(rate: str) -> list[str]:
    # The burst is a few segmentation-offload packets of 64 KiB: less would drop them, more would be
    # a second, faster link for small payloads.
    return ["rate", rate, "burst", "160kb", "latency", "50ms"]


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
