"""Lines of a request trace -> rows, one at a time: memory stays flat however long the trace is.

Four kinds are read, told apart by their first line:

- Azure's CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Patel et al., ISCA 2024).
- BurstGPT's CSV: ``Timestamp`` in seconds, ``Request tokens``, ``Response tokens``.
- a CSV of lengths: ``prompt_tokens,output_tokens`` or vidur's ``num_prefill_tokens,num_decode_tokens``;
  with ``arrival_seconds`` it has times, else it needs a rate.
- Mooncake's JSONL: ``timestamp`` in ms, ``input_length``, ``output_length``, and ``hash_ids``, one for
  each block of 512 tokens: equal ids are equal prefixes (Qin et al., FAST 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import chain
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from kvferry.errors import InputError
from kvferry.plan.cells import Cells, columns_of, fields_of

__all__ = ["MAX_LINE_CHARACTERS", "PREFIX_BLOCK_TOKENS", "TraceRow", "read_trace"]

MAX_LINE_CHARACTERS = 1 << 20
"""A request of 100 million tokens in 512-token blocks has a shorter line."""
PREFIX_BLOCK_TOKENS = 512
MAX_TOKENS = 10**9

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]


class TraceRow(NamedTuple):
    """One request: when, how long, and the hashes of its prefix blocks.

    ``arrival_seconds`` counts from the first request; None where the trace has no times.
    """

    arrival_seconds: float | None
    prompt_tokens: int
    output_tokens: int
    prefix_hashes: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    timestamp: Annotated[float, Meta(ge=0, le=1e15)]
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


_PROMPT = ("ContextTokens", "Request tokens", "prompt_tokens", "num_prefill_tokens")
_OUTPUT = ("GeneratedTokens", "Response tokens", "output_tokens", "num_decode_tokens")
_ARRIVAL = ("TIMESTAMP", "Timestamp", "arrival_seconds")


def read_trace(lines: Iterable[str], source: str, *, wants_output: bool = True) -> Iterator[TraceRow]:
    """The rows of a trace, in order of arrival.

    Without ``wants_output`` a CSV may have prompts alone: its outputs are not read, and each is 0.
    Raises InputError naming the file, the line and the key or column, for the first row that cannot
    be read, goes back in time, or is longer than :data:`MAX_LINE_CHARACTERS`; and for an empty trace.
    """
    numbered = _bounded(lines, source)
    first = next(numbered, None)
    if first is None:
        raise InputError(f"{source}, line 1: is empty; a trace needs a request")
    number, line = first
    if line.lstrip().startswith("{"):
        rows = _read_jsonl(chain([(number, line)], numbered), source)
    else:
        rows = _read_csv(line, numbered, source, wants_output=wants_output)
    start = last = 0.0
    count = 0
    for count, (at, row) in enumerate(rows, start=1):
        if row.arrival_seconds is None:
            yield row
            continue
        if count == 1:
            start = last = row.arrival_seconds
        if row.arrival_seconds < last:
            raise InputError(f"{source}, line {at}: the time goes back by {last - row.arrival_seconds:g} s")
        last = row.arrival_seconds
        yield row._replace(arrival_seconds=last - start)
    if not count:
        raise InputError(f"{source}, line {number}: no request follows the header")


def _bounded(lines: Iterable[str], source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(lines, start=1):
        if len(line) > MAX_LINE_CHARACTERS:
            raise InputError(f"{source}, line {number}: has more than {MAX_LINE_CHARACTERS} characters")
        if line.strip():
            yield number, line


def _read_jsonl(lines: Iterable[tuple[int, str]], source: str) -> Iterator[tuple[int, TraceRow]]:
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    for number, line in lines:
        try:
            row = decode(line)
        except msgspec.MsgspecError as error:
            raise InputError(f"{source}, line {number}: {_reason(error)}") from error
        hashes, blocks = row.hash_ids, -(-row.input_length // PREFIX_BLOCK_TOKENS)
        if hashes and len(hashes) != blocks:
            raise InputError(
                f"{source}, line {number}: hash_ids: {len(hashes)} ids for {row.input_length} tokens; "
                f"in blocks of {PREFIX_BLOCK_TOKENS} they have {blocks}"
            )
        yield number, TraceRow(row.timestamp / 1000, row.input_length, row.output_length, hashes)


def _reason(error: msgspec.MsgspecError) -> str:
    reason, _, path = str(error).partition(" - at `")
    key = path.rstrip("`").removeprefix("$").lstrip(".")
    return f"{key}: {reason}" if key else reason.replace("Object contains unknown field", "unknown key")


def _read_csv(
    header: str, lines: Iterable[tuple[int, str]], source: str, *, wants_output: bool
) -> Iterator[tuple[int, TraceRow]]:
    columns = columns_of(next(fields_of([header], source)), source)
    prompt = _column(columns, _PROMPT, source)
    output = _column(columns, _OUTPUT, source) if wants_output else None
    arrival = next((name for name in _ARRIVAL if name in columns), None)
    read_time = _clock() if arrival == "TIMESTAMP" else Cells.from_zero
    for number, line in lines:
        fields = next(fields_of([line], source, number))
        if len(fields) != len(columns):
            raise InputError(f"{source}, line {number}: {len(fields)} fields, the header has {len(columns)}")
        cells = Cells(dict(zip(columns, fields, strict=True)), source, number)
        seconds = None if arrival is None else read_time(cells, arrival)
        yield number, TraceRow(seconds, cells.count(prompt), 0 if output is None else cells.count(output))


def _column(columns: list[str], names: tuple[str, ...], source: str) -> str:
    found = [name for name in names if name in columns]
    if len(found) > 1:
        raise InputError(f"{source}, line 1: columns {found[0]} and {found[1]} say the same thing")
    if found:
        return found[0]
    raise InputError(f"{source}, line 1: none of the columns {', '.join(names)}")


def _clock() -> Callable[[Cells, str], float]:
    """Dates as seconds since the first one that is read."""
    start: datetime | None = None

    def read(cells: Cells, column: str) -> float:
        nonlocal start
        text = cells.cells[column].strip()
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise InputError(f"{cells.where}: {column}: {text[:40]!r} is not a date and time") from None
        start = start or moment
        try:
            return (moment - start).total_seconds()
        except TypeError:
            raise InputError(
                f"{cells.where}: {column}: {text[:40]!r} has a time zone, or lacks one"
            ) from None

    return read
