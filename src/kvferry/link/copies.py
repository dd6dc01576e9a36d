"""Copies to compare links by: inside what every one of the fits has measured."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from kvferry.link.records import LinkFit, Span

__all__ = ["Copy", "Shape", "common_copies"]


class Shape(enum.StrEnum):
    """Which cost such a copy shows: the rate, the cost of a descriptor, the start."""

    LARGE = "large"
    SCATTERED = "scattered"
    SMALL = "small"


class Copy(msgspec.Struct, frozen=True):
    """A payload in so many pieces."""

    shape: Shape
    nbytes: int
    descriptors: int


def common_copies(fits: Sequence[LinkFit]) -> tuple[Copy, ...]:
    """A large copy in large pieces, the same in small pieces, and a small copy, that all fits cover.

    Copies that would be the same are left out; none where the fits share no size or no piece size.
    """
    nbytes = _common([fit.nbytes for fit in fits])
    descriptors = _common([fit.descriptors for fit in fits])
    block_bytes = _common([fit.block_bytes for fit in fits])
    if nbytes is None or descriptors is None or block_bytes is None:
        return ()
    found: dict[tuple[int, int], Copy] = {}
    for shape, total, piece in (
        (Shape.LARGE, nbytes.high, block_bytes.high),
        (Shape.SCATTERED, nbytes.high, block_bytes.low),
        (Shape.SMALL, nbytes.low, block_bytes.high),
    ):
        pieces = min(max(round(total / piece), descriptors.low), descriptors.high)
        found.setdefault((total, pieces), Copy(shape, total, pieces))
    return tuple(found.values())


def _common(spans: Sequence[Span | None]) -> Span | None:
    known = [span for span in spans if span is not None]
    if not known or len(known) < len(spans):
        return None
    low, high = max(span.low for span in known), min(span.high for span in known)
    return Span(low=low, high=high) if low <= high else None
