"""The files that a report is made from, each known by its content."""

from __future__ import annotations

import csv
import datetime as dt
import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from kvferry.errors import InputError, LocalError
from kvferry.link.load import load_links
from kvferry.link.profile import FORMAT, LinkFile

__all__ = ["Input", "Kind", "read_input"]

_MAX_NBYTES = 256 << 20
_COLUMNS = ("arrival_seconds", "ttft_seconds", "tpot_seconds", "prompt_tokens", "outcome")


class Kind(StrEnum):
    """What a file says."""

    LINKS = "links"
    CHECK = "check"
    PLAN = "plan"
    SIMULATION = "simulation"
    RECORDS = "records"
    DEMO = "demo"


# The keys by which each kind of `--json` output is known.
_SIGNS: tuple[tuple[Kind, frozenset[str]], ...] = (
    (Kind.CHECK, frozenset({"verdict", "split", "target_seconds", "break_even"})),
    (Kind.PLAN, frozenset({"candidates", "choice", "reason", "targets"})),
    (Kind.SIMULATION, frozenset({"scenario", "ttft", "tpot", "is_measured"})),
    (Kind.SIMULATION, frozenset({"runs"})),
    (Kind.DEMO, frozenset({"identical", "timings", "payload_bytes", "transport_used"})),
)


@dataclass(frozen=True, slots=True)
class Input:
    """One file. ``content``: a LinkFile, a JSON object, or a dict of columns for records."""

    path: Path
    kind: Kind
    content: Any
    written: dt.datetime


def read_input(path: Path) -> Input:
    """Read a file and say what it is.

    Raises InputError naming the file for one that cannot be read or is nothing of ours.
    """
    try:
        facts = path.stat()
        if facts.st_size > _MAX_NBYTES:
            raise InputError(f"report: {path}: more than {_MAX_NBYTES} bytes")
        kind, content = _read(path)
    except OSError as error:
        raise InputError(f"report: {path}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, not JSON, no number
        raise InputError(f"report: {path}: cannot be read: {error}") from error
    except RecursionError:
        raise InputError(f"report: {path}: nested too deeply") from None
    return Input(path, kind, content, dt.datetime.fromtimestamp(facts.st_mtime, dt.UTC))


def _read(path: Path) -> tuple[Kind, Any]:
    if path.suffix == ".parquet":
        return Kind.RECORDS, _parquet(path)
    if path.suffix == ".csv":
        return Kind.RECORDS, _csv(path)
    data = json.loads(path.read_bytes())
    if isinstance(data, dict):
        if data.get("format") == FORMAT:
            links: LinkFile = load_links(path)
            return Kind.LINKS, links
        for kind, keys in _SIGNS:
            if keys <= data.keys():
                return kind, data
    raise InputError(
        f"report: {path}: not a link file, not the --json output of check, plan, simulate or demo"
    )


def _parquet(path: Path) -> dict[str, list[Any]]:
    try:
        import pyarrow as pa  # noqa: PLC0415 - the extra `plan`
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            "report: a Parquet file needs pyarrow", next_step="pip install 'kvferry[plan]'"
        ) from error
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        raise InputError(f"report: {path}: not a Parquet file: {str(error).splitlines()[0]}") from error
    return _columns(path, table.to_pydict())


def _csv(path: Path) -> dict[str, list[Any]]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = {name: [row.get(name) for row in rows] for name in (rows[0] if rows else ())}
    return _columns(path, found)


def _columns(path: Path, found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if missing := [name for name in _COLUMNS if name not in found]:
        raise InputError(f"report: {path}: no records of simulate: column {missing[0]} is missing")
    numbers = {
        name: [None if value in (None, "") else float(value) for value in found[name]]
        for name in _COLUMNS[:-1]
    }
    return numbers | {"outcome": [str(value) for value in found["outcome"]]}
