"""What a handoff costs over one tier: how long it is on its way, and how long it keeps the link busy.

    seconds = a + o * descriptors + bytes / B        as the link's fit has it
    busy    = seconds - a                            what others wait for

The start ``a`` is round trips: meanwhile others may move their bytes. Posting a descriptor takes the engine
or the port that moves bytes, so it keeps the link's ends busy, but no uplink between them.
"""

from __future__ import annotations

import math

import msgspec

from kvferry.link import LinkFit, Span, Spread
from kvferry.link.draw import draw_seconds

__all__ = ["Load", "TierCost"]


class Load(msgspec.Struct, frozen=True):
    """What one handoff asks of its way.

    Args:
        start_seconds: before it keeps anything busy.
        work_nbytes: what it takes of its ends: busy seconds times the link's rate.
        bytes_per_second: the most that it can use, so that alone it is busy for ``work / rate``.
        payload_share: payload bytes for each byte of work: what passes the uplinks.
    """

    start_seconds: float
    work_nbytes: float
    bytes_per_second: float
    payload_share: float


class TierCost(msgspec.Struct, frozen=True):
    """What a handoff costs over one tier when nothing else is on the way.

    Args:
        fit: of one link; its spread too, where one was measured.
        links: links that one handoff uses side by side.
        is_measured: False for a brochure rate, or where the fit lacks a term.
        label: where it is from.
    """

    fit: LinkFit
    links: int = 1
    is_measured: bool = True
    label: str = ""

    @staticmethod
    def typed(
        start_seconds: float = 0.0,
        descriptor_seconds: float = 0.0,
        bytes_per_second: float = math.inf,
        *,
        spreads: tuple[Spread, ...] = (),
        links: int = 1,
        is_measured: bool = True,
        label: str = "",
    ) -> TierCost:
        """Of numbers that were typed by hand; they cover every size."""
        everything = Span(low=1, high=2**53)
        fit = LinkFit(
            a_seconds=start_seconds,
            o_seconds=descriptor_seconds,
            bytes_per_second=bytes_per_second if math.isfinite(bytes_per_second) else None,
            samples=1,
            nbytes=everything,
            descriptors=everything,
            block_bytes=everything,
            spreads=spreads,
        )
        return TierCost(fit, links, is_measured, label)

    @property
    def rate(self) -> float:
        """Bytes a second of one large handoff."""
        line = self.fit.knee or self.fit
        return self.links * (line.bytes_per_second or math.inf)

    def seconds(self, nbytes: int, descriptors: int) -> float:
        """A whole handoff, alone: the typical one."""
        return self.fit.at_least(*self._share(nbytes, descriptors)) if nbytes else 0.0

    def quantile_seconds(self, q: float, nbytes: int, descriptors: int) -> float:
        """The same at a quantile of the measured spread; the typical one where there is none."""
        if not nbytes:
            return 0.0
        return draw_seconds(self.fit, q, *self._share(nbytes, descriptors))

    def mean_seconds(self, nbytes: int, descriptors: int) -> float:
        """The same on average."""
        return self.fit.mean_and_square(*self._share(nbytes, descriptors))[0] if nbytes else 0.0

    def start_seconds(self, nbytes: int, descriptors: int) -> float:
        """The part that keeps nothing busy."""
        return self.fit.start_of(*self._share(nbytes, descriptors)) if nbytes else 0.0

    def mean_work_nbytes(self, nbytes: int, descriptors: int) -> float:
        """What handoffs like this one take of their ends on average, in bytes at the link's rate."""
        typical = self.seconds(nbytes, descriptors)
        slow = self.mean_seconds(nbytes, descriptors) / typical if typical else 1.0
        return self.load(nbytes, descriptors).work_nbytes * slow

    def load(self, nbytes: int, descriptors: int) -> Load:
        """What the typical handoff asks of its way."""
        start = self.start_seconds(nbytes, descriptors)
        busy = self.seconds(nbytes, descriptors) - start
        rate = self.rate
        if math.isinf(rate):
            # No rate is known, so none is shared: what is known is how long it takes.
            return Load(start, nbytes, nbytes / busy if busy else math.inf, 1.0)
        work = busy * rate
        return Load(start, work, rate, nbytes / work if work else 0.0)

    def too_far(self, nbytes: int, descriptors: int) -> str | None:
        """Why this handoff lies too far beyond what was measured, or None."""
        return self.fit.too_far(*self._share(nbytes, descriptors))

    def _share(self, nbytes: int, descriptors: int) -> tuple[int, int]:
        """Of one link, as ``check`` splits a payload."""
        return -(-nbytes // self.links), max(1, -(-descriptors // self.links))
