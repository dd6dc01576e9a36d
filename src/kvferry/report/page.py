"""The page: one HTML file with everything inside, which asks nobody for anything."""

from __future__ import annotations

import datetime as dt
import html
import json
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from importlib.resources import files
from string import Template
from typing import Any

from kvferry.errors import InputError, LocalError
from kvferry.report.answers import check_section, demo_section
from kvferry.report.chart import Chart, Section
from kvferry.report.clusters import plan_section, records_section, simulation_section
from kvferry.report.inputs import Input, Kind
from kvferry.report.links import links_section

__all__ = ["render"]

_SECTIONS: dict[Kind, Callable[[Any, str], Section]] = {
    Kind.LINKS: links_section,
    Kind.CHECK: check_section,
    Kind.PLAN: plan_section,
    Kind.SIMULATION: simulation_section,
    Kind.RECORDS: records_section,
    Kind.DEMO: demo_section,
}


def render(inputs: Sequence[Input]) -> str:
    """The report of these files, in their order.

    Raises InputError naming the file whose content lacks something, LocalError when Plotly is missing.
    """
    try:
        from plotly.offline import get_plotlyjs  # noqa: PLC0415 - the extra `report`
    except ImportError as error:
        raise LocalError("report: needs plotly", next_step="pip install 'kvferry[report]'") from error
    sections = [_section(given) for given in inputs]
    figures = [chart.figure for section in sections for chart in section.charts]
    now = dt.datetime.now(dt.UTC)
    made = f"Made {now:%Y-%m-%d %H:%M} UTC by kvferry {metadata.version('kvferry')}."
    template = Template(files("kvferry.report").joinpath("page.html").read_text("utf-8"))
    return template.substitute(
        made=html.escape(made),
        contents="".join(
            f'<a href="#section-{at}">{html.escape(section.heading)}</a>'
            for at, section in enumerate(sections)
        ),
        sections="\n".join(_sections(sections)),
        plotly=get_plotlyjs(),
        figures=_for_script(figures),
    )


def _section(given: Input) -> Section:
    try:
        return _SECTIONS[given.kind](
            given.content, f"{given.path}, written {given.written:%Y-%m-%d %H:%M} UTC"
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"report: {given.path}: not what `kvferry` writes as {given.kind}: {error!r}"
        ) from error


def _sections(sections: Iterable[Section]) -> Iterable[str]:
    number = 0
    for at, section in enumerate(sections):
        yield f'<section id="section-{at}"><h2>{html.escape(section.heading)}</h2>'
        yield f'<p class="soft">From {html.escape(section.source)}</p>'
        for chart in section.charts:
            yield _chart(chart, number)
            number += 1
        if section.notes:
            notes = "".join(f"<li>{html.escape(str(note))}</li>" for note in section.notes)
            yield f"<ul>{notes}</ul>"
        yield "</section>"


def _chart(chart: Chart, number: int) -> str:
    tag = ""
    if chart.is_measured is not None:
        word = "measured" if chart.is_measured else "unmeasured"
        tag = f' <span class="tag {word}">{word}</span>'
    title = html.escape(chart.title)
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name in chart.header)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>" for row in chart.rows
    )
    return (
        f"<h3>{title}{tag}</h3><p>{html.escape(chart.says)}</p>"
        f'<div class="chart" id="chart-{number}" role="img" '
        f'aria-label="{title}; its numbers are in the table below"></div>'
        f"<details><summary>The numbers</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{title}: numbers">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _for_script(figures: object) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(figures, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
