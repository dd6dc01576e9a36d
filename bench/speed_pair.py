"""Two endpoints over two pools, and what they are measured beside: numpy.copyto, iperf3, a tcp round trip."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool, TransferRecord

LAYERS = 32
SECONDS = 120.0
WORD = np.uint64(0x9E3779B97F4A7C15)
_numbers = itertools.count()


@dataclass(frozen=True)
class Shape:
    """A payload over K and V of LAYERS layers, in blocks that lie in no order and do not touch.

    ``own_ids``: every layer has block ids of its own, as with a table for each; else all have the same.
    """

    nbytes: int
    block_nbytes: int
    own_ids: bool = False

    @property
    def blocks(self) -> int:
        """In each of the 2 x LAYERS regions."""
        return self.nbytes // (2 * LAYERS * self.block_nbytes)

    def layout(self) -> PoolLayout:
        groups = [range(layer, layer + 1) for layer in range(LAYERS)] if self.own_ids else [range(LAYERS)]
        return PoolLayout.beside(
            *(
                PoolLayout.paged(
                    layers,
                    kv_heads=1,
                    head_dim=self.block_nbytes // 64,
                    dtype="float32",
                    block_size=16,
                    num_blocks=2 * self.blocks,
                    name=f"layers-{layers.start}",
                )
                for layers in groups
            )
        )

    def tables(self, side: int) -> list[BlockTable]:
        """The even blocks at prefill (side 0), the odd ones at decode."""
        rng = np.random.default_rng(side)
        count = LAYERS if self.own_ids else 1
        return [BlockTable(0, 2 * rng.permutation(self.blocks) + side) for _ in range(count)]


class Pools:
    """The pools of both sides. Every 8 bytes of prefill's are unlike all others.

    ``private``: memory that an engine has for itself; its node then runs in the engine's process.
    """

    def __init__(self, shape: Shape, *, private: bool = False) -> None:
        self.shape = shape
        layout = shape.layout()
        self.sides = [
            Pool(np.zeros(layout.nbytes, np.uint8), layout) if private else Pool.allocate(layout)
            for _ in range(2)
        ]
        self.clear()  # so that its pages are there
        self.tables = [shape.tables(side) for side in range(2)]
        words = self.sides[0].array[: layout.nbytes // 8 * 8].view(np.uint64)
        np.multiply(np.arange(len(words), dtype=np.uint64), WORD, out=words)

    def clear(self) -> None:
        """Decode's bytes before a move: none of them is what will arrive."""
        self.sides[1].array[:] = 0

    def compare(self) -> None:
        """Each block of decode against its own of prefill, by address; raises AssertionError."""
        size = self.shape.block_nbytes
        for index, group in enumerate(self.sides[0].layout.groups):
            at = [np.asarray(tables[index].ids, np.int64) for tables in self.tables]
            for tensor in group.tensors:
                assert tensor.block_stride == size
                rows = [
                    pool.array[tensor.offset : tensor.offset + 2 * self.shape.blocks * size].reshape(-1, size)
                    for pool in self.sides
                ]
                for first in range(0, len(at[0]), 512):
                    some = slice(first, first + 512)
                    same = np.array_equal(rows[0][at[0][some]], rows[1][at[1][some]])
                    assert same, f"bytes of {tensor} differ after the move"

    def close(self) -> None:
        for pool in self.sides:
            pool.close()


class Pair:
    """Prefill and decode, each with its transfer process, over ``pools``; ``address`` for both."""

    def __init__(self, pools: Pools, address: str, *, integrity: bool) -> None:
        self.pools = pools
        self.tokens = 16 * pools.shape.blocks
        number = next(_numbers)
        scheme, _, options = address.partition("?")
        options = f"?{options}" if options else ""
        ends = [
            f"{scheme}://127.0.0.1:0{options}"
            if scheme == "tcp"
            else f"{scheme}://speed-{os.getpid()}-{number}-{side}{options}"
            for side in range(2)
        ]
        self.prefill, self.decode = (
            Endpoint.listen(end, pool=pool, name=name, integrity=integrity)
            for end, pool, name in zip(ends, pools.sides, ("prefill", "decode"), strict=True)
        )

    def move(self, mode: str) -> TransferRecord:
        """One whole handoff without a state; decode's record."""
        ours, theirs = self.pools.tables
        name = f"r{next(_numbers)}"
        if mode == "pull":
            ticket = self.prefill.offer(
                None, ours, tokens=self.tokens, request_id=name, lease_seconds=SECONDS
            )
            move = self.decode.pull(ticket, theirs, timeout_seconds=SECONDS)
        else:
            ticket = self.decode.reserve(name, self.tokens, theirs, lease_seconds=SECONDS)
            move = self.decode.arrival(ticket)
            push = self.prefill.push(ticket, ours, tokens=self.tokens, timeout_seconds=SECONDS)
            push.layers(0, LAYERS)
            push.commit(None)
        move.result()
        move.started()
        self.prefill.outcome(ticket).result(SECONDS)
        return move.record

    def pids(self) -> list[int]:
        return [endpoint.stats().pid for endpoint in (self.prefill, self.decode)]

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


class Plain:
    """What the copies are measured by: one thread, as many bytes, pages touched before."""

    def __init__(self, nbytes: int) -> None:
        self.src, self.dst = np.ones(nbytes, np.uint8), np.full(nbytes, 2, np.uint8)

    def seconds(self) -> float:
        started = time.perf_counter()
        np.copyto(self.dst, self.src)
        return time.perf_counter() - started


def iperf3(seconds: float) -> float:
    """Bytes per second that iperf3 receives: loopback, one stream, cubic, one hot buffer of 1 MiB."""
    program = shutil.which("iperf3")
    if program is None:
        raise SystemExit("speed: iperf3 is needed for the tcp rows (apt-get install iperf3), or --skip tcp")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = subprocess.Popen(
        [program, "-s", "-1", "-p", port, "--forceflush"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        while "listening" not in (line := server.stdout.readline()):
            if not line:
                raise SystemExit("speed: iperf3 -s ended before it listened")
        client = subprocess.run(
            [program, "-c", "127.0.0.1", "-p", port, "-t", str(seconds), "-C", "cubic", "-l", "1M", "-J"],
            capture_output=True,
            text=True,
            check=True,
        )
    finally:
        server.kill()
        server.wait()
    return float(json.loads(client.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """While the block runs, a thread of this process computes in Python and never lets go of the GIL."""
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            number += 1

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def busy_process() -> Iterator[None]:
    """The same in a process of its own, at this one's priority."""
    child = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        yield
    finally:
        child.kill()
        child.wait()


class Resident:
    """The most that each of some processes had resident beyond shared memory, looked at every 2 ms."""

    def __init__(self, pids: list[int]) -> None:
        self._pids = pids
        self.before = max(self._now())
        self.most = self.before
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, *self._now())

    def _now(self) -> list[int]:
        found = []
        for pid in self._pids:
            status = Path(f"/proc/{pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
            # RssShmem are the pools, this side's and the peer's.
            found.append(1024 * (int(lines["RssAnon"].split()[0]) + int(lines["RssFile"].split()[0])))
        return found
