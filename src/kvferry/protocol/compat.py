"""Two parties -> reasons why they cannot work together; empty when they can. Pure.

Compared once a connection, before any request: an unfit pair is refused by name at start-up,
not by wrong tokens under load.
"""

from __future__ import annotations

from kvferry.layout import mismatches
from kvferry.protocol.messages import MAGIC, VERSION, Hello, Party
from kvferry.state import Exactness, compare_fingerprints

__all__ = ["hello_reasons", "pair_reasons"]


def hello_reasons(hello: Hello, local: Party) -> tuple[str, ...]:
    """Why the listening side refuses a Hello: protocol first, then the pair."""
    if hello.magic != MAGIC:
        return (f"magic: {hello.magic!r} is not {MAGIC!r}",)
    if hello.major != VERSION[0]:
        return (
            f"protocol version: peer speaks {hello.major}.{hello.minor}, this side {VERSION[0]}.{VERSION[1]}",
        )
    return pair_reasons(local, hello.party)


def pair_reasons(local: Party, peer: Party) -> tuple[str, ...]:
    """Every field in which the pair does not fit, with both values.

    Fingerprints are compared for ``best_effort``, the weakest exactness: what a request asks
    for beyond that is checked with its own state record. A side without an engine (a probe
    agent) has no fingerprint and is fit for payloads only.
    """
    reasons = list(mismatches(local.layout, peer.layout))
    if local.integrity != peer.integrity:
        reasons.append(
            f"integrity: {_on(local.integrity)} here, {_on(peer.integrity)} at the peer; set both alike"
        )
    for one, other, whose in ((local, peer, "this side"), (peer, local, "the peer")):
        if 2 * one.heartbeat_ms > other.lost_ms:
            reasons.append(
                f"heartbeat: {whose} speaks each {one.heartbeat_ms} ms, "
                f"the other gives up after {other.lost_ms} ms"
            )
    if local.fingerprint is not None and peer.fingerprint is not None:
        reasons += compare_fingerprints(local.fingerprint, peer.fingerprint, Exactness.BEST_EFFORT)
    elif (local.fingerprint is None) != (peer.fingerprint is None):
        reasons.append("fingerprint: one side has an engine and the other has none")
    return tuple(reasons)


def _on(integrity: bool) -> str:
    return "on" if integrity else "off"
