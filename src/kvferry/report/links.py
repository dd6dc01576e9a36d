"""Charts of a link file: the matrix of pairs, and each pair's curve with its fit and error."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

from kvferry.errors import NoPlanError
from kvferry.link.profile import ConditionFit, LinkFile, LinkProfile
from kvferry.report.chart import COLOURS, Chart, Section, plain
from kvferry.units import format_bytes, format_rate, format_seconds

__all__ = ["links_section"]

# A page with hundreds of curves is no page; the matrix has all pairs.
_MOST_CURVES = 12
_MOST_SAMPLES = 400


def links_section(links: LinkFile, source: str) -> Section:
    """One matrix for each transport and set of conditions, curves of the first pairs, and the nodes."""
    charts = [*_matrices(links), *_curves(links)]
    left = len(links.pairs) - _MOST_CURVES
    notes = [f"Curves of the first {_MOST_CURVES} pairs; {left} more are in the matrix."] if left > 0 else []
    for node in links.nodes:
        facts = ", ".join(f"{name} {value}" for name, value in (node.software | node.facts).items())
        notes.append(f"{node.name} on {node.host}: {facts}")
    return Section("Links: how fast each pair of nodes is", source, tuple(charts), tuple(notes))


def _all_fits(links: LinkFile) -> list[tuple[str, LinkProfile, ConditionFit]]:
    named = [
        (f"{pair.transport}, {entry.conditions}", pair, entry) for pair in links.pairs for entry in pair.fits
    ]
    return sorted(named, key=lambda one: one[0])


def _matrices(links: LinkFile) -> Iterator[Chart]:
    for name, group in groupby(_all_fits(links), key=lambda one: one[0]):
        entries = [(pair, entry) for _, pair, entry in group]
        # A matrix of one cell says less than the curve beside it.
        if len(entries) > 1 or not entries[0][0].samples:
            yield _matrix(name, entries)


def _matrix(name: str, entries: list[tuple[LinkProfile, ConditionFit]]) -> Chart:
    sources = list(dict.fromkeys(pair.from_node for pair, _ in entries))
    targets = list(dict.fromkeys(pair.to_node for pair, _ in entries))
    rates: list[list[float | None]] = [[None] * len(targets) for _ in sources]
    words: list[list[str]] = [[""] * len(targets) for _ in sources]
    rows = []
    for pair, entry in entries:
        nbytes, seconds, p95 = _largest(entry)
        rate = None if seconds is None or not nbytes else nbytes / seconds
        at = sources.index(pair.from_node), targets.index(pair.to_node)
        rates[at[0]][at[1]] = None if rate is None else rate / 1e9
        shown = (
            format_bytes(nbytes),
            "unknown" if rate is None else format_rate(rate),
            "unknown" if p95 is None else format_seconds(p95),
        )
        words[at[0]][at[1]] = f"{shown[1]}<br>p95 {shown[2]} for {shown[0]}"
        rows.append((pair.from_node, pair.to_node, *shown, pair.path or "-", pair.label_of(entry)))
    figure = {
        "data": [
            {
                "type": "heatmap",
                "x": [plain(name) for name in targets],
                "y": [plain(name) for name in sources],
                "z": rates,
                "text": words,
                "hovertemplate": "%{y} to %{x}<br>%{text}<extra></extra>",
                "colorscale": "Cividis",
                "colorbar": {"title": {"text": "GB/s"}},
                **({"texttemplate": "%{z:.2f}"} if len(sources) <= 16 else {}),
            }
        ],
        "layout": {
            "xaxis": {"title": {"text": "to"}, "type": "category"},
            "yaxis": {"title": {"text": "from"}, "type": "category", "autorange": "reversed"},
            "height": 240 + 28 * len(sources),
        },
    }
    return Chart(
        f"Rate of the largest payload: {name}",
        figure,
        f"Pairs: {len(entries)}. Rate and p95 as the fit says for the largest payload that was measured.",
        ("from", "to", "payload", "rate", "p95", "path", "measured"),
        rows,
        all(pair.measured for pair, _ in entries),
    )


def _largest(entry: ConditionFit) -> tuple[int, float | None, float | None]:
    """The largest payload of a fit: bytes, typical seconds, p95 seconds."""
    fit = entry.fit
    nbytes = 1 << 30 if fit.nbytes is None else fit.nbytes.high
    block = 32 << 10 if fit.block_bytes is None else fit.block_bytes.high
    descriptors = max(1, nbytes // max(1, block))
    seconds = fit.at_least(nbytes, descriptors) or None
    try:
        return nbytes, seconds, fit.predict_quantile(0.95, nbytes, descriptors)
    except NoPlanError:
        return nbytes, seconds, None


def _curves(links: LinkFile) -> Iterator[Chart]:
    for pair in [pair for pair in links.pairs if pair.samples][:_MOST_CURVES]:
        traces: list[dict[str, Any]] = []
        rows = []
        for number, entry in enumerate(pair.fits):
            colour = COLOURS[number % len(COLOURS)]
            traces += _points(pair, entry, colour)
            rows.append(_fit_row(entry))
        figure = {
            "data": traces,
            "layout": {
                "xaxis": {"title": {"text": "payload, bytes"}, "type": "log"},
                "yaxis": {"title": {"text": "seconds of a whole handoff"}, "type": "log"},
                "height": 420,
            },
        }
        yield Chart(
            f"Size curve: {pair.pair}",
            figure,
            f"Points are single copies, {pair.label}; lines are T = a + o*descriptors + bytes/B with blocks "
            f"as in the samples.",
            ("conditions", "a", "o", "B", "worst error", "median error", "copies"),
            rows,
            pair.measured,
        )


def _points(pair: LinkProfile, entry: ConditionFit, colour: str) -> list[dict[str, Any]]:
    samples = [
        sample for sample in pair.samples if sample.conditions == entry.conditions and not sample.is_cold
    ]
    shown = samples[:: max(1, len(samples) // _MOST_SAMPLES)]
    shapes = sorted({(sample.nbytes, sample.descriptors) for sample in samples})
    name = plain(entry.conditions)
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": [sample.nbytes for sample in shown],
            "y": [sample.seconds for sample in shown],
            "text": [f"{sample.descriptors} descriptors" for sample in shown],
            "marker": {"color": colour, "size": 6, "opacity": 0.6},
            "hovertemplate": "%{x} bytes, %{text}<br>%{y:.3g} s<extra>" + name + "</extra>",
        }
    ]
    by_block: dict[int, list[tuple[int, int]]] = {}
    for nbytes, descriptors in shapes:
        by_block.setdefault(round(np.log2(max(1.0, nbytes / descriptors))), []).append((nbytes, descriptors))
    for block, points in sorted(by_block.items()):
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": f"{name}: fit, blocks of about {format_bytes(2**block)}",
                "x": [nbytes for nbytes, _ in points],
                "y": [entry.fit.at_least(*point) for point in points],
                "line": {"color": colour, "dash": "solid" if len(by_block) == 1 else "dot"},
            }
        )
    return traces


def _fit_row(entry: ConditionFit) -> tuple[str, ...]:
    fit = entry.fit

    def seconds(value: float | None) -> str:
        return "not identified" if value is None else format_seconds(value)

    def share(value: float | None) -> str:
        return "unknown" if value is None else f"{value:.1%}"

    rate = "not identified" if fit.bytes_per_second is None else format_rate(fit.bytes_per_second)
    return (
        str(entry.conditions),
        seconds(fit.a_seconds),
        seconds(fit.o_seconds),
        rate,
        share(fit.worst_error),
        share(fit.median_error),
        str(fit.samples),
    )
