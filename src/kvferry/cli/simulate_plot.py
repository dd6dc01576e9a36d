"""``kvferry simulate --plot``: TTFT and TPOT percentiles of each run."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.cli.output import Picture
from kvferry.cli.sweep import Scenario
from kvferry.plan.sim_result import Result

__all__ = ["draw_runs"]

_SHADES = (("p50", "C0"), ("p90", "C1"), ("p99", "C3"))


def draw_runs(picture: Picture, scenarios: Sequence[Scenario], results: Sequence[Result]) -> None:
    """Write the picture: one group of bars a run, TTFT above, TPOT below.

    Raises InputError where the file cannot be written.
    """
    figure = picture.figure(max(6.0, 1.5 + 1.2 * len(results)), 6)
    names = [s.policy + ("" if s.rate is None else f"\n{s.rate:g}/s") for s in scenarios]
    for panel, field in enumerate(("ttft", "tpot")):
        axes = figure.add_subplot(2, 1, panel + 1)
        for offset, (name, colour) in enumerate(_SHADES):
            heights = [getattr(getattr(result, field), name) or 0.0 for result in results]
            places = [at + 0.27 * (offset - 1) for at in range(len(results))]
            axes.bar(places, heights, 0.25, color=colour, label=name)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_ylabel(f"{field.upper()}, s")
        axes.grid(visible=True, axis="y", alpha=0.3)
        axes.legend(fontsize=8)
    picture.save(figure)
