"""Why a plan says what it says, in sentences with the figures that decide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from kvferry.plan.candidate import Candidate, Kind
from kvferry.plan.cluster import Cluster
from kvferry.plan.goodput import Goodput
from kvferry.plan.interference import MixedStep, itl_mean_seconds
from kvferry.plan.ratio import Demand
from kvferry.plan.sim_metrics import Targets
from kvferry.units import format_seconds

if TYPE_CHECKING:
    from kvferry.plan.judge import PlanRow

__all__ = ["Question", "best_row", "break_even_tokens", "limit_of", "reason_for"]


def limit_of(found: Goodput, targets: Targets) -> str | None:
    """What gave out just above the goodput: a target, and the part of the system behind it."""
    run = found.beyond
    if run is None:
        return None
    if run.tpot_attainment < run.ttft_attainment:
        return "decode: TPOT"
    means = {
        "prefill queue": run.prefill_wait.mean or 0.0,
        "room at decode": run.room_wait.mean or 0.0,
        "link": run.exposed.mean or 0.0,
    }
    part = max(means, key=lambda name: means[name])
    if means[part] < 0.05 * targets.ttft_seconds:
        part = "prefill time"
    return f"{part}: TTFT"


def break_even_tokens(handoff_seconds: float, itl_together: float, itl_apart: float) -> float | None:
    """Output tokens from which a handoff has paid for itself: ``1 + handoff / (ITL saved)``; None: never."""
    saved = itl_together - itl_apart
    return 1 + handoff_seconds / saved if saved > 0 else None


class Question(msgspec.Struct, frozen=True):
    """What a plan was asked. ``rate``: requests a second that were stated, else None."""

    cluster: Cluster
    demand: Demand
    rate: float | None
    margin: float


def reason_for(
    asked: Question, rows: Sequence[PlanRow], chosen: PlanRow | None, *, is_certain: bool
) -> tuple[str, ...]:
    """The sentences; the first one is the answer. ``is_certain``: see ``_interference``."""
    if chosen is None:
        return _nothing(asked, rows)
    if asked.rate is not None:
        sentences = [_headline_for_rate(chosen, rows, asked)]
    else:
        sentences = [_headline(chosen, rows, asked.margin)]
    apart = best_row(rows, lambda candidate: candidate.kind is not Kind.COLOCATED)
    sentences += _tokens(asked.demand, apart)
    sentences += _rejections(rows, chosen)
    sentences += _where(asked.cluster, rows, chosen)
    run = chosen.at_goodput
    if run is not None and not run.is_compute_measured:
        sentences.append(
            "The choice rests on prompts or batches far beyond those that its profile was measured at: "
            "measure it with such before you promise anything."
        )
    if not chosen.is_measured and (run is None or not run.is_link_measured):
        sentences.append(
            "The choice rests on a link that nobody measured: probe it before you promise anything."
        )
    sentences += _interference(rows, chosen, is_certain=is_certain)
    return tuple(sentences)


def best_row(rows: Sequence[PlanRow], of_kind: Callable[[Candidate], bool]) -> PlanRow | None:
    """The first of the rows, which are in order, that is of a kind and carries anything."""
    return next((row for row in rows if row.goodput and of_kind(row.candidate)), None)


def _nothing(asked: Question, rows: Sequence[PlanRow]) -> tuple[str, ...]:
    """Why there is no choice: no rate at all, or less than the stated one, and by how much."""
    able = [row for row in rows if row.goodput]
    if asked.rate is None or not able:
        return ("No candidate keeps both targets at any rate.", *_failures(rows))
    gpus = asked.cluster.num_gpus
    sentences = [f"No candidate carries {_rate(asked.rate)} requests/s within the targets on {gpus} GPUs."]
    for kind in Kind:
        best = max(
            (row for row in able if row.candidate.kind is kind), key=lambda row: row.most, default=None
        )
        if best is not None:
            short = f"{_rate(best.most)}, which is {1 - best.most / asked.rate:.0%} short"
            units = f"{best.units_possible} of {best.candidate.name} carry {short}"
            needed = f"the rate takes {best.units_needed} ({best.gpus_needed:,} GPUs)"
            sentences.append(f"{units}, limited by {best.limit}; {needed}.")
    return tuple(sentences)


def _here(chosen: PlanRow) -> str:
    return f"{chosen.goodput_per_gpu:.3g} good requests a second per GPU, limited by {chosen.limit}"


def _headline_for_rate(chosen: PlanRow, rows: Sequence[PlanRow], asked: Question) -> str:
    carried = f"carries {_rate(asked.rate)} requests/s with {chosen.gpus_needed} GPUs"
    here = f"{_units(chosen)}: {carried}, {_here(chosen)}"
    is_apart = chosen.candidate.kind is not Kind.COLOCATED
    others = [row for row in rows if row.carries]
    other = best_row(others, lambda candidate: (candidate.kind is not Kind.COLOCATED) != is_apart)
    if other is None:
        word = "colocated" if is_apart else "disaggregated"
        return f"{here}; no {word} candidate carries it."
    against = f"{_units(other)} takes {other.gpus_needed} GPUs"
    if (other.gpus_needed or 0) > (chosen.gpus_needed or 0):
        return f"{here}; {against}."
    if other.gpus_needed == chosen.gpus_needed:
        return f"{here}; {against} too, with {other.goodput_per_gpu:.3g} a second per GPU."
    return f"{here}; {against}, which is not the {asked.margin:.0%} less that a second pool must bring."


def _rate(value: float | None) -> str:
    value = value or 0.0
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _units(row: PlanRow) -> str:
    return row.candidate.name if row.units_needed == 1 else f"{row.units_needed} x ({row.candidate.name})"


def _headline(chosen: PlanRow, rows: Sequence[PlanRow], margin: float) -> str:
    apart = best_row(rows, lambda candidate: candidate.kind is not Kind.COLOCATED)
    together = best_row(rows, lambda candidate: candidate.kind is Kind.COLOCATED)
    here = f"{chosen.candidate.name}: {_here(chosen)}"
    if apart is None:
        return f"{here}; no disaggregated candidate keeps the targets."
    if together is None:
        return f"{here}; no colocated candidate keeps the targets."
    other = together if chosen is apart else apart
    assert other.goodput_per_gpu is not None
    assert chosen.goodput_per_gpu is not None
    gain = chosen.goodput_per_gpu / other.goodput_per_gpu - 1
    if gain >= 0:
        against = f"{gain:.0%} more than {other.candidate.name} ({other.goodput_per_gpu:.3g}, {other.limit})"
    else:
        against = (
            f"{other.candidate.name} has {other.goodput_per_gpu:.3g}, "
            f"which is not the {margin:.0%} more that a second pool must bring"
        )
    return f"{here}; {against}."


def _tokens(demand: Demand, apart: PlanRow | None) -> list[str]:
    """The quick screen: by the time-share law, from how many output tokens on a handoff pays."""
    if apart is None or apart.at_goodput is None or apart.goodput is None or apart.candidate.decode is None:
        return []
    exposed, alone = apart.at_goodput.exposed.mean, apart.at_goodput.tpot.mean
    if exposed is None or alone is None:
        return []
    profile = apart.candidate.decode.profile
    rate = apart.goodput * profile.num_gpus / apart.candidate.num_gpus
    share = rate * demand.mean_prefill_seconds(profile)
    itl = itl_mean_seconds(alone, share)
    tokens = break_even_tokens(exposed, itl, alone)
    mean = demand.mean_output_tokens
    text = (
        f"At the best disaggregated rate a colocated instance would spend {share:.0%} of its time on prefill"
    )
    if tokens is None:
        return [f"{text}; a token would take no longer there, so a handoff would never pay."]
    there = "without end" if share >= 1 else format_seconds(itl)
    return [
        f"{text}: a token would take {there} by the time-share law, and takes {format_seconds(alone)} apart.",
        f"A handoff of {format_seconds(exposed)} pays from {tokens:.1f} output tokens on (mean: {mean:.0f}).",
    ]


def _where(cluster: Cluster, rows: Sequence[PlanRow], chosen: PlanRow) -> list[str]:
    """Why not in one domain, if the choice goes across nodes."""
    unit = chosen.candidate
    if unit.kind is not Kind.ACROSS or unit.decode is None:
        return []
    inside = [row for row in rows if row.candidate.kind is Kind.IN_DOMAIN]
    largest = max(node.num_gpus for node in cluster.nodes)
    sizes = f"{unit.prefill.profile.num_gpus} and {unit.decode.profile.num_gpus}"
    if not inside:
        text = f"the largest node has {largest} GPUs, an instance of each pool needs {sizes}"
        return [f"No domain holds both pools: {text}."]
    best = max(inside, key=lambda row: row.goodput_per_gpu or 0.0)
    counts = best.candidate.capacity
    ratio = f"{unit.prefill.count}:{unit.decode.count}"
    inside_ratio = f"{counts.prefill}:{counts.decode}"
    text = (
        f"Within one domain {inside_ratio} is the best that fits, where {ratio} prefill to decode is wanted"
    )
    return [f"{text}; it carries {best.goodput_per_gpu or 0.0:.3g} per GPU."]


def _rejections(rows: Sequence[PlanRow], chosen: PlanRow) -> list[str]:
    """Why not across nodes, if all of that was rejected."""
    across = [row.candidate for row in rows if row.candidate.kind is Kind.ACROSS]
    if chosen.candidate.kind is Kind.ACROSS or not across or not all(c.rejected for c in across):
        return []
    return [f"Across nodes is out: {across[0].rejected}."]


def _interference(rows: Sequence[PlanRow], chosen: PlanRow, *, is_certain: bool) -> list[str]:
    """What the bounds of a mixed step mean for the choice, where it was not measured.

    ``is_certain``: colocation would be chosen at the lower end too.
    """
    longer = best_row(rows, lambda candidate: candidate.mixed is MixedStep.LONGER)
    both = best_row(rows, lambda candidate: candidate.mixed is MixedStep.SUM)
    apart = best_row(rows, lambda candidate: candidate.kind is not Kind.COLOCATED)
    if longer is None or apart is None:
        return []
    low = 0.0 if both is None or both.goodput_per_gpu is None else both.goodput_per_gpu
    text = (
        f"Interference was not measured: colocated carries between {low:.3g} and "
        f"{longer.goodput_per_gpu:.3g} per GPU, as steps with prefill in them hide nothing or all"
    )
    if chosen.candidate.kind is Kind.COLOCATED and not is_certain:
        return [f"{text}; at the lower end disaggregation would be chosen, so measure it."]
    return [f"{text}; the choice is the same at both ends."]


def _failures(rows: Sequence[PlanRow]) -> list[str]:
    sentences = []
    for row in rows[:4]:
        candidate: Candidate = row.candidate
        sentences.append(f"{candidate.name}: {row.note or row.limit}.")
    return sentences
