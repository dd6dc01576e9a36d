"""kvferry beside NIXL and Mooncake: the same bytes, the same machine, the same minutes.

    python bench/peers.py [--repeat 5] [--out bench/results/peers.json]     (or: make bench-peers)
    python bench/peers.py --only nixl-tcp --shapes "one piece" --repeat 15 --out FILE

Pairs of processes hold a pool each; at each turn every way moves every shape once (one small block 50
times, whose median counts), in an order of its own, so that ratios are of one turn. The libraries alone
are used as suits them best: NIXL with NumPy tables, reads and writes, and a thread at the other side that
drives it; Mooncake with single submissions that are polled with a pause, else batches of 1,024. Bytes are
compared after each move. kvferry over NIXL and over the library alone use one agent, so their difference
is kvferry's own: a ``Connection.read`` of what the real guard grants, without digests, the same with
digests, and a whole handoff through two endpoints. NIXL's own estimate stands beside kvferry's
prediction, which is fitted to other shapes of the same run. The first turn is dropped.

``--only`` and ``--shapes`` leave the other ways and shapes out, and then predictions too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from peers_pair import times_of
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transports import machine, scheduling

MIB = 1 << 20
POOL_NBYTES = 256 * MIB
#: Name: bytes of a block, blocks, blocks of the pool.
SHAPES = {
    "256 MiB in one piece": (256 * MIB, 1, 1),
    "256 MiB in 32 KiB blocks": (32 << 10, 8192, 8192),
    "64 MiB in 4 KiB blocks": (4 << 10, 16384, 65536),
    "one 4 KiB block": (4 << 10, 1, 65536),
}
#: What predictions are fitted to: none of the shapes above.
FITTED = {
    "fit 1": (16 * MIB, 1, 16),
    "fit 2": (128 * MIB, 1, 2),
    "fit 3": (16 << 10, 2048, 16384),
    "fit 4": (8 << 10, 8192, 32768),
    "fit 5": (64 << 10, 1, 4096),
}
#: Not one copy: offer, claim, move, commit and started by two endpoints with their transfer processes.
HANDOFF = "handoff"
#: Way, pair, command, who has the bytes in the end, and whether the other side must drive NIXL.
WAYS = [
    ("kvferry shm", "plain", "shm", "here", False),
    ("kvferry tcp", "plain", "tcp", "there", False),
    ("kvferry tcp, summed", "plain", "tcp_summed", "there", False),
    ("NIXL cma read", "nixl-cma", "nixl_read", "here", True),
    ("NIXL cma write", "nixl-cma", "nixl_write", "there", True),
    ("kvferry over NIXL cma", "nixl-cma", "ours", "here", False),
    ("kvferry over NIXL cma, summed", "nixl-cma", "ours_summed", "here", False),
    ("kvferry handoff over NIXL cma", "nixl-cma", HANDOFF, "here", False),
    ("NIXL tcp read", "nixl-tcp", "nixl_read", "here", True),
    ("NIXL tcp write", "nixl-tcp", "nixl_write", "there", True),
    ("kvferry over NIXL tcp", "nixl-tcp", "ours", "here", False),
    ("kvferry over NIXL tcp, summed", "nixl-tcp", "ours_summed", "here", False),
    ("kvferry handoff over NIXL tcp", "nixl-tcp", HANDOFF, "here", False),
    ("Mooncake tcp write", "mooncake", "mooncake_write", "there", False),
    ("kvferry over Mooncake tcp", "mooncake", "ours", "here", False),
]
#: The library's own way that does the same as kvferry's over it.
BARE = {"nixl-cma": "NIXL cma read", "nixl-tcp": "NIXL tcp write", "mooncake": "Mooncake tcp write"}
SETTINGS = {"nixl-tcp": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}}


class Process:
    """One process of a pair: a command at a time."""

    def __init__(self, pair: str) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("peers_pair.py")),
                pair.partition("-")[0],
                str(POOL_NBYTES),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SETTINGS.get(pair, {})},
        )

    def do(self, *command: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process of the bench ended at {command[0]}: status {self._process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Pair:
    """Two processes that are connected by kvferry, and by the library alone."""

    def __init__(self, name: str) -> None:
        self.here, self.there = Process(name), Process(name)
        self.opened: set[tuple[int, int, int]] = set()
        for process in (self.here, self.there):
            process.do("fill")
        if name == "plain":
            addresses = {"shm": f"shm://peers-{uuid.uuid4().hex}?path=mapped", "tcp": "tcp://127.0.0.1:0"}
        elif name == "mooncake":
            addresses = {"ours": "mooncake://127.0.0.1:0?wildcard=yes"}
        else:
            addresses = {"ours": "nixl://127.0.0.1:0"}
        bound = self.there.do("listen", list(addresses.values()))
        self.paths = {n: self.here.do("connect", n, a) for n, a in zip(addresses, bound, strict=True)}
        if name != "plain":
            records = self.here.do("introduce"), self.there.do("introduce")
            self.here.do("meet", records[1])
            self.there.do("meet", records[0])

    def run(self, command: str, end: str, drives: bool, shape: tuple[int, int, int]) -> dict[str, float]:
        receiver = self.here if end == "here" else self.there
        receiver.do("zero", shape)
        if drives:
            self.there.do("drive")
        if command == HANDOFF:
            found = self.hand_over(shape)
        else:
            self.there.do("grant", shape)
            before = self.there.do("cpu")
            found = self.here.do("move", command, shape)
            found["cpu_seconds"] += (self.there.do("cpu") - before) / times_of(shape)
        if drives:
            self.there.do("rest")
        if not receiver.do("check", shape):
            raise SystemExit(f"wrong bytes: {command} of {shape}")
        return found

    def hand_over(self, shape: tuple[int, int, int]) -> dict[str, float]:
        """Whole handoffs; the endpoints of a shape are opened at its first, and stay."""
        if shape not in self.opened:
            self.opened.add(shape)
            for process in (self.here, self.there):
                process.do("open_endpoint", "nixl://127.0.0.1:0", shape)
        found: dict[str, float] = self.here.do("pull", shape, self.there.do("offer", shape))
        return found


def predictions(pairs: dict[str, Pair], rows: list[dict[str, Any]], repeat: int) -> list[dict[str, Any]]:
    """NIXL's estimate and kvferry's prediction for the reads of NIXL alone, beside what was measured."""
    found = []
    for name in ("nixl-cma", "nixl-tcp"):
        pair, points = pairs[name], []
        for shape in FITTED.values():
            took = [pair.run("nixl_read", "here", True, shape)["seconds"] for _ in range(max(3, repeat))]
            points.append((shape[0] * shape[1], shape[1], statistics.median(took)))
        line = fit(points)
        for shape_name, shape in SHAPES.items():
            (row,) = (
                row
                for row in rows
                if (row["pair"], row["command"], row["shape"]) == (name, "nixl_read", shape_name)
            )
            pair.there.do("drive")
            estimate = pair.here.do("estimate", shape)
            pair.there.do("rest")
            measured = statistics.median(row["seconds"])
            found.append(
                {
                    "path": name,
                    "shape": shape_name,
                    "measured_seconds": measured,
                    "nixl_over_measured": estimate / measured,
                    "kvferry_over_measured": float(np.dot(line, (1, shape[1], shape[0] * shape[1])))
                    / measured,
                }
            )
    return found


def fit(points: list[tuple[int, int, float]]) -> np.ndarray:
    """Coefficients of 1, descriptors and bytes, by kvferry's own fit."""
    from kvferry.link.line import fit_line
    from kvferry.link.points import Points

    nbytes, descriptors, seconds = (np.array(column, np.float64) for column in zip(*points, strict=True))
    line = fit_line(Points(nbytes, descriptors, seconds))
    rate = line.bytes_per_second
    return np.array([line.a_seconds or 0.0, line.o_seconds or 0.0, 1 / rate if rate else 0.0])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=5, help="measured turns")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="ways with it in their name or pair; may be repeated"
    )
    parser.add_argument("--shapes", action="append", metavar="TEXT", help="shapes likewise")
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    arguments = parser.parse_args()
    ways = [way for way in WAYS if wanted(arguments.only, way[0], way[1])]
    shapes = [shape for shape in SHAPES if wanted(arguments.shapes, shape)]
    is_whole = len(ways) == len(WAYS) and len(shapes) == len(SHAPES)
    if not ways or not shapes:
        parser.error("nothing is left to measure")
    if not is_whole and arguments.out == parser.get_default("out"):
        parser.error("a part of the bench is no result to publish: give --out")
    facts = machine()
    console = Console(stderr=True)
    pairs = {name: Pair(name) for name in dict.fromkeys(way[1] for way in ways)}
    rows = [
        {
            "way": way,
            "pair": pair,
            "command": command,
            "shape": shape,
            "seconds": [],
            "cpu_seconds": [],
            "memcpy": [],
        }
        for way, pair, command, _, _ in ways
        for shape in shapes
    ]
    order = random.Random(7)
    for turn in track(range(arguments.repeat + 1), "turns", console=console):
        for row in order.sample(rows, len(rows)):  # so that no way always follows the same other one
            _, pair, command, end, drives = next(way for way in WAYS if way[0] == row["way"])
            shape = SHAPES[row["shape"]]
            memcpy = pairs[pair].here.do("memcpy", shape[0] * shape[1])
            found = pairs[pair].run(command, end, drives, shape)
            if turn:  # the first finds pages, sockets and endpoints that were not used yet
                row["seconds"].append(found["seconds"])
                row["cpu_seconds"] += [found["cpu_seconds"]] if "cpu_seconds" in found else []
                row["memcpy"].append(memcpy)
    for row in rows:
        row["nbytes"] = int(np.prod(SHAPES[row["shape"]][:2]))
    result = {
        "bench": "peers",
        "machine": {**facts, "load_at_end": os.getloadavg()[0], "scheduling": scheduling()},
        "versions": versions(),
        "paths": {name: pair.paths for name, pair in pairs.items()},
        "rows": rows,
        "predictions": predictions(pairs, rows, arguments.repeat) if is_whole else [],
    }
    for pair in pairs.values():
        pair.here.close()
        pair.there.close()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    show(rows)


def wanted(texts: list[str] | None, *names: str) -> bool:
    """Any of the texts is in any of the names; or nothing was asked for."""
    return texts is None or any(text in name for text in texts for name in names)


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("nixl-cu12", "mooncake-transfer-engine-non-cuda")}


def show(rows: list[dict[str, Any]]) -> None:
    """Medians, and in brackets how often the time of the library alone, of the same turns."""
    by = {(row["way"], row["shape"]): row for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    table = Table("way", *(f"{shape}, GB/s or us" for shape in shapes))
    for way, pair in dict.fromkeys((row["way"], row["pair"]) for row in rows):
        cells = []
        for shape in shapes:
            row, bare = by[way, shape], by.get((BARE.get(pair, ""), shape))
            seconds = statistics.median(row["seconds"])
            is_small = row["nbytes"] < MIB
            cell = f"{seconds * 1e6:.0f} us" if is_small else f"{row['nbytes'] / seconds / 1e9:.2f}"
            if bare not in (None, row):
                over = [ours / its for ours, its in zip(row["seconds"], bare["seconds"], strict=True)]
                cell += f" ({statistics.median(over):.2f}: {min(over):.2f} to {max(over):.2f})"
            cells.append(cell)
        table.add_row(way, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
