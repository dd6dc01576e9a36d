"""Parts of a handoff as a trace that Chrome (about:tracing) and Perfetto (ui.perfetto.dev) open.

The format is the Trace Event Format's JSON object form: complete events, microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["trace_of"]


def trace_of(lanes: Sequence[tuple[str, Mapping[str, float]]], about: Mapping[str, Any]) -> dict[str, Any]:
    """One lane (name, parts in order with their seconds) below the other; ``about`` is kept beside them."""
    events: list[dict[str, Any]] = []
    for lane, (name, parts) in enumerate(lanes, 1):
        events.append({"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": name}})
        at = 0.0
        for part, seconds in parts.items():
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": lane,
                    "name": part,
                    "cat": "kvferry",
                    "ts": at * 1e6,
                    "dur": seconds * 1e6,
                }
            )
            at += seconds
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {k: str(v) for k, v in about.items()},
    }
