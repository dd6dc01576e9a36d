"""What a person meets first: the bare command, help, version, completion, and words that are nearly right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from importlib.resources import files
from pathlib import Path

import pytest

from kvferry.cli import VERBS, run
from kvferry.link.presets import PRESETS

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_alone_it_shows_the_questions_and_their_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the four questions stands beside a verb that exists; nothing on stderr, status 0."""
    assert run([]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    for question, verb in (
        ("How big", "size"), ("How fast", "probe"), ("pay?", "check"), ("how many", "plan"), ("move", "demo")
    ):  # fmt: skip
        assert re.search(rf"{re.escape(question)}.*kvferry {verb}\b", out.out), question
    assert set(re.findall(r"kvferry ([a-z]+)", out.out)) - {"moves"} <= set(VERBS)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_says_what_each_verb_does(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([flag]) == 0
    out = capsys.readouterr().out
    for verb in VERBS:
        assert re.search(rf"│ {verb} +[A-Z]", out), f"{verb} has no line of help"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"kvferry {metadata.version('kvferry')}\n"


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("siez", '"size"'),
        ("link shwo links.json", '"show"'),
        ("size shape:1x1x8 --tokns 4", "--tokens"),
        ("demo --transport shn", '"shm"'),
        ("agent --listen tpc://127.0.0.1:0", "tcp?"),
        ("agent --listen tcp://127.0.0.1:0?plian=yes", "plain?"),
        ("size shape:1x1x8 --tokens 4 --kv-dtype fp8_e4m", "fp8_e4m3?"),
        ("check shape:1x1x8 --link ib-ndr40 --prompt-tokens 4 --ttft 1s --prefill-seconds 1", "ib-ndr400?"),
        ("--versoin", "--version?"),
        ("agent --lissten tcp://127.0.0.1:0", "--listen"),
        ("plan CLUSTER", "ttft?"),
        ("plan POLICY", "network_cost?"),
        (
            "check shape:1x1x8 --link eth100 --prompt-tokens 4 --ttft 1s --profile distserve-opt-13b-a100-tp",
            "distserve-opt-13b-a100-tp",
        ),
    ],
)
def test_a_word_that_is_nearly_right_is_answered_by_the_right_one(
    line: str, near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the nearest verb, option, choice, transport, preset, dtype or key; exit 2."""
    example = Path(__file__).parent.parent / "examples" / "cluster.toml"
    files = {"CLUSTER": ("\nttft = ", "\ntftt = "), "POLICY": ('"network_cost"', '"network_cots"')}
    for name, change in files.items():
        (tmp_path / name).write_text(example.read_text("utf-8").replace(*change), "utf-8")
        line = line.replace(name, str(tmp_path / name))
    assert run(line.split()) == 2
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
    assert f"id you mean {near}" in out.err
    assert "ib-ndr400" in PRESETS


def test_completion_for_bash_fills_in_verbs_and_options(tmp_path: Path) -> None:
    """``--install-completion`` writes below the home folder only, and what it writes works in bash."""
    home = {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")} | home
    install = [sys.executable, "-m", "kvferry", "--install-completion"]
    # By a bash, since the shell that asks is the one that is meant.
    done = subprocess.run(
        ["bash", "-c", '"$@"; exit $?', "bash", *install],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (script,) = [path for path in tmp_path.rglob("kvferry") if path.is_file()]

    def completed(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in words)
        asked = (
            f". '{script}'; name=$(complete -p kvferry | sed -E 's/.*-F ([^ ]+).*/\\1/');"
            f" COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE='{' '.join(words)}';"
            " COMP_POINT=${#COMP_LINE}; $name; printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        told = subprocess.run(
            ["bash", "-c", asked], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        return {word.strip() for word in told.stdout.splitlines()}

    assert completed("kvferry", "si") == {"size", "simulate"}
    assert "--prompt-tokens" in completed("kvferry", "check", "--prompt-")
    assert completed("kvferry", "demo", "--transport", "t") == {"tcp"}


SIZE = "size shape:4x2x64 --tokens 9 "


@pytest.mark.parametrize(
    ("package", "extra", "line"),
    [
        ("matplotlib", "plot", SIZE + "--plot x.svg"),
        ("matplotlib", "plot", "plan {examples}/cluster.toml --plot x.svg"),
        ("uvicorn", "serve", "agent --listen tcp://127.0.0.1:0 --web 127.0.0.1:0"),
        ("cryptography", "tls", "certs init authority"),
    ],
)
def test_a_package_that_is_missing_is_exit_1_in_every_verb(
    package: str, extra: str, line: str, tmp_path: Path
) -> None:
    """It is this installation that lacks something, whatever the verb; one line says what to install."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / f"{package}.py").write_text(f"raise ImportError('not here', name={package!r})")
    paths = os.pathsep.join((str(shadow), *filter(None, [os.environ.get("PYTHONPATH")])))
    words = line.format(examples=EXAMPLES).split()
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", *words], cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1), done.stderr
    assert done.stderr.endswith(f"; pip install 'kvferry[{extra}]'\n")


def test_no_module_calls_a_missing_package_bad_input() -> None:
    """The rule of the test above, for the packages that it does not go through."""
    source = Path(str(files("kvferry")))
    raised = re.compile(r"raise (\w+)\((?:[^()]|\([^()]*\))*pip install 'kvferry")
    found = {(path.name, kind) for path in source.rglob("*.py") for kind in raised.findall(path.read_text())}
    assert len(found) > 10
    assert {kind for _, kind in found} <= {"LocalError", "NoPlanError", "TransportError"}


@pytest.mark.parametrize(
    "line",
    [
        "size shape:4x2x64 --tokens 9 --plot {}.svg",
        "plan cluster.toml --plot {}.svg",
        "simulate cluster.toml --rate 5 --plot {}.svg",
        "probe --loopback --out {}",
        "report links.json --out {}",
        "demo --trace {}",
        "interference http://127.0.0.1:1 --prompt-tokens 64 --out {}",
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after the hour that was to fill it: none of the files that would be read is there."""
    monkeypatch.chdir(tmp_path)
    assert run(line.format(tmp_path / "typo" / "o").split()) == 2
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
    assert f"there is no folder {tmp_path / 'typo'}" in out.err
    (tmp_path / "o.svg").mkdir()
    assert run(line.replace(".svg", "").format(tmp_path / "o.svg").split()) == 2
    assert "is a folder, not a file" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "said"), [
    ("check", "MODEL"), ("plan", "CLUSTER"), ("certs init", "FOLDER"), ("agent", "--listen"),
])  # fmt: skip
def test_what_is_needed_is_called_as_it_is_written(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What has a place is named as help shows it, what is an option with its dashes."""
    assert run(line.split()) == 2
    wanted = f"kvferry: {said}: needed, with a value; see `kvferry {line} --help`\n"
    assert capsys.readouterr().err == wanted


def test_help_as_a_verb_is_told_how_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """What other tools have, and this one has as an option."""
    assert run(["help", "size"]) == 2
    assert "`kvferry VERB --help`" in capsys.readouterr().err
