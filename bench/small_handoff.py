"""Where the time of a whole handoff of one small block goes: p50, CPU, loop turns, and shares by code.

    python bench/small_handoff.py [--transport tcp] [--count 400] [--json FILE]

Two endpoints of this process, first with transfer processes (the times and the CPU), then with their
nodes in threads under cProfile (turns of the loops, and the shares, which say what limits it).
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import datetime as dt
import json
import platform
import pstats
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from transfer import round_trip_seconds

from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool, client
from kvferry.transfer.process import serve
from kvferry.units import format_seconds

LAYOUT = PoolLayout.paged(range(1), kv_heads=1, head_dim=32, dtype="float32", block_size=16, num_blocks=64)
TABLE = BlockTable(0, np.array([3]))  # 2 KiB of K and 2 KiB of V


class Pair:
    """Two endpoints and their pools."""

    def __init__(self, transport: str, *, process: bool) -> None:
        self.pools = [Pool.allocate(LAYOUT) for _ in range(2)]
        names = ["shm://small-prefill", "shm://small-decode"]
        addresses = ["tcp://127.0.0.1:0"] * 2 if transport == "tcp" else names
        self.prefill, self.decode = (
            Endpoint.listen(address, pool=pool, process=process)
            for address, pool in zip(addresses, self.pools, strict=True)
        )

    def hand_over(self, number: int) -> float:
        """Offer, claim, move, commit, started, released; the seconds of it."""
        started = time.perf_counter()
        ticket = self.prefill.offer(None, [TABLE], tokens=16, request_id=f"r{number}")
        outcome = self.prefill.outcome(ticket)
        move = self.decode.pull(ticket, [TABLE])
        move.result()
        move.started()
        outcome.result(10)
        return time.perf_counter() - started

    def close(self) -> None:
        for endpoint in (self.prefill, self.decode):
            endpoint.close()
        for pool in self.pools:
            pool.close()


def cpu_seconds() -> float:
    """Of this process and its transfer processes."""
    this = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (this, *this.children()))


def timed(transport: str, count: int) -> dict[str, Any]:
    pair = Pair(transport, process=True)
    for number in range(50):
        pair.hand_over(number)
    before = cpu_seconds()
    times = [pair.hand_over(1000 + number) for number in range(count)]
    cpu = cpu_seconds() - before
    trips = round_trip_seconds(count)[10:]
    pair.close()
    return {
        "p50_seconds": median(times),
        "round_trip_seconds": median(trips),
        "round_trips": median(times) / median(trips),
        "cpu_seconds_each": cpu / count,
        "seconds": sorted(times),
    }


def profiled(transport: str, count: int) -> dict[str, Any]:
    """Loop turns of both nodes and the share of each package in their time, by a profiler."""
    profiles: list[cProfile.Profile] = []

    def run(sock: Any, memory: Any) -> None:
        profile = cProfile.Profile(time.thread_time)
        profiles.append(profile)
        profile.runcall(asyncio.run, serve(sock, memory))

    client._run_in_thread = run  # type: ignore[assignment]  # noqa: SLF001 - to profile the nodes alone
    pair = Pair(transport, process=False)
    for number in range(count):
        pair.hand_over(number)
    pair.close()
    shares: Counter[str] = Counter()
    turns = 0
    for profile in profiles:
        for (file, _, name), (_, calls, own, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
            shares[_part(file, name)] += own
            turns += calls if name == "_run_once" else 0
    whole = sum(shares.values())
    return {
        "loop_turns_each": turns / count,
        "shares": {part: seconds / whole for part, seconds in shares.most_common()},
    }


def _part(file: str, name: str) -> str:
    path = Path(file)
    if "kvferry" in path.parts:
        return f"kvferry.{path.parts[path.parts.index('kvferry', 1) + 1]}"
    if name in {"<method 'poll' of 'select.epoll' objects>", "<method 'recv' of '_socket.socket' objects>",
                "<method 'send' of '_socket.socket' objects>"}:  # fmt: skip
        return "system calls"
    for part in ("asyncio", "selectors", "numpy", "msgspec"):
        if part in file or part in name:
            return "asyncio" if part == "selectors" else part
    return "other built-in calls" if file == "~" else "standard library"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transport", default="tcp", choices=("tcp", "shm"))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = timed(options.transport, options.count) | profiled(options.transport, options.count)
    print(
        f"one block of 4 KiB over {options.transport}: p50 {format_seconds(found['p50_seconds'])} = "
        f"{found['round_trips']:.0f} round trips of {format_seconds(found['round_trip_seconds'])}; "
        f"CPU {format_seconds(found['cpu_seconds_each'])} in all processes, "
        f"{found['loop_turns_each']:.0f} loop turns"
    )
    for part, share in found["shares"].items():
        print(f"  {share:6.1%} {part}")
    found |= {"machine": platform.processor() or platform.machine(), "date": dt.date.today().isoformat()}
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
