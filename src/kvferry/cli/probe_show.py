"""What ``kvferry probe`` shows: a bar while it runs, then the matrix, the fits and what is odd about them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from kvferry.cli.bars import Bars
from kvferry.cli.link_show import fits_table, matrices, outlier_line, pairs_table
from kvferry.cli.output import write_whole
from kvferry.cli.probe_payload import Wanted
from kvferry.link import LinkFile, LinkProfile, encode_links, find_outliers, summarise
from kvferry.link.profile import ConditionFit
from kvferry.probe import ProbeResult
from kvferry.probe import Progress as Stage
from kvferry.units import format_bytes, format_seconds

__all__ = ["ProbeBar", "print_json", "show", "write"]

_PIPE_COLUMNS = 160


class ProbeBar(Bars):
    """One bar for all stages, with the time left and what is measured now."""

    def __init__(self) -> None:
        count = TextColumn("probe {task.completed:.0f}/{task.total:.0f}")
        super().__init__(
            {"": ""}, count, BarColumn(), TimeRemainingColumn(), TextColumn("{task.fields[text]}")
        )

    def on_progress(self, stage: Stage) -> None:
        """Part of a stage is done."""
        self.update("", stage.stage + stage.share, stage.stages, stage.what)


def write(links: LinkFile, out: Path) -> None:
    """The link file, readable by a person and by the other verbs; the old one stays until it is whole."""
    write_whole(out, encode_links(links), "out")


def print_json(result: ProbeResult, unreachable: Mapping[str, str], payloads: Wanted) -> None:
    """One object on stdout: a row for each pair and condition, and what could not be measured."""
    rows = [_row(pair, entry) for pair in result.links.pairs for entry in pair.fits]
    summaries = [
        {
            "payload": each.name,
            "pairs": _summaries(result.links, each.payload.moved_nbytes, each.payload.block_bytes),
        }
        for each in payloads.named
    ]
    shown = {
        "pairs": rows,
        "predicted": summaries,
        "outliers": find_outliers(result.links),
        "failed": result.failures,
        "unreachable": unreachable,
        "notes": result.notes,
        "seconds": result.seconds,
    }
    print(msgspec.json.encode(shown).decode())


def _summaries(links: LinkFile, nbytes: int, block_bytes: int) -> list[dict[str, Any]]:
    keys = ("from", "to", "transport_used", "mode", "tls", "incast", "under_load", "seconds", "p95_seconds")
    rows = [msgspec.to_builtins(row) for row in summarise(links, nbytes, block_bytes)]
    return [{key: row[key] for key in (*keys, "bytes_per_second", "share_of_line_rate")} for row in rows]


def _row(pair: LinkProfile, entry: ConditionFit) -> dict[str, Any]:
    fit = entry.fit
    return {
        "from": pair.from_node,
        "to": pair.to_node,
        "transport_used": pair.transport,
        "path": pair.path,
        "via": pair.via,
        "class": pair.link_class,
        "mode": entry.mode,
        "tls": entry.tls,
        "incast": entry.incast,
        "under_load": entry.under_load,
        "registration_seconds": pair.registration.seconds if pair.registration else None,
        "first_contact_seconds": pair.first_contact_seconds,
        "samples": [
            msgspec.to_builtins(sample) for sample in pair.samples if sample.conditions == entry.conditions
        ],
        "fit": {
            "a_seconds": fit.a_seconds,
            "o_seconds": fit.o_seconds,
            "bytes_per_second": fit.bytes_per_second,
            "worst_error": fit.worst_error,
        },
    }


def show(result: ProbeResult, unreachable: Mapping[str, str], payloads: Wanted, out: Path | None) -> None:
    """For a person: what each pair does with each payload, the fits, the slow pairs, what failed."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    links = result.links
    pairs = summarise(links)
    for each in payloads.named if links.pairs else ():
        payload = each.payload
        say(
            f"{each.name}: handoffs of {format_bytes(payload.moved_nbytes)} in {payload.descriptors:,} blocks"
        )
        pairs = summarise(links, payload.moved_nbytes, payload.block_bytes)
        for matrix in matrices(pairs):
            console.print(matrix)
        console.print(pairs_table(pairs))
    if links.pairs:
        console.print(fits_table(pairs))
    for pair in links.pairs:
        say(_apart(pair))
    for outlier in find_outliers(links):
        say(outlier_line(outlier))
    for note in result.notes:
        say(f"note: {note}")
    for failure in result.failures:
        way = f"{failure.from_node} -> {failure.to_node} over {failure.transport}, {failure.conditions}"
        say(f"not measured: {way}: {failure.reason}")
    for address, reason in unreachable.items():
        say(f"not reached: {address}: {reason}")
    written = f"; written to {out}" if out is not None and links.pairs else ""
    say(f"{len(links.pairs)} pairs in {format_seconds(result.seconds)}{written}")


def _apart(pair: LinkProfile) -> str:
    """What is no part of a copy's time."""
    parts = []
    if pair.registration is not None:
        known = pair.registration
        parts.append(f"registration of {format_bytes(known.nbytes)} {format_seconds(known.seconds)}")
    if pair.first_contact_seconds is not None:
        parts.append(f"first contact {format_seconds(pair.first_contact_seconds)} beyond a warm copy")
    return f"once, {pair.pair}: {', '.join(parts) or 'nothing'}"
