"""Charts of a plan's candidates and of simulated runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvferry.report.chart import COLOURS, GREY, Chart, Section, plain
from kvferry.units import format_seconds

__all__ = ["plan_section", "records_section", "simulation_section"]

_MOST_CANDIDATES = 24
_QUANTILES = ("p50", "p90", "p95", "p99")
# A curve of a million requests is drawn by so many of its quantiles.
_CURVE_POINTS = 400


def plan_section(found: Mapping[str, Any], source: str) -> Section:
    """Goodput per GPU of each candidate, with what limits it."""
    rows = [row for row in found["candidates"] if row.get("goodput_per_gpu") is not None]
    shown = rows[:_MOST_CANDIDATES]
    figure = {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": "bound by means",
                "y": [_candidate(row) for row in shown],
                "x": [row.get("bound_per_gpu") or 0.0 for row in shown],
                "marker": {"color": "rgba(0,0,0,0)", "line": {"color": GREY, "width": 1}},
                "hovertemplate": "bound %{x:.3g}<extra></extra>",
            },
            {
                "type": "bar",
                "orientation": "h",
                "name": "goodput",
                "y": [_candidate(row) for row in shown],
                "x": [row["goodput_per_gpu"] for row in shown],
                "text": [plain(row.get("limit", "")) for row in shown],
                "marker": {
                    "color": [
                        COLOURS[0] if row["number"] == found["choice"] else COLOURS[4] for row in shown
                    ],
                    "pattern": {"shape": ["" if row["is_measured"] else "/" for row in shown]},
                },
                "hovertemplate": "%{y}<br>%{x:.3g} a second per GPU<br>%{text}<extra></extra>",
            },
        ],
        "layout": {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "good requests a second per GPU"}},
            "yaxis": {"autorange": "reversed", "type": "category", "automargin": True},
            "height": 160 + 30 * len(shown),
        },
    }
    table = [
        (
            row["name"],
            f"{row['goodput_per_gpu']:.3g}",
            _share(row.get("ttft_attainment")),
            _share(row.get("tpot_attainment")),
            row.get("limit") or "",
            "measured" if row["is_measured"] else "unmeasured",
        )
        for row in rows
    ]
    chart = Chart(
        "Candidates",
        figure,
        f"{found['reason']} Dark is the choice; hatched rests on an unmeasured link.",
        ("candidate", "goodput per GPU", "TTFT kept", "TPOT kept", "limit", "links"),
        table,
        all(row["is_measured"] for row in rows) if rows else None,
    )
    heading = f"Where, and how many: {found['cluster']}, {found['gpus']} GPUs"
    return Section(heading, source, (chart,), tuple(found.get("warnings", ())))


def simulation_section(found: Mapping[str, Any], source: str) -> Section:
    """TTFT and TPOT percentiles of one run or of a sweep."""
    runs: Sequence[Mapping[str, Any]] = found.get("runs", [found])
    charts = tuple(_percentiles(runs, name) for name in ("ttft", "tpot"))
    return Section("Simulated: percentiles", source, charts)


def _percentiles(runs: Sequence[Mapping[str, Any]], name: str) -> Chart:
    labels = [_scenario(run) for run in runs]
    figure = {
        "data": [
            {
                "type": "bar",
                "name": quantile,
                "x": labels,
                "y": [(run[name] or {}).get(quantile) for run in runs],
                "marker": {"color": COLOURS[number]},
                "hovertemplate": quantile + " %{y:.3g} s<extra></extra>",
            }
            for number, quantile in enumerate(_QUANTILES)
        ],
        "layout": {"barmode": "group", "yaxis": {"title": {"text": "seconds"}}, "height": 400},
    }
    rows = [
        (
            label,
            *("" if not run[name] else format_seconds(run[name][quantile]) for quantile in _QUANTILES),
            _share(run.get(f"{name}_attainment")),
            f"{run['done']:,} of {run['requests']:,}",
        )
        for label, run in zip(labels, runs, strict=True)
    ]
    return Chart(
        f"{name.upper()} by run",
        figure,
        "Simulated; the requests, policies and failures are those of the scenario.",
        ("run", *_QUANTILES, "kept", "done"),
        rows,
        all(run["is_measured"] for run in runs),
    )


def records_section(columns: Mapping[str, Sequence[Any]], source: str) -> Section:
    """The whole distributions of TTFT and TPOT from per-request records."""
    charts = []
    for name, colour in (("ttft_seconds", COLOURS[0]), ("tpot_seconds", COLOURS[1])):
        values = np.array([value for value in columns[name] if value is not None], np.float64)
        shares = np.linspace(0, 1, min(_CURVE_POINTS, max(2, len(values))))
        curve = np.quantile(values, shares) if len(values) else np.zeros(0)
        figure = {
            "data": [
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": [float(value) for value in curve],
                    "y": [float(share) for share in shares[: len(curve)]],
                    "line": {"color": colour},
                    "hovertemplate": "%{y:.1%} within %{x:.3g} s<extra></extra>",
                }
            ],
            "layout": {
                "xaxis": {"title": {"text": name.replace("_", " ")}, "type": "log"},
                "yaxis": {"title": {"text": "share of requests"}, "tickformat": ".0%"},
                "height": 380,
            },
        }
        quantiles = (0.5, 0.9, 0.95, 0.99)
        row = [format_seconds(float(np.quantile(values, q))) if len(values) else "" for q in quantiles]
        charts.append(
            Chart(
                f"{name.split('_')[0].upper()} of every request",
                figure,
                f"{len(values):,} of {len(columns[name]):,} requests have one.",
                ("p50", "p90", "p95", "p99"),
                [row],
            )
        )
    return Section("Simulated: every request", source, tuple(charts))


def _candidate(row: Mapping[str, Any]) -> str:
    return plain(f"{row['number']}. {row['name']}")


def _scenario(run: Mapping[str, Any]) -> str:
    scenario = run["scenario"]
    rate = "" if scenario.get("rate") is None else f", {scenario['rate']:g}/s"
    kills = "".join(f", {kill}" for kill in scenario.get("kills", ()))
    return plain(f"{scenario['policy']}{rate}{kills}")


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
