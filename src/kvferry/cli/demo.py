"""``kvferry demo``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from kvferry.demo import DemoResult

__all__ = ["demo"]


def demo(
    *,
    transport: Literal["shm", "tcp"] = "shm",
    mode: Literal["push", "pull"] = "pull",
    prompt: str | None = None,
    prompt_file: Path | None = None,
    tokens: int = 64,
    temperature: float = 0.0,
    seed: int | None = None,
    block_size: int = 16,
    decode_block_size: int | None = None,
    axis_order: Literal["NHD", "HND"] = "NHD",
    decode_axis_order: Literal["NHD", "HND"] | None = None,
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Prefill a request in one process, decode it in another, and compare with one process.

    Exit status 0: the continuations are the same, tokens and the bits of every step's logits.

    Parameters
    ----------
    transport
        How the KV blocks travel.
    mode
        Who starts the move: prefill pushes while it computes, or decode pulls.
    prompt
        The user's message; default is a text of about 1,500 tokens.
    prompt_file
        The same, from a UTF-8 file.
    tokens
        How many tokens to decode at most.
    temperature
        0 is greedy; above it, tokens are sampled.
    seed
        Of the sampling; default 0.
    block_size
        Tokens of a block in the prefill worker's pool.
    decode_block_size
        The same in the decode worker's pool; default alike.
    axis_order
        Order of tokens and heads inside the prefill worker's blocks.
    decode_axis_order
        The same at the decode worker; default alike.
    json
        Print one JSON object and nothing else.
    """
    import msgspec
    from rich.console import Console

    from kvferry.demo import DemoOptions, run_demo

    options = DemoOptions(
        transport=transport,
        mode=mode,
        prompt=_prompt(prompt, prompt_file),
        max_tokens=tokens,
        temperature=temperature,
        seed=seed,
        block_size=block_size,
        decode_block_size=decode_block_size,
        axis_order=axis_order,
        decode_axis_order=decode_axis_order,
    )
    progress = _Progress(Console(stderr=True))
    try:
        result = run_demo(options, progress.update)
    finally:
        progress.stop()
    if json:
        print(msgspec.json.encode(result).decode())
    else:
        _show(Console(), result)
    return 0 if result.identical else 1


def _prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    if prompt_file is None:
        return prompt
    if prompt is not None:
        raise InputError("prompt_file: give a prompt or a file, not both")
    try:
        return prompt_file.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"prompt_file: {prompt_file} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"prompt_file: {prompt_file}: {error.strerror}") from error


_STAGES = {
    "load": "load the model",
    "prefill": "prefill worker: prompt",
    "decode": "decode worker: output",
    "alone": "one process: the same",
}


class _Progress:
    """A bar for each stage, on stderr."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bars

        self._bars = Bars(
            TextColumn("{task.description:<24}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, object] = {}
        self._bars.start()

    def update(self, stage: str, done: int, total: int, text: str) -> None:
        """A stage got on; the text is for those who watch a stream of it."""
        del text
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(_STAGES[stage], total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

    def stop(self) -> None:
        self._bars.stop()
        sys.stderr.flush()


def _show(console: Console, result: DemoResult) -> None:
    from rich.table import Table

    from kvferry.units import format_bytes, format_rate

    same = "identical" if result.identical else "NOT IDENTICAL"
    console.print(f"[bold]{result.model}[/bold], {result.prompt_tokens} prompt tokens, {result.mode}")
    console.print(result.text.strip(), style="italic", markup=False, highlight=False)
    console.print()
    table = Table.grid(padding=(0, 2))
    moved = (
        f"{format_bytes(result.payload_bytes)} in {result.blocks} blocks, {result.descriptors} descriptors;"
        f" state record {format_bytes(result.state_bytes)}"
    )
    rate = f"{format_rate(result.bytes_per_second)}, {result.memcpy_ratio:.2f} of memcpy in one thread"
    rows = [
        ("against one process", f"{same}: {result.output_tokens} tokens, and the bits of each step's logits"),
        ("moved", moved),
        ("carried by", f"{result.transport_used}, path {result.path}"),
        ("rate", rate),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print()
    console.print(_chart(result))


def _chart(result: DemoResult) -> object:
    """The timing split as bars; log-free, so that what takes the time is seen."""
    import msgspec
    from rich.bar import Bar
    from rich.table import Table

    from kvferry.units import format_seconds

    seconds = msgspec.to_builtins(result.timings)
    chart = Table.grid(padding=(0, 2))
    at = 0.0
    for name, part in seconds.items():
        if name == "total":
            at = 0.0
        begin, end = at, at + part
        at = end
        chart.add_row(
            name.replace("_", " "), format_seconds(part), Bar(seconds["total"], begin, end, width=48)
        )
    return chart
