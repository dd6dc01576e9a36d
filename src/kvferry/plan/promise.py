"""A TTFT promise as a question: the model, the prompt, what prefill takes, and the way to decode."""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.link import FAR
from kvferry.model import ModelShape
from kvferry.plan.compute import ComputeProfile
from kvferry.plan.handoff import Overlap, Way
from kvferry.plan.payload import PoolFormat

__all__ = ["FirstToken", "GivenPrefill", "Promise", "check_promise"]


class FirstToken(StrEnum):
    """Who emits the first token; engines differ."""

    DECODE = "decode"  # the first token waits for the move and for a decode step
    PREFILL = "prefill"  # it does not; the move lies between the first token and the second


class GivenPrefill(msgspec.Struct, frozen=True):
    """A prefill time that the user measured for one prompt.

    For prompts of other lengths it is taken as proportional to the prompt or to the tokens computed,
    whichever takes longer (prefill may have held the prefix, or only decode), which the answer says:
    attention grows faster, so longer prompts take more than that.
    """

    seconds_given: float
    tokens: int
    cached_tokens: int

    @property
    def _computed_tokens(self) -> int:
        return max(1, self.tokens - self.cached_tokens)

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """Seconds of one prompt; the given time at the given prompt."""
        longer = max(1, tokens - cached_tokens) / self._computed_tokens
        return self.seconds_given * max(tokens / self.tokens, longer)

    @property
    def reach(self) -> tuple[float, float]:
        """Prompt tokens (and any batch) up to which it is taken for measured (decision 0160).

        That are those of which no more is computed than four times what was when the time was taken.
        """
        return self.cached_tokens + FAR * self._computed_tokens, math.inf

    def too_far(self, prompt_tokens: int, batch: int = 1) -> str | None:  # noqa: ARG002 - as a profile's
        """Why this prompt is too long for its time to be taken as proportional, or None."""
        if prompt_tokens <= self.reach[0]:
            return None
        return (
            f"of {prompt_tokens} prompt tokens more than {FAR} times the {self._computed_tokens} are computed"
            " that --prefill-seconds was measured at"
        )


class Promise(msgspec.Struct, frozen=True):
    """What ``check`` is asked.

    Args:
        shape, pool: the model, and how the pools hold its KV.
        prompt_tokens: of the request that the promise is about.
        cached_tokens: prefix tokens that decode holds; with a profile, prefill holds them too.
        target_seconds: the TTFT to keep.
        prefill: a profile or a measured time; None: unknown.
        way: the link and its conditions.
        overlap, groups: what leaves while prefill computes, and in how many equal parts.
        chunk_tokens: prefill computes so many tokens at once, and each chunk's KV leaves when it is
            computed; then the parts follow the prompt, and ``groups`` is not used.
        sync_seconds: a fixed cost of each handoff.
        first_token: who emits it.
        decode_step_seconds: the first decode step; None: not given, then from ``decode_batch``.
        decode_batch: requests in that step, all as long as this one, for the profile's law; None, or
            no profile: then the step is counted as 0 and said so.
        queue_seconds: the wait before prefill; None: from the rate, or 0 without one.
        requests_per_second: that this prefill worker and this link serve, for the waits.
        prompt_lengths: lengths of the workload's prompts, for the service times; None: all like
            ``prompt_tokens``.
        arrival_seconds: their arrivals, for waits behind real bursts instead of Poisson's; stretched to
            ``requests_per_second``.
    """

    shape: ModelShape
    pool: PoolFormat
    prompt_tokens: int
    cached_tokens: int
    target_seconds: float
    prefill: ComputeProfile | GivenPrefill | None
    way: Way
    overlap: Overlap = Overlap.NONE
    groups: int = 1
    chunk_tokens: int | None = None
    sync_seconds: float = 0.0
    first_token: FirstToken = FirstToken.DECODE
    decode_step_seconds: float | None = None
    decode_batch: int | None = None
    queue_seconds: float | None = None
    requests_per_second: float | None = None
    prompt_lengths: NDArray[np.int64] | None = None
    arrival_seconds: NDArray[np.float64] | None = None

    def prefill_seconds(self, tokens: int | None = None) -> float | None:
        """Prefill of this prompt, or of one with ``tokens`` tokens and the same prefix; None: unknown."""
        tokens = self.prompt_tokens if tokens is None else tokens
        if self.prefill is None:
            return None
        # A prompt that is cached whole still has its last token computed, for the first logits.
        cached = min(self.cached_tokens, tokens - 1)
        if isinstance(self.prefill, GivenPrefill):
            return self.prefill.seconds(tokens, min(self.prefill.cached_tokens, tokens - 1))
        return self.prefill.prefill.seconds(tokens, cached)

    def first_step_seconds(self) -> float | None:
        """The first decode step, which follows the prompt where a profile gives it; None: unknown."""
        if self.decode_step_seconds is not None or self.decode_batch is None:
            return self.decode_step_seconds
        if not isinstance(self.prefill, ComputeProfile):
            return None
        return self.prefill.decode_seconds(self.decode_batch, self.decode_batch * self.prompt_tokens)

    @property
    def num_parts(self) -> int:
        """In how many parts the KV leaves."""
        if self.chunk_tokens is None:
            return self.groups
        return max(1, -(-(self.prompt_tokens - self.cached_tokens) // self.chunk_tokens))

    def left_after_first_chunk_seconds(self) -> float:
        """Prefill that is left when the first chunk whose KV moves is done; with ``chunk_tokens`` only."""
        assert self.chunk_tokens is not None
        block = self.pool.block_size or 1
        computed = min(self.prompt_tokens, self.cached_tokens // block * block + self.chunk_tokens)
        if isinstance(self.prefill, ComputeProfile):
            left = self.prefill.prefill.work_seconds(self.prompt_tokens, computed)
        else:
            left = (self.prefill_seconds() or 0.0) * (1 - computed / self.prompt_tokens)
        return min(left, self.prefill_seconds() or 0.0)


def check_promise(promise: Promise) -> Promise:
    """The promise, if its numbers can be asked about. Raises InputError naming the field."""
    if promise.prompt_tokens < 1:
        raise InputError(f"prompt_tokens: {promise.prompt_tokens} is not at least 1")
    if not 0 <= promise.cached_tokens <= promise.prompt_tokens:
        raise InputError(
            f"cached_tokens: {promise.cached_tokens} is not from 0 to {promise.prompt_tokens}, the prompt"
        )
    for field in ("groups", "chunk_tokens", "decode_batch"):
        value = getattr(promise, field)
        if value is not None and value < 1:
            raise InputError(f"{field}: {value} is not at least 1")
    if promise.way.links < 1:
        raise InputError(f"links: {promise.way.links} is not at least 1")
    if not 0.5 <= promise.way.quantile <= 0.99:
        raise InputError(f"quantile: {promise.way.quantile} is not from 0.5 to 0.99")
    times = {
        "ttft": promise.target_seconds,
        "sync_seconds": promise.sync_seconds,
        "decode_seconds": promise.decode_step_seconds,
        "queue_seconds": promise.queue_seconds,
        "rate": promise.requests_per_second,
    }
    if isinstance(promise.prefill, GivenPrefill):
        times["prefill_seconds"] = promise.prefill.seconds_given
    for field, value in times.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InputError(f"{field}: {value} is not a number from 0 up")
    if promise.target_seconds == 0:
        raise InputError("ttft: 0 is not above 0")
    return promise
