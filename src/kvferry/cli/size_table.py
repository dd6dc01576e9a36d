"""What ``kvferry size`` prints: one JSON object, or tables for a person."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from kvferry.cli.size_models import SizedModel
from kvferry.cli.streams import printable
from kvferry.link.presets import link_preset
from kvferry.model import Growth
from kvferry.size import GroupSize, KVSize
from kvferry.units import format_rate, format_seconds, format_size

__all__ = ["SHOWN_LINKS", "LinkTime", "link_times", "print_json", "print_tables"]

SHOWN_LINKS = ("nvlink4", "ib-ndr400", "eth100", "eth25")
"""Presets of which the time is shown: inside a node, between nodes, and what many clusters have."""

_LINK_TITLE = "time of the wire bytes at brochure rates: unmeasured, no start-up or per-piece cost"
_PIPE_COLUMNS = 120
_ANY_COLUMNS = 10_000  # to measure a table by itself


class LinkTime(msgspec.Struct, frozen=True):
    """Wire bytes at a brochure rate: no start-up cost, no cost per descriptor, not measured."""

    link: str
    bytes_per_second: float
    seconds: float
    is_measured: bool


def link_times(size: KVSize) -> list[LinkTime]:
    """The time of ``wire_bytes`` over each of :data:`SHOWN_LINKS`."""
    presets = [link_preset(name) for name in SHOWN_LINKS]
    return [
        LinkTime(p.name, p.bytes_per_second, size.wire_bytes / p.bytes_per_second, p.is_measured)
        for p in presets
    ]


def print_json(sized: Sequence[SizedModel]) -> None:
    """One object for one model; ``{"models": [...]}`` for several."""
    objects = [
        {
            "model": printable(entry.model),
            **msgspec.to_builtins(entry.size),
            "link_times": msgspec.to_builtins(link_times(entry.size)),
        }
        for entry in sized
    ]
    print(msgspec.json.encode(objects[0] if len(objects) == 1 else {"models": objects}).decode())


def print_tables(sized: Sequence[SizedModel]) -> None:
    """Per model its layer groups; then the totals of all models side by side, and the link times.

    No number is ever cut: what does not fit is stacked, and a line that still does not is longer
    than the terminal, which wraps it.
    """
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
    names = [entry.name for entry in sized]
    sizes = [entry.size for entry in sized]
    totals = _totals_table(names, sizes, " = ")
    if len(sized) > 1 or _width(totals) > columns:
        totals = _totals_table(names, sizes, "\n")
    groups = [_groups_table(size) for size in sizes]
    links = _link_table(names, sizes)
    wide = max(columns, *(_width(table) for table in (*groups, totals, links)))
    console = _console(wide)
    for name, size, table in zip(names, sizes, groups, strict=True):
        console.print(_title(name, size), table, sep="\n")
    console.print(totals)
    console.print(_LINK_TITLE, links, sep="\n")


def _console(width: int) -> Console:
    # Names in the tables are a stranger's: no markup, no emoji, nothing but the text.
    return Console(width=width, highlight=False, markup=False, emoji=False)


def _width(table: Table) -> int:
    console = _console(_ANY_COLUMNS)
    return Measurement.get(console, console.options, table).maximum


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _title(name: str, size: KVSize) -> str:
    blocks = "not paged" if size.block_size is None else f"blocks of {size.block_size}"
    kind = printable(size.model_type)
    return (
        f"{name} ({kind}): {size.tokens:,} tokens, {size.cached_tokens:,} of them at decode, "
        f"tp {size.tp}, pp {size.pp}, {blocks}"
    )


def _groups_table(size: KVSize) -> Table:
    columns = ("layers", "dtype", "bytes", "constant or per token", "on the wire", "pieces")
    table = _table("layer group", *columns)
    for group in size.groups:
        table.add_row(
            _group_name(group),
            str(group.layers),
            " ".join(group.dtypes),
            f"{group.logical_bytes:,}",
            _growth(group),
            f"{group.wire_bytes:,}",
            f"{group.descriptors:,}",
        )
    return table


def _group_name(group: GroupSize) -> str:
    limit = f" {group.limit_tokens:,}" if group.limit_tokens else ""
    limit += f" 1/{group.ratio}" if group.ratio > 1 else ""
    return f"{'draft ' if group.is_draft else ''}{group.kind}{limit}"


def _growth(group: GroupSize) -> str:
    if group.bytes_per_token:
        until = f" until {group.limit_tokens:,}" if group.limit_tokens else ""
        return f"{group.bytes_per_token:,} per token{until}"
    return "0 up to a chunk" if group.kind.growth is Growth.CHUNK else "constant"


def _totals_table(names: Sequence[str], sizes: Sequence[KVSize], glue: str) -> Table:
    table = _table("", *names)

    def add(label: str, texts: list[str]) -> None:
        table.add_row(label, *texts)

    def add_bytes(label: str, values: list[int]) -> None:
        add(label, [f"{value:,} B{glue}{format_size(value)}" for value in values])

    add_bytes("logical: exact, one copy", [size.logical_bytes for size in sizes])
    add_bytes("blocked: whole blocks, one copy", [size.blocked_bytes for size in sizes])
    add_bytes("per rank: the fullest", [max(size.rank_bytes) for size in sizes])
    add_bytes("allocated: all ranks", [size.allocated_bytes for size in sizes])
    add_bytes("wire: what crosses", [size.wire_bytes for size in sizes])
    add("  of it the state record (estimate)", [f"{size.state_bytes:,} B" for size in sizes])
    add("descriptors: pieces on the wire", [f"{size.descriptors:,}" for size in sizes])
    add("constant part", [f"{size.constant_bytes:,} B" for size in sizes])
    add("per token", [f"{size.bytes_per_token:,} B" for size in sizes])
    return table


def _link_table(names: Sequence[str], sizes: Sequence[KVSize]) -> Table:
    table = _table("link, one direction", *names)
    for times in zip(*(link_times(size) for size in sizes), strict=True):
        label = f"{times[0].link}, {format_rate(times[0].bytes_per_second)}, unmeasured"
        table.add_row(label, *(format_seconds(time.seconds) for time in times))
    return table
