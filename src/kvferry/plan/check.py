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

import msgspec
from msgspec.structs import replace

from kvferry.plan.compute import UNKNOWN_COMPUTE, ComputeProfile
from kvferry.plan.handoff import LinkTime, exposed_seconds, link_time
from kvferry.plan.payload import Payload
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise, check_promise
from kvferry.plan.waits import (
    far_handoffs,
    far_prompts,
    link_queue_seconds,
    payloads,
    prefill_queue_seconds,
)

__all__ = [
    "Answer",
    "Binding",
    "Split",
    "Verdict",
    "answer",
    "last_chunk",
]


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
        is_within_profile: False where the prompt, the batch or the prompts that it waits for are far beyond
            what prefill was measured at.
        is_measured: neither that, nor a handoff, its own or one that it waits for, that is not measured.
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
    is_measured: bool


def answer(promise: Promise) -> Answer:
    """Whether the promise holds. Raises InputError for a question that cannot be asked."""
    check_promise(promise)
    size = promise.pool.size(promise.shape, promise.prompt_tokens, promise.cached_tokens)
    payload = Payload(size.wire_bytes, size.descriptors)
    transfer = link_time(promise.way, payload.nbytes, payload.descriptors)
    prefill = promise.prefill_seconds()
    exposed = _exposed(promise, transfer.seconds, prefill or 0.0)
    link_queue = link_queue_seconds(promise)
    step = promise.first_step_seconds() or 0.0
    from_decode = promise.first_token is FirstToken.DECODE
    split = Split(
        queue_seconds=prefill_queue_seconds(promise),
        prefill_seconds=prefill or 0.0,
        link_queue_seconds=link_queue if from_decode else 0.0,
        exposed_transfer_seconds=exposed if from_decode else 0.0,
        first_decode_step_seconds=step if from_decode else 0.0,
    )
    far_prefill, far_link = (
        _too_far(promise) or far_prompts(promise),
        transfer.unknown or far_handoffs(promise),
    )
    unknown = _unknown(promise, prefill, far_prefill, far_link)
    verdict = _verdict(promise, split, transfer, unknown)
    ttft = None if prefill is None else split.total
    return Answer(
        verdict=verdict,
        ttft_seconds=ttft,
        target_seconds=promise.target_seconds,
        slack_seconds=None if ttft is None else promise.target_seconds - ttft,
        split=split,
        binding=Binding.UNKNOWN_PREFILL
        if far_prefill is not None and verdict is Verdict.UNKNOWN
        else _binding(promise, split, transfer, () if verdict is Verdict.DOES_NOT_HOLD else unknown),
        payload=payload,
        transfer=transfer,
        gap_seconds=None if from_decode else link_queue + exposed + step,
        unknown=unknown,
        warnings=size.warnings + _warnings(promise, transfer, split.queue_seconds + link_queue),
        is_within_profile=far_prefill is None,
        is_measured=far_prefill is far_link is None,
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
    payload = payloads(promise.shape, promise.pool).at(promise.prompt_tokens, held)
    return link_time(promise.way, payload.nbytes, payload.descriptors)


def _unknown(
    promise: Promise, prefill: float | None, far_prefill: str | None, far_link: str | None
) -> tuple[str, ...]:
    reasons = []
    if prefill is None:
        reasons.append(UNKNOWN_COMPUTE)
    if far_prefill is not None:
        reasons.append(f"{far_prefill}; measure it with such")
    # Where prefill emits the first token, the link is no part of the promise.
    if far_link is not None and promise.first_token is FirstToken.DECODE:
        reasons.append(far_link)
    return tuple(reasons)


def _too_far(promise: Promise) -> str | None:
    """Why what was measured of prefill does not reach so far, or None."""
    return (
        None if promise.prefill is None else promise.prefill.too_far(promise.prompt_tokens, _batch(promise))
    )


def _batch(promise: Promise) -> int:
    """Of the first decode step, where the profile gives it and it counts."""
    from_decode = promise.first_token is FirstToken.DECODE and promise.decode_step_seconds is None
    return promise.decode_batch or 1 if from_decode else 1


def _known_far(promise: Promise) -> float:
    """The least that the TTFT takes where its profile does not reach: of the largest that it does reach.

    Nothing of the link: how much of it prefill hides is not known either.
    """
    assert promise.prefill is not None
    tokens, batch = promise.prefill.reach
    within = replace(
        promise,
        prompt_tokens=int(min(promise.prompt_tokens, tokens)),
        decode_batch=None if promise.decode_batch is None else int(min(promise.decode_batch, batch)),
    )
    from_decode = promise.first_token is FirstToken.DECODE
    step = within.first_step_seconds() or 0.0 if from_decode else 0.0
    return (promise.queue_seconds or 0.0) + (within.prefill_seconds() or 0.0) + step


def _known(promise: Promise, split: Split, transfer: LinkTime) -> float:
    """Seconds that the TTFT has at least, as far as was measured; an unknown prefill counts 0.

    A handoff too far beyond what was measured takes no less than the largest that is not; so do those
    handoffs and prompts that this one waits for.
    """
    prefill = promise.prefill_seconds()
    queue = prefill_queue_seconds(promise, within_reach=True)
    without_link = replace(split, queue_seconds=queue).without_link
    if prefill is None or not transfer.known_seconds or promise.first_token is not FirstToken.DECODE:
        return without_link
    exposed = _exposed(promise, transfer.known_seconds, prefill, is_known=True)
    return without_link + link_queue_seconds(promise, within_reach=True) + exposed


def _verdict(promise: Promise, split: Split, transfer: LinkTime, unknown: tuple[str, ...]) -> Verdict:
    if not unknown:
        return Verdict.HOLDS if split.total <= promise.target_seconds else Verdict.DOES_NOT_HOLD
    known = _known(promise, split, transfer) if _too_far(promise) is None else _known_far(promise)
    return Verdict.DOES_NOT_HOLD if known > promise.target_seconds else Verdict.UNKNOWN


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
        outside = None if _too_far(promise) else promise.prefill.outside(computed, _batch(promise))
        warnings += [w for w in (promise.prefill.doubt, outside) if w]
    if isinstance(promise.prefill, GivenPrefill) and promise.prompt_lengths is not None:
        warnings.append("prefill of the other lengths: taken as proportional to --prefill-seconds")
    if promise.num_parts > 1 and promise.sync_seconds == 0:
        warnings.append("overlap: no --sync-seconds given; published figures are 0.4 to 8 ms a handoff")
    if not math.isfinite(waits):
        warnings.append("a queue grows without end at this rate")
    return tuple(warnings)
