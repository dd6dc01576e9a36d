"""``kvferry demo``: a handoff on this machine, compared with one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.cli.options import Flag, Whole
from kvferry.cli.output import check_out, write_whole
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.demo import DemoOptions, DemoResult
    from kvferry.engines.reference import GrammarText

__all__ = ["DemoFlags", "demo"]

# More than any context holds; a device or a log given by mistake is not read to its end.
_MAX_FILE_NBYTES = 16 << 20


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFlags:
    """What is handed over, and how."""

    transport: Literal["shm", "tcp", "nixl", "mooncake"] = "shm"
    "How the KV blocks travel."
    mode: Literal["push", "pull"] = "pull"
    "Who starts the move: prefill pushes while it computes, or decode pulls."
    prompt: str | None = None
    "The user's message. Default: a text of about 1,500 tokens."
    prompt_file: Path | None = None
    "The same, from a UTF-8 file."
    tokens: Whole = 64
    "How many tokens to decode at most."
    temperature: float = 0.0
    "0 is greedy; above it, tokens are sampled."
    seed: Whole | None = None
    "Of the sampling. Default: 0."
    model: Literal["auto", "smollm2", "tiny"] = "auto"
    "SmolLM2-135M, or random weights of the same class; auto takes the first where it is installed."
    block_size: Whole = 16
    "Tokens of a block in the prefill worker's pool."
    decode_block_size: Whole | None = None
    "The same in the decode worker's pool. Default: alike."
    axis_order: Literal["NHD", "HND", "HND-transposed"] = "NHD"
    "Order of tokens and heads inside the prefill worker's blocks, and whether keys lie transposed there."
    decode_axis_order: Literal["NHD", "HND", "HND-transposed"] | None = None
    "The same at the decode worker. Default: alike."
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    "What the prefill worker stores K and V as (bfloat16 needs kvferry[convert])."
    decode_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    "The same at the decode worker. Default: alike. A narrower one needs --allow-lossy."
    allow_lossy: Annotated[bool, Flag] = False
    "Values may be rounded on the way; then the continuations may differ, and that is no failure."
    wire_format: Literal["float8_e4m3fn", "int8"] | None = None
    "K and V cross as this, with a scale for each (block, head). Lossy."
    tp: Whole = 1
    "Ranks of the prefill worker: each has a pool and a share of the KV heads (1 and 3 of SmolLM2's 3)."
    decode_tp: Whole | None = None
    "Ranks of the decode worker. Default: alike."
    speculative: Whole = 0
    "Speculative decoding with so many drafts a round: handed over with drafts pending."
    json_schema: Path | None = None
    "The output is JSON of the schema in this file (needs kvferry[grammar])."
    grammar: Path | None = None
    "The output is a word of the Lark grammar in this file (needs kvferry[grammar])."
    tls: Annotated[bool, Parameter(name=("--tls", "--encrypt"), negative="")] = False
    "Encrypt tcp, with certificates made for this demo (needs kvferry[tls])."

    def options(self) -> DemoOptions:
        """The library's own record of them."""
        from kvferry.demo import DemoOptions

        return DemoOptions(
            transport=self.transport,
            mode=self.mode,
            prompt=_prompt(self.prompt, self.prompt_file),
            max_tokens=self.tokens,
            temperature=self.temperature,
            seed=self.seed,
            model=self.model,
            block_size=self.block_size,
            decode_block_size=self.decode_block_size,
            axis_order=self.axis_order,
            decode_axis_order=self.decode_axis_order,
            dtype=self.dtype,
            decode_dtype=self.decode_dtype,
            allow_lossy=self.allow_lossy,
            wire_format=self.wire_format,
            tp=self.tp,
            decode_tp=self.decode_tp,
            num_drafts=self.speculative,
            grammar=_grammar(self.json_schema, self.grammar),
            tls=self.tls,
        )


def demo(
    *,
    flags: DemoFlags | None = None,
    serve: Annotated[bool, Flag] = False,
    listen: str = "127.0.0.1:8080",
    trace: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> int:
    """Prefill a request in one process, decode it in another, and compare with one process.

    Exit status 0: the continuations are the same, tokens and the bits of every step's logits, or values
    were rounded on the way because that was allowed; 1: they are not, or the handoff failed.

    Parameters
    ----------
    serve
        Start prefill, decode and proxy as servers instead, and print a curl line to try; until Ctrl-C.
    listen
        HOST:PORT of that proxy.
    trace
        Write the timing split to this file, for Perfetto (ui.perfetto.dev) or about:tracing.
    as_json
        Print one JSON object.
    """
    from kvferry.cli.demo_show import StageBars, print_json, show
    from kvferry.demo import run_demo

    options = (flags or DemoFlags()).options()
    if serve:
        return _serve(options, listen, as_json=as_json)
    check_out(trace, "trace")
    with StageBars() as bars:
        result = run_demo(options, bars.update)
    if trace is not None:
        _write_trace(trace, result)
    if as_json:
        print_json(result)
    else:
        show(result, options.max_tokens)
    return 0 if result.identical or result.is_lossy else 1


def _serve(options: DemoOptions, listen: str, *, as_json: bool) -> int:
    from kvferry.cli.demo_show import StageLine, show_served
    from kvferry.demo.serving import Served, serve_demo

    with StageLine() as line:

        def ready(served: Served) -> None:
            line.stop()
            show_served(served, as_json=as_json)

        serve_demo(options, listen, line.say, ready)
    return 0


def _write_trace(path: Path, result: DemoResult) -> None:
    import msgspec

    from kvferry.observe.perfetto import trace_of

    fields = msgspec.to_builtins(result)
    parts = {name.replace("_", " "): seconds for name, seconds in fields.pop("timings").items()}
    total = parts.pop("total")
    lanes = (("request", {"time to the first token from decode": total}), ("parts", parts))
    write_whole(path, msgspec.json.encode(trace_of(lanes, fields)), "trace")


def _prompt(prompt: str | None, prompt_file: Path | None) -> str | None:
    if prompt_file is None:
        if prompt is not None and any("\ud800" <= character <= "\udfff" for character in prompt):
            raise InputError("prompt: it is not UTF-8")
        return prompt
    if prompt is not None:
        raise InputError("prompt_file: give a prompt or a file, not both")
    return _read("prompt_file", prompt_file)


def _grammar(json_schema: Path | None, lark: Path | None) -> GrammarText | None:
    from kvferry.engines.reference import GrammarKind, GrammarText

    if json_schema is not None and lark is not None:
        raise InputError("grammar: give a JSON schema or a grammar, not both")
    if json_schema is not None:
        return GrammarText(GrammarKind.JSON_SCHEMA, _read("json_schema", json_schema))
    return None if lark is None else GrammarText(GrammarKind.LARK, _read("grammar", lark))


def _read(flag: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_NBYTES + 1)
        if len(raw) > _MAX_FILE_NBYTES:
            raise InputError(f"{flag}: {path} is longer than {_MAX_FILE_NBYTES} bytes")
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{flag}: {path} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{flag}: {path}: {error.strerror}") from error
