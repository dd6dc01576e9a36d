"""One line through measured points: least squares of log(measured / predicted), no negative coefficient.

All points weigh the same relative to their own time, because a plan needs 4 KiB and 4 GiB copies
within the same percentage; twice too slow and twice too fast are equally wrong, so noise does not
bend the line (a fit of predicted / measured is 7 % too fast where points scatter by 25 %).
A parameter that the points do not tell apart from the others is None.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.link.points import Floats, Points
from kvferry.link.records import Line
from kvferry.link.solve import least_log_squares
from kvferry.link.words import significant

__all__ = ["CLOSE", "fit_line", "has_evidence", "sum_line"]

_SEPARABLE = 0.01
"""A column of which the others leave less than this part unexplained is not told apart from them."""
_SEEN = 0.01
"""A rate whose bytes never make this part of a copy's time was not seen."""

CLOSE = 0.05
"""A line that misses no point by more than this needs no other form and no second regime."""
_MUCH = 10.0


def has_evidence(before: float, after: float, count: int, parameters: int) -> bool:
    """Whether a form that leaves ``after`` (sums of squares) in place of ``before`` is beyond doubt.

    The difference of Bayesian information criteria is above 10: "very strong", Kass and Raftery 1995.
    """
    return bool(count * np.log(before / max(after, 1e-30)) - parameters * np.log(count) > _MUCH)


def fit_line(points: Points) -> Line:
    """The best line; that of overlapping costs where the points say so beyond doubt.

    NICs post the next descriptor while the bytes of the last are on the wire, so the larger of the
    two costs counts; memory copies and plain sockets pay both.
    """
    line = sum_line(points)
    misses = points.misses(line)
    if np.abs(misses).max() <= CLOSE or not line.o_seconds or line.bytes_per_second is None:
        return line
    other = _overlap_line(points)
    if other is None:
        return line
    rest = points.misses(other)
    return other if has_evidence(float(misses @ misses), float(rest @ rest), len(points), 0) else line


def sum_line(points: Points) -> Line:
    """The best line in which both costs are paid."""
    columns = {"a": np.ones(len(points)), "o": points.descriptors, "B": points.nbytes}
    # Where descriptors follow bytes, their cost cannot be told from the rate: it stays inside it.
    for name in ("o", "B"):
        others = [columns[other] / points.seconds for other in columns if other != name]
        if not _is_told_from(columns[name] / points.seconds, others):
            del columns[name]
    costs = _solve(columns, points)
    if "B" in costs and (costs["B"] * columns["B"] / points.seconds).max() < _SEEN:
        del columns["B"]
        costs = _solve(columns, points)
    return _line(costs)


def _overlap_line(points: Points) -> Line | None:
    """``T = a + max(o*descriptors, nbytes/B)``; which term counts depends on the size of a piece only."""
    pieces = points.nbytes / points.descriptors
    best, least = None, np.inf
    for edge in np.unique(pieces)[1:]:
        line = _overlap_at(points, pieces < edge)
        if line is not None:
            misses = points.misses(line)
            if (rest := float(misses @ misses)) < least:
                best, least = line, rest
    return best


def _overlap_at(points: Points, small: NDArray[np.bool_]) -> Line | None:
    if min(small.sum(), (~small).sum()) < 2:
        return None
    columns = {
        "a": np.ones(len(points)),
        "o": np.where(small, points.descriptors, 0.0),
        "B": np.where(small, 0.0, points.nbytes),
    }
    costs = _solve(columns, points)
    if not costs["o"] or not costs["B"]:
        return None
    return _line(costs, descriptors_overlap=True)


def _line(costs: dict[str, float], *, descriptors_overlap: bool = False) -> Line:
    return Line(
        a_seconds=significant(costs["a"]),
        o_seconds=significant(costs["o"]) if "o" in costs else None,
        bytes_per_second=significant(1 / costs["B"]) if "B" in costs else None,
        descriptors_overlap=descriptors_overlap,
    )


def _solve(columns: dict[str, Floats], points: Points) -> dict[str, float]:
    found = least_log_squares(np.column_stack(list(columns.values())), points.seconds)
    return dict(zip(columns, found.tolist(), strict=True))


def _is_told_from(column: Floats, others: list[Floats]) -> bool:
    """Whether a part of the column is none of the others' combinations."""
    basis = np.column_stack([other / np.linalg.norm(other) for other in others])
    rest = column - basis @ np.linalg.lstsq(basis, column, rcond=None)[0]
    return bool(np.linalg.norm(rest) > _SEPARABLE * np.linalg.norm(column))
