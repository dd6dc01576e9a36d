"""What the first token waits for: prefill's queue and the link's, by a rate and the workload's lengths.

The service times are those of the workload's prompts. Where more than :data:`FEW` of them lie too far
beyond what was measured (decision 0160), a wait behind them is an estimate, and :func:`far_prompts` and
:func:`far_handoffs` say so; cut to what was measured they give the least that the wait takes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.model import ModelShape
from kvferry.plan.handoff import handoff_service, why_unsure
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.promise import Promise
from kvferry.plan.queue import Service, empirical_waits
from kvferry.plan.workload import FEW

__all__ = [
    "far_handoffs",
    "far_prompts",
    "has_arrivals",
    "link_queue_seconds",
    "link_service",
    "payloads",
    "prefill_queue_seconds",
    "prefill_service",
]

_SEED = 1
"""Of the draw of handoff times behind a trace's own arrivals: one question has one answer."""


def prefill_queue_seconds(promise: Promise, *, within_reach: bool = False) -> float:
    """The wait for prefill, at the way's quantile; infinite where its queue grows.

    ``within_reach``: behind prompts cut to what was measured.
    """
    if promise.queue_seconds is not None:
        return promise.queue_seconds
    rate = promise.requests_per_second
    seconds = promise.prefill_seconds()
    if not rate or seconds is None:
        return 0.0
    if has_arrivals(promise):
        return _walked(promise, rate, _prefill_times(promise, within_reach=within_reach))
    return prefill_service(promise, within_reach=within_reach).wait_quantile_seconds(
        rate, promise.way.quantile
    )


def prefill_service(promise: Promise, *, within_reach: bool = False) -> Service:
    """How long prefill is busy with one prompt of the workload, by its first two moments."""
    if promise.prompt_lengths is None:
        return Service.fixed(promise.prefill_seconds() or 0.0)
    return Service.of(_prefill_times(promise, within_reach=within_reach))


def _prefill_times(promise: Promise, *, within_reach: bool) -> NDArray[np.float64]:
    """Of each prompt of the workload, in order."""
    assert promise.prompt_lengths is not None
    lengths, which = np.unique(promise.prompt_lengths, return_inverse=True)
    if within_reach and promise.prefill is not None:
        lengths = np.minimum(lengths, promise.prefill.reach[0])
    times = np.array([promise.prefill_seconds(int(length)) or 0.0 for length in lengths])
    return np.asarray(times[which], dtype=np.float64)


def link_queue_seconds(promise: Promise, *, within_reach: bool = False) -> float:
    """The wait for the link, at the way's quantile; infinite where its queue grows.

    ``within_reach``: behind handoffs cut to what was measured.
    """
    rate = promise.requests_per_second
    if not rate:
        return 0.0
    if has_arrivals(promise):
        assert promise.prompt_lengths is not None
        lengths, which = np.unique(promise.prompt_lengths, return_inverse=True)
        normals = np.random.default_rng(_SEED).standard_normal(len(which))
        times = np.empty(len(which))
        for at, length in enumerate(lengths):
            service = _handoff(promise, int(length), within_reach=within_reach)
            times[which == at] = service.times(normals[which == at])
        return _walked(promise, rate, times)
    service = link_service(promise, within_reach=within_reach)
    return service.wait_quantile_seconds(rate, promise.way.quantile)


def link_service(promise: Promise, *, within_reach: bool = False) -> Service:
    """How long the link is busy with one handoff of the workload, by its first two moments.

    ``within_reach``: of handoffs cut to what was measured.
    """
    if promise.prompt_lengths is None:
        return _handoff(promise, promise.prompt_tokens, within_reach=within_reach)
    lengths, counts = np.unique(promise.prompt_lengths, return_counts=True)
    parts = [_handoff(promise, int(length), within_reach=within_reach) for length in lengths]
    return Service.mixture(parts, counts.tolist())


def far_prompts(promise: Promise) -> str | None:
    """Why the wait for prefill is an estimate: prompts of the workload that are too far, or None."""
    lengths, prefill = promise.prompt_lengths, promise.prefill
    if lengths is None or prefill is None or promise.queue_seconds is not None:
        return None
    if not promise.requests_per_second:
        return None
    share = float(np.mean(lengths > prefill.reach[0]))
    return f"{_few(share)}: {prefill.too_far(int(lengths.max()))}" if share > FEW else None


def far_handoffs(promise: Promise) -> str | None:
    """Why the wait for the link is an estimate: handoffs of the workload that are unknown, or None."""
    if promise.prompt_lengths is None or not promise.requests_per_second:
        return None
    table, num_far, why = payloads(promise.shape, promise.pool), 0, None
    for length, count in zip(*np.unique(promise.prompt_lengths, return_counts=True), strict=True):
        payload = table.at(int(length), min(promise.cached_tokens, int(length)))
        if (unsure := why_unsure(promise.way, payload.nbytes, payload.descriptors)) is not None:
            num_far, why = num_far + int(count), unsure
    share = num_far / len(promise.prompt_lengths)
    return f"{_few(share)}: {why}" if share > FEW else None


def _few(share: float) -> str:
    return f"{share:.0%} of the workload's prompts"


def _handoff(promise: Promise, length: int, *, within_reach: bool = False) -> Service:
    payload = payloads(promise.shape, promise.pool).at(length, min(promise.cached_tokens, length))
    return handoff_service(promise.way, payload.nbytes, payload.descriptors, within_reach=within_reach)


def has_arrivals(promise: Promise) -> bool:
    """Whether waits come from a trace's own arrivals instead of Poisson's."""
    arrivals = promise.arrival_seconds
    return (
        promise.prompt_lengths is not None
        and arrivals is not None
        and len(arrivals) >= 2
        and bool(arrivals[-1] > arrivals[0])
    )


def _walked(promise: Promise, rate: float, times: NDArray[np.float64]) -> float:
    """The quantile of the waits behind the trace's own arrivals, stretched to the rate."""
    arrivals = promise.arrival_seconds
    assert arrivals is not None
    stretch = len(arrivals) / rate / float(arrivals[-1] - arrivals[0])
    return float(np.quantile(empirical_waits(arrivals * stretch, times), promise.way.quantile))


@lru_cache(maxsize=64)
def payloads(shape: ModelShape, pool: PoolFormat) -> PayloadTable:
    """The sizes of this model in these pools, remembered from one question to the next."""
    return PayloadTable(shape, pool)
