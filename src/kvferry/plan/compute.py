"""How long prefill and decode steps take on one instance, from measured tables.

The laws are DistServe's (Zhong et al., OSDI 2024; its repository's ``simdistserve/estimators``):

    prefill  a + b * sum(L) + c * sum(L^2)      L: prompt lengths of the batch
    decode   a + b * sum(context) + c * batch   per step, one token for each request

A measured table that the prefill law does not fit is kept as a table and read by straight lines.
Nothing here is built in: a profile is given, or the answer is "unknown".
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import pairwise

import msgspec

from kvferry.errors import InputError
from kvferry.link import FAR

__all__ = [
    "UNKNOWN_COMPUTE",
    "ComputeProfile",
    "DecodeLaw",
    "MeasuredRange",
    "PrefillLaw",
    "PrefillTable",
    "check_profile",
]

UNKNOWN_COMPUTE = "unknown: give --prefill-seconds or a profile"
MAX_ERROR = 0.25
"""A profile that misses one of its own measurements by more says so wherever it is used."""


class PrefillLaw(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"a_seconds": "a", "b_seconds_per_token": "b", "c_seconds_per_square_token": "c"},
):
    """``a + b * tokens + c * tokens^2`` seconds; in files the keys are ``a``, ``b`` and ``c``."""

    a_seconds: float
    b_seconds_per_token: float
    c_seconds_per_square_token: float = 0.0

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """One prompt of ``tokens`` tokens, of which the first ``cached_tokens`` are not computed again."""
        b, c = self.b_seconds_per_token, self.c_seconds_per_square_token
        return self.a_seconds + (tokens - cached_tokens) * (b + c * (tokens + cached_tokens))

    def work_seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """The same without what every step costs once."""
        return self.seconds(tokens, cached_tokens) - self.a_seconds

    @property
    def step_seconds(self) -> float:
        """What a step costs whatever is in it."""
        return self.a_seconds


class PrefillTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured prefill times over the tokens of a batch, ascending in both; straight lines between.

    Beyond the last point the last line goes on; below the first, the first time holds.
    """

    tokens: tuple[int, ...]
    seconds_at: tuple[float, ...]

    def seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """One prompt; a cached prefix saves what the table says that it takes."""
        return self.step_seconds + self.work_seconds(tokens, cached_tokens)

    def work_seconds(self, tokens: int, cached_tokens: int = 0) -> float:
        """The same without what every step costs once."""
        return self._read(tokens) - self._read(cached_tokens)

    @property
    def step_seconds(self) -> float:
        """The first measured time: what a step costs whatever is in it."""
        return self.seconds_at[0]

    def _read(self, tokens: int) -> float:
        at, seconds = self.tokens, self.seconds_at
        if tokens <= at[0]:
            return seconds[0]
        right = min(bisect_right(at, tokens), len(at) - 1)
        slope = (seconds[right] - seconds[right - 1]) / (at[right] - at[right - 1])
        return seconds[right - 1] + slope * (tokens - at[right - 1])


class DecodeLaw(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"a_seconds": "a", "b_seconds_per_context_token": "b", "c_seconds_per_request": "c"},
):
    """``a + b * context + c * batch`` seconds a step; in files the keys are ``a``, ``b`` and ``c``."""

    a_seconds: float
    b_seconds_per_context_token: float
    c_seconds_per_request: float

    def seconds(self, batch: int, context_tokens: float) -> float:
        """One step of ``batch`` requests whose contexts together have ``context_tokens`` tokens."""
        return (
            self.a_seconds
            + self.b_seconds_per_context_token * context_tokens
            + self.c_seconds_per_request * batch
        )


class MeasuredRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the measurements cover; an answer from outside says so."""

    min_prompt_tokens: int
    max_prompt_tokens: int
    max_batch: int


class ComputeProfile(msgspec.Struct, frozen=True):
    """Prefill and decode times of one instance: a model on ``tp * pp`` GPUs of one kind.

    Args:
        model, gpu, engine: names, for tables and to find the profile; free text.
        tp, pp: ranks of the instance.
        prefill: the law or the table.
        decode: the law up to ``large_batch`` requests.
        decode_large: the law from ``large_batch`` requests on, where it differs.
        mixed_share: where a step with prefill and decode lies between the two bounds of
            ``kvferry.plan.interference`` (0: the longer of the two, 1: their sum); None: not measured.
        kv_tokens: tokens of KV that the instance holds, where it was measured.
        worst_error: largest relative error of the fit on its own measurements.
        covers: the measured range.
        source: where the measurement is published, or on what it was made.
    """

    model: str
    gpu: str
    tp: int
    prefill: PrefillLaw | PrefillTable
    decode: DecodeLaw
    pp: int = 1
    engine: str = ""
    decode_large: DecodeLaw | None = None
    large_batch: int = 0
    mixed_share: float | None = None
    kv_tokens: int | None = None
    worst_error: float | None = None
    covers: MeasuredRange | None = None
    source: str = ""

    @property
    def num_gpus(self) -> int:
        """GPUs of the instance."""
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """``model on gpu tp4``."""
        stages = f" pp{self.pp}" if self.pp > 1 else ""
        return f"{self.model} on {self.gpu} tp{self.tp}{stages}"

    @property
    def doubt(self) -> str | None:
        """Why its figures are rough, or None."""
        if self.worst_error is None or self.worst_error <= MAX_ERROR:
            return None
        return f"the fit of {self.name} misses one of its measurements by {self.worst_error:.0%}"

    def decode_law(self, batch: int) -> DecodeLaw:
        """The law that holds at this batch."""
        if self.decode_large is not None and batch >= self.large_batch:
            return self.decode_large
        return self.decode

    def decode_seconds(self, batch: int, context_tokens: float) -> float:
        """One decode step; ``context_tokens`` is the sum over the batch."""
        return self.decode_law(batch).seconds(batch, context_tokens)

    @property
    def reach(self) -> tuple[float, float]:
        """Prompt tokens and batch up to which its times are taken for measured (decision 0160)."""
        if self.covers is None:
            return math.inf, math.inf
        return FAR * self.covers.max_prompt_tokens, FAR * self.covers.max_batch

    def too_far(self, prompt_tokens: int, batch: int = 1) -> str | None:
        """Why this question lies too far above the measurements for the laws to be trusted, or None.

        Only above: a shorter prompt or a smaller batch takes no longer than the smallest measured.
        """
        tokens, most = self.reach
        if prompt_tokens > tokens:
            assert self.covers is not None
            what, measured = f"{prompt_tokens} prompt tokens are", self.covers.max_prompt_tokens
        elif batch > most:
            assert self.covers is not None
            what, measured = f"a batch of {batch} is", self.covers.max_batch
        else:
            return None
        return f"{what} more than {FAR} times the {measured} that {self.name} was measured at"

    def outside(self, prompt_tokens: int, batch: int = 1) -> str | None:
        """Why this question lies outside the measurements, or None."""
        covers = self.covers
        if covers is None:
            return None
        if not covers.min_prompt_tokens <= prompt_tokens <= covers.max_prompt_tokens:
            return (
                f"{prompt_tokens} prompt tokens are outside the {covers.min_prompt_tokens} to "
                f"{covers.max_prompt_tokens} that {self.name} was measured at"
            )
        if batch > covers.max_batch:
            return f"a batch of {batch} is above the {covers.max_batch} that {self.name} was measured at"
        return None


def check_profile(profile: ComputeProfile) -> ComputeProfile:
    """The profile, if its numbers can be times. Raises InputError naming the field."""
    for field, number in _numbers(profile):
        if not math.isfinite(number) or number < 0:
            raise InputError(f"{field}: {number} is not a number from 0 up")
    for field in ("tp", "pp"):
        if getattr(profile, field) < 1:
            raise InputError(f"{field}: {getattr(profile, field)} is not at least 1")
    if profile.kv_tokens is not None and profile.kv_tokens < 1:
        raise InputError(f"kv_tokens: {profile.kv_tokens} is not at least 1")
    if profile.mixed_share is not None and profile.mixed_share > 1:
        raise InputError(f"mixed_share: {profile.mixed_share} is not from 0 to 1")
    if profile.decode.seconds(1, 1) <= 0:
        raise InputError("decode: a step of no time")
    prefill = profile.prefill
    if isinstance(prefill, PrefillTable):
        _check_table(prefill)
    elif prefill.seconds(1) <= 0:
        raise InputError("prefill: a prompt of no time")
    return profile


def _numbers(profile: ComputeProfile) -> list[tuple[str, float]]:
    numbers: list[tuple[str, float]] = []
    for field in ("prefill", "decode", "decode_large"):
        law = getattr(profile, field)
        if law is None or isinstance(law, PrefillTable):
            continue
        numbers += [(f"{field}.{key}", value) for key, value in msgspec.to_builtins(law).items()]
    if profile.mixed_share is not None:
        numbers.append(("mixed_share", profile.mixed_share))
    return numbers


def _check_table(table: PrefillTable) -> None:
    if len(table.tokens) != len(table.seconds_at) or len(table.tokens) < 2:
        raise InputError("prefill.tokens: needs two or more points, and as many seconds_at")
    for field, values in (("tokens", table.tokens), ("seconds_at", table.seconds_at)):
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise InputError(f"prefill.{field}: holds a value that is not above 0")
    pairs = list(zip(table.tokens, table.seconds_at, strict=True))
    for (tokens, seconds), (more_tokens, more_seconds) in pairwise(pairs):
        if more_tokens <= tokens or more_seconds < seconds:
            raise InputError(f"prefill.tokens: not ascending at {more_tokens}")
