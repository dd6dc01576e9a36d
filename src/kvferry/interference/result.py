"""What was measured, and the profile file that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.plan.compute import ComputeProfile, PrefillTable
from kvferry.plan.interference_fit import GapSummary, MixedFit, TailCheck
from kvferry.units import format_seconds

__all__ = ["Alone", "Measured", "bunched", "profile_object"]

# No engine's steps spread so far that half of them take so little of the mean.
_HARDLY = 0.1


class Alone(msgspec.Struct, frozen=True):
    """Decode without prefill beside it."""

    batch: int
    context_tokens: float
    itl: GapSummary


class Measured(msgspec.Struct, frozen=True):
    """One server.

    Args:
        profile: the laws, with ``mixed_share`` where it was identified.
        alone: decode at each batch and context.
        mixed: how steps with both phases were fitted.
        tails: each window beside what the laws foretell.
        skipped: rates that were not measured, and why.
        notes: what the reader should know of the server.
        requests, seconds: what it took.
    """

    profile: ComputeProfile
    alone: tuple[Alone, ...]
    mixed: MixedFit
    tails: tuple[TailCheck, ...]
    chunk_tokens: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    requests: int
    seconds: float


def bunched(alone: Sequence[Alone]) -> str | None:
    """Why the percentiles of decode alone mean little, where half of the gaps are hardly any: or None."""
    for row in alone:
        if row.itl.p50 < _HARDLY * row.itl.mean:
            soon, mean = format_seconds(row.itl.p50), format_seconds(row.itl.mean)
            return (
                f"with {row.batch} streams half of the tokens came within {soon} of the one before, and the "
                f"mean is {mean}: the server writes, or this machine reads, several at once; means and laws "
                f"hold, percentiles do not"
            )
    return None


def profile_object(measured: Measured) -> dict[str, Any]:
    """The profile as ``check`` and ``plan`` read it, with what was measured beside it; for JSON."""
    profile = measured.profile
    law: dict[str, Any] = msgspec.to_builtins(profile.prefill)
    is_table = isinstance(profile.prefill, PrefillTable)
    made: dict[str, Any] = {
        "model": profile.model,
        "gpu": profile.gpu,
        "tp": profile.tp,
        "engine": profile.engine,
        "prefill_table" if is_table else "prefill": law,
        "decode": msgspec.to_builtins(profile.decode),
        "mixed_share": profile.mixed_share,
        "worst_error": profile.worst_error,
        "covers": msgspec.to_builtins(profile.covers),
        "source": profile.source,
        "itl_alone": msgspec.to_builtins(measured.alone),
        "itl_mixed": [msgspec.to_builtins(tail.measured) for tail in measured.tails],
        "tail": {
            "chunk_tokens": measured.chunk_tokens,
            "mixed": msgspec.to_builtins(measured.mixed),
            "windows": msgspec.to_builtins(measured.tails),
            "skipped": list(measured.skipped),
            "notes": list(measured.notes),
            "requests": measured.requests,
            "seconds": measured.seconds,
        },
    }
    return made
