"""Least squares with no negative coefficient, of values and of logarithms, for the few columns of a link."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_COLUMNS", "least_log_squares", "nonnegative"]

MAX_COLUMNS = 4
_STEPS = 12
_SETTLED = 1e-9


def nonnegative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``x >= 0`` that makes ``|matrix x - target|`` smallest.

    ``matrix`` is [rows, columns] with at most :data:`MAX_COLUMNS` columns, none of them zero.
    The optimum is the unconstrained one on the columns where it is positive, so trying every set of
    columns finds it: 7 small systems for 3 columns at most, and one where that has no negative.
    """
    columns = matrix.shape[1]
    assert columns <= MAX_COLUMNS
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / norms
    best, least = np.zeros(columns), float(np.linalg.norm(target))
    for count in range(columns, 0, -1):
        for chosen in itertools.combinations(range(columns), count):
            some = scaled[:, list(chosen)]
            found = np.linalg.lstsq(some, target, rcond=None)[0]
            if found.min() < 0:
                continue
            rest = float(np.linalg.norm(some @ found - target))
            if rest < least:
                least = rest
                best = np.zeros(columns)
                best[list(chosen)] = found
            if count == columns:
                return np.asarray(best / norms, np.float64)
    return np.asarray(best / norms, np.float64)


def least_log_squares(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``x >= 0`` that makes the squares of ``log(seconds / (columns x))`` smallest.

    ``columns`` is [rows, columns], ``seconds`` is [rows], all positive. Gauss-Newton steps from the fit
    of relative errors; the best step is kept, so the result is never worse than that start. It settles
    in three to five steps.
    """
    found = nonnegative(columns / seconds[:, None], np.ones(len(seconds)))
    best, least = found, np.inf
    for _ in range(_STEPS):
        predicted = columns @ found
        if predicted.min() <= 0:
            break
        misses = np.log(seconds / predicted)
        squares = float(misses @ misses)
        if squares >= least * (1 - _SETTLED):
            break
        best, least = found, squares
        found = nonnegative(columns / predicted[:, None], 1 + misses)
    return best
