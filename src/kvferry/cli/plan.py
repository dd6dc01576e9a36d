"""``kvferry plan``: colocated, in one domain or across nodes, and with how many workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvferry.cli.options import Flag, Whole, check_range
from kvferry.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvferry.plan.choose import PlanResult


def plan(
    cluster: Annotated[Path, Parameter(name="CLUSTER")],
    *,
    trace: Path | None = None,
    rate: float | None = None,
    requests: Whole | None = None,
    seed: Whole = 0,
    explain: Annotated[bool, Flag] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    plot: Path | None = None,
) -> None:
    """Compare what a cluster could run for a workload, choose, and say why.

    Candidates are colocated, in one NVLink domain or across nodes, for each pair of measured
    profiles; their goodput is simulated. For a stated rate the choice is what carries it with the fewest
    GPUs, or none; for a trace's own rate it is the highest goodput per GPU.

    Parameters
    ----------
    cluster
        A cluster file (TOML); examples/cluster.toml explains each key.
    trace
        A trace in place of the file's own.
    rate
        Requests a second in place of the file's or the trace's own.
    requests
        Requests simulated at each rate that is tried.
    seed
        Of the arrivals where the workload has no times.
    explain
        Print each equation with its numbers filled in.
    as_json
        Print one JSON object.
    plot
        Draw the candidates to this file (.svg, .png, .pdf); needs the extra `plot`.
    """
    from kvferry.cli.output import Picture
    from kvferry.cli.plan_cluster import open_cluster
    from kvferry.cli.plan_table import print_json, print_tables
    from kvferry.plan.choose import demand_of
    from kvferry.plan.explain_plan import explain_plan

    if rate is not None and not 0 < rate < float("inf"):
        raise InputError(f"rate: {rate} is not above 0")
    check_range("requests", requests, 50, 10**6)
    check_range("seed", seed, 0, 2**63)
    picture = None if plot is None else Picture(plot)
    opened = open_cluster(cluster, trace, rate)
    table = opened.file.plan
    from kvferry.plan.choose import make_plan
    from kvferry.plan.judge import PlanOptions
    from kvferry.plan.route import Policy

    options = PlanOptions(
        margin=table.margin,
        exposed_share=table.exposed_share,
        max_gpus=table.max_gpus,
        requests=requests or table.requests,
        policy=Policy(table.policy),
        seed=seed,
    )
    result = _with_progress(
        lambda tick: make_plan(
            opened.cluster,
            opened.rows,
            opened.requests_per_second,
            options,
            tick,
            is_rate_stated=opened.is_rate_stated,
        )
    )
    demand = demand_of(opened.rows)
    equations = explain_plan(opened.cluster, demand, result) if explain else ()
    if picture is not None:
        from kvferry.cli.plan_plot import draw_plan

        draw_plan(picture, result)
    if as_json:
        print_json(str(cluster), opened.cluster, result, equations)
    else:
        print_tables(opened.cluster, demand, result, equations)


def _with_progress(run: Callable[[Callable[[int, int], None]], PlanResult]) -> PlanResult:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("candidates", total=None)
        return run(lambda done, of: progress.update(task, completed=done, total=of))
