"""A chart of the page: a Plotly figure, what it says in words, and the same numbers as a table.

The table is what a screen reader and a keyboard use; the words say what was measured, when, on what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COLOURS", "GREY", "Chart", "Section", "plain"]

#: Okabe and Ito's palette: told apart with any common colour blindness (jfly.uni-koeln.de/color).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
GREY = "#888888"


@dataclass(frozen=True, slots=True)
class Chart:
    """``figure``: a dict of Plotly ``data`` and ``layout``, without colours of text and paper."""

    title: str
    figure: dict[str, Any]
    says: str
    header: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    is_measured: bool | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """Charts of one file, under one heading."""

    heading: str
    source: str
    charts: tuple[Chart, ...]
    notes: tuple[str, ...] = ()


def plain(text: object) -> str:
    """Text for inside a figure: Plotly reads markup in it."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;")
