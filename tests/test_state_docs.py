"""docs/state.md names every field of the record and every check, so that neither can move alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec import inspect

from kvferry import state as s

PAGE = (Path(__file__).parents[1] / "docs" / "state.md").read_text(encoding="utf-8")
SECTIONS = {
    name: body
    for title, body in re.findall(r"^### (.+)\n((?:(?!^#).*\n)*)", PAGE, flags=re.MULTILINE)
    for name in title.split(", ")
}


def record_types() -> list[type]:
    """Every part of the record."""
    found: dict[type, None] = {}
    todo: list[inspect.Type] = [inspect.type_info(s.ExecutionState)]
    while todo:
        kind = todo.pop()
        if isinstance(kind, inspect.StructType) and kind.cls not in found:
            found[kind.cls] = None
            todo += [field.type for field in kind.fields]
        elif isinstance(kind, inspect.UnionType):
            todo += kind.types
        elif isinstance(kind, inspect.VarTupleType):
            todo.append(kind.item_type)
    return sorted(found, key=lambda cls: cls.__name__)


@pytest.mark.parametrize("cls", record_types(), ids=lambda cls: cls.__name__)
def test_every_field_is_on_the_page(cls: type) -> None:
    """Each field of each part stands, in code font, in the section of that part."""
    words = set(re.findall(r"`(\w+)`", SECTIONS[cls.__name__]))
    missing = set(cls.__struct_fields__) - words  # type: ignore[attr-defined]
    assert not missing


def test_page_has_no_part_that_is_gone() -> None:
    """Each section of the field list is a part of the record."""
    assert set(SECTIONS) == {cls.__name__ for cls in record_types()}


def test_every_check_is_on_the_page() -> None:
    """The table of checks is the one in the code: number, name, time, question."""
    rows = re.findall(r"^\| (\d+) \| (\w+) \| (.+?) \| (.+?) \|$", PAGE, flags=re.MULTILINE)
    want = [(str(check.number), check.name, check.stage.value, check.question) for check in s.CHECKS]
    assert rows[-17:] == want


def test_every_class_is_on_the_page() -> None:
    """Each fingerprint field stands with the words of its class."""
    rows = dict(re.findall(r"^\| `(\w+)` \| .* \| (.+?) \|$", SECTIONS["Fingerprint"], flags=re.MULTILINE))
    assert set(rows) == set(s.FINGERPRINT_CLASSES)
    for field, fit in s.FINGERPRINT_CLASSES.items():
        assert rows[field].startswith(fit.value)


def test_every_public_function_of_the_page_exists() -> None:
    """What the page's example calls is there to call."""
    for name in re.findall(r"\b((?:encode|decode|check|verify)_\w+)\(", PAGE):
        assert callable(getattr(s, name))
