"""The highest rate at which a unit keeps its service level, by simulation and halving."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role
from kvferry.plan.payload import PayloadTable
from kvferry.plan.prefix import prefix_hits
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.sim_result import Result
from kvferry.plan.simulate import simulate
from kvferry.plan.trace import TraceRow

__all__ = ["Goodput", "at_rate", "find_goodput", "rows_at_rate"]

_PRECISION = 0.02
_ROUNDS = 30
_STAYS = 6
"""A run lasts so many stays of a request: a shorter one ends before its queues are there."""
_MOST_REQUESTS = 2000
"""And no longer than so many requests (or twice as many as asked for): large batches stay for minutes."""
_LEAST, _ABOVE = 0.02, 1.25
_DESCENTS = 2
"""A unit whose targets are far below what it could carry without them is looked for so much deeper."""


class Goodput(msgspec.Struct, frozen=True):
    """What was found.

    Args:
        requests_per_second: the highest rate tried at which the share that keeps to both targets is
            at least the attainment; 0 where the unit does not keep them even when it is nearly idle.
        at_rate: the run at that rate.
        beyond: the run at the lowest rate tried that fails; None where the highest one tried held.
    """

    requests_per_second: float
    at_rate: Result
    beyond: Result | None


def rows_at_rate(rows: Sequence[TraceRow], rate: float, seed: int = 0) -> list[TraceRow]:
    """The same requests at another rate: a trace's times are stretched, so its bursts stay bursts.

    Rows without times get Poisson arrivals from the seed.
    """
    if not rows:
        return []
    if rows[0].arrival_seconds is None:
        gaps = np.random.default_rng(seed).exponential(1 / rate, len(rows))
        times = np.cumsum(gaps).tolist()
    else:
        span = rows[-1].arrival_seconds or 0.0
        if not span:
            times = (np.arange(len(rows)) / rate).tolist()
        else:
            factor = len(rows) / rate / span
            times = [(row.arrival_seconds or 0.0) * factor for row in rows]
    return [row._replace(arrival_seconds=time) for row, time in zip(rows, times, strict=True)]


def at_rate(
    fleet: Fleet,
    rows: Sequence[TraceRow],
    payload: PayloadTable,
    rate: float,
    *,
    rules: EngineRules,
    targets: Targets,
    policy: Policy,
    requests: int = 1000,
    seed: int = 0,
) -> Result:
    """The run at one rate, of as many requests as it takes until the queues are there.

    Args:
        fleet, rows, payload, rules, policy, targets, seed: as for ``simulate``.
        rate: requests a second.
        requests: the fewest that a run takes; more at rates at which these would be over too soon.
    """
    stay = _Load.of(fleet, rows[:requests]).stay_seconds(rate)
    count = min(max(requests, math.ceil(_STAYS * rate * stay)), max(_MOST_REQUESTS, 2 * requests))
    return simulate(
        fleet,
        rows_at_rate(rows[:count], rate, seed),
        payload,
        rules=rules,
        policy=policy,
        targets=targets,
        seed=seed,
    )


def find_goodput(
    fleet: Fleet,
    rows: Sequence[TraceRow],
    payload: PayloadTable,
    *,
    rules: EngineRules,
    targets: Targets,
    policy: Policy,
    bound: float,
    requests: int = 1000,
    seed: int = 0,
    kept: tuple[float, Result] | None = None,
) -> Goodput:
    """Halve between nothing and what the fleet carries without any target, to 2 %.

    Which rates are tried, and with how many requests, does not depend on the targets: so tighter ones
    never find more.

    Args:
        fleet, rows, payload, rules, targets, policy, requests, seed: as for :func:`at_rate`.
        bound: a rate that the unit cannot exceed; beyond it nothing is simulated.
        kept: a rate that is known to keep the targets, with its run: the halving begins there.
    """

    def at(rate: float) -> Result:
        return at_rate(
            fleet,
            rows,
            payload,
            rate,
            rules=rules,
            targets=targets,
            policy=policy,
            requests=requests,
            seed=seed,
        )

    top = _Load.of(fleet, rows[:requests]).most
    beyond: Result | None = None
    low, high = _LEAST * top, _ABOVE * top
    low, best = kept or (low, at(low))
    for _ in range(_DESCENTS):
        if best.slo_attainment >= targets.attainment:
            break
        low, high, beyond = _LEAST * low, low, best
        best = at(low)
    if best.slo_attainment < targets.attainment:
        return Goodput(0.0, best, best)
    while high > low * (1 + _PRECISION):
        middle = (low + high) / 2
        if middle > (1 + _PRECISION) * bound:
            high = middle
            continue
        found = at(middle)
        if found.slo_attainment >= targets.attainment:
            low, best = middle, found
        else:
            high, beyond = middle, found
    return Goodput(low, best, beyond)


class _Load(msgspec.Struct, frozen=True):
    """What a fleet carries of mean requests, and how long they stay, whatever is promised.

    Args:
        prefill: prefills a second of all instances.
        compute_seconds: a mean prefill.
        decode: the instances that decode; each has its batch.
        batch: the most requests that decode together in one of them.
        prompt_tokens, output_tokens: means.
        is_shared: the same instances prefill and decode.
    """

    prefill: float
    compute_seconds: float
    decode: tuple[Instance, ...]
    batch: int
    prompt_tokens: float
    output_tokens: float
    is_shared: bool

    @staticmethod
    def of(fleet: Fleet, rows: Sequence[TraceRow]) -> _Load:
        prompt = sum(row.prompt_tokens for row in rows) / len(rows)
        output = sum(row.output_tokens for row in rows) / len(rows)
        shared = tuple(i for i in fleet.instances if i.role is Role.COLOCATED)
        first = shared or tuple(i for i in fleet.instances if i.role is Role.PREFILL)
        decode = shared or tuple(i for i in fleet.instances if i.role is Role.DECODE)
        hits = Counter((row.prompt_tokens, hit) for row, hit in zip(rows, prefix_hits(rows), strict=True))
        law = first[0].profile.prefill
        compute = sum(law.seconds(p, min(hit, p - 1)) * n for (p, hit), n in hits.items()) / len(rows)
        pool = decode[0].pool_tokens
        room = math.inf if pool is None else pool / (prompt + output)
        return _Load(
            prefill=sum(i.profile.pp for i in first) / compute,
            compute_seconds=compute,
            decode=decode,
            batch=max(1, int(min(decode[0].max_batch, room))),
            prompt_tokens=prompt,
            output_tokens=output,
            is_shared=bool(shared),
        )

    @property
    def most(self) -> float:
        """Requests a second of full batches."""
        step = self.output_tokens * self._step(self.batch)
        return min(self.prefill, len(self.decode) * self.batch / step)

    def stay_seconds(self, rate: float) -> float:
        """Of a mean request at this rate: its prefill, and its steps in the batch that is then there."""
        each = rate * self.output_tokens / len(self.decode)
        if self.is_shared:
            # The time-share law: steps come as often as prefill leaves time for.
            each /= max(0.1, 1 - rate / self.prefill)
        batch = 1.0
        for _ in range(_ROUNDS):
            batch = min(self.batch, max(1.0, each * self._step(batch)))
        return self.compute_seconds + batch / rate * len(self.decode)

    def _step(self, batch: float) -> float:
        context = self.prompt_tokens + self.output_tokens / 2
        return self.decode[0].profile.decode_seconds(math.ceil(batch), batch * context)
