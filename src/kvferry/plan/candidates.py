"""What could be done with a cluster: units of instances, colocated, in one NVLink domain, or across nodes.

A unit is the smallest group that serves requests by itself; a cluster repeats it. For every pair of
profiles the whole numbers of prefill and decode instances come from the closed forms of
``kvferry.plan.ratio``; the best few of each are kept for the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import msgspec
import numpy as np

from kvferry.plan.candidate import Candidate, Group, Kind, Pool, sites_of
from kvferry.plan.cluster import Cluster, Gpu, pool_tokens
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role, Spot
from kvferry.plan.handoff import exposed_seconds
from kvferry.plan.interference import MixedStep
from kvferry.plan.payload import PayloadTable
from kvferry.plan.place import Need, Placement, Site, place
from kvferry.plan.promise import FirstToken
from kvferry.plan.ratio import Capacity, Demand, Side, best_ratio, capacity, decode_rate
from kvferry.plan.sizing import batch_of, ports_rate, side_of, tier_use

__all__ = ["Family", "Search"]


class Family(msgspec.Struct, frozen=True):
    """Units of one group by rising GPUs: the number of them, and what places the unit (None: no room)."""

    group: Group
    units: tuple[tuple[int, Callable[[], Candidate | None]], ...]


_KEPT = 3
"""Ratios of one pair of profiles that the simulator gets to see: the means do not know the tail."""


class _Alone(msgspec.Struct, frozen=True):
    """A colocated instance: what each phase by itself would carry, and how many of it there is room for."""

    gpu: Gpu
    profile: ComputeProfile
    rules: EngineRules
    prefill_rate: float
    decode_rate: float
    most: int


class Search:
    """All that a cluster could run for a workload.

    Args:
        cluster, demand: what there is, and what for.
        max_gpus: of one unit.
        exposed_share: of the TTFT target that the p95 handoff may be exposed for.
    """

    def __init__(self, cluster: Cluster, demand: Demand, max_gpus: int, exposed_share: float) -> None:
        self.cluster = cluster
        self.demand = demand
        self.max_gpus = min(max_gpus, cluster.num_gpus)
        self.exposed_share = exposed_share
        self.sites = sites_of(cluster)
        self.payloads = PayloadTable(cluster.shape, cluster.pool)
        self.uses = {far: tier_use(cluster, demand, far=far) for far in (False, True)}
        at = int(np.argsort(demand.prompt_tokens, kind="stable")[int(0.95 * (len(demand.prompt_tokens) - 1))])
        self.p95 = int(demand.prompt_tokens[at])
        self.typical = int(np.median(demand.prompt_tokens))

    def candidates(self) -> list[Candidate]:
        """All units worth a look, the highest bound first."""
        apart = list(self._apart())
        largest = max([candidate.num_gpus for candidate in apart], default=0)
        together = list(self._together(largest))
        return sorted([*apart, *together], key=lambda candidate: -candidate.capacity.per_gpu)

    def families_for(self, rate: float) -> list[Family]:
        """What could carry a rate by itself; first the family that may need the fewest GPUs."""
        found = [family for family in (*self._apart_for(rate), *self._together_for(rate)) if family.units]
        return sorted(found, key=lambda family: family.units[0][0])

    # --- Colocated ---------------------------------------------------------------------------------------

    def _together(self, unit_gpus: int) -> Iterator[Candidate]:
        """Each profile alone: one instance, in a pool that has the GPUs of the largest other unit."""
        for alone in self._alone():
            beside = max(1, min(alone.most, unit_gpus // alone.profile.num_gpus))
            yield self._colocated(alone, 1, beside)

    def _together_for(self, rate: float) -> Iterator[Family]:
        """The same as pools, by rising numbers of instances whose bound carries the rate."""
        for alone in self._alone():
            each = self._colocated(alone, 1, 1).capacity.requests_per_second
            fewest = max(1, math.ceil(rate / each - 1e-9)) if each else alone.most + 1
            size = alone.profile.num_gpus
            counts = range(fewest, min(alone.most, self.max_gpus // size) + 1)
            units = tuple((n * size, partial(self._colocated, alone, n, 1)) for n in counts)
            yield Family((Kind.COLOCATED, alone.rules.mixed), units)

    def _alone(self) -> Iterator[_Alone]:
        """Each profile with each way to run it."""
        for gpu, profile in self._pools(Role.COLOCATED):
            most = sum(site.num_gpus // profile.num_gpus for site in self.sites if site.gpu == gpu.name)
            if not most:
                continue
            batch = batch_of(self.cluster, self.demand, gpu, profile)
            prefill = profile.pp / self.demand.mean_prefill_seconds(profile)
            decode = decode_rate(profile, batch, self.demand)
            for mixed in self.cluster.mixed:
                for chunk in self.cluster.chunks:
                    rules = msgspec.structs.replace(self.cluster.rules, mixed=mixed, chunk_tokens=chunk)
                    yield _Alone(gpu, profile, rules, prefill, decode, most)

    def _colocated(self, alone: _Alone, count: int, beside: int) -> Candidate:
        gpu, pool, rules = alone.gpu, Pool(alone.gpu.name, alone.profile, count), alone.rules
        prefill, decode = alone.prefill_rate, alone.decode_rate
        # Perfect hiding is bound by the slower phase; without any, by the sum of both times.
        each = _serial(prefill, decode) if rules.mixed is MixedStep.SUM else min(prefill, decode)
        limit = "prefill" if prefill < decode else "decode"
        bound = Capacity(pool.count, 0, pool.count * each, each / pool.profile.num_gpus, limit, {})
        instances = tuple(
            self._instance(f"colocated-{n}", Role.COLOCATED, gpu, pool.profile, Spot(f"n{n}", f"n{n}"))
            for n in range(pool.count * beside)
        )
        return Candidate(Kind.COLOCATED, pool, None, bound, Fleet(instances), rules, side_by_side=beside)

    # --- Apart -------------------------------------------------------------------------------------------

    def _apart(self) -> Iterator[Candidate]:
        """Each pair of profiles, in one domain and across nodes."""
        for prefill in self._pools(Role.PREFILL):
            for decode in self._pools(Role.DECODE):
                domain = self._largest_domain(prefill[0], decode[0])
                for kind in (Kind.IN_DOMAIN, Kind.ACROSS):
                    yield from self._best_of(kind, prefill, decode, domain)

    def _largest_domain(self, prefill: Gpu, decode: Gpu) -> int:
        """GPUs of the largest domain that has both kinds; with two kinds, of the smaller part."""
        here = {site.spot.domain: site.num_gpus for site in self.sites if site.gpu == prefill.name}
        there = {site.spot.domain: site.num_gpus for site in self.sites if site.gpu == decode.name}
        return max([min(count, there.get(domain, 0)) for domain, count in here.items()], default=0)

    def _best_of(
        self, kind: Kind, prefill: tuple[Gpu, ComputeProfile], decode: tuple[Gpu, ComputeProfile], domain: int
    ) -> Iterator[Candidate]:
        pairs = self._pairs(kind, prefill, decode, domain)
        side = self._side(kind, prefill[1], decode)
        kept = 0
        while pairs and kept < _KEPT:
            best = best_ratio(side, self.max_gpus, fits=pairs)
            if best is None or not best.requests_per_second:
                return
            pairs.remove((best.prefill, best.decode))
            candidate = self._placed(kind, prefill, decode, best, side)
            if candidate is not None:
                kept += 1
                yield candidate

    def _apart_for(self, rate: float) -> Iterator[Family]:
        """Each pair of profiles by rising GPUs: of each number of them the ratio that carries most."""
        for prefill, decode in product(self._pools(Role.PREFILL), self._pools(Role.DECODE)):
            domain = self._largest_domain(prefill[0], decode[0])
            for kind in (Kind.IN_DOMAIN, Kind.ACROSS):
                side = self._side(kind, prefill[1], decode)
                best: dict[int, Capacity] = {}
                for counts in self._pairs(kind, prefill, decode, domain):
                    # The ports are known once it is placed.
                    if capacity(side, *counts, math.inf).requests_per_second < rate:
                        continue
                    found = capacity(side, *counts)
                    gpus = counts[0] * side.prefill_gpus + counts[1] * side.decode_gpus
                    if gpus not in best or found.requests_per_second > best[gpus].requests_per_second:
                        best[gpus] = found
                build = partial(self._placed, kind, prefill, decode)
                units = tuple((gpus, partial(build, best[gpus], side)) for gpus in sorted(best))
                yield Family((kind, None), units)

    def _pairs(
        self, kind: Kind, prefill: tuple[Gpu, ComputeProfile], decode: tuple[Gpu, ComputeProfile], domain: int
    ) -> list[tuple[int, int]]:
        """The counts of both that fit one domain, or that do not."""
        sizes = prefill[1].num_gpus, decode[1].num_gpus
        if prefill[0].name == decode[0].name:
            return [
                (p, d)
                for p, d in self._counts(sizes)
                if (p * sizes[0] + d * sizes[1] <= domain) == (kind is Kind.IN_DOMAIN)
            ]
        return [
            (p, d)
            for p, d in self._counts(sizes)
            if (max(p * sizes[0], d * sizes[1]) <= domain) == (kind is Kind.IN_DOMAIN)
        ]

    def _side(self, kind: Kind, prefill: ComputeProfile, decode: tuple[Gpu, ComputeProfile]) -> Side:
        far = kind is Kind.ACROSS
        return side_of(self.cluster, self.demand, prefill, decode, self.uses[far], far=far)

    def _counts(self, sizes: tuple[int, int]) -> list[tuple[int, int]]:
        return [
            (prefill, decode)
            for prefill in range(1, self.max_gpus // sizes[0] + 1)
            for decode in range(1, (self.max_gpus - prefill * sizes[0]) // sizes[1] + 1)
        ]

    def _placed(
        self,
        kind: Kind,
        prefill: tuple[Gpu, ComputeProfile],
        decode: tuple[Gpu, ComputeProfile],
        best: Capacity,
        side: Side,
    ) -> Candidate | None:
        needs = (
            Need(prefill[0].name, prefill[1].num_gpus, best.prefill),
            Need(decode[0].name, decode[1].num_gpus, best.decode),
        )
        found = self._near(kind, needs)
        if found is None:
            return None
        sites, placement = found
        fleet = self._fleet(sites, placement, prefill, decode)
        far_share = 1 - placement.shares[0] if placement.shares else 0.0
        ports = ports_rate(fleet.instances, far_share, self.uses[False], self.uses[True])
        exposed = self._exposed(prefill[1], placement.shares)
        return Candidate(
            kind,
            Pool(prefill[0].name, prefill[1], best.prefill),
            Pool(decode[0].name, decode[1], best.decode),
            capacity(side, best.prefill, best.decode, ports),
            fleet,
            self.cluster.rules,
            placement.shares,
            exposed,
            rejected=self._rejected(exposed),
        )

    def _near(self, kind: Kind, needs: tuple[Need, Need]) -> tuple[tuple[Site, ...], Placement] | None:
        """Place on as few and as near sites as will do: one domain, then one rack, one pod, all."""
        seconds = [tier.seconds(*self.payloads.pair(self.typical)) for tier in self.cluster.tiers]
        areas: list[dict[object, list[Site]]] = [{}, {}, {}, {None: list(self.sites)}]
        for site in self.sites:
            spot = site.spot
            for area, key in zip(areas, (spot.domain, (spot.pod, spot.rack), spot.pod), strict=False):
                area.setdefault(key, []).append(site)
        for area in areas[:1] if kind is Kind.IN_DOMAIN else areas[1:]:
            for sites in area.values():
                enough = _enough(sites, needs)
                placement = place(enough, *needs, seconds) if enough else None
                if placement is not None:
                    return tuple(enough), placement
        return None

    def _fleet(
        self,
        sites: tuple[Site, ...],
        placement: Placement,
        prefill: tuple[Gpu, ComputeProfile],
        decode: tuple[Gpu, ComputeProfile],
    ) -> Fleet:
        instances: list[Instance] = []
        for role, (gpu, profile), counts in (
            (Role.PREFILL, prefill, placement.prefill),
            (Role.DECODE, decode, placement.decode),
        ):
            for site, count in zip(sites, counts, strict=True):
                for _ in range(count):
                    name = f"{role}-{sum(instance.role is role for instance in instances)}"
                    instances.append(self._instance(name, role, gpu, profile, site.spot))
        cluster = self.cluster
        return Fleet(
            tuple(instances),
            cluster.tiers,
            cluster.node_rate,
            cluster.rack_uplink_rate,
            cluster.pod_uplink_rate,
        )

    def _instance(self, name: str, role: Role, gpu: Gpu, profile: ComputeProfile, spot: Spot) -> Instance:
        pool = pool_tokens(self.cluster, gpu, profile, self.p95)
        return Instance(name, role, profile, spot, pool, self.cluster.max_batch, pool or 0)

    def _pools(self, role: Role) -> Iterator[tuple[Gpu, ComputeProfile]]:
        for gpu in self.cluster.gpus.values():
            if role in gpu.roles:
                yield from ((gpu, profile) for profile in gpu.profiles)

    def _exposed(self, profile: ComputeProfile, shares: tuple[float, ...]) -> float:
        used = [tier for tier, share in enumerate(shares) if share > 0.05]
        cost = self.cluster.tiers[min(max(used, default=0), len(self.cluster.tiers) - 1)]
        transfer = cost.quantile_seconds(0.95, *self.payloads.pair(self.p95))
        rules = self.cluster.rules
        return exposed_seconds(transfer, profile.prefill.seconds(self.p95), rules.groups, rules.sync_seconds)

    def _rejected(self, exposed: float) -> str | None:
        target = self.cluster.targets.ttft_seconds
        if self.cluster.rules.first_token is FirstToken.PREFILL or exposed <= self.exposed_share * target:
            return None
        return (
            f"the p95 handoff is exposed for {exposed:.3g} s, more than {self.exposed_share:.0%} "
            f"of the TTFT target of {target:g} s"
        )


def _serial(one: float, other: float) -> float:
    return one * other / (one + other) if one + other else 0.0


def _enough(sites: list[Site], needs: tuple[Need, Need]) -> list[Site]:
    """The first sites that have room for all, each kind of GPU by itself; empty where there is none."""
    wanted: dict[str, int] = {}
    for need in needs:
        wanted[need.gpu] = wanted.get(need.gpu, 0) + need.size * need.count
    unit = max(need.size for need in needs)
    chosen = []
    for site in sites:
        if wanted.get(site.gpu, 0) > 0:
            chosen.append(site)
            # What does not divide by the larger instance may stay empty.
            wanted[site.gpu] -= site.num_gpus // unit * unit or site.num_gpus
    return chosen if all(left <= 0 for left in wanted.values()) else []
