"""Speed of the transports between two processes, beside a copy of the same bytes in the same run.

    python bench/transports.py [--nbytes 256MiB] [--repeat 5] [--out FILE]

One process holds the source pool and serves; this one reads into its own pool, and writes where
the transport can. Pools are touched before. Each measured copy stands beside one ``np.copyto`` of
as many contiguous bytes, and its bytes are compared afterwards. Prints a table and, with ``--out``,
writes one JSON object. Nothing is asserted about speed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvferry.errors import TransportError
from kvferry.layout import BlockTable, CopyPlan, PoolLayout, copy_plan
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.transport_pair import TRANSFER_ID, LoopThread
from kvferry.transport import Connection, Copy, Memory, create_shared, transport_for
from kvferry.units import parse_bytes

SECONDS = 120.0
LAYERS = 80
WORD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Case:
    """One row: a transport address, a block size, and how it is copied."""

    name: str
    address: str
    block_nbytes: int
    direction: str = "read"
    integrity: bool = False
    same_ids: bool = True


def cases() -> list[Case]:
    name = uuid.uuid4().hex
    rows = []
    for block in (32 << 10, 4 << 10):
        for streams in (1, 2):
            tail = f"streams={streams}"
            rows += [
                Case(f"shm mapped, {streams} threads", f"shm://{name}?path=mapped&{tail}", block),
                Case(f"shm cma, {streams} threads", f"shm://{name}?path=cma&{tail}", block),
                Case(f"tcp read, {streams} streams", f"tcp://127.0.0.1:0?{tail}", block),
                Case(f"tcp write, {streams} streams", f"tcp://127.0.0.1:0?{tail}", block, "write"),
                Case(
                    f"tcp read, summed, {streams} streams", f"tcp://127.0.0.1:0?{tail}", block, integrity=True
                ),
                Case(
                    f"tcp write, summed, {streams} streams", f"tcp://127.0.0.1:0?{tail}", block, "write", True
                ),
            ]
        rows += [
            Case("shm mapped, summed", f"shm://{name}?path=mapped", block, integrity=True),
            Case("shm mapped, other ids in each layer", f"shm://{name}?path=mapped", block, same_ids=False),
            Case("shm cma, summed", f"shm://{name}?path=cma", block, integrity=True),
        ]
    return rows


def make_plan(nbytes: int, block_nbytes: int, pool_nbytes: int, same_ids: bool) -> CopyPlan:
    """Blocks in random places of both pools, K and V apart in LAYERS layers, chunks of about 1 MiB."""
    regions = 2 * LAYERS
    block_size = block_nbytes // 256  # one KV head of 128 float16 elements
    num_blocks = pool_nbytes // regions // block_nbytes
    layout = PoolLayout.paged(
        range(LAYERS), kv_heads=1, head_dim=128, dtype="float16", block_size=block_size, num_blocks=num_blocks
    )
    rng = np.random.default_rng(7)
    count = nbytes // regions // block_nbytes
    ids = [rng.permutation(num_blocks)[:count] for _ in range(2)]
    plan = copy_plan(layout, layout, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], count * block_size)
    if same_ids:
        return plan
    region = num_blocks * block_nbytes
    own_ids = [
        np.concatenate(
            [r * region + rng.permutation(num_blocks)[:count] * block_nbytes for r in range(regions)]
        )
        for _ in range(2)
    ]
    total = regions * count
    per_chunk = (1 << 20) // block_nbytes
    starts = np.append(np.arange(0, total, per_chunk), total)
    return CopyPlan(
        own_ids[0],
        own_ids[1],
        np.full(total, block_nbytes, np.int64),
        starts,
        np.arange(len(starts) - 1),
        np.ones(len(starts) - 1, np.bool_),
    )


def expected_words(offset: np.ndarray, nbytes: int) -> np.ndarray:
    """What ``fill`` put at these offsets, 8 bytes a word, one row an offset."""
    return (offset[:, None] // 8 + np.arange(nbytes // 8)).astype(np.uint64) * WORD


def fill(memory: Memory) -> None:
    """Every 8 bytes differ from all others."""
    words = memory.array.view(np.uint64)
    np.multiply(np.arange(len(words), dtype=np.uint64), WORD, out=words)


def check(memory: Memory, at: np.ndarray, content_of: np.ndarray, block_nbytes: int) -> None:
    """The blocks at ``at`` hold what ``fill`` put at ``content_of``."""
    words = memory.array.view(np.uint64)
    for first in range(0, len(at), 1024):
        rows = slice(first, first + 1024)
        found = words[at[rows, None] // 8 + np.arange(block_nbytes // 8)]
        assert np.array_equal(found, expected_words(content_of[rows], block_nbytes)), "wrong bytes"


async def serve(pool_nbytes: int) -> None:
    """The other process: for each address that it is given, one connection until that is closed."""
    memory = create_shared(pool_nbytes)
    fill(memory)
    for line in sys.stdin:
        accepted: asyncio.Queue[Connection] = asyncio.Queue()
        transport = transport_for(line)(memory, ScriptedGuard())
        listener = await transport.listen(line.strip(), accepted.put_nowait)
        print(listener.address, flush=True)
        connection = await accepted.get()
        with contextlib.suppress(TransportError):
            while await connection.receive() == b"fill":
                fill(memory)
                await connection.send(b"filled")
        await connection.close()
        await listener.close()


class Bench:
    """This process: its pool, the memory to compare with, and the other process."""

    def __init__(self, nbytes: int, repeat: int) -> None:
        self.nbytes, self.repeat = nbytes, repeat
        self.pool_nbytes = 2 * nbytes
        self.memory = create_shared(self.pool_nbytes)
        self.plain = create_shared(nbytes), create_shared(nbytes)
        self.loop = LoopThread()
        command = [sys.executable, __file__, "--serve", str(self.pool_nbytes)]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.loop.close()

    def run(self, case: Case) -> dict[str, object]:
        plan = make_plan(self.nbytes, case.block_nbytes, self.pool_nbytes, case.same_ids)
        connection = self._connect(case.address)
        seconds, ratios, cpu = [], [], []
        try:
            for repetition in range(self.repeat + 1):
                plain = timed(lambda: np.copyto(self.plain[0].array, self.plain[1].array))
                took, used = self._copy_and_check(connection, case, plan)
                if repetition:  # the first warms up sockets, tables and page tables
                    seconds.append(took)
                    ratios.append(plain / took * plan.total_nbytes / self.nbytes)
                    cpu.append(used)
        finally:
            self.loop.run(connection.close())
        return {
            **asdict(case),
            "path": connection.path,
            "notes": connection.notes,
            "nbytes": plan.total_nbytes,
            "pieces": plan.num_pieces,
            "seconds": seconds,
            "bytes_per_second_best": plan.total_nbytes / min(seconds),
            "bytes_per_second_median": plan.total_nbytes / statistics.median(seconds),
            "cpu_seconds_per_gib_here_and_there": (
                sum(cpu) / len(cpu) * (1 << 30) / plan.total_nbytes
            ).tolist(),
            "memcpy_ratio_median": statistics.median(ratios),
            "memcpy_ratio_min": min(ratios),
            "memcpy_ratio_max": max(ratios),
        }

    def _connect(self, address: str) -> Connection:
        assert self.server.stdin is not None
        assert self.server.stdout is not None
        print(address, file=self.server.stdin, flush=True)
        bound = self.server.stdout.readline().strip()
        return self.loop.run(transport_for(bound)(self.memory, ScriptedGuard()).connect(bound, SECONDS))

    def _copy_and_check(self, connection: Connection, case: Case, plan: CopyPlan) -> tuple[float, np.ndarray]:
        """One copy's seconds and CPU seconds; raises AssertionError unless every byte is right."""
        if case.direction == "read":
            self.memory.array[:] = 0
            took, used = self._timed_copy(connection.read, plan, case.integrity)
            check(self.memory, plan.dst_offset, plan.src_offset, case.block_nbytes)
            return took, used
        fill(self.memory)
        took, used = self._timed_copy(connection.write, plan, case.integrity)
        self.memory.array[:] = 0
        back = dataclasses.replace(plan, src_offset=plan.dst_offset, dst_offset=plan.src_offset, runs=())
        self._timed_copy(connection.read, back, integrity=False)
        check(self.memory, plan.src_offset, plan.src_offset, case.block_nbytes)
        self.loop.run(self._refill(connection))
        return took, used

    def _timed_copy(
        self, call: Callable[[Copy], object], plan: CopyPlan, integrity: bool
    ) -> tuple[float, np.ndarray]:
        copy = Copy(TRANSFER_ID, plan, time.monotonic() + SECONDS, integrity)
        before = self._cpu_seconds()
        took = timed(lambda: call(copy))
        return took, self._cpu_seconds() - before

    def _cpu_seconds(self) -> np.ndarray:
        """What this and the other process have used so far; the kernel counts in 10 ms for others."""
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        there = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return np.array([time.process_time(), there])

    @staticmethod
    async def _refill(connection: Connection) -> None:
        await connection.send(b"fill")
        await connection.receive()


def timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def machine() -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    commit = subprocess.run(
        ["/usr/bin/env", "git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    )
    return {
        "cpu": next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
            platform.machine(),
        ),
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load_at_start": os.getloadavg()[0],
        "pinned": False,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip(),
    }


def scheduling() -> str:
    """How the processes are scheduled, where that is not the rule (``chrt -r 5``, ``nice -n -10``)."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        return f"real-time priority {os.sched_getparam(0).sched_priority}"
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    # Between sessions the group's counts, and the process's own only within its session: sched(7).
    group = Path("/proc/self/autogroup")
    of_group = int(group.read_text().split()[-1]) if group.exists() else 0
    said = [f"niceness {niceness}"] if niceness else []
    return " in ".join([*said, f"a session of niceness {of_group}"] if of_group else said)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nbytes", default="256MiB", help="payload of each copy")
    parser.add_argument("--repeat", type=int, default=5, help="measured repetitions of each row")
    parser.add_argument("--only", default="", help="rows whose name holds this")
    parser.add_argument("--out", help="write the results there as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(int(arguments.serve)))
        return
    result = {"machine": machine(), "rows": []}
    bench = Bench(parse_bytes(arguments.nbytes, "--nbytes"), arguments.repeat)
    print(f"{'':42}{'block':>8}{'GB/s':>8}{'best':>8}  ratio to copyto (min to max)  CPU s/GiB here, there")
    for case in cases():
        if arguments.only in case.name:
            row = bench.run(case)
            result["rows"].append(row)
            print(
                f"{case.name:42}{case.block_nbytes >> 10:>4} KiB"
                f"{row['bytes_per_second_median'] / 1e9:>8.2f}{row['bytes_per_second_best'] / 1e9:>8.2f}"
                f"  {row['memcpy_ratio_median']:.2f}"
                f" ({row['memcpy_ratio_min']:.2f} to {row['memcpy_ratio_max']:.2f})"
                f"  {row['cpu_seconds_per_gib_here_and_there'][0]:.3f}"
                f" {row['cpu_seconds_per_gib_here_and_there'][1]:.3f}",
                flush=True,
            )
    bench.close()
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
