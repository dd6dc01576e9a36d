"""Probes drive the same endpoints as everything else, compare the bytes, and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import CorruptError, InputError
from kvferry.layout import source_pieces
from kvferry.link import Mode, load_links
from kvferry.probe import LoopbackPair, Payload, sizes_up_to

COMMAND = [sys.executable, "-c", "from kvferry.cli import main; main()", "probe"]


def probe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100, check=False)


@given(st.integers(1, 300), st.sampled_from([64, 4096, 32768]))
def test_a_payload_is_as_large_as_asked_in_whole_blocks(blocks: int, block_bytes: int) -> None:
    """At most a region's worth of blocks is rounded off, no two blocks touch, and none repeats."""
    payload = Payload(2 * blocks * block_bytes, block_bytes)
    assert payload.nbytes - 2 * payload.layers * block_bytes < payload.moved_nbytes <= payload.nbytes
    pieces = source_pieces(payload.layout(), (payload.table(1),), payload.blocks)
    assert pieces.total_nbytes == payload.moved_nbytes
    assert len(pieces.nbytes) == 2 * payload.layers * payload.blocks


def test_shapes_tell_bytes_and_descriptors_apart() -> None:
    """The shapes of a sweep have two block sizes at the same payload size, and end at the largest."""
    shapes = sizes_up_to(Payload(16 << 20, 32 << 10))
    assert shapes[0] == Payload(16 << 20, 32 << 10)
    assert {shape.block_bytes for shape in shapes if shape.nbytes == 16 << 20} == {32 << 10, 4 << 10}
    assert min(shape.nbytes for shape in shapes) <= 64 << 10


@pytest.mark.parametrize(("nbytes", "block"), [(100, 64), (1 << 40, 64), (4096, 63), (4096, 66), (4096, 0)])
def test_payloads_without_sense_are_refused(nbytes: int, block: int) -> None:
    """Too small, too large, or blocks that are no whole words: InputError."""
    with pytest.raises(InputError, match="bytes"):
        Payload(nbytes, block)


@pytest.mark.usefixtures("nothing_left")
def test_a_pair_notices_bytes_that_are_not_prefills() -> None:
    """The comparison at the end is by address and can fail."""
    with LoopbackPair(Payload(1 << 20, 4096), "shm") as pair:
        samples = pair.measure(Mode.PULL, 2, lambda: None)
        assert [sample.is_cold for sample in samples] == [True, False, False]
        assert {sample.nbytes for sample in samples} == {1 << 20}
        assert {sample.descriptors for sample in samples} == {256}
        real = pair.move

        def move_and_damage(mode: Mode) -> object:
            record = real(mode)
            pair._decode.pool.array[pair._dst.ids[3] * 4096] ^= 1
            return record

        pair.move = move_and_damage  # type: ignore[method-assign,assignment]
        with pytest.raises(CorruptError, match="differ"):
            pair.measure(Mode.PUSH, 1, lambda: None)


def test_the_verb_prints_one_object_and_writes_a_link_file(tmp_path: Path) -> None:
    """--json has the stable keys for each transport and mode; the file is one that other verbs read."""
    out = tmp_path / "links.json"
    done = probe(
        "--loopback",
        "--bytes",
        "1MiB",
        "--block-bytes",
        "16KiB",
        "--repeat",
        "2",
        "--json",
        "--out",
        str(out),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    pairs = json.loads(done.stdout)["pairs"]
    assert {(pair["transport_used"], pair["mode"]) for pair in pairs} == {
        (transport, mode) for transport in ("shm", "tcp") for mode in ("push", "pull")
    }
    for pair in pairs:
        assert pair.keys() == {"from", "to", "transport_used", "path", "mode", "samples", "fit"}
        assert pair["fit"].keys() == {"a_seconds", "o_seconds", "bytes_per_second", "worst_error"}
        assert len(pair["samples"]) >= 6
    links = load_links(str(out))
    assert all(pair.measured and pair.date is not None for pair in links.pairs)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "loopback"),
        (["--loopback", "--bytes", "many"], "bytes"),
        (["--loopback", "--bytes", "1"], "bytes"),
        (["--loopback", "--block-bytes", "3"], "block_bytes"),
        (["--loopback", "--repeat", "0"], "repeat"),
        (["--loopback", "--transport", "pigeon"], "transport"),
        (["--loopback", "--mode", "sideways"], "mode"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str) -> None:
    """Bad input: exit 2 and one line that names the option."""
    done = probe(*arguments)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
