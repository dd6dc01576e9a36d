"""``kvferry doctor``: which transports work here and with a peer, and what else stands in the way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvferry.cli.identity import identity_of
from kvferry.cli.options import Flag
from kvferry.cli.streams import printable
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.probe.doctor import Examination, PeerExamination, TransportState
    from kvferry.probe.findings import Finding
    from kvferry.transport.security import Identity

__all__ = ["doctor"]


def doctor(
    *peers: Annotated[str, Parameter(name="PEER")],
    ping: Annotated[bool, Flag] = False,
    cert: Path | None = None,
    authority: Path | None = None,
    peer_name: Annotated[tuple[str, ...], Parameter(negative="")] = (),
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Say which transports work here, which would be used for a peer, why the others are not, and the fixes.

    Without PEER this node alone. Exit status: 1 where a peer is not there, or no transport works with it.

    Parameters
    ----------
    peers
        Agents (`kvferry agent`), as `kvferry probe` takes them: every transport is tried with each by a
        small handoff.
    ping
        Only ask each PEER whether it answers, within 5 s; nothing is tried. For scripts and schedulers.
    cert
        This side's certificate and key, where the agent's address is encrypted (see `kvferry certs`).
    authority
        The certificate that the agent's must lead to. Default: ca.pem beside --cert.
    peer_name
        A name, * for any letters, that the agent's certificate must carry; repeatable. Default: its host.
    as_json
        Print one JSON object.
    """
    import msgspec

    from kvferry.probe.doctor import examine
    from kvferry.transport.peers import find_peers

    addresses = [peer if "://" in peer else f"tcp://{peer}" for peer in find_peers(peers, "peers")]
    if peers and not addresses:
        raise InputError("peers: the list is empty")
    identity = identity_of(cert, authority, peer_name)
    if ping:
        return _ping(addresses, identity, as_json=as_json)
    found = asyncio.run(examine(addresses, tls=identity))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        _show(found)
    return 1 if found.unreachable or any(not peer.would_use for peer in found.peers) else 0


def _ping(addresses: Sequence[str], identity: Identity | None, *, as_json: bool) -> int:
    import msgspec

    from kvferry.probe.doctor import ping

    if not addresses:
        raise InputError("ping: whom? give the address of an agent")
    answered, silent = asyncio.run(ping(addresses, tls=identity))
    if as_json:
        print(msgspec.json.encode({"answered": answered, "unreachable": silent}).decode())
    else:
        for each in answered:
            busy = f", {printable(each.busy)}" if each.busy else ""
            print(f"{printable(each.name)} at {each.address} answers{busy}")
        for address, why in silent.items():
            print(f"{address}: not reached: {printable(why)}")
    return 1 if silent else 0


def _show(found: Examination) -> None:
    print("this node: " + _facts(found.software))
    print("  " + _facts(found.facts, _SHOWN))
    _show_transports(found.transports, "")
    _show_findings(found.findings)
    for peer in found.peers:
        _show_peer(peer)
    for address, why in found.unreachable.items():
        print(f"\n{address}: not reached: {printable(why)}")


def _show_peer(peer: PeerExamination) -> None:
    sealed = "encrypted" if peer.encrypted else "in plain"
    who = f"{printable(peer.name)} at {peer.address} on {printable(peer.host)}"
    print(f"\n{who}, {sealed}: {_facts(peer.software)}")
    print("  " + _facts(peer.facts, _SHOWN))
    _show_transports(peer.transports, peer.would_use)
    _show_findings(peer.findings)


_SHOWN = (
    "kernel",
    "cpu",
    "cpus",
    "cpu_features",
    "interface",
    "mtu",
    "speed_mbit",
    "huge_pages",
    "open_files",
    "locked_memory",
)


def _facts(facts: dict[str, str], names: Sequence[str] | None = None) -> str:
    chosen = facts if names is None else {name: facts[name] for name in names if name in facts}
    return ", ".join(f"{name.replace('_', ' ')} {printable(value)}" for name, value in chosen.items())


def _show_transports(states: Sequence[TransportState], used: str) -> None:
    for state in states:
        if state.works:
            path = f", path {state.path}" if state.path else ""
            print(
                f"  {state.scheme:<8} works{path}"
                + ("; this one would be used" if state.scheme == used else "")
            )
        else:
            print(f"  {state.scheme:<8} does not work: {printable(state.why)}")


def _show_findings(findings: Sequence[Finding]) -> None:
    for finding in findings:
        print(f"  {finding.about}: {printable(finding.problem)}\n    fix: {printable(finding.fix)}")
    if not findings:
        print("  nothing else stands in the way")
