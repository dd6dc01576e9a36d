"""The proxy's numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest

from kvferry.observe.samples import Sample, Samples
from kvferry.proxy.state import EVENTS, ProxyState

__all__ = ["metrics_of"]


def metrics_of(state: ProxyState) -> Callable[[], bytes]:
    """What a scrape gets."""
    registry = CollectorRegistry()
    registry.register(Samples(lambda: _samples(state)))
    return lambda: generate_latest(registry)


def _samples(state: ProxyState) -> Iterable[Sample]:
    for event in EVENTS:
        says, value = "What became of requests, as /health counts it.", state.counted(event)
        yield Sample("kvferry_proxy_events_total", says, value, (("event", event),), is_total=True)
    for role, workers in (("prefill", state.workers.prefill), ("decode", state.workers.decode)):
        for worker in workers:
            labels = (("role", role), ("worker", worker.place.url))
            yield Sample("kvferry_proxy_worker_requests", "Under way at a worker.", worker.requests, labels)
            yield Sample("kvferry_proxy_worker_tokens", "Prompt tokens under way.", worker.tokens, labels)
            for name, says, value in (
                ("kvferry_proxy_worker_answers_total", "Requests that it answered whole.", worker.answered),
                ("kvferry_proxy_worker_failures_total", "Times that it failed.", worker.failed),
            ):
                yield Sample(name, says, value, labels, is_total=True)
