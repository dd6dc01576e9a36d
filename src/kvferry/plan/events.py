"""A clock that goes from event to event: a heap of (time, order, what to call, with what)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

Call = Callable[[float, Any], None]


class Events:
    """Events in order of time; those of one moment in the order in which they were asked for.

    An event cannot be taken back: who asked for it knows by a version when it is out of date.
    """

    __slots__ = ("_heap", "_order")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Call, Any]] = []
        self._order = 0

    def at(self, seconds: float, call: Call, argument: Any) -> None:
        """Call ``call(seconds, argument)`` when the clock gets there."""
        self._order += 1
        heapq.heappush(self._heap, (seconds, self._order, call, argument))

    @property
    def next_seconds(self) -> float:
        """When the next one is; infinite when there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def run_next(self) -> float:
        """Do the next one; returns its time."""
        seconds, _, call, argument = heapq.heappop(self._heap)
        call(seconds, argument)
        return seconds
