"""Samples of one pair under one set of conditions -> a LinkFit.

The median of each shape of copy is one point, so that a stall does not bend the line, and what is
predicted is the typical copy; the spread around it is kept beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from kvferry.errors import NoPlanError
from kvferry.link.line import CLOSE, fit_line, has_evidence, sum_line
from kvferry.link.points import Points, medians, warm_points
from kvferry.link.records import Knee, Line, LinkFit, Sample
from kvferry.link.spread import spreads_of
from kvferry.link.words import significant

__all__ = ["fit_link"]

# A second regime must be seen at three sizes, leave a quarter of the squares and be beyond doubt:
# noise alone never shows one (tests/test_link_fit.py), a rate that halves does.
_KNEE_SIZES = 3
_KNEE_GAIN = 4.0
_KNEE_PARAMETERS = 4


def fit_link(samples: Sequence[Sample]) -> LinkFit:
    """Fit ``T = a + o*descriptors + nbytes/B`` to the warm samples; cold ones are left out.

    Raises NoPlanError, naming what the samples lack, when no parameter could be told from another;
    InputError when they are of several conditions or hold a number that is not positive.
    """
    copies = warm_points(samples)
    points = medians(copies)
    nbytes, descriptors, block_bytes = points.spans()
    if nbytes.is_point and descriptors.is_point:
        raise NoPlanError(
            f"all {len(copies)} samples have {nbytes} bytes in {descriptors} descriptors; a fit needs "
            "a second size or a second number of descriptors",
            next_step="probe with several sizes and block sizes",
        )
    fit = LinkFit(
        **msgspec.structs.asdict(fit_line(points)),
        samples=len(copies),
        nbytes=nbytes,
        descriptors=descriptors,
        block_bytes=block_bytes,
    )
    fit = _with_knee(fit, points)
    worst, median = _errors(fit, points)
    return msgspec.structs.replace(
        fit, worst_error=worst, median_error=median, spreads=spreads_of(copies, copies.seconds_of(fit))
    )


def _errors(fit: LinkFit, points: Points) -> tuple[float | None, float | None]:
    """Worst and median of measured over predicted less one; None where no point is to spare."""
    used = 3 - len(fit.unidentified) + (0 if fit.knee is None else _KNEE_PARAMETERS)
    if len(points) <= used:
        return None, None
    errors = np.abs(points.seconds / points.seconds_of(fit) - 1)
    return significant(float(errors.max())), significant(float(np.median(errors)))


def _with_knee(fit: LinkFit, points: Points) -> LinkFit:
    """The fit with a second regime, where one is beyond doubt; else as it was."""
    misses = points.misses(fit)
    single = float(misses @ misses)
    if np.abs(misses).max() <= CLOSE:
        return fit
    sizes = np.unique(points.nbytes)
    best, least = fit, single / _KNEE_GAIN
    for start in sizes[_KNEE_SIZES : len(sizes) - _KNEE_SIZES + 1].tolist():
        found = _split(fit, points, start)
        if found is not None:
            misses = points.misses(found)
            if (rest := float(misses @ misses)) < least:
                best, least = found, rest
    return best if has_evidence(single, least, len(points), _KNEE_PARAMETERS) else fit


def _split(fit: LinkFit, points: Points, start: float) -> LinkFit | None:
    """Two lines, below and from ``start`` on; None where a side tells less than the whole does."""
    below, above = (sum_line(points.where(mask)) for mask in (points.nbytes < start, points.nbytes >= start))
    if any((side.o_seconds is None) != (fit.o_seconds is None) for side in (below, above)):
        return None
    knee = Knee(from_nbytes=int(start), **_line_fields(above))
    return msgspec.structs.replace(fit, knee=knee, **_line_fields(below))


def _line_fields(line: Line) -> dict[str, Any]:
    return {name: getattr(line, name) for name in Line.__struct_fields__}
