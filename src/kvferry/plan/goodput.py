"""The highest rate at which a unit keeps its service level, by simulation and halving."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.plan.fleet import EngineRules, Fleet
from kvferry.plan.payload import PayloadTable
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.sim_result import Result
from kvferry.plan.simulate import simulate
from kvferry.plan.trace import TraceRow

__all__ = ["Goodput", "at_rate", "find_goodput", "rows_at_rate"]

_PRECISION = 0.02
_STAYS = 4
"""A run lasts so many stays of a request at its slowest: a shorter one ends before its queues are there."""


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
    count = max(requests, math.ceil(_STAYS * rate * _longest_stay(rows[:requests], targets)))
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
    """Halve between nothing and ``bound`` requests a second, to 2 %.

    Args:
        fleet, rows, payload, rules, targets, policy, requests, seed: as for :func:`at_rate`.
        bound: a rate that the unit cannot exceed.
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

    low, high = 0.02 * bound, 1.02 * bound
    low, best = kept or (low, at(low))
    if best.slo_attainment < targets.attainment:
        return Goodput(0.0, best, best)
    beyond: Result | None = None
    while high > low * (1 + _PRECISION):
        middle = (low + high) / 2
        found = at(middle)
        if found.slo_attainment >= targets.attainment:
            low, best = middle, found
        else:
            high, beyond = middle, found
    return Goodput(low, best, beyond)


def _longest_stay(rows: Sequence[TraceRow], targets: Targets) -> float:
    """Seconds that a mean request stays if it just keeps its targets; 0 where one is not given."""
    output = sum(row.output_tokens for row in rows) / len(rows)
    stay = targets.ttft_seconds + output * targets.tpot_seconds
    return stay if math.isfinite(stay) else 0.0
