"""What an agent does now, as data that a page can show: nothing in it can be used to touch anything."""

from __future__ import annotations

import threading

import msgspec

from kvferry.probe.node import Copied
from kvferry.transfer import Stats, TransferRecord

__all__ = ["AgentSnapshot", "PeerRate", "ProbeSnapshot", "Rates"]


class PeerRate(msgspec.Struct, frozen=True):
    """What came from one peer: bytes over the seconds of whole handoffs, all of them and the last."""

    peer: str
    mode: str
    transport: str
    path: str
    copies: int
    nbytes: int
    seconds: float
    last_bytes_per_second: float

    @property
    def bytes_per_second(self) -> float:
        """Over all copies."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


class ProbeSnapshot(msgspec.Struct, frozen=True):
    """The probe that an agent serves now: for whom, how long still, and what its endpoint holds.

    ``stats``: transfers in flight, holds (leases not yet claimed), grants, peers; None while it ends.
    """

    coordinator: str
    seconds_left: float
    pool_nbytes: int
    addresses: tuple[str, ...]
    stats: Stats | None
    peers: tuple[PeerRate, ...]
    errors: tuple[str, ...]


class AgentSnapshot(msgspec.Struct, frozen=True):
    """An agent: who it is, what was asked of it, and the probe that it serves, if any."""

    name: str
    incarnation: str
    address: str
    zone: str
    up_seconds: float
    probes_served: int
    calls_refused: int
    probe: ProbeSnapshot | None


class Rates:
    """Adds up copies by peer, mode and transport. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, str, str], PeerRate] = {}

    def note(self, record: TransferRecord) -> Copied:
        """Count a copy that arrived here, and return it."""
        copied = Copied.of(record)
        key = (record.peer, record.mode, record.transport)
        with self._lock:
            before = self._peers.get(key)
            self._peers[key] = PeerRate(
                *key,
                path=record.path,
                copies=1 + (before.copies if before else 0),
                nbytes=copied.nbytes + (before.nbytes if before else 0),
                seconds=copied.seconds + (before.seconds if before else 0.0),
                last_bytes_per_second=copied.nbytes / copied.seconds if copied.seconds > 0 else 0.0,
            )
        return copied

    def peers(self) -> tuple[PeerRate, ...]:
        """One entry a peer, mode and transport."""
        with self._lock:
            return tuple(self._peers.values())
