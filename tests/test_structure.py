"""The charter as tests: imports point one way, pure parts do no I/O, modules and functions stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvferry"
# Each layer may import those before it.
LAYERS = [
    {"errors", "units"},
    {"dtypes", "layout", "model"},
    {"size", "state"},
    {"link"},
    {"plan"},
    {"protocol"},
    {"transport"},
    {"transfer"},
    {"probe"},
    {"engines", "sse"},
    {"__main__", "demo", "interference", "observe", "proxy", "report", "serve", "testing", "cli", "web"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
PURE = {"errors", "units", "dtypes", "layout", "model", "size", "state", "link", "plan", "protocol"}
IMPURE = {
    "socket",
    "threading",
    "asyncio",
    "time",
    "subprocess",
    "select",
    "selectors",
    "multiprocessing",
    "torch",
}
MAX_MODULE_LINES, MAX_FUNCTION_LINES = 400, 60


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.lineno, node.module


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_keeps_the_charter(path: Path) -> None:
    """Flow of imports, purity, no pickle, length of the module and of its functions."""
    part = part_of(path)
    beyond = []
    for line, name in imports(path):
        names = name.split(".")
        if names[0] == "kvferry" and len(names) > 1 and part != "__init__":
            assert names[1] in RANK, f"{name}: a part without a place in the order"
            if RANK[names[1]] > RANK[part]:
                beyond.append(f"{line}: {part} imports {names[1]}, against the flow")
        if part in PURE and names[0] in IMPURE:
            beyond.append(f"{line}: a pure part imports {name}")
        if names[0] in {"pickle", "marshal", "shelve"}:
            beyond.append(f"{line}: imports {name}")
    lines = path.read_text().count("\n")
    if lines > MAX_MODULE_LINES:
        beyond.append(f"{lines} lines")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            if length > MAX_FUNCTION_LINES and part != "cli":
                beyond.append(f"{node.lineno}: {node.name} has {length} lines")
    assert not beyond, "\n".join(beyond)


def test_every_part_has_a_place() -> None:
    """A new folder or module at the top is added to the order above."""
    parts = {part_of(path) for path in modules()} - {"__init__"}
    assert parts <= set(RANK)
