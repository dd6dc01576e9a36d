"""What went between a worker and its peers so far: an observer that adds up, for those who look on.

Bounded: of ways (a peer, in one role, over one path) those used last, of transfers the last ones.
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, deque

import msgspec

from kvferry.errors import KVFerryError
from kvferry.transfer.calls import Ended
from kvferry.transfer.trace import TransferRecord

__all__ = ["Tallied", "Tally", "Told", "Way", "fallback_of"]

MAX_WAYS = 64
MAX_RECENT = 16
_PORT = re.compile(r":\d+(\?.*)?$")


class Way(msgspec.Struct, frozen=True):
    """One peer in one role over one path: how many transfers, and bytes over the seconds of whole handoffs.

    ``fallback``: why this path is not the one that was wanted, or "".
    """

    peer: str
    role: str
    mode: str
    transport: str
    path: str
    transfers: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    last_bytes_per_second: float = 0.0
    last_error: str = ""
    fallback: str = ""

    @property
    def bytes_per_second(self) -> float:
        """Over all transfers that ended well; 0 before the first."""
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


class Told(msgspec.Struct, frozen=True):
    """A transfer that ended: when (seconds since 1970), what, and the error in words, or ""."""

    at_seconds: float
    record: TransferRecord
    error: str = ""


class Tallied(msgspec.Struct, frozen=True):
    """All of it at one moment; ``recent``: the newest first."""

    ways: tuple[Way, ...] = ()
    recent: tuple[Told, ...] = ()


class Tally:
    """An observer of an endpoint, or of several. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ways: OrderedDict[tuple[str, ...], Way] = OrderedDict()
        self._recent: deque[Told] = deque(maxlen=MAX_RECENT)

    def __call__(self, ended: Ended) -> None:
        """Count one transfer."""
        record, error = ended.record, ""
        if ended.error is not None:
            error = str(KVFerryError.from_record(ended.error))
        # Each connection has a port of its own: the same peer by another one is no other peer.
        key = (_PORT.sub("", record.peer), record.role, record.mode, record.transport, record.path)
        with self._lock:
            self._recent.appendleft(Told(time.time(), record, error))
            self._ways[key] = _counted(self._ways.pop(key, Way(*key)), record, error)
            while len(self._ways) > MAX_WAYS:
                self._ways.popitem(last=False)

    def now(self) -> Tallied:
        """Everything so far."""
        with self._lock:
            return Tallied(tuple(self._ways.values()), tuple(self._recent))


def fallback_of(record: TransferRecord) -> str:
    """Why the path that carried it is not the one that was wanted, or "".

    Either better transports did not work for a choice that was left to kvferry, or a library for
    fast networks went over tcp by itself, as UCX does without a word.
    """
    if record.passed_over:
        return f"{record.transport} instead of {'; '.join(record.passed_over)}"
    if record.transport != "tcp" and "tcp" in record.path:
        return f"{record.transport} went over tcp: path {record.path}"
    return ""


def _counted(way: Way, record: TransferRecord, error: str) -> Way:
    if error:
        return msgspec.structs.replace(way, failed=way.failed + 1, last_error=error)
    seconds = record.timings.total - record.timings.handshake
    return msgspec.structs.replace(
        way,
        transfers=way.transfers + 1,
        nbytes=way.nbytes + record.nbytes,
        seconds=way.seconds + seconds,
        last_bytes_per_second=record.nbytes / seconds if seconds > 0 else 0.0,
        fallback=fallback_of(record),
    )
