"""Which line of a text holds a key, for messages: ``cluster.toml, line 3: slo.ttft``."""

from __future__ import annotations

import re

from kvferry.link.locate import place_of

__all__ = ["json_place", "toml_place"]

_STEP = re.compile(r"[^.\[\]]+")


def json_place(source: str, text: str, key: str) -> str:
    """The place of a key like ``prefill.a`` in a JSON text."""
    place = place_of(text.encode(), f"$.{key}")
    return f"{source}, line {place.line}" + (f": {key}" if key else "")


def toml_place(source: str, text: str, key: str) -> str:
    """The place of a key like ``nodes[1].gpus`` in a TOML text, or of the nearest table around it.

    TOML's parser does not tell lines, so they are looked for: the table's header, the n-th one of a
    list of tables, then the key below it.
    """
    lines = [line.split("#", 1)[0].strip() for line in text.splitlines()]
    steps = _STEP.findall(key)
    at = 0
    for depth, step in enumerate(steps):
        if step.isdigit():
            continue
        index = int(steps[depth + 1]) if depth + 1 < len(steps) and steps[depth + 1].isdigit() else 0
        at = _find(lines, at, step, index)
    return f"{source}, line {at + 1}" + (f": {key}" if key else "")


def _find(lines: list[str], start: int, step: str, index: int) -> int:
    name = re.escape(step)
    header = re.compile(rf"""\[\[?\s*([^\]]*\.)?["']?{name}["']?\s*\]\]?""")
    assignment = re.compile(rf"""(^|[\s{{,]){name}\s*=|(^|[\s{{,])["']{name}["']\s*=""")
    headers = [at for at in range(start, len(lines)) if header.fullmatch(lines[at])]
    if headers:
        return headers[min(index, len(headers) - 1)]
    for at in range(start, len(lines)):
        if at > start and lines[at].startswith("["):
            break
        if assignment.search(lines[at]):
            return at
    return start
