"""How many prefill and how many decode instances: what each side, the link and staging can carry.

    prefill   n_p * pp / T_p                       T_p: mean prefill time of the workload, hits counted
    decode    n_d * b / (m * tau(b))               b: the batch whose step still keeps the TPOT target
    link      rate / E[W]                          W: bytes and posting of a handoff; plan/tier.py
    staging   n_d * slots / T_x                    slots: handoffs that may be on the way to one instance

The least of these is what the unit can carry; what the others have beyond it is their slack. The
whole numbers are those with the most requests a second for each GPU; a link counts 0.7 of its rate there,
as above it the waits grow without use. These are means: a rate that keeps a TTFT target at the tail is
lower, and the simulator finds it. It saturates where this says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.plan.compute import ComputeProfile
from kvferry.plan.payload import PayloadTable

__all__ = [
    "LINK_USE",
    "Capacity",
    "Demand",
    "Drift",
    "Side",
    "best_ratio",
    "capacity",
    "decode_batch",
    "drift",
]

LINK_USE = 0.7


class Demand(msgspec.Struct, frozen=True):
    """A workload's lengths.

    Args:
        prompt_tokens, output_tokens: of each request (or of as many that stand for all).
        hit_tokens: prefix tokens of each prompt that caches hold.
    """

    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]

    def mean_prefill_seconds(self, profile: ComputeProfile) -> float:
        """T_p: mean over the requests."""
        law = profile.prefill
        pairs, counts = np.unique(
            np.column_stack([self.prompt_tokens, self.hit_tokens]), axis=0, return_counts=True
        )
        times = [law.seconds(tokens, min(hit, tokens - 1)) for tokens, hit in pairs.tolist()]
        return float(np.average(times, weights=counts))

    @property
    def mean_output_tokens(self) -> float:
        return float(self.output_tokens.mean())

    @property
    def decode_context(self) -> float:
        """Mean context of a request while it decodes; long outputs are there for longer."""
        m = self.output_tokens
        return float((m * (self.prompt_tokens + m / 2)).sum() / m.sum())

    @property
    def decode_room(self) -> float:
        """Mean tokens that a request has reserved while it decodes."""
        m = self.output_tokens
        return float((m * (self.prompt_tokens + m)).sum() / m.sum())

    def mean_wire_bytes(self, payload: PayloadTable) -> float:
        """E[V]."""
        return self.mean_over(payload, lambda nbytes, _: float(nbytes))

    def mean_over(self, payload: PayloadTable, value: Callable[[int, int], float]) -> float:
        """The mean over the requests of what ``value`` says of a payload's bytes and descriptors."""
        pairs, counts = np.unique(
            np.column_stack([self.prompt_tokens, self.hit_tokens]), axis=0, return_counts=True
        )
        return float(np.average([value(*payload.pair(*pair)) for pair in pairs.tolist()], weights=counts))

    def scaled(self, prompt: float = 1.0, output: float = 1.0) -> Demand:
        """The same with longer or shorter prompts (and their hits) and outputs."""
        return Demand(
            np.maximum(1, np.rint(self.prompt_tokens * prompt)).astype(np.int64),
            np.maximum(1, np.rint(self.output_tokens * output)).astype(np.int64),
            np.rint(self.hit_tokens * prompt).astype(np.int64),
        )


class Side(msgspec.Struct, frozen=True):
    """What one instance of each role carries, requests a second, and what a link and staging allow.

    ``link_rate`` is of one instance's share of the ports, used to ``LINK_USE``; infinite where it is free.
    """

    prefill_rate: float
    decode_rate: float
    prefill_gpus: int
    decode_gpus: int
    link_rate: float = math.inf
    staging_rate: float = math.inf


class Capacity(msgspec.Struct, frozen=True):
    """What ``prefill`` and ``decode`` instances carry together.

    ``slack`` says for each part what it has beyond the whole: 0 for the one that limits.
    """

    prefill: int
    decode: int
    requests_per_second: float
    per_gpu: float
    limit: str
    slack: dict[str, float]


class Drift(msgspec.Struct, frozen=True):
    """What a change of the workload does to a ratio that stays: rate kept, and the best ratio then."""

    change: str
    per_gpu: float
    best_prefill: int
    best_decode: int
    best_per_gpu: float

    @property
    def loss(self) -> float:
        """The share that the old ratio loses against the new one."""
        return 1 - self.per_gpu / self.best_per_gpu if self.best_per_gpu else 0.0


def decode_batch(
    profile: ComputeProfile,
    *,
    tpot_seconds: float,
    context_tokens: float,
    room_tokens: float,
    pool_tokens: int | None,
    max_batch: int,
) -> int:
    """The largest batch whose step keeps the target and whose requests fit the pool; 0 if none does."""
    most = max_batch if pool_tokens is None else min(max_batch, int(pool_tokens / room_tokens))
    low, high = 0, most + 1
    # A law for large batches may be below the one for small batches where they meet: the search is
    # over a step time that never falls.
    while high - low > 1:
        batch = (low + high) // 2
        if _step(profile, batch, context_tokens) <= tpot_seconds:
            low = batch
        else:
            high = batch
    return low


def _step(profile: ComputeProfile, batch: int, context_tokens: float) -> float:
    seconds = profile.decode_seconds(batch, batch * context_tokens)
    if profile.decode_large is not None and batch >= profile.large_batch:
        border = profile.large_batch - 1
        seconds = max(seconds, profile.decode.seconds(border, border * context_tokens))
    return seconds


def decode_rate(profile: ComputeProfile, batch: int, demand: Demand) -> float:
    """Requests a second that one instance decodes in batches of this size."""
    if not batch:
        return 0.0
    step = _step(profile, batch, demand.decode_context)
    return batch / (demand.mean_output_tokens * step)


def capacity(side: Side, prefill: int, decode: int, link_rate: float | None = None) -> Capacity:
    """What so many instances carry; ``link_rate`` is what the links of all together do, where it is known."""
    parts = {
        "prefill": prefill * side.prefill_rate,
        "decode": decode * side.decode_rate,
        "link": min(prefill, decode) * side.link_rate if link_rate is None else link_rate,
        "staging": decode * side.staging_rate,
    }
    limit = min(parts, key=lambda part: parts[part])
    rate = parts[limit]
    gpus = prefill * side.prefill_gpus + decode * side.decode_gpus
    slack = {part: value / rate - 1 if rate else math.inf for part, value in parts.items()}
    return Capacity(prefill, decode, rate, rate / gpus, limit, slack)


def best_ratio(
    side: Side, max_gpus: int, *, fits: Sequence[tuple[int, int]] | None = None
) -> Capacity | None:
    """The whole numbers with the highest rate for each GPU, within ``max_gpus``; ties: fewer GPUs.

    ``fits`` limits the choice to these pairs of counts. None where not even one of each fits.
    """
    best: Capacity | None = None
    if fits is None:
        fits = [
            (prefill, decode)
            for prefill in range(1, max_gpus // side.prefill_gpus + 1)
            for decode in range(1, (max_gpus - prefill * side.prefill_gpus) // side.decode_gpus + 1)
        ]
    for prefill, decode in fits:
        found = capacity(side, prefill, decode)
        if best is None or _rank(found, side) > _rank(best, side):
            best = found
    return best


def _rank(found: Capacity, side: Side) -> tuple[float, int]:
    gpus = found.prefill * side.prefill_gpus + found.decode * side.decode_gpus
    return (float(f"{found.per_gpu:.9g}"), -gpus)


def drift(sides: dict[str, Side], now: Capacity, max_gpus: int) -> tuple[Drift, ...]:
    """What each changed workload (``sides`` by the change in words) makes of the ratio ``now``."""
    found = []
    for change, side in sides.items():
        kept = capacity(side, now.prefill, now.decode)
        best = best_ratio(side, max_gpus)
        if best is not None:
            found.append(Drift(change, kept.per_gpu, best.prefill, best.decode, best.per_gpu))
    return tuple(found)
