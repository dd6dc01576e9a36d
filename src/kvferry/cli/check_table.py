"""What ``kvferry check`` prints: one JSON object, or the split as bars, the verdict and the flips."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.plan.break_even import break_even
from kvferry.plan.check import Answer, Verdict
from kvferry.plan.explain import Equation
from kvferry.plan.flips import Flip
from kvferry.plan.promise import FirstToken, Promise
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = ["print_equations", "print_json", "print_tables"]

_BAR_CELLS = 40
_PIPE_COLUMNS = 120


def print_json(
    model: str,
    promise: Promise,
    found: Answer,
    turned: Mapping[str, Flip],
    equations: Sequence[Equation],
) -> None:
    """One object. An infinite time (a queue without end) is null."""
    shown: dict[str, object] = {
        "model": model,
        "verdict": found.verdict,
        "ttft_seconds": found.ttft_seconds,
        "target_seconds": found.target_seconds,
        "slack_seconds": found.slack_seconds,
        "split": found.split,
        "binding": found.binding,
        "flips": turned,
        "unknown": found.unknown,
        "is_measured": found.is_measured,
        "prompt_tokens": promise.prompt_tokens,
        "cached_tokens": promise.cached_tokens,
        "wire_bytes": found.payload.nbytes,
        "descriptors": found.payload.descriptors,
        "transfer": found.transfer,
        "groups": promise.num_parts,
        "first_token": promise.first_token,
        "second_token_gap_seconds": found.gap_seconds,
        "quantile": promise.way.quantile,
        "link": promise.way.link.pair,
        "link_label": promise.way.link.label,
        "break_even": break_even(promise),
        "warnings": found.warnings,
    }
    if equations:
        shown["equations"] = equations
    print(msgspec.json.encode(shown).decode())


def print_tables(
    model: str,
    promise: Promise,
    found: Answer,
    turned: Mapping[str, Flip],
    equations: Sequence[Equation],
) -> None:
    """The payload, the split as bars, the verdict, the flips; warnings on stderr."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    console = Console(width=width, highlight=False)
    for warning in found.warnings:
        print(f"kvferry: {warning}", file=sys.stderr)
    console.print(
        f"{model}: {promise.prompt_tokens:,} prompt tokens, {promise.cached_tokens:,} of them cached; "
        f"{format_bytes(found.payload.nbytes)} in {found.payload.descriptors:,} pieces"
    )
    link = promise.way.link
    console.print(
        f"{link.pair}, {link.label}: {format_seconds(found.transfer.seconds)} "
        f"for the payload at p{100 * promise.way.quantile:g}{_rate(found)}"
    )
    console.print(_split_table(promise, found))
    console.print(_verdict_line(found), style=_STYLE[found.verdict])
    for reason in found.unknown:
        console.print(f"  {reason}")
    if turned:
        console.print(_flip_table(turned, is_estimate=bool(found.unknown)))
    if equations:
        print_equations(console, equations)


_STYLE = {Verdict.HOLDS: "green", Verdict.DOES_NOT_HOLD: "red", Verdict.UNKNOWN: "yellow"}


def _rate(found: Answer) -> str:
    if not found.transfer.seconds:
        return ""
    return f", {format_rate(found.payload.nbytes / found.transfer.seconds)}"


def _split_table(promise: Promise, found: Answer) -> Table:
    split = found.split
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("TTFT")
    table.add_column("time", justify="right")
    table.add_column("estimate" if found.unknown else "", no_wrap=True)
    longest = max(found.target_seconds, *(t for t in (split.total,) if math.isfinite(t)), 1e-12)
    names = {
        "prefill queue": split.queue_seconds,
        "prefill": split.prefill_seconds,
        "link queue": split.link_queue_seconds,
        "exposed transfer": split.exposed_transfer_seconds,
        "first decode step": split.first_decode_step_seconds,
    }
    if promise.first_token is FirstToken.PREFILL:
        names = {name: seconds for name, seconds in names.items() if name in {"prefill queue", "prefill"}}
    before = 0.0
    for name, seconds in names.items():
        table.add_row(name, _time(seconds), _bar(before, seconds, longest))
        before += seconds
    total = "unknown" if found.ttft_seconds is None else _time(found.ttft_seconds)
    table.add_section()
    table.add_row("all", total, "")
    table.add_row("promised", format_seconds(found.target_seconds), _mark(found.target_seconds, longest))
    if found.gap_seconds is not None:
        table.add_row("gap to the second token", _time(found.gap_seconds), "")
    return table


def _time(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "no end"


def _bar(before: float, seconds: float, longest: float) -> str:
    """A bar that begins where the parts before it end; anything above 0 shows."""
    if not math.isfinite(before + seconds):
        return "█" * _BAR_CELLS + "▶"
    start, cells = before / longest * _BAR_CELLS, seconds / longest * _BAR_CELLS
    return " " * round(start) + ("█" * max(1, round(cells)) if seconds > 0 else "")


def _mark(seconds: float, longest: float) -> str:
    return " " * max(0, round(seconds / longest * _BAR_CELLS) - 1) + "|"


def _verdict_line(found: Answer) -> str:
    if found.unknown and found.verdict is Verdict.DOES_NOT_HOLD:
        over = found.split.without_link - found.target_seconds
        if over > 0 and found.is_within_profile:
            return f"{found.verdict}: {_time(over)} too long without any link; binding: {found.binding}"
        return f"{found.verdict}: too long already as far as was measured; binding: {found.binding}"
    if found.slack_seconds is None:
        return f"{found.verdict}; binding: {found.binding}"
    spare = found.slack_seconds
    margin = f"{_time(spare)} to spare" if spare >= 0 else f"{_time(-spare)} too long"
    estimate = "by the estimate " if found.verdict is Verdict.UNKNOWN else ""
    return f"{found.verdict}: {estimate}{margin}; binding: {found.binding}"


def _flip_table(turned: Mapping[str, Flip], *, is_estimate: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("turned alone")
    table.add_column("flips at", justify="right")
    table.add_column("estimate" if is_estimate else "")
    for knob, flip in turned.items():
        table.add_row(knob.replace("_", " "), _value(knob, flip), flip.says)
    return table


def _value(knob: str, flip: Flip) -> str:
    match flip.value:
        case None:
            return "-"
        case str():
            return flip.value
        case float() if knob == "min_bytes_per_second":
            return format_rate(flip.value, round_up=True).split(" (")[0]
        case float():
            return f"{math.ceil(100 * flip.value - 1e-9)}%"
        case int():
            return f"{flip.value:,}"


def print_equations(console: Console, equations: Sequence[Equation]) -> None:
    """Each equation, its numbers, its result."""
    for equation in equations:
        console.print(f"{equation.name}: {equation.formula}", style="bold")
        console.print(f"  = {equation.filled}", soft_wrap=True)
        value = f"{equation.value:,}" if isinstance(equation.value, int) else f"{equation.value:.6g}"
        console.print(f"  = {value} {equation.unit}")
