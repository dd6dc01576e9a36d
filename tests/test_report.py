"""``kvferry report``: every kind of file becomes charts with their numbers; bad files are named."""

from __future__ import annotations

import csv
import html.parser
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.cli import run
from kvferry.link import Mode
from kvferry.link.load import load_links
from kvferry.plan.break_even import break_even
from kvferry.plan.check import Verdict, answer
from kvferry.report.links import links_section
from link_kit import links, profile
from plan_kit import promise
from report_kit import write_all


class Page(html.parser.HTMLParser):
    """Headings, table cells, ids, and whatever would fetch something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.cells: list[str] = []
        self.fetched: list[str] = []
        self.charts = 0
        self.tables = 0
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        given = dict(attrs)
        self.charts += given.get("class") == "chart"
        self.tables += tag == "table"
        self.fetched += [value or "" for name, value in attrs if name in ("src", "data", "action")]
        if tag in ("link", "img", "iframe", "object", "embed"):
            self.fetched.append(tag)
        if (target := given.get("href")) and not target.startswith("#"):
            self.fetched.append(target)

    def handle_data(self, data: str) -> None:
        if self._inside in ("h2", "h3"):
            self.headings.append(data)
        elif self._inside == "td":
            self.cells.append(data)


def figures_of(text: str) -> list[dict[str, Any]]:
    (found,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    figures: list[dict[str, Any]] = json.loads(found)
    return figures


@pytest.mark.slow
def test_all_kinds_on_one_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file has its charts, each chart its table; names are text; nothing is fetched; under 6 MB."""
    files = write_all(tmp_path)
    out = tmp_path / "report.html"
    assert run(["report", *files, "--out", str(out), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    kinds = ["links", "records", "check", "plan", "simulation", "simulation", "demo"]
    assert [section["kind"] for section in said["sections"]] == kinds
    text = out.read_text("utf-8")
    assert said["bytes"] == len(text.encode()) < 6e6
    page = Page(text)
    assert page.fetched == []
    assert page.charts == page.tables == len(figures_of(text))
    assert {
        "Rate of the largest payload: tcp, pull",
        "Time to the first token",
        "Where the promise holds",
        "Candidates",
        "TTFT by run",
        "TTFT of every request",
        "Timing split of a handoff",
    } <= {heading.strip() for heading in page.headings}
    assert "<b>gamma</b>" in page.cells  # as text
    matrix = figures_of(text)[0]["data"][0]
    assert matrix["x"] == ["beta", "&lt;b>gamma&lt;/b>", "alpha"]
    assert sum(cell is not None for row in matrix["z"] for cell in row) == 6


def test_one_pair_has_no_matrix() -> None:
    """A single cell says less than the curve beside it."""
    titles = [chart.title for chart in links_section(links(profile()), "x").charts]
    assert titles == ["Size curve: a -> b over tcp"]


def test_the_matrix_says_what_the_fit_says(tmp_path: Path) -> None:
    """The rate of a cell is the fit's at the largest payload; an unmeasured link is marked so."""
    pair = profile()
    fit = pair.fit(Mode.PULL)
    assert fit.nbytes is not None
    assert fit.block_bytes is not None
    chart = links_section(links(pair, profile(from_node="b", to_node="a")), "x").charts[0]
    expected = fit.nbytes.high / fit.predict(fit.nbytes.high, fit.nbytes.high // fit.block_bytes.high) / 1e9
    assert chart.figure["data"][0]["z"][0][0] == pytest.approx(expected)
    assert chart.is_measured is True
    preset = load_links("ib-ndr400")
    assert all(chart.is_measured is False for chart in links_section(preset, "x").charts)


def test_break_even_is_checks_own_answer() -> None:
    """Every cell is what check answers there; the grid is monotone in hits; unmeasured is unknown."""
    asked = promise(prompt_tokens=4096, target_seconds=0.2)
    grid = break_even(asked)
    assert 4096 in grid.prompt_tokens
    assert {verdict for row in grid.verdicts for verdict in row} == {Verdict.HOLDS, Verdict.DOES_NOT_HOLD}
    for share, row in zip(grid.cached_shares, grid.verdicts, strict=True):
        for tokens, verdict in zip(grid.prompt_tokens, row, strict=True):
            there = msgspec.structs.replace(asked, prompt_tokens=tokens, cached_tokens=int(tokens * share))
            assert answer(there).verdict is verdict
    for column in zip(*grid.verdicts, strict=True):
        assert list(column) == sorted(column, key=lambda verdict: verdict is Verdict.HOLDS)
    way = msgspec.structs.replace(asked.way, link=load_links("ib-ndr400").select())
    unmeasured = break_even(msgspec.structs.replace(asked, way=way))
    assert {verdict for row in unmeasured.verdicts for verdict in row} <= {
        Verdict.UNKNOWN,
        Verdict.DOES_NOT_HOLD,
    }
    assert (
        unmeasured.verdicts[-1][0] is Verdict.UNKNOWN
    )  # no promise; what is too long without the link is no


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b"{}", "not a link file"),
        ("a.json", b"[1]", "not a link file"),
        ("a.json", b"\xff\xfe", "cannot be read"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        ("a.json", b'{"candidates": 1, "choice": 1, "reason": 1, "targets": 1}', "not what `kvferry` writes"),
        ("a.json", b'{"format": "kvferry-links", "version": 99}', "version"),
        ("a.csv", b"x,y\n1,2\n", "column arrival_seconds is missing"),
        ("a.csv", b"", "is missing"),
        ("a.parquet", b"PAR0", "not a Parquet file"),
        ("none.json", None, "No such file"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, says: str
) -> None:
    """Exit 2, one line with the file, and no page."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert run(["report", str(path), "--out", str(tmp_path / "out.html")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert name in err
    assert says in err
    assert not (tmp_path / "out.html").exists()


def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No file, and a place that cannot be written: one line, exit 2."""
    assert run(["report"]) == 2
    path = tmp_path / "records.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["arrival_seconds", "ttft_seconds", "tpot_seconds", "prompt_tokens", "outcome"],
                          [0, "", "", 5, "failed"]])  # fmt: skip
    assert run(["report", str(path), "--out", str(tmp_path / "no" / "r.html")]) == 2
    assert run(["report", str(path), "--out", str(tmp_path / "r.html")]) == 0  # nothing to draw is no fault
    assert "there is no folder" in capsys.readouterr().err
