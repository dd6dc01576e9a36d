"""Puts what benches have left in bench/results into docs/numbers.md, between the marks of each section.

A bench writes one JSON object with ``bench`` (its name), ``machine`` and what its section here reads.
A new one is a function in SECTIONS; its section is added at the end of the page when there is a result.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvferry.units import format_bytes, format_seconds

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results"
MIB = 1 << 20

#: Kvferry's way, and the library's own way that does the same.
OVER = {
    "kvferry over NIXL cma": "NIXL cma read",
    "kvferry over NIXL cma, summed": "NIXL cma read",
    "kvferry handoff over NIXL cma": "NIXL cma read",
    "kvferry over NIXL tcp": "NIXL tcp write",
    "kvferry over NIXL tcp, summed": "NIXL tcp write",
    "kvferry handoff over NIXL tcp": "NIXL tcp write",
    "kvferry over Mooncake tcp": "Mooncake tcp write",
}


def peers(result: dict[str, Any]) -> list[str]:
    """kvferry beside NIXL and Mooncake."""
    rows = result["rows"]
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    ways = list(dict.fromkeys(row["way"] for row in rows))
    by = {(row["way"], row["shape"]): row for row in rows}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    turns = len(rows[0]["seconds"])
    lines = [
        f"`make bench-peers`; {versions}. {turns} turns: every shape by every way once,",
        "bytes compared; one small block 50 times in a row, whose median counts. Median GB/s (of one",
        "block: us), slowest and fastest turn. **Bold**: the fastest.",
        "",
        "| way | " + " | ".join(shapes) + " |",
        "| --- |" + " --- |" * len(shapes),
    ]
    best = {
        shape: min(ways, key=lambda way, s=shape: statistics.median(by[way, s]["seconds"]))
        for shape in shapes
    }
    for way in ways:
        cells = [_cell(by[way, shape], is_best=best[shape] == way) for shape in shapes]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    lines += ["", *_layers(by, shapes)]
    ahead = [f"{best[shape]} for {shape}" for shape in shapes if not best[shape].startswith("kvferry")]
    lines += [
        "",
        "A library alone is ahead of every way of kvferry: " + ("; ".join(ahead) or "nowhere here") + ".",
    ]
    lines += [
        "",
        "Predicted over measured seconds of NIXL's reads; kvferry's is fitted to five other shapes:",
        "",
        "| path | shape | NIXL's `estimate_xfer_cost` | kvferry |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        "| {path} | {shape} | {nixl_over_measured:.3g} | {kvferry_over_measured:.3g} |".format(**row)
        for row in result["predictions"]
    ]
    return lines


def small_copy(result: dict[str, Any]) -> list[str]:
    """One small block by a connection, beside bare round trips."""
    lines = [
        f"`sudo chrt -r 5 python bench/small_copy.py`; {result['count']} copies in a row a turn, whose",
        f"median counts, {len(result['rows'][0]['seconds'])} turns: median (least to most), in microseconds.",
        "`Connection.read` and `write` between two processes, without digests; no handoff. A *round trip*:",
        "64 bytes to a process that sleeps in `poll`, and back. CPU: of each whole process.",
        "",
        "| one 4 KiB block | us | bare round trip | CPU of the asking side | CPU of the serving side |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        cells = []
        for key in ("seconds", "round_trip_seconds", "cpu_here", "cpu_there"):
            values = [1e6 * value for value in row[key]]
            cells.append(f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})")
        lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "What is left beside the round trip is Python at both ends, slow after each sleep of its process,",
        "when its code has left the caches: where it goes, and why not less, says",
        "[decision 184](decisions/0184-a-small-copy.md). Over shm the leave to read is read too, where it",
        "is not *asked for* ([decision 185](decisions/0185-leave-is-read.md)).",
    ]
    return lines


def speed(result: dict[str, Any]) -> list[str]:
    """What the transfer core has to reach, and what was seen."""
    cases = result["cases"].values()
    rows = [row for case in cases for row in case["rows"]]
    short = [row for row in rows if row["must"] and not row["holds"]]
    loads = [load for case in cases for load in case["load"]]
    load = f"{min(loads):.1f} to {max(loads):.1f}"
    lines = [
        "`sudo chrt -r 5 python bench/speed.py --json bench/results/speed.json`.",
        f"{result['repeat']} turns, each case beside what it is compared with; median, least and most",
        f"of the turns, bytes compared. Load meanwhile: {load}.",
        "",
        "With digests (xxh3) prefill sums a push twice inside this time: when a part is given, and at",
        "commit, which finds what its engine wrote after it had moved. A pull's offer is summed once,",
        "before.",
        "",
        "| case | how | must | seen | whole handoff | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += ["| " + " | ".join(row["cells"]) + " |" for row in rows]
    asked = sum(1 for row in rows if row["must"])
    lines += ["", f"{asked - len(short)} of {asked} that are asked for hold."]
    for row in short:
        if row["why"]:
            lines += ["", f"**{row['case']}, {row['how']}**, falls short: {row['why']}"]
    return lines


def _layers(by: dict[tuple[str, str], dict[str, Any]], shapes: list[str]) -> list[str]:
    """What each layer of kvferry takes over the library alone, in the same turn."""
    lines = [
        "What kvferry adds to the library's own transfer in the same turn: seconds over seconds, of one",
        "block microseconds more; median (least to most). The first of each library is the adapter alone,",
        "a `Connection.read` without digests; *summed* is the same with digests; a *handoff* is offer,",
        "claim, move, digests at both ends, commit and started, by two endpoints with their transfer",
        "processes.",
        "",
        "| way | over | " + " | ".join(shapes) + " |",
        "| --- | --- |" + " --- |" * len(shapes),
    ]
    for ours, theirs in OVER.items():
        cells = []
        for shape in shapes:
            pairs = list(zip(by[ours, shape]["seconds"], by[theirs, shape]["seconds"], strict=True))
            if by[ours, shape]["nbytes"] < MIB:
                more = [1e6 * (mine - alone) for mine, alone in pairs]
                cells.append(f"+{statistics.median(more):.0f} us ({min(more):.0f} to {max(more):.0f})")
            else:
                ratios = [mine / alone for mine, alone in pairs]
                cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {ours} | {theirs} | " + " | ".join(cells) + " |")
    return lines


def _cell(row: dict[str, Any], *, is_best: bool) -> str:
    seconds = sorted(row["seconds"])
    if row["nbytes"] < MIB:
        values = statistics.median(seconds) * 1e6, seconds[-1] * 1e6, seconds[0] * 1e6
        text = "{:.0f} us ({:.0f} to {:.0f})".format(*values)
    else:
        rates = (row["nbytes"] / each / 1e9 for each in (statistics.median(seconds), seconds[-1], seconds[0]))
        text = "{:.2f} ({:.2f} to {:.2f})".format(*rates)
    return f"**{text}**" if is_best else text


def vllm(result: dict[str, Any]) -> list[str]:
    """Two vLLM servers: KVFerryConnector beside vLLM's own NixlConnector."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        f"`bench/vllm.py`; {versions}. A tiny random Llama on the CPU, each server on one core;",
        f"{result['prompt_tokens']} prompt tokens, {result['repeat']} requests one after the other.",
        "Milliseconds, median (10th to 90th percentile). *decode*: fetch the KV and make one token; *alone*:",
        "the same server computes prompt and token itself. *transfer*: the mean that the connector's own",
        "metrics say: kvferry's from the claim until all is visible, digests and checks included, NIXL's the",
        "copy alone. *idle*: cores that each server's processes use when nothing is asked. *wrong*: answers",
        "unlike the same server's own.",
        "",
        "| round | connector | prefill | decode | alone | transfer | MB | idle | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in result["rows"]:
        if "error" in row:
            lines.append(f"| {row['round']} | {row['connector']} | {row['error']} |" + " |" * 6)
            continue
        times = " | ".join(
            "{p50:.0f} ({p10:.0f} to {p90:.0f})".format(**row[f"{name}_ms"])
            for name in ("prefill", "decode", "alone")
        )
        idle = ", ".join(f"{cores:.2f}" for cores in row["idle_cpu"])
        lines.append(
            f"| {row['round']} | {row['connector']} | {times} | {row['transfer_ms']:.1f} | "
            f"{row['nbytes'] / 1e6:.2f} | {idle} | {row['wrong_answers']} |"
        )
    return lines


def first_token(result: dict[str, Any]) -> list[str]:
    """What it saves to give prefill's token out at once."""

    def shown(name: str, way: dict[str, Any]) -> str:
        return "{median:.3f} ({low:.3f} to {high:.3f})".format(**way[name])

    lines = [
        f"`bench/first_token.py`, engine {result['engine']}; {result['repeats']} pairs of the same prompt of",
        f"{result['prompt_tokens']} tokens, by turns. Seconds, median (least to most).",
        "",
        "| the first token is given out by | TTFT | from the first token to the second |",
        "| --- | --- | --- |",
    ]
    for name, way in result["ways"].items():
        lines.append(f"| {name} | {shown('ttft', way)} | {shown('second_token_gap', way)} |")
    return [*lines, "", f"TTFT, prefill's over decode's, pair by pair: {shown('ttft_ratio', result)}."]


def prediction(result: dict[str, Any]) -> list[str]:
    """Handoffs beside what a profile fitted to a probe of the same pair foretells."""
    lines = [
        "Two agents in network namespaces, joined by veth with a token bucket. The fit knows only the",
        "sweep of `kvferry probe`, up to 64 MiB; what is compared are whole handoffs, made in turns with it,",
        "most of them of sizes and some in blocks that were not probed. Error: measured over predicted less",
        "one; p95 where there are 40 copies. `1G/100M`: 1 Gb/s for what prefill sends, 100 Mb/s for what",
        "decode sends.",
    ]
    for run in result["runs"]:
        machine = run["machine"]
        loads = f"{machine['load_at_start']:.1f} to {machine['load_at_end']:.1f}"
        when = f"{machine['date'][:16].replace('T', ' ')} UTC, commit {machine['commit']}"
        command = run["command"].partition(" --add ")[0]
        lines += ["", f"`{command}`, {when}, load {loads}, {machine['scheduling']}:", ""]
        lines += _predicted(run["rows"])
    return lines


def _predicted(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| rate | mode | handoff | pieces | copies | p50 | error | p95 | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        cells = [row["rate"], row["mode"], format_bytes(row["nbytes"]), row["descriptors"], row["copies"]]
        for which in ("p50", "p95"):
            off = _off(row, which)
            cells += ["", ""] if off is None else [format_seconds(row[f"{which}_seconds"]), f"{off:+.1%}"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    for rate in dict.fromkeys(row["rate"] for row in rows):
        said = []
        for which in ("p50", "p95"):
            errors = [_off(row, which) for row in rows if row["rate"] == rate]
            known = [abs(error) for error in errors if error is not None]
            if known:
                said.append(
                    f"{which} {statistics.median(known):.1%} in the middle, {max(known):.1%} at worst"
                )
        lines += ["", f"{rate}, off by: {'; '.join(said)}."]
    return lines


def _off(row: dict[str, Any], which: str) -> float | None:
    measured, predicted = row[f"{which}_seconds"], row[f"predicted_{which}_seconds"]
    return None if measured is None or predicted is None else measured / predicted - 1


SECTIONS: dict[str, tuple[str, Callable[[dict[str, Any]], list[str]]]] = {
    "prediction": ("Predictions on shaped links", prediction),
    "peers": ("kvferry beside NIXL and Mooncake", peers),
    "small_copy": ("One small copy", small_copy),
    "speed": ("Speed of the transfer core", speed),
    "vllm": ("Inside vLLM, beside its NixlConnector", vllm),
    "first_token": ("Prefill's token given out at once", first_token),
}


def put(page: str, bench: str, section: str) -> str:
    """The page with a section in place of the one that it had, or at its end."""
    begin, end = f"<!-- {bench}: written by docs/make_numbers.py -->", f"<!-- end of {bench} -->"
    before, found, rest = page.partition(begin)
    after = rest.partition(end)[2] if found else "\n"
    return f"{before.rstrip()}\n\n{begin}\n\n{section.strip()}\n\n{end}{after}"


def _machine(machine: dict[str, Any]) -> str:
    """In words; the load where it is of all that the section has."""
    text = (
        f"{machine['date'][:10]}, {machine['cpu']}, {machine['cpus']} CPUs, Linux {machine['kernel']}, "
        f"Python {machine['python']}, NumPy {machine['numpy']}, commit {machine['commit']}"
    )
    if "load_at_start" in machine:
        text += f", load {machine['load_at_start']:.1f}"
    if "load_at_end" in machine:
        text += f" at the start, {machine['load_at_end']:.1f} at the end"
    text += "."
    if machine.get("scheduling"):
        text += f" The processes of the bench ran at {machine['scheduling']}."
    if machine.get("load_at_start", 0.0) > machine["cpus"]:
        text += " The machine was busy with other work: read ratios with their spread, and rates as a floor."
    return text


def main() -> None:
    path = ROOT / "docs" / "numbers.md"
    page = path.read_text("utf-8")
    for name, (title, section) in SECTIONS.items():
        file = RESULTS / f"{name}.json"
        if file.exists():
            result = json.loads(file.read_text("utf-8"))
            lines = [f"## {title}", "", _machine(result["machine"]), "", *section(result)]
            page = put(page, name, "\n".join(lines))
    path.write_text(page, "utf-8")


if __name__ == "__main__":
    main()
