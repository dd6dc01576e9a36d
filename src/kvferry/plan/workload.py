"""A workload as lengths and a rate: what the closed forms need to know of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.trace import TraceRow

__all__ = ["prompt_lengths", "representative"]


def prompt_lengths(rows: Iterable[TraceRow]) -> NDArray[np.int64]:
    """The prompts' tokens."""
    return np.fromiter((row.prompt_tokens for row in rows), dtype=np.int64)


def representative(lengths: NDArray[np.int64], count: int = 1024) -> NDArray[np.int64]:
    """At most ``count`` lengths that stand for all: the means of as many equal shares of the sorted ones."""
    ordered = np.sort(lengths)
    if len(ordered) <= count:
        return ordered
    sums = np.concatenate([[0], np.cumsum(ordered)])
    borders = np.linspace(0, len(ordered), count + 1)
    shares = np.diff(np.interp(borders, np.arange(len(ordered) + 1), sums))
    return np.asarray(np.rint(shares * count / len(ordered)), dtype=np.int64)
