"""What a simulation counts while it runs: percentiles in a histogram, so that memory stays flat."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from kvferry.plan.sim_request import Outcome, RequestRecord

__all__ = ["Histogram", "Percentiles", "Tally", "Targets"]

_STEP = 0.005
_LOWEST = 1e-7
_CELLS = int(math.log(1e16) / _STEP)


class Targets(msgspec.Struct, frozen=True):
    """The service level: a share ``attainment`` of the requests keeps to both times."""

    ttft_seconds: float = math.inf
    tpot_seconds: float = math.inf
    attainment: float = 0.9


class Percentiles(msgspec.Struct, frozen=True):
    """Of the times counted; None where there were none."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None


class Histogram:
    """Times in cells that are 0.5 % wide, so a percentile is right within 0.25 %; the mean is exact."""

    __slots__ = ("_cells", "_count", "_sum")

    def __init__(self) -> None:
        self._cells = [0] * (_CELLS + 1)
        self._count = 0
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Count a time."""
        self._count += 1
        self._sum += seconds
        cell = int(math.log(seconds / _LOWEST) / _STEP) if seconds > _LOWEST else 0
        self._cells[min(cell, _CELLS)] += 1

    def quantile(self, q: float) -> float | None:
        """The time that a share ``q`` stays within."""
        if not self._count:
            return None
        rank = q * (self._count - 1)
        cell = int(np.searchsorted(np.cumsum(self._cells), rank, side="right"))
        return _LOWEST * math.exp((cell + 0.5) * _STEP) if cell else 0.0

    def percentiles(self) -> Percentiles:
        """The usual ones."""
        mean = self._sum / self._count if self._count else None
        return Percentiles(mean, *(self.quantile(q) for q in (0.5, 0.9, 0.95, 0.99)))


class Tally:
    """All that is counted of requests that ended."""

    __slots__ = (
        *(
            "_targets",
            "attained",
            "decode_hits",
            "done",
            "exposed",
            "failed",
            "output_tokens",
            "prefill_hits",
        ),
        *("prompt_tokens", "retried", "room_wait", "tpot", "tpot_attained"),
        *("transfer", "ttft", "ttft_attained", "wait"),
    )

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self.done = self.failed = self.retried = 0
        self.attained = self.ttft_attained = self.tpot_attained = 0
        self.prompt_tokens = self.output_tokens = self.prefill_hits = self.decode_hits = 0
        self.ttft, self.tpot, self.wait = Histogram(), Histogram(), Histogram()
        self.transfer, self.exposed, self.room_wait = Histogram(), Histogram(), Histogram()

    def add(self, record: RequestRecord) -> None:
        """Count a request that ended."""
        self.retried += record.attempts > 1
        if record.outcome != Outcome.DONE or record.ttft_seconds is None:
            self.failed += 1
            return
        self.done += 1
        self.prompt_tokens += record.prompt_tokens
        self.output_tokens += record.output_tokens
        self.prefill_hits += record.prefill_hit_tokens
        self.decode_hits += record.decode_hit_tokens
        self.ttft.add(record.ttft_seconds)
        self.wait.add(record.queue_seconds)
        in_time = record.ttft_seconds <= self._targets.ttft_seconds
        steady = record.tpot_seconds is None or record.tpot_seconds <= self._targets.tpot_seconds
        self.ttft_attained += in_time
        self.tpot_attained += steady
        self.attained += in_time and steady
        if record.tpot_seconds is not None:
            self.tpot.add(record.tpot_seconds)
        if record.wire_bytes:
            self.transfer.add(record.transfer_seconds)
            self.exposed.add(record.exposed_seconds)
            self.room_wait.add(record.room_wait_seconds)
