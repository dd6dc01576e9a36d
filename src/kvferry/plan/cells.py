"""One row of a CSV text, read by column name; every error names the file, the line and the column."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvferry.errors import InputError

__all__ = ["Cells", "columns_of", "fields_of"]

MAX_VALUE = 1e12
"""Larger numbers are neither tokens nor seconds."""


def fields_of(lines: Iterable[str], source: str, first: int = 1) -> Iterator[list[str]]:
    """The fields of CSV lines; ``first`` is the number of the first one. Raises InputError with the line."""
    rows = csv.reader(iter(lines))
    while True:
        try:
            yield next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            at = first + max(0, rows.line_num - 1)
            raise InputError(f"{source}, line {at}: is not CSV: {error}") from error


def columns_of(header: Sequence[str], source: str) -> list[str]:
    """The names of the columns. Raises InputError for one that comes twice: its cells would hide others."""
    columns = [name.strip().lstrip("\ufeff").strip() for name in header]
    for name in columns:
        if name and columns.count(name) > 1:
            raise InputError(f"{source}, line 1: column {name[:40]} comes twice")
    return columns


class Cells:
    """The cells of one row; ``where`` is its file and line."""

    def __init__(self, cells: Mapping[str, str], source: str, line: int) -> None:
        self.cells = cells
        self.where = f"{source}, line {line}"

    def text(self, column: str, default: str) -> str:
        """The cell, or ``default`` where there is no such column or nothing in it."""
        return self.cells.get(column, default).strip() or default

    def number(self, column: str) -> float:
        """A number above 0."""
        value = self.from_zero(column)
        if value == 0:
            raise InputError(f"{self.where}: {column}: 0 is not above 0")
        return value

    def from_zero(self, column: str) -> float:
        """A number from 0 up."""
        cell = self.cells[column]
        try:
            value = float(cell)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and 0 <= value <= MAX_VALUE):
            raise InputError(f"{self.where}: {column}: {cell[:40]!r} is not a number from 0 up")
        return value

    def count(self, column: str, default: int | None = None) -> int:
        """A whole number above 0; ``default`` where there is no such column."""
        if default is not None and column not in self.cells:
            return default
        value = self.number(column)
        if value != int(value):
            raise InputError(f"{self.where}: {column}: {value} is not a whole number")
        return int(value)
