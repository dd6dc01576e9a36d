"""vLLM's API server as a child process, and what a client needs of it. Shared by tests and bench."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

__all__ = ["Server", "free_port", "post", "stream"]

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def post(url: str, body: dict[str, Any], timeout: float = 120.0) -> dict[str, Any]:
    """The answer, or ``{"status": ..., "error": ...}`` for an HTTP error."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:
            answer = dict(json.load(response))
            answer["headers"] = {key.lower(): value for key, value in response.headers.items()}
            return answer
    except urllib.error.HTTPError as error:
        return {"status": error.code, "error": error.read().decode()}


def stream(url: str, body: dict[str, Any], timeout: float = 120.0) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer as they come."""
    request = urllib.request.Request(
        url, json.dumps(body | {"stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        for line in response:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line.removeprefix(b"data: "))


class Server:
    """One API server with its engine and worker processes, in a process group of their own."""

    def __init__(
        self, model: Path, log: Path, kv_transfer: dict[str, Any] | None, core: int, **options: Any
    ) -> None:
        self.log = log
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "dtype": "float32",
            "max-model-len": 1024,
            "max-num-seqs": 16,
            "block-size": 32,
            "num-gpu-blocks-override": 1024,
            "host": "127.0.0.1",
            "port": self.port,
            "served-model-name": "m",
        } | {key.replace("_", "-"): value for key, value in options.items()}
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--enforce-eager", "--disable-uvicorn-access-log"]
        for key, value in given.items():
            command += [f"--{key}"] if value is None else [f"--{key}", str(value)]
        if kv_transfer is not None:
            command += ["--kv-transfer-config", json.dumps(kv_transfer)]
        environment = os.environ | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, start_new_session=True
            )

    def wait(self, seconds: float = 500.0) -> None:
        """Until it answers; raises RuntimeError with its log when it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                return
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the server did not start: {self.log.read_text()[-4000:]}")
            time.sleep(0.3)

    def complete(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """One completion; greedy and to full length unless told otherwise."""
        return post(f"{self.url}/v1/completions", body_of(prompt, **fields))

    def prefill(self, prompt: list[int], **fields: Any) -> Any:
        """The ``kv_transfer_params`` for decode."""
        answer = self.complete(prompt, **fields | {"max_tokens": 1, "kv_transfer_params": PREFILL})
        return answer.get("kv_transfer_params")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 where it is not there."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

    def processes(self) -> list[psutil.Process]:
        """The server and all its children."""
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def cpu_seconds(self) -> float:
        """Processor time of all its processes so far."""
        return sum(self.thread_seconds().values())

    def thread_seconds(self) -> dict[str, float]:
        """Processor time of each thread so far, by process and thread id and name."""
        found = {}
        for process in self.processes():
            for thread in process.threads():
                with contextlib.suppress(FileNotFoundError):  # it has just ended
                    name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
                    found[f"{process.pid} {thread.id} {name}"] = thread.user_time + thread.system_time
        return found

    def signal(self, number: int) -> None:
        """Send a signal to its whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it for certain. Safe to call twice."""
        self.signal(signal.SIGKILL)
        self._process.wait(30)


def body_of(prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A completion request by token ids whose answer has token ids."""
    return {
        "model": "m",
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 24,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }
