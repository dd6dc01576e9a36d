"""``kvferry plan --plot``: goodput per GPU of each candidate, its bound behind it."""

from __future__ import annotations

from pathlib import Path

from kvferry.errors import InputError
from kvferry.plan.choose import PlanResult

__all__ = ["draw_plan"]

_MOST = 16


def draw_plan(path: Path, result: PlanResult) -> None:
    """Write the picture: bars of goodput, outlined bounds, unmeasured ones hatched, the choice dark.

    Raises InputError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plot: needs matplotlib; pip install 'kvferry[plot]'") from error
    rows = [row for row in result.rows if row.goodput_per_gpu is not None][:_MOST][::-1]
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        colour = "C0" if row.number == result.choice else "C7"
        axes.barh(at, row.candidate.capacity.per_gpu, color="none", edgecolor="0.6")
        hatch = None if row.is_measured else "///"
        axes.barh(at, row.goodput_per_gpu or 0.0, color=colour, hatch=hatch, edgecolor="white")
    axes.set_yticks(range(len(rows)), [row.candidate.name for row in rows], fontsize=8)
    axes.set_xlabel("good requests a second per GPU\noutline: bound by means; hatched: unmeasured link")
    axes.grid(visible=True, axis="x", alpha=0.3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"plot: cannot write {path}: {error}") from error
