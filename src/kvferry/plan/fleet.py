"""Instances, where they stand, and what lies between them: what the simulator runs on."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvferry.plan.compute import ComputeProfile
from kvferry.plan.fairshare import SharedLink
from kvferry.plan.interference import MixedStep
from kvferry.plan.promise import FirstToken
from kvferry.plan.tier import Load, TierCost

__all__ = ["TIERS", "EngineRules", "Fleet", "Instance", "Role", "Spot", "Wires"]

TIERS = ("domain", "rack", "pod", "cluster")
"""How near two instances are: the first of these that they share."""
_MAX_LOADS = 1 << 14


class Role(StrEnum):
    """What an instance does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"


class Spot(msgspec.Struct, frozen=True):
    """Where an instance stands. ``node`` is the machine whose ports it uses."""

    node: str = "n0"
    domain: str = "d0"
    rack: str = "r0"
    pod: str = "p0"

    def tier(self, other: Spot) -> int:
        """Index in :data:`TIERS` of the nearest thing that both share."""
        if self.domain == other.domain:
            return 0
        if (self.rack, self.pod) == (other.rack, other.pod):
            return 1
        return 2 if self.pod == other.pod else 3


class Instance(msgspec.Struct, frozen=True):
    """One engine.

    Args:
        name: as in records and in ``--kill``.
        role: prefill, decode or colocated.
        profile: its compute times.
        spot: where it stands.
        pool_tokens: tokens of KV that it holds; None: no limit.
        max_batch: requests that it decodes together.
        prefix_tokens: tokens of prefixes that it keeps.
    """

    name: str
    role: Role
    profile: ComputeProfile
    spot: Spot = Spot()
    pool_tokens: int | None = None
    max_batch: int = 256
    prefix_tokens: int = 0


class EngineRules(msgspec.Struct, frozen=True):
    """How the engines work, all alike.

    Args:
        first_token: who emits it.
        groups: parts in which the KV leaves while prefill computes.
        sync_seconds: a fixed cost of each handoff.
        staging: handoffs that may be on the way to one decode instance at once; None: no limit.
        prefill_batch_tokens: waiting prompts are computed together up to so many tokens; 0: one by one.
        chunk_tokens: chunked prefill of colocated instances.
        mixed: how long a step with prefill and decode takes.
    """

    first_token: FirstToken = FirstToken.DECODE
    groups: int = 1
    sync_seconds: float = 0.0
    staging: int | None = None
    prefill_batch_tokens: int = 0
    chunk_tokens: int = 2048
    mixed: MixedStep = MixedStep.LONGER


class Fleet(msgspec.Struct, frozen=True):
    """All instances, and the costs and rates between them.

    Args:
        instances: prefill and decode, or colocated.
        tiers: the cost of each of :data:`TIERS`, as far as there is one.
        node_rate: bytes a second of a node's ports, each way, beyond its NVLink domain; None: what one
            handoff of the rack tier gets.
        uplink_rate: the same of a rack and of a pod; None: never full.
    """

    instances: tuple[Instance, ...]
    tiers: tuple[TierCost, ...] = (TierCost.typed(),)
    node_rate: float | None = None
    rack_uplink_rate: float | None = None
    pod_uplink_rate: float | None = None

    def of_role(self, role: Role) -> tuple[Instance, ...]:
        """The instances that do this."""
        return tuple(instance for instance in self.instances if instance.role is role)

    @property
    def num_gpus(self) -> int:
        """GPUs of all instances."""
        return sum(instance.profile.num_gpus for instance in self.instances)

    def tier_cost(self, sender: Spot, receiver: Spot) -> TierCost:
        """The cost between two spots; beyond the last known tier the last one's."""
        return self.tiers[min(sender.tier(receiver), len(self.tiers) - 1)]


class Wires:
    """The shared links of a fleet, and the path of each pair, found once."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.links: dict[str, SharedLink] = {}
        self._paths: dict[tuple[str, str], tuple[TierCost, tuple[SharedLink, ...]]] = {}
        self._loads: dict[tuple[int, int, int], Load] = {}

    @property
    def is_measured(self) -> bool:
        """Whether every tier that was used was measured."""
        return all(cost.is_measured for cost, _ in self._paths.values())

    def between(self, sender: Instance, receiver: Instance) -> tuple[TierCost, tuple[SharedLink, ...]]:
        """What a handoff costs, and the links that it shares with others."""
        key = (sender.name, receiver.name)
        found = self._paths.get(key)
        if found is None:
            found = self._paths[key] = self._find(sender, receiver)
        return found

    def load(self, cost: TierCost, nbytes: int, descriptors: int) -> Load:
        """What such a handoff asks of a way of the fleet's that costs this; remembered."""
        key = (id(cost), nbytes, descriptors)
        found = self._loads.get(key)
        if found is None:
            if len(self._loads) >= _MAX_LOADS:
                self._loads.clear()
            found = self._loads[key] = cost.load(nbytes, descriptors)
        return found

    def _find(self, sender: Instance, receiver: Instance) -> tuple[TierCost, tuple[SharedLink, ...]]:
        here, there = sender.spot, receiver.spot
        tier = here.tier(there)
        cost = self.fleet.tier_cost(here, there)
        if tier == 0:
            ends = (f"{sender.name} out", f"{receiver.name} in")
            return cost, tuple(self._link(name, "domain", cost.rate) for name in ends)
        node_rate = self.fleet.node_rate
        if node_rate is None:
            node_rate = self.fleet.tiers[min(1, len(self.fleet.tiers) - 1)].rate
        path = [self._link(f"{here.node} out", "node", node_rate)]
        if tier >= 2 and (rate := self.fleet.rack_uplink_rate) is not None:
            path.append(self._link(f"{here.pod}/{here.rack} up", "rack uplink", rate))
        if tier >= 3 and (rate := self.fleet.pod_uplink_rate) is not None:
            path += [self._link(f"{here.pod} up", "pod uplink", rate)]
            path += [self._link(f"{there.pod} down", "pod uplink", rate)]
        if tier >= 2 and (rate := self.fleet.rack_uplink_rate) is not None:
            path.append(self._link(f"{there.pod}/{there.rack} down", "rack uplink", rate))
        path.append(self._link(f"{there.node} in", "node", node_rate))
        return cost, tuple(path)

    def _link(self, name: str, kind: str, rate: float) -> SharedLink:
        link = self.links.get(name)
        if link is None:
            # Descriptors are posted at the ends: what lies between only carries their bytes.
            link = self.links[name] = SharedLink(name, kind, rate, is_end="uplink" not in kind)
        return link
