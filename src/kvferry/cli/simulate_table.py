"""What ``kvferry simulate`` prints: one JSON object, or a table with a column for each run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cli.sweep import Scenario
from kvferry.link import FAR
from kvferry.plan.sim_metrics import Percentiles
from kvferry.plan.sim_result import Result
from kvferry.units import format_bytes, format_seconds

__all__ = ["print_json", "print_tables"]

_PIPE_COLUMNS = 60
_PIPE_COLUMNS_PER_RUN = 40


def print_json(scenarios: Sequence[Scenario], results: Sequence[Result]) -> None:
    """One object for one run, ``{"runs": [...]}`` for a sweep."""
    objects = [
        {"scenario": msgspec.to_builtins(scenario), **msgspec.to_builtins(result)}
        for scenario, result in zip(scenarios, results, strict=True)
    ]
    print(msgspec.json.encode(objects[0] if len(objects) == 1 else {"runs": objects}).decode())


def print_tables(scenarios: Sequence[Scenario], results: Sequence[Result]) -> None:
    """Counts, percentiles, attainment and utilisation, side by side; unmeasured links are said on stderr."""
    far = sum(result.handoffs_too_far for result in results)
    if far:
        of = sum(result.handoffs for result in results)
        said = f"{far:,} of {of:,} handoffs have more than {FAR} times the bytes or pieces that were measured"
        print(f"kvferry: {said} on their link; probe it with such a payload", file=sys.stderr)
    beyond = sum(result.prompts_too_far + result.batches_too_far for result in results)
    if beyond:
        said = f"prompts or batches are more than {FAR} times those that a compute profile was measured at"
        print(f"kvferry: {beyond:,} {said}; measure it with such", file=sys.stderr)
    if not all(result.is_measured for result in results):
        why = (
            "a link that was used is unmeasured"
            if not far and not beyond
            else "that is more than 1 %, or a link is unmeasured"
        )
        print(f"kvferry: {why}: these times are estimates", file=sys.stderr)
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS + _PIPE_COLUMNS_PER_RUN * len(results)
    console = Console(width=width, highlight=False)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for scenario in scenarios:
        rate = "" if scenario.rate is None else f", {scenario.rate:g}/s"
        table.add_column(f"{scenario.policy}{rate}", justify="right")
    _rows(table, results)
    console.print(table)


def _rows(table: Table, results: Sequence[Result]) -> None:
    def add(label: str, texts: list[str]) -> None:
        table.add_row(label, *texts)

    add("requests", [f"{r.requests:,}" for r in results])
    if any(r.failed or r.retried for r in results):
        add("failed, begun again", [f"{r.failed:,}, {r.retried:,}" for r in results])
    add("goodput, requests/s (per GPU)", [f"{r.goodput:.3g} ({r.goodput_per_gpu:.3g})" for r in results])
    add("within both targets", [f"{r.slo_attainment:.1%}" for r in results])
    add("within TTFT, within TPOT", [f"{r.ttft_attainment:.1%}, {r.tpot_attainment:.1%}" for r in results])
    for label, field in (
        ("TTFT", "ttft"),
        ("TPOT", "tpot"),
        ("wait for prefill", "prefill_wait"),
        ("wait for room at decode", "room_wait"),
        ("transfer", "transfer"),
        ("exposed transfer", "exposed"),
    ):
        add(f"{label}: mean, p50, p90, p99", [_times(getattr(r, field)) for r in results])
    add("prefill busy", [f"{r.prefill_utilisation:.0%}" for r in results])
    add("prefix hits", [f"{r.prefix_hit_share:.0%} of prompt tokens" for r in results])
    add("moved", [f"{format_bytes(r.bytes_sent)} in {r.handoffs:,} handoffs" for r in results])
    for kind in sorted({kind for r in results for kind in r.link_utilisation}):
        add(f"{kind} links: mean, busiest", [_use(r, kind) for r in results])


def _times(found: Percentiles) -> str:
    times = (found.mean, found.p50, found.p90, found.p99)
    return ", ".join("-" if seconds is None else format_seconds(seconds) for seconds in times)


def _use(result: Result, kind: str) -> str:
    use = result.link_utilisation.get(kind)
    return "-" if use is None else f"{use.mean:.1%}, {use.most:.1%} ({use.busiest})"
