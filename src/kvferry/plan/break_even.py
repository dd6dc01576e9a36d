"""Where moving the cache pays: the answer of ``check`` over prompt lengths and prefix-hit shares."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from kvferry.plan.check import Verdict, answer
from kvferry.plan.promise import Promise

__all__ = ["BreakEven", "break_even"]

_SHARES = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 0.96)
# Lengths from an eighth of the prompt asked about to four times it, by halves.
_OCTAVES = (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)


class BreakEven(msgspec.Struct, frozen=True):
    """``verdicts[i][j]`` is for ``cached_shares[i]`` and ``prompt_tokens[j]``; all else as asked."""

    prompt_tokens: tuple[int, ...]
    cached_shares: tuple[float, ...]
    verdicts: tuple[tuple[Verdict, ...], ...]


def break_even(promise: Promise) -> BreakEven:
    """The grid around a promise's own prompt."""
    lengths = tuple(sorted({max(1, round(promise.prompt_tokens * 2**octave)) for octave in _OCTAVES}))
    rows = (
        tuple(
            answer(replace(promise, prompt_tokens=tokens, cached_tokens=int(tokens * share))).verdict
            for tokens in lengths
        )
        for share in _SHARES
    )
    return BreakEven(lengths, _SHARES, tuple(rows))
