"""A workload as lengths and a rate: what the closed forms need to know of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from kvferry.plan.trace import TraceRow

__all__ = ["FEW", "prompt_lengths", "representative"]

FEW = 0.01
"""The share of a workload that may lie too far beyond what was measured."""


def prompt_lengths(rows: Iterable[TraceRow]) -> NDArray[np.int64]:
    """The prompts' tokens."""
    return np.fromiter((row.prompt_tokens for row in rows), dtype=np.int64)


def representative(lengths: NDArray[np.int64], count: int = 1024) -> NDArray[np.int64]:
    """As many lengths in the same order, but at most ``count`` different ones.

    Each becomes the mean of its share, the sorted lengths being cut into ``count`` equal shares.
    """
    if len(lengths) <= count:
        return lengths
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    sums = np.concatenate([[0], np.cumsum(ordered)])
    borders = np.linspace(0, len(ordered), count + 1)
    shares = np.diff(np.interp(borders, np.arange(len(ordered) + 1), sums))
    means = np.asarray(np.rint(shares * count / len(ordered)), dtype=np.int64)
    found = np.empty_like(lengths)
    found[order] = means[np.minimum(np.arange(len(ordered)) * count // len(ordered), count - 1)]
    return found
