"""Many small handoffs, some aborted, some across a restart; what is held stays flat: ``make soak``.

    python tests/soak.py [--handoffs 100000] [--seed 1] [--out FILE]

Three pairs of endpoints (shm, tcp, encrypted tcp), each side with a transfer process of its own, hand
requests over in both modes, eight at a time. Every fifth is aborted by one side at a random moment, and
now and then a transfer process is killed or an endpoint closed, and opened again. At each checkpoint,
with nothing under way, descriptors, threads, resident memory, maps of pools and boards, holds, grants and
the bytes of the last handoffs are taken; at the end they must be what they were at the first. Exit
status 1 and the difference if not.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import gc
import itertools
import json
import os
import platform
import random
import signal
import sys
import time
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.progress import track

from kvferry.errors import KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool, Timeouts
from tls_kit import NODE

SETS, TOKENS = 8, 10
LAYOUT = PoolLayout.paged(
    range(4), kv_heads=2, head_dim=32, dtype="float32", block_size=4, num_blocks=3 * SETS
)
TIMEOUTS = Timeouts(handshake=10.0, heartbeat=0.5, lost=5.0, abort=1.0, start=5.0)
SECONDS = 15.0
RESTART_EVERY = 300
#: What may come on top without a leak: a data channel and its thread each way, and what an allocator keeps.
SLACK = {"fds": 2, "threads": 4, "node_fds": 4, "node_threads": 4, "rss_nbytes": 24 << 20}


@dataclass(frozen=True)
class Held:
    """What one pair of endpoints and this process hold while nothing is under way."""

    fds: int
    threads: int
    shared_maps: int
    holds: int
    grants: int
    node_fds: int
    node_threads: int
    rss_nbytes: int


class Pair:
    """Two endpoints of one scheme, opened again when they were ended."""

    _names = itertools.count()

    def __init__(self, scheme: str, rng: random.Random) -> None:
        self.scheme, self._rng = scheme, rng
        self.ends = [self._open("prefill"), self._open("decode")]

    def _open(self, role: str) -> Endpoint:
        pool = Pool.allocate(LAYOUT)
        words = pool.array.view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        sealed = {"tls": NODE, "plain": "never"} if self.scheme == "tcp-sealed" else {}
        address = f"shm://soak-{os.getpid()}-{next(self._names)}"
        return Endpoint.listen(
            address if self.scheme == "shm" else "tcp://127.0.0.1:0",
            pool=pool,
            name=role,
            process=True,
            timeouts=TIMEOUTS,
            **sealed,
        )

    def restart(self) -> None:
        """One side begins a new life: closed, or killed first."""
        side = self._rng.randrange(2)
        old = self.ends[side]
        if self._rng.random() < 0.5:
            with contextlib.suppress(KVFerryError):
                os.kill(old.stats().pid, signal.SIGKILL)
        old.close()
        old.pool.close()
        self.ends[side] = self._open(("prefill", "decode")[side])

    def batch(self, count: int) -> tuple[int, int]:
        """That many handoffs at once, in the pair's sets of blocks; how many went through, and failed."""
        prefill, decode = self.ends
        waiting: list[tuple[str, object, list[Future[object]]]] = []
        done = failed = 0
        for number in range(count):
            src, dst = _tables(number)
            name = f"soak-{next(self._names)}"
            try:
                if self._rng.random() < 0.5:
                    ticket = prefill.offer(None, src, tokens=TOKENS, request_id=name, lease_seconds=SECONDS)
                    move = decode.pull(ticket, dst, timeout_seconds=SECONDS)
                else:
                    ticket = decode.reserve(name, TOKENS, dst, lease_seconds=SECONDS)
                    move = decode.arrival(ticket)
                    push = prefill.push(ticket, src, tokens=TOKENS, timeout_seconds=SECONDS)
                    push.layers(0, 4)
                    push.commit(None)
                if self._rng.random() < 0.2:
                    with contextlib.suppress(KVFerryError):
                        self._rng.choice(self.ends).withdraw(ticket, "the client went away")
            except KVFerryError:
                failed += 1
                continue
            waiting.append((name, move, [prefill.outcome(ticket), decode.outcome(ticket)]))
        for _, move, _ in waiting:
            try:
                move.result()  # type: ignore[attr-defined]
                move.started()  # type: ignore[attr-defined]
                done += 1
            except KVFerryError:
                failed += 1
        ends = [end for *_, outcomes in waiting for end in outcomes]
        _, late = wait(ends, 2 * SECONDS)
        assert not late, "an outcome did not come"
        return done, failed

    def held(self) -> Held:
        """Once nothing is under way."""
        until = time.monotonic() + SECONDS
        while any((s.transfers, s.holds, s.grants, s.copies) != (0, 0, 0, 0) for s in self._stats()):
            assert time.monotonic() < until, f"{self.scheme}: not idle: {self._stats()}"
            time.sleep(0.02)
        stats = self._stats()
        gc.collect()
        return Held(
            fds=len(os.listdir("/proc/self/fd")),
            threads=psutil.Process().num_threads(),
            shared_maps=Path("/proc/self/maps").read_text().count("memfd:kvferry-"),
            holds=sum(one.holds for one in stats),
            grants=sum(one.grants for one in stats),
            node_fds=sum(one.fds for one in stats),
            node_threads=sum(one.threads for one in stats),
            rss_nbytes=sum(_private_nbytes(pid) for pid in (os.getpid(), *(one.pid for one in stats))),
        )

    def _stats(self) -> list[object]:
        return [end.stats() for end in self.ends]

    def check_bytes(self) -> None:
        """One more handoff, and every live byte of it."""
        prefill, decode = self.ends
        decode.pool.array[:] = 0
        src, dst = _tables(0)
        ticket = prefill.offer(None, src, tokens=TOKENS, request_id="checked", lease_seconds=SECONDS)
        move = decode.pull(ticket, dst, timeout_seconds=SECONDS)
        move.result()
        move.started()
        wait([prefill.outcome(ticket), decode.outcome(ticket)], SECONDS)
        for tensor in LAYOUT.groups[0].tensors:
            sent, came = (
                end.pool.array[tensor.offset :][: 3 * SETS * tensor.block_stride].reshape(3 * SETS, -1)
                for end in self.ends
            )
            for index in range(TOKENS // 4):
                assert np.array_equal(came[dst.ids[index]], sent[src.ids[index]]), "wrong bytes"

    def close(self) -> None:
        for end in self.ends:
            end.close()
            end.pool.close()


def _tables(number: int) -> tuple[BlockTable, BlockTable]:
    first = 3 * (number % SETS)
    return BlockTable(0, np.array([first, first + 2, first + 1])), BlockTable(
        0, np.array([first + 1, first, first + 2])
    )


def _private_nbytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def run(handoffs: int, seed: int) -> dict[str, object]:
    rng = random.Random(seed)
    pairs = [Pair(scheme, rng) for scheme in ("shm", "tcp", "tcp-sealed")]
    first: list[Held] = []
    done = failed = restarts = 0
    batches = max(1, handoffs // SETS)
    checkpoint = max(20, batches // 10)
    started = time.monotonic()
    for number in track(range(batches), description="handoffs", console=_stderr()):
        pair = pairs[number % len(pairs)]
        went, broke = pair.batch(SETS)
        done, failed = done + went, failed + broke
        if rng.randrange(RESTART_EVERY // SETS) == 0:
            pair.restart()
            restarts += 1
        if (number + 1) % checkpoint == 0 or number + 1 == batches:
            for one in pairs:
                one.check_bytes()
            found = [one.held() for one in pairs]
            first = first or found
    last = [one.held() for one in pairs]
    for pair in pairs:
        pair.close()
    return {
        "handoffs": batches * SETS,
        "done": done,
        "aborted_or_failed": failed,
        "restarts": restarts,
        "seconds": time.monotonic() - started,
        "first": {pair.scheme: asdict(held) for pair, held in zip(pairs, first, strict=True)},
        "last": {pair.scheme: asdict(held) for pair, held in zip(pairs, last, strict=True)},
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
    }


def grown(result: dict[str, object]) -> list[str]:
    """What is more at the end than at the first checkpoint."""
    last = result["last"]
    return [
        f"{scheme}: {name} {before} -> {last[scheme][name]}"  # type: ignore[index]
        for scheme, held in result["first"].items()  # type: ignore[attr-defined]
        for name, before in held.items()
        if last[scheme][name] > before + SLACK.get(name, 0)  # type: ignore[index]
    ]


def _stderr() -> object:
    from rich.console import Console

    return Console(stderr=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--handoffs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = run(arguments.handoffs, arguments.seed)
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for line in (more := grown(result)):
        print(line, file=sys.stderr)
    return 1 if more else 0


if __name__ == "__main__":
    sys.exit(main())
