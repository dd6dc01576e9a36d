"""Does a profile fitted from payloads up to 64 MiB predict handoffs of 4 KiB to 512 MiB? On shaped links.

    python bench/prediction.py [--rates 100M 1G] [--seconds 120] [--largest 512MiB] [--modes pull] [--add F]

Two agents in network namespaces, joined by veth with a token bucket (root, iproute2). For each rate the
pair is probed by the sweep of `kvferry probe`, and in turns with it whole handoffs of other sizes and
block sizes are made. The fit knows only the sweep. Errors are measured over predicted less one.
``none`` is no shaping; ``1G/100M`` is 1 Gb/s for what prefill sends, 100 Mb/s for what decode sends.
With ``--add bench/results/prediction.json``, docs/make_numbers.py puts the run into docs/numbers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from transports import machine, scheduling

from kvferry.errors import InputError, NoPlanError
from kvferry.link import Conditions, LinkFit, Mode, fit_link
from kvferry.probe import AgentSite, Payload, Room, close_all, sizes_up_to
from kvferry.probe.sweep import Flow, Limits, sweep
from kvferry.testing.namespaces import Namespaces, why_no_namespaces
from kvferry.units import format_bytes, format_seconds, parse_bytes, parse_rate

PROBED = Payload(64 << 20, 32 << 10)
SIZES = tuple(4096 * 4**power for power in range(9))  # 4 KiB to 256 MiB, and then the largest
TURNS, FEWEST_TURNS, COPIES, P95_COPIES = 24, 10, 4, 40
# Short copies are made twice or five times a turn, since single stalls are their tail; of long ones one a
# turn, and fewer.
TINY_SECONDS, SHORT_SECONDS, LONG_SECONDS, FEWEST_LONG = 0.01, 0.05, 1.0, 3


def wanted(largest: int) -> list[Payload]:
    """Handoffs to predict: other sizes than were probed for the most part, and other block sizes."""
    sizes = [size for size in SIZES if size < largest] + [largest]
    large = [Payload(size, min(32 << 10, size // 2)) for size in sizes]
    return large + [Payload(size, 8 << 10) for size in (512 << 10, 8 << 20, 32 << 20) if size <= largest]


async def measure(addresses: Sequence[str], mode: Mode, seconds: float, largest: int) -> list[dict[str, Any]]:
    """Probe the pair and make the other handoffs, in turns; fit the probe alone, and compare."""
    top = Payload(min(PROBED.nbytes, largest), PROBED.block_bytes)
    probed, others = sizes_up_to(top), wanted(largest)
    sites = [await AgentSite.connect(address) for address in addresses]
    try:
        room = Room.of([*probed, *others])
        for site in sites:
            await site.open(3 * seconds + 900, room=room, transports=("tcp",), integrity=True)
        flow = Flow(sites[0], sites[1], mode, "tcp", Conditions(mode=mode))
        times = await in_turns(flow, probed, others, seconds)
    finally:
        await close_all(sites)
    fit = fit_link([sample for sample in flow.samples if not sample.is_cold])
    print(f"  {mode}: fit {line_of(fit)}", flush=True)
    return [row(payload, fit, times[payload], mode) for payload in others]


async def in_turns(
    flow: Flow, probed: Sequence[Payload], others: Sequence[Payload], seconds: float
) -> dict[Payload, list[float]]:
    """A turn of the probe's sweep, then one of the handoffs to predict; seconds of the latter.

    In turns, so that a machine whose load changes is the same for both. Large handoffs are made in
    fewer turns: each shape has a share of the time.
    """
    times: dict[Payload, list[float]] = {payload: [] for payload in others}
    begun, rng = time.monotonic(), np.random.default_rng(0)
    for turn in range(1, TURNS + 1):
        await sweep([flow], probed, Limits(COPIES * turn, time.monotonic() + seconds), lambda _: None)
        if flow.error is not None:
            raise flow.error
        visits = [payload for payload in others for _ in range(_visits(times[payload]))]
        for payload in rng.permutation(np.array(visits, object)):  # no size always follows the same one
            expected = 1.5 * flow.expected * payload.nbytes / probed[-1].nbytes
            mean = float(np.mean(times[payload])) if times[payload] else expected
            is_long = mean > LONG_SECONDS
            fewest = FEWEST_LONG if is_long else FEWEST_TURNS
            if turn > fewest and 2 * mean * len(times[payload]) > seconds / len(others):
                continue
            flow.expected = max(mean, 0.5)
            # As in the sweep, the first copy of all warms and is not counted.
            num_warming = 0 if times[payload] else 1
            copies = await flow.copy(payload, num_warming + (1 if is_long else COPIES))
            times[payload] += [copied.seconds for copied in copies.copies[num_warming:]]
            if num_warming:
                await flow.compare(payload)
        if time.monotonic() - begun > seconds and turn >= FEWEST_TURNS:
            break
    return times


def _visits(seconds: Sequence[float]) -> int:
    """How often a shape that took so long is copied at a turn."""
    mean = float(np.mean(seconds)) if seconds else LONG_SECONDS
    return 5 if mean < TINY_SECONDS else 2 if mean < SHORT_SECONDS else 1


def row(payload: Payload, fit: LinkFit, seconds: Sequence[float], mode: Mode) -> dict[str, Any]:
    """Measured and predicted p50 and p95; p95 only from enough copies."""
    nbytes, descriptors = payload.moved_nbytes, payload.descriptors

    def predicted(q: float) -> float | None:
        with contextlib.suppress(NoPlanError):
            return fit.predict_quantile(q, nbytes, descriptors)
        return None

    p95 = None if len(seconds) < P95_COPIES else float(np.quantile(seconds, 0.95, method="median_unbiased"))
    return {
        "mode": str(mode),
        "nbytes": nbytes,
        "descriptors": descriptors,
        "copies": len(seconds),
        "p50_seconds": float(np.median(seconds)),
        "predicted_p50_seconds": predicted(0.5),
        "p95_seconds": p95,
        "predicted_p95_seconds": predicted(0.95),
    }


def line_of(fit: LinkFit) -> str:
    parts = [f"a {fit.a_seconds}, o {fit.o_seconds}, B {fit.bytes_per_second}, worst {fit.worst_error}"]
    if fit.knee is not None:
        parts.append(f"from {fit.knee.from_nbytes} on a {fit.knee.a_seconds}, B {fit.knee.bytes_per_second}")
    return "; ".join(parts)


def error(row: dict[str, Any], which: str) -> float | None:
    """Measured over predicted less one, of p50 or p95."""
    measured, predicted = row[f"{which}_seconds"], row[f"predicted_{which}_seconds"]
    return None if measured is None or predicted is None else measured / predicted - 1


@contextlib.contextmanager
def agents(hosts: Namespaces) -> Any:
    """An agent in each namespace; yields their addresses."""
    processes = []
    try:
        for number, host in enumerate(hosts.hosts):
            command = [*hosts.inside(number), sys.executable, "-m", "kvferry", "agent", "--json"]
            command += ["--listen", f"tcp://{host}:0?plain=yes", "--name", f"n{number}"]
            processes.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            )
        yield [json.loads(process.stdout.readline())["address"] for process in processes]
    finally:
        for process in processes:
            process.terminate()
            process.wait(30)


def bits_per_second(rate: str) -> list[float | None]:
    """What prefill's and decode's nodes send at most; None for unshaped. Raises InputError."""
    sends = rate.split("/")
    if len(sends) > 2:
        raise InputError(f"rates: {rate!r} is not a rate, nor two with a / between")
    found = [None if each == "none" else 8 * parse_rate(f"{each}b/s", "rates") for each in sends]
    return found if len(found) == 2 else 2 * found


def bench(rate: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one rate."""
    with Namespaces(2) as hosts:
        for number, bits in enumerate(bits_per_second(rate)):
            if bits is not None:
                hosts.shape(number, bits)
        with agents(hosts) as addresses:
            command = [*hosts.inside(0), sys.executable, __file__, "--inside", *addresses]
            command += ["--seconds", str(options.seconds), "--largest", options.largest]
            command += ["--modes", *options.modes]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *said, last = done.stdout.splitlines()
    print("\n".join(said))
    return [{"rate": rate, **each} for each in json.loads(last)]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """A line a shape, and the worst of each rate."""
    names = ("rate", "mode", "handoff", "pieces", "copies", "p50", "error", "p95", "error")
    print("{:>6} {:5} {:>22} {:>7} {:>6} {:>9} {:>7} {:>9} {:>7}".format(*names))
    for each in rows:
        tail = "" if each["p95_seconds"] is None else format_seconds(each["p95_seconds"])
        print(
            f"{each['rate']:>6} {each['mode']:5} {format_bytes(each['nbytes']):>22} {each['descriptors']:>7} "
            f"{each['copies']:>6} {format_seconds(each['p50_seconds']):>9} {percent(error(each, 'p50')):>7} "
            f"{tail:>9} {percent(error(each, 'p95')):>7}"
        )
    for rate in dict.fromkeys(each["rate"] for each in rows):
        said = []
        for which in ("p50", "p95"):
            errors = [error(each, which) for each in rows if each["rate"] == rate]
            known = [abs(each) for each in errors if each is not None]
            if known:
                said.append(f"{which} off by {np.median(known):.1%} in the middle, {max(known):.1%} at worst")
        print(f"{rate}: {'; '.join(said)}")


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["100M", "1G"])
    parser.add_argument("--seconds", type=float, default=120.0, help="at least, for each rate and mode")
    parser.add_argument("--largest", default="512MiB")
    parser.add_argument("--modes", nargs="+", choices=[str(mode) for mode in Mode], default=["pull", "push"])
    parser.add_argument("--add", type=Path, help="a JSON file of runs, to which this one is added")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        largest = parse_bytes(options.largest)
        rows = [
            each
            for mode in options.modes
            for each in asyncio.run(measure(options.inside, Mode(mode), options.seconds, largest))
        ]
        print(json.dumps(rows))
        return
    try:
        for rate in options.rates:
            bits_per_second(rate)
        parse_bytes(options.largest)
    except InputError as error:
        parser.error(error.message)
    if why := why_no_namespaces():
        sys.exit(why)
    facts, rows = machine(), []
    for rate in options.rates:
        print(f"{rate}, load {psutil.getloadavg()[0]:.1f}", flush=True)
        rows += bench(rate, options)
    show(rows)
    if options.add:
        facts |= {"load_at_end": psutil.getloadavg()[0], "scheduling": scheduling()}
        add(options.add, {"command": " ".join(sys.argv), "machine": facts, "rows": rows})


def add(path: Path, run: dict[str, Any]) -> None:
    """The run after those that the file has; the machine is the last run's, each has a load of its own."""
    machine = {name: value for name, value in run["machine"].items() if not name.startswith("load")}
    runs = json.loads(path.read_text())["runs"] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"bench": "prediction", "machine": machine, "runs": [*runs, run]}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
