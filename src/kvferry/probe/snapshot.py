"""What an agent does now, as data that a page can show: nothing in it can be used to touch anything."""

from __future__ import annotations

import msgspec

from kvferry.transfer import InFlight, Stats, Tallied

__all__ = ["AgentSnapshot", "ProbeSnapshot"]


class ProbeSnapshot(msgspec.Struct, frozen=True):
    """The probe that an agent serves now: for whom, how long still, and what its endpoint holds.

    ``stats``: transfers in flight, holds (leases not yet claimed), grants, peers; None while it ends.
    ``transfers``: the first of them, one by one.
    """

    coordinator: str
    seconds_left: float
    pool_nbytes: int
    addresses: tuple[str, ...]
    stats: Stats | None
    transfers: tuple[InFlight, ...]
    errors: tuple[str, ...]


class AgentSnapshot(msgspec.Struct, frozen=True):
    """An agent: who it is, what was asked of it, what went through it, and the probe it serves, if any."""

    name: str
    incarnation: str
    address: str
    zone: str
    up_seconds: float
    probes_served: int
    calls_refused: int
    tallied: Tallied
    probe: ProbeSnapshot | None
