"""``kvferry plan --plot``: goodput per GPU of each candidate, its bound behind it."""

from __future__ import annotations

from kvferry.cli.output import Picture
from kvferry.plan.choose import PlanResult

__all__ = ["draw_plan"]

_MOST = 16


def draw_plan(picture: Picture, result: PlanResult) -> None:
    """Write the picture: bars of goodput, outlined bounds, unmeasured ones hatched, the choice dark.

    Raises InputError where the file cannot be written.
    """
    rows = [row for row in result.rows if row.goodput_per_gpu is not None][:_MOST][::-1]
    figure = picture.figure(9, 1.5 + 0.35 * len(rows))
    axes = figure.add_subplot()
    for at, row in enumerate(rows):
        colour = "C0" if row.number == result.choice else "C7"
        axes.barh(at, row.candidate.capacity.per_gpu, color="none", edgecolor="0.6")
        hatch = None if row.is_measured else "///"
        axes.barh(at, row.goodput_per_gpu or 0.0, color=colour, hatch=hatch, edgecolor="white")
    axes.set_yticks(range(len(rows)), [row.candidate.name for row in rows], fontsize=8)
    axes.set_xlabel(
        "good requests a second per GPU\noutline: bound by means; hatched: unmeasured link or compute"
    )
    axes.grid(visible=True, axis="x", alpha=0.3)
    picture.save(figure)
