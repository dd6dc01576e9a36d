"""The decode process of the engine suite: ``python -m kvferry.testing.engine_peer MODULE:FUNCTION``.

Reads one JSON line a request: the arguments of the engine's factory, and what is handed over.
Answers each with one JSON line, a ``Continued``. Ends when its input ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import Self

import msgspec

from kvferry.testing.engine_host import Continued, EngineHost, Handed, Steps, load_factory

__all__ = ["PeerProcess", "main"]

ANSWER_SECONDS = 300.0


class Order(msgspec.Struct, frozen=True):
    """Make the engine with these arguments, unless it is the last one made, and continue this."""

    arguments: list[str]
    handed: Handed


class PeerProcess:
    """The suite's side of the process."""

    def __init__(self, factory: str) -> None:
        command = [sys.executable, "-m", "kvferry.testing.engine_peer", factory]
        # The factory is found there as it is here, in a test file for instance.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )

    def continue_there(self, arguments: list[str], handed: Handed) -> tuple[Steps, int]:
        """The steps that the other process made of it, and the bytes that moved.

        Raises AssertionError with the other side's words where it could not, or said nothing in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = Order(arguments, handed)
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        self._process.stdin.flush()
        watchdog = threading.Timer(ANSWER_SECONDS, self._process.kill)
        watchdog.start()
        line = self._process.stdout.readline()
        watchdog.cancel()
        assert line, f"the peer process ended or said nothing for {ANSWER_SECONDS:g} s"
        answer = msgspec.json.decode(line, type=Continued)
        assert answer.steps is not None, f"the peer process: {answer.error}"
        return answer.steps, answer.nbytes

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Hosts:
    """The last host that was asked for, so that models do not pile up."""

    def __init__(self, factory: str) -> None:
        self._factory = load_factory(factory)
        self._arguments: list[str] | None = None
        self._host: EngineHost | None = None

    def get(self, arguments: list[str]) -> EngineHost:
        if self._host is None or arguments != self._arguments:
            self.close()
            self._host, self._arguments = EngineHost(self._factory(*arguments), "peer"), arguments
        return self._host

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
            self._host = None


def _answer(hosts: _Hosts, line: bytes) -> Continued:
    order = msgspec.json.decode(line, type=Order)
    try:
        host = hosts.get(order.arguments)
        nbytes = host.take_over(order.handed)
        steps = host.steps(order.handed.request_id)
        host.engine.release(order.handed.request_id)
    except Exception as error:  # noqa: BLE001 - told to the suite, which fails with it
        return Continued(error=f"{type(error).__name__}: {error}")
    return Continued(steps, nbytes)


def main() -> None:
    """Entry of the process."""
    (factory,) = sys.argv[1:]
    hosts = _Hosts(factory)
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print; the answers are ours alone
    for line in sys.stdin.buffer:
        answers.buffer.write(msgspec.json.encode(_answer(hosts, line)) + b"\n")
        answers.buffer.flush()
    hosts.close()


if __name__ == "__main__":
    main()
