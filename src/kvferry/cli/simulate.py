"""``kvferry simulate``: replay a trace on the fleet of a cluster file."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from kvferry.cli.options import Whole, check_range
from kvferry.errors import InputError
from kvferry.units import parse_seconds

if TYPE_CHECKING:
    from kvferry.cli.sweep import Scenario
    from kvferry.plan.sim_result import Result
    from kvferry.plan.simulate import Kill

PolicyName = Literal["round_robin", "load", "cache", "network_cost"]
_KILL = re.compile(r"([^@]+)@([^+]+)(?:\+(.+))?")


def simulate(
    cluster: Annotated[Path, Parameter(name="CLUSTER")],
    *,
    trace: Path | None = None,
    rate: tuple[float, ...] = (),
    policy: tuple[PolicyName, ...] = ("network_cost",),
    prefill_policy: PolicyName | None = None,
    requests: Whole | None = None,
    kill: tuple[str, ...] = (),
    spread: bool = True,
    seed: Whole = 0,
    records: Path | None = None,
    jobs: Whole = 1,
    ray: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    plot: Path | None = None,
) -> None:
    """Replay a trace: queues, prefix hits, shared links, failures; percentiles, attainment, utilisation.

    Several rates or policies make a sweep, one row each.

    Parameters
    ----------
    cluster
        A cluster file (TOML) with [fleet]; examples/cluster.toml explains each key.
    trace
        Azure CSV, Mooncake JSONL (with prefix hashes), BurstGPT CSV, or lengths; in place of the file's.
    rate
        Requests a second: stretches a trace's times, or draws Poisson arrivals for lengths. Again for more.
    policy
        How prefill and decode are paired. Again for more.
    prefill_policy
        How prefill is chosen, where it is not as --policy says.
    requests
        Only so many requests of the trace.
    kill
        An instance that dies: decode-3@120s; with +60s it is back after that, empty.
    spread
        Draw each handoff from the measured spread of its link; --no-spread: all are typical.
    seed
        Of drawn arrivals and spread.
    records
        Write one record a request to this file (.csv, or .parquet with the extra `plan`).
    jobs
        Processes for a sweep.
    ray
        Run a sweep on the Ray cluster at this address ("local" starts one here).
    as_json
        Print one JSON object; of a sweep {"runs": [...]}.
    plot
        Draw TTFT and TPOT of the runs to this file; needs the extra `plot`.
    """
    from kvferry.cli.output import Picture
    from kvferry.cli.simulate_table import print_json, print_tables
    from kvferry.cli.sweep import Scenario, absolute, run_scenarios

    _check(rate, requests, jobs, seed)
    picture = None if plot is None else Picture(plot)
    kills = tuple(parse_kill(text) for text in kill)
    scenarios = [
        Scenario(
            cluster=str(cluster.resolve()),
            trace=absolute(trace),
            rate=one_rate,
            policy=one_policy,
            prefill_policy=prefill_policy,
            requests=requests,
            kills=kills,
            seed=seed,
            with_spread=spread,
        )
        for one_rate in (rate or (None,))
        for one_policy in policy
    ]
    if len(scenarios) == 1:
        results = [_one(scenarios[0], records)]
    else:
        if records is not None:
            raise InputError("records: are of one run; this is a sweep of several")
        results = _with_progress(lambda: run_scenarios(scenarios, jobs, ray), len(scenarios))
    if picture is not None:
        from kvferry.cli.simulate_plot import draw_runs

        draw_runs(picture, scenarios, results)
    if as_json:
        print_json(scenarios, results)
    else:
        print_tables(scenarios, results)


def _check(rates: tuple[float, ...], requests: int | None, jobs: int, seed: int) -> None:
    for rate in rates:
        if not 0 < rate < float("inf"):
            raise InputError(f"rate: {rate} is not above 0")
    check_range("requests", requests, 1, 10**12)
    check_range("jobs", jobs, 1, 1024)
    check_range("seed", seed, 0, 2**63)


def parse_kill(text: str) -> Kill:
    """``decode-3@120s`` or ``decode-3@120s+60s``. Raises InputError."""
    from kvferry.plan.simulate import Kill

    match = _KILL.fullmatch(text)
    if match is None:
        raise InputError(
            f"kill: {text!r} is not INSTANCE@TIME or INSTANCE@TIME+TIME, as in decode-3@120s+60s"
        )
    back = None if match[3] is None else parse_seconds(match[3], "kill")
    return Kill(match[1], parse_seconds(match[2], "kill"), back)


def _one(scenario: Scenario, records: Path | None) -> Result:
    """One run, with its records and a bar that counts requests."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TextColumn

    from kvferry.cli.records_file import RecordsFile
    from kvferry.cli.simulate_run import simulate_files

    with ExitStack() as stack:
        keep = None
        if records is not None:
            keep = stack.enter_context(RecordsFile(records)).add
        columns = (TextColumn("requests"), MofNCompleteColumn())
        console = Console(stderr=True)
        progress = stack.enter_context(
            Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        )
        task = progress.add_task("requests", total=None)
        return simulate_files(scenario, keep, lambda count: progress.update(task, completed=count))


def _with_progress(run: Callable[[], object], count: int) -> list[Result]:
    from rich.console import Console
    from rich.progress import Progress

    results: list[Result] = []
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("runs", total=count)
        for result in run():  # type: ignore[attr-defined]
            results.append(result)
            progress.advance(task)
    return results
