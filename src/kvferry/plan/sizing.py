"""What one instance of each role carries on a cluster: profiles, memory and links put together."""

from __future__ import annotations

import numpy as np

from kvferry.plan.cluster import Cluster, Gpu, pool_tokens
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.payload import PayloadTable
from kvferry.plan.ratio import LINK_USE, Demand, Side, decode_batch, decode_rate

__all__ = ["batch_of", "side_of"]


def side_of(
    cluster: Cluster,
    demand: Demand,
    prefill: ComputeProfile,
    decode: tuple[Gpu, ComputeProfile],
    *,
    far: bool,
) -> Side:
    """What one instance of each role carries, and its link: to its own domain, or ``far`` to its rack."""
    gpu, profile = decode
    payloads = PayloadTable(cluster.shape, cluster.pool)
    mean_bytes = demand.mean_wire_bytes(payloads)
    cost = cluster.tiers[min(1, len(cluster.tiers) - 1)] if far else cluster.tiers[0]
    staging = cluster.rules.staging
    typical = int(np.median(demand.prompt_tokens))
    return Side(
        prefill_rate=prefill.pp / demand.mean_prefill_seconds(prefill),
        decode_rate=decode_rate(profile, batch_of(cluster, demand, gpu, profile), demand),
        prefill_gpus=prefill.num_gpus,
        decode_gpus=profile.num_gpus,
        link_rate=LINK_USE * cost.rate / mean_bytes,
        staging_rate=float("inf") if staging is None else staging / cost.seconds(*payloads.pair(typical)),
    )


def batch_of(cluster: Cluster, demand: Demand, gpu: Gpu, profile: ComputeProfile) -> int:
    """The batch that keeps the TPOT target and fits the instance's memory; 0 if none does."""
    return decode_batch(
        profile,
        tpot_seconds=cluster.targets.tpot_seconds,
        context_tokens=demand.decode_context,
        room_tokens=demand.decode_room,
        pool_tokens=pool_tokens(cluster, gpu, profile, int(demand.decode_room) or 1),
        max_batch=cluster.max_batch,
    )
