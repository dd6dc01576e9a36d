"""One unit that a cluster could be made of: its kind, its pools, where they stand, what bounds it."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry.plan.cluster import Cluster
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.fleet import EngineRules, Fleet, Spot
from kvferry.plan.interference import MixedStep
from kvferry.plan.place import Site
from kvferry.plan.ratio import Capacity

__all__ = ["Candidate", "Group", "Kind", "Pool", "sites_of"]


class Kind(StrEnum):
    """Where prefill and decode stand."""

    COLOCATED = "colocated"
    IN_DOMAIN = "in one domain"
    ACROSS = "across nodes"


class Pool(msgspec.Struct, frozen=True):
    """Instances of one role."""

    gpu: str
    profile: ComputeProfile
    count: int

    @property
    def num_gpus(self) -> int:
        return self.count * self.profile.num_gpus

    def __str__(self) -> str:
        stages = f" pp{self.profile.pp}" if self.profile.pp > 1 else ""
        return f"{self.count} x {self.gpu} tp{self.profile.tp}{stages}"


Group = tuple[Kind, MixedStep | None]


class Candidate(msgspec.Struct, frozen=True):
    """One unit.

    Args:
        kind: where it stands.
        prefill, decode: its pools; colocated instances are ``prefill`` and there is no ``decode``.
        capacity: what the closed forms say that it carries; an upper bound.
        fleet: its instances, placed.
        side_by_side: units in the fleet. More than one of a single colocated instance, so that it is judged
            with as many GPUs behind one queue as the others.
        shares: of the traffic over each tier.
        exposed_p95_seconds: of the p95 prompt over the farthest tier in use.
        rules: how its engines work; of colocated ones also the chunk and the bound of a mixed step.
        rejected: why it is not worth simulating, or None.
    """

    kind: Kind
    prefill: Pool
    decode: Pool | None
    capacity: Capacity
    fleet: Fleet
    rules: EngineRules
    shares: tuple[float, ...] = ()
    exposed_p95_seconds: float = 0.0
    rejected: str | None = None
    side_by_side: int = 1

    @property
    def num_gpus(self) -> int:
        """GPUs of one unit."""
        return self.prefill.num_gpus + (0 if self.decode is None else self.decode.num_gpus)

    @property
    def group(self) -> Group:
        """What it is compared within."""
        return self.kind, self.mixed

    @property
    def mixed(self) -> MixedStep | None:
        """How a step with both phases is judged; None where there are none."""
        return self.rules.mixed if self.decode is None else None

    @property
    def name(self) -> str:
        """``across nodes: 3 x h100 tp4 prefill, 2 x h100 tp4 decode``."""
        if self.decode is None:
            chunks = f"chunks of {self.rules.chunk_tokens}"
            return f"colocated: {self.prefill}, {chunks}, mixed step: {self.rules.mixed}"
        return f"{self.kind}: {self.prefill} prefill, {self.decode} decode"


def sites_of(cluster: Cluster) -> tuple[Site, ...]:
    """The GPUs of each kind in each domain."""
    gpus: dict[tuple[str, str], tuple[Spot, int]] = {}
    for node in cluster.nodes:
        spot, count = gpus.get((node.spot.domain, node.gpu), (node.spot, 0))
        gpus[node.spot.domain, node.gpu] = spot, count + node.num_gpus
    return tuple(Site(spot, gpu, count) for (_, gpu), (spot, count) in gpus.items())
