"""What ``kvferry demo`` shows: bars while it runs, then what moved and what took the time."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.status import Status
from rich.table import Table

from kvferry.cli.bars import Bars
from kvferry.demo import DemoResult
from kvferry.demo.serving import Served
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = ["StageBars", "StageLine", "print_json", "show", "show_served"]

_STAGES = {
    "load": "load the model",
    "prefill": "prefill worker: prompt",
    "decode": "decode worker: output",
    "alone": "one process: the same",
}


class StageBars(Bars):
    """Of the demo's stages."""

    def __init__(self) -> None:
        super().__init__(_STAGES)


class StageLine:
    """One line on stderr that says what is waited for, while something is."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._status = Status("starting", console=console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """What is waited for now."""
        if self._status is not None:
            self._status.update(text)

    def stop(self) -> None:
        """Nothing is."""
        if self._status is not None:
            self._status.stop()


def show_served(served: Served, *, as_json: bool) -> None:
    """Where the servers are, and what to type."""
    if as_json:
        print(msgspec.json.encode(served).decode(), flush=True)
        return
    print(f"{served.model}: prefill at {served.prefill}, decode at {served.decode}, both behind {served.url}")
    print(f"live pages: {' '.join(served.live)}")
    print(f"\n{served.curl}\n\nCtrl-C ends them.", flush=True)


def print_json(result: DemoResult) -> None:
    """One object on stdout."""
    print(msgspec.json.encode(result).decode())


def show(result: DemoResult, max_tokens: int) -> None:
    """For a person: the text, the comparison, what moved, the timing split as bars."""
    console = Console()
    same = "identical" if result.identical else "NOT IDENTICAL"
    compared = "and the bits of each step's logits"
    if result.is_lossy:
        same = "identical tokens" if result.tokens_identical else "other tokens"
        compared = "after values were rounded on the way, as was allowed"
    ended = (
        f" (the model ended its text; {max_tokens} were allowed)" if result.output_tokens < max_tokens else ""
    )
    console.print(f"[bold]{result.model}[/bold], {result.prompt_tokens} prompt tokens, {result.mode}")
    console.print(result.text.strip(), style="italic", markup=False, highlight=False)
    console.print()
    table = Table.grid(padding=(0, 2))
    moved = (
        f"{format_bytes(result.payload_bytes)} in {result.blocks} blocks, {result.descriptors} descriptors;"
        f" state record {format_bytes(result.state_bytes)}"
    )
    rate = f"{format_rate(result.bytes_per_second)}, {result.memcpy_ratio:.2f} of memcpy in one thread"
    drafts = f"{result.accepted_drafts} of them were drafts that held; {result.num_drafts} a round"
    for name, value in (
        (
            "against one process",
            f"{same}: {result.output_tokens} tokens{ended}, {compared}",
        ),
        *([("speculative", drafts)] if result.num_drafts else []),
        ("moved", moved),
        *([("converted", "; ".join(result.conversions))] if result.conversions else []),
        ("carried by", f"{result.transport_used}, path {result.path}, {result.mode}"),
        ("rate", rate),
    ):
        table.add_row(name, value)
    console.print(table)
    console.print()
    console.print(_chart(result))


def _chart(result: DemoResult) -> Table:
    """Each part's bar begins where the one before it ended, on one linear scale."""
    seconds = msgspec.to_builtins(result.timings)
    total = seconds.pop("total")
    chart = Table.grid(padding=(0, 2))
    at = 0.0
    for name, part in seconds.items():
        chart.add_row(name.replace("_", " "), format_seconds(part), Bar(total, at, at + part, width=48))
        at += part
    chart.add_row("total", format_seconds(total), Bar(total, 0, total, width=48))
    return chart
