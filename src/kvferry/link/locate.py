"""Where in a JSON text something is: its line and its key, for messages about files that people write."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Place", "place_at", "place_of"]

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[([0-9]+)\]")

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A line (from 1) and a key (``pairs[0].date``; "" for the whole text)."""

    line: int
    key: str


def place_of(data: bytes, path: str) -> Place:
    """The value at a path as msgspec writes it (``$.pairs[0].date``), or the nearest value around it."""
    # "[...]" stands for any key of a mapping; the mapping itself is as near as it can be told.
    path = path.partition("[...]")[0]
    steps = tuple(int(index) if index else name for name, index in _STEP.findall(path))
    found, depth = 0, -1
    for offset, at in _values(data):
        if len(at) > depth and steps[: len(at)] == at:
            found, depth = offset, len(at)
            if depth == len(steps):
                break
    return Place(_line(data, found), _text(steps))


def place_at(data: bytes, offset: int) -> Place:
    """The value that begins last before a byte."""
    key: Path = ()
    for start, at in _values(data):
        if start > offset:
            break
        key = at
    return Place(_line(data, offset), _text(key))


def _line(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def _text(steps: Path) -> str:
    parts = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps]
    return "".join(parts).removeprefix(".")


def _values(data: bytes) -> Iterator[tuple[int, Path]]:
    """Offset and path of every value, in order; of a broken text, what comes before the break."""
    path: list[str | int] = []
    is_key = False
    name = ""
    for match in _TOKEN.finditer(data):
        token = match[0]
        if is_key and token.startswith(b'"'):
            name = token[1:-1].decode("utf-8", "replace")
        elif token == b":":
            is_key = False
            if path:
                path[-1] = name
        elif token == b",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            else:
                is_key = True
        elif token in b"]}":
            is_key = False
            del path[-1:]
        else:
            yield match.start(), tuple(path)
            if token in b"[{":
                is_key = token == b"{"
                path.append(0 if token == b"[" else "")
