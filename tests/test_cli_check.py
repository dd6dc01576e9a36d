"""``kvferry check`` as a person uses it: bars, verdicts, exit statuses, flips, equations, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import run
from kvferry.cli.check import EXIT
from kvferry.link.load import encode_links
from kvferry.plan.check import Verdict
from plan_kit import link, link_file, traces

MODEL = "shape:80x8x128"
BASE = ("--prompt-tokens", "4096", "--ttft", "200ms", "--prefill-seconds", "0.08")
SPLIT = {
    "queue_seconds",
    "prefill_seconds",
    "link_queue_seconds",
    "exposed_transfer_seconds",
    "first_decode_step_seconds",
}


@pytest.fixture
def links(tmp_path: Path) -> str:
    """A file with one measured pair of 10 GB/s."""
    path = tmp_path / "links.json"
    path.write_bytes(encode_links(link_file(link(a=1e-3, o=1e-6, rate=10e9))))
    return str(path)


def check(*arguments: str) -> int:
    return run(["check", MODEL, *arguments])


@pytest.mark.parametrize(
    ("options", "status", "verdict"),
    [
        (("--cached-tokens", "3584"), 0, "holds"),
        ((), 3, "does not hold"),
        (("--tls",), 4, "unknown"),
    ],
)
def test_exit_status_is_the_verdict(
    links: str, options: tuple[str, ...], status: int, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 holds, 3 does not hold, 4 unknown; JSON has the promised keys on one line and nothing else."""
    assert check("--link", links, *BASE, *options, "--json") == status
    printed = capsys.readouterr().out
    found = json.loads(printed)
    assert printed.count("\n") == 1
    assert found["verdict"] == verdict
    assert set(found) >= {"verdict", "ttft_seconds", "split", "binding", "flips"}
    assert set(found["split"]) == SPLIT
    assert found["ttft_seconds"] == pytest.approx(sum(found["split"].values()))
    assert set(EXIT) == set(Verdict)


def test_a_preset_is_unknown_and_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """A brochure rate exits 4; the estimate is shown and marked as one."""
    assert check("--link", "ib-ndr400", *BASE) == 4
    out = capsys.readouterr().out
    for text in ("unmeasured", "estimate", "unknown: by the estimate", "binding: unmeasured link"):
        assert text in out
    assert check("--link", "ib-ndr400", *BASE, "--json") == 4
    found = json.loads(capsys.readouterr().out)
    assert found["is_measured"] is False
    assert found["ttft_seconds"] > 0.08


def test_no_prefill_time_is_unknown(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a prefill time nothing is invented."""
    assert check("--link", links, "--prompt-tokens", "4096", "--ttft", "200ms") == 4
    assert "unknown: give --prefill-seconds or a profile" in capsys.readouterr().out


def test_the_table_shows_what_to_do(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts as bars, the verdict with its margin and what binds, and each flip in words."""
    assert check("--link", links, *BASE, "--decode-seconds", "10ms") == 3
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        *("p -> d over tcp, measured 2026-03-01", "exposed transfer", "first decode step", "█", "promised"),
        *("too long; binding: link bandwidth", "max prompt tokens", "min cached tokens", "GB/s", "kv dtype"),
        *("prefix-hit share", "KV leaves in"),
    ):
        assert text in out, text


def test_bars_are_as_long_as_their_times(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each bar begins where the one before it ends, to within a cell; the sum of the bars is the TTFT."""
    assert check("--link", links, *BASE) == 3
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines if "█" in line}
    prefill, move = rows["prefill"], rows["exposed transfer"]
    assert abs(prefill.rindex("█") + 1 - move.index("█")) <= 1
    assert move.count("█") / prefill.count("█") == pytest.approx(0.1554 / 0.08, rel=0.15)


def test_profile_gives_prefill_and_step(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A published profile by its name, or a file, gives prefill and the first decode step."""
    options = ("--link", links, "--prompt-tokens", "2048", "--ttft", "1s")
    assert check(*options, "--profile", "splitwise-llama2-70b-h100-tp8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["split"]["prefill_seconds"] == pytest.approx(0.1368)
    assert found["split"]["first_decode_step_seconds"] > 0.02
    engine = Path(links).with_name("engine.json")
    engine.write_text(
        '{"model": "m", "gpu": "g", "tp": 1, "prefill": {"a": 0.1, "b": 0},'
        ' "decode": {"a": 0.02, "b": 0, "c": 0}}'
    )
    assert check(*options, "--profile", str(engine), "--json") == 0
    assert json.loads(capsys.readouterr().out)["split"]["prefill_seconds"] == pytest.approx(0.1)


def test_prompt_lengths_take_the_traces_p95(
    links: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--prompt-lengths`` checks the trace's p95 and takes the waits from its lengths."""
    trace = tmp_path / "lengths.csv"
    trace.write_text("prompt_tokens,output_tokens\n" + "".join(f"{100 * n},10\n" for n in range(1, 101)))
    options = ("--link", links, "--prompt-lengths", str(trace), "--ttft", "2s", "--prefill-seconds", "50ms")
    assert check(*options, "--rate", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["prompt_tokens"] == 9_600
    assert found["split"]["queue_seconds"] > 0
    assert found["split"]["link_queue_seconds"] > 0


def test_mooncake_p95(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The p95 prompt of Mooncake's conversation trace is found (39,552 tokens)."""
    trace = str(traces() / "mooncake_conversation_trace.jsonl")
    options = ("--link", links, "--prompt-lengths", trace, "--ttft", "8s", "--prefill-seconds", "3s")
    assert check(*options, "--json") in {0, 3}
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 39_552


def test_explain_prints_the_sums(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``--explain`` prints each equation with its numbers."""
    assert check("--link", links, *BASE, "--explain") == 3
    out = capsys.readouterr().out
    assert "TTFT = prefill queue + prefill + link queue + exposed transfer + first decode step" in out
    assert "1342225664 / 1e+10" in out
    assert check("--link", links, *BASE, "--explain", "--json") == 3
    assert json.loads(capsys.readouterr().out)["equations"][-1]["name"] == "TTFT"


def test_overlap_by_layer_and_by_chunk(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Overlap hides what prefill's time covers; the groups are the layers, or the chunks of the prompt."""
    groups = {}
    for overlap in ("none", "layer", "chunk"):
        check("--link", links, *BASE, "--overlap", overlap, "--chunk-tokens", "1024", "--json")
        found = json.loads(capsys.readouterr().out)
        groups[overlap] = (found["groups"], found["split"]["exposed_transfer_seconds"])
    assert [groups[name][0] for name in ("none", "layer", "chunk")] == [1, 80, 4]
    assert groups["layer"][1] < groups["chunk"][1] < groups["none"][1]


def asked(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The answer as JSON."""
    assert check(*options, "--json") in {0, 3}
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("overlap", ["none", "layer", "chunk"])
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("ttft", ["0.15", "0.4", "1.2"])
def test_a_flip_is_true_when_it_is_asked_for(
    links: str, overlap: str, batch: int, ttft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked again with the flip's own prompt, or hits, it holds with the very TTFT that the flip says.

    The first decode step and the chunks follow the prompt.
    """
    options = (
        *("--link", links, "--ttft", ttft, "--profile", "splitwise-llama2-70b-h100-tp8"),
        *("--decode-batch", str(batch), "--overlap", overlap, "--chunk-tokens", "1000"),
    )
    now = asked(capsys, *options, "--prompt-tokens", "9000", "--cached-tokens", "100")
    longest, fewest = now["flips"]["max_prompt_tokens"], now["flips"]["min_cached_tokens"]
    there = asked(capsys, *options, "--prompt-tokens", str(longest["value"]), "--cached-tokens", "100")
    above = asked(capsys, *options, "--prompt-tokens", str(longest["value"] + 1), "--cached-tokens", "100")
    assert (there["verdict"], above["verdict"]) == ("holds", "does not hold")
    assert there["ttft_seconds"] == pytest.approx(longest["ttft_seconds"])
    if fewest["value"] is not None:
        cached = ("--prompt-tokens", "9000", "--cached-tokens", str(fewest["value"]))
        there = asked(capsys, *options, *cached)
        assert there["verdict"] == "holds"
        assert there["ttft_seconds"] == pytest.approx(fewest["ttft_seconds"])


def test_more_hits_never_make_chunks_worse(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt that is one token longer than its chunks: no saw of the TTFT over hits."""
    options = ("--link", links, "--ttft", "1s", "--overlap", "chunk", "--chunk-tokens", "1024")
    prompt = ("--prompt-tokens", "4097", "--prefill-seconds", "0.1")
    times = [
        asked(capsys, *options, *prompt, "--cached-tokens", str(cached))["ttft_seconds"]
        for cached in (0, 1, 16, 1008, 1024, 1040, 2048, 3072, 3088, 4097)
    ]
    assert times == sorted(times, reverse=True)


def test_what_a_flip_shows_is_enough(links: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bounds are rounded so that they hold: the share and the rate in the table are not below the flip."""
    for ttft in ("120ms", "130ms", "150ms", "190ms"):
        options = ("--link", links, *BASE[:3], ttft, *BASE[4:])
        found = asked(capsys, *options)["flips"]
        check(*options)
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        (share,) = [float(row[4].rstrip("%")) for row in rows if row[:3] == ["min", "prefix", "hit"]]
        (rate,) = [float(row[4]) for row in rows if row[:2] == ["min", "bytes"]]
        bits = float(found["min_bytes_per_second"]["says"].split("(")[1].split()[0])
        assert share / 100 >= found["min_prefix_hit_share"]["value"]
        assert rate * 1e9 >= found["min_bytes_per_second"]["value"]
        assert bits * 1e9 / 8 >= found["min_bytes_per_second"]["value"]


def test_a_given_prefill_of_a_shorter_prompt_takes_its_share(
    links: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prompt no longer than the prefix takes its part of the given time: decode's hits spare no prefill."""
    options = ("--link", links, "--prompt-tokens", "4096", "--cached-tokens", "3584", "--ttft", "100ms")
    grid = asked(capsys, *options, "--prefill-seconds", "0.4")["break_even"]
    column = grid["prompt_tokens"].index(2048)
    assert {row[column] for row in grid["verdicts"]} == {"does not hold"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--link", "no.json", *BASE), "no.json"),
        (("--link", "eth100", "--ttft", "1s"), "prompt_tokens"),
        (("--link", "eth100", *BASE, "--profile", "distserve-opt-13b-a100-tp1"), "prefill_seconds"),
        (("--link", "eth100", *BASE[:4], "--profile", "nobody"), "splitwise-llama2-70b-h100-tp8"),
        (("--link", "eth100", *BASE[:4], "--profile", "no.json"), "no.json"),
        (("--link", "eth100", *BASE, "--cached-tokens", "9999"), "cached_tokens"),
        (("--link", "eth100", *BASE, "--overlap", "chunk", "--chunk-tokens", "0"), "chunk_tokens"),
        (("--link", "eth100", *BASE, "--decode-batch", "0"), "decode_batch"),
        (("--link", "eth100", *BASE, "--quantile", "0.2"), "quantile"),
        (("--link", "eth100", *BASE, "--rate", "-1"), "rate"),
        (("--link", "eth100", *BASE, "--block-size", "0"), "block_size"),
        (("--link", "eth100", "--prompt-tokens", "4096", "--ttft", "200 metres"), "ttft"),
        (("--link", "eth100", "--prompt-tokens", "4.5", "--ttft", "1s"), "prompt-tokens"),
        (("--link", "eth100", "--prompt-lengths", "no.csv", "--ttft", "1s"), "prompt_lengths: no.csv"),
    ],
)
def test_bad_input_is_one_line(
    options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be used is named in one line on stderr, with status 2."""
    assert check(*options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert says in printed.err


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("trace.csv", b"", "line 1: is empty"),
        ("trace.csv", b"prompt_tokens,output_tokens\n1,\xff\n", "is not UTF-8"),
        ("trace.csv", b"prompt_tokens,output_tokens\nNaN,1\n", "line 2: prompt_tokens"),
        ("trace.csv", b"prompt_tokens,output_tokens\n" + b"1" * (1 << 21), "line 2: has more than"),
        (
            "trace.jsonl",
            b'{"timestamp": 1, "input_length": 1, "output_length": 1, "tokens": 1}\n',
            "line 1: unknown key",
        ),
    ],
)
def test_bad_files_name_file_and_line(
    name: str, data: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace that cannot be read is one line with file and line, status 2."""
    path = tmp_path / name
    path.write_bytes(data)
    assert check("--link", "eth100", "--prompt-lengths", str(path), "--ttft", "1s") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert name in error
    assert says in error


def test_a_line_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    """A sparse file of 10 GB without a line end is refused with little memory and no wait."""
    path = tmp_path / "endless.csv"
    with path.open("wb") as file:
        file.write(b"prompt_tokens,output_tokens\n")
        file.truncate(10 * 10**9)
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from kvferry.cli import run\n"
        f"options = ['--link', 'eth100', '--prompt-lengths', {str(path)!r}, '--ttft', '1s']\n"
        f"sys.exit(run(['check', {MODEL!r}, *options]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert result.returncode == 2, result.stderr
    assert "line 2" in result.stderr
    assert result.stderr.count("\n") == 1
