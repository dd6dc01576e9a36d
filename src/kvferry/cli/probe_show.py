"""What ``kvferry probe`` shows: bars while it runs, then a table of each transport and mode."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvferry.errors import InputError
from kvferry.link import LinkFile, LinkProfile, Mode, encode_links
from kvferry.probe import Payload
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = ["TransportBars", "print_json", "show", "write"]


class TransportBars:
    """A bar for each transport, on stderr, gone at the end."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("probe {task.description:<6}"),
            BarColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,  # in a log, bars would be noise
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def update(self, transport: str, done: int, total: int) -> None:
        """A copy is done."""
        if transport not in self._tasks:
            self._tasks[transport] = self._bars.add_task(transport, total=total)
        self._bars.update(self._tasks[transport], completed=done)


def write(links: LinkFile, out: Path) -> None:
    """The link file, readable by a person and by the other verbs."""
    try:
        out.write_bytes(encode_links(links))
    except OSError as error:
        raise InputError(f"out: {out}: {error.strerror}") from error


def print_json(links: LinkFile) -> None:
    """One object on stdout: a row for each pair and mode."""
    rows = [_row(pair, entry.mode) for pair in links.pairs for entry in pair.fits]
    print(msgspec.json.encode({"pairs": rows}).decode())


def _row(pair: LinkProfile, mode: Mode) -> dict[str, Any]:
    fit = pair.fit(mode)
    return {
        "from": pair.from_node,
        "to": pair.to_node,
        "transport_used": pair.transport,
        "path": pair.path,
        "mode": mode,
        "samples": [msgspec.to_builtins(sample) for sample in pair.samples if sample.mode is mode],
        "fit": {
            "a_seconds": fit.a_seconds,
            "o_seconds": fit.o_seconds,
            "bytes_per_second": fit.bytes_per_second,
            "worst_error": fit.worst_error,
        },
    }


def show(links: LinkFile, largest: Payload) -> None:
    """For a person: the largest payload as measured, and the model's three numbers."""
    size = format_bytes(largest.moved_nbytes)
    table = Table(title=f"whole handoffs of {size} in blocks of {format_bytes(largest.block_bytes)}")
    for name in ("by", "mode", "median", "rate", "a copy", "a descriptor", "bytes", "worst error of the fit"):
        table.add_column(name, justify="left" if name in ("by", "mode") else "right")
    for pair in links.pairs:
        for entry in pair.fits:
            fit = entry.fit
            seconds = median(
                sample.seconds
                for sample in pair.samples
                if sample.mode is entry.mode and not sample.is_cold and sample.nbytes == largest.moved_nbytes
            )
            table.add_row(
                f"{pair.transport} ({pair.path})",
                entry.mode,
                format_seconds(seconds),
                format_rate(largest.moved_nbytes / seconds),
                _or_unknown(fit.a_seconds, format_seconds),
                _or_unknown(fit.o_seconds, format_seconds),
                _or_unknown(fit.bytes_per_second, format_rate),
                _or_unknown(fit.worst_error, lambda error: f"{100 * error:.0f} %"),
            )
    Console().print(table)


def _or_unknown(value: float | None, show_value: Any) -> str:
    return "not told" if value is None else str(show_value(value))
