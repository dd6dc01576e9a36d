"""A plan: every candidate with its goodput, the choice, and the reason in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvferry.errors import NoPlanError
from kvferry.plan.candidate import Candidate, Kind, sites_of
from kvferry.plan.candidates import candidates
from kvferry.plan.cluster import Cluster
from kvferry.plan.fleet import TIERS
from kvferry.plan.goodput import Goodput, find_goodput
from kvferry.plan.interference import MixedStep
from kvferry.plan.payload import PayloadTable
from kvferry.plan.place import Need, Placement
from kvferry.plan.place_exact import place_best
from kvferry.plan.prefix import prefix_hits
from kvferry.plan.ratio import Demand, Drift, drift
from kvferry.plan.reason import best_row, limit_of, reason_for
from kvferry.plan.route import Policy
from kvferry.plan.sim_result import Result
from kvferry.plan.sizing import side_of
from kvferry.plan.trace import TraceRow

__all__ = ["PlanOptions", "PlanResult", "PlanRow", "demand_of", "make_plan"]


class PlanOptions(msgspec.Struct, frozen=True):
    """How to decide; see PlanTable."""

    margin: float = 0.05
    exposed_share: float = 0.1
    max_gpus: int = 64
    requests: int = 1000
    policy: Policy = Policy.NETWORK_COST
    seed: int = 0


class PlanRow(msgspec.Struct, frozen=True):
    """A candidate with what the simulator says of it.

    ``goodput`` is of the unit; None where it was rejected, or where its bound is below what another
    one was simulated to carry. ``at_goodput`` is the run at that rate.
    """

    number: int
    candidate: Candidate
    goodput: float | None
    goodput_per_gpu: float | None
    at_goodput: Result | None
    limit: str
    is_measured: bool
    note: str


class PlanResult(msgspec.Struct, frozen=True):
    """The answer.

    Args:
        rows: all candidates, best first.
        choice: the number of the row that is chosen; None where none keeps the targets.
        reason: why, in sentences.
        is_promise: False where the choice rests on a link that nobody measured, or on a bound of
            interference that decides.
        units: of the choice that the workload's rate needs, and that the cluster has GPUs for.
        placement: of that many units on the cluster's domains, for a choice that is not colocated.
        drift: what a change of the workload does to the chosen ratio.
        warnings: what the plan does not cover.
    """

    rows: tuple[PlanRow, ...]
    choice: int | None
    reason: tuple[str, ...]
    is_promise: bool
    requests_per_second: float
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
) -> PlanResult:
    """The plan for a workload.

    Args:
        cluster: what there is.
        rows: the workload's requests; ``options.requests`` of them or more are simulated.
        requests_per_second: the rate that the cluster is to serve.
        options: how to decide.
        tick: called with the candidates done and their number.

    Raises NoPlanError where no instance of any profile fits anywhere.
    """
    demand = demand_of(rows)
    found = candidates(cluster, demand, max_gpus=options.max_gpus, exposed_share=options.exposed_share)
    if not found:
        raise NoPlanError(
            "no profile's instance fits into any domain of the cluster",
            next_step="give a profile of fewer GPUs, or say with domain which nodes are one NVLink domain",
        )
    judge = _Judge(cluster, rows, options)
    judged = []
    for done, candidate in enumerate(found):
        judged.append(judge.judge(done, candidate))
        if tick is not None:
            tick(done + 1, len(found))
    ordered = sorted(judged, key=lambda row: -(row.goodput_per_gpu or 0.0))
    chosen = _choose(ordered, options.margin)
    return _answer(cluster, demand, ordered, chosen, rate=requests_per_second, options=options)


class _Judge:
    """Simulates candidates in order of their bounds; one whose bound is beaten is not simulated.

    The best colocated and the best disaggregated unit are kept apart, so that both are always known.
    """

    def __init__(self, cluster: Cluster, rows: Sequence[TraceRow], options: PlanOptions) -> None:
        self.cluster = cluster
        self.rows = rows
        self.options = options
        self.payload = PayloadTable(cluster.shape, cluster.pool)
        self.best: dict[object, float] = {}

    def judge(self, number: int, candidate: Candidate) -> PlanRow:
        group = (candidate.kind, candidate.mixed)
        if candidate.rejected is not None:
            return self._row(number, candidate, None, "rejected", candidate.rejected)
        if candidate.capacity.per_gpu <= self.best.get(group, 0.0):
            note = f"its bound of {candidate.capacity.per_gpu:.3g} per GPU is below what another one carries"
            return self._row(number, candidate, None, candidate.capacity.limit, note)
        found = find_goodput(
            candidate.fleet,
            self.rows,
            self.payload,
            rules=candidate.rules,
            targets=self.cluster.targets,
            policy=self.options.policy,
            bound=candidate.capacity.requests_per_second,
            requests=self.options.requests,
            seed=self.options.seed,
        )
        per_gpu = found.requests_per_second / candidate.num_gpus
        self.best[group] = max(self.best.get(group, 0.0), per_gpu)
        limit = limit_of(found, self.cluster.targets) or candidate.capacity.limit
        return self._row(number, candidate, found, limit, "")

    def _row(
        self, number: int, candidate: Candidate, found: Goodput | None, limit: str, note: str
    ) -> PlanRow:
        rate = None if found is None else found.requests_per_second
        used = [tier for tier, share in enumerate(candidate.shares) if share > 0]
        tiers = self.cluster.tiers
        return PlanRow(
            number=number,
            candidate=candidate,
            goodput=rate,
            goodput_per_gpu=None if rate is None else rate / candidate.num_gpus,
            at_goodput=None if found is None else found.at_rate,
            limit=limit,
            is_measured=all(tiers[min(tier, len(tiers) - 1)].is_measured for tier in used),
            note=note,
        )


def _choose(rows: Sequence[PlanRow], margin: float) -> PlanRow | None:
    """The best disaggregated unit if it beats the best colocated one by the margin, else that."""
    apart = best_row(rows, lambda candidate: candidate.kind is not Kind.COLOCATED)
    # Where interference was not measured there are two bounds; disaggregation has to beat the better.
    together = best_row(rows, lambda candidate: candidate.kind is Kind.COLOCATED)
    if apart is None or together is None:
        return apart or together
    assert apart.goodput_per_gpu is not None
    assert together.goodput_per_gpu is not None
    return apart if apart.goodput_per_gpu > (1 + margin) * together.goodput_per_gpu else together


def _answer(
    cluster: Cluster,
    demand: Demand,
    rows: Sequence[PlanRow],
    chosen: PlanRow | None,
    *,
    rate: float,
    options: PlanOptions,
) -> PlanResult:
    reason = reason_for(cluster, demand, rows, chosen, options.margin)
    warnings = list(cluster.warnings)
    profiles = {profile for gpu in cluster.gpus.values() for profile in gpu.profiles}
    p95 = int(np.quantile(demand.prompt_tokens, 0.95, method="lower"))
    warnings += sorted(w for w in (profile.outside(p95) for profile in profiles) if w is not None)
    if chosen is None or not chosen.goodput:
        return PlanResult(tuple(rows), None, reason, False, rate, None, None, None, (), tuple(warnings))
    needed = max(1, int(np.ceil(rate / chosen.goodput - 1e-9)))
    possible = _possible(cluster, chosen.candidate)
    placement = None
    if chosen.candidate.decode is not None:
        placement = _place_all(cluster, demand, chosen.candidate, min(needed, possible))
    return PlanResult(
        rows=tuple(rows),
        choice=chosen.number,
        reason=reason,
        is_promise=chosen.is_measured and _is_certain(rows, chosen, options.margin),
        requests_per_second=rate,
        units_needed=needed,
        units_possible=possible,
        placement=placement,
        drift=_drift(cluster, demand, chosen.candidate, options.max_gpus),
        warnings=tuple(warnings),
    )


def _is_certain(rows: Sequence[PlanRow], chosen: PlanRow, margin: float) -> bool:
    """Whether the other bound of interference would choose alike."""
    worst = next((r for r in rows if r.candidate.mixed is MixedStep.SUM and r.goodput is not None), None)
    if chosen.candidate.mixed is not MixedStep.LONGER or worst is None:
        return True
    without = [row for row in rows if row.candidate.mixed is not MixedStep.LONGER]
    other = _choose(without, margin)
    return other is not None and other.candidate.kind is Kind.COLOCATED


def _possible(cluster: Cluster, unit: Candidate) -> int:
    """Units that the GPUs of each kind allow; what does not divide evenly is left over."""
    wanted: dict[str, int] = {}
    for pool in (unit.prefill, unit.decode):
        if pool is not None:
            wanted[pool.gpu] = wanted.get(pool.gpu, 0) + pool.num_gpus
    size = max(pool.profile.num_gpus for pool in (unit.prefill, unit.decode) if pool is not None)
    there: dict[str, int] = {}
    for site in sites_of(cluster):
        there[site.gpu] = there.get(site.gpu, 0) + site.num_gpus // size * size
    return min(there.get(gpu, 0) // gpus for gpu, gpus in wanted.items())


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
            far=unit.kind is Kind.ACROSS,
        )
        for change, changed in changes.items()
    }
    return drift(sides, unit.capacity, min(max_gpus, cluster.num_gpus))
