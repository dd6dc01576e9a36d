"""Does a TTFT promise hold over this link? The split, the verdict and what binds.

    TTFT = wait for prefill + prefill + (first token from decode ? wait for the link
           + exposed transfer + first decode step : 0)

Where a rate is given, waits are quantiles behind a trace's own arrivals, or of M/G/1 servers; the link's
service time has the mean and the deviation of its measured spread (behind a trace's own arrivals it is
drawn so, lognormal, always the same draw), so its load is the mean times the rate. The parts
are added at the same quantile, which promises no less than the quantile of the sum. A link that nobody
measured, or a prefill that nobody timed (or only far shorter ones), gives "unknown" with an estimate that
is marked as one; but where the parts that are known and have no link in them exceed the promise, it does
not hold, whatever the link.
"""

from __future__ import annotations

import math
from enum import StrEnum
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.model import ModelShape
from kvferry.plan.compute import UNKNOWN_COMPUTE, ComputeProfile
from kvferry.plan.handoff import LinkTime, exposed_seconds, handoff_service, link_time
from kvferry.plan.payload import Payload, PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise, check_promise
from kvferry.plan.queue import Service, empirical_waits

__all__ = [
    "Answer",
    "Binding",
    "Split",
    "Verdict",
    "answer",
    "has_arrivals",
    "last_chunk",
    "link_service",
    "prefill_service",
]

_SEED = 1
"""Of the draw of handoff times behind a trace's own arrivals: one question has one answer."""


class Verdict(StrEnum):
    """Whether the promise can be made."""

    HOLDS = "holds"
    DOES_NOT_HOLD = "does not hold"
    UNKNOWN = "unknown"


class Binding(StrEnum):
    """What decides: the part that breaks the promise, or that would break it first."""

    PREFILL = "prefill"
    QUEUE = "prefill queue"
    STEP = "first decode step"
    LINK_QUEUE = "link queue"
    BANDWIDTH = "link bandwidth"
    DESCRIPTORS = "link descriptors"
    START = "link start"
    SPREAD = "link spread"
    SYNC = "synchronisation"
    UNMEASURED = "unmeasured link"
    UNKNOWN_PREFILL = "unknown prefill time"


class Split(msgspec.Struct, frozen=True):
    """The parts of the TTFT, seconds. With the first token from prefill the last three count nothing."""

    queue_seconds: float
    prefill_seconds: float
    link_queue_seconds: float
    exposed_transfer_seconds: float
    first_decode_step_seconds: float

    @property
    def total(self) -> float:
        return self.without_link + self.link_queue_seconds + self.exposed_transfer_seconds

    @property
    def without_link(self) -> float:
        """What no link could take away."""
        return self.queue_seconds + self.prefill_seconds + self.first_decode_step_seconds


class Answer(msgspec.Struct, frozen=True):
    """What ``check`` says.

    Args:
        verdict: holds, does not hold, unknown.
        ttft_seconds: the sum of the split; None where prefill is unknown; infinite where a queue grows.
        target_seconds, slack_seconds: the promise, and what is left of it.
        split: the parts.
        binding: what decides.
        payload: what crosses.
        transfer: the link's time for it, unhidden.
        gap_seconds: what lies between the first token and the second where prefill emits the first.
        unknown: what of it is an estimate or missing, or empty; with some, it is never "holds".
        warnings: what it does not cover.
        is_within_profile: False where the prompt or the batch is far beyond what the profile was measured at.
    """

    verdict: Verdict
    ttft_seconds: float | None
    target_seconds: float
    slack_seconds: float | None
    split: Split
    binding: Binding
    payload: Payload
    transfer: LinkTime
    gap_seconds: float | None
    unknown: tuple[str, ...]
    warnings: tuple[str, ...]
    is_within_profile: bool


def answer(promise: Promise) -> Answer:
    """Whether the promise holds. Raises InputError for a question that cannot be asked."""
    check_promise(promise)
    size = promise.pool.size(promise.shape, promise.prompt_tokens, promise.cached_tokens)
    payload = Payload(size.wire_bytes, size.descriptors)
    transfer = link_time(promise.way, payload.nbytes, payload.descriptors)
    prefill = promise.prefill_seconds()
    exposed = _exposed(promise, transfer.seconds, prefill or 0.0)
    link_queue = _link_queue(promise)
    step = promise.first_step_seconds() or 0.0
    from_decode = promise.first_token is FirstToken.DECODE
    split = Split(
        queue_seconds=_prefill_queue(promise),
        prefill_seconds=prefill or 0.0,
        link_queue_seconds=link_queue if from_decode else 0.0,
        exposed_transfer_seconds=exposed if from_decode else 0.0,
        first_decode_step_seconds=step if from_decode else 0.0,
    )
    unknown = _unknown(promise, prefill, transfer)
    is_far = _far_compute(promise) is not None
    known = _known_far(promise) if is_far else _known(promise, split, transfer)
    verdict = _verdict(promise, split, known, unknown)
    ttft = None if prefill is None else split.total
    return Answer(
        verdict=verdict,
        ttft_seconds=ttft,
        target_seconds=promise.target_seconds,
        slack_seconds=None if ttft is None else promise.target_seconds - ttft,
        split=split,
        binding=Binding.UNKNOWN_PREFILL
        if is_far and verdict is Verdict.UNKNOWN
        else _binding(promise, split, transfer, () if verdict is Verdict.DOES_NOT_HOLD else unknown),
        payload=payload,
        transfer=transfer,
        gap_seconds=None if from_decode else link_queue + exposed + step,
        unknown=unknown,
        warnings=size.warnings + _warnings(promise, transfer, split.queue_seconds + link_queue),
        is_within_profile=not is_far,
    )


def _exposed(promise: Promise, transfer_seconds: float, prefill: float, *, is_known: bool = False) -> float:
    if promise.chunk_tokens is None:
        return exposed_seconds(transfer_seconds, prefill, promise.groups, promise.sync_seconds)
    last = last_chunk(promise)
    # A last chunk that takes longer than the whole is a spread that is wider for small copies.
    last_seconds = min(last.known_seconds if is_known else last.seconds, transfer_seconds)
    left = promise.left_after_first_chunk_seconds()
    return max(last_seconds, transfer_seconds - left) + promise.sync_seconds


def last_chunk(promise: Promise) -> LinkTime:
    """The link's time for what leaves after prefill's last chunk: as if all before it were at decode."""
    assert promise.chunk_tokens is not None
    held = max(promise.cached_tokens, promise.prompt_tokens - promise.chunk_tokens)
    payload = _payloads(promise.shape, promise.pool).at(promise.prompt_tokens, held)
    return link_time(promise.way, payload.nbytes, payload.descriptors)


def _unknown(promise: Promise, prefill: float | None, transfer: LinkTime) -> tuple[str, ...]:
    reasons = []
    if prefill is None:
        reasons.append(UNKNOWN_COMPUTE)
    if (far := _far_compute(promise)) is not None:
        reasons.append(f"{far}; measure it with such")
    # Where prefill emits the first token, the link is no part of the promise.
    if transfer.unknown is not None and promise.first_token is FirstToken.DECODE:
        reasons.append(transfer.unknown)
    return tuple(reasons)


def _far_compute(promise: Promise) -> str | None:
    """Why the profile does not reach so far, or None."""
    if not isinstance(promise.prefill, ComputeProfile):
        return None
    return promise.prefill.too_far(promise.prompt_tokens, _batch(promise))


def _batch(promise: Promise) -> int:
    """Of the first decode step, where the profile gives it and it counts."""
    from_decode = promise.first_token is FirstToken.DECODE and promise.decode_step_seconds is None
    return promise.decode_batch or 1 if from_decode else 1


def _known_far(promise: Promise) -> float:
    """The least that the TTFT takes where its profile does not reach: of the largest that it does reach.

    Nothing of the link: how much of it prefill hides is not known either.
    """
    assert isinstance(promise.prefill, ComputeProfile)
    tokens, batch = promise.prefill.reach
    within = msgspec.structs.replace(
        promise,
        prompt_tokens=int(min(promise.prompt_tokens, tokens)),
        decode_batch=None if promise.decode_batch is None else int(min(promise.decode_batch, batch)),
    )
    from_decode = promise.first_token is FirstToken.DECODE
    step = within.first_step_seconds() or 0.0 if from_decode else 0.0
    return (promise.queue_seconds or 0.0) + (within.prefill_seconds() or 0.0) + step


def _known(promise: Promise, split: Split, transfer: LinkTime) -> float:
    """Seconds that the TTFT has at least, as far as was measured; an unknown prefill counts 0.

    A handoff too far beyond what was measured takes no less than the largest that is not.
    """
    prefill = promise.prefill_seconds()
    if prefill is None or not transfer.known_seconds or promise.first_token is not FirstToken.DECODE:
        return split.without_link
    exposed = _exposed(promise, transfer.known_seconds, prefill, is_known=True)
    return split.without_link + _link_queue(promise, within_reach=True) + exposed


def _verdict(promise: Promise, split: Split, known: float, unknown: tuple[str, ...]) -> Verdict:
    if known > promise.target_seconds:
        return Verdict.DOES_NOT_HOLD
    if unknown:
        return Verdict.UNKNOWN
    return Verdict.HOLDS if split.total <= promise.target_seconds else Verdict.DOES_NOT_HOLD


def _prefill_queue(promise: Promise) -> float:
    if promise.queue_seconds is not None:
        return promise.queue_seconds
    rate = promise.requests_per_second
    seconds = promise.prefill_seconds()
    if not rate or seconds is None:
        return 0.0
    if has_arrivals(promise):
        return _walked(promise, rate, _prefill_times(promise))
    return prefill_service(promise).wait_quantile_seconds(rate, promise.way.quantile)


def prefill_service(promise: Promise) -> Service:
    """How long prefill is busy with one prompt of the workload, by its first two moments."""
    if promise.prompt_lengths is None:
        return Service.fixed(promise.prefill_seconds() or 0.0)
    return Service.of(_prefill_times(promise))


def _prefill_times(promise: Promise) -> NDArray[np.float64]:
    """Of each prompt of the workload, in order."""
    assert promise.prompt_lengths is not None
    lengths, which = np.unique(promise.prompt_lengths, return_inverse=True)
    times = np.array([promise.prefill_seconds(int(length)) or 0.0 for length in lengths])
    return np.asarray(times[which], dtype=np.float64)


def _link_queue(promise: Promise, *, within_reach: bool = False) -> float:
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


def _handoff(promise: Promise, length: int, *, within_reach: bool = False) -> Service:
    payload = _payloads(promise.shape, promise.pool).at(length, min(promise.cached_tokens, length))
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
def _payloads(shape: ModelShape, pool: PoolFormat) -> PayloadTable:
    return PayloadTable(shape, pool)


def _binding(promise: Promise, split: Split, transfer: LinkTime, unknown: tuple[str, ...]) -> Binding:
    local = {
        Binding.QUEUE: split.queue_seconds,
        Binding.PREFILL: split.prefill_seconds,
        Binding.STEP: split.first_decode_step_seconds,
    }
    if split.without_link > promise.target_seconds:
        return max(local, key=lambda part: local[part])
    if UNKNOWN_COMPUTE in unknown:
        return Binding.UNKNOWN_PREFILL
    if unknown:
        return Binding.UNMEASURED
    link = {
        Binding.LINK_QUEUE: split.link_queue_seconds,
        _term(promise, transfer): split.exposed_transfer_seconds,
    }
    # Without the link it would hold: then the link binds, however small its part.
    parts = link if split.total > promise.target_seconds else local | link
    return max(parts, key=lambda part: parts[part])


def _term(promise: Promise, transfer: LinkTime) -> Binding:
    terms = {
        Binding.BANDWIDTH: transfer.byte_seconds,
        Binding.DESCRIPTORS: transfer.descriptor_seconds,
        Binding.START: transfer.start_seconds,
        Binding.SPREAD: transfer.spread_seconds,
        Binding.SYNC: promise.sync_seconds,
    }
    return max(terms, key=lambda term: terms[term])


def _warnings(promise: Promise, transfer: LinkTime, waits: float) -> tuple[str, ...]:
    warnings = list(transfer.beyond)
    if promise.first_token is FirstToken.DECODE and promise.first_step_seconds() is None:
        warnings.append("first decode step: not given, counted as 0; give --decode-seconds or a profile")
    if isinstance(promise.prefill, ComputeProfile):
        computed = promise.prompt_tokens - min(promise.cached_tokens, promise.prompt_tokens - 1)
        outside = None if _far_compute(promise) else promise.prefill.outside(computed, _batch(promise))
        warnings += [w for w in (promise.prefill.doubt, outside) if w]
    if isinstance(promise.prefill, GivenPrefill) and promise.prompt_lengths is not None:
        warnings.append("prefill of the other lengths: taken as proportional to --prefill-seconds")
    if promise.num_parts > 1 and promise.sync_seconds == 0:
        warnings.append("overlap: no --sync-seconds given; published figures are 0.4 to 8 ms a handoff")
    if not math.isfinite(waits):
        warnings.append("a queue grows without end at this rate")
    return tuple(warnings)
