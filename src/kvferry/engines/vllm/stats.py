"""What vLLM logs and exports about handoffs: its stats record and Prometheus metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

from kvferry.engines.vllm.results import Results

__all__ = ["FerryMetrics", "FerryStats"]

_KEYS = ("seconds", "move_seconds", "nbytes", "descriptors", "failed", "expired")
"""``seconds``: claim to import; ``move_seconds``: its part that moved bytes."""


class FerryStats(KVConnectorStats):
    """Observations since the last step: lists by key, plain numbers, as vLLM sends them."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__(data={key: list((data or {}).get(key, ())) for key in _KEYS})

    @classmethod
    def of(cls, results: Results) -> FerryStats:
        """The numbers of one step's results."""
        return cls(
            {
                "seconds": [record.timings.total for record in results.moves],
                "move_seconds": [record.timings.move for record in results.moves],
                "nbytes": [record.nbytes for record in results.moves],
                "descriptors": [record.descriptors for record in results.moves],
                "failed": [error.kind for error in results.errors],
                "expired": [1] * results.expired,
            }
        )

    def reset(self) -> None:
        """Forget all observations."""
        self.data: dict[str, list[Any]] = {key: [] for key in _KEYS}

    def is_empty(self) -> bool:
        """Nothing happened."""
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> FerryStats:
        """Add another rank's or step's observations to these."""
        for key in _KEYS:
            self.data[key].extend(other.data[key])
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line."""
        seconds, nbytes = self.data["seconds"], self.data["nbytes"]
        shown: dict[str, int | float] = {
            "kvferry handoffs": len(seconds),
            "failed": len(self.data["failed"]),
            "leases ended without decode": len(self.data["expired"]),
        }
        if seconds:
            shown |= {
                "median handoff (ms)": round(1e3 * float(np.median(seconds)), 3),
                "p90 handoff (ms)": round(1e3 * float(np.percentile(seconds, 90)), 3),
                "mean MB": round(sum(nbytes) / len(nbytes) / 1e6, 3),
            }
        return shown


class FerryMetrics(KVConnectorPromMetrics):
    """``vllm:kvferry_*`` on /metrics."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)

        def histogram(name: str, text: str, buckets: list[float]) -> Any:
            made = self._histogram_cls(name=name, documentation=text, buckets=buckets, labelnames=labelnames)
            return create_metric_per_engine(made, per_engine_labelvalues)

        def counter(name: str, text: str) -> Any:
            made = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
            return create_metric_per_engine(made, per_engine_labelvalues)

        times = [1e-3 * 2**step for step in range(15)]
        self._observed = {
            "seconds": histogram(
                "vllm:kvferry_handoff_seconds", "From claim to visible, a request, in seconds.", times
            ),
            "move_seconds": histogram(
                "vllm:kvferry_move_seconds", "The part of a handoff that moves bytes, in seconds.", times
            ),
            "nbytes": histogram(
                "vllm:kvferry_bytes",
                "Payload of a handoff, in bytes.",
                [2.0**step for step in range(14, 37, 2)],
            ),
            "descriptors": histogram(
                "vllm:kvferry_descriptors",
                "Contiguous pieces of a handoff.",
                [4.0**step for step in range(12)],
            ),
        }
        self._counted = {
            "failed": counter("vllm:kvferry_failed_total", "Handoffs that ended with an error here."),
            "expired": counter(
                "vllm:kvferry_ended_without_decode_total", "Offers that were aborted, or whose lease ended."
            ),
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record one step's observations."""
        for key, metric in self._observed.items():
            for value in transfer_stats_data.get(key, ()):
                metric[engine_idx].observe(value)
        for key, metric in self._counted.items():
            metric[engine_idx].inc(len(transfer_stats_data.get(key, ())))
