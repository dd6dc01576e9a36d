"""How copies scatter around their prediction, by size: small copies scatter more."""

from __future__ import annotations

import numpy as np

from kvferry.link.points import Floats, Points
from kvferry.link.records import Spread, samples_needed
from kvferry.link.words import significant

__all__ = ["spreads_of"]

_BAND_SAMPLES = samples_needed(0.99)
"""A band of sizes with fewer copies than its p99 needs is joined to the next."""


def spreads_of(copies: Points, predicted: Floats) -> tuple[Spread, ...]:
    """Bands of rising size, each with the copies that its p99 needs; one band where there are fewer."""
    order = np.argsort(copies.nbytes, kind="stable")
    nbytes, ratios = copies.nbytes[order], (copies.seconds / predicted)[order]
    # A band may end where the size changes.
    ends = np.flatnonzero(np.r_[np.diff(nbytes) != 0, True]) + 1
    bands: list[tuple[int, int]] = []
    start = 0
    for end in ends.tolist():
        if end - start >= _BAND_SAMPLES:
            bands.append((start, end))
            start = end
    if start < len(ratios):
        first = bands.pop()[0] if bands else 0
        bands.append((first, len(ratios)))
    return tuple(_spread(int(nbytes[end - 1]), ratios[start:end]) for start, end in bands)


def _spread(up_to_nbytes: int, ratios: Floats) -> Spread:
    def quantile(q: float) -> float | None:
        if len(ratios) < samples_needed(q):
            return None
        return significant(float(np.quantile(ratios, q, method="median_unbiased")))

    return Spread(
        up_to_nbytes=up_to_nbytes,
        samples=len(ratios),
        p50=significant(float(np.median(ratios))),
        p95=quantile(0.95),
        p99=quantile(0.99),
        mean=significant(float(ratios.mean())),
        deviation=significant(float(ratios.std())),
    )
