"""What the live page shows, as data: of an agent, or of any worker with an endpoint."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec

from kvferry.errors import KVFerryError
from kvferry.probe import Agent
from kvferry.transfer import Endpoint, InFlight, Stats, Tallied, Tally
from kvferry.units import format_bytes

__all__ = ["Source", "View", "agent_source", "endpoint_source"]


class View(msgspec.Struct, frozen=True):
    """One moment. ``facts``: name and value, in order; ``stats``: None where there is no endpoint now.

    ``alarms``: peers whose last transfer went another way than the one that was wanted.
    """

    name: str
    at_seconds: float
    up_seconds: float
    facts: tuple[tuple[str, str], ...]
    stats: Stats | None
    transfers: tuple[InFlight, ...]
    tallied: Tallied
    alarms: tuple[str, ...]


_Now = tuple[Stats | None, tuple[InFlight, ...]]
Source = Callable[[], Awaitable[View]]


def agent_source(agent: Agent) -> Source:
    """What an agent does: the probe that it serves, and all that went through it."""

    async def view() -> View:
        seen = await agent.snapshot()
        facts = [
            ("address", seen.address),
            ("zone", seen.zone or "none"),
            ("incarnation", seen.incarnation),
            ("probes served", str(seen.probes_served)),
            ("calls refused", str(seen.calls_refused)),
            ("under probe by", "nobody"),
        ]
        if seen.probe is not None:
            facts[-1] = ("under probe by", f"{seen.probe.coordinator}, {seen.probe.seconds_left:.0f} s left")
            facts.append(("pool of the probe", format_bytes(seen.probe.pool_nbytes)))
            facts += [("last error", error) for error in seen.probe.errors[-1:]]
        return _view(
            f"agent {seen.name}",
            seen.up_seconds,
            facts,
            (None, ()) if seen.probe is None else (seen.probe.stats, seen.probe.transfers),
            seen.tallied,
        )

    return view


def endpoint_source(name: str, kind: str, endpoint: Endpoint, tally: Tally) -> Source:
    """What a worker's endpoint does; ``tally`` is one of its observers."""
    born = time.monotonic()
    facts = [("address", " ".join(endpoint.addresses)), ("incarnation", endpoint.incarnation.hex())]

    async def view() -> View:
        now: _Now = (None, ())
        said = facts
        try:
            now = await asyncio.to_thread(endpoint.stats), await asyncio.to_thread(endpoint.transfers)
        except KVFerryError as error:
            said = [*facts, ("the endpoint does not answer", str(error))]
        return _view(f"{kind} {name}", time.monotonic() - born, said, now, tally.now())

    return view


def _view(name: str, up_seconds: float, facts: list[tuple[str, str]], now: _Now, tallied: Tallied) -> View:
    alarms = tuple(f"{way.peer}: {way.fallback}" for way in tallied.ways if way.fallback)
    return View(name, time.time(), up_seconds, tuple(facts), *now, tallied, alarms)
