"""Least squares with no negative coefficient, exact, for the few columns that a link has."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

__all__ = ["MAX_COLUMNS", "nonnegative"]

MAX_COLUMNS = 4
_TINY = 1e-12


def nonnegative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """The ``x >= 0`` that makes ``|matrix x - target|`` smallest.

    ``matrix`` is [rows, columns] with at most :data:`MAX_COLUMNS` columns, none of them zero.
    The optimum is the unconstrained one on the columns where it is positive, so trying every set of
    columns finds it: 7 small systems for 3 columns, no iteration, no tolerance to stop at.
    """
    columns = matrix.shape[1]
    assert columns <= MAX_COLUMNS
    norms = np.linalg.norm(matrix, axis=0)
    scaled = matrix / norms
    best, least = np.zeros(columns), float(np.linalg.norm(target))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            some = scaled[:, list(chosen)]
            found = np.linalg.lstsq(some, target, rcond=None)[0]
            rest = float(np.linalg.norm(some @ found - target))
            # A larger set must earn its place, or rounding would put dust where a zero belongs.
            if found.min() >= 0 and rest < least * (1 - _TINY):
                least = rest
                best = np.zeros(columns)
                best[list(chosen)] = found
    return np.asarray(best / norms, np.float64)
