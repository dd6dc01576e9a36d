"""``kvferry link`` as a person uses it: show, diff, merge, and bad input in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.link import LinkFile, encode_links, load_links
from link_kit import GOOD, MAY, MIB, line, links, profile, sweep

SLOW = line(50e-6, 2e-6, 2e9)


def write(path: Path, file: LinkFile) -> str:
    path.write_bytes(encode_links(file))
    return str(path)


def quiet(cost: object = GOOD, a: str = "a", b: str = "b", **fields: object) -> object:
    return profile(sweep(cost, noise=0.02, repeats=5), a, b, **fields)


@pytest.fixture
def old(tmp_path: Path) -> str:
    return write(tmp_path / "old.json", links(quiet(line_rate=10e9, link_class="rack")))


@pytest.fixture
def new(tmp_path: Path) -> str:
    return write(tmp_path / "new.json", links(quiet(SLOW, date=MAY, link_class="rack"), quiet(a="c")))


def test_show_says_what_each_pair_does(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One row a pair with time, rate in bytes and bits, share of the line, and the fit behind it."""
    assert run(["link", "show", old, "--bytes", "16MiB", "--block-bytes", "64KiB"]) == 0
    out = capsys.readouterr().out
    for part in (
        "a ",
        "b ",
        "tcp",
        "rack",
        "pull",
        "measured 2026-03-01",
        "in 256",
        "GB/s (",
        "Gb/s)",
        "%",
        "50",
    ):
        assert part in out
    assert "unknown" not in out


def test_show_json_is_one_object(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys that scripts rely on, with the numbers of the payload asked for."""
    assert run(["link", "show", old, "--bytes", "16MiB", "--block-bytes", "64KiB", "--json"]) == 0
    (file,) = json.loads(capsys.readouterr().out)["files"]
    assert (file["file"], file["outliers"], file["published"]) == (old, [], [])
    (pair,) = file["pairs"]
    assert {"from", "to", "transport_used", "path", "via", "class", "mode", "tls", "measured", "fit"} <= set(
        pair
    )
    assert (pair["nbytes"], pair["descriptors"]) == (16 * MIB, 256)
    assert pair["seconds"] == pytest.approx(GOOD(16 * MIB, 256), rel=0.02)
    assert pair["bytes_per_second"] == pytest.approx(16 * MIB / pair["seconds"])
    assert {"a_seconds", "o_seconds", "bytes_per_second", "worst_error"} <= set(pair["fit"])


def test_show_calls_out_slow_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slow pair is a sentence with its ratio and its likely reason."""
    pairs = [
        quiet(SLOW if ends == ("b", "c") else GOOD, *ends) for ends in (("a", "b"), ("b", "c"), ("c", "b"))
    ]
    assert run(["link", "show", write(tmp_path / "f.json", links(*pairs))]) == 0
    out = capsys.readouterr().out
    assert "slow: b -> c over tcp, pull: 67.1 MB in 64 pieces takes" in out
    assert "times the median of its class" in out
    assert "; c -> b is not slow" in out


def test_show_draws_a_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three nodes or more: rates from rows to columns, empty where nothing was measured."""
    pairs = [
        quiet(SLOW if ends == ("a", "b") else GOOD, *ends) for ends in (("a", "b"), ("b", "a"), ("b", "c"))
    ]
    assert run(["link", "show", write(tmp_path / "f.json", links(*pairs))]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()]
    head = next(i for i, row in enumerate(rows) if row[:4] == ["tcp,", "pull:", "from", "\\"])
    assert rows[head][-3:] == ["a", "b", "c"]
    body = [row for row in rows[head + 2 : head + 8] if row]
    assert [row[0] for row in body if row[0] in "abc"] == ["a", "b", "c"]
    assert next(row for row in body if row[0] == "a")[1:] == ["1.99", "GB/s"]
    assert next(row for row in body if row[0] == "b")[2::2][:2] == ["GB/s", "GB/s"]
    assert next(row for row in body if row[0] == "c")[1:] == []


def test_names_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name in brackets is a name, in the list and in the matrix."""
    pairs = [quiet(GOOD, *ends) for ends in (("[red]x", "y"), ("y", "[/bold]"))]
    assert run(["link", "show", write(tmp_path / "[b]f.json", links(*pairs))]) == 0
    out = capsys.readouterr().out
    assert out.count("[red]x") >= 3
    assert out.count("[/bold]") >= 3
    assert "[b]f.json" in out


def test_show_marks_what_lies_outside(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A payload beyond what was measured has a star and its explanation."""
    assert run(["link", "show", old, "--bytes", "1TB"]) == 0
    out = capsys.readouterr().out
    assert "*" in out
    assert "is outside the" in " ".join(out.split())


def test_show_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    """A preset is shown as unmeasured, with a floor and what others measured, with their sources."""
    assert run(["link", "show", "nvlink4"]) == 0
    out = capsys.readouterr().out
    for part in ("unmeasured", "at least 2.22 ms", "450 GB/s (3.6 Tb/s)", "371 GB/s", "NVIDIA/nccl#1264"):
        assert part in out
    assert run(["link", "show", "nvlink4", "eth100", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [file["pairs"][0]["measured"] for file in files] == [False, False]
    assert files[0]["published"][0]["bytes_per_second"] == 371e9


def test_show_reports_a_knee_and_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second regime's own numbers are printed."""

    def cost(nbytes: int, descriptors: int) -> float:
        return 5e-5 + 1e-6 * descriptors + nbytes / (6e9 if nbytes < 4 * MIB else 2e9)

    samples = sweep(cost, sizes=[2**power for power in range(16, 29)])
    assert run(["link", "show", write(tmp_path / "f.json", links(profile(samples)))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "from 4.19 MB on: " in out
    assert "2 GB/s (16 Gb/s)" in out


def test_diff_says_which_pair_drifted(old: str, new: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Slower, by how much, beyond which noise; what is in one file only; and the count."""
    assert run(["link", "diff", old, new]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "slower: a -> b over tcp, pull"
    assert lines[1].startswith("  slower: 67.1 MB in 64 pieces takes 33.")
    assert "(+14" in lines[1]
    assert "only in the new file: c -> b over tcp: pull" in lines
    assert lines[-1] == "1 compared: 1 slower"
    assert run(["link", "diff", old, new, "--json"]) == 0
    (drift,) = json.loads(capsys.readouterr().out)["drifts"]
    assert drift["verdict"] == "slower"
    assert {"old_seconds", "new_seconds", "change", "noise"} <= set(drift["changes"][0])


def test_diff_of_a_file_with_itself_is_the_same(old: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing drifts against itself."""
    assert run(["link", "diff", old, old]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 compared: 1 same"


def test_merge_writes_one_file(
    old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newest of each pair is in the file, what was dropped is said on stderr, and no part is left."""
    out = tmp_path / "all.json"
    assert run(["link", "merge", old, new, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{out}: 2 pairs from 2 files\n"
    assert "kept measured 2026-05-01, dropped measured 2026-03-01" in printed.err
    assert [pair.label for pair in load_links(out).pairs] == ["measured 2026-05-01", "measured 2026-03-01"]
    assert sorted(os.listdir(tmp_path)) == ["all.json", "new.json", "old.json"]


def test_merge_can_pool(old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --pool the samples of both runs are in the file and in its fit."""
    out = tmp_path / "all.json"
    assert run(["link", "merge", old, new, "--pool", "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["pairs"] == 2
    assert "pooled the samples" in " ".join(printed["notes"])
    both = sum(len(load_links(name).pairs[0].samples) for name in (old, new))
    assert load_links(out).pairs[0].fits[0].fit.samples == both


def test_merge_keeps_the_old_file_when_it_fails(old: str, tmp_path: Path) -> None:
    """A target that cannot be written is one line, and nothing is left beside it."""
    assert run(["link", "merge", old, "--out", str(tmp_path / "no" / "all.json")]) == 2
    (tmp_path / "folder").mkdir()
    assert run(["link", "merge", old, "--out", str(tmp_path / "folder")]) == 2
    assert sorted(os.listdir(tmp_path)) == ["folder", "old.json"]


BAD_FILES = {
    "unknown.json": ('"transport":', '"transprot":', "line 9: pairs[0].transprot: unknown key"),
    "negative.json": (
        '"o_seconds": ',
        '"o_seconds": -',
        "pairs[0].fits[0].fit.o_seconds: Expected float >= 0.0",
    ),
    "nan.json": (
        '"a_seconds": ',
        '"a_seconds": NaN, "x": ',
        "pairs[0].fits[0].fit.a_seconds: NaN is no number",
    ),
    "cut.json": ("\n  ]\n}", "", "not JSON: Input data was truncated"),
    "later.json": ('"version": 1', '"version": 7', "version 7; this kvferry reads version 1"),
}


@pytest.mark.parametrize("name", BAD_FILES)
@pytest.mark.parametrize("verb", ["show", "diff", "merge"])
def test_a_bad_file_is_one_line_and_status_2(
    name: str, verb: str, old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """File, line and key on stderr, nothing on stdout, whichever verb reads it."""
    before, after, said = BAD_FILES[name]
    bad = tmp_path / name
    bad.write_text(Path(old).read_text().replace(before, after, 1))
    options = ["--out", str(tmp_path / "out.json")] if verb == "merge" else []
    assert run(["link", verb, old, str(bad), *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert str(bad) in printed.err
    assert said in printed.err
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show"], "FILE: give a link file"),
        (["show", "isdn"], "no such file, and no preset; known: nvlink3"),
        (["show", "eth25", "--bytes", "0"], "bytes: must be 1 or more"),
        (["show", "eth25", "--bytes", "many"], "bytes: 'many' is not a number"),
        (["show", "eth25", "--block-bytes", "-1"], "block_bytes: '-1' is not a number"),
        (["diff", "eth25"], "NEW"),
        (["merge", "eth25"], "--out"),
        (["merge", "--out", "x.json"], "FILE: give a link file"),
        (["split"], "split"),
    ],
)
def test_bad_options_are_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or wrong option is named in one line, exit status 2."""
    assert run(["link", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err


def test_a_huge_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten gigabytes are refused by size."""
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(10 * 10**9)
    assert run(["link", "show", str(path)]) == 2
    assert "that is no link file" in capsys.readouterr().err


def test_a_file_is_replaced_whole_and_what_is_none_is_written_through(tmp_path: Path, old: str) -> None:
    """A link keeps pointing to its file, a pipe stays a pipe (a device would), and no part is left behind."""
    target, link, pipe = tmp_path / "target.json", tmp_path / "link.json", tmp_path / "pipe"
    target.write_text("before")
    link.symlink_to(target)
    assert run(["link", "merge", old, "--out", str(link)]) == 0
    assert link.is_symlink()
    assert load_links(str(target)).pairs
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert run(["link", "merge", old, "--out", str(pipe)]) == 0
        assert pipe.is_fifo()
        assert os.read(reader, 1 << 20).startswith(b"{")
    finally:
        os.close(reader)
    assert not list(tmp_path.glob(".*"))
