"""Which of a peer's addresses to take where that was left to kvferry: the measured ones first.

Everything here is pure; the directory tries the addresses in this order and keeps the first that works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.link import LinkFile
from kvferry.units import format_bytes, format_seconds

__all__ = ["AUTO", "PREFERENCE", "Ranked", "measured_seconds", "rank"]

#: The transport to ask for to leave the choice to kvferry.
AUTO = "auto"
#: The order of what was not measured: fewer copies first. What is not named here comes last, by name.
PREFERENCE = ("shm", "nixl", "mooncake", "tcp")
# What transports are compared by: a prompt of a few thousand tokens, in blocks of common size.
NBYTES, DESCRIPTORS = 64 << 20, 2048


@dataclass(frozen=True, slots=True)
class Ranked:
    """An address and why it stands where it does."""

    address: str
    why: str

    @property
    def scheme(self) -> str:
        return self.address.partition("://")[0]


def measured_seconds(links: LinkFile, name: str) -> dict[str, dict[str, float]]:
    """By peer and transport, the seconds of the comparison payload between ``name`` and the peer.

    Both directions count, the slower one. Brochure rates and fits that cannot tell are left out.
    """
    found: dict[str, dict[str, float]] = {}
    for link in links.pairs:
        if not link.measured or name not in (link.from_node, link.to_node):
            continue
        peer = link.to_node if link.from_node == name else link.from_node
        times = [
            entry.fit.predict(NBYTES, DESCRIPTORS)
            for entry in link.fits
            if entry.fit.why_unknown(NBYTES, DESCRIPTORS) is None
        ]
        if times:
            of_peer = found.setdefault(peer, {})
            of_peer[link.transport] = max(min(times), of_peer.get(link.transport, 0.0))
    return found


def rank(addresses: Sequence[str], seconds: Mapping[str, float]) -> list[Ranked]:
    """A peer's addresses, best first. ``seconds``: by transport, where measured with this peer."""

    def key(address: str) -> tuple[bool, float, int, str]:
        scheme = address.partition("://")[0]
        place = PREFERENCE.index(scheme) if scheme in PREFERENCE else len(PREFERENCE)
        return scheme not in seconds, seconds.get(scheme, 0.0), place, scheme

    return [
        Ranked(address, _why(address.partition("://")[0], seconds)) for address in sorted(addresses, key=key)
    ]


def _why(scheme: str, seconds: Mapping[str, float]) -> str:
    if scheme in seconds:
        return (
            f"measured: {format_seconds(seconds[scheme])} for {format_bytes(NBYTES)} in {DESCRIPTORS} pieces"
        )
    return f"not measured with this peer; the order then is {', '.join(PREFERENCE)}"
