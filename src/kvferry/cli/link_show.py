"""What ``kvferry link`` prints: one JSON object, or tables and sentences for a person."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.link import Drift, Line, LinkDiff, Merged, Outlier, PairSummary, PublishedFigure, Verdict
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = [
    "Shown",
    "fits_table",
    "matrices",
    "outlier_line",
    "pairs_table",
    "print_diff",
    "print_json",
    "print_merged",
    "print_show",
]

_PIPE_COLUMNS = 160
_FEWEST_NODES, _MOST_NODES = 3, 12


class Shown(msgspec.Struct, frozen=True):
    """One file, and what is shown of it."""

    file: str
    pairs: tuple[PairSummary, ...]
    outliers: tuple[Outlier, ...]
    published: tuple[PublishedFigure, ...]


def print_json(value: object) -> None:
    """One object on stdout."""
    print(msgspec.json.encode(value).decode())


def print_show(files: Sequence[Shown]) -> None:
    """Per file its pairs, the fits behind them, and the slow pairs."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    for shown in files:
        console.print(shown.file, style="bold", markup=False)
        for matrix in matrices(shown.pairs):
            console.print(matrix)
        console.print(pairs_table(shown.pairs), fits_table(shown.pairs), sep="\n")
        for outlier in shown.outliers:
            console.print(outlier_line(outlier), markup=False)
        for figure in shown.published:
            rate = format_rate(figure.bytes_per_second)
            console.print(f"  measured elsewhere: {rate}, {figure.what} ({figure.source})", markup=False)


def matrices(pairs: Sequence[PairSummary]) -> list[Table]:
    """Rate and p95 from each node (rows) to each node (columns), one table a way and condition.

    None for fewer than three nodes, which the list shows as well, or more than a screen takes.
    """
    nodes = list(dict.fromkeys(name for pair in pairs for name in (pair.from_node, pair.to_node)))
    if not _FEWEST_NODES <= len(nodes) <= _MOST_NODES:
        return []
    groups: dict[tuple[str, ...], dict[tuple[str, str], PairSummary]] = {}
    for pair in pairs:
        way = (pair.transport, pair.via, str(pair.conditions))
        groups.setdefault(way, {})[pair.from_node, pair.to_node] = pair
    tables = []
    for (transport, via, conditions), cells in groups.items():
        title = ", ".join(part for part in (transport, via, conditions) if part)
        table = _table(escape(f"{title}: from \\ to"), *map(escape, nodes))
        for row in nodes:
            _add_row(table, row, *(_cell(cells.get((row, column))) for column in nodes))
        tables.append(table)
    return tables


def _cell(pair: PairSummary | None) -> str:
    if pair is None or pair.bytes_per_second is None:
        return "" if pair is None else "unknown"
    tail = "" if pair.p95_seconds is None else f"\np95 {format_seconds(pair.p95_seconds)}"
    return format_rate(pair.bytes_per_second).partition(" (")[0] + tail


def pairs_table(pairs: Sequence[PairSummary]) -> Table:
    """What a copy takes on each pair."""
    table = _table("from", "to", "over", "class", "how", "")
    for name in ("copy", "time", "p95", "rate", "of line"):
        table.add_column(name, justify="right")
    for pair in pairs:
        share = "" if pair.share_of_line_rate is None else f"{pair.share_of_line_rate:.0%}"
        rate = "" if pair.bytes_per_second is None else format_rate(pair.bytes_per_second)
        _add_row(
            table,
            pair.from_node,
            pair.to_node,
            _over(pair),
            pair.link_class,
            str(pair.conditions) if pair.measured else "",
            pair.label,
            f"{format_bytes(pair.nbytes)} in {pair.descriptors:,}",
            _time(pair),
            "" if pair.p95_seconds is None else format_seconds(pair.p95_seconds),
            rate,
            share,
        )
    return table


def _over(pair: PairSummary) -> str:
    return " via ".join(part for part in (pair.path or pair.transport, pair.via) if part)


def _time(pair: PairSummary) -> str:
    if pair.seconds is not None:
        return format_seconds(pair.seconds) + ("*" if pair.beyond else "")
    return f"at least {format_seconds(pair.at_least_seconds)}"


def fits_table(pairs: Sequence[PairSummary]) -> Table:
    """The parameters of each fit, how well they fit, and what they cannot say."""
    table = _table("from", "to", "over", "how")
    for name in ("start", "a descriptor", "rate", "worst error", "copies"):
        table.add_column(name, justify="right")
    table.add_column("of")
    table.add_column("notes")
    for pair in pairs:
        fit = pair.fit
        covered = "" if fit.nbytes is None else f"{_bytes(fit.nbytes.low)} to {_bytes(fit.nbytes.high)}"
        _add_row(
            table,
            pair.from_node,
            pair.to_node,
            _over(pair),
            str(pair.conditions) if pair.measured else "",
            *_parameters(fit),
            "" if fit.worst_error is None else f"{fit.worst_error:.1%}",
            f"{fit.samples:,}",
            covered,
            "; ".join(_notes(pair)),
        )
    return table


def _parameters(line: Line) -> tuple[str, str, str]:
    return (
        "unknown" if line.a_seconds is None else format_seconds(line.a_seconds),
        "unknown" if line.o_seconds is None else format_seconds(line.o_seconds),
        "unknown" if line.bytes_per_second is None else format_rate(line.bytes_per_second),
    )


def _notes(pair: PairSummary) -> list[str]:
    fit = pair.fit
    notes = ["descriptors overlap with bytes"] if fit.descriptors_overlap else []
    if fit.knee is not None:
        start, descriptor, rate = _parameters(fit.knee)
        notes.append(f"from {_bytes(fit.knee.from_nbytes)} on: {start}, {descriptor}, {rate}")
    if pair.unknown:
        notes.append(pair.unknown)
    notes += [f"* {text}" for text in pair.beyond]
    return notes


def outlier_line(outlier: Outlier) -> str:
    """A slow pair in one sentence."""
    return (
        f"slow: {outlier.pair}, {outlier.conditions}: {_copy(outlier.nbytes, outlier.descriptors)} takes "
        f"{format_seconds(outlier.seconds)}, {outlier.ratio:.1f} times the median of its class "
        f"({format_seconds(outlier.median_seconds)}); {outlier.detail}"
    )


def print_diff(diff: LinkDiff) -> None:
    """A sentence for each pair, what drifted first; then the count."""
    order = [Verdict.SLOWER, Verdict.MIXED, Verdict.UNKNOWN, Verdict.FASTER, Verdict.SAME]
    for drift in sorted(diff.drifts, key=lambda drift: order.index(drift.verdict)):
        print("\n".join(_drift_lines(drift)))
    for pairs, which in ((diff.only_old, "old"), (diff.only_new, "new")):
        for pair in pairs:
            print(f"only in the {which} file: {pair}")
    counts = Counter(drift.verdict for drift in diff.drifts)
    parts = [f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict]]
    print(f"{len(diff.drifts)} compared: {', '.join(parts) or 'none'}")


def _drift_lines(drift: Drift) -> list[str]:
    lines = [f"{drift.verdict}: {drift.pair}, {drift.conditions}"]
    for change in drift.changes:
        tail = ""
        if change.old_p95_seconds is not None and change.new_p95_seconds is not None:
            tails = (format_seconds(change.new_p95_seconds), format_seconds(change.old_p95_seconds))
            tail = f"; p95 {tails[0]}, was {tails[1]}"
        lines.append(
            f"  {change.verdict}: {_copy(change.nbytes, change.descriptors)} takes "
            f"{format_seconds(change.new_seconds)}, was {format_seconds(change.old_seconds)} "
            f"({change.change:+.1%}, noise {change.noise:.1%}){tail}"
        )
    return lines + [f"  {reason}" for reason in drift.reasons]


def print_merged(out: Path, merged: Merged, count: int) -> None:
    """How many pairs came from how many files."""
    print(f"{out}: {len(merged.links.pairs)} pairs from {count} files")


def _copy(nbytes: int, descriptors: int) -> str:
    return f"{_bytes(nbytes)} in {descriptors:,} piece{'s' if descriptors > 1 else ''}"


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes).partition(" (")[0]


def _add_row(table: Table, *cells: str) -> None:
    # Names are a person's: "[red]" is a name here and no colour.
    table.add_row(*map(escape, cells))


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
