"""Typed, remembering access to a config: every value is checked where it is read.

A config is a stranger's file. A field that is read must be what it should be, else one line
names it. Fields read are remembered, with those that a family states it understands, so that
the guard (``kvferry.model.guard``) can ask which suspicious ones were not, and so that the table
of fields in the documentation is generated instead of written.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import TypeVar

from kvferry.errors import InputError

__all__ = ["MAX_COUNT", "Fields"]

# Far above any layer count, head count or width; below it no product overflows a float.
MAX_COUNT = 10**7

_SHOWN_LETTERS = 120
_Value = TypeVar("_Value")


class Fields:
    """One JSON object of a config, with the path to it for error messages.

    ``read`` has the names read in this object or understood, ``trace`` the paths read in it and in
    objects inside (``path.name/other_name``); ``children`` the objects read inside, by name;
    ``defaults`` and ``notes`` are what the reader has to be told. ``class_defaults`` stand in for
    fields that are left out (a null is not left out); each use is a note.
    """

    def __init__(
        self, raw: Mapping[str, object], path: str = "", class_defaults: Mapping[str, int] | None = None
    ) -> None:
        self.raw = raw
        self.path = path
        self.class_defaults: Mapping[str, int] = class_defaults or {}
        self.read: set[str] = set()
        self.trace: set[str] = set()
        self.children: dict[str, list[Fields]] = {}
        self.defaults: list[str] = []
        self.notes: list[str] = []

    def get(self, *names: str) -> tuple[str, object | None]:
        """The value of a field that has several names, with the name used; else (first name, None).

        Raises InputError where two of the names are present with unlike values.
        """
        self.read.update(names)
        self.trace.add(self.path + "/".join(names))
        found = [(name, self.raw[name]) for name in names if self.raw.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self.error(name, f"{_short(value)}, but {found[0][0]} is {_short(found[0][1])}")
        if found:
            return found[0]
        if not any(name in self.raw for name in names):
            for name in names:
                if name in self.class_defaults:
                    self.defaults.append(f"{self.path}{name}={self.class_defaults[name]}")
                    return name, self.class_defaults[name]
        return names[0], None

    def understands(self, *names: str) -> None:
        """State that these fields may be present and change nothing of what this family caches."""
        self.read.update(names)

    def has(self, *names: str) -> bool:
        """Whether one of ``names`` is present and not null."""
        return self.get(*names)[1] is not None

    def error(self, name: str, what: str) -> InputError:
        """An InputError that names the field with its path."""
        path = f"{self.path}{name}"
        shown = path if len(path) <= _SHOWN_LETTERS else path[:_SHOWN_LETTERS] + "..."
        return InputError(f"{shown}: {what}")

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
        return None if value is None else self.whole(name, value, minimum)

    def flag(self, name: str, default: bool) -> bool:
        """A truth value; a missing one is ``default``, the rule of the model's own config class."""
        _, value = self.get(name)
        return default if value is None else self._typed(name, value, bool, "true or false")

    def text(self, *names: str) -> str | None:
        """A string, or None where the config has none."""
        name, value = self.get(*names)
        if value is None:
            return None
        text = self._typed(name, value, str, "text")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise self.error(name, f"{_short(text)} is not valid text")
        return text

    def entries(self, *names: str) -> tuple[str, list[object]] | None:
        """A list and the name it was found under, or None where the config has none."""
        name, value = self.get(*names)
        return None if value is None else (name, self._typed(name, value, list, "a list"))

    def indices(self, name: str, below: int) -> list[int] | None:
        """A list of distinct layer indices, ascending, or None where the config has none."""
        found = self.entries(name)
        if found is None:
            return None
        indices: set[int] = set()
        for i, entry in enumerate(found[1]):
            index = self.whole(f"{name}[{i}]", entry, 0)
            if index >= below:
                raise self.error(f"{name}[{i}]", f"{index} is no layer; there are {below}, counted from 0")
            if index in indices:
                raise self.error(f"{name}[{i}]", f"layer {index} is listed twice")
            indices.add(index)
        return sorted(indices)

    def nested(self, name: str) -> Fields | None:
        """The JSON object under ``name``, or None where the config has none."""
        _, value = self.get(name)
        if value is None:
            return None
        return self._child(name, f"{name}.", self._typed(name, value, dict, "an object"))

    def objects(self, name: str) -> list[Fields] | None:
        """The list of JSON objects under ``name``, or None where the config has none."""
        found = self.entries(name)
        if found is None:
            return None
        typed = [self._typed(f"{name}[{i}]", entry, dict, "an object") for i, entry in enumerate(found[1])]
        return [self._child(name, f"{name}[{i}].", entry) for i, entry in enumerate(typed)]

    def whole(self, name: str, value: object, minimum: int) -> int:
        """The value as a whole number from ``minimum`` to :data:`MAX_COUNT`."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"{_short(value)} is not a whole number")
        if value < minimum:
            raise self.error(name, f"{_short(value)} is less than {minimum}")
        if value > MAX_COUNT:
            raise self.error(name, f"{_short(value)} is more than {MAX_COUNT}")
        return value

    def one_of(self, name: str, value: object, known: Mapping[_Value, object]) -> _Value:
        """The key of ``known`` that the value is; anything else is an error that lists the keys."""
        for key in known:
            if type(value) is type(key) and value == key:
                return key
        raise self.error(name, f"{_short(value)} is not one of {_listed(known)}")

    def _child(self, name: str, path: str, raw: Mapping[str, object]) -> Fields:
        """Fields of an object inside this one; its notes, defaults and trace count as this one's."""
        inner = Fields(raw, self.path + path)
        inner.defaults, inner.notes, inner.trace = self.defaults, self.notes, self.trace
        self.children.setdefault(name, []).append(inner)
        return inner

    def _typed(self, name: str, value: object, kind: type[_Value], what: str) -> _Value:
        if not isinstance(value, kind):
            raise self.error(name, f"{_short(value)} is not {what}")
        return value


def _listed(words: Iterable[object]) -> str:
    return ", ".join(sorted(str(word) for word in words))


def _short(value: object) -> str:
    return reprlib.repr(value)
