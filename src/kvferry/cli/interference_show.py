"""What ``kvferry interference`` shows: bars while it measures, then laws, errors and gaps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvferry.cli.output import write_whole
from kvferry.cli.streams import printable
from kvferry.interference import Measured
from kvferry.plan.compute import PrefillTable
from kvferry.units import format_seconds

__all__ = ["STAGES", "show", "write"]

STAGES = {
    "check": "is the server fit for it",
    "prefill": "prefill alone",
    "decode": "decode alone",
    "mixed": "decode beside prompts",
}


def write(made: dict[str, Any], out: Path) -> None:
    """To a file. Raises InputError naming it."""
    write_whole(out, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n", "out")


def show(measured: Measured) -> None:
    """For a person."""
    console = Console()
    profile = measured.profile
    head = f"{printable(profile.model)}: {measured.requests} requests in {format_seconds(measured.seconds)}"
    console.print(head, markup=False)
    console.print(_laws(measured))
    console.print(_alone(measured))
    if measured.tails:
        console.print(_tails(measured))
    for line in (*measured.notes, *(f"not measured: {reason}" for reason in measured.skipped)):
        console.print(line, markup=False)


def _laws(measured: Measured) -> Table:
    profile, mixed = measured.profile, measured.mixed
    table = Table.grid(padding=(0, 2))
    if isinstance(profile.prefill, PrefillTable):
        lengths = len(profile.prefill.tokens)
        table.add_row("prefill", f"a table of {lengths} lengths; no law fits within 15 %")
    else:
        law = profile.prefill
        table.add_row(
            "prefill",
            f"{format_seconds(law.a_seconds)} + {law.b_seconds_per_token * 1e6:.4g} us a token"
            f" + {law.c_seconds_per_square_token * 1e12:.4g} ps a token squared",
        )
    decode = profile.decode
    table.add_row(
        "decode",
        f"{format_seconds(decode.a_seconds)}"
        f" + {decode.b_seconds_per_context_token * 1e9:.4g} ns a context token"
        f" + {format_seconds(decode.c_seconds_per_request)} a request",
    )
    table.add_row("worst error of a fit", f"{profile.worst_error or 0:.1%}")
    if mixed.mixed_share is not None:
        error = "" if mixed.standard_error is None else f" +- {mixed.standard_error:.2f}"
        table.add_row(
            "mixed step",
            f"the longer phase + {mixed.mixed_share:.2f}{error} of the shorter"
            f" (chunks of {measured.chunk_tokens} tokens)"
            + ("" if mixed.identified is not None else ", not identified"),
        )
    return table


def _alone(measured: Measured) -> Table:
    table = Table("decode alone: batch", "context each", "p50", "p95", "p99", "steps")
    for alone in measured.alone:
        itl = alone.itl
        table.add_row(
            str(alone.batch),
            f"{alone.context_tokens:.0f}",
            *map(format_seconds, (itl.p50, itl.p95, itl.p99)),
            str(itl.samples),
        )
    return table


def _tails(measured: Measured) -> Table:
    table = Table("beside, a second", "prefill share", "mean (foretold)", "p95 (foretold)", "p99 (foretold)")
    for tail in measured.tails:
        cells = []
        for seen, said, name in (
            (tail.measured.mean, tail.mean_seconds, "mean"),
            (tail.measured.p95, tail.p95_seconds, "p95"),
            (tail.measured.p99, tail.p99_seconds, "p99"),
        ):
            error = f", {tail.errors[name]:+.0%}" if name in tail.errors else ""
            cells.append(f"{format_seconds(seen)} ({format_seconds(said)}{error})")
        table.add_row(f"{tail.requests_per_second:.3g}", f"{tail.prefill_share:.0%}", *cells)
    return table
