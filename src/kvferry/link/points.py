"""Samples as arrays, and the median of the copies of each shape: what a fit is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, NoPlanError
from kvferry.link.records import Line, LinkFit, Sample, Span
from kvferry.link.words import MAX_RATE

__all__ = ["Points", "medians", "warm_points"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Copies as columns: ``nbytes``, ``descriptors`` and ``seconds``, each [points]."""

    nbytes: Floats
    descriptors: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def where(self, mask: NDArray[np.bool_]) -> Points:
        """The points that the mask picks."""
        return Points(self.nbytes[mask], self.descriptors[mask], self.seconds[mask])

    def spans(self) -> tuple[Span, Span, Span]:
        """What was covered: bytes, descriptors, bytes a descriptor."""
        return (
            _span(self.nbytes),
            _span(self.descriptors),
            _span(np.maximum(np.rint(self.nbytes / self.descriptors), 1)),
        )

    def seconds_of(self, line: Line) -> Floats:
        """What the line says of each point; for a fit with a knee, by the regime of each."""
        seconds = _line(line, self.nbytes, self.descriptors)
        if not isinstance(line, LinkFit) or line.knee is None:
            return seconds
        at_knee = _line(line, np.full(len(self), float(line.knee.from_nbytes)), self.descriptors)
        above = np.maximum(at_knee, _line(line.knee, self.nbytes, self.descriptors))
        return np.where(self.nbytes >= line.knee.from_nbytes, above, seconds)

    def misses(self, line: Line) -> Floats:
        """log(measured / predicted) of each point: 0.05 is 5 % slower than predicted."""
        return np.log(self.seconds / self.seconds_of(line))


def _line(line: Line, nbytes: Floats, descriptors: Floats) -> Floats:
    # Line.known_seconds over arrays.
    posting = (line.o_seconds or 0.0) * descriptors
    moving = nbytes / line.bytes_per_second if line.bytes_per_second is not None else np.zeros_like(nbytes)
    together = np.maximum(posting, moving) if line.descriptors_overlap else posting + moving
    return (line.a_seconds or 0.0) + together


def _span(values: Floats) -> Span:
    return Span(low=int(values.min()), high=int(values.max()))


def warm_points(samples: Sequence[Sample]) -> Points:
    """Every warm copy. Raises InputError for mixed conditions and for numbers that are none."""
    if len({sample.conditions for sample in samples}) > 1:
        raise InputError("samples: of several conditions; fit each of them alone")
    warm = [sample for sample in samples if not sample.is_cold]
    if not warm:
        what = "only first copies over a new connection" if samples else "no copies"
        raise NoPlanError(f"the samples have {what}; a fit needs warm ones")
    columns = np.array([(s.nbytes, s.descriptors, s.seconds) for s in warm], np.float64).T
    bad = ~(np.isfinite(columns).all(axis=0) & (columns > 0).all(axis=0))
    if bad.any():
        index = int(np.flatnonzero(bad)[0])
        raise InputError(f"samples[{index}]: bytes, descriptors and seconds must be positive: {warm[index]}")
    rate = columns[0] / columns[2]
    if rate.max() > MAX_RATE:
        index = int(rate.argmax())
        raise InputError(f"samples[{index}]: more than {MAX_RATE:.0e} bytes a second: {warm[index]}")
    return Points(*columns)


def medians(points: Points) -> Points:
    """One point a shape (bytes, descriptors): the median of its copies."""
    order = np.lexsort((points.seconds, points.descriptors, points.nbytes))
    nbytes, descriptors, seconds = points.nbytes[order], points.descriptors[order], points.seconds[order]
    starts = np.flatnonzero(np.r_[True, (np.diff(nbytes) != 0) | (np.diff(descriptors) != 0)])
    counts = np.diff(np.r_[starts, len(seconds)])
    low, high = starts + (counts - 1) // 2, starts + counts // 2
    return Points(nbytes[starts], descriptors[starts], (seconds[low] + seconds[high]) / 2)
