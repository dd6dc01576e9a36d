"""What a probe of many nodes takes: time, words and memory, measured where that can be done, then calculated.

    python bench/scale.py [--agents 2,8,32] [--stand-ins 16,64] [--json FILE]

1. Real agents, each a process of this machine (with a transfer process while it is probed): what an agent
   takes, what opening takes, and the coordinator's words and processor time for each call.
2. The real coordinator before stand-ins that answer at once with the times of a 100 Gb/s link: how many calls
   a measurement (a pair in one direction and mode) needs with the usual settings, and what is kept of it.
3. From both, by the schedule's own arithmetic: 16, 256 and 4,096 nodes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime as dt
import json
import os
import platform
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import psutil

from kvferry.link import Mode, Registration, encode_links
from kvferry.probe import AgentSite, Payload, ProbePlan, ProbeResult, Room, probe_sites, sizes_up_to
from kvferry.probe import words as w
from kvferry.probe.facts import host_facts
from kvferry.probe.node import Copied
from kvferry.probe.plan import MAX_NODES, STAGE_SECONDS
from kvferry.probe.run import FLOWS_WITH_SAMPLES
from kvferry.probe.schedule import pair_stages
from kvferry.probe.site import Site
from kvferry.transport.security import Plain

LARGEST = Payload(64 << 20, 32 << 10)
TINY = Payload(64 << 10, 16 << 10)
ZONE = 64
MIB = 1 << 20


class CountedSite(AgentSite):
    """An agent; its calls, and the bytes of the words both ways, are counted."""

    calls = frames = nbytes = 0

    async def call(self, kind: type[Any], limit_seconds: float, **fields: Any) -> Any:
        CountedSite.calls += 1
        return await super().call(kind, limit_seconds, **fields)


def counted(connection: Any) -> None:
    """Count what goes over an open connection."""
    send, receive = connection.send, connection.receive

    async def sending(frame: bytes) -> None:
        CountedSite.frames += 1
        CountedSite.nbytes += len(frame)
        await send(frame)

    async def receiving() -> bytes:
        frame: bytes = await receive()
        CountedSite.frames += 1
        CountedSite.nbytes += len(frame)
        return frame

    connection.send, connection.receive = sending, receiving


@contextlib.contextmanager
def agents(count: int) -> Iterator[tuple[list[subprocess.Popen[str]], list[str]]]:
    """So many agents on loopback, ended at the end."""
    command = [sys.executable, "-m", "kvferry", "agent", "--json", "--listen", "127.0.0.1:0", "--name"]
    running: list[subprocess.Popen[str]] = []
    try:
        running.extend(
            subprocess.Popen([*command, f"n{number}"], stdout=subprocess.PIPE, text=True)
            for number in range(count)
        )
        lines = [process.stdout.readline() for process in running if process.stdout is not None]
        yield running, [json.loads(line)["address"] for line in lines]
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)
            assert process.stdout is not None
            process.stdout.close()


def pss(pid: int) -> int:
    """Resident bytes of a process, what it shares divided among those who share it."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no Pss")


async def probe_agents(addresses: Sequence[str], pids: Sequence[int]) -> dict[str, float]:
    """One pull of each shape for every ordered pair; memory is read when the first stage begins."""
    started = time.monotonic()
    sites = await asyncio.gather(*(CountedSite.connect(address) for address in addresses))
    connected = time.monotonic()
    for site in sites:
        counted(site._connection)  # noqa: SLF001 - to count what it carries
    CountedSite.calls = CountedSite.frames = CountedSite.nbytes = 0
    seen: dict[str, float] = {}

    def on_progress(progress: Any) -> None:
        if progress.stage == 0 and not seen:
            under_probe = [[pid, *(child.pid for child in psutil.Process(pid).children())] for pid in pids]
            seen["opened"] = time.monotonic()
            seen["agent_busy"] = median(sum(map(pss, each)) for each in under_probe)
            seen["read"] = time.monotonic()
            seen["cpu"] = time.process_time()
            seen["calls"] = CountedSite.calls

    plan = ProbePlan(largest=TINY, transports=("tcp",), modes=(Mode.PULL,), repeats=1)
    result = await probe_sites(sites, plan, on_progress)
    ended = time.monotonic()
    for failure in result.failures:  # on a busy machine a pair may have no time for two shapes
        print(f"not measured: {failure.from_node} -> {failure.to_node}: {failure.reason}", file=sys.stderr)
    calls = CountedSite.calls - seen["calls"]
    return {
        "pairs": len(result.links.pairs),
        "connect_seconds": connected - started,
        "open_seconds": seen["opened"] - connected,
        "stage_seconds": (ended - seen["read"]) / (len(sites) * (len(sites) - 1)),
        "agent_busy_bytes": seen["agent_busy"],
        "calls": calls,
        "cpu_per_call_seconds": (time.process_time() - seen["cpu"]) / calls,
        "bytes_per_frame": CountedSite.nbytes / CountedSite.frames,
    }


class StandIn(Site):
    """A node that answers at once: a copy takes 60 us and its bytes at 12.5 GB/s, give or take 2 %."""

    calls = 0

    def __init__(self, number: int, about: w.About) -> None:
        self.address = f"tcp://10.0.{number >> 8}.{number & 255}:7400"
        self.about = msgspec.structs.replace(
            about,
            plain=Plain.ANYWHERE,
            name=f"node-{number}",
            incarnation=number.to_bytes(16),
            host_id=f"host-{number}",
        )

    async def call(self, kind: type[Any], limit_seconds: float, **fields: Any) -> Any:  # noqa: ARG002
        StandIn.calls += 1
        await asyncio.sleep(0)
        if kind is w.OpenCall:
            return w.Opened((self.address,), Registration(nbytes=1, seconds=1e-3), 1)
        if kind is w.HoldCall:
            return w.Held((b"t",) * fields["count"])
        if kind is w.MoveCall:
            payload, count = fields["payload"], len(fields["tickets"])
            base = 60e-6 + 0.5e-6 * payload.descriptors + payload.moved_nbytes / 12.5e9
            seconds = [base * random.gauss(1.0, 0.02) for _ in range(count)]
            sizes = (payload.moved_nbytes, payload.descriptors)
            return w.Copies(
                tuple(Copied(*sizes, each, 0.0, "tcp", "tcp") for each in seconds), (0.0,) * count
            )
        return w.Copies() if kind is w.CollectCall else w.Done()

    async def close(self) -> None:
        """Nothing is held."""


def probe_stand_ins(count: int, about: w.About) -> dict[str, float]:
    """The usual settings, both modes; memory is what the process has grown by at its largest."""
    StandIn.calls = 0
    before, cpu = psutil.Process().memory_info().rss, time.process_time()
    plan = ProbePlan(largest=LARGEST, transports=("tcp",))
    sites = [StandIn(number, about) for number in range(count)]
    result: ProbeResult = asyncio.run(probe_sites(sites, plan, lambda _progress: None))
    grown = psutil.Process().memory_info().rss - before
    flows = 2 * count * (count - 1)
    assert not result.failures
    return {
        "flows": flows,
        "calls_per_flow": StandIn.calls / flows,
        "bytes_per_flow": grown / flows,
        "file_bytes_per_flow": len(encode_links(result.links)) / flows,
        "cpu_per_flow_seconds": (time.process_time() - cpu) / flows,
    }


def in_child(count: int, about: w.About) -> dict[str, float]:
    """``probe_stand_ins`` in a process of its own, so that memory begins anew."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(probe_stand_ins, count, about).result()


def rounds_of(nodes: int) -> int:
    """Rounds of disjoint pairs."""
    return nodes - 1 + nodes % 2


def calculated(nodes: int, agent: dict[str, float], keeper: dict[str, float]) -> dict[str, float]:
    """All pairs of so many nodes on hosts of their own, one transport, both modes, the usual settings."""
    stages = rounds_of(nodes) * 2 * 2
    flows = 2 * nodes * (nodes - 1)
    calls = flows * keeper["calls_per_flow"]
    return {
        "pairs": nodes * (nodes - 1),
        "stages": stages,
        "seconds": stages * STAGE_SECONDS,
        "calls": calls,
        "word_bytes": 2 * calls * agent["bytes_per_frame"],
        "coordinator_share": calls * agent["cpu_per_call_seconds"] / (stages * STAGE_SECONDS),
        "coordinator_bytes": flows * keeper["bytes_per_flow"],
        "file_bytes": flows * keeper["file_bytes_per_flow"],
    }


def in_zones(nodes: int, agent: dict[str, float], keeper: dict[str, float]) -> dict[str, float]:
    """Zones of 64 at the same time, each by a coordinator of its own; then one node of each zone."""
    zones = -(-nodes // ZONE)
    inside, between = calculated(ZONE, agent, keeper), calculated(zones, agent, keeper)
    return {
        "pairs": zones * inside["pairs"] + between["pairs"],
        "stages": inside["stages"] + between["stages"],
        "seconds": inside["seconds"] + between["seconds"],
        "calls": zones * inside["calls"] + between["calls"],
        "word_bytes": zones * inside["word_bytes"] + between["word_bytes"],
        "coordinator_share": max(inside["coordinator_share"], between["coordinator_share"]),
        "coordinator_bytes": max(inside["coordinator_bytes"], between["coordinator_bytes"]),
        "file_bytes": zones * inside["file_bytes"] + between["file_bytes"],
    }


def check_arithmetic() -> None:
    """The number of stages is the schedule's."""
    for nodes in (2, 3, 8, 17, 64):
        assert len(pair_stages(range(nodes), ("tcp",), tuple(Mode))) == rounds_of(nodes) * 4


def measured_rows(counts: Sequence[int]) -> list[dict[str, float]]:
    """A row for each number of real agents."""
    rows = []
    for count in counts:
        with agents(count) as (running, addresses):
            pids = [process.pid for process in running]
            idle = median(pss(pid) for pid in pids)
            row = {"agents": count, "agent_idle_bytes": idle} | asyncio.run(probe_agents(addresses, pids))
        rows.append(row)
        print(f"measured {count} agents", file=sys.stderr)
    return rows


def about_this() -> w.About:
    """What stand-ins say of themselves: as much as a real agent does."""

    async def ask() -> w.About:
        with agents(1) as (_, addresses):
            site = await AgentSite.connect(addresses[0])
            await site.close()
            return site.about

    return asyncio.run(ask())


def table(heads: str, rows: Sequence[Sequence[str]]) -> None:
    """Markdown."""
    print("\n| " + heads + " |")
    print("| " + " | ".join("---" for _ in heads.split(" | ")) + " |")
    for row in rows:
        print("| " + " | ".join(row) + " |")


def show(found: dict[str, Any]) -> None:
    """The tables of docs/scale.md."""
    print(found["machine"])
    heads = "agents | agent, idle | agent under probe | connect all | open all | a stage"
    table(
        f"{heads} | calls | coordinator for a call | a word",
        [
            (
                f"{row['agents']}",
                f"{row['agent_idle_bytes'] / MIB:.0f} MiB",
                f"{row['agent_busy_bytes'] / MIB:.0f} MiB",
                f"{row['connect_seconds']:.2f} s",
                f"{row['open_seconds']:.1f} s",
                f"{row['stage_seconds'] * 1e3:.0f} ms",
                f"{row['calls']:,.0f}",
                f"{row['cpu_per_call_seconds'] * 1e6:.0f} us",
                f"{row['bytes_per_frame']:.0f} B",
            )
            for row in found["agents"]
        ],
    )
    table(
        "stand-ins | measurements | calls for each | coordinator for each | it keeps of each | in the file",
        [
            (
                f"{row['nodes']}",
                f"{row['flows']:,}",
                f"{row['calls_per_flow']:.0f}",
                f"{row['cpu_per_flow_seconds'] * 1e3:.1f} ms",
                f"{row['bytes_per_flow'] / 1024:.1f} KiB",
                f"{row['file_bytes_per_flow'] / 1024:.1f} KiB",
            )
            for row in found["stand_ins"]
        ],
    )
    heads = "nodes | ordered pairs | stages | time at most | calls | words | coordinator's processor"
    table(
        f"{heads} | its memory | link file",
        [
            (
                name,
                f"{row['pairs']:,}",
                f"{row['stages']:,}",
                f"{row['seconds'] / 60:,.0f} min",
                f"{row['calls'] / 1e6:,.2f} M",
                f"{row['word_bytes'] / 1e6:,.0f} MB",
                f"{row['coordinator_share']:.0%} of one",
                f"{row['coordinator_bytes'] / MIB:,.0f} MiB",
                f"{row['file_bytes'] / 1e6:,.0f} MB",
            )
            for name, row in found["calculated"].items()
        ],
    )
    pool = Room.of(sizes_up_to(LARGEST)).nbytes
    print(f"\nPool of a probe at each node, for payloads of up to 64 MiB: {pool / MIB:.0f} MiB.")
    print(f"One probe: {MAX_NODES} nodes at most; above {FLOWS_WITH_SAMPLES} measurements no single copies.")


def main() -> None:
    """Measure, calculate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", default="2,8,32", help="numbers of real agents")
    parser.add_argument("--stand-ins", default="16,64", help="numbers of stand-ins")
    parser.add_argument("--json", type=Path, help="write what was found here")
    given = parser.parse_args()
    check_arithmetic()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65536)), hard))
    machine = (
        f"{host_facts()['cpu']}, {os.cpu_count()} CPUs, Linux {platform.release()}, "
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, load {os.getloadavg()[0]:.1f} before it began"
    )
    about = about_this()
    stand_ins = [{"nodes": count} | in_child(count, about) for count in map(int, given.stand_ins.split(","))]
    rows = measured_rows([int(count) for count in given.agents.split(",")])
    agent, keeper = rows[-1], stand_ins[-1]
    found = {
        "machine": machine,
        "agents": rows,
        "stand_ins": stand_ins,
        "calculated": {
            "16": calculated(16, agent, stand_ins[0]),
            "256": calculated(256, agent, keeper),
            "4,096, all pairs": calculated(4096, agent, keeper),
            f"4,096, in {4096 // ZONE} zones": in_zones(4096, agent, keeper),
        },
    }
    show(found)
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
