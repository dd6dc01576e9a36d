"""The fleet that a cluster file describes, put on the cluster's nodes."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.errors import InputError, NoPlanError
from kvferry.plan.candidate import sites_of
from kvferry.plan.cluster import Cluster, Gpu, pool_tokens
from kvferry.plan.cluster_tables import FleetTable, PoolTable
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.fleet import Fleet, Instance, Role
from kvferry.plan.payload import PayloadTable
from kvferry.plan.place import Need
from kvferry.plan.place_exact import place_best

__all__ = ["deploy"]


def deploy(cluster: Cluster, table: FleetTable, *, typical_tokens: int, long_tokens: int) -> Fleet:
    """Every instance with its spot, placed so that KV travels over the nearest tiers.

    Args:
        cluster, table: what there is, and what runs on it.
        typical_tokens: the prompt by which tiers are compared.
        long_tokens: the prompt by which a pool's bytes become tokens (p95).

    Raises InputError for a GPU or profile that the file does not have, NoPlanError without room.
    """
    if table.colocated is not None:
        pools = [(Role.COLOCATED, table.colocated)]
    else:
        assert table.prefill is not None
        assert table.decode is not None
        pools = [(Role.PREFILL, table.prefill), (Role.DECODE, table.decode)]
    profiles = [_profile(cluster, role, pool) for role, pool in pools]
    needs = [
        Need(pool.gpu, profile.num_gpus, pool.count)
        for (_, pool), profile in zip(pools, profiles, strict=True)
    ]
    counts = _counts(cluster, needs, typical_tokens)
    instances: list[Instance] = []
    for (role, pool), profile, per_site in zip(pools, profiles, counts, strict=True):
        tokens = pool_tokens(cluster, _gpu(cluster, role, pool), profile, long_tokens)
        number = 0
        for site, count in zip(sites_of(cluster), per_site, strict=True):
            for _ in range(count):
                name = f"{role}-{number}"
                number += 1
                instances.append(
                    Instance(name, role, profile, site.spot, tokens, cluster.max_batch, tokens or 0)
                )
    return Fleet(
        tuple(instances),
        cluster.tiers,
        cluster.node_rate,
        cluster.rack_uplink_rate,
        cluster.pod_uplink_rate,
    )


def _counts(cluster: Cluster, needs: Sequence[Need], typical_tokens: int) -> list[tuple[int, ...]]:
    """Instances by site, for one pool or two."""
    sites = sites_of(cluster)
    if len(needs) == 1:
        counts, left = [], needs[0].count
        for site in sites:
            here = min(left, site.num_gpus // needs[0].size) if site.gpu == needs[0].gpu else 0
            counts.append(here)
            left -= here
        found = [tuple(counts)] if not left else None
    else:
        seconds = [
            tier.seconds(*PayloadTable(cluster.shape, cluster.pool).pair(typical_tokens))
            for tier in cluster.tiers
        ]
        placement = place_best(sites, needs[0], needs[1], seconds)
        found = None if placement is None else [placement.prefill, placement.decode]
    if found is None:
        asked = " and ".join(f"{need.count} x {need.size} {need.gpu} GPUs" for need in needs)
        raise NoPlanError(f"fleet: no room for {asked} on {cluster.num_gpus} GPUs")
    return found


def _gpu(cluster: Cluster, role: Role, pool: PoolTable) -> Gpu:
    gpu = cluster.gpus.get(pool.gpu)
    if gpu is None:
        raise InputError(f"fleet.{role}.gpu: {pool.gpu!r} is not one of gpus: {', '.join(cluster.gpus)}")
    return gpu


def _profile(cluster: Cluster, role: Role, pool: PoolTable) -> ComputeProfile:
    gpu = _gpu(cluster, role, pool)
    for profile in gpu.profiles:
        if (profile.tp, profile.pp) == (pool.tp, pool.pp):
            return profile
    known = ", ".join(profile.name for profile in gpu.profiles)
    raise InputError(
        f"fleet.{role}.tp: no profile of {pool.gpu} with tp {pool.tp}, pp {pool.pp}; it has: {known}"
    )
