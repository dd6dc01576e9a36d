"""Measured windows -> where a mixed step lies between its bounds, and how well the laws foretell the tail.

In a window a stream's gaps add up to its decode steps and what chunks of prompts beside it cost:

    sum(gaps) = n * d + sum over chunks of (step_i - d),   step_i = max(p_i, d) + s * min(p_i, d)

d is the step alone, p_i the chunk alone. One unknown, s = ``mixed_share``: 0 where the shorter phase
hides behind the longer, 1 where they add up. Its error is from the windows' parts one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.plan.compute import ComputeProfile
from kvferry.plan.interference import MixedStep, colocated

__all__ = ["GapSummary", "MixedFit", "TailCheck", "Window", "check_tail", "chunk_seconds", "fit_mixed"]


class GapSummary(msgspec.Struct, frozen=True):
    """Inter-token latency: seconds."""

    mean: float
    p50: float
    p95: float
    p99: float
    samples: int

    @staticmethod
    def of(gaps: Sequence[float]) -> GapSummary:
        """Of some gaps, at least one."""
        p50, p95, p99 = np.quantile(gaps, (0.5, 0.95, 0.99))
        return GapSummary(float(np.mean(gaps)), float(p50), float(p95), float(p99), len(gaps))


class Window(msgspec.Struct, frozen=True):
    """A stretch of time in which ``batch`` streams decoded beside arriving prompts.

    Args:
        seconds: its length.
        alone_seconds: the decode step of the same streams just before.
        gaps: all gaps of all streams in it.
        prompts: tokens of the prompts that came and were computed in it.
        shares: for each, which share of the streams decoded beside it.
        batch: streams.
        context_tokens: the sum of their contexts.
    """

    seconds: float
    alone_seconds: float
    gaps: tuple[float, ...]
    prompts: tuple[int, ...]
    shares: tuple[float, ...]
    batch: int
    context_tokens: float

    @property
    def requests_per_second(self) -> float:
        return len(self.prompts) / self.seconds


MOST_ERROR = 0.15
"""A share with a larger standard error says little more than that it lies from 0 to 1."""
_SLACK = 0.05
"""So far outside of 0 to 1 a share may lie however small its error: the laws beside it are fits too."""


class MixedFit(msgspec.Struct, frozen=True):
    """``mixed_share`` (None: no window had a prompt), its standard error, and how it was before it was cut
    to 0 to 1: far outside, the chunk size or the profile is wrong."""

    mixed_share: float | None
    standard_error: float | None
    uncut: float | None

    @property
    def identified(self) -> float | None:
        """The share where the windows tell it, else None: then both ends are to be tried.

        They tell it where the standard error is at most 0.15 and the share, as it came out, lies
        within two errors (or 0.05) of 0 to 1.
        """
        return None if self.why_unknown() is not None else self.mixed_share

    def why_unknown(self) -> str | None:
        """Why the share is not identified, in words, or None."""
        if self.mixed_share is None or self.uncut is None:
            return "no prompt came beside decode"
        if self.standard_error is None:
            return f"the share of mixed steps, {self.uncut:.2f}, is of one stretch alone, so without an error"
        if not -self._slack <= self.uncut <= 1 + self._slack:
            return (
                f"mixed steps cost {self.uncut:.2f} +- {self.standard_error:.2f} of the shorter phase beyond "
                "the longer one, which is not from 0 to 1: the engine's chunk size may not be --chunk-tokens"
            )
        if self.standard_error > MOST_ERROR:
            return (
                f"the share of mixed steps, {self.uncut:.2f} +- {self.standard_error:.2f}, is not known to "
                f"{MOST_ERROR:g}: a longer --window-seconds or a higher --rate tells more"
            )
        return None

    @property
    def _slack(self) -> float:
        return max(_SLACK, 2 * (self.standard_error or 0.0))


class TailCheck(msgspec.Struct, frozen=True):
    """One window, measured and foretold by the laws of ``kvferry.plan.interference``.

    ``errors``: foretold / measured - 1 for mean, p95 and p99.
    """

    requests_per_second: float
    prefill_share: float
    chunk_step_share: float
    measured: GapSummary
    mean_seconds: float
    p95_seconds: float
    p99_seconds: float
    errors: dict[str, float]


def chunk_seconds(profile: ComputeProfile, prompt_tokens: int, chunk_tokens: int) -> list[float]:
    """The time alone of each chunk of a prompt; together they take what the law says of the whole."""
    starts = range(0, prompt_tokens, chunk_tokens)
    step = profile.prefill.step_seconds / len(starts)
    work = profile.prefill.work_seconds
    return [step + work(min(start + chunk_tokens, prompt_tokens), start) for start in starts]


def fit_mixed(profile: ComputeProfile, windows: Sequence[Window], chunk_tokens: int) -> MixedFit:
    """The share over all windows, weighted by what they say about it."""
    found = [(_excess(profile, window, chunk_tokens)) for window in windows if window.prompts]
    over, under = sum(part[0] for part in found), sum(part[1] for part in found)
    if not found or under <= 0:
        return MixedFit(None, None, None)
    share = over / under
    error = None
    if len(found) > 1:
        each = [(part[0] / part[1] - share) * part[1] / under for part in found if part[1] > 0]
        error = (
            math.sqrt(sum(value**2 for value in each) * len(each) / (len(each) - 1))
            if len(each) > 1
            else None
        )
    return MixedFit(min(1.0, max(0.0, share)), error, share)


def _excess(profile: ComputeProfile, window: Window, chunk_tokens: int) -> tuple[float, float]:
    """What chunks cost beyond the longer phase, and the sum of the shorter phases: their quotient is s."""
    d = window.alone_seconds
    chunks = [
        (seconds, share)
        for tokens, share in zip(window.prompts, window.shares, strict=True)
        for seconds in chunk_seconds(profile, tokens, chunk_tokens)
    ]
    excess = (sum(window.gaps) - len(window.gaps) * d) / window.batch
    beyond = excess - sum(share * max(p - d, 0.0) for p, share in chunks)
    return beyond, sum(share * min(p, d) for p, share in chunks)


def check_tail(
    profile: ComputeProfile, window: Window, lengths: Sequence[int], chunk_tokens: int
) -> TailCheck:
    """Mean, p95 and p99 of the gaps beside what ``plan`` would say of this very load.

    ``lengths``: the prompts of the workload, whose mean the laws take.
    """
    mixed = MixedStep.SUM if profile.mixed_share is None else MixedStep.MEASURED
    foretold = colocated(
        profile,
        requests_per_second=window.requests_per_second,
        prompt_tokens=round(float(np.mean(lengths))),
        chunk_tokens=chunk_tokens,
        batch=window.batch,
        context_tokens=window.context_tokens,
        mixed=mixed,
    )
    measured = GapSummary.of(window.gaps)
    pairs = {
        "mean": (foretold.itl_mean_seconds, measured.mean),
        "p95": (foretold.itl_p95_seconds, measured.p95),
        "p99": (foretold.itl_p99_seconds, measured.p99),
    }
    return TailCheck(
        requests_per_second=window.requests_per_second,
        prefill_share=foretold.prefill_share,
        chunk_step_share=foretold.chunk_step_share,
        measured=measured,
        mean_seconds=foretold.itl_mean_seconds,
        p95_seconds=foretold.itl_p95_seconds,
        p99_seconds=foretold.itl_p99_seconds,
        errors={name: said / seen - 1 for name, (said, seen) in pairs.items() if math.isfinite(said)},
    )
