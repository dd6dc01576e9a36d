"""What a handoff costs: ``check``, the closed-form cap and the simulator say the same, idle and full."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.cli import run
from kvferry.link import FAR, ConditionFit, Knee, LinkFit, LinkProfile, Mode, Span, Spread
from kvferry.link.draw import draw_seconds
from kvferry.link.load import encode_links, load_links
from kvferry.plan.break_even import break_even
from kvferry.plan.check import Binding, Verdict, answer
from kvferry.plan.compute import DecodeLaw, MeasuredRange, PrefillLaw
from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role, Spot
from kvferry.plan.flips import flips
from kvferry.plan.handoff import Way, handoff_service, link_time
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken, GivenPrefill
from kvferry.plan.route import Policy
from kvferry.plan.simulate import simulate
from kvferry.plan.sizing import TierUse, ports_rate
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import TraceRow
from kvferry.plan.waits import link_service
from plan_kit import LLAMA_70B, link, link_file, profile, promise

PAYLOAD = PayloadTable(LLAMA_70B, PoolFormat())
EXAMPLE = Path(__file__).parent.parent / "examples" / "cluster.toml"
QUICK = profile(prefill=PrefillLaw(1e-6, 0.0), decode=DecodeLaw(1e-6, 0.0, 0.0))
"""An engine that takes no time, so that only the link does."""


def band(up_to: int, p50: float, tail: tuple[float, float], extra: float) -> Spread:
    """A band whose mean is that of its quantiles' straight lines, and ``extra`` in its last hundredth."""
    p95, p99 = p50 * tail[0], p50 * tail[0] * tail[1]
    mean = 0.5 * p50 + 0.45 * (p50 + p95) / 2 + 0.04 * (p95 + p99) / 2 + 0.01 * p99 + extra
    return Spread(up_to_nbytes=up_to, samples=100, p50=p50, p95=p95, p99=p99, mean=mean, deviation=0.5)


TAILS = st.tuples(st.floats(1, 3), st.floats(1, 3))
BANDS = st.builds(band, st.just(2**50), st.floats(0.8, 1.5), TAILS, st.floats(0, 0.2))
EVERYTHING = Span(low=1, high=2**50)


@st.composite
def fits(draw: st.DrawFn) -> LinkFit:
    """Any fit: of one regime or two, with costs that add up or overlap, with a spread or without."""
    knee = Knee(
        a_seconds=draw(st.floats(0, 2e-3)),
        o_seconds=draw(st.floats(0, 1e-5)),
        bytes_per_second=draw(st.floats(1e9, 1e11)),
        from_nbytes=2**26,
    )
    return LinkFit(
        a_seconds=draw(st.floats(0, 2e-3)),
        o_seconds=draw(st.floats(0, 1e-5)),
        bytes_per_second=draw(st.floats(1e9, 1e11)),
        descriptors_overlap=draw(st.booleans()),
        samples=100,
        nbytes=EVERYTHING,
        descriptors=EVERYTHING,
        block_bytes=EVERYTHING,
        spreads=draw(st.one_of(st.just(()), st.tuples(BANDS))),
        knee=draw(st.sampled_from([None, knee])),
    )


def pair_of(fit: LinkFit) -> LinkProfile:
    return replace(link(), fits=(ConditionFit(mode=Mode.PULL, fit=fit),))


def fleet(tier: TierCost, prefill: int = 1, decode: int = 1, **changes: object) -> Fleet:
    """Instances of no compute time, each on its own node."""
    instances = [
        Instance(f"{role}-{n}", role, QUICK, Spot(f"{role}{n}", f"{role}{n}"), max_batch=10**6)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for n in range(count)
    ]
    return Fleet(tuple(instances), tiers=(tier, tier), **changes)  # type: ignore[arg-type]


# --- Idle ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(fits(), st.integers(1, 20_000), st.sampled_from([1, 3]), st.sampled_from([0.5, 0.8, 0.95, 0.99]))
def test_an_idle_link_takes_what_check_says(fit: LinkFit, tokens: int, links: int, q: float) -> None:
    """Typical, quantile and mean of a tier are ``check``'s of the same fit; one simulated request has it."""
    tier, way = TierCost(fit, links), Way(pair_of(fit), links=links, quantile=q)
    nbytes, pieces = PAYLOAD.pair(tokens)
    found = link_time(way, nbytes, pieces)
    assert tier.seconds(nbytes, pieces) == pytest.approx(found.seconds - found.spread_seconds)
    service = handoff_service(way, nbytes, pieces)
    if fit.spreads:
        assert tier.quantile_seconds(q, nbytes, pieces) == pytest.approx(found.seconds)
    assert tier.mean_work_nbytes(nbytes, pieces) / tier.rate == pytest.approx(service.mean_seconds)
    load = tier.load(nbytes, pieces)
    alone = load.start_seconds + load.work_nbytes / load.bytes_per_second
    assert alone == pytest.approx(tier.seconds(nbytes, pieces))
    kept = []
    simulate(fleet(tier), [TraceRow(0.0, tokens, 1)], PAYLOAD, with_spread=False, keep=kept.append)
    assert kept[0].transfer_seconds == pytest.approx(tier.seconds(nbytes, pieces), rel=1e-6)


def test_a_spread_is_drawn_by_default_with_its_quantiles_and_mean() -> None:
    """Handoffs alone on the link have the measured p50 (here 1.41), p95, p99 and mean; else typical."""
    spread = band(2**50, 1.41, (1.3, 1.5), 0.05)
    tier = TierCost(replace(TierCost.typed(1e-3, 1e-6, 20e9).fit, spreads=(spread,)))
    nbytes, pieces = PAYLOAD.pair(1000)
    typical = tier.seconds(nbytes, pieces)
    rows = [TraceRow(10.0 * n, 1000, 1) for n in range(8000)]
    kept = []
    simulate(fleet(tier), rows, PAYLOAD, keep=kept.append)
    times = np.array([record.transfer_seconds for record in kept]) / typical
    for q, ratio in ((0.5, spread.p50), (0.95, spread.p95), (0.99, spread.p99)):
        assert np.quantile(times, q) == pytest.approx(ratio, rel=0.02)
    assert times.mean() == pytest.approx(spread.mean, rel=0.01)
    calm = simulate(fleet(tier), rows[:10], PAYLOAD, with_spread=False)
    assert calm.transfer.mean == pytest.approx(typical)


@given(
    fits(), st.lists(st.floats(0, 1), min_size=2, max_size=2), st.integers(1, 2**32), st.integers(1, 10**6)
)
def test_more_luck_is_never_slower(fit: LinkFit, luck: list[float], nbytes: int, pieces: int) -> None:
    """The draw is a distribution: it rises with its uniform number, and is above 0."""
    low, high = sorted(luck)
    fast, slow = (draw_seconds(fit, at, nbytes, pieces) for at in (low, high))
    assert 0 < fast <= slow * (1 + 1e-12)


def test_few_samples_draw_what_is_known() -> None:
    """Without p95 and p99 median and mean are kept; a mean below the lines makes the fast half faster."""
    for p95, mean in ((None, 1.3), (None, 0.9), (1.5, 1.0), (1.5, 1.6)):
        spread = Spread(up_to_nbytes=2**50, samples=9, p50=1.0, p95=p95, mean=mean, deviation=0.2)
        fit = replace(TierCost.typed(1e-3, 0.0, 1e9).fit, spreads=(spread,))
        luck = (np.arange(4000) + 0.5) / 4000
        ratios = [draw_seconds(fit, u, 10**6, 1) / fit.at_least(10**6, 1) for u in luck.tolist()]
        assert np.mean(ratios) == pytest.approx(mean, rel=1e-3)
        assert np.median(ratios) == pytest.approx(1.0, rel=1e-3)


# --- Full ------------------------------------------------------------------------------------------------


COUNT = 240
STAGING = EngineRules(staging=64)
"""Enough on the way that the link is never idle, and few enough that sharing it is quick to work out."""


def flooded(system: Fleet, tokens: int) -> float:
    """Handoffs a second while far more are asked for than the link carries."""
    rows = [TraceRow(1e-6 * n, tokens, 1) for n in range(COUNT)]
    run = simulate(system, rows, PAYLOAD, rules=STAGING, policy=Policy.ROUND_ROBIN)
    assert run.done == COUNT
    return COUNT / run.span_seconds


@settings(deadline=None, max_examples=12)
@given(fits(), st.sampled_from([300, 4000]), st.sampled_from([1, 2]), st.sampled_from([None, 0.5, 4.0]))
@pytest.mark.slow
def test_a_full_link_carries_the_cap(fit: LinkFit, tokens: int, each: int, ports: float | None) -> None:
    """At saturation the simulator's throughput is the closed form's cap, where ``check`` has load 1."""
    if fit.spreads:  # a slow one at the very end would leave the other ports idle
        each, ports = 1, None if ports == 4.0 else ports
    tier = TierCost(fit)
    nbytes, pieces = PAYLOAD.pair(tokens)
    node_rate = None if ports is None else ports * tier.rate
    system = fleet(tier, each, each, node_rate=node_rate)
    use = TierUse(tier.mean_work_nbytes(nbytes, pieces), 1.0, node_rate or tier.rate)
    cap = ports_rate(system.instances, 1.0, use, use)
    if node_rate is None and each == 1:
        asked = promise(prompt_tokens=tokens, way=Way(pair_of(fit)))
        assert link_service(asked).load(cap) == pytest.approx(1.0)
    if fit.spreads:  # of the draws that this run has, instead of their mean
        luck = random.Random(0)
        late = [tier.quantile_seconds(luck.random(), nbytes, pieces) for _ in range(COUNT)]
        cap *= tier.mean_seconds(nbytes, pieces) / np.mean(late)
    assert flooded(system, tokens) == pytest.approx(cap, rel=0.05)


def test_many_small_pieces_fill_a_link() -> None:
    """2,560 pieces at 2.4 us keep a port busy for 6 ms however few bytes they have; a start does not."""
    _, pieces = PAYLOAD.pair(500)
    assert pieces == 2560
    by_pieces, by_start = TierCost.typed(0.0, 2.4e-6, 1e12), TierCost.typed(6e-3, 0.0, 1e12)
    assert flooded(fleet(by_pieces), 500) == pytest.approx(1 / (pieces * 2.4e-6), rel=0.03)
    assert flooded(fleet(by_start), 500) > 1000


def test_pieces_are_posted_at_the_ends_and_not_on_uplinks() -> None:
    """Four node pairs whose ports are full of posting share an uplink that only their bytes pass."""
    tier = TierCost.typed(0.0, 2.4e-6, 1e12)
    nbytes, pieces = PAYLOAD.pair(500)
    instances = tuple(
        replace(instance, spot=replace(instance.spot, rack=str(instance.role)))
        for instance in fleet(tier, 4, 4).instances
    )
    ports = 4 / (pieces * 2.4e-6 + nbytes / 1e12)
    for uplink, cap in ((200e9, ports), (20e9, 20e9 / nbytes)):
        system = Fleet(instances, tiers=(tier,) * 3, rack_uplink_rate=uplink)
        rows = [TraceRow(1e-6 * n, 500, 1) for n in range(COUNT)]
        found = simulate(system, rows, PAYLOAD, rules=STAGING, policy=Policy.ROUND_ROBIN)
        assert found.done / found.span_seconds == pytest.approx(cap, rel=0.04)
        per_second = found.bytes_delivered / found.span_seconds
        assert found.link_utilisation["rack uplink"].most == pytest.approx(per_second / uplink)
        assert found.bytes_delivered == pytest.approx(COUNT * nbytes)


# --- Far beyond what was measured ------------------------------------------------------------------------


def measured_to(nbytes: int, descriptors: int) -> LinkProfile:
    """A pair that was measured up to that."""
    spans = {"nbytes": Span(low=2**16, high=nbytes), "descriptors": Span(low=1, high=descriptors)}
    fit = replace(link(spread=1.2).fits[0].fit, block_bytes=Span(low=2**14, high=2**20), **spans)
    return pair_of(fit)


@pytest.mark.parametrize("what", ["bytes", "descriptors"])
def test_far_beyond_is_unknown(what: str) -> None:
    """Up to 4 times the largest copy measured it holds, with a warning; beyond it is unknown."""
    nbytes, pieces = PAYLOAD.pair(4096)
    for share, verdict in ((FAR, Verdict.HOLDS), (1.03 * FAR, Verdict.UNKNOWN)):
        high = int(nbytes / share) + 1 if what == "bytes" else 2**50
        most = int(pieces / share) + 1 if what == "descriptors" else 2**30
        if verdict is Verdict.UNKNOWN:
            high, most = high - 1, most - 1
        asked = promise(target_seconds=10.0, way=Way(measured_to(high, most)))
        found = answer(asked)
        assert found.verdict is verdict
        assert found.ttft_seconds is not None
        if verdict is Verdict.UNKNOWN:
            assert f"{what} are more than 4 times" in found.unknown[0]
            # The estimate has the spread, so it is not better than a measured answer.
            assert found.transfer.seconds == pytest.approx(1.2 * nbytes / 10e9)
        else:
            assert any("outside" in warning for warning in found.warnings)


def test_a_smaller_copy_than_any_measured_is_no_reason_to_doubt() -> None:
    """A copy takes no longer than the smallest one measured: it holds."""
    assert answer(promise(prompt_tokens=16, way=Way(measured_to(2**40, 2**40)))).verdict is Verdict.HOLDS


def test_flips_beyond_what_was_measured_say_so() -> None:
    """The longest prompt lies where nobody measured: its flip is an estimate; one inside is not."""
    nbytes, pieces = PAYLOAD.pair(4096)
    asked = promise(target_seconds=60.0, way=Way(measured_to(nbytes, pieces)))
    found = flips(asked, answer(asked))
    assert found["max_prompt_tokens"].is_estimate
    assert "estimate" in found["max_prompt_tokens"].says
    assert not found["min_cached_tokens"].is_estimate


@pytest.fixture
def small_links(tmp_path: Path) -> Path:
    """The example's cluster with a rack that was measured up to 1 MiB only."""
    (tmp_path / "links.json").write_bytes(encode_links(link_file(measured_to(2**20, 64))))
    text = EXAMPLE.read_text("utf-8")
    for tier in ("domain", "rack"):
        line = next(line for line in text.splitlines() if line.startswith(f"{tier} = {{"))
        text = text.replace(line, f'{tier} = "links.json"')
    text = text.replace("[512, 2048, 8192]", "512").replace("output_tokens = 211", "output_tokens = 20")
    text = text.replace(
        '"splitwise-llama2-70b-h100-tp4", "splitwise-llama2-70b-h100-tp8"', '"splitwise-llama2-70b-h100-tp4"'
    )
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return path


def test_plans_and_runs_far_beyond_are_marked(small_links: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of a plan are unmeasured and nothing is promised; a run is an estimate and says why."""
    assert run(["plan", str(small_links), "--requests", "60", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    apart = [row for row in found["candidates"] if row["decode"] is not None]
    assert apart
    assert not any(row["is_measured"] for row in apart)
    assert "more than 4 times" in found["tiers"]["rack"]["label"]
    assert run(["simulate", str(small_links), "--requests", "50"]) == 0
    printed = capsys.readouterr()
    assert "50 of 50 handoffs have more than 4 times" in printed.err
    assert "these times are estimates" in printed.err


def test_a_run_whose_handoffs_are_too_far_is_an_estimate() -> None:
    """More than 1 % of the handoffs beyond the measurements: not measured; one in two hundred: still is."""
    nbytes, pieces = PAYLOAD.pair(1000)
    fit = measured_to(nbytes, pieces).fits[0].fit
    for long, measured in ((1, True), (10, False)):
        rows = [TraceRow(10.0 * n, 16_000 if n < long else 1000, 2) for n in range(200)]
        found = simulate(fleet(TierCost(fit)), rows, PAYLOAD)
        assert found.handoffs_too_far == long
        assert found.is_measured is measured


def test_a_prompt_far_beyond_the_profile_is_unknown() -> None:
    """Up to 4 times the longest prompt measured it holds, with a warning; beyond it is unknown, unless what
    is known breaks the promise by itself. The same for the batch of the first decode step.
    """
    compute = profile(covers=MeasuredRange(100, 1000, 8))
    for tokens, batch, verdict in (
        (4000, 32, Verdict.HOLDS),
        (4001, 32, Verdict.UNKNOWN),
        (4000, 33, Verdict.UNKNOWN),
    ):
        asked = promise(prefill=compute, prompt_tokens=tokens, decode_batch=batch, target_seconds=10.0)
        found = answer(asked)
        assert found.verdict is verdict
        assert found.ttft_seconds is not None
        if verdict is Verdict.HOLDS:
            assert any("outside" in warning for warning in found.warnings)
            continue
        assert "more than 4 times" in found.unknown[0]
        assert found.binding is Binding.UNKNOWN_PREFILL
        assert not any("outside" in warning for warning in found.warnings)
        # 4,000 tokens take 410 ms of prefill, with the first step more.
        assert answer(replace(asked, target_seconds=0.41)).verdict is Verdict.DOES_NOT_HOLD
        assert answer(replace(asked, target_seconds=0.45)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("part", ["link", "profile", "given"])
@pytest.mark.parametrize("has_arrivals", [False, True])
def test_waits_behind_prompts_that_are_too_far_are_estimates(part: str, *, has_arrivals: bool) -> None:
    """The prompt itself was measured, but more than 1 % of those that it waits for lie too far: unknown, in
    the grid and the flips too; 1 in 200 is still measured. Too long behind those that were: does not hold.
    """
    nbytes, pieces = PAYLOAD.pair(1000)
    prefill = {
        "link": profile(),
        "profile": profile(covers=MeasuredRange(100, 1000, 8)),
        "given": GivenPrefill(0.11, 1000, 0),
    }[part]
    way = Way(measured_to(nbytes, pieces) if part == "link" else link(spread=1.2))
    for long, verdict in ((1, Verdict.HOLDS), (10, Verdict.UNKNOWN)):
        asked = promise(
            prompt_tokens=1000,
            target_seconds=20.0,
            prefill=prefill,
            way=way,
            requests_per_second=0.2,
            prompt_lengths=np.array([4200 + 100 * n if n < long else 1000 for n in range(200)]),
            arrival_seconds=np.arange(200.0) if has_arrivals else None,
        )
        found = answer(asked)
        assert (found.verdict, found.is_measured) == (verdict, verdict is Verdict.HOLDS)
        assert set(break_even(asked).verdicts[0]) == {verdict}  # the row without hits, at any length
        assert flips(asked, found)["min_cached_tokens"].is_estimate is (verdict is Verdict.UNKNOWN)
        without_rate = answer(replace(asked, requests_per_second=None))
        assert (without_rate.verdict, without_rate.is_measured) == (Verdict.HOLDS, True)
    assert found.unknown[0].startswith("5% of the workload's prompts: ")
    assert "more than 4 times" in found.unknown[0]
    assert found.binding is (Binding.UNMEASURED if part == "link" else Binding.UNKNOWN_PREFILL)
    if part == "link":
        from_prefill = answer(replace(asked, first_token=FirstToken.PREFILL))
        assert (from_prefill.verdict, from_prefill.is_measured) == (Verdict.HOLDS, False)
    else:
        assert answer(replace(asked, queue_seconds=0.0)).verdict is Verdict.HOLDS
    assert answer(replace(asked, target_seconds=0.1)).verdict is Verdict.DOES_NOT_HOLD
    busy = replace(asked, requests_per_second=20.0, target_seconds=5.0)
    assert answer(busy).verdict is Verdict.DOES_NOT_HOLD


def test_a_given_prefill_reaches_four_times_what_it_computed() -> None:
    """Longer prompts are unknown, the flip of the prompt says so; what the prefix spared counts as computed
    by nobody. Too long already where it reaches: does not hold.
    """
    for cached, longest in ((0, 4000), (600, 2200)):
        asked = promise(prefill=GivenPrefill(0.01, 1000, cached), cached_tokens=cached, target_seconds=9.0)
        assert answer(replace(asked, prompt_tokens=longest)).verdict is Verdict.HOLDS
        far = replace(asked, prompt_tokens=longest + 1)
        assert answer(far).verdict is Verdict.UNKNOWN
        assert "--prefill-seconds was measured at" in answer(far).unknown[0]
        assert answer(replace(far, target_seconds=0.03)).verdict is Verdict.DOES_NOT_HOLD
        near = replace(asked, prompt_tokens=1000)
        assert flips(near, answer(near))["max_prompt_tokens"].is_estimate
        assert not flips(near, answer(near))["min_cached_tokens"].is_estimate


def test_a_flip_that_is_nowhere_is_an_estimate_where_only_estimates_say_so() -> None:
    """Too long by a link that was not measured: nowhere by the estimate; too long without it: nowhere."""
    way = Way(load_links("eth100").select())
    for seconds, is_estimate in ((0.5, True), (2.0, False)):
        asked = promise(way=way, target_seconds=1.0, prefill=GivenPrefill(seconds, 4096, 0), sync_seconds=1.0)
        found = flips(asked, answer(asked))
        for knob in (
            "max_prompt_tokens",
            "min_cached_tokens",
            "min_prefix_hit_share",
            "min_bytes_per_second",
        ):
            assert found[knob].value is None or knob == "max_prompt_tokens"
        assert {found[knob].is_estimate for knob in ("min_cached_tokens", "kv_dtype")} == {is_estimate}
        assert found["min_bytes_per_second"].is_estimate is is_estimate


def test_a_run_whose_prompts_or_batches_are_too_far_is_an_estimate() -> None:
    """More than 1 % of the prompts, or of the requests in a batch, beyond what their profile reaches."""
    for long, crowd, of_compute in ((1, 0, True), (10, 0, False), (0, 10, False)):
        quick = replace(QUICK, covers=MeasuredRange(1, 1000, 2))
        system = fleet(TierCost(link().fits[0].fit))
        instances = tuple(replace(instance, profile=quick) for instance in system.instances)
        rows = [TraceRow(10.0 * n, 4001 if n < long else 1000, 2) for n in range(200)]
        rows += [TraceRow(1e4, 1000, 10**6) for _ in range(crowd and crowd + 8)]
        found = simulate(replace(system, instances=instances), rows, PAYLOAD)
        assert found.prompts_too_far == long
        assert found.batches_too_far == crowd
        assert found.is_link_measured
        assert found.is_compute_measured is found.is_measured is of_compute


COSTS = st.tuples(st.floats(0, 0.02), st.floats(0, 1e-5), st.floats(2e9, 1e11))


@settings(deadline=None, max_examples=40)
@given(COSTS, COSTS, st.lists(st.tuples(st.floats(0, 0.1), st.integers(1, 4000)), min_size=2, max_size=12))
def test_a_faster_link_delays_no_handoff(
    one: tuple[float, float, float], other: tuple[float, float, float], asked: list[tuple[float, int]]
) -> None:
    """Less start, less a piece and more rate: on a link that all share every handoff ends no later."""
    ends = []
    times = np.cumsum([gap for gap, _ in asked]).tolist()
    rows = [TraceRow(at, tokens, 1) for at, (_, tokens) in zip(times, asked, strict=True)]
    for pick in (max, min):
        start, piece = pick(one[0], other[0]), pick(one[1], other[1])
        rate = min(one[2], other[2]) if pick is max else max(one[2], other[2])
        kept = []
        simulate(fleet(TierCost.typed(start, piece, rate)), rows, PAYLOAD, keep=kept.append)
        ends.append([record.end_seconds for record in sorted(kept)])
    for slow, fast in zip(*ends, strict=True):
        assert fast <= slow + 2e-5  # a decode step of a microsecond for each of the others
