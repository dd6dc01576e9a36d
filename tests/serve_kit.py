"""What the tests of servers share: server processes on loopback, and a client."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Self

import httpx

from conftest import wait_until

COMMAND = [sys.executable, "-m", "kvferry"]
PROMPT = "A ferry carries what it is given, to where it is wanted, and nothing else. " * 3
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 1.1, "seed": 11, "top_p": 0.95, "presence_penalty": 0.4, "repetition_penalty": 1.1}
START_SECONDS = 120.0  # of up to three processes, on a machine that others use too


class Process:
    """A command that says with one JSON line on stdout that it is ready; ended when the test leaves it."""

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
        )
        self.said = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._readers = [
            threading.Thread(target=self._read_stdout, daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def ready(self) -> dict[str, Any]:
        """The line; fails with what the process said on stderr when it ends or is silent instead."""
        try:
            line = self._lines.get(timeout=START_SECONDS)
        except queue.Empty:
            line = ""
        assert line, f"not ready: {self.said}"
        self.line: dict[str, Any] = json.loads(line)
        return self.line

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """As a crash does."""
        self._process.kill()
        self._process.wait()

    def interrupt(self) -> int:
        """As Ctrl-C does; returns the exit status."""
        self.signal()
        return self.wait()

    def signal(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def wait(self) -> int:
        return self._process.wait(30)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for reader in self._readers:
            reader.join(10)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> Self:
        self.ready()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_stdout(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.said += line


class Server(Process):
    """A server of the tiny random model, and its client."""

    def __init__(
        self, *arguments: str, verb: str = "serve", model: tuple[str, ...] = ("--model", "tiny")
    ) -> None:
        super().__init__(verb, "--json", "--listen", "127.0.0.1:0", *model, *arguments)

    def ready(self) -> dict[str, Any]:
        line = super().ready()
        self.url = line["url"]
        self.client = httpx.Client(base_url=self.url, timeout=60.0)
        return line

    def close(self) -> None:
        if hasattr(self, "client"):
            self.client.close()
        super().close()

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return self.client.post(path, json=body)

    def complete(self, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
        """The answer of a request that has to succeed."""
        answer = self.post(body, path)
        assert answer.status_code == 200, answer.text
        parsed: dict[str, Any] = answer.json()
        return parsed

    def stream(self, body: dict[str, Any], path: str = "/v1/completions") -> list[dict[str, Any]]:
        """All events of a stream; the last has to be [DONE], or an error."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            # Not by iter_lines, which ends lines at what a random model may write.
            lines = [line for line in answer.read().decode().split("\n") if line]
        assert all(line.startswith("data: ") for line in lines)
        if lines[-1] == "data: [DONE]":
            lines.pop()
        else:
            assert "error" in json.loads(lines[-1][6:])
        return [json.loads(line[6:]) for line in lines]

    def health(self) -> dict[str, Any]:
        parsed: dict[str, Any] = self.client.get("/health").json()
        return parsed

    def is_empty(self) -> bool:
        """Nothing runs, waits or is held."""
        now = self.health()
        return now["free_blocks"] == now["num_blocks"] and not any(
            now[key] for key in ("waiting", "prefilling", "arriving", "running")
        )

    def wait_empty(self, seconds: float = 20.0) -> None:
        wait_until(self.is_empty, seconds, self.health)


def text_of(answer: dict[str, Any]) -> str:
    """The text of a whole answer, completion or chat."""
    (choice,) = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def text_of_stream(events: list[dict[str, Any]]) -> str:
    """The text of a streamed one."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices
    )


def asked(tokens: int = 16, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
    """A completion body of so many tokens, whatever the model says."""
    return {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **fields}
