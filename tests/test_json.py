"""docs/json.md names the keys that the verbs print, all of them and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.demo.serving import Served
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


@pytest.mark.parametrize(
    ("command", "record"), [("serve", Serving), ("proxy", Proxying), ("demo --serve", Served)]
)
def test_the_page_names_every_key_of_a_ready_line(command: str, record: type) -> None:
    (cell,) = re.findall(rf"^\| `kvferry {command}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", cell) == list(record.__struct_fields__)  # type: ignore[attr-defined]
