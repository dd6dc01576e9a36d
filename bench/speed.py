"""Every case that the transfer core has to be fast in, beside what it must reach: one table.

    sudo chrt -r 5 python bench/speed.py [--repeat 5] [--cases shm tcp ...] [--scale 1.0] [--json FILE]

Each turn measures a case and what it is compared with, one after the other; a ratio is of one turn, the
first turn is dropped, and the table has the median of the turns and their extremes. Bytes are compared
after every case. Ratios of copies are of the copy's own seconds (``Timings.copy``); beside them those
of the whole handoff: claim, plan, copy, checks, commit. ``--scale 0.1``: a tenth of the bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from copy_plan import PAIRS, measure
from rich.console import Console
from rich.table import Table
from small_handoff import Pair as SmallPair
from small_handoff import cpu_seconds, profiled
from speed_pair import Pair, Plain, Pools, Resident, Shape, busy_process, busy_thread, iperf3
from transfer import round_trip_seconds
from transports import machine

HERE = Path(__file__).parent
MIB = 1 << 20


@dataclass
class Row:
    """One case: what was seen in each turn, in ``unit``, and what it must reach.

    ``limit``: "least" where more is better. ``whole``: the same ratio for whole handoffs. ``why``: what
    was measured beside it that says what it falls short by, should it do so.
    """

    case: str
    how: str
    must: float
    stretch: float
    seen: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    unit: str = ""
    limit: str = "least"
    note: str = ""
    why: str = ""

    @property
    def holds(self) -> bool:
        return median(self.seen) >= self.must if self.limit == "least" else median(self.seen) <= self.must


def moved(row: Row, pair: Pair, mode: str, reference: float) -> None:
    """One move of this turn beside ``reference`` seconds."""
    timings = pair.move(mode).timings
    row.seen.append(reference / timings.copy)
    row.whole.append(reference / (timings.total - timings.handshake))


def checked(pair: Pair, mode: str) -> None:
    """A move that is not measured: the first of a pair touches what is touched once; bytes compared."""
    pair.pools.clear()
    pair.move(mode)
    pair.pools.compare()


def drop_first(rows: Iterable[Row]) -> None:
    for row in rows:
        del row.seen[0]
        if row.whole:
            del row.whole[0]


def copies(case: Row, shape: Shape, address: str, repeat: int, *, private: bool = False) -> Iterator[Row]:
    """Pull and push beside numpy.copyto of as many bytes; with digests too, which is not asked for."""
    pools, plain = Pools(shape, private=private), Plain(shape.nbytes)
    for integrity in (False, True):
        pair = Pair(pools, address, integrity=integrity)
        rows = {mode: replace(case, how=mode + case.how, seen=[], whole=[]) for mode in ("pull", "push")}
        for row in rows.values() if integrity else ():
            row.how, row.must, row.stretch = f"{row.how}, xxh3", 0.0, 0.0
        rates = []
        try:
            for _ in range(repeat + 1):
                for mode, row in rows.items():
                    seconds = plain.seconds()
                    rates.append(shape.nbytes / seconds / 1e9)
                    moved(row, pair, mode, seconds)
            if not integrity:
                rows["pull"].note = f"copyto {spread(rates[2:])} GB/s"
            for mode in rows:
                checked(pair, mode)
        finally:
            pair.close()
        drop_first(rows.values())
        yield from rows.values()
    pools.close()


def shm(repeat: int, scale: float) -> Iterator[Row]:
    """Against copyto: mapped memory, with two threads as by default and with one, and cma."""
    large, small = int(1024 * scale) * MIB, int(256 * scale) * MIB
    blocks, little = Shape(large, 32 << 10), Shape(small, 4 << 10)
    mapped = Row(f"shm mapped, {large // MIB} MiB in 32 KiB blocks, over copyto", "", 0.85, 1.0)
    yield from copies(mapped, blocks, "shm", repeat)
    alone = replace(mapped, how=", one thread", must=0.0, stretch=0.0)
    yield from copies(alone, blocks, "shm?streams=1", repeat)
    same = Row(f"shm mapped, {small // MIB} MiB in 4 KiB blocks, same ids in every layer", "", 0.6, 0.9)
    same.why = (
        "NumPy's strided copies alone reach 0.45 of copyto at 4 KiB by one thread (bench/copy_plan.py), "
        "0.8 by two; then 65,536 pieces are checked, sent, and checked by the peer before a byte is read."
    )
    yield from copies(same, little, "shm", repeat)
    unlike = Row(f"shm mapped, {small // MIB} MiB in 4 KiB blocks, ids differ by layer", "", 0.25, 0.65)
    yield from copies(unlike, replace(little, own_ids=True), "shm", repeat)
    cma = Row(f"shm cma, {large // MIB} MiB in 32 KiB blocks of memory that an engine owns", "", 0.55, 0.8)
    yield from copies(cma, blocks, "shm?path=cma", repeat, private=True)


def tcp(repeat: int, scale: float) -> Iterator[Row]:
    """Against iperf3 in the same turn: one stream, the better of one and two; then beside a busy thread."""
    shape = Shape(int(1024 * scale) * MIB, 32 << 10)
    pools = Pools(shape)
    pairs = {
        (streams, integrity): Pair(pools, f"tcp?streams={streams}", integrity=integrity)
        for streams in (1, 2)
        for integrity in (False, True)
    }
    controls: dict[str, list[float]] = {"pull": [], "push": []}
    case = f"tcp plain, {shape.nbytes // MIB} MiB in 32 KiB blocks, over iperf3 (cubic, one stream)"
    try:
        for mode in ("pull", "push"):
            one = Row(case, f"{mode}, one stream", 0.6, 0.85)
            best = Row(case, f"{mode}, best of one and two", 0.75, 0.95)
            summed = Row(case, f"{mode}, xxh3, best of one and two", 0.65, 0.85)
            busy = Row(
                "tcp, a busy Python thread in the engine process, over the same without", mode, 0.6, 0.85
            )
            rates: list[float] = []
            for _ in range(repeat + 1):
                rates.append(iperf3(2.0))
                reference = shape.nbytes / rates[-1]
                for row in (best, summed):
                    tried = [Row("", "", 0, 0) for _ in (1, 2)]
                    for streams, found in zip((1, 2), tried, strict=True):
                        moved(found, pairs[streams, row is summed], mode, reference)
                    if row is best:
                        one.seen += tried[0].seen
                        one.whole += tried[0].whole
                    fastest = max(tried, key=lambda found: found.seen[0])
                    row.seen += fastest.seen
                    row.whole += fastest.whole
                alone = pairs[1, False].move(mode).timings
                with busy_thread():
                    beside = pairs[1, False].move(mode).timings
                with busy_process():
                    apart = pairs[1, False].move(mode).timings
                controls[mode].append(alone.copy / apart.copy)
                busy.seen.append(alone.copy / beside.copy)
                busy.whole.append((alone.total - alone.handshake) / (beside.total - beside.handshake))
            for pair in pairs.values():
                checked(pair, mode)
            one.note = f"iperf3 {spread([rate / 1e9 for rate in rates[1:]])} GB/s"
            rows = [one, best, summed, busy]
            drop_first(rows)
            busy.why = (
                f"a busy process in its place, which shares no GIL, left {spread(controls[mode][1:])}: "
                f"sender, receiver and the thread share {os.cpu_count()} processors."
            )
            yield from rows
    finally:
        for pair in pairs.values():
            pair.close()
        pools.close()


def plan(repeat: int, scale: float) -> Iterator[Row]:  # noqa: ARG001 - 160 tensors have one size
    """The usual pair of layouts, and one of unlike blocks; bench/copy_plan.py has more."""
    for name in ("same layout", "blocks 16 -> 64"):
        found = {name: measure(*PAIRS[name], 20 * repeat)}
        for kind, what in (("plan", "a later plan"), ("first", "the first of the pair")):
            row = Row(
                "copy plan for 160 tensors x 256 blocks", f"{name}, {what}", 5.0, 1.0, unit="ms", limit="most"
            )
            row.seen = [found[name][kind][column] for column in ("p10_ms", "median_ms", "p90_ms")]
            yield row


def small(repeat: int, scale: float) -> Iterator[Row]:  # noqa: ARG001 - one block is one block
    """One block: offer, claim, move, commit, started, released."""
    for transport in ("tcp", "shm"):
        row = Row(
            "whole handoff of one 4 KiB block, p50, in bare tcp round trips",
            transport, 15.0, 8.0, unit="RTT", limit="most",
        )  # fmt: skip
        pair = SmallPair(transport, process=True)
        for number in range(50):
            pair.hand_over(number)
        trips, times = [], []
        cpu = 0.0
        for turn in range(repeat):
            cpu -= cpu_seconds()
            times.append(median(pair.hand_over(1000 * (turn + 1) + number) for number in range(60)))
            cpu += cpu_seconds()
            trips.append(median(round_trip_seconds(300)[20:]))
            row.seen.append(times[-1] / trips[-1])
        pair.close()
        row.note = f"{median(times) * 1e6:.0f} us, round trip {median(trips) * 1e6:.0f} us"
        profile = profiled(transport, 200)
        shares = ", ".join(
            f"{part} {share:.0%}" for part, share in profile["shares"].items() if share >= 0.02
        )
        row.why = (
            f"Python. {profile['loop_turns_each']:.0f} turns of event loops, "
            f"{cpu / 60 / repeat * 1e6:.0f} us of CPU in all processes; of that by cProfile: {shares}."
        )
        yield row


def overlap(repeat: int, scale: float) -> Iterator[Row]:  # noqa: ARG001 - the engine's own payload
    """What bench/overlap.py finds, as this machine runs the engine and as an accelerator would."""
    for steady, what in ((0.0, "as the engine computes"), (2.0, "prefill paced evenly")):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, HERE / "overlap.py", "--repeat", str(repeat), "--json", file.name]
            subprocess.run([*command, "--steady", str(steady)], check=True, stdout=subprocess.DEVNULL)
            found = json.loads(Path(file.name).read_text())
        for made in found["rows"][1:]:
            row = Row(
                "exposed time of a layer-wise push, over moving after prefill", "", 0.25, 0.1, limit="most"
            )
            row.how = f"{made['case']}, {what}"
            row.seen = made["exposed_over_after"]
            row.note = f"at least {median(made['least_over_after']):.2f}"
            yield row


def memory(repeat: int, scale: float) -> Iterator[Row]:
    """Of the transfer process that has more, over its pools, while 1 GiB moves."""
    shape = Shape(int(1024 * scale) * MIB, 32 << 10)
    pools = Pools(shape)
    for address in ("shm", "tcp"):
        row = Row(
            "peak RSS over the pools while moving 1 GiB",
            f"{address}, xxh3",
            64.0,
            16.0,
            unit="MiB",
            limit="most",
        )
        for _ in range(max(2, repeat // 2)):
            pair = Pair(pools, address, integrity=True)
            with Resident(pair.pids()) as resident:
                for mode in ("pull", "push"):
                    checked(pair, mode)
            pair.close()
            row.seen.append(resident.most / MIB)
            row.note = f"{resident.before / MIB:.0f} MiB before the first move: Python and its libraries"
        yield row
    pools.close()


CASES: dict[str, Callable[[int, float], Iterator[Row]]] = {
    "shm": shm, "tcp": tcp, "plan": plan, "small": small, "overlap": overlap, "memory": memory,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="payload over what the table says")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", type=Path, help="rows of other cases that it has stay")
    options = parser.parse_args()
    result: dict[str, Any] = {"bench": "speed", "machine": machine(), "repeat": options.repeat, "cases": {}}
    if options.json and options.json.exists():
        result["cases"] = json.loads(options.json.read_text())["cases"]
    console = Console(highlight=False, soft_wrap=True, width=180)
    bars = Console(stderr=True)
    for case in options.cases:
        bars.print(f"{case}: up to a minute or two", highlight=False)
        load = os.getloadavg()[0]
        rows = list(CASES[case](options.repeat, options.scale))
        result["cases"][case] = {
            "when": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
            "load": [load, os.getloadavg()[0]],
            "commit": result["machine"]["commit"],
            "rows": [shown(row) for row in rows],
        }
        console.print(table(rows), crop=False)
        result["machine"]["load_at_end"] = os.getloadavg()[0]
        policy = os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO)
        result["machine"]["scheduling"] = "real-time priority" if policy else ""
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")


def table(rows: list[Row]) -> Table:
    """For a person."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row("case", "how", "must", "seen (least to most)", "whole handoff", "")
    for row in rows:
        grid.add_row(*shown(row)["cells"])
    return grid


def shown(row: Row) -> dict[str, Any]:
    """A row as JSON, with its columns as text: the same here and in docs/numbers.md."""
    must = f"{'at least' if row.limit == 'least' else 'at most'} {row.must:g} {row.unit}".strip()
    verdict = ("holds" if row.holds else "falls short") if row.must else "not asked for"
    cells = [
        row.case,
        row.how,
        must if row.must else "",
        spread(row.seen) + (f"; {row.note}" if row.note else ""),
        spread(row.whole) if row.whole else "",
        verdict,
    ]
    return asdict(row) | {"holds": row.holds, "cells": cells}


def spread(values: list[float]) -> str:
    return f"{median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


if __name__ == "__main__":
    main()
