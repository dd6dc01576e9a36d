"""From files to one simulation: opens the cluster and the trace, and keeps records if asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from kvferry.cli.plan_cluster import Opened, open_cluster
from kvferry.cli.plan_files import open_trace
from kvferry.cli.sweep import Scenario
from kvferry.errors import InputError
from kvferry.plan.cluster_file import placed
from kvferry.plan.cluster_tables import FleetTable
from kvferry.plan.deploy import deploy
from kvferry.plan.fleet import EngineRules, Fleet
from kvferry.plan.route import Policy
from kvferry.plan.sim_request import RequestRecord
from kvferry.plan.sim_result import Result
from kvferry.plan.simulate import simulate
from kvferry.plan.trace import TraceRow

__all__ = ["fleet_of", "simulate_files", "timed_rows"]


def simulate_files(
    scenario: Scenario,
    keep: Callable[[RequestRecord], None] | None = None,
    tick: Callable[[int], None] | None = None,
) -> Result:
    """Simulate one scenario; ``keep`` gets every record, ``tick`` the number of requests read."""
    trace = None if scenario.trace is None else Path(scenario.trace)
    opened = open_cluster(Path(scenario.cluster), trace, scenario.rate)
    rows = timed_rows(opened, scenario)
    with placed(opened.source, opened.text):
        fleet, rules = fleet_of(opened), rules_of(opened)
    return simulate(
        fleet,
        rows if tick is None else _ticking(rows, tick),
        opened.cluster.payloads(),
        rules=rules,
        policy=Policy(scenario.policy),
        prefill_policy=None if scenario.prefill_policy is None else Policy(scenario.prefill_policy),
        targets=opened.cluster.targets,
        kills=scenario.kills,
        seed=scenario.seed,
        with_spread=scenario.with_spread,
        keep=keep,
    )


def _table_of(opened: Opened) -> FleetTable:
    if opened.file.fleet is None:
        raise InputError("fleet: missing; give [fleet] with prefill and decode, or colocated")
    return opened.file.fleet


def fleet_of(opened: Opened) -> Fleet:
    """The fleet that the cluster file describes, on its nodes."""
    prompts = [row.prompt_tokens for row in opened.rows]
    middle, long = np.quantile(prompts, (0.5, 0.95), method="higher")
    return deploy(opened.cluster, _table_of(opened), typical_tokens=int(middle), long_tokens=int(long))


def rules_of(opened: Opened) -> EngineRules:
    """The engines' rules; a colocated fleet needs to know how long a step with both phases takes."""
    rules, mixed = opened.cluster.rules, opened.cluster.mixed
    if _table_of(opened).colocated is not None:
        if len(mixed) > 1:
            raise InputError(
                "engine.mixed: colocated instances need it: longer or sum (bounds), or a measured mixed_share"
            )
        return EngineRules(chunk_tokens=rules.chunk_tokens, mixed=mixed[0])
    return rules


def timed_rows(opened: Opened, scenario: Scenario) -> Iterator[TraceRow]:
    """The requests with their times at the scenario's rate, read as they are needed."""
    rows: Iterator[TraceRow] = iter(opened.rows) if opened.trace is None else open_trace(opened.trace)
    if scenario.requests is not None:
        rows = islice(rows, scenario.requests)
    has_times = opened.rows[0].arrival_seconds is not None
    if not has_times:
        return _poisson(rows, opened.requests_per_second, scenario.seed)
    stretch = 1.0 if scenario.rate is None else _own_rate(opened) / scenario.rate
    return (row._replace(arrival_seconds=(row.arrival_seconds or 0.0) * stretch) for row in rows)


def _own_rate(opened: Opened) -> float:
    span = opened.rows[-1].arrival_seconds
    if not span:
        raise InputError(f"rate: all requests of {opened.trace} arrive at once; there is no rate to stretch")
    return len(opened.rows) / span


def _poisson(rows: Iterator[TraceRow], rate: float, seed: int) -> Iterator[TraceRow]:
    rng = np.random.default_rng(seed)
    now = 0.0
    while batch := list(islice(rows, 4096)):
        for row, gap in zip(batch, rng.exponential(1 / rate, len(batch)).tolist(), strict=True):
            now += gap
            yield row._replace(arrival_seconds=now)


def _ticking(rows: Iterator[TraceRow], tick: Callable[[int], None]) -> Iterator[TraceRow]:
    for number, row in enumerate(rows):
        if not number & 1023:
            tick(number)
        yield row
