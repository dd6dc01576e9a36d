"""One measured copy, and what was learnt from many: ``T = a + o*descriptors + nbytes/B`` and its spread.

A fit says what its samples could not tell (a parameter that is None) and refuses to predict what
would need it; :meth:`LinkFit.at_least` counts the known terms only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from kvferry.errors import InputError, NoPlanError
from kvferry.link.words import Conditions, Cost, Count, Rate, Record, Seconds

__all__ = ["FAR", "Knee", "Line", "LinkFit", "Sample", "Span", "Spread", "samples_needed"]

Share = Annotated[float, Meta(ge=0, le=1e6)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]

FAR = 4
"""A copy of more than so many times the largest one measured is unknown: decision 0160."""
_NEAR = 0.02
"""Block sizes that differ by less are one: the last block of a copy may be shorter."""


class Sample(Conditions, frozen=True, kw_only=True):
    """One measured copy.

    Args:
        nbytes: payload bytes.
        descriptors: contiguous pieces of the payload.
        seconds: from the start of the copy until its bytes are at the receiver.
        is_cold: the first copy over a new connection; kept out of fits.
    """

    nbytes: Count
    descriptors: Count
    seconds: Seconds
    is_cold: bool = False


class Span(Record, frozen=True, kw_only=True):
    """The smallest and the largest value among the samples."""

    low: Count
    high: Count

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"low {self.low} is above high {self.high}")

    @property
    def is_point(self) -> bool:
        """All samples had the same value."""
        return self.low == self.high

    def is_nearly(self, value: float) -> bool:
        """All samples had nearly one value (within 2 %), and this is nearly the same."""
        near = 1 + _NEAR
        return self.high <= self.low * near and self.low / near <= value <= self.high * near

    def covers(self, value: float) -> bool:
        """Inside, or as good as (2 %): the state record beside the blocks makes no other copy of it."""
        return self.low / (1 + _NEAR) <= value <= self.high * (1 + _NEAR)

    def __str__(self) -> str:
        return str(self.low) if self.is_point else f"{self.low} to {self.high}"


class Spread(Record, frozen=True, kw_only=True):
    """Measured over predicted seconds, of the copies up to a size: their quantiles, mean and deviation.

    A quantile is None where the samples are too few to know it (13 for p95, 67 for p99).
    """

    up_to_nbytes: Count
    samples: Count
    p50: Ratio
    p95: Ratio | None = None
    p99: Ratio | None = None
    mean: Ratio
    deviation: Share

    def __post_init__(self) -> None:
        known = [ratio for ratio in (self.p50, self.p95, self.p99) if ratio is not None]
        if known != sorted(known):
            raise ValueError("p50, p95 and p99 must not fall")

    def ratio_or_none(self, q: float) -> float | None:
        """The quantile ``q`` (0.5 to 0.99), on straight lines between those that are known."""
        points = [(at, value) for at, value in self._points() if value is not None]
        for (low, below), (high, above) in itertools.pairwise(points):
            if low <= q <= high:
                return below + (above - below) * (q - low) / (high - low)
        return points[0][1] if q == points[0][0] else None

    def ratio_at_least(self, q: float) -> float:
        """The same where it is known, else that of the largest quantile below ``q`` that is."""
        known = (self.ratio_or_none(at) for at in (0.5, 0.95, q) if at <= q)
        return max(ratio for ratio in known if ratio is not None)

    def ratio(self, q: float) -> float:
        """The quantile ``q``; raises InputError for a ``q`` outside, NoPlanError for too few samples."""
        if not 0.5 <= q <= 0.99:
            raise InputError(f"q: {q} is not from 0.5 to 0.99")
        ratio = self.ratio_or_none(q)
        if ratio is None:
            raise NoPlanError(
                f"p{100 * q:g} is not known from {self.samples} copies of up to {self.up_to_nbytes} bytes",
                next_step=f"probe with {samples_needed(q)} repeats or more",
            )
        return ratio

    def _points(self) -> tuple[tuple[float, float | None], ...]:
        return ((0.5, self.p50), (0.95, self.p95), (0.99, self.p99))


def samples_needed(q: float) -> int:
    """Samples from which a quantile lies inside them: Hyndman and Fan 1996, definition 8."""
    return max(1, math.ceil((1 + q) / (3 * (1 - q)) - 1e-9))


class Line(Record, frozen=True, kw_only=True):
    """``T = a + o*descriptors + nbytes/B``; a parameter that the samples do not tell is None.

    Where ``o_seconds`` is None, its part is inside the other two; where ``bytes_per_second`` is None,
    inside ``a_seconds``. Where ``descriptors_overlap``, the last two terms run at the same time:
    ``T = a + max(o*descriptors, nbytes/B)``.
    """

    a_seconds: Cost | None
    o_seconds: Cost | None
    bytes_per_second: Rate | None
    descriptors_overlap: bool = False

    def known_seconds(self, nbytes: int, descriptors: int) -> float:
        """What the known terms give."""
        posting = (self.o_seconds or 0.0) * descriptors
        moving = 0.0 if self.bytes_per_second is None else nbytes / self.bytes_per_second
        together = max(posting, moving) if self.descriptors_overlap else posting + moving
        return (self.a_seconds or 0.0) + together


class Knee(Line, frozen=True, kw_only=True):
    """A second regime: the parameters of copies of ``from_nbytes`` and more."""

    from_nbytes: Count


class LinkFit(Line, frozen=True, kw_only=True):
    """What the samples of one pair under one set of conditions say.

    Args:
        worst_error: largest |measured / predicted - 1| over the medians of the shapes measured.
        median_error: the median of those; both None where the samples leave no point to spare.
        samples: number of copies fitted; 0 for a rate that nobody measured here.
        nbytes, descriptors, block_bytes: what the samples covered (None without samples);
            ``block_bytes`` is nbytes per descriptor.
        spreads: by rising size; the last holds for all larger copies.
        knee: where a second regime begins, or None.
    """

    worst_error: Share | None = None
    median_error: Share | None = None
    samples: Annotated[int, Meta(ge=0, le=2**53)] = 0
    nbytes: Span | None = None
    descriptors: Span | None = None
    block_bytes: Span | None = None
    spreads: tuple[Spread, ...] = ()
    knee: Knee | None = None

    @property
    def unidentified(self) -> tuple[str, ...]:
        """Names of the parameters that the samples do not tell."""
        return tuple(
            name for name in ("a_seconds", "o_seconds", "bytes_per_second") if getattr(self, name) is None
        )

    def regime(self, nbytes: int) -> Line:
        """The line that holds for copies of that size: this one, or the knee's."""
        return self if self.knee is None or nbytes < self.knee.from_nbytes else self.knee

    def at_least(self, nbytes: int, descriptors: int) -> float:
        """Seconds of the terms that are known: a floor where a parameter is None, else the prediction.

        Never falls when ``nbytes`` or ``descriptors`` grows.
        """
        regime = self.regime(nbytes)
        if regime is self or self.knee is None:
            return self.known_seconds(nbytes, descriptors)
        # A larger copy is never promised to be faster than a smaller one.
        return max(
            self.known_seconds(self.knee.from_nbytes, descriptors),
            self.knee.known_seconds(nbytes, descriptors),
        )

    def start_of(self, nbytes: int, descriptors: int) -> float:
        """The part of :meth:`at_least` that is the start: round trips, while others may use the link.

        Of two regimes the lesser start, so that what is left of the time never falls when a copy grows.
        """
        starts = [line.a_seconds or 0.0 for line in (self, self.knee) if line is not None]
        return min(*starts, self.at_least(nbytes, descriptors))

    def predict(self, nbytes: int, descriptors: int) -> float:
        """Seconds of a typical copy.

        Raises NoPlanError where the samples cannot tell: nothing was measured, or the parameter that
        this copy needs is unidentified.
        """
        reason = self.why_unknown(nbytes, descriptors)
        if reason is not None:
            raise NoPlanError(reason, next_step="probe with sizes and block sizes around this copy's")
        return self.at_least(nbytes, descriptors)

    def predict_quantile(self, q: float, nbytes: int, descriptors: int) -> float:
        """Seconds that a share ``q`` of such copies keeps to: 0.5, 0.95, 0.99, or between them.

        Never falls when ``q``, ``nbytes`` or ``descriptors`` grows. Raises NoPlanError as
        :meth:`predict` does, and where the samples are too few for that quantile.
        """
        typical = self.predict(nbytes, descriptors)
        spread = self.spread_at(nbytes)
        if spread is None:
            raise NoPlanError("the spread of this fit was not kept", next_step="probe the pair again")
        spread.ratio(q)  # or the error that says what it lacks
        ratio = self.between(nbytes, descriptors, lambda band: band.ratio_at_least(q))
        if nbytes > spread.up_to_nbytes:
            # Beyond what was measured, stalls of the many parts of a copy average out as they do
            # for independent parts: what exceeds p50 grows with the root of the time.
            measured = self.at_least(spread.up_to_nbytes, descriptors)
            ratio = spread.p50 + (ratio - spread.p50) * math.sqrt(measured / typical)
        seconds = typical * ratio
        # Relative spread shrinks with size; the bound over the smaller bands keeps the answer monotone.
        for band in itertools.takewhile(lambda band: band is not spread, self.spreads):
            edge = self.at_least(band.up_to_nbytes, descriptors)
            seconds = max(seconds, edge * band.ratio_at_least(q))
        return seconds

    def mean_and_square(self, nbytes: int, descriptors: int) -> tuple[float, float]:
        """Mean seconds of such copies, and the mean of their squares, for queues; the typical time where no
        spread was kept, or where the samples do not tell the copy's.

        Neither falls when ``nbytes`` or ``descriptors`` grows.
        """
        typical = self.at_least(nbytes, descriptors)
        spread = self.spread_at(nbytes)
        if spread is None or self.why_unknown(nbytes, descriptors) is not None:
            return typical, typical * typical
        mean = typical * self.between(nbytes, descriptors, lambda band: band.mean)
        deviation = typical * self.between(nbytes, descriptors, lambda band: band.deviation)
        if nbytes > spread.up_to_nbytes:  # as in predict_quantile
            root = math.sqrt(self.at_least(spread.up_to_nbytes, descriptors) / typical)
            mean = typical * (spread.p50 + max(0.0, spread.mean - spread.p50) * root)
            deviation *= root
        for band in itertools.takewhile(lambda band: band is not spread, self.spreads):
            edge = self.at_least(band.up_to_nbytes, descriptors)
            # Each by itself: where one falls while the other rises, their sum of squares may fall.
            mean, deviation = max(mean, edge * band.mean), max(deviation, edge * band.deviation)
        return mean, mean * mean + deviation * deviation

    def between(self, nbytes: int, descriptors: int, ratio_of: Callable[[Spread], float]) -> float:
        """A ratio of the spread of that size, which :meth:`spread_at` has.

        From the largest size of one band to that of the next it goes over to the next one's, so that it does
        not jump: a ratio that rises, in a straight line; one that falls, as far as seconds do not.
        """
        below: tuple[int, float] | None = None
        for band in self.spreads:
            ratio = ratio_of(band)
            if nbytes <= band.up_to_nbytes or band is self.spreads[-1]:
                break
            below = band.up_to_nbytes, ratio
        typical = self.at_least(nbytes, descriptors)
        if below is None or nbytes >= band.up_to_nbytes or not typical:
            return ratio
        from_nbytes, low = below
        way = (nbytes - from_nbytes) / (band.up_to_nbytes - from_nbytes)
        if low <= ratio:
            return low + (ratio - low) * way
        start = self.at_least(from_nbytes, descriptors) * low
        end = max(start, self.at_least(band.up_to_nbytes, descriptors) * ratio)
        return max(ratio, min(low, (start + (end - start) * way) / typical))

    def spread_at(self, nbytes: int) -> Spread | None:
        """The spread of copies of that size, or None where none was kept."""
        return next((band for band in self.spreads if nbytes <= band.up_to_nbytes), (None, *self.spreads)[-1])

    def why_unknown(self, nbytes: int, descriptors: int) -> str | None:
        """Why :meth:`predict` would refuse this copy, or None."""
        if self.samples == 0 or self.nbytes is None or self.descriptors is None or self.block_bytes is None:
            return "nothing was measured on this link"
        if self.a_seconds is None:
            return "the start cost of a copy is not identified"
        regime = self.regime(nbytes)
        if regime.bytes_per_second is None and not self.nbytes.low <= nbytes <= self.nbytes.high:
            return (
                f"the rate is not identified by copies of {self.nbytes} bytes, so {nbytes} bytes are unknown"
            )
        if self.o_seconds is None and not self._has_known_blocks(nbytes, descriptors):
            return (
                "the cost of a descriptor is not identified: the samples had "
                f"{self.descriptors} descriptors of {self.block_bytes} bytes, this copy has {descriptors} "
                f"of {nbytes / descriptors:.0f}"
            )
        return None

    def _has_known_blocks(self, nbytes: int, descriptors: int) -> bool:
        """Without ``o``, only copies cut like all the samples: their count of pieces, or their piece size."""
        assert self.descriptors is not None
        assert self.block_bytes is not None
        return self.descriptors.is_nearly(descriptors) or self.block_bytes.is_nearly(nbytes / descriptors)

    def beyond(self, nbytes: int, descriptors: int) -> tuple[str, ...]:
        """In words, how this copy lies outside what was measured; empty when it lies inside."""
        if self.nbytes is None or self.descriptors is None or self.block_bytes is None:
            return ("nothing was measured on this link",)
        checks = (
            (nbytes, self.nbytes, "bytes"),
            (descriptors, self.descriptors, "descriptors"),
            (round(nbytes / descriptors), self.block_bytes, "bytes a descriptor"),
        )
        return tuple(
            f"{value} {what} is outside the {span} that were measured"
            for value, span, what in checks
            if not span.covers(value)
        )

    def too_far(self, nbytes: int, descriptors: int) -> str | None:
        """Why this copy lies too far above what was measured for the line to be trusted, or None.

        Only above: a smaller copy takes no longer than the smallest one measured. A fit without
        samples covers nothing, and says so by :meth:`why_unknown`.
        """
        spans = ((nbytes, self.nbytes, "bytes"), (descriptors, self.descriptors, "descriptors"))
        for value, span, what in spans:
            if span is not None and value > FAR * span.high * (1 + _NEAR):
                return f"{value} {what} are more than {FAR} times the {span.high} that were measured"
        return None

    def within_reach(self, nbytes: int, descriptors: int) -> tuple[int, int]:
        """The copy, cut to the largest that is not :meth:`too_far`: the whole one takes no less time."""
        reach = [
            value if span is None else min(value, int(FAR * span.high * (1 + _NEAR)))
            for value, span in ((nbytes, self.nbytes), (descriptors, self.descriptors))
        ]
        return reach[0], reach[1]
