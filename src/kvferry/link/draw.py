"""Copies drawn from a fit's measured spread: the same quantiles as it predicts, and the same mean."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

from kvferry.link.records import LinkFit, Spread

__all__ = ["draw_seconds"]

_LEAST = 0.05
"""A copy is never drawn faster than this share of the median: a link is not free now and then."""


def draw_seconds(fit: LinkFit, luck: float, nbytes: int, descriptors: int) -> float:
    """Seconds of one copy; ``luck`` is uniform from 0 to 1, and the higher the slower.

    For a luck from 0.5 to the last quantile that is known it is :meth:`LinkFit.predict_quantile`. The two
    ends that quantiles do not tell (the faster half, and the slowest) are straight lines that keep
    the measured mean. Without a spread it is the typical copy.
    """
    typical = fit.at_least(nbytes, descriptors)
    spread = fit.spread_at(nbytes)
    if spread is None or not typical:
        return typical
    ratio = fit.between(nbytes, descriptors, lambda band: _ratio(band, luck))
    if nbytes > spread.up_to_nbytes:  # as in predict_quantile
        root = math.sqrt(fit.at_least(spread.up_to_nbytes, descriptors) / typical)
        ratio = spread.p50 + (ratio - spread.p50) * root
    seconds = typical * ratio
    for band in itertools.takewhile(lambda band: band is not spread, fit.spreads):
        seconds = max(seconds, fit.at_least(band.up_to_nbytes, descriptors) * _ratio(band, luck))
    return seconds


def _ratio(spread: Spread, luck: float) -> float:
    points = _points(spread)
    for (low, below), (high, above) in itertools.pairwise(points):
        if luck <= high:
            return below + (above - below) * (luck - low) / (high - low)
    return points[-1][1]


@lru_cache(maxsize=4096)
def _points(spread: Spread) -> tuple[tuple[float, float], ...]:
    """The whole inverse distribution, as points that straight lines join."""
    known = [(q, ratio) for q, ratio in ((0.5, spread.p50), (0.95, spread.p95), (0.99, spread.p99)) if ratio]
    last, highest = known[-1]
    flat = [(0.0, spread.p50), *known, (1.0, highest)]
    mean = sum((high - low) * (below + above) / 2 for (low, below), (high, above) in itertools.pairwise(flat))
    # What the mean lacks is in the slowest copies; what it has too much, in the faster half.
    lacks = spread.mean - mean
    slowest = highest + max(0.0, lacks) * 2 / (1 - last)
    fastest = max(_LEAST * spread.p50, spread.p50 + min(0.0, lacks) * 4)
    return ((0.0, fastest), *known, (1.0, slowest))
