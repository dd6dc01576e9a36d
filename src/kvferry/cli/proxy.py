"""``kvferry proxy``: one address before prefill and decode workers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from cyclopts import Parameter

from kvferry.cli.check import Time
from kvferry.cli.options import Whole

if TYPE_CHECKING:
    from kvferry.proxy import ProxyOptions
    from kvferry.proxy.run import Proxying

__all__ = ["ProxyFlags", "proxy"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyFlags:
    """The workers, and how requests are shared out among them."""

    prefill: Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
    "[NAME=]URL of each prefill worker (NAME: its node in a link file; default: host), dns:NAME:PORT, @FILE."
    decode: Annotated[tuple[str, ...], Parameter(consume_multiple=True)]
    "The same of each decode worker."
    listen: str = "127.0.0.1:8080"
    "HOST:PORT; port 0 takes a free one."
    mode: Literal["pull", "push", "push-by-decode"] = "pull"
    "pull: prefill answers with a ticket; push: decode reserves; push-by-decode: and asks prefill (vLLM)."
    first_token: Literal["prefill", "decode"] = "prefill"  # noqa: S105 - a token of text
    "prefill: give its token out at once, where that is exact; decode: never."
    links: str | None = None
    "A file that `kvferry probe` wrote, or a preset: pairs are chosen by what a move costs on them."
    model: str | None = None
    "A config.json, a folder with one, or shape:LAYERSxKV_HEADSxHEAD_DIM: needed with --links."
    kv_dtype: str | None = None
    "Dtype of K and V. Default: the config's own."
    block_size: Whole = 16
    "Tokens per block."
    tp: Whole = 1
    "Tensor-parallel ranks."
    profile: str | None = None
    "Compute profile of a worker: with --links, prompts whose move takes longer than their prefill stay."
    profile_model: str | None = None
    "Which model of the profile's file."
    profile_gpu: str | None = None
    "Which GPU of the profile's file."
    profile_tp: Whole | None = None
    "Which TP of the profile's file."
    ttft: Time | None = None
    "A TTFT to keep: where `check` says that the move alone breaks it, decode computes the prompt."
    min_prompt_tokens: Whole = 1
    "Shorter prompts are never handed over."
    retries: Whole = 1
    "Further pairs that are tried when a worker fails."
    fallback: Literal["decode", "fail"] = "decode"
    "When no handoff comes about: decode computes alone, or the request fails."
    connect_seconds: float = 2.0
    "How long a worker may take to accept."
    prefill_seconds: float = 60.0
    "How long a prefill worker may take to answer."
    silence_seconds: float = 60.0
    "How long a decode worker may say nothing in a stream."
    answer_seconds: float = 600.0
    "How long an answer that is not streamed may take; it is not tried again, and no worker is blamed."
    cooldown_seconds: float = 5.0
    "How long a worker that failed is left out."

    def options(self) -> ProxyOptions:
        """The library's own record of them, files read. Raises InputError naming the option."""
        from kvferry.cli.plan_files import load_profile
        from kvferry.model import load_shape
        from kvferry.plan.compute_file import ProfileChoice
        from kvferry.plan.payload import PoolFormat
        from kvferry.proxy import ProxyOptions
        from kvferry.proxy.options import find_places
        from kvferry.transport.peers import is_watched

        profile = None
        if self.profile is not None:
            choice = ProfileChoice(self.profile_model, self.profile_gpu, self.profile_tp)
            profile = load_profile(self.profile, choice)
        plain = (
            "listen", "mode", "first_token", "links", "min_prompt_tokens", "retries", "fallback",
            "connect_seconds", "prefill_seconds", "silence_seconds", "answer_seconds", "cooldown_seconds",
        )  # fmt: skip
        return ProxyOptions(
            prefill=find_places(self.prefill, "prefill"),
            decode=find_places(self.decode, "decode"),
            prefill_entries=self.prefill if is_watched(self.prefill) else (),
            decode_entries=self.decode if is_watched(self.decode) else (),
            shape=None if self.model is None else load_shape(self.model),
            pool=PoolFormat(kv_dtype=self.kv_dtype, block_size=self.block_size, tp=self.tp),
            profile=profile,
            target_seconds=self.ttft,
            **{name: getattr(self, name) for name in plain},
        )


def proxy(
    *, flags: ProxyFlags, as_json: Annotated[bool, Parameter(name="--json", negative="")] = False
) -> None:
    """Serve OpenAI's completions and chat from prefill and decode workers; docs/proxy.md is the contract.

    It ends on Ctrl-C. Each answer's headers (x-kvferry-...) say how it came about.

    Parameters
    ----------
    as_json
        Print the line that says it is ready as one JSON object.
    """
    from kvferry.proxy import run_proxy

    def ready(said: Proxying) -> None:
        if as_json:
            print(msgspec.json.encode(said).decode())
        else:
            print(f"{said.url} before {len(said.prefill)} prefill, {len(said.decode)} decode; Ctrl-C ends it")
            for pair, tokens in said.thresholds.items():
                print(f"{pair}: " + ("never handed over" if tokens is None else f"from {tokens} tokens on"))
        sys.stdout.flush()

    run_proxy(flags.options(), ready)
