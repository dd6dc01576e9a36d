"""Flows over shared links: rates by max-min fairness, changed when a flow starts or ends.

A flow has work, in bytes: its payload and, at its rate, the time that posting its descriptors takes. The
links at its ends do all of the work; an uplink between them only carries the payload's share of it.

Max-min: no flow can get more without taking from one that has no more than it. Found by filling:
all rates rise together until a link is full or a flow reaches its own cap; those are fixed, the rest
rise on. Links that all their flows together cannot fill tie nothing together, so a change is worked
out only over the flows that full links connect.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from kvferry.plan.events import Events

__all__ = ["Flow", "Network", "SharedLink", "max_min_rates"]

_DUST = 1e-9
"""Relative: what rounding may leave of a flow's bytes or of a link's rate."""


class SharedLink:
    """Something with a rate that flows share: a node's ports in one direction, an uplink.

    ``work_nbytes`` is what kept it busy: of an end its flows' work, else their payload.
    """

    __slots__ = ("bytes_per_second", "demand", "flows", "is_end", "kind", "name", "work_nbytes")

    def __init__(self, name: str, kind: str, bytes_per_second: float, *, is_end: bool = True) -> None:
        self.name = name
        self.kind = kind
        self.is_end = is_end
        self.bytes_per_second = bytes_per_second
        self.flows: dict[Flow, None] = {}
        self.demand = 0.0
        self.work_nbytes = 0.0

    @property
    def is_tight(self) -> bool:
        """Whether its flows together could ask for more than it has."""
        return self.demand > self.bytes_per_second * (1 + _DUST)

    def takes(self, flow: Flow) -> float:
        """What it has to do for each byte of a flow's work."""
        return 1.0 if self.is_end else flow.payload_share

    def fair_share(self) -> float:
        """What one more flow would get here if all shared evenly."""
        return self.bytes_per_second / (len(self.flows) + 1)


class Flow:
    """Work on its way over a path, at most ``cap`` bytes of it a second; see the module."""

    __slots__ = ("argument", "call", "cap", "left", "path", "payload_share", "rate", "since", "version")

    def __init__(
        self,
        work_nbytes: float,
        cap: float,
        path: tuple[SharedLink, ...],
        call: Callable[[float, Any], None],
        argument: Any,
        *,
        payload_share: float = 1.0,
    ) -> None:
        self.left = work_nbytes
        self.payload_share = payload_share
        self.cap = cap
        self.path = path
        self.call = call
        self.argument = argument
        self.rate = 0.0
        self.since = 0.0
        self.version = 0


class Network:
    """All flows, on one clock."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.carried_nbytes = 0.0

    def start(self, now: float, flow: Flow) -> None:
        """Begin to move; ``flow.call(then, flow.argument)`` when its last byte is there."""
        flow.since = now
        for link in flow.path:
            link.flows[flow] = None
            link.demand += flow.cap * link.takes(flow)
        self._share(now, flow)

    def drop(self, now: float, flow: Flow) -> None:
        """Stop a flow; what it moved so far stays counted as carried."""
        self._settle(now, flow)
        self._leave(now, flow)

    def _finish(self, now: float, ticket: tuple[Flow, int]) -> None:
        flow, version = ticket
        if version != flow.version:
            return
        self._count(flow, flow.left)
        self._leave(now, flow)
        flow.call(now, flow.argument)

    def _leave(self, now: float, flow: Flow) -> None:
        flow.version += 1
        neighbours: dict[Flow, None] = {}
        for link in flow.path:
            if link.is_tight:
                neighbours |= link.flows
        for link in flow.path:
            del link.flows[flow]
            link.demand = link.demand - flow.cap * link.takes(flow) if link.flows else 0.0
        neighbours.pop(flow, None)
        done: dict[Flow, None] = {}
        for neighbour in neighbours:
            if neighbour not in done:
                done |= self._share(now, neighbour)

    def _settle(self, now: float, flow: Flow) -> None:
        """Count what it moved at its last rate."""
        self._count(flow, min(flow.left, flow.rate * (now - flow.since)))
        flow.since = now

    def _count(self, flow: Flow, moved: float) -> None:
        flow.left -= moved
        self.carried_nbytes += moved * flow.payload_share
        for link in flow.path:
            link.work_nbytes += moved * link.takes(flow)

    def _share(self, now: float, flow: Flow) -> dict[Flow, None]:
        """New rates for a flow and all that full links connect it with; returns them."""
        together = self._connected(flow)
        if len(together) == 1:
            rates = {flow: min([flow.cap, *[_alone(link, flow) for link in flow.path]])}
        else:
            rates = max_min_rates(together)
        for other, rate in rates.items():
            if rate == other.rate:
                continue
            if other.rate:
                self._settle(now, other)
            other.rate = rate
            other.since = now
            other.version += 1
            self._events.at(now + other.left / rate, self._finish, (other, other.version))
        return together

    @staticmethod
    def _connected(flow: Flow) -> dict[Flow, None]:
        found = {flow: None}
        queue = [flow]
        seen: set[int] = set()
        while queue:
            for link in queue.pop().path:
                if id(link) in seen or not link.is_tight:
                    continue
                seen.add(id(link))
                for other in link.flows:
                    if other not in found:
                        found[other] = None
                        queue.append(other)
        return found


def _alone(link: SharedLink, flow: Flow) -> float:
    takes = link.takes(flow)
    return link.bytes_per_second / takes if takes else math.inf


def max_min_rates(flows: dict[Flow, None]) -> dict[Flow, float]:
    """The max-min fair rates of flows, given that they share their links with no others."""
    rates: dict[Flow, float] = {}
    room: dict[SharedLink, float] = {}
    rising: dict[SharedLink, float] = {}
    for flow in flows:
        for link in flow.path:
            room.setdefault(link, link.bytes_per_second)
            rising[link] = rising.get(link, 0.0) + link.takes(flow)
    waiting = dict(flows)
    while waiting:
        level = min([room[link] / takes for link, takes in rising.items() if takes > _DUST], default=math.inf)
        capped = [flow for flow in waiting if flow.cap <= level * (1 + _DUST)]
        if not capped:
            full = {
                link
                for link, takes in rising.items()
                if takes > _DUST and room[link] / takes <= level * (1 + _DUST)
            }
            capped = [flow for flow in waiting if not full.isdisjoint(flow.path)]
        for flow in capped:
            rate = min(flow.cap, level)
            rates[flow] = rate
            del waiting[flow]
            for link in flow.path:
                takes = link.takes(flow)
                room[link] = max(0.0, room[link] - rate * takes)
                rising[link] -= takes
    return rates
