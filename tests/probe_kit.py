"""Agents as real processes, on loopback or each in a network namespace of its own with a shaped link."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from kvferry.testing.namespaces import Namespaces, why_no_namespaces

__all__ = [
    "AgentProcess",
    "agent_options",
    "agents",
    "children",
    "namespaces",
    "probe",
    "probing",
]

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


def probe(*arguments: str, inside: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run ``kvferry probe``, perhaps by another command."""
    return subprocess.run(
        [*inside, *COMMAND, "probe", *arguments], capture_output=True, text=True, timeout=100, check=False
    )


@contextlib.contextmanager
def probing(*arguments: str, inside: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """``kvferry probe`` under way; killed where it has not ended by itself."""
    command = [*inside, *COMMAND, "probe", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[psutil.Process]:
    """The processes that a process started and that are still there."""
    return psutil.Process(pid).children(recursive=True)


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[Namespaces]:
    """Hosts of their own, or a skip that says why this machine cannot have them."""
    if why := why_no_namespaces():
        pytest.skip(why)
    with Namespaces(count) as hosts:
        yield hosts


def agent_options(hosts: Namespaces, number: int, *more: str) -> list[str]:
    """Of an agent in a namespace, on a network that is trusted."""
    return ["--listen", f"tcp://{hosts.hosts[number]}:0?plain=yes", "--name", f"n{number}", *more]
