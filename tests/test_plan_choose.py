"""Plans: goodput, candidates, the choice and its reason; unmeasured rows; the two Azure traces."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import NoPlanError
from kvferry.link.load import load_links
from kvferry.plan.candidate import Kind
from kvferry.plan.choose import PlanResult, demand_of, make_plan
from kvferry.plan.cluster import Cluster, build_cluster
from kvferry.plan.cluster_file import parse_cluster
from kvferry.plan.compute import DecodeLaw, MeasuredRange, PrefillLaw
from kvferry.plan.explain_plan import explain_plan
from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role, Spot
from kvferry.plan.goodput import at_rate, find_goodput, rows_at_rate
from kvferry.plan.interference import MixedStep
from kvferry.plan.judge import PlanOptions
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.public_profiles import public_profile
from kvferry.plan.queue import empirical_waits
from kvferry.plan.reason import break_even_tokens
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import TraceRow, read_trace
from plan_kit import LLAMA_70B, profile, traces

CLUSTER = """\
model = "shape:80x8x128"
[slo]
ttft = "1s"
tpot = "60ms"
[workload]
rate = 10.0
prompt_tokens = 1200
output_tokens = 60
[gpus.h100]
kv_memory = "40 GB"
profiles = ["splitwise-llama2-70b-h100-tp4", "splitwise-llama2-70b-h100-tp8"]
[[nodes]]
count = 4
gpu = "h100"
[links]
domain = { rate = "371 GB/s", start = "100us", measured = "H100 peer-to-peer write, NVIDIA/nccl#1264" }
rack = { rate = "47 GB/s", start = "400us", descriptor = "2.4us", measured = "kvcache-ai/Mooncake#1459" }
[uplinks]
node = "376 GB/s"
"""
OPTIONS = PlanOptions(requests=150)


def cluster(text: str = CLUSTER, *, payload_tokens: int = 2000) -> Cluster:
    return build_cluster(
        parse_cluster(text, "c.toml"),
        LLAMA_70B,
        open_links=load_links,
        open_profile=lambda name, _: public_profile(name),
        payload_tokens=payload_tokens,
    )


@cache
def planned(text: str = CLUSTER, rate: float = 10.0) -> PlanResult:
    return make_plan(cluster(text), [TraceRow(None, 1200, 60)] * 2000, rate, OPTIONS)


# --- Goodput ---------------------------------------------------------------------------------------------

FLEET = Fleet(
    (
        Instance("prefill-0", Role.PREFILL, profile(), Spot("a", "a")),
        Instance("decode-0", Role.DECODE, profile(), Spot("b", "b")),
    ),
    tiers=(TierCost.typed(bytes_per_second=100e9),),
)


def goodput(targets: Targets, rows: list[TraceRow], bound: float | None = None) -> float:
    return find_goodput(
        FLEET,
        rows,
        PayloadTable(LLAMA_70B, PoolFormat()),
        rules=EngineRules(),
        targets=targets,
        policy=Policy.LOAD,
        bound=bound or 1 / profile().prefill.seconds(1000),
        requests=20,
    ).requests_per_second


@settings(deadline=None, max_examples=10)
@given(st.floats(0.15, 2.0), st.floats(0.021, 0.04), st.floats(0.6, 1.0), st.floats(0.7, 1.0))
def test_tighter_targets_never_raise_goodput(ttft: float, tpot: float, f: float, g: float) -> None:
    """The rate found for smaller targets is not above the one for larger ones, with a smaller bound too."""
    # Bursts of unlike requests, more of them than are simulated at least: a longer run is another one.
    rng = np.random.default_rng(7)
    lengths = zip(rng.integers(200, 3000, 3000).tolist(), rng.integers(5, 90, 3000).tolist(), strict=True)
    times = np.cumsum(rng.exponential(1.0, 3000) * rng.choice([0.1, 3.0], 3000)).tolist()
    rows = [TraceRow(at, *pair) for at, pair in zip(times, lengths, strict=True)]
    wide, tight = goodput(Targets(ttft, tpot), rows), goodput(Targets(ttft * f, tpot * g), rows, bound=g * 9)
    assert tight <= wide


def test_goodput_is_where_the_target_is_just_kept() -> None:
    """M/D/1: the rate at which 90 % keep the TTFT, as a long walk through a queue finds it, within 6 %."""
    rows = [TraceRow(None, 1000, 2)] * 3000
    service, step = profile().prefill.seconds(1000), profile().decode_seconds(1, 1000)
    move = PayloadTable(LLAMA_70B, PoolFormat()).at(1000).nbytes / 100e9
    target = 3 * service
    found = find_goodput(
        FLEET,
        rows,
        PayloadTable(LLAMA_70B, PoolFormat()),
        rules=EngineRules(),
        targets=Targets(ttft_seconds=target),
        policy=Policy.LOAD,
        bound=1 / service,
        requests=3000,
    )
    assert found.at_rate.slo_attainment >= 0.9
    assert found.beyond is not None
    assert found.beyond.slo_attainment < 0.9
    gaps = np.random.default_rng(9).exponential(1.0, 200_000)

    def share_in_time(rate: float) -> float:
        waits = empirical_waits(np.cumsum(gaps / rate), np.full(len(gaps), service))
        return float((waits + service + move + step <= target).mean())

    assert share_in_time(found.requests_per_second * 0.94) >= 0.9
    assert share_in_time(found.requests_per_second * 1.06) <= 0.9


def test_a_target_that_idle_cannot_keep_gives_nothing() -> None:
    """Goodput 0 where even a lone request is late."""
    assert goodput(Targets(ttft_seconds=0.01), [TraceRow(None, 1000, 10)] * 100) == 0


def test_rows_at_a_rate() -> None:
    """Times are stretched to the rate with their bursts; without times they are Poisson from the seed."""
    rows = [TraceRow(0.0, 1, 1), TraceRow(0.0, 2, 1), TraceRow(9.0, 3, 1)]
    stretched = [row.arrival_seconds for row in rows_at_rate(rows, 6.0)]
    assert stretched == pytest.approx([0, 0, 0.5])
    drawn = [rows_at_rate([TraceRow(None, 1, 1)] * 2000, 5.0, seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][-1].arrival_seconds == pytest.approx(400, rel=0.1)


# --- Plans -----------------------------------------------------------------------------------------------


def test_a_plan_has_all_kinds_and_says_why() -> None:
    """Colocated, in one domain and across nodes are compared; the reason has their figures."""
    result = planned()
    kinds = {row.candidate.kind for row in result.rows}
    assert kinds == set(Kind)
    assert result.chosen is not None
    assert result.is_promise
    text = " ".join(result.reason)
    assert result.chosen.candidate.name in text
    for part in (
        "good requests a second per GPU",
        "limited by",
        "time-share law",
        "Interference was not measured",
    ):
        assert part in text
    assert result.chosen.gpus_needed == min(row.gpus_needed or 999 for row in result.rows if row.carries)


def test_a_stated_rate_takes_the_fewest_gpus() -> None:
    """At 2 requests/s the choice is small, though larger units have more goodput for each GPU; all that carry
    it were simulated to do so, and what takes fewer GPUs was simulated not to."""
    result = planned(rate=2.0)
    chosen = result.chosen
    assert chosen is not None
    assert chosen.goodput is not None
    assert (chosen.units_needed or 0) * chosen.goodput >= 2.0
    assert chosen.gpus_needed == min(row.gpus_needed or 999 for row in result.rows if row.carries)
    assert max(row.goodput_per_gpu or 0.0 for row in result.rows) > (chosen.goodput_per_gpu or 0.0)
    assert "carries 2 requests/s with" in result.reason[0]
    # A colocated pool is scaled by single instances, and one instance less does not carry it.
    together = result.together
    assert together is not None
    count, pool = together.candidate.prefill.count, together.candidate.fleet.instances
    assert len(pool) == count
    if count > 1:
        less = replace(together.candidate.fleet, instances=pool[1:])
        run = at_rate(
            less,
            [TraceRow(None, 1200, 60)] * 2000,
            cluster().payloads(),
            2.0,
            rules=together.candidate.rules,
            targets=cluster().targets,
            policy=OPTIONS.policy,
            requests=OPTIONS.requests,
        )
        assert run.slo_attainment < cluster().targets.attainment


@pytest.mark.slow
def test_more_requests_never_take_fewer_gpus() -> None:
    """Rates from 2 to 30: the GPUs of the choice rise, by whole instances of a profile."""
    found = [planned(rate=rate).chosen for rate in (2.0, 10.0, 30.0)]
    gpus = [row.gpus_needed for row in found if row is not None and row.gpus_needed is not None]
    assert len(gpus) == len(found)
    assert gpus == sorted(gpus)
    assert gpus[0] < gpus[-1]
    assert not [count for count in gpus if count % 4]


@pytest.mark.slow
def test_a_rate_that_nothing_carries_has_no_choice_and_says_by_how_much() -> None:
    """1,000 requests/s on 32 GPUs: no choice; each kind says what it carries and how far short that is."""
    result = planned(rate=1000.0)
    assert result.choice is None
    assert not result.is_promise
    assert result.reason[0] == "No candidate carries 1,000 requests/s within the targets on 32 GPUs."
    for kind in Kind:
        said = next(sentence for sentence in result.reason if f"{kind}: " in sentence)
        best = max(row.most for row in result.rows if row.candidate.kind is kind)
        assert f"carry {best:,.3g}, which is {1 - best / 1000:.0%} short" in said
    assert [row.most for row in result.rows] == sorted((row.most for row in result.rows), reverse=True)


@pytest.mark.slow
def test_a_trace_s_own_rate_is_not_stated() -> None:
    """Without a stated rate the choice has the highest goodput for each GPU, but for the margin."""
    rows = [TraceRow(None, 1200, 60)] * 2000
    result = make_plan(cluster(), rows, 1000.0, OPTIONS, is_rate_stated=False)
    assert result.chosen is not None
    rates = [row.goodput_per_gpu or 0.0 for row in result.rows]
    assert rates == sorted(rates, reverse=True)
    assert (result.chosen.goodput_per_gpu or 0.0) >= rates[0] / 1.05
    # One instance is the unit of colocation, judged among as many GPUs as the largest other unit has.
    together = result.together
    assert together is not None
    assert together.candidate.prefill.count == 1
    assert together.candidate.side_by_side > 1


def test_what_is_pruned_could_not_have_won() -> None:
    """A row without a run has a bound below what another of its kind carries."""
    result = planned()
    for row in result.rows:
        if row.at_goodput is None:
            peers = [
                r
                for r in result.rows
                if (r.candidate.kind, r.candidate.mixed) == (row.candidate.kind, row.candidate.mixed)
            ]
            assert row.candidate.capacity.per_gpu <= max(r.goodput_per_gpu or 0.0 for r in peers)


def test_a_node_too_small_for_both_pools_sends_them_across_nodes() -> None:
    """With only tp 8 a node of 8 holds one instance: the choice goes across nodes, the reason says so."""
    text = (
        CLUSTER.replace('"splitwise-llama2-70b-h100-tp4", ', "")
        .replace("60ms", "42ms")
        .replace("domain = {", "# domain = {")
    )
    result = planned(text)
    assert result.chosen is not None
    assert result.chosen.candidate.kind is Kind.ACROSS
    assert not [row for row in result.rows if row.candidate.kind is Kind.IN_DOMAIN]
    assert "No domain holds both pools: the largest node has 8 GPUs" in " ".join(result.reason)


def test_an_unmeasured_link_marks_its_rows() -> None:
    """Rows over a preset are marked; a choice among them is no promise, and the reason says to probe."""
    text = CLUSTER.replace("60ms", "42ms")
    start = text.index("rack = {")
    text = text[:start] + 'rack = "ib-ndr400"\n' + text[text.index("[uplinks]") :]
    result = planned(text)
    for row in result.rows:
        assert row.is_measured == (len(row.candidate.shares) < 2 or row.candidate.shares[1] == 0)
    assert result.chosen is not None
    assert not result.chosen.is_measured
    assert not result.is_promise
    assert "nobody measured" in " ".join(result.reason)
    assert any("links.rack" in warning for warning in result.warnings)


def test_prompts_far_beyond_a_profile_mark_its_rows() -> None:
    """Of 1,200 tokens where none above 290 was measured: marked, no promise, and the reason says why."""
    short = MeasuredRange(100, 290, 64)
    made = build_cluster(
        parse_cluster(CLUSTER.replace(', "splitwise-llama2-70b-h100-tp8"', ""), "c.toml"),
        LLAMA_70B,
        open_links=load_links,
        open_profile=lambda name, _: replace(public_profile(name), covers=short),
        payload_tokens=2000,
    )
    rows = [TraceRow(0.1 * n, 1200, 20) for n in range(60)]
    result = make_plan(made, rows, 10.0, PlanOptions(requests=60, max_gpus=16))
    ran = [row for row in result.rows if row.at_goodput is not None]
    assert ran
    assert not any(row.is_measured for row in ran)
    assert not result.is_promise
    assert "far beyond those that its profile was measured at" in " ".join(result.reason)
    assert "nobody measured" not in " ".join(result.reason)


def test_a_slow_link_rejects_what_goes_over_it() -> None:
    """At 1.2 GB/s the p95 handoff takes more than a tenth of the TTFT: what crosses nodes is rejected."""
    result = planned(CLUSTER.replace("47 GB/s", "1.2 GB/s"))
    across = [row for row in result.rows if len(row.candidate.shares) > 1 and row.candidate.shares[1] > 0.05]
    assert across
    assert all(row.limit == "rejected" and "of the TTFT target" in row.note for row in across)
    assert result.chosen is not None
    assert result.chosen not in across


def test_measured_interference_leaves_one_bound() -> None:
    """With a mixed step that was chosen, colocation is judged once, and nothing is said of bounds."""
    result = planned(CLUSTER.replace("[uplinks]", '[engine]\nmixed = "sum"\n[uplinks]'))
    assert {row.candidate.mixed for row in result.rows if row.candidate.decode is None} == {MixedStep.SUM}
    assert "Interference" not in " ".join(result.reason)


def test_unlike_gpus_take_their_roles() -> None:
    """A GPU for prefill and another for decode: every candidate uses each for its own, over the rack."""
    fast = profile(gpu="big", prefill=PrefillLaw(0.01, 1e-5), decode=DecodeLaw(0.05, 1e-7, 1e-4), tp=4)
    wide = profile(gpu="small", prefill=PrefillLaw(0.1, 1e-3), decode=DecodeLaw(0.02, 1e-7, 1e-4), tp=2)
    text = CLUSTER[: CLUSTER.index("[gpus")] + (
        '[gpus.big]\nprofiles = ["fast"]\nroles = ["prefill"]\n'
        '[gpus.small]\nprofiles = ["wide"]\nroles = ["decode"]\n'
        '[[nodes]]\ngpu = "big"\n[[nodes]]\ngpu = "small"\n[links]\ndomain = "nvlink4"\nrack = "ib-ndr400"\n'
    )
    built = build_cluster(
        parse_cluster(text, "c.toml"),
        LLAMA_70B,
        open_links=load_links,
        open_profile=lambda name, _: fast if name == "fast" else wide,
        payload_tokens=2000,
    )
    result = make_plan(built, [TraceRow(None, 1000, 60)] * 1000, 5.0, OPTIONS)
    assert result.rows
    for row in result.rows:
        assert row.candidate.decode is not None
        assert (row.candidate.prefill.gpu, row.candidate.decode.gpu) == ("big", "small")
        assert row.candidate.kind is Kind.ACROSS
    assert any("kv_memory" in warning for warning in result.warnings)


def test_units_and_their_placement() -> None:
    """The rate in units, what the GPUs allow, and where those units' instances stand."""
    result = planned()
    chosen = result.chosen
    assert chosen is not None
    assert chosen.goodput is not None
    assert result.units_needed == math.ceil(10.0 / chosen.goodput)
    assert result.units_possible is not None
    assert result.units_possible * chosen.candidate.num_gpus <= 32
    if chosen.candidate.decode is not None:
        assert result.placement is not None
        assert sum(result.placement.prefill) % chosen.candidate.prefill.count == 0


def test_no_instance_fits() -> None:
    """A profile larger than every domain is an error that says what to do."""
    with pytest.raises(NoPlanError, match="no profile's instance fits"):
        planned(CLUSTER.replace("count = 4", "count = 4\ngpus = 2").replace("domain = {", "# domain = {"))


def test_targets_that_nothing_keeps() -> None:
    """No choice, and the reason shows what failed."""
    result = planned(CLUSTER.replace("60ms", "5ms"))
    assert result.choice is None
    assert not result.is_promise
    assert "No candidate keeps both targets" in result.reason[0]


def test_break_even() -> None:
    """m* = 1 + handoff / saved; nothing saved never pays."""
    assert break_even_tokens(0.037, 0.0285, 0.0169) == pytest.approx(4.2, abs=0.02)
    assert break_even_tokens(0.037, 0.0169, 0.0169) is None


def test_filled_equations_come_out() -> None:
    """Every equation of a plan, evaluated as printed, is its value; ratio, gain and units are among them."""
    result = planned()
    rows = [TraceRow(None, 1200, 60)] * 2000
    equations = explain_plan(cluster(), demand_of(rows), result)
    names = [equation.name for equation in equations]
    for name in ("bound", "wanted ratio", "gain", "units", "decode step", "prefill share"):
        assert name in names
    for equation in equations:
        value = eval(equation.filled, {"math": math, "min": min, "__builtins__": {}})  # noqa: S307 - our own text
        assert value == pytest.approx(equation.value, rel=1e-3), equation


# --- The two Azure traces --------------------------------------------------------------------------------


@pytest.mark.slow
def test_code_and_conversation_want_different_things() -> None:
    """TTFT 1 s, TPOT 60 ms: conversation is split across nodes, code (28 output tokens) is not."""
    answers = {}
    for kind in ("conv", "code"):
        name = f"AzureLLMInferenceTrace_{kind}.csv"
        with (traces() / name).open() as file:
            rows = list(read_trace(file, name))
        p95 = sorted(row.prompt_tokens for row in rows)[int(0.95 * len(rows))]
        rate = len(rows) / (rows[-1].arrival_seconds or 1.0)
        options = replace(OPTIONS, requests=1000)
        built = cluster(payload_tokens=p95)
        answers[kind] = make_plan(built, rows, rate, options, is_rate_stated=False)
    conv, code = answers["conv"], answers["code"]
    assert conv.chosen is not None
    assert code.chosen is not None
    assert conv.chosen.candidate.kind is Kind.ACROSS
    assert code.chosen.candidate.kind is Kind.COLOCATED
    assert "Across nodes is out: the p95 handoff is exposed for" in " ".join(code.reason)
    assert "prefill to decode is wanted" in " ".join(conv.reason)
