"""Probes drive the same endpoints as everything else, compare the bytes, and say what they measured."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.cli.probe import PayloadFlags
from kvferry.cli.probe_payload import wanted_payloads
from kvferry.errors import CorruptError, InputError
from kvferry.link import Mode, decode_links, encode_links, load_links
from kvferry.model import load_shape
from kvferry.probe import LocalSite, LoopbackPair, Payload, ProbePlan, probe_loopback
from kvferry.probe import run as probe_run
from kvferry.probe.addresses import data_addresses, loopback_address
from kvferry.probe.plan import MAX_NODES, passes_of
from kvferry.size import kv_size
from probe_kit import probe

SMALL = Payload(256 << 10, 16 << 10)


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
            block = pair.decode.room.tables(pair.payload, 0)[0].ids[3]
            pair.decode.pool.array[block * 4096] ^= 1
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
        assert pair.keys() >= {"from", "to", "transport_used", "path", "mode", "samples", "fit"}
        assert pair["registration_seconds"] > 0
        assert pair["fit"].keys() == {"a_seconds", "o_seconds", "bytes_per_second", "worst_error"}
        assert len(pair["samples"]) >= 6
    links = load_links(str(out))
    assert all(pair.measured and pair.date is not None for pair in links.pairs)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "loopback"),
        (["tcp://127.0.0.1:1"], "peers"),
        (["127.0.0.1:1", "127.0.0.1:1"], "twice"),
        (["--loopback", "127.0.0.1:1"], "loopback"),
        (["--loopback", "--incast", "2"], "incast"),
        (["--loopback", "--ray"], "loopback"),
        (["--ray", "127.0.0.1:1", "127.0.0.1:2"], "ray"),
        (["--ray", "--cert", "me.pem"], "me.pem"),
        (["--loopback", "--under-load"], "under_load"),
        (["--loopback", "--tokens", "5"], "model"),
        (["--loopback", "--model", "shape:2x2x64"], "tokens"),
        (["--loopback", "--model", "shape:2x2x64", "--tokens", "9", "--bytes", "1MiB"], "bytes"),
        (["--loopback", "--seconds", "0"], "seconds"),
        (["--loopback", "--seconds", "nan"], "seconds"),
        (["--loopback", "--line-rate", "fast"], "line_rate"),
        (["--loopback", "--transport", "inproc"], "inproc"),
        (["--loopback", "--bytes", "many"], "bytes"),
        (["--loopback", "--bytes", "1"], "bytes"),
        (["--loopback", "--block-bytes", "3"], "block_bytes"),
        (["--loopback", "--repeat", "0"], "repeat"),
        (["--loopback", "--transport", "pigeon"], "transport"),
        (["--loopback", "--mode", "sideways"], "mode"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Bad input: exit 2 and one line that names the option."""
    assert run(["probe", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert named in err


def test_agents_that_are_not_there_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    """One line and status 1, with each address that did not answer."""
    peers = [f"127.0.0.1:{port}?plain=yes" for port in (1, 2, 3)]
    assert run(["probe", *peers]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    for peer in peers:
        assert line.count(f"tcp://{peer}") == 1


def test_a_models_payload_has_its_bytes_pieces_and_layers() -> None:
    """As many bytes and descriptors as ``kvferry size`` says cross the wire, to within one block a region."""
    size = kv_size(load_shape("shape:32x8x128"), 4096, block_size=16)
    (named,) = wanted_payloads(PayloadFlags(model="shape:32x8x128", tokens=4096)).named
    payload = named.payload
    # By the rule of sizes K and V of a block are one piece: 32 regions, of which a layer has two.
    assert 2 * payload.layers == 32
    assert payload.block_bytes == 2 * 16 * 8 * 128 * 2
    assert payload.descriptors == size.descriptors
    assert payload.moved_nbytes == size.wire_bytes - size.state_bytes


def test_the_payloads_of_a_trace_are_its_quantiles(tmp_path: Path) -> None:
    """p50, p95 and p99 of the prompt lengths; the largest is what is measured."""
    trace = tmp_path / "trace.csv"
    rows = "\n".join(f"{tokens},1" for tokens in range(1, 101))
    trace.write_text(f"prompt_tokens,output_tokens\n{rows}\n")
    wanted = wanted_payloads(PayloadFlags(model="shape:4x2x64", prompt_lengths=trace))
    assert [named.name for named in wanted.named] == ["p50: 51 tokens", "p95: 96 tokens", "p99: 100 tokens"]
    assert wanted.largest == wanted.named[-1].payload
    trace.write_text("prompt_tokens\n" + "\n".join(str(tokens) for tokens in range(1, 101)))
    assert wanted_payloads(PayloadFlags(model="shape:4x2x64", prompt_lengths=trace)) == wanted


@pytest.mark.slow
def test_a_probe_of_many_pairs_keeps_their_fits_and_not_each_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 34 nodes write a link file that no verb reads; a note says so, and the file is read back."""
    plan = ProbePlan(largest=SMALL, transports=("shm",), modes=(Mode.PULL,), repeats=2)
    for most, kept in ((1, True), (0, False)):
        monkeypatch.setattr(probe_run, "FLOWS_WITH_SAMPLES", most)
        result = asyncio.run(probe_loopback(plan, lambda _progress: None))
        (pair,) = result.links.pairs
        assert pair.fits[0].fit.samples > 0
        assert bool(pair.samples) is kept
        assert any("and not each copy" in note for note in result.notes) is not kept
        assert decode_links(encode_links(result.links)) == result.links


def test_more_nodes_than_one_probe_can_carry_are_refused_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything is opened at any of them."""
    plan = ProbePlan(largest=SMALL, transports=("tcp",))
    said = f"{MAX_NODES + 1} nodes, one probe takes at most {MAX_NODES}"
    with pytest.raises(InputError, match=said):
        passes_of([LocalSite("one", 1)] * (MAX_NODES + 1), plan)
    assert run(["probe", *(f"192.0.2.1:{port}" for port in range(1, MAX_NODES + 2))]) == 2
    assert said in capsys.readouterr().err  # and nobody was asked: that would have taken its time


def test_libraries_with_tcp_beside_them_listen_where_tcp_would() -> None:
    """Not at a name, as shm does: a probe or the doctor could never have tried them."""
    assert loopback_address("nixl", "x") == "nixl://127.0.0.1:0"
    assert loopback_address("shm", "x").startswith("shm://x-")
    plain = "tcp://10.0.0.1:7400?plain=yes"
    both = data_addresses(plain, ("tcp", "nixl"), ())
    assert both == ("tcp://10.0.0.1:0?plain=yes", "nixl://10.0.0.1:0?plain=yes")
    assert data_addresses("tcp://10.0.0.1:7400", ("nixl",), (), tls=True) == ("nixl://10.0.0.1:0",)
    assert data_addresses("tcp://[fd00::1]:7400?plain=yes", ("nixl",), ()) == (
        "nixl://[fd00::1]:0?plain=yes",
    )
    given = ("mooncake://10.0.0.1:0?wildcard=yes",)
    assert data_addresses(plain, ("mooncake",), given) == given  # what its owner allows, word for word
