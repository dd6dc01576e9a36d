"""The words of a measurement, and the bounds of its numbers; closed schemas for all link records."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = [
    "MAX_COUNT",
    "MAX_RATE",
    "MAX_SECONDS",
    "Conditions",
    "Cost",
    "Count",
    "Mode",
    "Name",
    "Rate",
    "Record",
    "Seconds",
    "significant",
]

MAX_COUNT = 2**53
"""Counts above it are not exact in the arithmetic of a fit."""
MAX_SECONDS = 1e6
MAX_RATE = 1e15
"""1,000 TB/s; no link has it, so a larger number is a slip of units."""

Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
Cost = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Rate = Annotated[float, Meta(gt=0, le=MAX_RATE)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]


def significant(value: float) -> float:
    """Six significant digits: more than any clock gives, and a file stays readable."""
    return float(f"{value:.6g}")


class Mode(enum.StrEnum):
    """Who starts the copy: the side that has the bytes (push), or the side that wants them (pull)."""

    PUSH = "push"
    PULL = "pull"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Base of what a link file holds: frozen, and no key that the schema does not know."""


class Conditions(Record, frozen=True, kw_only=True):
    """Under what a copy was measured; copies under unlike conditions are never fitted together.

    Args:
        mode: push or pull.
        tls: the bytes were encrypted by kvferry.
        incast: how many nodes sent to this receiver at the same time, this one included.
        under_load: other pairs were copying meanwhile.
    """

    mode: Mode
    tls: bool = False
    incast: Count = 1
    under_load: bool = False

    @property
    def conditions(self) -> Conditions:
        """Only the conditions, as a key."""
        return Conditions(mode=self.mode, tls=self.tls, incast=self.incast, under_load=self.under_load)

    def __str__(self) -> str:
        parts = [str(self.mode), "TLS" if self.tls else ""]
        parts.append(f"incast of {self.incast}" if self.incast > 1 else "")
        parts.append("under load" if self.under_load else "")
        return ", ".join(part for part in parts if part)
