"""The closed forms behind a plan's choice, with their numbers: the sums that lead to its ratio."""

from __future__ import annotations

from kvferry.plan.candidate import Candidate, Kind
from kvferry.plan.choose import PlanResult
from kvferry.plan.cluster import Cluster
from kvferry.plan.explain import Equation, number
from kvferry.plan.fleet import Role
from kvferry.plan.interference import itl_mean_seconds
from kvferry.plan.judge import PlanRow
from kvferry.plan.ratio import Demand, decode_rate
from kvferry.plan.reason import break_even_tokens
from kvferry.plan.sizing import batch_of, ports_rate, side_of, tier_use

__all__ = ["explain_plan"]


def explain_plan(cluster: Cluster, demand: Demand, result: PlanResult) -> tuple[Equation, ...]:
    """The equations of the chosen unit and of the decision; empty where nothing was chosen."""
    chosen, apart, together = result.chosen, result.apart, result.together
    if chosen is None:
        return ()
    equations: list[Equation] = []
    for row in (apart, together):
        if row is not None:
            equations += _unit(cluster, demand, row)
    if apart is not None:
        equations += _screen(demand, apart)
    if apart is not None and together is not None:
        equations.append(_decision(apart, together, result))
    equations.append(_units(chosen, result))
    return tuple(equations)


def _unit(cluster: Cluster, demand: Demand, row: PlanRow) -> list[Equation]:
    unit = row.candidate
    decode = unit.decode or unit.prefill
    compute = demand.mean_prefill_seconds(unit.prefill.profile)
    equations = [
        Equation(
            f"{unit.name}: mean prefill",
            "T_p = mean over the workload of a + b (P - q) + c (P^2 - q^2), or of the profile's table",
            number(compute),
            compute,
            "s",
        ),
        *_decode(cluster, demand, unit),
    ]
    gpu = cluster.gpus[decode.gpu]
    carried = decode_rate(decode.profile, batch_of(cluster, demand, gpu, decode.profile), demand)
    if unit.decode is None:
        one, other = unit.prefill.profile.pp / compute, carried
        limits = f"min({number(one)}, {number(other)})"
        formula = "bound = min(pp / T_p, b / (m * tau)) for an instance that hides all of the shorter phase"
        if unit.capacity.requests_per_second / unit.capacity.prefill < min(one, other) * (1 - 1e-9):
            limits = f"1 / (1 / {number(one)} + 1 / {number(other)})"
            formula = "bound = 1 / (T_p / pp + m * tau / b) for an instance that hides nothing"
        value = unit.capacity.requests_per_second
        filled = f"{unit.capacity.prefill} * {limits}"
        return [*equations, Equation(f"{unit.name}: bound", formula, filled, value, "requests/s")]
    return [*equations, *_capacity(cluster, demand, unit, carried)]


def _decode(cluster: Cluster, demand: Demand, unit: Candidate) -> list[Equation]:
    pool = unit.decode or unit.prefill
    batch = batch_of(cluster, demand, cluster.gpus[pool.gpu], pool.profile)
    law = pool.profile.decode_law(batch)
    context = demand.decode_context
    a, b, c = law.a_seconds, law.b_seconds_per_context_token, law.c_seconds_per_request
    step = Equation(
        "decode step",
        "tau = a + b * batch * context + c * batch, at the largest batch within the TPOT target and the pool",
        f"{number(a)} + {number(b)} * {batch} * {number(context)} + {number(c)} * {batch}",
        law.seconds(batch, batch * context),
        "s",
    )
    rate = decode_rate(pool.profile, batch, demand)
    each = Equation(
        "decode rate of an instance",
        "b / (m * tau), m the mean output",
        f"{batch} / ({number(demand.mean_output_tokens)} * {number(step.value)})",
        rate,
        "requests/s",
    )
    return [step, each] if batch else [step]


def _capacity(cluster: Cluster, demand: Demand, unit: Candidate, carried: float) -> list[Equation]:
    assert unit.decode is not None
    gpu = cluster.gpus[unit.decode.gpu]
    far = unit.kind is Kind.ACROSS
    use = tier_use(cluster, demand, far=far)
    side = side_of(cluster, demand, unit.prefill.profile, (gpu, unit.decode.profile), use, far=far)
    n_p, n_d = unit.prefill.count, unit.decode.count
    link = _ports(cluster, demand, unit)
    parts = f"{n_p} * {number(side.prefill_rate)}, {n_d} * {number(carried)}"
    parts += f", {number(link.value)}, {n_d} * {number(side.staging_rate)}"
    bound = Equation(
        "bound",
        "min(n_p * pp / T_p, n_d * b / (m * tau), link, n_d * staging / T_x)",
        f"min({parts})",
        unit.capacity.requests_per_second,
        "requests/s",
    )
    ratio = Equation(
        "wanted ratio",
        "n_p / n_d = T_p * b / (pp * m * tau)",
        f"{number(carried)} / {number(side.prefill_rate)}",
        carried / side.prefill_rate,
        "prefill to decode",
    )
    return [link, ratio, bound]


def _ports(cluster: Cluster, demand: Demand, unit: Candidate) -> Equation:
    """The ports of the unit: its nodes' for what leaves the domain, its instances' for the rest."""
    near, far = (tier_use(cluster, demand, far=is_far) for is_far in (False, True))
    far_share = 1 - unit.shares[0]
    sides = [[i for i in unit.fleet.instances if i.role is role] for role in (Role.PREFILL, Role.DECODE)]
    nodes = min(len({instance.spot.node for instance in side}) for side in sides)
    own = min(len(side) for side in sides)
    parts = []
    for count, use, share in ((nodes, far, far_share), (own, near, 1 - far_share)):
        if share > 0 and use.work_nbytes:
            rate, work = number(use.bytes_per_second), number(use.work_nbytes)
            parts.append(f"{count} * {rate} / ({work} * {number(share)})")
    return Equation(
        "link rate of the unit",
        "min of nodes * port / (W * far share) and instances * port / (W * near share), "
        "W = mean of V + o * n * B, with the measured spread",
        f"min({', '.join(parts)})" if len(parts) > 1 else (parts or ["math.inf"])[0],
        ports_rate(unit.fleet.instances, far_share, near, far),
        "requests/s",
    )


def _screen(demand: Demand, apart: PlanRow) -> list[Equation]:
    """The time-share law and the output from which a handoff pays."""
    run, unit = apart.at_goodput, apart.candidate
    if run is None or unit.decode is None or not apart.goodput:
        return []
    if run.tpot.mean is None or run.exposed.mean is None:
        return []
    profile = unit.decode.profile
    rate = apart.goodput * profile.num_gpus / unit.num_gpus
    compute = demand.mean_prefill_seconds(profile)
    share = rate * compute
    together = itl_mean_seconds(run.tpot.mean, share)
    equations = [
        Equation("prefill share", "u = rate * T_p", f"{number(rate)} * {number(compute)}", share, "")
    ]
    if share < 1:
        filled = f"{number(run.tpot.mean)} / (1 - {number(share)})"
        equations.append(Equation("latency colocated", "ITL / (1 - u)", filled, together, "s"))
    tokens = break_even_tokens(run.exposed.mean, together, run.tpot.mean)
    if tokens is not None and share < 1:
        filled = f"1 + {number(run.exposed.mean)} / ({number(together)} - {number(run.tpot.mean)})"
        formula = "m* = 1 + handoff / (ITL colocated - ITL apart)"
        equations.append(Equation("output from which it pays", formula, filled, tokens, "tokens"))
    return equations


def _decision(apart: PlanRow, together: PlanRow, result: PlanResult) -> Equation:
    if result.is_rate_stated and apart.carries and together.carries:
        assert apart.gpus_needed is not None
        assert together.gpus_needed is not None
        return Equation(
            "gain",
            "GPUs for the rate, colocated / apart - 1; apart is chosen above the margin",
            f"{together.gpus_needed} / {apart.gpus_needed} - 1",
            together.gpus_needed / apart.gpus_needed - 1,
            "",
        )
    assert apart.goodput_per_gpu is not None
    assert together.goodput_per_gpu is not None
    return Equation(
        "gain",
        "goodput per GPU apart / colocated - 1, both simulated; chosen above the margin",
        f"{number(apart.goodput_per_gpu)} / {number(together.goodput_per_gpu)} - 1",
        apart.goodput_per_gpu / together.goodput_per_gpu - 1,
        "",
    )


def _units(chosen: PlanRow, result: PlanResult) -> Equation:
    assert chosen.goodput
    assert result.units_needed is not None
    filled = f"{number(result.requests_per_second)} / {number(chosen.goodput)}"
    value = result.requests_per_second / chosen.goodput
    return Equation("units", "rate / goodput of a unit, rounded up", filled, value, "units")
