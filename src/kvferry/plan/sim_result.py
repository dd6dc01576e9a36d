"""What a simulation says in the end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.plan.fleet import Wires
from kvferry.plan.sim_metrics import Percentiles, Tally
from kvferry.plan.workload import FEW

__all__ = ["Result", "Utilisation", "result_of"]


class Utilisation(msgspec.Struct, frozen=True):
    """Shares of the time: the mean over the links of a kind, and the busiest of them.

    An end (a domain's or a node's port) is also in use while descriptors are posted to it.
    """

    mean: float
    most: float
    busiest: str


class Result(msgspec.Struct, frozen=True):
    """What a run says. Rates are per second of ``span_seconds``, from the first arrival to the last end.

    ``goodput`` counts requests that kept to both targets; ``slo_attainment`` their share.
    ``bytes_sent`` is of all ``handoffs`` that began, those of later attempts and of requests that failed too;
    ``bytes_delivered`` of what arrived whole, by what the links carried; ``bytes_dropped`` of those that a
    failure broke off: sent is delivered and dropped. ``handoffs_too_far`` were larger than a measured
    tier's measurements reach (decision 0160); ``prompts_too_far`` longer than a compute profile's, and
    ``batches_too_far`` counts requests that made a batch larger than that. ``is_link_measured`` is False
    where a tier that was used is unmeasured, or more than 1 % of the handoffs are too far: the percentiles
    go up to 99; ``is_compute_measured`` where more than 1 % of the prompts or batches are; ``is_measured``
    in either case.
    """

    requests: int
    done: int
    failed: int
    retried: int
    span_seconds: float
    goodput: float
    goodput_per_gpu: float
    slo_attainment: float
    ttft_attainment: float
    tpot_attainment: float
    ttft: Percentiles
    tpot: Percentiles
    prefill_wait: Percentiles
    room_wait: Percentiles
    transfer: Percentiles
    exposed: Percentiles
    link_utilisation: dict[str, Utilisation]
    prefill_utilisation: float
    prefix_hit_share: float
    handoffs: int
    bytes_sent: int
    bytes_delivered: float
    bytes_dropped: int
    handoffs_too_far: int
    prompts_too_far: int
    batches_too_far: int
    is_link_measured: bool
    is_compute_measured: bool
    is_measured: bool


def result_of(
    tally: Tally,
    wires: Wires,
    *,
    span_seconds: float,
    prefill_busy_seconds: Sequence[float],
    handoffs: int,
    sent_nbytes: int,
    delivered_nbytes: float,
    dropped_nbytes: int,
    handoffs_too_far: int,
    prompts: tuple[int, int],
    joined: tuple[int, int],
) -> Result:
    """Everything that was counted, as shares and rates.

    ``prompts``: prefills, and those too far beyond their profile; ``joined``: the same of decode's batches.
    """
    is_link = wires.is_measured and handoffs_too_far <= FEW * handoffs
    is_compute = all(far <= FEW * count for count, far in (prompts, joined))
    fleet = wires.fleet
    ended = tally.done + tally.failed
    per_second = 1 / span_seconds if span_seconds > 0 else 0.0
    share = 1 / ended if ended else 0.0
    return Result(
        requests=ended,
        done=tally.done,
        failed=tally.failed,
        retried=tally.retried,
        span_seconds=span_seconds,
        goodput=tally.attained * per_second,
        goodput_per_gpu=tally.attained * per_second / fleet.num_gpus,
        slo_attainment=tally.attained * share,
        ttft_attainment=tally.ttft_attained * share,
        tpot_attainment=tally.tpot_attained * share,
        ttft=tally.ttft.percentiles(),
        tpot=tally.tpot.percentiles(),
        prefill_wait=tally.wait.percentiles(),
        room_wait=tally.room_wait.percentiles(),
        transfer=tally.transfer.percentiles(),
        exposed=tally.exposed.percentiles(),
        link_utilisation=_utilisation(wires, per_second),
        prefill_utilisation=sum(prefill_busy_seconds) * per_second / len(prefill_busy_seconds),
        prefix_hit_share=tally.prefill_hits / tally.prompt_tokens if tally.prompt_tokens else 0.0,
        handoffs=handoffs,
        bytes_sent=sent_nbytes,
        bytes_delivered=delivered_nbytes,
        bytes_dropped=dropped_nbytes,
        handoffs_too_far=handoffs_too_far,
        prompts_too_far=prompts[1],
        batches_too_far=joined[1],
        is_link_measured=is_link,
        is_compute_measured=is_compute,
        is_measured=is_link and is_compute,
    )


def _utilisation(wires: Wires, per_second: float) -> dict[str, Utilisation]:
    by_kind: dict[str, list[tuple[float, str]]] = {}
    for link in wires.links.values():
        use = link.work_nbytes * per_second / link.bytes_per_second
        by_kind.setdefault(link.kind, []).append((use, link.name))
    return {
        kind: Utilisation(sum(use for use, _ in uses) / len(uses), *max(uses))
        for kind, uses in by_kind.items()
    }
