"""Charts of what ``check`` and ``demo`` answered: where the time goes, and where the answer flips."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.report.chart import COLOURS, GREY, Chart, Section, plain
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = ["check_section", "demo_section"]

_VERDICTS = ("does not hold", "unknown", "holds")
_VERDICT_COLOURS = (COLOURS[5], GREY, COLOURS[0])


def check_section(found: Mapping[str, Any], source: str) -> Section:
    """The TTFT waterfall, the break-even chart, and the flips as a table."""
    charts = (_waterfall(found), _break_even(found))
    flips = tuple(flip["says"] for flip in found.get("flips", {}).values())
    return Section(f"Does it pay: {found['model']}", source, charts, (*flips, *found.get("warnings", ())))


def _waterfall(found: Mapping[str, Any]) -> Chart:
    parts = [
        (name.removesuffix("_seconds").replace("_", " "), value) for name, value in found["split"].items()
    ]
    total, target = found["ttft_seconds"], found["target_seconds"]
    figure = _bars_in_turn(parts, "seconds")
    figure["layout"]["shapes"] = [
        {
            "type": "line",
            "x0": target,
            "x1": target,
            "yref": "paper",
            "y0": 0,
            "y1": 1,
            "line": {"dash": "dash"},
        }
    ]
    figure["layout"]["annotations"] = [
        {
            "x": target,
            "yref": "paper",
            "y": 1.06,
            "text": f"target {format_seconds(target)}",
            "showarrow": False,
        }
    ]
    rows = [(name, _seconds(value)) for name, value in parts]
    rows += [("TTFT", _seconds(total)), ("target", _seconds(target))]
    return Chart(
        "Time to the first token",
        figure,
        f"{found['prompt_tokens']:,} prompt tokens, {found['cached_tokens']:,} of them cached, "
        f"{format_bytes(found['wire_bytes'])} over {found['link']} ({found['link_label']}): "
        f"{found['verdict']}; what binds: {found['binding']}.",
        ("part", "seconds"),
        rows,
        bool(found["is_measured"]),
    )


def _break_even(found: Mapping[str, Any]) -> Chart:
    grid = found["break_even"]
    lengths, shares = grid["prompt_tokens"], grid["cached_shares"]
    numbers = [[_VERDICTS.index(verdict) for verdict in row] for row in grid["verdicts"]]
    # Each colour from its third's beginning to its end, so that the legend has three fields and no blends.
    steps = [[(at + end) / 3, colour] for at, colour in enumerate(_VERDICT_COLOURS) for end in (0, 1)]
    figure = {
        "data": [
            {
                "type": "heatmap",
                "x": [f"{tokens:,}" for tokens in lengths],
                "y": [f"{share:.0%}" for share in shares],
                "z": numbers,
                "zmin": 0,
                "zmax": 2,
                "xgap": 2,
                "ygap": 2,
                "colorscale": steps,
                "colorbar": {"tickvals": [1 / 3, 1, 5 / 3], "ticktext": list(_VERDICTS)},
                "hovertemplate": "%{x} tokens, %{y} cached<extra></extra>",
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "prompt tokens"}, "type": "category"},
            "yaxis": {"title": {"text": "prefix-hit share"}, "type": "category"},
            "height": 420,
        },
    }
    rows = [(f"{share:.0%}", *verdicts) for share, verdicts in zip(shares, grid["verdicts"], strict=True)]
    return Chart(
        "Where the promise holds",
        figure,
        f"The TTFT promise of {format_seconds(found['target_seconds'])} over {found['link']}, by prompt "
        f"length and share of the prompt that decode holds already; all else as asked.",
        ("prefix-hit share", *(f"{tokens:,} tokens" for tokens in lengths)),
        rows,
        bool(found["is_measured"]),
    )


def demo_section(found: Mapping[str, Any], source: str) -> Section:
    """The timing split of one handoff."""
    parts = [(name.replace("_", " "), value) for name, value in found["timings"].items() if name != "total"]
    moved = (
        f"{found['model']}, {found['prompt_tokens']:,} prompt tokens; "
        f"{format_bytes(found['payload_bytes'])} in {found['blocks']:,} blocks "
        f"and {format_bytes(found['state_bytes'])} of state by "
        f"{found['transport_used']} ({found['path']}), {found['mode']}, "
        f"{format_rate(found['bytes_per_second'])}."
    )
    same = "identical to one process" if found["identical"] else "NOT identical to one process"
    charts = [
        Chart(
            "Timing split of a handoff",
            _bars_in_turn(parts, "seconds"),
            f"{moved} {found['output_tokens']} tokens, {same}.",
            ("part", "seconds"),
            [(name, _seconds(value)) for name, value in parts],
            True,
        )
    ]
    without = [part for part in parts if part[0] != "prefill"]
    if len(without) < len(parts):
        charts.append(
            Chart(
                "The same without prefill",
                _bars_in_turn(without, "seconds"),
                "What the move itself costs the request.",
                ("part", "seconds"),
                [(name, _seconds(value)) for name, value in without],
                True,
            )
        )
    return Section("Move it: one handoff", source, tuple(charts))


def _bars_in_turn(parts: list[tuple[str, Any]], unit: str) -> dict[str, Any]:
    """Bars that begin where the one before ended."""
    base, starts = 0.0, []
    for _, value in parts:
        starts.append(base)
        base += value or 0.0
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "y": [plain(name) for name, _ in parts],
                "x": [value or 0.0 for _, value in parts],
                "base": starts,
                "text": [_seconds(value) for _, value in parts],
                "textposition": "outside",
                "cliponaxis": False,
                "marker": {"color": COLOURS[0]},
                "hovertemplate": "%{y}: %{text}<extra></extra>",
            }
        ],
        "layout": {
            "yaxis": {"autorange": "reversed", "type": "category"},
            "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
            "height": 120 + 42 * len(parts),
        },
    }


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)
