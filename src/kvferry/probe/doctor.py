"""Which transports work here and with a peer, which would be used, and why the others are not: by trying."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Sequence

import msgspec

from kvferry.errors import InputError, KVFerryError
from kvferry.link import Conditions, Mode
from kvferry.probe import words as w
from kvferry.probe.facts import host_facts, software, transport_facts
from kvferry.probe.findings import Finding, compare_nodes, findings_of
from kvferry.probe.payload import Payload, Room
from kvferry.probe.site import AgentSite, LocalSite
from kvferry.probe.sweep import Flow
from kvferry.transfer.choosing import PREFERENCE
from kvferry.transport.address import parse_address, parse_host_port
from kvferry.transport.security import Identity

__all__ = ["PING_SECONDS", "Answered", "Examination", "PeerExamination", "TransportState", "examine", "ping"]

_PAYLOAD = Payload(64 << 10, 4 << 10)
_SECONDS = 60.0
#: An agent answers whatever else it does; one that takes longer is frozen, or its node is.
PING_SECONDS = 5.0


class TransportState(msgspec.Struct, frozen=True):
    """A transport, here or with a peer. ``why``: what is missing, with the fix; "" where it works.

    ``path``: what carried the bytes when it was tried with a peer.
    """

    scheme: str
    works: bool
    why: str = ""
    path: str = ""


class PeerExamination(msgspec.Struct, frozen=True):
    """A peer: who it is, what works between here and there, and what would be used ("": nothing)."""

    name: str
    address: str
    host: str
    encrypted: bool
    software: dict[str, str]
    facts: dict[str, str]
    transports: tuple[TransportState, ...]
    would_use: str
    findings: tuple[Finding, ...]


class Examination(msgspec.Struct, frozen=True):
    """This node, and the peers that were named; ``unreachable``: those that could not be asked, and why."""

    software: dict[str, str]
    facts: dict[str, str]
    transports: tuple[TransportState, ...]
    findings: tuple[Finding, ...]
    peers: tuple[PeerExamination, ...] = ()
    unreachable: dict[str, str] = {}


class Answered(msgspec.Struct, frozen=True):
    """A peer that answered; ``busy``: by whom it is under probe, or ""."""

    name: str
    address: str
    busy: str
    seconds: float


async def ping(
    peers: Sequence[str], *, tls: Identity | None = None, timeout_seconds: float = PING_SECONDS
) -> tuple[list[Answered], dict[str, str]]:
    """Ask each agent who it is, all at the same time; those that answered, and the others with the reason.

    Nothing is opened at them and no byte of a pool moves. Raises InputError for an address without sense.
    """

    async def ask(peer: str) -> Answered:
        started = time.monotonic()
        async with asyncio.timeout(2 * timeout_seconds):
            site = await AgentSite.connect(peer, timeout_seconds, tls=tls)
            await site.close()
        return Answered(site.about.name, peer, site.about.busy, time.monotonic() - started)

    answered: list[Answered] = []
    silent: dict[str, str] = {}
    found = await asyncio.gather(*(ask(peer) for peer in peers), return_exceptions=True)
    for peer, each in zip(peers, found, strict=True):
        if isinstance(each, Answered):
            answered.append(each)
        elif isinstance(each, (KVFerryError, TimeoutError)) and not isinstance(each, InputError):
            silent[peer] = str(each) or f"no answer within {2 * timeout_seconds:g} s"
        else:
            raise each
    return answered, silent


async def examine(peers: Sequence[str] = (), *, tls: Identity | None = None) -> Examination:
    """Look at this node; with ``peers``, addresses of agents, try every transport with each in turn.

    A try is a real handoff of 64 KiB over the path of production, its bytes compared.
    Raises InputError for an address without sense; where no peer can be reached, what the last one raised.
    """
    facts = host_facts(_own_address(peers[0] if peers else ""))
    here = tuple(
        TransportState(each.scheme, not each.unavailable, each.unavailable) for each in transport_facts()
    )
    found: list[PeerExamination] = []
    unreachable: dict[str, str] = {}
    for peer in peers:
        try:
            site = await AgentSite.connect(peer, tls=tls)
        except InputError:
            raise
        except KVFerryError as error:
            if len(unreachable) + 1 == len(peers):
                raise
            unreachable[peer] = str(error)
            continue
        try:
            found.append(await _examine_peer(site, here, host_facts(_own_address(peer)), tls))
        finally:
            await site.close()
    return Examination(
        software(), facts, _in_order(here), tuple(findings_of(facts)), tuple(found), unreachable
    )


async def _examine_peer(
    site: AgentSite, here: Sequence[TransportState], facts: dict[str, str], tls: Identity | None
) -> PeerExamination:
    about = site.about
    there = {each.scheme: each.unavailable for each in about.transports}
    states = []
    for mine in here:
        if mine.scheme == "inproc":
            continue  # never leaves its process
        if not mine.works:
            states.append(msgspec.structs.replace(mine, why=f"not here: {mine.why}"))
        elif mine.scheme not in there:
            states.append(TransportState(mine.scheme, False, "the peer's kvferry does not have it"))
        elif there[mine.scheme]:
            states.append(TransportState(mine.scheme, False, f"not at the peer: {there[mine.scheme]}"))
        else:
            states.append(await _try(site, mine.scheme, tls))
    ordered = _in_order(states)
    return PeerExamination(
        name=about.name,
        address=site.address,
        host=about.host,
        encrypted=site.is_encrypted,
        software=about.software,
        facts=about.facts,
        transports=ordered,
        would_use=next((state.scheme for state in ordered if state.works), ""),
        findings=(
            *findings_of(about.facts),
            *compare_nodes(facts, about.facts, software(), about.software),
        ),
    )


async def _try(site: AgentSite, scheme: str, tls: Identity | None) -> TransportState:
    """One handoff from the peer to here; both ends are made for it, and gone after it."""
    local = LocalSite("doctor", Room.of([_PAYLOAD]).nbytes, tls, peer=site.address)
    room = Room.of([_PAYLOAD])
    encrypted = site.is_encrypted and scheme == "tcp"
    try:
        await site.open(_SECONDS, room=room, transports=(scheme,), integrity=True, tls=encrypted)
        try:
            await local.open(_SECONDS, room=room, transports=(scheme,), integrity=True, tls=encrypted)
        except InputError as error:  # what this host has to be asked for, and nobody has asked
            return TransportState(
                scheme,
                False,
                f"not tried from here: {error.message}; `kvferry probe` tries it between agents whose --data "
                "says so",
            )
        flow = Flow(site, local, Mode.PULL, scheme, Conditions(mode=Mode.PULL))
        copies = await flow.copy(_PAYLOAD, 1)
        await flow.compare(_PAYLOAD)
    except KVFerryError as error:
        return TransportState(scheme, False, str(error))
    finally:
        with contextlib.suppress(KVFerryError):
            await site.call(w.CloseCall, _SECONDS)
        await asyncio.shield(local.close())
    return TransportState(scheme, True, path=copies.copies[0].path)


def _own_address(peer: str) -> str:
    """The address of this side's interface towards a peer; nothing is sent. "" where that is unknown."""
    if not peer.startswith("tcp://"):
        return ""
    host, port = parse_host_port(parse_address(peer.partition("?")[0], "tcp", ()))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((host, port or 9))
            return f"tcp://{sock.getsockname()[0]}:0"
    except OSError:
        return ""  # IPv6, or no such host: connecting says so


def _in_order(states: Sequence[TransportState]) -> tuple[TransportState, ...]:
    order = {scheme: index for index, scheme in enumerate(PREFERENCE)}
    return tuple(sorted(states, key=lambda state: (order.get(state.scheme, len(order)), state.scheme)))
