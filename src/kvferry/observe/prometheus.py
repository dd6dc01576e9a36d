"""Prometheus metrics of an endpoint: what ended, how long each part took, and what is held now.

Names follow Prometheus' conventions (prometheus.io/docs/practices/naming): base units, ``_total``.
Labels are of closed sets: no peer, no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvferry.errors import KVFerryError, LocalError
from kvferry.transfer import Ended, Stats

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

    from kvferry.observe.samples import Sample, Samples
except ImportError as error:
    raise LocalError(
        "metrics: needs prometheus-client", next_step="pip install 'kvferry[metrics]'"
    ) from error

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# From a handoff of one block over shared memory to one of many GB over a slow link.
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PARTS = ("handshake", "claim", "verify", "move", "commit", "total")
_WAY = ("role", "mode", "transport")


class Metrics:
    """An observer; ``watch`` adds the gauges of what an endpoint holds, read when somebody scrapes."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._ended = Counter(
            "kvferry_transfers",
            "Transfers that ended at this side; outcome is ok or the kind of error.",
            (*_WAY, "path", "outcome"),
            registry=self.registry,
        )
        self._nbytes = Counter(
            "kvferry_transfer_bytes", "Payload bytes that arrived.", _WAY, registry=self.registry
        )
        self._seconds = Histogram(
            "kvferry_transfer_seconds",
            "Seconds of the parts of transfers that ended well.",
            (*_WAY, "part"),
            buckets=_BUCKETS,
            registry=self.registry,
        )

    def __call__(self, ended: Ended) -> None:
        """Count one transfer."""
        record = ended.record
        way = (record.role, record.mode, record.transport or "none")
        outcome = "ok" if ended.error is None else ended.error.kind
        self._ended.labels(*way, record.path or "none", outcome).inc()
        self._nbytes.labels(*way).inc(record.nbytes)
        if ended.error is None:
            for part in _PARTS:
                self._seconds.labels(*way, part).observe(getattr(record.timings, part))

    def watch(self, stats: Callable[[], Stats | None]) -> None:
        """Show what ``stats`` says at each scrape, usually ``endpoint.stats``; None: no endpoint now."""
        self.show(lambda: _holds(stats))

    def show(self, read: Callable[[], Iterable[Sample]]) -> None:
        """Show these numbers too, read at each scrape."""
        self.registry.register(Samples(read))

    def text(self) -> bytes:
        """What a scrape gets, of type CONTENT_TYPE."""
        return generate_latest(self.registry)


def _holds(stats: Callable[[], Stats | None]) -> Iterable[Sample]:
    says = "1 while the endpoint's node answers."
    try:
        now = stats()
    except KVFerryError:
        return [Sample("kvferry_endpoint_up", says, 0)]
    if now is None:
        return []
    return [
        Sample("kvferry_endpoint_up", says, 1),
        Sample("kvferry_transfers_in_flight", "Transfers under way.", now.transfers),
        Sample("kvferry_leases_held", "Offers and reservations that nobody has claimed.", now.holds),
        Sample("kvferry_copies_in_flight", "Copies that run now.", now.copies),
        Sample("kvferry_peers_connected", "Connections to peers.", now.peers),
        Sample("kvferry_registration_seconds", "What registering the pool took.", now.registration_seconds),
    ]
