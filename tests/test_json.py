"""docs/json.md names the keys that the verbs print, all of them and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.demo.serving import Served
from kvferry.interference.result import Measured, profile_object
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw
from kvferry.proxy.run import Proxying
from kvferry.serve.run import Serving

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "json.md").read_text("utf-8")
CLUSTER = str(ROOT / "examples" / "cluster.toml")
PROMISE = "--prompt-tokens 10 --ttft 1s --prefill-seconds 0.1"


def keys_of(verb: str) -> list[str]:
    """First column of the table of a verb."""
    section = PAGE.partition(f"\n## kvferry {verb}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    return [key for cell in cells for key in re.findall(r"`(\w+)`", cell)]


@pytest.mark.parametrize(
    "line",
    [
        "size shape:2x1x8 --tokens 10",
        f"check shape:2x1x8 --link eth100 {PROMISE}",
        "doctor",
        pytest.param("demo --model tiny --prompt hi --tokens 3", marks=pytest.mark.slow),
        pytest.param(f"plan {CLUSTER}", marks=pytest.mark.slow),
        pytest.param(f"simulate {CLUSTER} --requests 200", marks=pytest.mark.slow),
        pytest.param(
            "probe --loopback --bytes 64KiB --seconds 2 --repeat 2 --transport tcp", marks=pytest.mark.slow
        ),
    ],
    ids=lambda line: line.split()[0],
)
def test_the_page_names_every_key(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*line.split(), "--json"]) in {0, 4}
    printed = json.loads(capsys.readouterr().out)
    assert sorted(keys_of(line.split(maxsplit=1)[0])) == sorted(printed)


def test_the_page_names_every_key_of_a_verb_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``link`` and ``certs``: the tables hold the keys of all their verbs, in order."""
    merged, folder, page = tmp_path / "merged.json", tmp_path / "certs", tmp_path / "report.html"
    lines = {
        "link": (
            ["show", "eth25"],
            ["diff", "eth25", "eth100"],
            ["merge", "eth25", "eth100", "--out", str(merged)],
        ),
        "certs": (["init", str(folder)], ["issue", str(folder), "node-1"]),
        "report": ([str(merged), "--out", str(page)],),
    }
    for verb, calls in lines.items():
        printed: list[str] = []
        for call in calls:
            assert run([verb, *call, "--json"]) == 0
            printed += json.loads(capsys.readouterr().out)
        assert keys_of(verb)[: len(printed)] == printed


def test_the_page_names_every_key_of_a_compute_profile() -> None:
    measured = Measured(
        ComputeProfile("m", "g", 1, PrefillLaw(1.0, 1.0), DecodeLaw(1.0, 1.0, 1.0)),
        *[()] * (len(Measured.__struct_fields__) - 1),
    )
    named = keys_of("interference")
    assert [key for key in named if key in profile_object(measured)] == list(profile_object(measured))


@pytest.mark.parametrize(
    ("command", "record"), [("serve", Serving), ("proxy", Proxying), ("demo --serve", Served)]
)
def test_the_page_names_every_key_of_a_ready_line(command: str, record: type) -> None:
    (cell,) = re.findall(rf"^\| `kvferry {command}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", cell) == list(record.__struct_fields__)  # type: ignore[attr-defined]
