"""What a probe is asked to measure, and whether these nodes can: the passes and stages that come of it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import InputError
from kvferry.link import Mode
from kvferry.probe.addresses import is_loopback
from kvferry.probe.payload import Payload
from kvferry.probe.schedule import Stage, incast_stages, pair_stages
from kvferry.probe.site import Site
from kvferry.transport.security import Plain

__all__ = ["MAX_NODES", "STAGE_SECONDS", "ProbePlan", "check_count", "link_class", "names_of", "passes_of"]

#: Seconds of a stage where nobody says how long the whole may take.
STAGE_SECONDS = 6.0
#: Beyond it one process cannot carry their words, nor one link file their fits (docs/scale.md).
MAX_NODES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """What is measured.

    Args:
        largest: the largest payload; ``sizes_up_to`` gives the others.
        repeats: warm copies of each shape, at most; of small ones see Limits.
        seconds: all of it together, the opening of pools apart; None for STAGE_SECONDS a stage.
        alone: each pair by itself.
        under_load: each pair while all others of its round, and its own other direction, copy too.
        incast: so many nodes send to one receiver at the same time; 0 for none.
        ways: (0, 1) for both directions of each pair, (0,) for the first to the second node only.
        via: the proxy that data goes through, for the profile; "" for none.
        line_rate: brochure bytes a second, or None.
        tls: whether data over tcp is encrypted, once for each; None for as the words to the agents are.
    """

    largest: Payload
    transports: tuple[str, ...]
    modes: tuple[Mode, ...] = tuple(Mode)
    repeats: int = 40
    seconds: float | None = None
    integrity: bool = True
    alone: bool = True
    under_load: bool = False
    incast: int = 0
    ways: tuple[int, ...] = (0, 1)
    via: str = ""
    line_rate: float | None = None
    tls: tuple[bool, ...] | None = None


def link_class(source: Site, target: Site) -> str:
    """Pairs of one class should be alike."""
    a, b = source.about, target.about
    if a.host_id and a.host_id == b.host_id:
        return "same host"
    if a.zone or b.zone:
        zones = sorted((a.zone or "no zone", b.zone or "no zone"))
        return f"in {zones[0]}" if zones[0] == zones[1] else f"between {zones[0]} and {zones[1]}"
    return "between hosts"


def passes_of(sites: Sequence[Site], plan: ProbePlan) -> list[tuple[bool, list[Stage]]]:
    """Whether tcp is encrypted, and the stages of that; what is no tcp is in the first pass only."""
    if len(sites) < 2:
        raise InputError(f"peers: {len(sites)} given; a pair needs two")
    check_count(len(sites))
    for one, other in itertools.combinations(sites, 2):
        if one.about.incarnation == other.about.incarnation:
            raise InputError(f"peers: {one.address} and {other.address} are the same agent")
    encrypted = any(site.is_encrypted for site in sites)
    found = []
    for index, tls in enumerate((encrypted,) if plan.tls is None else plan.tls):
        transports = tuple(name for name in plan.transports if index == 0 or name == "tcp")
        if "tcp" in transports:
            _check_security(sites, tls=tls)
        if transports:
            found.append((tls, _stages(sites, plan, transports)))
    return found


def check_count(nodes: int) -> None:
    """Raise InputError for more nodes than one probe can carry."""
    if nodes > MAX_NODES:
        raise InputError(
            f"peers: {nodes} nodes, one probe takes at most {MAX_NODES}; probe each zone, and one node "
            "of every zone, and join the files with `kvferry link merge` (docs/scale.md)"
        )


def _check_security(sites: Sequence[Site], *, tls: bool) -> None:
    """Raise InputError for nodes that cannot encrypt, or will not send in plain."""
    for site in sites:
        about = site.about
        if tls and not about.can_encrypt:
            raise InputError(
                f"tls: {about.name} has no identity to encrypt with; start its agent with --cert "
                "(see `kvferry certs`)"
            )
        allowed = Plain.LOOPBACK if is_loopback(site.address) else Plain.ANYWHERE
        if not tls and about.plain not in (allowed, Plain.ANYWHERE):
            raise InputError(
                f"tls: {about.name} does not send in plain; start its agent with --plain {allowed} "
                "to allow it, or leave out --tls off"
            )


def _stages(sites: Sequence[Site], plan: ProbePlan, transports: tuple[str, ...]) -> list[Stage]:
    count = len(sites)
    if plan.incast and not 2 <= plan.incast < count:
        raise InputError(f"incast: {plan.incast} of {count} nodes; it is from 2 to {count - 1}")
    if plan.via and (count > 2 or transports != ("tcp",)):
        raise InputError("via: a proxy leads to one peer, over tcp: give two nodes and --transport tcp")
    hosts = [site.about.host_id or site.address or index for index, site in enumerate(sites)]
    stages: list[Stage] = []
    if plan.alone:
        stages += pair_stages(hosts, transports, plan.modes, ways=plan.ways)
    if plan.under_load:
        stages += pair_stages(hosts, transports, plan.modes, under_load=True)
    if plan.incast:
        stages += incast_stages(count, plan.incast, transports, plan.modes)
    return stages


def names_of(sites: Sequence[Site]) -> list[str]:
    """Names by which the nodes can be told apart: their own, with the address where two have the same."""
    names = [site.about.name for site in sites]
    return [
        name if names.count(name) == 1 else f"{name} at {site.address or index}"
        for index, (name, site) in enumerate(zip(names, sites, strict=True))
    ]
