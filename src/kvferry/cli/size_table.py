"""What ``kvferry size`` prints: one JSON object, or tables for a person."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.link.presets import link_preset
from kvferry.model import Growth
from kvferry.size import GroupSize, KVSize
from kvferry.units import format_rate, format_seconds, format_size

__all__ = ["SHOWN_LINKS", "LinkTime", "link_times", "print_json", "print_tables", "short_names"]

SHOWN_LINKS = ("nvlink4", "ib-ndr400", "eth100", "eth25")
"""Presets of which the time is shown: inside a node, between nodes, and what many clusters have."""

_LINK_TITLE = "time of the wire bytes at brochure rates: unmeasured, no start-up or per-piece cost"
_PIPE_COLUMNS = 120
_PIPE_COLUMNS_PER_MODEL = 40


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


def print_json(models: Sequence[str], sizes: Sequence[KVSize]) -> None:
    """One object for one model; ``{"models": [...]}`` for several."""
    objects = [
        {"model": model, **msgspec.to_builtins(size), "link_times": msgspec.to_builtins(link_times(size))}
        for model, size in zip(models, sizes, strict=True)
    ]
    print(msgspec.json.encode(objects[0] if len(objects) == 1 else {"models": objects}).decode())


def print_tables(models: Sequence[str], sizes: Sequence[KVSize]) -> None:
    """Per model its layer groups; then the totals of all models side by side, and the link times."""
    names = short_names(models)
    width = None if sys.stdout.isatty() else max(_PIPE_COLUMNS, 20 + _PIPE_COLUMNS_PER_MODEL * len(models))
    console = Console(width=width, highlight=False)
    for name, size in zip(names, sizes, strict=True):
        console.print(_title(name, size), _groups_table(size), sep="\n")
    console.print(_totals_table(names, sizes))
    console.print(_LINK_TITLE, _link_table(names, sizes), sep="\n")


def short_names(models: Sequence[str]) -> list[str]:
    """Short names: a file's folder for a config.json; the arguments themselves where two would be alike."""
    short = []
    for model in models:
        path = Path(model)
        named = path.parent if path.name == "config.json" else path
        short.append(model if model.startswith("shape:") else named.name or model)
    return short if len(set(short)) == len(short) else list(models)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _title(name: str, size: KVSize) -> str:
    blocks = "not paged" if size.block_size is None else f"blocks of {size.block_size}"
    return (
        f"{name} ({size.model_type}): {size.tokens:,} tokens, {size.cached_tokens:,} of them at decode, "
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
    return f"{'draft ' if group.is_draft else ''}{group.kind}{limit}"


def _growth(group: GroupSize) -> str:
    if group.bytes_per_token:
        until = f" until {group.limit_tokens:,}" if group.limit_tokens else ""
        return f"{group.bytes_per_token:,} per token{until}"
    return "up to its chunk" if group.kind.growth is Growth.CHUNK else "constant"


def _totals_table(names: Sequence[str], sizes: Sequence[KVSize]) -> Table:
    table = _table("", *names)
    glue = " = " if len(sizes) == 1 else "\n"

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
