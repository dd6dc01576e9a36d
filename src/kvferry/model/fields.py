"""Typed, remembering access to a config: every value is checked where it is read.

A config is a stranger's file. A field that is read must be what it should be, else one line
names it. Fields read are remembered, so that the caller can ask which suspicious ones were
not, and so that the table of fields in the documentation is generated instead of written.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from kvferry.errors import InputError

__all__ = ["MAX_COUNT", "Fields"]

# Far above any layer count, head count or width; below it no product overflows a float.
MAX_COUNT = 10**7


class Fields:
    """One JSON object of a config, with the path to it for error messages.

    ``read`` has the names read in this object, ``trace`` the paths read in it and in objects inside
    (``path.name/other_name``);
    ``defaults`` and ``notes`` are what the reader has to be told.
    """

    def __init__(self, raw: Mapping[str, object], path: str = "") -> None:
        self.raw = raw
        self.path = path
        self.read: set[str] = set()
        self.trace: set[str] = set()
        self.defaults: list[str] = []
        self.notes: list[str] = []

    def get(self, *names: str) -> tuple[str, object | None]:
        """The first of ``names`` that is present and not null, with its name; else (first name, None)."""
        self.read.update(names)
        self.trace.add(self.path + "/".join(names))
        for name in names:
            value = self.raw.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def has(self, *names: str) -> bool:
        """Whether one of ``names`` is present and not null."""
        return self.get(*names)[1] is not None

    def error(self, name: str, what: str) -> InputError:
        """An InputError that names the field with its path."""
        return InputError(f"{self.path}{name}: {what}")

    def count(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least ``minimum``; missing is an error unless there is a default.

        A default is the one that the model's own config class has; its use becomes a warning.
        """
        value = self.optional(*names, minimum=minimum)
        if value is not None:
            return value
        if default is None:
            also = f" (also looked for: {', '.join(names[1:])})" if len(names) > 1 else ""
            raise self.error(names[0], f"missing from the config{also}")
        self.defaults.append(f"{self.path}{names[0]}={default}")
        return default

    def optional(self, *names: str, minimum: int = 1) -> int | None:
        """A whole number of at least ``minimum``, or None where the config has none."""
        name, value = self.get(*names)
        return None if value is None else self._whole(name, value, minimum)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value; a missing one is ``default``, the rule of the model's own config class."""
        _, value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{_short(value)} is not true or false")
        return value

    def text(self, *names: str) -> str | None:
        """A string, or None where the config has none."""
        name, value = self.get(*names)
        if value is None or isinstance(value, str):
            return value
        raise self.error(name, f"{_short(value)} is not text")

    def texts(self, *names: str) -> list[str] | None:
        """A list of strings, or None where the config has none."""
        name, value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.error(name, f"{_short(value)} is not a list of names")
        return value

    def counts(self, *names: str) -> list[int] | None:
        """A list of whole numbers of at least 0, or None where the config has none."""
        name, value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.error(name, f"{_short(value)} is not a list of whole numbers")
        return [self._whole(f"{name}[{i}]", entry, 0) for i, entry in enumerate(value)]

    def nested(self, name: str) -> Fields | None:
        """The JSON object under ``name``, or None where the config has none."""
        _, value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"{_short(value)} is not an object")
        return self.child(f"{name}.", value)

    def objects(self, name: str) -> list[Fields] | None:
        """The list of JSON objects under ``name``, or None where the config has none."""
        _, value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            raise self.error(name, f"{_short(value)} is not a list of objects")
        return [self.child(f"{name}[{i}].", entry) for i, entry in enumerate(value)]

    def child(self, path: str, raw: Mapping[str, object]) -> Fields:
        """Fields of an object inside this one; its notes, defaults and trace count as this one's."""
        inner = Fields(raw, self.path + path)
        inner.defaults, inner.notes, inner.trace = self.defaults, self.notes, self.trace
        return inner

    def _whole(self, name: str, value: object, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"{_short(value)} is not a whole number")
        if value < minimum:
            raise self.error(name, f"{_short(value)} is less than {minimum}")
        if value > MAX_COUNT:
            raise self.error(name, f"{_short(value)} is more than {MAX_COUNT}")
        return value


def _short(value: object) -> str:
    return reprlib.repr(value)
