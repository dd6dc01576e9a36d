"""What ``kvferry plan`` prints: one JSON object, or the candidates, the choice and the reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvferry.cli.check_table import print_equations
from kvferry.plan.candidate import Pool
from kvferry.plan.choose import PlanResult
from kvferry.plan.cluster import Cluster
from kvferry.plan.explain import Equation
from kvferry.plan.fleet import TIERS
from kvferry.plan.judge import PlanRow
from kvferry.plan.ratio import Demand
from kvferry.plan.tier import TierCost
from kvferry.units import format_seconds

__all__ = ["print_json", "print_tables"]

_PIPE_COLUMNS = 160
_SHOWN_ROWS = 12


def print_json(
    cluster_file: str, cluster: Cluster, result: PlanResult, equations: Sequence[Equation]
) -> None:
    """One object; the candidates best first."""
    shown: dict[str, object] = {
        "cluster": cluster_file,
        "gpus": cluster.num_gpus,
        "targets": cluster.targets,
        "requests_per_second": result.requests_per_second,
        "is_rate_stated": result.is_rate_stated,
        "candidates": [_row_object(row) for row in result.rows],
        "choice": result.choice,
        "reason": " ".join(result.reason),
        "is_promise": result.is_promise,
        "units_needed": result.units_needed,
        "units_possible": result.units_possible,
        "placement": result.placement,
        "drift": [{**msgspec.to_builtins(change), "loss": change.loss} for change in result.drift],
        "tiers": {name: _tier_object(tier) for name, tier in zip(TIERS, cluster.tiers, strict=False)},
        "warnings": result.warnings,
    }
    if equations:
        shown["equations"] = equations
    print(msgspec.json.encode(shown).decode())


def _tier_object(tier: TierCost) -> dict[str, object]:
    line = tier.fit.knee or tier.fit
    return {
        "start_seconds": line.a_seconds,
        "descriptor_seconds": line.o_seconds,
        "bytes_per_second": line.bytes_per_second,
        "spread_p95": tier.fit.spreads[-1].ratio_or_none(0.95) if tier.fit.spreads else None,
        "links": tier.links,
        "is_measured": tier.is_measured,
        "label": tier.label,
    }


def _row_object(row: PlanRow) -> dict[str, object]:
    unit, run = row.candidate, row.at_goodput
    return {
        "number": row.number,
        "name": unit.name,
        "kind": unit.kind,
        "prefill": _pool_object(unit.prefill),
        "decode": None if unit.decode is None else _pool_object(unit.decode),
        "gpus": unit.num_gpus,
        "chunk_tokens": unit.rules.chunk_tokens if unit.decode is None else None,
        "mixed_step": unit.mixed,
        "goodput": row.goodput,
        "goodput_per_gpu": row.goodput_per_gpu,
        "units_needed": row.units_needed,
        "units_possible": row.units_possible,
        "gpus_needed": row.gpus_needed,
        "carries": row.carries,
        "bound_per_gpu": unit.capacity.per_gpu,
        "slack": unit.capacity.slack,
        "slo_attainment": None if run is None else run.slo_attainment,
        "ttft_attainment": None if run is None else run.ttft_attainment,
        "tpot_attainment": None if run is None else run.tpot_attainment,
        "ttft": None if run is None else run.ttft,
        "tpot": None if run is None else run.tpot,
        "link_utilisation": None if run is None else run.link_utilisation,
        "traffic": dict(zip(TIERS, unit.shares, strict=False)),
        "exposed_p95_seconds": unit.exposed_p95_seconds if unit.decode is not None else None,
        "limit": row.limit,
        "is_measured": row.is_measured,
        "note": row.note,
    }


def _pool_object(pool: Pool) -> dict[str, object]:
    profile = pool.profile
    return {
        "gpu": pool.gpu,
        "tp": profile.tp,
        "pp": profile.pp,
        "count": pool.count,
        "source": profile.source,
    }


def print_tables(cluster: Cluster, demand: Demand, result: PlanResult, equations: Sequence[Equation]) -> None:
    """The workload, the candidates, the choice with its reason, what drift does; warnings on stderr."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS, highlight=False)
    for warning in result.warnings:
        print(f"kvferry: {warning}", file=sys.stderr)
    targets = cluster.targets
    console.print(
        f"{result.requests_per_second:.3g} requests/s, mean prompt {demand.prompt_tokens.mean():,.0f} "
        f"({demand.hit_tokens.sum() / demand.prompt_tokens.sum():.0%} prefix hits), mean output "
        f"{demand.mean_output_tokens:,.0f}; {targets.attainment:.0%} within TTFT "
        f"{format_seconds(targets.ttft_seconds)} and TPOT {format_seconds(targets.tpot_seconds)}; "
        f"{cluster.num_gpus} GPUs"
    )
    console.print(_table(result))
    for sentence in result.reason:
        console.print(sentence)
    if result.choice is not None:
        console.print(_units(cluster, result))
    for change in result.drift:
        if change.loss > 0.05:
            console.print(
                f"Drift: with {change.change} {change.best_prefill}:{change.best_decode} would be right; "
                f"the chosen ratio then loses {change.loss:.0%} of its bound."
            )
    if equations:
        print_equations(console, equations)


def _table(result: PlanResult) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("unit")
    for column in (
        "GPUs",
        "for the rate",
        "good/s per GPU",
        "TTFT p90",
        "ok",
        "TPOT p90",
        "ok",
        "link",
        "limit",
    ):
        table.add_column(column, justify="right")
    table.add_column("")
    shown = [row for row in result.rows if row.goodput is not None or row.limit == "rejected"][:_SHOWN_ROWS]
    for row in shown:
        table.add_row(*_cells(row, chosen=row.number == result.choice))
    left = len(result.rows) - len(shown)
    if left:
        table.caption = f"{left} more were beaten by their bounds or are below these; --json has all"
    return table


def _cells(row: PlanRow, *, chosen: bool) -> list[str]:
    run = row.at_goodput
    note = row.note or ("" if row.is_measured else "unmeasured")
    if run is not None and not row.note and not run.is_compute_measured:
        note = "beyond its profile" if run.is_link_measured else "unmeasured, beyond its profile"
    mark = "-> " if chosen else "   "
    cells = [mark + row.candidate.name, str(row.candidate.num_gpus)]
    if run is None:
        return [*cells, "-", "-", "-", "-", "-", "-", "-", row.limit, note]
    busiest = max([use.most for use in run.link_utilisation.values()], default=0.0)
    needed = (
        "-" if row.gpus_needed is None else f"{row.gpus_needed:,}" + ("" if row.carries else " (too many)")
    )
    return [
        *cells,
        needed,
        f"{row.goodput_per_gpu:.3g}",
        "-" if run.ttft.p90 is None else format_seconds(run.ttft.p90),
        f"{run.ttft_attainment:.0%}",
        "-" if run.tpot.p90 is None else format_seconds(run.tpot.p90),
        f"{run.tpot_attainment:.0%}",
        f"{busiest:.0%}",
        row.limit,
        note,
    ]


def _units(cluster: Cluster, result: PlanResult) -> str:
    assert result.units_needed is not None
    assert result.units_possible is not None
    chosen = result.chosen
    assert chosen is not None
    text = f"The rate needs {result.units_needed} of this unit ({chosen.candidate.num_gpus} GPUs each)"
    if result.units_needed > result.units_possible:
        text += f"; the cluster has GPUs for {result.units_possible}, so it does not suffice"
    placement = result.placement
    if placement is not None:
        used = ", ".join(
            f"{share:.0%} {tier}"
            for tier, share in zip(TIERS, placement.shares, strict=False)
            if share > 0.0005
        )
        text += f"; KV would travel {used} ({placement.method})"
    return f"{text}. {cluster.num_gpus} GPUs in all."
