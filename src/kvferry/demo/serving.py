"""``kvferry demo --serve``: a prefill server, a decode server and the proxy before them, until Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, Self

import msgspec

from kvferry.demo.records import DemoOptions
from kvferry.demo.storage import storage
from kvferry.errors import DeadlineError, InputError, LocalError
from kvferry.serve.listening import missing_extra

__all__ = ["Served", "serve_demo"]

# Loading the weights takes seconds; on a busy machine more.
_READY_SECONDS = 120.0
_END_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class Served(msgspec.Struct, frozen=True):
    """Where everything is, a command to try it with, and the page of each worker."""

    url: str
    prefill: str
    decode: str
    model: str
    curl: str
    live: tuple[str, ...]


def serve_demo(
    options: DemoOptions, listen: str, on_progress: Callable[[str], None], on_ready: Callable[[Served], None]
) -> None:
    """Start the three, say so, and wait for SIGINT or SIGTERM; no process is left behind.

    Raises InputError naming the option, LocalError when one of them ends by itself.
    """
    if options.tp != 1 or options.decode_tp not in (None, 1):
        raise InputError("tp: the servers have one rank each")
    if storage(options)[1] is not None or options.dtype != "float32":
        raise InputError("dtype: the servers store float32, alike on both sides")
    _check_packages()
    ended = threading.Event()
    with _until_signal(ended), contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_Child(role, _worker(options, role))) for role in ("prefill", "decode")
        ]
        said = []
        for worker in workers:
            on_progress(f"the {worker.name} worker loads the model")
            said.append(worker.ready(ended))
            if ended.is_set():
                return
        prefill, decode = said
        ends = ["--prefill", f"prefill={prefill['url']}", "--decode", f"decode={decode['url']}"]
        command = ["proxy", "--json", "--listen", listen, "--mode", options.mode, *ends]
        proxy = stack.enter_context(_Child("proxy", command))
        on_progress("the proxy starts")
        url = proxy.ready(ended).get("url", "")
        if ended.is_set():
            return
        live = (prefill["live"], decode["live"])
        on_ready(Served(url, prefill["url"], decode["url"], decode["model"], _curl(url, options), live))
        while not ended.wait(0.2):
            for child in (*workers, proxy):
                child.check()


def _check_packages() -> None:
    """Raises LocalError here, once, instead of in each of the three."""
    try:
        import_module("kvferry.proxy.app")
        import_module("kvferry.serve.running")
    except ImportError as error:
        raise missing_extra(error) from error


def _worker(options: DemoOptions, role: str) -> list[str]:
    kv = f"shm://demo-{os.getpid()}-{role}" if options.transport == "shm" else "tcp://127.0.0.1:0"
    block_size = options.block_size
    if role == "decode" and options.decode_block_size is not None:
        block_size = options.decode_block_size
    return [
        "serve", "--json", "--listen", "127.0.0.1:0", "--kv", kv, "--name", role,
        "--model", options.model, "--block-size", str(block_size),
    ]  # fmt: skip


def _curl(url: str, options: DemoOptions) -> str:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": options.prompt or "What does a ferry do?"}],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "stream": True,
    }
    if options.seed is not None:
        body["seed"] = options.seed
    data = shlex.quote(msgspec.json.encode(body).decode())
    return f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {data}"


@contextlib.contextmanager
def _until_signal(ended: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM set the event while this lasts."""
    before = {
        number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    # Also when this process is killed: three servers that nobody knows of would stay.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class _Child:
    """One command of ours; ended, and if it must be killed, when it is left."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        self.name = name
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvferry", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=os.environ | dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1"),
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - one system call, and no thread of ours holds a lock
        )
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}")
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def ready(self, ended: threading.Event) -> dict[str, Any]:
        """Its line; empty when the demo is to end first. Raises LocalError, DeadlineError."""
        for _ in range(int(_READY_SECONDS / 0.2)):
            if ended.is_set():
                return {}
            try:
                line = self._lines.get(timeout=0.2)
            except queue.Empty:
                continue
            if not line:
                self._process.wait(_END_SECONDS)
                self.check()
            said: dict[str, Any] = msgspec.json.decode(line)
            return said
        raise DeadlineError(f"the {self.name} server was not ready within {_READY_SECONDS:.0f} s")

    def check(self) -> None:
        """Raise LocalError if it has ended."""
        if (status := self._process.poll()) is not None:
            raise LocalError(
                f"the {self.name} server ended with status {status}", next_step="its own line above says why"
            )

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")
