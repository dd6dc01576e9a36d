"""Candidates judged by simulation: the goodput of a unit, and the fewest GPUs that carry a rate."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.plan.candidate import Candidate, Kind, sites_of
from kvferry.plan.candidates import Family
from kvferry.plan.cluster import Cluster
from kvferry.plan.goodput import Goodput, at_rate, find_goodput
from kvferry.plan.payload import PayloadTable
from kvferry.plan.reason import limit_of
from kvferry.plan.route import Policy
from kvferry.plan.sim_result import Result
from kvferry.plan.trace import TraceRow

__all__ = ["Judge", "PlanOptions", "PlanRow", "units_possible"]


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
    one was simulated to carry. ``at_goodput`` is the run at that rate. ``units_needed`` is what the
    workload's rate takes, ``units_possible`` what the cluster has GPUs for.
    """

    number: int
    candidate: Candidate
    goodput: float | None
    goodput_per_gpu: float | None
    at_goodput: Result | None
    limit: str
    is_measured: bool
    note: str
    units_needed: int | None = None
    units_possible: int = 0

    @property
    def gpus_needed(self) -> int | None:
        """GPUs that the rate takes."""
        return None if self.units_needed is None else self.units_needed * self.candidate.num_gpus

    @property
    def carries(self) -> bool:
        """Whether the cluster has the GPUs that the rate takes."""
        return self.units_needed is not None and self.units_needed <= self.units_possible

    @property
    def most(self) -> float:
        """The rate that all the units that the cluster has GPUs for carry."""
        return self.units_possible * (self.goodput or 0.0)


class Judge:
    """Simulates candidates in order of their bounds; one whose bound is beaten is not simulated.

    The best colocated and the best disaggregated unit are kept apart, so that both are always known.
    """

    def __init__(self, cluster: Cluster, rows: Sequence[TraceRow], rate: float, options: PlanOptions) -> None:
        self.cluster = cluster
        self.workload = rows
        self.rate = rate
        self.options = options
        self.payload = PayloadTable(cluster.shape, cluster.pool)
        self.rows: list[PlanRow] = []
        self._number = -1
        self._best: dict[object, float] = {}
        self._fewest: dict[object, int] = {}

    def judge(self, candidate: Candidate) -> None:
        """Add the candidate's row, but for one that is there, or stands for pools where one has the rate."""
        names = {row.candidate.name for row in self.rows if row.carries}
        if candidate.name in names or (candidate.side_by_side > 1 and candidate.group in self._fewest):
            return
        if candidate.rejected is not None:
            self._add(candidate, None, "rejected", candidate.rejected)
        elif candidate.capacity.per_gpu <= self._best.get(candidate.group, 0.0):
            note = f"its bound of {candidate.capacity.per_gpu:.3g} per GPU is below what another one carries"
            self._add(candidate, None, candidate.capacity.limit, note)
        else:
            self._simulate(candidate)

    def judge_for_rate(self, family: Family) -> None:
        """Add the row of the family's smallest unit that carries the rate, if none of its group is smaller.

        Found by doubling and halving: more GPUs carry no less.
        """
        limit = self._fewest.get(family.group)
        units = [build for gpus, build in family.units if limit is None or gpus <= limit]
        kept: dict[int, tuple[Candidate, Result]] = {}

        def carries(at: int) -> bool:
            candidate = units[at]()
            run = None if candidate is None else self._run(candidate)
            if candidate is None or run is None:
                return False
            kept[at] = candidate, run
            return run.slo_attainment >= self.cluster.targets.attainment

        low, high, step = -1, 0, 1
        while high < len(units) and not carries(high):
            low, high, step = high, high + step, 2 * step
        high = min(high, len(units))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if carries(middle) else (middle, high)
        if high == len(units):
            return
        candidate, run = kept[high]
        self._fewest[family.group] = candidate.num_gpus
        self._simulate(candidate, (self.rate, run))

    def _run(self, candidate: Candidate) -> Result | None:
        """The run at the workload's rate; None where it cannot be carried."""
        bound = candidate.capacity.requests_per_second
        if candidate.rejected is not None or bound < self.rate:
            return None
        return at_rate(
            candidate.fleet,
            self.workload,
            self.payload,
            self.rate,
            rules=candidate.rules,
            targets=self.cluster.targets,
            policy=self.options.policy,
            requests=self.options.requests,
            seed=self.options.seed,
        )

    def _simulate(self, candidate: Candidate, kept: tuple[float, Result] | None = None) -> None:
        beside = candidate.side_by_side
        found = find_goodput(
            candidate.fleet,
            self.workload,
            self.payload,
            rules=candidate.rules,
            targets=self.cluster.targets,
            policy=self.options.policy,
            bound=candidate.capacity.requests_per_second * beside,
            requests=self.options.requests,
            seed=self.options.seed,
            kept=kept,
        )
        per_gpu = found.requests_per_second / beside / candidate.num_gpus
        self._best[candidate.group] = max(self._best.get(candidate.group, 0.0), per_gpu)
        limit = limit_of(found, self.cluster.targets) or candidate.capacity.limit
        self._add(candidate, found, limit, "")

    def _add(self, candidate: Candidate, found: Goodput | None, limit: str, note: str) -> None:
        rate = None if found is None else found.requests_per_second / candidate.side_by_side
        used = [tier for tier, share in enumerate(candidate.shares) if share > 0]
        tiers = self.cluster.tiers
        is_measured = all(tiers[min(tier, len(tiers) - 1)].is_measured for tier in used)
        self._number += 1
        self.rows.append(
            PlanRow(
                number=self._number,
                candidate=candidate,
                goodput=rate,
                goodput_per_gpu=None if rate is None else rate / candidate.num_gpus,
                at_goodput=None if found is None else found.at_rate,
                limit=limit,
                is_measured=is_measured and (found is None or found.at_rate.is_measured),
                note=note,
                units_needed=max(1, int(np.ceil(self.rate / rate - 1e-9))) if rate else None,
                units_possible=units_possible(self.cluster, candidate),
            )
        )


def units_possible(cluster: Cluster, unit: Candidate) -> int:
    """Units that the GPUs of each kind allow; what does not divide evenly is left over."""
    wanted: dict[str, int] = {}
    for pool in (unit.prefill, unit.decode):
        if pool is not None:
            wanted[pool.gpu] = wanted.get(pool.gpu, 0) + pool.num_gpus
    size = max(pool.profile.num_gpus for pool in (unit.prefill, unit.decode) if pool is not None)
    areas: dict[str, dict[str, int]] = {}
    for site in sites_of(cluster):
        # A unit of one domain is whole in each; others may be cut.
        area = site.spot.domain if unit.kind is Kind.IN_DOMAIN else ""
        there = areas.setdefault(area, {})
        there[site.gpu] = there.get(site.gpu, 0) + site.num_gpus // size * size
    return sum(min(there.get(gpu, 0) // gpus for gpu, gpus in wanted.items()) for there in areas.values())
