"""``kvferry interference``: what prefill costs the requests beside it, on a running server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from kvferry.cli.options import Whole
from kvferry.cli.output import check_out
from kvferry.errors import InputError

if TYPE_CHECKING:
    from kvferry.interference import InterferenceOptions

__all__ = ["InterferenceFlags", "interference"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class InterferenceFlags:
    """The workload, and the bounds."""

    prompt_lengths: Path | None = None
    "A trace or a CSV of lengths: your prompts."
    prompt_tokens: Annotated[tuple[Whole, ...], Parameter(consume_multiple=True)] = ()
    "Lengths in place of a file."
    rate: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = ()
    "Arrivals a second to measure beside. Default: what keeps prefill busy 30 % of the time."
    concurrency: Whole = 8
    "Streams that decode at the same time."
    output_tokens: Whole = 64
    "Tokens of a measured stream, at least."
    chunk_tokens: Whole = 2048
    "Prompt tokens that the engine computes in one step: its own chunked prefill size."
    repeats: Whole = 3
    "How often each prompt length is measured."
    window_seconds: float = 10.0
    "How long arrivals are measured at each rate."
    max_seconds: float = 180.0
    "Bound of the whole."
    max_requests: Whole = 1000
    "Bound of the whole."
    model: str | None = None
    "The served model's name. Default: the first that the server lists."
    gpu: str = "unknown"
    "A name for the profile."
    tp: Whole = 1
    "Ranks of the server, for the profile."
    seed: Whole = 0
    "Of lengths and arrivals."

    def options(self, url: str) -> InterferenceOptions:
        """The library's own record of them, the file read. Raises InputError naming the option."""
        from kvferry.interference import InterferenceOptions

        plain = (
            "concurrency", "output_tokens", "chunk_tokens", "repeats", "window_seconds", "max_seconds",
            "max_requests", "model", "gpu", "tp", "seed",
        )  # fmt: skip
        return InterferenceOptions(
            url=url,
            prompt_lengths=_lengths(self.prompt_lengths, self.prompt_tokens),
            rates=self.rate,
            **{name: getattr(self, name) for name in plain},
        )


def interference(
    url: Annotated[str, Parameter(name="URL")],
    *,
    flags: InterferenceFlags | None = None,
    out: Path | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
) -> None:
    """Measure a running OpenAI-compatible server, streamed, and write its compute profile.

    Prefill time over prompt length, decode steps alone, and decode beside arriving prompts; the laws that
    `check` and `plan` use, with their errors. It sends real load: not for a server that others use.

    Parameters
    ----------
    url
        The server: http://HOST:PORT.
    out
        Write the profile here, for `check`, `plan` and `simulate`.
    as_json
        Print the profile as one JSON object.
    """
    try:
        from kvferry.interference import check_options, measure, profile_object
    except ImportError as error:
        from kvferry.serve.listening import missing_extra

        raise missing_extra(error) from error
    from kvferry.cli.bars import Bars
    from kvferry.cli.interference_show import STAGES, show, write

    check_out(out, "out")
    options = check_options((flags or InterferenceFlags()).options(url))
    with Bars(STAGES) as bars:
        measured = asyncio.run(measure(options, bars.update))
    made = profile_object(measured)
    if out is not None:
        write(made, out)
    if as_json:
        print(msgspec.json.encode(made).decode())
    else:
        show(measured)


def _lengths(path: Path | None, tokens: tuple[int, ...]) -> tuple[int, ...]:
    from kvferry.cli.plan_files import open_trace

    if path is None:
        return tokens
    if tokens:
        raise InputError("prompt_lengths: given beside --prompt-tokens; give one of them")
    return tuple(row.prompt_tokens for row in open_trace(path, "prompt_lengths", wants_output=False))
