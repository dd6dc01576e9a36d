"""What is asked of a server, and within which bounds. Plain record."""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec
import numpy as np

from kvferry.errors import InputError

__all__ = ["InterferenceOptions", "check_options", "measured_lengths"]

MIN_PROMPT_TOKENS = 8
_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.95, 1.0)


class InterferenceOptions(msgspec.Struct, frozen=True):
    """One measurement.

    Args:
        url: base URL of the server, with or without ``/v1``.
        prompt_lengths: the workload's prompts, in tokens; arriving ones are drawn from them.
        rates: arrivals a second to measure beside; empty: what makes prefill busy 30 % of the time.
        concurrency: streams that decode at the same time.
        output_tokens: tokens of a measured stream, at least; more where the window needs it.
        chunk_tokens: prompt tokens that the engine computes in one step (its chunked prefill size).
        repeats: how often each prompt length is measured.
        window_seconds: how long arrivals are measured at each rate.
        max_seconds, max_requests: bounds of the whole.
        model, gpu, tp: names for the profile; the model's is the server's own by default.
        seed: of prompts and arrivals.
    """

    url: str
    prompt_lengths: tuple[int, ...]
    rates: tuple[float, ...] = ()
    concurrency: int = 8
    output_tokens: int = 64
    chunk_tokens: int = 2048
    repeats: int = 3
    window_seconds: float = 10.0
    max_seconds: float = 180.0
    max_requests: int = 1000
    model: str | None = None
    gpu: str = "unknown"
    tp: int = 1
    seed: int = 0


def check_options(options: InterferenceOptions) -> InterferenceOptions:
    """The options, if they can be measured. Raises InputError naming the option."""
    try:
        parts = urlsplit(options.url)
        is_good = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise InputError(f"url: {options.url!r} does not read http://HOST:PORT")
    if not options.prompt_lengths:
        raise InputError("prompt_lengths: give a file of lengths, or --prompt-tokens")
    shortest = min(options.prompt_lengths)
    if shortest < 1 or max(options.prompt_lengths) < 4 * MIN_PROMPT_TOKENS:
        raise InputError(f"prompt_lengths: the longest is {max(options.prompt_lengths)}, not 32 or more")
    for rate in options.rates:
        if not 0 < rate <= 10000:
            raise InputError(f"rate: {rate} is not above 0 and at most 10000 a second")
    for field, least, most in (
        ("concurrency", 1, 1024),
        ("output_tokens", 16, 1 << 16),
        ("chunk_tokens", 1, 1 << 24),
        ("repeats", 1, 100),
        ("window_seconds", 0.1, 3600.0),
        ("max_seconds", 1.0, 24 * 3600.0),
        ("max_requests", 10, 10**6),
        ("tp", 1, 4096),
    ):
        value = getattr(options, field)
        if not least <= value <= most:  # not NaN either
            raise InputError(f"{field}: {value} is not from {least} to {most}")
    return options


def measured_lengths(lengths: tuple[int, ...]) -> list[int]:
    """The lengths at which prefill is timed: quantiles of the workload, and at least three of them."""
    found = {
        max(MIN_PROMPT_TOKENS, int(value)) for value in np.quantile(lengths, _QUANTILES, method="nearest")
    }
    longest = max(found)
    for share in (2, 4, 8):
        if len(found) < 3 or (len(found) < 4 and share == 2):
            found.add(max(MIN_PROMPT_TOKENS, longest // share))
    return sorted(found)
