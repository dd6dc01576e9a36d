"""What a handoff over one link takes, and what of it the first token waits for.

    T_x      = a + o * descriptors + bytes / B        from the link's fit
    exposed  = t_x + (g - 1) * max(0, t_x - t_p) + sync     with t_x = T_x / g, t_p = T_prefill / g

g groups (layers, or chunks of the prompt) leave while prefill still computes the next; g = 1 moves
everything after it. ``sync`` is a fixed cost of such a scheme: 5 to 8 ms in Splitwise's figures.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from kvferry.errors import NoPlanError
from kvferry.link import LinkFit, LinkProfile, Mode
from kvferry.plan.queue import Service

__all__ = ["LinkTime", "Overlap", "Way", "exposed_seconds", "handoff_service", "link_time"]


class Overlap(StrEnum):
    """What leaves while prefill still computes."""

    NONE = "none"
    LAYER = "layer"
    CHUNK = "chunk"


class Way(msgspec.Struct, frozen=True):
    """How a payload crosses a link.

    Args:
        link: what is known of the pair.
        mode, tls, incast, under_load: the conditions of the measurement that is used.
        links: links of this kind side by side; the payload is split evenly over them.
        quantile: share of the copies that the answer is to cover.
    """

    link: LinkProfile
    mode: Mode = Mode.PULL
    tls: bool = False
    incast: int = 1
    under_load: bool = False
    links: int = 1
    quantile: float = 0.95

    def fit(self) -> LinkFit:
        """The fit under these conditions. Raises NoPlanError where they were not measured."""
        return self.link.fit(self.mode, tls=self.tls, incast=self.incast, under_load=self.under_load)

    def at_speed(self, factor: float) -> Way:
        """The same way if its rate were ``factor`` times what it is, all other costs alike."""
        fits = [replace(entry, fit=_faster(entry.fit, factor)) for entry in self.link.fits]
        return replace(self, link=replace(self.link, fits=tuple(fits)))


class LinkTime(msgspec.Struct, frozen=True):
    """The time of one payload over a :class:`Way`, in its parts.

    Args:
        seconds: the sum; where it is not known, what the known terms give, or the brochure rate.
        start_seconds, descriptor_seconds, byte_seconds: the terms of the fit.
        spread_seconds: what the quantile adds to them.
        unknown: why this is no measured answer, or None.
        known_seconds: what it takes at least, as far as was measured; 0 where nothing was.
        beyond: how the payload lies outside of what was measured.
    """

    seconds: float
    start_seconds: float
    descriptor_seconds: float
    byte_seconds: float
    spread_seconds: float
    unknown: str | None
    known_seconds: float = 0.0
    beyond: tuple[str, ...] = ()


def link_time(way: Way, nbytes: int, descriptors: int) -> LinkTime:
    """The time of ``nbytes`` in ``descriptors`` pieces, at the way's quantile.

    Never raises for a link that was not measured: the answer says so.
    """
    fit, unknown = _fit(way)
    return _time(fit, way, nbytes, descriptors, unknown)


def why_unsure(way: Way, nbytes: int, descriptors: int) -> str | None:
    """Why the link's busy time with such a payload is no measured one, or None."""
    fit, unknown = _fit(way)
    share, pieces = _each(way, nbytes, descriptors)
    if unknown is not None or share == 0:
        return unknown
    return fit.why_unknown(share, pieces) or _far(fit, way, share, pieces)


def _fit(way: Way) -> tuple[LinkFit, str | None]:
    """The fit that answers, and why nothing that it says was measured, or None."""
    try:
        return way.fit(), None if way.link.measured else f"{way.link.pair}: unmeasured"
    except NoPlanError as error:
        # Any other condition's fit gives the estimate, which is marked.
        return way.link.fits[0].fit, error.message


def _each(way: Way, nbytes: int, descriptors: int) -> tuple[int, int]:
    """What each of the links side by side carries."""
    return -(-nbytes // way.links), max(1, -(-descriptors // way.links))


def _far(fit: LinkFit, way: Way, share: int, pieces: int) -> str | None:
    far = fit.too_far(share, pieces)
    return far and f"{way.link.pair}: {far}; probe it with such a payload"


def _time(fit: LinkFit, way: Way, nbytes: int, descriptors: int, unknown: str | None) -> LinkTime:
    share, pieces = _each(way, nbytes, descriptors)
    if share == 0:
        return LinkTime(0.0, 0.0, 0.0, 0.0, 0.0, unknown)
    typical = fit.at_least(share, pieces)
    start = fit.a_seconds or 0.0
    descriptor = (fit.o_seconds or 0.0) * pieces
    unknown = unknown or fit.why_unknown(share, pieces)
    seconds, known, far = typical, 0.0, None
    if unknown is None:
        try:
            seconds = fit.predict_quantile(way.quantile, share, pieces)
            known = fit.predict_quantile(way.quantile, *fit.within_reach(share, pieces))
        except NoPlanError as error:
            unknown = f"{way.link.pair}: {error.message}"
        # The line goes on as an estimate.
        far = _far(fit, way, share, pieces)
    return LinkTime(
        seconds=seconds,
        start_seconds=start,
        descriptor_seconds=descriptor,
        byte_seconds=max(0.0, typical - start - descriptor),
        spread_seconds=seconds - typical,
        unknown=unknown or far,
        known_seconds=known,
        beyond=fit.beyond(share, pieces) if unknown is far is None else (),
    )


def handoff_service(way: Way, nbytes: int, descriptors: int, *, within_reach: bool = False) -> Service:
    """How long one handoff keeps the link busy, by mean and mean square: what waits for it are made of.

    Without its start, which is round trips: see ``kvferry.plan.tier``. Not the quantile: a handoff that
    takes its p95 does so once in twenty times. A link without a measured spread takes its typical time.
    ``within_reach``: of a handoff cut to what was measured, which keeps the link busy for no longer.
    """
    share, pieces = _each(way, nbytes, descriptors)
    if share == 0:
        return Service.fixed(0.0)
    fit, _ = _fit(way)
    if within_reach:
        share, pieces = fit.within_reach(share, pieces)
    mean, square = fit.mean_and_square(share, pieces)
    typical = fit.at_least(share, pieces)
    busy = 1 - fit.start_of(share, pieces) / typical if typical else 0.0
    return Service(mean * busy, square * busy * busy)


def _faster(fit: LinkFit, factor: float) -> LinkFit:
    knee = fit.knee
    if knee is not None and knee.bytes_per_second is not None:
        knee = replace(knee, bytes_per_second=knee.bytes_per_second * factor)
    rate = None if fit.bytes_per_second is None else fit.bytes_per_second * factor
    return replace(fit, bytes_per_second=rate, knee=knee)


def exposed_seconds(
    transfer_seconds: float, prefill_seconds: float, groups: int = 1, sync_seconds: float = 0.0
) -> float:
    """What is left of a transfer when prefill ends, if it leaves in ``groups`` equal parts."""
    each, compute = transfer_seconds / groups, prefill_seconds / groups
    return each + (groups - 1) * max(0.0, each - compute) + sync_seconds
