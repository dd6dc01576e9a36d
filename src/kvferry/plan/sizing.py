"""What one instance of each role carries on a cluster: profiles, memory and links put together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from kvferry.plan.cluster import Cluster, Gpu, pool_tokens
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.fleet import Instance, Role
from kvferry.plan.payload import PayloadTable
from kvferry.plan.ratio import LINK_USE, Demand, Side, decode_batch, decode_rate

__all__ = ["TierUse", "batch_of", "ports_rate", "side_of", "tier_use"]


class TierUse(msgspec.Struct, frozen=True):
    """What the mean handoff of a workload takes of one tier.

    Args:
        work_nbytes: of the ports at its ends: bytes, and the time of its descriptors at the port's rate.
        seconds: from the room given at decode until its KV is there.
        bytes_per_second: of a port: of one instance in its domain, of all of a node's beyond it.
    """

    work_nbytes: float
    seconds: float
    bytes_per_second: float

    @property
    def handoffs_per_second(self) -> float:
        """What one port carries."""
        return self.bytes_per_second / self.work_nbytes if self.work_nbytes else math.inf


def tier_use(cluster: Cluster, demand: Demand, *, far: bool) -> TierUse:
    """Of an instance's own domain, or of the tier beyond it."""
    payloads = PayloadTable(cluster.shape, cluster.pool)
    cost = cluster.tiers[min(1, len(cluster.tiers) - 1)] if far else cluster.tiers[0]
    rate = cost.rate if not far or cluster.node_rate is None else cluster.node_rate
    return TierUse(
        demand.mean_over(payloads, cost.mean_work_nbytes),
        demand.mean_over(payloads, cost.mean_seconds) + cluster.rules.sync_seconds,
        rate,
    )


def ports_rate(instances: Sequence[Instance], far_share: float, near: TierUse, far: TierUse) -> float:
    """Handoffs a second at which a unit's ports are full, if they all are used alike.

    Beyond the domain a node's ports are shared by its instances; inside, each has its own.
    """
    sides = [[i for i in instances if i.role is role] for role in (Role.PREFILL, Role.DECODE)]
    ports = min(len({instance.spot.node for instance in side}) for side in sides)
    own = min(len(side) for side in sides)
    beyond = ports * far.handoffs_per_second / far_share if far_share > 0 else math.inf
    inside = own * near.handoffs_per_second / (1 - far_share) if far_share < 1 else math.inf
    return min(beyond, inside)


def side_of(
    cluster: Cluster,
    demand: Demand,
    prefill: ComputeProfile,
    decode: tuple[Gpu, ComputeProfile],
    use: TierUse,
    *,
    far: bool,
) -> Side:
    """What one instance of each role carries, and its link (``use``): inside its domain, or ``far``.

    A node whose ports are shared is taken as full of such instances.
    """
    gpu, profile = decode
    staging = cluster.rules.staging
    share = 1.0
    if far:
        largest = max(node.num_gpus for node in cluster.nodes)
        share = min(1.0, min(prefill.num_gpus, profile.num_gpus) / largest)
    return Side(
        prefill_rate=prefill.pp / demand.mean_prefill_seconds(prefill),
        decode_rate=decode_rate(profile, batch_of(cluster, demand, gpu, profile), demand),
        prefill_gpus=prefill.num_gpus,
        decode_gpus=profile.num_gpus,
        link_rate=LINK_USE * use.handoffs_per_second * share,
        staging_rate=math.inf if staging is None or not use.seconds else staging / use.seconds,
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
