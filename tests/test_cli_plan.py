"""``kvferry plan`` as a person uses it: the table, the choice, JSON, equations, picture, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.link.load import encode_links
from plan_kit import link, link_file

EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster.toml"
QUICK = ("--requests", "100")
# Fewer candidates than the example has, so that the tests are quick; outputs of 60 tokens keep runs short.
FEW = (
    ('"splitwise-llama2-70b-h100-tp4", "splitwise-llama2-70b-h100-tp8"', '"splitwise-llama2-70b-h100-tp4"'),
    ("[512, 2048, 8192]", "512"),
    ("output_tokens = 211", "output_tokens = 60"),
    ("count = 4\ngpu", "count = 2\ngpu"),
)
CANDIDATE = {
    *("number", "name", "kind", "prefill", "decode", "gpus", "goodput", "goodput_per_gpu", "bound_per_gpu"),
    *("slo_attainment", "ttft_attainment", "tpot_attainment", "ttft", "tpot", "link_utilisation", "traffic"),
    *(
        "gpus_needed",
        "units_needed",
        "units_possible",
        "carries",
        "limit",
        "is_measured",
        "note",
        "slack",
        "exposed_p95_seconds",
    ),
}


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """The example with few candidates."""
    return edited(tmp_path)


def plan(*arguments: str, cluster: Path) -> int:
    return run(["plan", str(cluster), *QUICK, *arguments])


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    text = EXAMPLE.read_text("utf-8")
    for old, new in (*FEW, *changes):
        assert old in text
        text = text.replace(old, new)
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_json_has_the_promised_keys(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints one object: candidates best first, the choice by number, the reason in words."""
    assert plan("--json", cluster=few) == 0
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert printed.count("\n") == 1
    assert set(found) >= {"candidates", "choice", "reason", "is_promise", "placement", "drift"}
    carrying = [candidate for candidate in found["candidates"] if candidate["carries"]]
    assert carrying == found["candidates"][: len(carrying)]
    gpus = [candidate["gpus_needed"] for candidate in carrying]
    assert gpus == sorted(gpus)
    for candidate in found["candidates"]:
        assert set(candidate) >= CANDIDATE
    chosen = next(c for c in found["candidates"] if c["number"] == found["choice"])
    assert chosen["name"] in found["reason"]
    assert {c["kind"] for c in found["candidates"]} == {"colocated", "in one domain", "across nodes"}


def test_the_table_shows_candidates_and_reason(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each candidate with goodput and limit, an arrow at the choice, the reason below, equations if asked."""
    assert plan("--explain", cluster=few) == 0
    printed = capsys.readouterr()
    out = " ".join(printed.out.split())
    for text in (
        *("-> ", "good/s per GPU", "TTFT p90", "TPOT p90", "colocated: 4 x h100 tp4", "chunks of 512"),
        *(
            "limited by",
            "The rate needs",
            "Interference was not measured",
            "n_p / n_d = T_p * b / (pp * m * tau)",
        ),
    ):
        assert text in out, text


def test_unmeasured_rows_are_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preset in place of the rack's link: its rows say so, the warning names it, nothing is promised."""
    text = EXAMPLE.read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("rack = {"))
    path = edited(tmp_path, (line, 'rack = "ib-ndr400"'), ("60ms", "45ms"))
    assert plan("--json", cluster=path) == 0
    found = json.loads(capsys.readouterr().out)
    marked = [c for c in found["candidates"] if not c["is_measured"]]
    assert marked
    assert all(c["traffic"]["rack"] > 0 for c in marked)
    chosen = next(c for c in found["candidates"] if c["number"] == found["choice"])
    assert found["is_promise"] == chosen["is_measured"]
    assert plan(cluster=path) == 0
    printed = capsys.readouterr()
    assert "unmeasured" in printed.out
    assert "links.rack" in printed.err


def test_files_are_seen_from_the_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links, profiles and traces beside the cluster file are found wherever the command runs."""
    (tmp_path / "links.json").write_bytes(encode_links(link_file(link(rate=40e9))))
    (tmp_path / "lengths.csv").write_text("prompt_tokens,output_tokens\n" + "900,100\n" * 60)
    law = '"prefill": {"a": 0.02, "b": 1e-4}, "decode": {"a": 0.02, "b": 1e-7, "c": 1e-4}'
    (tmp_path / "engine.json").write_text('{"model": "m", "gpu": "g", "tp": 4, ' + law + "}")
    text = EXAMPLE.read_text("utf-8")
    line = next(line for line in text.splitlines() if line.startswith("rack = {"))
    path = edited(
        tmp_path,
        (line, 'rack = "links.json"'),
    )
    text = path.read_text().replace('"splitwise-llama2-70b-h100-tp4"', '"engine.json"')
    lengths = "prompt_tokens = 1155\noutput_tokens = 60"
    assert lengths in text
    path.write_text(text.replace(lengths, 'trace = "lengths.csv"'))
    assert plan("--json", cluster=path) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"]["rack"]["bytes_per_second"] == 40e9
    assert found["candidates"][0]["prefill"]["source"].endswith("engine.json")


def test_plot_draws_the_candidates(few: Path, tmp_path: Path) -> None:
    """``--plot`` writes a picture."""
    pytest.importorskip("matplotlib", reason="extra [plot] is not installed")
    assert plan("--plot", str(tmp_path / "plan.svg"), cluster=few) == 0
    assert (tmp_path / "plan.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ([("[slo]", "[slow]")], (), "line 8: slow: unknown key"),
        ([('tpot = "60ms"', 'tpot = "60"')], (), "line 10: slo.tpot: '60' has no unit"),
        ([('tpot = "60ms"', "tpot = 60")], (), "line 10: slo.tpot: is a number, no text; it needs its unit"),
        (
            [('"47 GB/s"', "47")],
            (),
            'links.rack.rate: is a number, no text; it needs its unit, as in "47 GB/s"',
        ),
        (
            [('"splitwise-llama2-70b-h100-tp4"', '"splitwise"')],
            (),
            "line 40: gpus.h100.profiles: profile: 'splitwise' is no file and no published profile",
        ),
        (
            [('domain = { rate = "371 GB/s", start = "100us", measured', 'domain = { file = "no.json" } #')],
            (),
            "line 54: links.domain: link: ",
        ),
        ([('kv_dtype = "fp16"', 'kv_dtype = "fp17"')], (), "line 5: kv_dtype: 'fp17'"),
        ([], ("--rate", "0"), "rate"),
        ([], ("--seed", "-1"), "seed"),
        ([], ("--requests", "1" + "0" * 30), "requests"),
        ([("[slo]", "x = " + "[" * 5000 + "\n[slo]")], (), "cannot be read"),
        ([("[slo]", "x = " + "9" * 5000 + "\n[slo]")], (), "cannot be read"),
        ([], ("--trace", "no.csv"), "no.csv"),
        ([('model = "shape:80x8x128"', 'model = "nothing"')], (), "line 4: model: "),
    ],
)
def test_bad_input_is_one_line(
    changes: list[tuple[str, str]],
    options: tuple[str, ...],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be used is one line on stderr with its place, status 2, nothing on stdout."""
    assert plan(*options, cluster=edited(tmp_path, *changes)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err


def test_a_missing_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is not there is one line."""
    assert run(["plan", "no.toml"]) == 2
    assert "no.toml" in capsys.readouterr().err


def test_no_room_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster on which nothing fits is no bad input but has no plan: status 1, one line."""
    path = edited(tmp_path, ("gpus = 8\n", "gpus = 2\n"))
    assert plan(cluster=path) == 1
    assert "fits into any domain" in capsys.readouterr().err
