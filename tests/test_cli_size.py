"""``kvferry size`` as a person uses it: golden sizes, units, comparison, plot, and bad input."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from kvferry.cli import run
from kvferry.cli.size import SizeOptions
from kvferry.cli.size_models import size_models
from kvferry.cli.size_plot import window_dots
from size_cases import GoldenCase, golden_cases

JSON_KEYS = {
    *("tokens", "cached_tokens", "logical_bytes", "blocked_bytes", "rank_bytes", "allocated_bytes"),
    *("wire_bytes", "descriptors", "constant_bytes", "bytes_per_token", "state_bytes", "groups"),
}
OPTIONS = (
    *("tokens", "cached", "kv-dtype", "k-dtype", "v-dtype", "tp", "pp", "block-size"),
    *("draft", "draft-layers", "encoder-tokens", "json", "plot"),
)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, config: object, name: str = "config.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(json.dumps(config))
    return path


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kvferry")), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("case", golden_cases(), ids=lambda case: case.name)
def test_golden_sizes_through_the_command_line(
    case: GoldenCase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every golden row is exact through the command line with the row's options."""
    path = write(tmp_path, case.config)
    objects = []
    for tokens in case.token_counts:
        assert run(["size", str(path), "--tokens", str(tokens), *case.options, "--json"]) == 0
        objects.append(json.loads(capsys.readouterr().out))
    assert case.value_of(objects) == case.expected


def test_json_has_the_promised_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--json`` prints one object on stdout, with every key that others rely on."""
    write(tmp_path, LLAMA)
    assert run(["size", str(tmp_path), "--tokens", "4096", "--json"]) == 0
    printed = capsys.readouterr()
    size = json.loads(printed.out)
    assert printed.out.count("\n") == 1
    assert set(size) >= JSON_KEYS
    assert [group["kind"] for group in size["groups"]] == ["full_attention"]
    assert all(time["is_measured"] is False for time in size["link_times"])


def test_bits_and_bytes_of_the_known_trap(capsys: pytest.CaptureFixture[str]) -> None:
    """2 x 4096 x 80 x 1024 x 2 is 1.34 GB; 10.7 is its bits, and the bytes of the 64-head model."""
    assert run(["size", "shape:80x8x128", "--tokens", "4096"]) == 0
    assert "1,342,177,280 B = 1.34 GB = 1.25 GiB = 10.7 Gb" in capsys.readouterr().out
    assert run(["size", "shape:80x64x128", "--tokens", "4096"]) == 0
    assert "10,737,418,240 B = 10.7 GB = 10 GiB = 85.9 Gb" in capsys.readouterr().out


def test_table_says_what_a_person_can_act_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table names each layer group, the five numbers, and link times marked unmeasured."""
    config = {**LLAMA, "model_type": "mistral", "sliding_window": 1024}
    path = write(tmp_path, config)
    options = ["--tokens", "4096", "--cached", "3584", "--tp", "8", "--block-size", "16"]
    assert run(["size", str(path), *options]) == 0
    out = capsys.readouterr().out
    for text in ("sliding_window 1,024", "constant", "logical", "blocked", "per rank", "allocated", "wire"):
        assert text in out
    assert "descriptors" in out
    assert out.count("unmeasured") == 5


def test_several_models_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Several models give one table with a column each, or one object with a list."""
    a, b = write(tmp_path / "small", LLAMA), write(tmp_path / "large", {**LLAMA, "num_hidden_layers": 64})
    assert run(["size", str(a), str(b), "--tokens", "1"]) == 0
    out = capsys.readouterr().out
    assert "small" in out
    assert "large" in out
    assert run(["size", str(a), str(b), "--tokens", "1", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert [model["logical_bytes"] for model in models] == [131072, 262144]


def test_warnings_go_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An assumption is said on stderr and in the object, and stdout stays one object."""
    path = write(tmp_path, {**LLAMA, "model_type": "brand_new"})
    assert run(["size", str(path), "--tokens", "1", "--json"]) == 0
    printed = capsys.readouterr()
    assert "brand_new" in printed.err
    assert any("brand_new" in warning for warning in json.loads(printed.out)["warnings"])


def test_plot_draws_all_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--plot`` writes a picture with one line a model and says so on stderr."""
    pytest.importorskip("matplotlib", reason="extra [plot] is not installed")
    path, picture = (
        write(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 1024}),
        tmp_path / "o.svg",
    )
    assert run(["size", str(path), "shape:4x2x64", "--tokens", "100", "--plot", str(picture), "--json"]) == 0
    printed = capsys.readouterr()
    assert str(picture) in printed.err
    assert picture.read_text().startswith("<?xml")
    assert len(json.loads(printed.out)["models"]) == 2


def test_help_needs_no_extra() -> None:
    """``kvferry size --help`` works with no optional package, and lists every option."""
    program = (
        "import sys\n"
        "for name in ('matplotlib', 'torch', 'transformers', 'gguf', 'tokenizers'):\n"
        "    sys.modules[name] = None\n"
        "from kvferry.cli import run\n"
        "sys.exit(run(['size', '--help']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0
    for option in OPTIONS:
        assert f"--{option}" in result.stdout


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_reader_that_goes_away_gets_no_traceback() -> None:
    """Output into a closed pipe (``| head``) ends the command quietly."""
    command = [str(Path(sys.executable).with_name("kvferry")), "size", "shape:4x2x64", "--tokens", "9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""


SHAPE = "shape:4x2x64"
BAD = {
    "tokens 1e99": ([SHAPE, "--tokens", "1e99"], "tokens"),
    "tokens NaN": ([SHAPE, "--tokens", "NaN"], "tokens"),
    "cached over tokens": ([SHAPE, "--tokens", "5", "--cached", "6"], "cached"),
    "tp 0": ([SHAPE, "--tokens", "5", "--tp", "0"], "tp"),
    "no such file": (["/nowhere/config.json", "--tokens", "5"], "model"),
}
MORE_BAD = {
    "tokens 5.7": ([SHAPE, "--tokens", "5.7"], "tokens"),
    "tokens negative": ([SHAPE, "--tokens", "-5"], "tokens"),
    "tokens zero": ([SHAPE, "--tokens", "0"], "tokens"),
    "tokens missing": ([SHAPE], "tokens"),
    "tokens of 5,000 digits": ([SHAPE, "--tokens", "9" * 5000], "tokens"),
    "cached negative": ([SHAPE, "--tokens", "5", "--cached", "-1"], "cached"),
    "tp that does not divide": ([SHAPE, "--tokens", "5", "--tp", "3"], "tp"),
    "pp over layers": ([SHAPE, "--tokens", "5", "--pp", "5"], "pp"),
    "block size 0": ([SHAPE, "--tokens", "5", "--block-size", "0"], "block_size"),
    "unknown dtype": ([SHAPE, "--tokens", "5", "--kv-dtype", "fp7"], "kv_dtype"),
    "draft layers alone": ([SHAPE, "--tokens", "5", "--draft-layers", "1"], "draft_layers"),
    "draft layers 0": ([SHAPE, "--tokens", "5", "--draft", "eagle", "--draft-layers", "0"], "draft"),
    "draft without MTP": ([SHAPE, "--tokens", "5", "--draft", "mtp"], "draft"),
    "no model": (["--tokens", "5"], "MODEL"),
    "bad shape": (["shape:4x2", "--tokens", "5"], "model"),
    "shape of zero heads": (["shape:4x0x64", "--tokens", "5"], "model"),
    "shape too large": (["shape:4x99999999x64", "--tokens", "5"], "model"),
    "unknown option": ([SHAPE, "--tokens", "5", "--tokenz", "5"], "tokenz"),
    "tokens with junk past 40 letters": ([SHAPE, "--tokens", "4096" + 40 * " " + "junk"], "tokens"),
    "tokens in other digits": ([SHAPE, "--tokens", "\uff14\uff10"], "tokens"),
    "tokens without a value": ([SHAPE, "--tokens"], "--tokens: needed"),
    "model of 300 letters": (["a" * 300, "--tokens", "5"], "File name too long"),
    "model of no letters": (["", "--tokens", "5"], "model"),
    "model with a zero byte": (["a\0b", "--tokens", "5"], "model"),
    "name of a hub": (["meta-llama/Llama-3.1-8B", "--tokens", "5"], "not downloaded"),
    "draft that is no file": ([SHAPE, "--tokens", "5", "--draft", "eagle3"], "draft: eagle3: "),
    "draft layers 0 of mtp": ([SHAPE, "--tokens", "5", "--draft", "mtp", "--draft-layers", "0"], "than 1"),
    "encoder tokens for none": ([SHAPE, "--tokens", "5", "--encoder-tokens", "5"], "cross attention"),
    "plot without an end": ([SHAPE, "--tokens", "5", "--plot", "x"], "plot: 'x'"),
    "plot to a folder": ([SHAPE, "--tokens", "5", "--plot", "/usr"], "plot: '/usr'"),
    "plot to no name": ([SHAPE, "--tokens", "5", "--plot", ""], "plot"),
    "plot to a device": ([SHAPE, "--tokens", "5", "--plot", "/dev/full"], "plot: '/dev/full'"),
    "plot to nowhere": ([SHAPE, "--tokens", "5", "--plot", "/nowhere/o.svg"], "plot"),
    "plot of no kind": ([SHAPE, "--tokens", "5", "--plot", "o.xyz"], "plot"),
}


@pytest.mark.parametrize(("arguments", "named"), BAD.values(), ids=BAD.keys())
def test_bad_option_through_a_real_process(arguments: list[str], named: str) -> None:
    """A bad option: one line on stderr that names the field, nothing on stdout, exit status 2."""
    result = process("size", *arguments)
    assert result.returncode == 2
    assert named in one_line(result)


@pytest.mark.parametrize(("arguments", "named"), MORE_BAD.values(), ids=MORE_BAD.keys())
def test_bad_option_is_one_line_and_exit_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for every other option, in this process."""
    assert run(["size", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert len(printed.err) < 500


BAD_FILES = {
    "empty": ("", "empty"),
    "not JSON": ("{'model_type': 'llama'}", "JSON"),
    "a list": ("[1, 2]", "list"),
    "negative": (json.dumps({**LLAMA, "num_hidden_layers": -32}), "num_hidden_layers"),
    "text": (json.dumps({**LLAMA, "num_key_value_heads": "eight"}), "num_key_value_heads"),
    "zero heads": (json.dumps({**LLAMA, "num_attention_heads": 0}), "num_attention_heads"),
    "NaN": (json.dumps({**LLAMA, "hidden_size": float("nan")}), "hidden_size"),
}
MORE_BAD_FILES = {
    "cut off": (json.dumps(LLAMA)[:-9], "JSON"),
    "a number": ("5", "int"),
    "nested too deep": ("[" * 100_000, "JSON"),
    "not text": ("\udcff\udcfe", "JSON"),
    "1e99": (json.dumps({**LLAMA, "head_dim": 1e99}), "head_dim"),
    "huge": (json.dumps({**LLAMA, "head_dim": 10**30}), "head_dim"),
    "5,000 digits": (json.dumps(LLAMA)[:-1] + ', "head_dim": ' + "9" * 5000 + "}", "JSON"),
    "true": (json.dumps({**LLAMA, "num_hidden_layers": True}), "num_hidden_layers"),
    "missing": (json.dumps({"model_type": "llama"}), "num_hidden_layers"),
    "dtype": (json.dumps({**LLAMA, "torch_dtype": "bf15"}), "torch_dtype"),
    "nested": (json.dumps({"model_type": "llava", "text_config": [1]}), "text_config"),
    "model_type": (json.dumps({**LLAMA, "model_type": 5}), "model_type"),
}


@pytest.mark.parametrize(("text", "named"), BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_config_through_a_real_process(text: str, named: str, tmp_path: Path) -> None:
    """A bad config: one line on stderr that names the file's fault or the field, exit status 2."""
    path = tmp_path / "config.json"
    path.write_text(text)
    result = process("size", path, "--tokens", 5)
    assert result.returncode == 2
    assert named in one_line(result)


@pytest.mark.parametrize(("text", "named"), MORE_BAD_FILES.values(), ids=MORE_BAD_FILES.keys())
def test_bad_config_is_one_line_and_exit_2(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for more kinds of bad files, in this process."""
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    assert run(["size", str(path), "--tokens", "5"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert named in printed.err
    assert len(printed.err) < 500


def on_a_terminal(columns: int, *arguments: str) -> str:
    """What ``kvferry`` prints on a terminal of so many columns."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    command = [str(Path(sys.executable).with_name("kvferry")), *arguments]
    printed = b""
    with subprocess.Popen(command, stdout=follower, stderr=subprocess.PIPE, env=environment) as running:
        os.close(follower)
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # how a terminal says that its other end is closed
                break
            if not piece:
                break
            printed += piece
    os.close(leader)
    assert running.returncode == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", printed.decode())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(columns: int, tmp_path: Path) -> None:
    """Whatever the width, every number is whole and nothing is shortened with dots."""
    path = write(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 1024})
    printed = on_a_terminal(columns, "size", str(path), "shape:80x8x128", "--tokens", "4096", "--tp", "8")
    assert "1,342,177,280 B" in printed
    assert "327,680 per token" in printed
    assert "…" not in printed
    single = on_a_terminal(columns, "size", "shape:80x8x128", "--tokens", "4096")
    assert "1,342,177,280 B" in single
    assert ("1,342,177,280 B = 1.34 GB" in single) == (columns > 80)


@pytest.mark.parametrize("model_type", ["[/bold]", "[red]x", ":fire:", "a\x1b[31mb\rc\n"])
def test_a_stranger_s_text_is_printed_as_text(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No markup, emoji, escape sequence or line break of a config reaches the terminal."""
    path = write(tmp_path, {**LLAMA, "model_type": model_type})
    assert run(["size", str(path), "--tokens", "5"]) == 0
    printed = capsys.readouterr()
    shown = model_type.replace("\x1b", "\\x1b").replace("\r", "\\r").replace("\n", "\\n")
    assert f"({shown})" in printed.out
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", printed.out + printed.err)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_name_that_is_no_utf_8(options: list[str], tmp_path: Path) -> None:
    """A file name of other bytes than UTF-8 is printed escaped, in the object too."""
    path = os.fsencode(tmp_path) + b"/caf\xe9.json"
    with open(path, "w", encoding="utf-8") as file:
        json.dump(LLAMA, file)
    command = [str(Path(sys.executable).with_name("kvferry")), "size", path, "--tokens", "5", *options]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert b"caf\\" in result.stdout
    if options:
        assert "caf" in json.loads(result.stdout)["model"]


def shell(script: str) -> subprocess.CompletedProcess[str]:
    command = f"{Path(sys.executable).with_name('kvferry')} {script}"
    return subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"size {SHAPE} --tokens 5 >&-", "stdout"),
        (f"size {SHAPE} --tokens 5 >/dev/full", "No space left"),
        (f"size {SHAPE} --tokens 5 --json >/dev/full", "No space left"),
        (">/dev/full", "No space left"),
        ("size --help >/dev/full", "No space left"),
    ],
)
def test_an_output_that_cannot_be_written_is_one_line(script: str, said: str) -> None:
    """A closed stdout or a full disk: one line on stderr, exit status 1."""
    result = shell(script)
    assert result.returncode == 1
    assert said in one_line(result)


def test_a_closed_stderr_leaves_stdout_pure(tmp_path: Path) -> None:
    """With nowhere to warn, the warning does not land in the JSON object."""
    path = write(tmp_path, {name: value for name, value in LLAMA.items() if name != "torch_dtype"})
    result = shell(f"size {path} --tokens 5 --json 2>&-")
    assert result.returncode == 0
    assert json.loads(result.stdout)["warnings"]
    assert shell(f"size {path} --tokens 5 --json 2>/dev/full").stdout == result.stdout


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    """Only regular files are read: a named pipe would be waited for without end."""
    os.mkfifo(tmp_path / "config.json")
    result = process("size", tmp_path, "--tokens", 5)
    assert result.returncode == 2
    assert "not a regular file" in one_line(result)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission_is_one_line(tmp_path: Path) -> None:
    """A config in a folder that may not be entered: one line, exit status 2."""
    path = write(tmp_path / "closed", LLAMA)
    path.parent.chmod(0)
    try:
        result = process("size", path, "--tokens", 5)
    finally:
        path.parent.chmod(0o700)
    assert result.returncode == 2
    assert "Permission denied" in one_line(result)


def test_python_m_kvferry_is_the_command() -> None:
    """``python -m kvferry`` does what ``kvferry`` does, and calls itself so."""
    command = [sys.executable, "-m", "kvferry", "size", SHAPE]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert "kvferry size --help" in one_line(result)


WHISPER = {
    "model_type": "whisper",
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "d_model": 16,
    "torch_dtype": "bfloat16",
}


def test_options_that_do_not_concern_a_model_are_said_and_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model with cross attention beside one without, one with MTP layers beside one without."""
    llama, whisper = write(tmp_path / "llama", LLAMA), write(tmp_path / "whisper", WHISPER)
    assert run(["size", str(llama), str(whisper), "--tokens", "5", "--encoder-tokens", "7", "--json"]) == 0
    printed = capsys.readouterr()
    sizes = json.loads(printed.out)["models"]
    assert sizes[1]["groups"][1]["logical_bytes"] == 7 * 2 * 2 * 16 * 2
    assert sizes[0]["warnings"] == ["encoder_tokens: this model has no cross attention; ignored"]
    assert sizes[1]["warnings"] == []
    assert "llama: encoder_tokens" in printed.err

    mtp = write(tmp_path / "mtp", {**LLAMA, "model_type": "glm4_moe", "num_nextn_predict_layers": 1})
    assert run(["size", str(llama), str(mtp), "--tokens", "5", "--draft", "mtp", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["models"]
    assert [len(size["groups"]) for size in sizes] == [1, 2]
    assert sizes[0]["warnings"] == ["draft: this model has none for mtp; ignored"]


def test_an_error_of_one_of_several_models_says_of_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With several models the error names the file; with one it begins with the field."""
    good, bad = write(tmp_path / "good", LLAMA), write(tmp_path / "bad", {**LLAMA, "head_dim": "x"})
    assert run(["size", str(good), str(bad), "--tokens", "5"]) == 2
    assert capsys.readouterr().err.startswith("kvferry: bad: head_dim: ")
    assert run(["size", str(bad), "--tokens", "5"]) == 2
    assert capsys.readouterr().err.startswith("kvferry: head_dim: ")
    assert run(["size", str(good), str(tmp_path / "none"), "--tokens", "5"]) == 2
    assert capsys.readouterr().err.startswith("kvferry: none: model: ")
    three = ["size", str(good), "shape:4x1x64", "--tokens", "5", "--tp", "3"]
    assert run(three) == 2
    assert capsys.readouterr().err.startswith("kvferry: good: tp: 3 ")


def test_rows_of_layer_groups_have_names_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek V4's compressed rows are told apart by their ratio and by what they hold."""
    config = next(case.config for case in golden_cases() if case.name.startswith("deepseek-v4-flash fp8"))
    assert run(["size", str(write(tmp_path, config)), "--tokens", "1000"]) == 0
    rows = [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()]
    names = [row for row in rows if row.startswith(("compress", "sliding"))]
    assert names == [
        "sliding_window 128",
        "compressed 1/4",
        "compressed_indexer 1/4",
        "compressor_state 8",
        "compressed 1/128",
        "compressor_state 128",
    ]


def test_the_fullest_rank_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of unlike stages the table shows the largest: 7 layers over 2 stages are 4 and 3."""
    assert run(["size", "shape:7x1x1", "--tokens", "1000", "--pp", "2"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "per rank" in line)
    assert "16,000 B" in line


def test_a_chunk_is_shown_as_what_comes_and_goes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A chunk that has turned is in no constant part."""
    config = {**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 64, "layer_types": None}
    assert run(["size", str(write(tmp_path, config)), "--tokens", "100"]) == 0
    out = capsys.readouterr().out
    assert "0 up to a chunk" in next(line for line in out.splitlines() if "chunked_local" in line)
    assert next(line for line in out.splitlines() if "constant part" in line).split()[-2:] == ["0", "B"]


def test_dots_of_a_plot_are_where_windows_fill(tmp_path: Path) -> None:
    """A dot lies on the curve at the window's length: the size of that many tokens, nothing cached."""
    path = write(tmp_path, {**LLAMA, "model_type": "mistral", "sliding_window": 1024})
    (entry,) = size_models([str(path)], SizeOptions(tokens=4096, cached=4096))
    assert window_dots(entry, 2**17) == ([1024], [1024 * 131072])
    assert window_dots(entry, 512) == ([], [])
