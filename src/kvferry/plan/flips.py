"""Where the answer of ``check`` flips: each knob turned alone, all else as asked.

Every knob is monotone but the length of a prompt for models with chunked attention, so each border
is found by halving: the answer on both sides of it has been computed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.plan.check import Answer, Verdict, answer
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.promise import GivenPrefill, Promise
from kvferry.units import format_rate

__all__ = ["Flip", "flips"]

MAX_PROMPT_TOKENS = 1 << 22
"""Longer prompts are not looked for."""
_DTYPES = ("bf16", "fp8_e4m3", "nvfp4", "int4_per_token_head")
_SPEEDS = 1e-6, 1e6


class Flip(msgspec.Struct, frozen=True):
    """One knob.

    Args:
        value: where the answer flips; None: nowhere in what was looked at.
        ttft_seconds: at that value.
        says: the same in words.
        is_estimate: the answer there is an estimate: the link or prefill was not measured, or not nearly so
            far. Where it flips nowhere: of the best that was looked at.
    """

    value: float | int | str | None
    ttft_seconds: float | None
    says: str
    is_estimate: bool = False


def flips(promise: Promise, now: Answer) -> dict[str, Flip]:
    """Every knob's flip; empty where prefill is unknown. On an unmeasured link they are estimates too."""
    if now.ttft_seconds is None:
        return {}
    found = {
        "max_prompt_tokens": _prompt(promise),
        "min_cached_tokens": _cached(promise),
        "min_prefix_hit_share": _share(promise, _cached(promise)),
        "min_bytes_per_second": _bandwidth(promise, now),
        "kv_dtype": _dtype(promise),
        "overlap_groups": _overlap(promise, now),
    }
    return {
        # Where the question itself is unknown, that is said of the whole answer.
        knob: replace(flip, says=f"{flip.says} (estimate: beyond what was measured)")
        if flip.is_estimate and not now.unknown
        else flip
        for knob, flip in found.items()
        if flip is not None
    }


def _holds(promise: Promise) -> bool:
    ttft = answer(promise).ttft_seconds
    return ttft is not None and ttft <= promise.target_seconds


def _flip(value: float | str | None, promise: Promise, says: str) -> Flip:
    """The flip at that value, whose question is ``promise``; marked where its answer is an estimate."""
    found = answer(promise)
    return Flip(value, found.ttft_seconds, says, is_estimate=bool(found.unknown))


def _nowhere(promise: Promise, says: str) -> Flip:
    """No flip: not even ``promise`` holds. An estimate unless what is known breaks it by itself."""
    return Flip(None, None, says, is_estimate=answer(promise).verdict is Verdict.UNKNOWN)


def _border(low: int, high: int, is_good: Callable[[int], bool]) -> int:
    """The last good number, where ``low`` is good and ``high`` is not."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_good(middle) else (low, middle)
    return low


def _prompt(promise: Promise) -> Flip:
    def at(tokens: int) -> Promise:
        return replace(
            promise,
            prompt_tokens=tokens,
            cached_tokens=min(promise.cached_tokens, tokens),
        )

    note = f"with {promise.cached_tokens:,} tokens cached"
    if isinstance(promise.prefill, GivenPrefill):
        note += ", prefill taken as proportional to the tokens computed"
        if promise.prefill.cached_tokens:
            note += " or to the prompt, whichever takes longer"
    if not _holds(at(1)):
        return _nowhere(at(1), "no prompt is short enough")
    high = max(2, promise.prompt_tokens)
    while _holds(at(high)):
        if high >= MAX_PROMPT_TOKENS:
            return _flip(None, at(high), f"holds up to {high:,} tokens and more, {note}")
        high *= 2
    border = _border(1, high, lambda tokens: _holds(at(tokens)))
    return _flip(border, at(border), f"holds up to {border:,} prompt tokens, {note}")


def _cached(promise: Promise) -> Flip:
    """The fewest cached tokens, in whole blocks."""
    block = promise.pool.block_size or 1

    def at(blocks: int) -> Promise:
        return replace(promise, cached_tokens=min(blocks * block, promise.prompt_tokens))

    where = "at prefill and decode" if isinstance(promise.prefill, ComputeProfile) else "at decode"
    most = -(-promise.prompt_tokens // block)
    if _holds(at(0)):
        return _flip(0, at(0), "holds without any prefix hit")
    if not _holds(at(most)):
        return _nowhere(at(most), f"does not hold even if the whole prompt is cached {where}")
    fewest = most - _border(0, most, lambda left: _holds(at(most - left)))
    needed = at(fewest)
    says = f"holds from {needed.cached_tokens:,} tokens cached {where}"
    return _flip(needed.cached_tokens, needed, says)


def _share(promise: Promise, cached: Flip) -> Flip:
    if not isinstance(cached.value, int):
        return cached
    share = cached.value / promise.prompt_tokens
    # Rounded up: the share that is shown is enough.
    percent = -(-100 * cached.value // promise.prompt_tokens)
    return replace(cached, value=share, says=f"a prefix-hit share of {percent}%")


def _bandwidth(promise: Promise, now: Answer) -> Flip | None:
    """The least rate of each link, all other costs as they are."""
    if now.transfer.byte_seconds <= 0 or now.split.exposed_transfer_seconds <= 0:
        return None
    rate = now.payload.nbytes / promise.way.links / now.transfer.byte_seconds

    def at(factor: float) -> Promise:
        return replace(promise, way=promise.way.at_speed(factor))

    low, high = _SPEEDS
    if not _holds(at(high)):
        return _nowhere(at(high), "no rate is enough: the other parts take too long")
    if _holds(at(low)):
        return _flip(0.0, at(low), "any rate is enough")
    while high / low > 1.0005:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _holds(at(middle)) else (middle, high)
    says = f"holds from {format_rate(rate * high, round_up=True)} on, now {format_rate(rate)}"
    return _flip(rate * high, at(high), says)


def _dtype(promise: Promise) -> Flip | None:
    """The first smaller dtype with which it holds; None where it holds now or none can be used."""
    if _holds(promise):
        return None
    now = answer(promise).payload.nbytes
    tried: dict[str, Promise] = {}
    for name in _DTYPES:
        with_dtype = replace(promise, pool=replace(promise.pool, kv_dtype=name))
        try:
            found = answer(with_dtype)
        except InputError:  # this model's cache does not come in this dtype
            continue
        if found.payload.nbytes >= now:
            continue
        tried[name] = with_dtype
        if found.ttft_seconds is not None and found.ttft_seconds <= promise.target_seconds:
            return _flip(name, with_dtype, f"holds with KV as {name}; its quality is for you to judge")
    if not tried:
        return None
    *_, smallest = tried.values()
    return _nowhere(smallest, f"does not hold with KV as {', '.join(tried)} either")


def _overlap(promise: Promise, now: Answer) -> Flip | None:
    """The fewest groups with which it holds, up to one a layer."""
    most, least = promise.shape.num_layers, promise.groups if promise.chunk_tokens is None else 1
    if now.split.exposed_transfer_seconds <= 0 or most <= least or _holds(promise):
        return None

    def at(groups: int) -> Promise:
        return replace(promise, groups=groups, chunk_tokens=None)

    if not _holds(at(most)):
        return _nowhere(at(most), f"does not hold layer by layer either ({most} groups)")
    fewest = _border(least, most, lambda groups: not _holds(at(groups))) + 1
    says = f"holds when the KV leaves in {fewest} groups while prefill computes"
    return _flip(fewest, at(fewest), says)
