"""A plan: every candidate with its goodput, the choice, and the reason in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from kvferry.errors import NoPlanError
from kvferry.plan.candidate import Candidate, Kind, sites_of
from kvferry.plan.candidates import Search
from kvferry.plan.cluster import Cluster
from kvferry.plan.fleet import TIERS
from kvferry.plan.interference import MixedStep
from kvferry.plan.judge import Judge, PlanOptions, PlanRow
from kvferry.plan.payload import PayloadTable
from kvferry.plan.place import Need, Placement
from kvferry.plan.place_exact import place_best
from kvferry.plan.prefix import prefix_hits
from kvferry.plan.ratio import Demand, Drift, drift
from kvferry.plan.reason import Question, best_row, reason_for
from kvferry.plan.sizing import side_of, tier_use
from kvferry.plan.trace import TraceRow

__all__ = ["PlanResult", "demand_of", "make_plan"]


class PlanResult(msgspec.Struct, frozen=True):
    """The answer.

    Args:
        rows: all candidates, best first.
        choice: the number of the row that is chosen; None where none keeps the targets.
        reason: why, in sentences.
        is_promise: False where the choice rests on a link that nobody measured, on compute far beyond its
            profile's measurements, or on a bound of interference that decides.
        requests_per_second, is_rate_stated: the workload's rate; where it was stated, the choice is what
            carries it with the fewest GPUs, and a row that cannot is none.
        units_needed, units_possible: of the choice, see PlanRow.
        placement: of that many units on the cluster's domains, for a choice that is not colocated.
        drift: what a change of the workload does to the chosen ratio.
        warnings: what the plan does not cover.
    """

    rows: tuple[PlanRow, ...]
    choice: int | None
    reason: tuple[str, ...]
    is_promise: bool
    requests_per_second: float
    is_rate_stated: bool
    units_needed: int | None
    units_possible: int | None
    placement: Placement | None
    drift: tuple[Drift, ...]
    warnings: tuple[str, ...]

    @property
    def chosen(self) -> PlanRow | None:
        """The row that is chosen."""
        return next((row for row in self.rows if row.number == self.choice), None)

    @property
    def apart(self) -> PlanRow | None:
        """The best disaggregated row."""
        return best_row(self.rows, lambda candidate: candidate.kind is not Kind.COLOCATED)

    @property
    def together(self) -> PlanRow | None:
        """The best colocated row."""
        return best_row(self.rows, lambda candidate: candidate.kind is Kind.COLOCATED)


def demand_of(rows: Sequence[TraceRow]) -> Demand:
    """A workload's lengths, with the prefix hits that an endless cache would have."""
    return Demand(
        np.array([row.prompt_tokens for row in rows], dtype=np.int64),
        np.array([row.output_tokens for row in rows], dtype=np.int64),
        np.array(list(prefix_hits(rows)), dtype=np.int64),
    )


def make_plan(
    cluster: Cluster,
    rows: Sequence[TraceRow],
    requests_per_second: float,
    options: PlanOptions,
    tick: Callable[[int, int], None] | None = None,
    *,
    is_rate_stated: bool = True,
) -> PlanResult:
    """The plan for a workload.

    Args:
        cluster: what there is.
        rows: the workload's requests; ``options.requests`` of them or more are simulated.
        requests_per_second: the rate that the cluster is to serve.
        options: how to decide.
        tick: called with the candidates done and their number.
        is_rate_stated: choose what carries the rate with the fewest GPUs. False: the rate is only what a
            trace happens to have, and the choice is the highest goodput per GPU.

    Raises NoPlanError where no instance of any profile fits anywhere.
    """
    demand = demand_of(rows)
    search = Search(cluster, demand, options.max_gpus, options.exposed_share)
    found = search.candidates()
    if not found:
        raise NoPlanError(
            "no profile's instance fits into any domain of the cluster",
            next_step="give a profile of fewer GPUs, or say with domain which nodes are one NVLink domain",
        )
    families = search.families_for(requests_per_second) if is_rate_stated else []
    judge = Judge(cluster, rows, requests_per_second, options)
    steps = [
        *(partial(judge.judge_for_rate, family) for family in families),
        *(partial(judge.judge, candidate) for candidate in found),
    ]
    for done, step in enumerate(steps):
        step()
        if tick is not None:
            tick(done + 1, len(steps))
    order = _by_rate if is_rate_stated else _by_goodput
    ordered = sorted(judge.rows, key=order)
    return _answer(cluster, demand, ordered, options, rate=requests_per_second, is_rate_stated=is_rate_stated)


def _by_goodput(row: PlanRow) -> tuple[float, ...]:
    return (-(row.goodput_per_gpu or 0.0),)


def _by_rate(row: PlanRow) -> tuple[float, ...]:
    """What carries the rate by its GPUs; then the others by how much they carry."""
    needed = row.gpus_needed if row.carries else None
    return (0.0, needed, *_by_goodput(row)) if needed is not None else (1.0, -row.most, *_by_goodput(row))


def _choose(rows: Sequence[PlanRow], margin: float, *, is_rate_stated: bool) -> PlanRow | None:
    """The best disaggregated unit if it beats the best colocated one by the margin, else that.

    For a stated rate the best is what carries it with the fewest GPUs; as many on both sides: goodput.
    """
    rows = [row for row in rows if row.carries] if is_rate_stated else rows
    apart = best_row(rows, lambda candidate: candidate.kind is not Kind.COLOCATED)
    # Where interference was not measured there are two bounds; disaggregation has to beat the better.
    together = best_row(rows, lambda candidate: candidate.kind is Kind.COLOCATED)
    if apart is None or together is None:
        return apart or together
    if is_rate_stated and apart.gpus_needed != together.gpus_needed:
        return apart if (together.gpus_needed or 0) > (1 + margin) * (apart.gpus_needed or 0) else together
    assert apart.goodput_per_gpu is not None
    assert together.goodput_per_gpu is not None
    return apart if apart.goodput_per_gpu > (1 + margin) * together.goodput_per_gpu else together


def _answer(
    cluster: Cluster,
    demand: Demand,
    rows: Sequence[PlanRow],
    options: PlanOptions,
    *,
    rate: float,
    is_rate_stated: bool,
) -> PlanResult:
    chosen = _choose(rows, options.margin, is_rate_stated=is_rate_stated)
    is_certain = chosen is None or _is_certain(rows, chosen, options.margin, is_rate_stated=is_rate_stated)
    question = Question(cluster, demand, rate if is_rate_stated else None, options.margin)
    reason = reason_for(question, rows, chosen, is_certain=is_certain)
    warnings = list(cluster.warnings)
    profiles = {profile for gpu in cluster.gpus.values() for profile in gpu.profiles}
    p95 = int(np.quantile(demand.prompt_tokens, 0.95, method="lower"))
    warnings += sorted(w for w in (profile.outside(p95) for profile in profiles) if w is not None)
    placement = None
    if chosen is not None and chosen.candidate.decode is not None:
        units = min(chosen.units_needed or 1, chosen.units_possible)
        placement = _place_all(cluster, demand, chosen.candidate, units)
    return PlanResult(
        rows=tuple(rows),
        choice=None if chosen is None else chosen.number,
        reason=reason,
        is_promise=chosen is not None and chosen.is_measured and is_certain,
        requests_per_second=rate,
        is_rate_stated=is_rate_stated,
        units_needed=None if chosen is None else chosen.units_needed,
        units_possible=None if chosen is None else chosen.units_possible,
        placement=placement,
        drift=() if chosen is None else _drift(cluster, demand, chosen.candidate, options.max_gpus),
        warnings=tuple(warnings),
    )


def _is_certain(rows: Sequence[PlanRow], chosen: PlanRow, margin: float, *, is_rate_stated: bool) -> bool:
    """Whether the other bound of interference would choose alike."""
    worst = next((r for r in rows if r.candidate.mixed is MixedStep.SUM and r.goodput is not None), None)
    if chosen.candidate.mixed is not MixedStep.LONGER or worst is None:
        return True
    without = [row for row in rows if row.candidate.mixed is not MixedStep.LONGER]
    other = _choose(without, margin, is_rate_stated=is_rate_stated)
    return other is not None and other.candidate.kind is Kind.COLOCATED


def _place_all(cluster: Cluster, demand: Demand, unit: Candidate, units: int) -> Placement | None:
    assert unit.decode is not None
    payload = PayloadTable(cluster.shape, cluster.pool)
    typical = int(np.median(demand.prompt_tokens))
    seconds = [tier.seconds(*payload.pair(typical)) for tier in cluster.tiers]
    needs = [
        Need(pool.gpu, pool.profile.num_gpus, pool.count * units) for pool in (unit.prefill, unit.decode)
    ]
    while units:
        found = place_best(sites_of(cluster), needs[0], needs[1], seconds[: len(TIERS)])
        if found is not None:
            return found
        units -= 1
        needs = [
            msgspec.structs.replace(need, count=pool.count * units)
            for need, pool in zip(needs, (unit.prefill, unit.decode), strict=True)
        ]
    return None


def _drift(cluster: Cluster, demand: Demand, unit: Candidate, max_gpus: int) -> tuple[Drift, ...]:
    if unit.decode is None:
        return ()
    gpu = cluster.gpus[unit.decode.gpu]
    far = unit.kind is Kind.ACROSS
    changes = {
        "prompts half as long": demand.scaled(prompt=0.5),
        "prompts 1.5 times as long": demand.scaled(prompt=1.5),
        "outputs half as long": demand.scaled(output=0.5),
        "outputs 1.5 times as long": demand.scaled(output=1.5),
    }
    sides = {
        change: side_of(
            cluster,
            changed,
            unit.prefill.profile,
            (gpu, unit.decode.profile),
            tier_use(cluster, changed, far=far),
            far=far,
        )
        for change, changed in changes.items()
    }
    return drift(sides, unit.capacity, min(max_gpus, cluster.num_gpus))
