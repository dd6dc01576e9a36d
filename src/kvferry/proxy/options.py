"""What the proxy is asked to do. Plain records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvferry.errors import InputError
from kvferry.model import ModelShape
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.payload import PoolFormat
from kvferry.serve.options import host_port
from kvferry.transport.peers import RESOLVE_SECONDS, find_peers

__all__ = ["Place", "ProxyOptions", "check_options", "find_places", "read_place", "shown_name"]


class Place(msgspec.Struct, frozen=True):
    """A worker: its name (as link files call its node) and the base URL of its HTTP interface."""

    name: str
    url: str


class ProxyOptions(msgspec.Struct, frozen=True):
    """One proxy.

    Args:
        prefill, decode: the workers.
        prefill_entries, decode_entries: what they were found by (transport.peers), to look again while the
            proxy runs; empty: they stay as they are.
        listen: ``HOST:PORT``; port 0 takes any free one.
        mode: ``pull``: prefill answers with a ticket; ``push``: decode reserves first; ``push-by-decode``:
            decode reserves and asks prefill itself.
        first_token: ``prefill``: give prefill's token out at once where that is exact; ``decode``: never.
        links: a link file or preset, for the cost of each pair; needs ``shape``.
        shape, pool: the model and its pools, for the bytes of a prompt.
        profile: times of a decode worker, for what its own prefill would take.
        target_seconds: a TTFT to keep: handoffs that break it alone are skipped.
        min_prompt_tokens: shorter prompts are not handed over.
        retries: further prefill workers that are tried.
        fallback: what happens when no handoff comes about: ``decode`` computes alone, or ``fail``.
        connect_seconds, prefill_seconds, silence_seconds: how long a worker may take to accept, to
            answer a prefill, and to say nothing while it streams.
        answer_seconds: how long an answer that is not streamed may take: until it is whole a worker says
            nothing, so its silence tells nothing.
        cooldown_seconds: how long a worker that failed is left out.
    """

    prefill: tuple[Place, ...]
    decode: tuple[Place, ...]
    prefill_entries: tuple[str, ...] = ()
    decode_entries: tuple[str, ...] = ()
    listen: str = "127.0.0.1:8080"
    mode: Literal["pull", "push", "push-by-decode"] = "pull"
    first_token: Literal["prefill", "decode"] = "prefill"  # noqa: S105 - a token of text
    links: str | None = None
    shape: ModelShape | None = None
    pool: PoolFormat = PoolFormat()
    profile: ComputeProfile | None = None
    target_seconds: float | None = None
    min_prompt_tokens: int = 1
    retries: int = 1
    fallback: Literal["decode", "fail"] = "decode"
    connect_seconds: float = 2.0
    prefill_seconds: float = 60.0
    silence_seconds: float = 60.0
    answer_seconds: float = 600.0
    cooldown_seconds: float = 5.0


def read_place(text: str, field: str) -> Place:
    """``[NAME=]http://HOST:PORT``; without a name the host is it. Raises InputError naming the option."""
    name, equals, url = text.partition("=") if not text.startswith("http") else ("", "", text)
    base = url.removesuffix("/").removesuffix("/v1")
    scheme, _, rest = base.partition("://")
    if scheme not in {"http", "https"} or not rest or "/" in rest or (equals and not name):
        raise InputError(f"{field}: {text!r} does not read [NAME=]http://HOST:PORT")
    if ":" not in rest.rpartition("]")[2]:
        rest = f"{rest}:{443 if scheme == 'https' else 80}"
    host, port = host_port(rest, field)
    shown = f"[{host}]" if ":" in host else host
    return Place(name or host, f"{scheme}://{shown}:{port}")


def shown_name(place: Place, places: Sequence[Place]) -> str:
    """The name, with the URL where another place has it too: workers of one node may share its name."""
    is_alone = sum(other.name == place.name for other in places) <= 1
    return place.name if is_alone else f"{place.name} ({place.url})"


def find_places(
    entries: tuple[str, ...], field: str, timeout_seconds: float = RESOLVE_SECONDS
) -> tuple[Place, ...]:
    """The workers that the entries stand for now. Raises InputError naming the option, DeadlineError."""
    found = find_peers(entries, field, scheme="http", timeout_seconds=timeout_seconds)
    return tuple(read_place(text, field) for text in found)


def check_options(options: ProxyOptions) -> ProxyOptions:
    """The options, if a proxy can be made of them. Raises InputError naming the option."""
    host_port(options.listen)
    for field in ("prefill", "decode"):
        places = getattr(options, field)
        if not places:
            raise InputError(f"{field}: give one URL or more")
        if len({place.url for place in places}) < len(places):
            raise InputError(f"{field}: a URL comes twice")
    if options.links is not None and options.shape is None:
        raise InputError("links: needs --model, so that prompts have bytes")
    if options.target_seconds is not None and (options.links is None or options.profile is None):
        raise InputError("ttft: needs --links and --profile")
    for field, least, most in (
        ("min_prompt_tokens", 1, 1 << 31),
        ("retries", 0, 16),
        ("connect_seconds", 0.001, 3600.0),
        ("prefill_seconds", 0.001, 3600.0),
        ("silence_seconds", 0.001, 3600.0),
        ("answer_seconds", 0.001, 86400.0),
        ("cooldown_seconds", 0.0, 3600.0),
    ):
        if not least <= getattr(options, field) <= most:  # not NaN either
            raise InputError(f"{field}: {getattr(options, field)} is not from {least} to {most}")
    return options
