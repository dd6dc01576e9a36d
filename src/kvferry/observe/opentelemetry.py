"""OpenTelemetry spans: one a transfer, and one for each of its parts. API only; the SDK is yours."""

from __future__ import annotations

import time

from kvferry.errors import KVFerryError, LocalError
from kvferry.transfer import Ended

try:
    from opentelemetry import trace
except ImportError as error:
    raise LocalError("spans: needs opentelemetry-api", next_step="pip install 'kvferry[otel]'") from error

__all__ = ["Spans"]

# The order in which a side goes through them; ``copy`` lies inside ``move``.
_PARTS = ("handshake", "claim", "move", "verify", "commit")


class Spans:
    """An observer. Spans are made when a transfer has ended, with the times that it took."""

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._tracer = trace.get_tracer("kvferry", tracer_provider=provider)

    def __call__(self, ended: Ended) -> None:
        """One transfer as a span with its parts as children, which end now."""
        record, timings = ended.record, ended.record.timings
        end = time.time_ns()
        at = end - int(timings.total * 1e9)
        span = self._tracer.start_span(
            f"kvferry {record.role} {record.mode}",
            start_time=at,
            attributes={
                "kvferry.request_id": record.request_id,
                "kvferry.peer": record.peer,
                "kvferry.transport": record.transport,
                "kvferry.path": record.path,
                "kvferry.payload_bytes": record.nbytes,
                "kvferry.descriptors": record.descriptors,
            },
        )
        parent = trace.set_span_in_context(span)
        for part in _PARTS:
            seconds = getattr(timings, part)
            if seconds > 0:
                child = self._tracer.start_span(f"kvferry {part}", context=parent, start_time=at)
                at += int(seconds * 1e9)
                child.end(end_time=at)
        if ended.error is not None:
            span.record_exception(KVFerryError.from_record(ended.error))
            span.set_status(trace.StatusCode.ERROR, ended.error.message)
        span.end(end_time=end)
