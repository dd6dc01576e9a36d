"""Rows of measured times -> a compute profile: non-negative least squares with relative weights.

Relative weights, because a law that is 1 % off at 8,192 tokens and 50 % off at 128 serves nobody;
non-negative, because a negative coefficient turns into a negative time outside the measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.plan.compute import (
    ComputeProfile,
    DecodeLaw,
    MeasuredRange,
    PrefillLaw,
    PrefillTable,
    check_profile,
)

__all__ = ["MAX_LAW_ERROR", "ComputeSample", "fit_profile", "non_negative_fit"]

MAX_LAW_ERROR = 0.15
"""A prefill law that misses a measurement by more than this is not used; the table is."""


class ComputeSample(msgspec.Struct, frozen=True):
    """One measured step.

    Args:
        is_prefill: a prefill of ``batch`` prompts, or one decode step of ``batch`` requests.
        batch: requests in the step, all alike.
        tokens: tokens of each prompt, or the context of each request.
        seconds: the measured time.
    """

    is_prefill: bool
    batch: int
    tokens: float
    seconds: float


def non_negative_fit(
    matrix: NDArray[np.float64], seconds: NDArray[np.float64]
) -> tuple[NDArray[np.float64], float]:
    """Coefficients of least relative error, none below 0, and the largest relative error left.

    The best of the unconstrained fits over all subsets of columns that come out non-negative: for
    three columns these are seven small fits, and the optimum is one of them.
    """
    weighted = matrix / seconds[:, None]
    scale = np.abs(weighted).max(axis=0)
    scale[scale == 0] = 1
    ones = np.ones(len(seconds))
    best, best_error = np.zeros(matrix.shape[1]), float("inf")
    columns = range(matrix.shape[1])
    for size in range(1, matrix.shape[1] + 1):
        for subset in combinations(columns, size):
            part = weighted[:, subset] / scale[list(subset)]
            found, *_ = np.linalg.lstsq(part, ones, rcond=None)
            error = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < best_error - 1e-15:
                best = np.zeros(matrix.shape[1])
                best[list(subset)] = found / scale[list(subset)]
                best_error = error
    return best, float(np.abs(weighted @ best - 1).max())


def fit_profile(
    samples: Sequence[ComputeSample],
    *,
    model: str,
    gpu: str,
    tp: int,
    pp: int = 1,
    source: str = "",
) -> ComputeProfile:
    """The profile of one instance from its measured steps; repeats of one point count by their median.

    The prefill law is kept where it meets every measurement within :data:`MAX_LAW_ERROR`;
    else the measurements themselves, as a table over the tokens of a batch, made non-decreasing.
    Raises InputError where a phase has too few distinct measurements.
    """
    prefill_points = _medians([sample for sample in samples if sample.is_prefill])
    decode_points = _medians([sample for sample in samples if not sample.is_prefill])
    prefill, prefill_error = _fit_prefill(prefill_points)
    if len({(batch, tokens) for batch, tokens, _ in decode_points}) < 3:
        raise InputError("decode: needs measured steps at three or more points of batch and context")
    batch, tokens, seconds = _columns(decode_points)
    rows = np.column_stack([np.ones_like(batch), batch * tokens, batch])
    (a, b, c), decode_error = non_negative_fit(rows, seconds)
    lengths = [tokens for _, tokens, _ in prefill_points]
    return check_profile(
        ComputeProfile(
            model=model,
            gpu=gpu,
            tp=tp,
            pp=pp,
            prefill=prefill,
            decode=DecodeLaw(float(a), float(b), float(c)),
            worst_error=max(prefill_error, decode_error),
            covers=MeasuredRange(int(min(lengths)), int(max(lengths)), int(batch.max())),
            source=source,
        )
    )


def _fit_prefill(points: Sequence[tuple[int, float, float]]) -> tuple[PrefillLaw | PrefillTable, float]:
    if len({batch * tokens for batch, tokens, _ in points}) < 3:
        raise InputError("prefill: needs measured prompts at three or more lengths")
    batch, tokens, seconds = _columns(points)
    rows = np.column_stack([np.ones_like(batch), batch * tokens, batch * tokens**2])
    (a, b, c), error = non_negative_fit(rows, seconds)
    if error <= MAX_LAW_ERROR:
        return PrefillLaw(float(a), float(b), float(c)), error
    return _table(points)


def _table(points: Sequence[tuple[int, float, float]]) -> tuple[PrefillTable, float]:
    """One time for each number of tokens in a step, and how far any measurement is from it.

    Where several batches have as many tokens, the one of the fewest and longest prompts counts.
    """
    at: dict[int, float] = {}
    for batch, tokens, seconds in sorted(points):
        at.setdefault(round(batch * tokens), seconds)
    totals = sorted(at)
    rising = np.maximum.accumulate([at[total] for total in totals])
    table = PrefillTable(tuple(totals), tuple(float(value) for value in rising))
    misses = [abs(table.seconds(round(batch * tokens)) / seconds - 1) for batch, tokens, seconds in points]
    return table, max(misses)


def _medians(samples: Sequence[ComputeSample]) -> list[tuple[int, float, float]]:
    by_point: dict[tuple[int, float], list[float]] = {}
    for sample in samples:
        if sample.batch < 1 or sample.tokens < 1 or not 0 < sample.seconds < float("inf"):
            raise InputError(f"seconds: {sample} is not a measurement")
        by_point.setdefault((sample.batch, sample.tokens), []).append(sample.seconds)
    return [(batch, tokens, median(times)) for (batch, tokens), times in sorted(by_point.items())]


def _columns(
    points: Sequence[tuple[int, float, float]],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    batch, tokens, seconds = np.array(points, dtype=np.float64).T
    return batch, tokens, seconds
