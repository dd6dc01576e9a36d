"""What a transfer did and how long each part took, as data.

Phases are the protocol's own (docs/protocol.md), so the split cannot drift from what happens:
the time of a phase is the time between entering and leaving it. Seconds and bytes of a rate
come from the same interval.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from kvferry.protocol.table import Phase

__all__ = ["PhaseClock", "Timings", "TransferRecord", "combined"]


class Timings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one transfer at one side.

    ``handshake``: connection and pair check, 0 when the connection was there. ``claim``: until
    the peer answered. ``check``: the checks before a byte moves. ``move``: the payload,
    digests of what arrived included (``copy`` is the part spent inside the transport).
    ``commit``: from the last byte to everything visible. ``total``: all of it.
    """

    handshake: float = 0.0
    claim: float = 0.0
    verify: float = 0.0
    move: float = 0.0
    copy: float = 0.0
    commit: float = 0.0
    total: float = 0.0


class TransferRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What moved, between whom, by what. ``path`` is what really carried the bytes.

    ``nbytes`` are those on the wire. ``conversions``: what was done to the values, and its bound.
    ``chosen``: why this transport, where the choice was left to kvferry; ``passed_over``: better ones that
    did not work then, each with its reason.
    """

    request_id: str
    role: str
    mode: str
    peer: str
    transport: str
    path: str
    nbytes: int
    descriptors: int
    chunks: int
    state_nbytes: int
    integrity: bool
    timings: Timings
    conversions: tuple[str, ...] = ()
    chosen: str = ""
    passed_over: tuple[str, ...] = ()

    @property
    def bytes_per_second(self) -> float:
        """Payload rate over the time that the transport spent copying; 0 when nothing moved here."""
        return self.nbytes / self.timings.copy if self.timings.copy > 0 else 0.0


def combined(records: Sequence[TransferRecord]) -> TransferRecord:
    """The records of several pairs of ranks as one transfer's.

    Counts are added up, and so is ``copy``: the rate is bytes over time spent copying, never more
    than one pair reached. Pairs go side by side, so of each other time it is the longest.
    """
    first = records[0]
    times = [msgspec.structs.asdict(record.timings) for record in records]
    longest = {name: max(time[name] for time in times) for name in times[0]}

    def names(field: str) -> str:
        return ", ".join(dict.fromkeys(getattr(record, field) for record in records))

    conversions = dict.fromkeys(how for record in records for how in record.conversions)
    passed_over = dict.fromkeys(why for record in records for why in record.passed_over)

    def total(field: str) -> int:
        return sum(getattr(record, field) for record in records)

    return msgspec.structs.replace(
        first,
        peer=names("peer"),
        transport=names("transport"),
        path=names("path"),
        nbytes=total("nbytes"),
        descriptors=total("descriptors"),
        chunks=total("chunks"),
        state_nbytes=total("state_nbytes"),
        conversions=tuple(conversions),
        passed_over=tuple(passed_over),
        timings=Timings(**longest | {"copy": sum(time["copy"] for time in times)}),
    )


_PARTS = {
    Phase.CLAIMING: "claim",
    Phase.CHECKING: "verify",
    Phase.MOVING: "move",
    Phase.SETTLING: "commit",
    Phase.VOUCHING: "commit",
    Phase.COMMITTING: "commit",
    Phase.VERIFYING: "verify",
}


class PhaseClock:
    """Adds up the seconds spent in each phase of one transfer."""

    def __init__(self, phase: Phase, handshake_seconds: float = 0.0) -> None:
        self._phase = phase
        self._entered = time.monotonic()
        self._seconds = {"handshake": handshake_seconds}
        self.copy_seconds = 0.0

    def enter(self, phase: Phase) -> None:
        """The transfer is in ``phase`` from now on."""
        now = time.monotonic()
        part = _PARTS.get(self._phase)
        if part is not None:
            self._seconds[part] = self._seconds.get(part, 0.0) + now - self._entered
        self._phase, self._entered = phase, now

    def timings(self) -> Timings:
        """The split so far; waiting to be claimed or to be started is not part of it."""
        return Timings(**self._seconds, copy=self.copy_seconds, total=sum(self._seconds.values()))
