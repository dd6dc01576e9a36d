"""Two parties -> reasons why they cannot work together; empty when they can. Pure.

Compared once a connection, before any request: an unfit pair is refused by name at start-up,
not by wrong tokens under load.
"""

from __future__ import annotations

from kvferry.layout import Conversions, PoolLayout, Selection, WireTensor, mismatches, wire_form
from kvferry.protocol.messages import MAGIC, VERSION, Hello, Party, Portion
from kvferry.state import Exactness, compare_fingerprints

__all__ = ["agreed_conversions", "hello_reasons", "pair_form", "pair_reasons"]


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
    ours, theirs = (party.conversions and party.conversions.wire for party in (local, peer))
    reasons = _layout_reasons(local.layout, peer.layout, agreed_conversions(local, peer))
    if ours != theirs:
        reasons.insert(0, f"wire: {ours or 'none'} here, {theirs or 'none'} at the peer; set both alike")
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


def agreed_conversions(local: Party, peer: Party) -> Conversions | None:
    """What both allow; None where one of them allows none."""
    if (
        local.conversions is None
        or peer.conversions is None
        or local.conversions.wire != peer.conversions.wire
    ):
        return None
    return Conversions(local.conversions.lossy and peer.conversions.lossy, local.conversions.wire)


def pair_form(
    local: Party, peer: Party, *, gives: bool, portions: tuple[Portion, ...]
) -> tuple[WireTensor, ...] | None:
    """What crosses converted when this side gives (or takes) a request; None where copies do.

    ``portions``: what of the pair moves. Raises IncompatibleError where that direction is not allowed.
    """
    allowed = agreed_conversions(local, peer)
    if allowed is None:
        return None  # the handshake has refused what no copy bridges
    src, dst = (local.layout, peer.layout) if gives else (peer.layout, local.layout)
    selections = tuple(
        Selection(portion.layers, frozenset(portion.parts), portion.head_range) for portion in portions
    )
    return wire_form(src, dst, allowed, selections or (Selection(),))


def _layout_reasons(ours: PoolLayout, theirs: PoolLayout, allowed: Conversions | None) -> list[str]:
    """A pair that fits in one direction only is a pair; each claim is checked in its own."""
    forth, back = mismatches(ours, theirs, allowed), mismatches(theirs, ours, allowed)
    return list(forth) if forth and back else []


def _on(integrity: bool) -> str:
    return "on" if integrity else "off"
