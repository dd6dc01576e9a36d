"""The simulator: closed forms, loops over every step, conservation, failures, policies, determinism."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvferry.errors import InputError
from kvferry.plan.check import answer
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw
from kvferry.plan.decode_batch import DecodeBatch
from kvferry.plan.fleet import EngineRules, Fleet, Instance, Role, Spot
from kvferry.plan.handoff import Way
from kvferry.plan.interference import MixedStep
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.prefix import PrefixIndex
from kvferry.plan.promise import FirstToken
from kvferry.plan.public_profiles import public_profile
from kvferry.plan.queue import Service, inter_op_seconds, md1_seconds
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Histogram, Targets
from kvferry.plan.sim_request import Request, RequestRecord
from kvferry.plan.sim_result import Result
from kvferry.plan.simulate import Kill, simulate
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import TraceRow
from plan_kit import LLAMA_70B, link, profile, promise

PAYLOAD = PayloadTable(LLAMA_70B, PoolFormat())
TIER = TierCost.typed(1e-3, 1e-6, 20e9)


def fleet(
    prefill: int = 1, decode: int = 1, *, engine: ComputeProfile | None = None, **changes: object
) -> Fleet:
    """Prefill and decode instances, each on a node of its own, in one rack."""
    engine = engine or profile()
    instances = [
        Instance(f"{role}-{n}", role, engine, Spot(f"{role}{n}", f"{role}{n}"), **changes)  # type: ignore[arg-type]
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode))
        for n in range(count)
    ]
    return Fleet(tuple(instances), tiers=(TIER, TIER))


def poisson(
    rate: float, count: int, prompts: list[int], outputs: list[int], seed: int = 3
) -> Iterator[TraceRow]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count)).tolist()
    prompt, output = rng.choice(prompts, count).tolist(), rng.choice(outputs, count).tolist()
    return (TraceRow(*row) for row in zip(arrivals, prompt, output, strict=True))


def records_of(*args: object, **options: object) -> tuple[Result, list[RequestRecord]]:
    kept: list[RequestRecord] = []
    return simulate(*args, keep=kept.append, **options), kept  # type: ignore[arg-type]


# --- Closed forms ----------------------------------------------------------------------------------------

ALONE = EngineRules(first_token=FirstToken.PREFILL)  # outputs of one token end at prefill: one queue


@pytest.mark.parametrize("rate", [4.0, 8.0])
def test_md1_ttft(rate: float) -> None:
    """OPT-13B, prompts of 512, one instance: DistServe's M/D/1 TTFT within 2 %."""
    engine = public_profile("distserve-opt-13b-a100-tp1")
    found = simulate(fleet(engine=engine), poisson(rate, 80_000, [512], [1]), PAYLOAD, rules=ALONE)
    assert found.ttft.mean == pytest.approx(md1_seconds(rate, engine.prefill.seconds(512)), rel=0.02)
    assert found.prefill_utilisation == pytest.approx(rate * engine.prefill.seconds(512), rel=0.01)


def test_mg1_wait() -> None:
    """Prompts of two lengths: the mean wait is Pollaczek and Khinchine's within 2 %."""
    rate, prompts = 5.0, [200, 200, 2000]
    times = np.array([profile().prefill.seconds(tokens) for tokens in prompts])
    found = simulate(fleet(), poisson(rate, 120_000, prompts, [1]), PAYLOAD, rules=ALONE)
    assert found.prefill_wait.mean == pytest.approx(Service.of(times).wait_seconds(rate), rel=0.02)


def test_pipelined_prefill_is_inter_op() -> None:
    """Two pipeline stages: DistServe's inter-op TTFT within 2 %."""
    engine = profile(pp=2)
    found = simulate(fleet(engine=engine), poisson(9.0, 70_000, [1000], [1]), PAYLOAD, rules=ALONE)
    assert found.ttft.mean == pytest.approx(inter_op_seconds(9.0, engine.prefill.seconds(1000), 2), rel=0.02)


def test_little_s_law_at_decode() -> None:
    """Requests decoding at a time are their rate times their stay (the batch is stable)."""
    found, kept = records_of(fleet(2, 1), poisson(2.0, 4000, [500], [50, 150]), PAYLOAD)
    stay = np.mean([record.end_seconds - record.arrival_seconds for record in kept])
    assert found.done == 4000
    overlap = sum(record.end_seconds - record.arrival_seconds for record in kept) / found.span_seconds
    assert overlap == pytest.approx(found.done / found.span_seconds * stay)


@settings(deadline=None, max_examples=40)
@given(
    tokens=st.integers(1, 20_000),
    groups=st.sampled_from([1, 4, 80]),
    first=st.sampled_from(FirstToken),
    sync=st.sampled_from([0.0, 0.004]),
    wire=st.tuples(st.floats(0, 0.01), st.floats(0, 1e-5), st.floats(1e9, 1e12), st.sampled_from([1, 4])),
)
def test_an_idle_system_is_what_check_says(
    tokens: int,
    groups: int,
    first: FirstToken,
    sync: float,
    wire: tuple[float, float, float, int],
) -> None:
    """One request alone has the TTFT, and the gap after it, of ``check``."""
    engine = profile(prefill=PrefillLaw(0.01, 2e-5, 1e-9))
    *costs, links = wire
    way, tier = Way(link(*costs), links=links), TierCost.typed(*costs, links=links)
    step = engine.decode_seconds(1, tokens)
    asked = promise(
        prompt_tokens=tokens,
        prefill=engine,
        way=way,
        groups=groups,
        first_token=first,
        sync_seconds=sync,
        decode_step_seconds=step,
    )
    system = replace(fleet(engine=engine), tiers=(tier, tier))
    rules = EngineRules(first_token=first, groups=groups, sync_seconds=sync)
    _, (record,) = records_of(system, [TraceRow(0.0, tokens, 2)], PAYLOAD, rules=rules)
    expected = answer(asked)
    assert record.ttft_seconds == pytest.approx(expected.ttft_seconds, rel=1e-5)
    if expected.gap_seconds is not None:
        assert record.tpot_seconds == pytest.approx(expected.gap_seconds, rel=1e-4)


# --- Loops over every step -------------------------------------------------------------------------------

# Odd times, so that an arrival is never within rounding of the border of a step.
TIMES = st.integers(0, 3000).map(lambda n: n * 0.001000373)
LAWS = st.builds(
    lambda a, b, c: profile(decode=DecodeLaw(a, b, c)),
    st.floats(1e-3, 0.1),
    st.floats(0, 1e-5),
    st.floats(0, 1e-3),
)


@settings(deadline=None)
@given(
    LAWS,
    st.lists(st.tuples(TIMES, st.integers(1, 3000), st.integers(1, 60)), min_size=1, max_size=10),
)
def test_a_batch_is_a_loop_over_its_steps(
    engine: ComputeProfile, arrivals: list[tuple[float, int, int]]
) -> None:
    """Ends and first tokens are those of a loop that makes one token a step for whoever is there."""
    arrivals = sorted(arrivals)
    found = fast_batch(engine, arrivals)
    expected = slow_batch(engine, arrivals)
    for (first, end), (slow_first, slow_end) in zip(found, expected, strict=True):
        assert first == pytest.approx(slow_first, abs=1e-6)
        assert end == pytest.approx(slow_end, abs=1e-6)


def fast_batch(engine: ComputeProfile, arrivals: list[tuple[float, int, int]]) -> list[tuple[float, float]]:
    batch = DecodeBatch(engine)
    requests = [Request(n, at, prompt, output, ()) for n, (at, prompt, output) in enumerate(arrivals)]
    ends: dict[int, float] = {}

    def finish() -> None:
        when = batch.next_finish
        ends.update((request.number, when) for request in batch.finish_next())

    for request in requests:
        while batch.next_finish <= request.arrival:
            finish()
        batch.advance_to(request.arrival)
        batch.join(request)
    while batch.count:
        finish()
    return [(request.first or 0.0, ends[request.number]) for request in requests]


def slow_batch(engine: ComputeProfile, arrivals: list[tuple[float, int, int]]) -> list[tuple[float, float]]:
    now = 0.0
    waiting = list(enumerate(arrivals))
    running: dict[int, list[int]] = {}
    first: dict[int, float] = {}
    ends: dict[int, float] = {}
    while waiting or running:
        if not running and waiting:
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now + 1e-9:
            number, (_, prompt, output) = waiting.pop(0)
            running[number] = [prompt, output]
        context = sum(prompt for prompt, _ in running.values())
        now += engine.decode_seconds(len(running), context)
        for number, state in list(running.items()):
            first.setdefault(number, now)
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[number] = now
                del running[number]
    return [(first[number], ends[number]) for number in range(len(arrivals))]


@settings(deadline=None, max_examples=60)
@given(
    LAWS,
    st.lists(st.tuples(TIMES, st.integers(1, 3000), st.integers(1, 30)), min_size=1, max_size=8),
    st.sampled_from([256, 1000, 5000]),
    st.sampled_from([MixedStep.SUM, MixedStep.LONGER]),
)
def test_a_colocated_instance_is_a_loop_over_its_steps(
    engine: ComputeProfile, arrivals: list[tuple[float, int, int]], chunk: int, mixed: MixedStep
) -> None:
    """Chunked prefill beside decode: first tokens and ends are those of a loop over all steps."""
    arrivals = sorted(arrivals)
    system = Fleet((Instance("both", Role.COLOCATED, engine),))
    rows = [TraceRow(*row) for row in arrivals]
    _, kept = records_of(system, rows, PAYLOAD, rules=EngineRules(chunk_tokens=chunk, mixed=mixed))
    expected = slow_colocated(engine, arrivals, chunk, mixed)
    for record in kept:
        first, end = expected[record.number]
        assert record.ttft_seconds == pytest.approx(first - record.arrival_seconds, abs=1e-6)
        assert record.end_seconds == pytest.approx(end, abs=1e-6)


def slow_chunk(
    engine: ComputeProfile, prompts: dict[int, int], arrivals: list[tuple[float, int, int]], left: int
) -> tuple[float, list[int]]:
    """Seconds of a chunk of the prompts in turn, and those that it ends."""
    seconds = engine.prefill.step_seconds if prompts else 0.0
    ended = []
    for number, done in prompts.items():
        part = min(left, arrivals[number][1] - done)
        seconds += engine.prefill.work_seconds(done + part, done)
        prompts[number] += part
        left -= part
        if prompts[number] == arrivals[number][1]:
            ended.append(number)
        if not left:
            break
    return seconds, ended


def slow_colocated(
    engine: ComputeProfile, arrivals: list[tuple[float, int, int]], chunk: int, mixed: MixedStep
) -> dict[int, tuple[float, float]]:
    now = 0.0
    waiting = list(enumerate(arrivals))
    prompts: dict[int, int] = {}
    running: dict[int, list[int]] = {}
    first: dict[int, float] = {}
    ends: dict[int, float] = {}
    while waiting or prompts or running:
        if not prompts and not running:
            now = max(now, waiting[0][1][0])
        while waiting and waiting[0][1][0] <= now + 1e-9:
            number, _ = waiting.pop(0)
            prompts[number] = 0
        decode = engine.decode_seconds(len(running), sum(c for c, _ in running.values())) if running else 0.0
        compute, ended = slow_chunk(engine, prompts, arrivals, chunk)
        now += compute + decode if mixed is MixedStep.SUM else max(compute, decode)
        for number, state in list(running.items()):
            state[0] += 1
            state[1] -= 1
            if not state[1]:
                ends[number] = now
                del running[number]
        for number in ended:
            del prompts[number]
            first[number] = now
            if arrivals[number][2] == 1:
                ends[number] = now
            else:
                running[number] = [arrivals[number][1], arrivals[number][2] - 1]
    return {number: (first[number], ends[number]) for number in first}


# --- Conservation and failures ---------------------------------------------------------------------------


@st.composite
def systems(draw: st.DrawFn) -> tuple[Fleet, list[TraceRow], dict[str, object]]:
    """A small busy fleet, its trace, and the options of a run."""
    prefill, decode = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pool = draw(st.sampled_from([None, 4000, 10_000]))
    system = fleet(
        prefill, decode, pool_tokens=pool, max_batch=draw(st.sampled_from([2, 64])), prefix_tokens=4096
    )
    system = replace(system, node_rate=draw(st.sampled_from([None, 5e9])))
    gaps = draw(st.lists(st.floats(0, 0.3), min_size=1, max_size=25))
    rows, now = [], 0.0
    for number, gap in enumerate(gaps):
        now += gap
        prompt, output = draw(st.integers(1, 3000)), draw(st.integers(1, 40))
        hashes = tuple(block if block < 2 else 100 * number + block for block in range(-(-prompt // 512)))
        rows.append(TraceRow(now, prompt, output, hashes if draw(st.booleans()) else ()))
    names = [instance.name for instance in system.instances]
    kill = st.builds(Kill, st.sampled_from(names), st.floats(0, 5), st.sampled_from([None, 0.0, 1.0]))
    options = {
        "policy": draw(st.sampled_from(Policy)),
        "kills": draw(st.lists(kill, max_size=3)),
        "rules": EngineRules(
            first_token=draw(st.sampled_from(FirstToken)),
            groups=draw(st.sampled_from([1, 8])),
            staging=draw(st.sampled_from([None, 1, 2])),
            prefill_batch_tokens=draw(st.sampled_from([0, 4096])),
        ),
    }
    return system, rows, options


@settings(deadline=None, max_examples=150)
@given(systems())
def test_every_request_ends_once_and_bytes_are_conserved(
    system: tuple[Fleet, list[TraceRow], dict[str, object]],
) -> None:
    """With any failures: each request ends exactly once, in order of its parts; bytes in are bytes out."""
    machines, rows, options = system
    found, kept = records_of(machines, rows, PAYLOAD, **options)
    assert Counter(record.number for record in kept) == Counter(range(len(rows)))
    assert found.requests == found.done + found.failed == len(rows)
    wire = sum(record.wire_bytes for record in kept if record.outcome == "done")
    if not options["kills"]:
        assert found.failed == 0
        assert (found.bytes_sent, found.bytes_dropped) == (wire, 0)
        assert found.handoffs == sum(record.wire_bytes > 0 for record in kept)
    # A handoff that was done before decode failed is done again: more is sent than the last ones took.
    assert found.bytes_sent >= wire
    assert found.bytes_delivered + found.bytes_dropped == pytest.approx(found.bytes_sent, rel=1e-9, abs=1)
    for record in kept:
        if record.outcome != "done":
            continue
        assert record.ttft_seconds is not None
        assert 0 < record.ttft_seconds <= record.end_seconds - record.arrival_seconds + 1e-9
        for part in (record.queue_seconds, record.prefill_seconds, record.room_wait_seconds):
            assert part >= -1e-9
        assert record.exposed_seconds <= record.transfer_seconds + 1e-9


def test_kill_costs_time_and_loses_nothing() -> None:
    """A decode instance that dies takes its requests' KV with it; they are prefilled again and end later."""
    rows = list(poisson(2.0, 400, [1000], [100]))
    calm = simulate(fleet(2, 2), rows, PAYLOAD)
    found, kept = records_of(fleet(2, 2), rows, PAYLOAD, kills=[Kill("decode-1", 60.0)])
    assert (found.done, found.failed) == (400, 0)
    assert found.retried > 0
    again = [record for record in kept if record.attempts > 1]
    assert all(record.decode_worker == "decode-0" for record in kept if record.end_seconds > 61)
    assert all(record.end_seconds > 60 for record in again)
    assert found.tpot.p99 is not None
    assert calm.tpot.p99 is not None
    assert found.tpot.p99 > calm.tpot.p99


def test_no_live_instance_fails_what_comes_then_and_no_more() -> None:
    """Without a live decode instance requests fail; after it is back they do not."""
    rows = [TraceRow(float(second), 100, 5) for second in range(10)]
    kills = [Kill("decode-0", 2.5, back_after_seconds=3.0)]
    _, kept = records_of(fleet(), rows, PAYLOAD, kills=kills)
    assert {record.number for record in kept if record.outcome == "failed"} == {3, 4, 5}
    with pytest.raises(InputError, match="known: prefill-0, decode-0"):
        simulate(fleet(), rows, PAYLOAD, kills=[Kill("decode-9", 1.0)])


def test_what_no_pool_can_hold_fails() -> None:
    """A request larger than every pool ends as failed, and the others are served."""
    rows = [TraceRow(0.0, 100, 5), TraceRow(0.1, 9000, 5), TraceRow(0.2, 100, 5)]
    _, kept = records_of(fleet(pool_tokens=5000), rows, PAYLOAD)
    assert [(record.number, record.outcome) for record in sorted(kept)] == [
        (0, "done"),
        (1, "failed"),
        (2, "done"),
    ]


# --- Limits, prefix hits, policies -----------------------------------------------------------------------


def test_staging_holds_handoffs_back() -> None:
    """With one handoff at a time into decode the second waits for room until the first is over."""
    slow = replace(fleet(2, 1), tiers=(TIER, TierCost.typed(bytes_per_second=1e9)), node_rate=1e12)
    rows = [TraceRow(0.0, 1000, 5), TraceRow(0.0, 1000, 5)]
    waits = {}
    for staging in (None, 1):
        _, kept = records_of(slow, rows, PAYLOAD, rules=EngineRules(staging=staging))
        waits[staging] = max(record.room_wait_seconds for record in kept)
    assert waits[None] == 0
    assert waits[1] == pytest.approx(PAYLOAD.at(1000).nbytes / 1e9, rel=0.01)


def test_two_handoffs_share_a_link() -> None:
    """Two at once into one node take twice as long as one."""
    system = replace(fleet(2, 1), tiers=(TIER, TierCost.typed(bytes_per_second=1e9)))
    _, kept = records_of(system, [TraceRow(0.0, 1000, 5), TraceRow(0.0, 1000, 5)], PAYLOAD)
    alone = PAYLOAD.at(1000).nbytes / 1e9
    assert [record.transfer_seconds for record in kept] == pytest.approx([2 * alone] * 2)


def test_kv_that_cannot_leave_stops_prefill() -> None:
    """While decode has no room, prefill's pool fills up and its queue stands still."""
    system = fleet(1, 1, engine=profile(decode=DecodeLaw(0.05, 0.0, 0.0)), pool_tokens=2500)
    rows = [TraceRow(0.0, 1000, 100) for _ in range(6)]
    _, kept = records_of(system, rows, PAYLOAD)
    starts = sorted(record.queue_seconds for record in kept)
    compute = profile().prefill.seconds(1000)
    assert starts[:2] == pytest.approx([0, compute])
    assert starts[-1] > 100 * 0.05


def test_prefix_hits_save_prefill_and_bytes() -> None:
    """A second prompt with the same prefix computes and moves only the rest."""
    hashes = (1, 2, 3, 4)
    rows = [TraceRow(0.0, 2048, 5, hashes), TraceRow(10.0, 2500, 5, (*hashes, 9))]
    _, kept = records_of(fleet(prefix_tokens=100_000), rows, PAYLOAD)
    second = kept[1]
    assert (second.prefill_hit_tokens, second.decode_hit_tokens) == (2048, 2048)
    assert second.prefill_seconds == pytest.approx(profile().prefill.seconds(2500, 2048))
    assert second.wire_bytes == PAYLOAD.at(2500, 2048).nbytes
    _, without = records_of(fleet(prefix_tokens=0), rows, PAYLOAD)
    assert without[1].prefill_hit_tokens == 0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 6), max_size=6, unique=True)), max_size=30)
)
def test_prefix_index_against_plain_lists(inserts: list[tuple[int, list[int]]]) -> None:
    """Hits and evictions are those of a list per instance with the least recently used first."""
    index = PrefixIndex([4, 4, 4])
    lists: list[list[int]] = [[], [], []]
    for instance, blocks in inserts:
        hits = index.hits(tuple(blocks))
        for number, held in enumerate(lists):
            lead = next((at for at, block in enumerate(blocks) if block not in held), len(blocks))
            assert hits.get(number, 0) == lead == index.hit(number, tuple(blocks))
        index.insert(instance, tuple(blocks))
        for block in reversed(blocks):
            if block in lists[instance]:
                lists[instance].remove(block)
            lists[instance].append(block)
        del lists[instance][: max(0, len(lists[instance]) - 4)]
    index.clear(1)
    assert index.hits((lists[1][-1],) if lists[1] else ()).get(1, 0) == 0


def near_and_far() -> Fleet:
    """One prefill node, a decode node beside it and one far away over a slow tier."""
    engine = profile()
    instances = (
        Instance("prefill-0", Role.PREFILL, engine, Spot("a", "a", "r0")),
        Instance("decode-0", Role.DECODE, engine, Spot("b", "b", "r1")),
        Instance("decode-1", Role.DECODE, engine, Spot("c", "c", "r0")),
    )
    return Fleet(instances, tiers=(TIER, TIER, TierCost.typed(bytes_per_second=1e9)))


def test_policies_choose_by_what_they_look_at() -> None:
    """Round robin alternates; load takes the emptier; cache the larger hit; network_cost the near one."""
    rows = [TraceRow(float(n), 1000, 200) for n in range(4)]
    taken = {}
    for policy in (Policy.ROUND_ROBIN, Policy.LOAD, Policy.NETWORK_COST):
        _, kept = records_of(near_and_far(), rows, PAYLOAD, policy=policy)
        taken[policy] = [record.decode_worker for record in sorted(kept)]
    assert taken[Policy.ROUND_ROBIN] == ["decode-1", "decode-0", "decode-1", "decode-0"]
    assert taken[Policy.LOAD] == ["decode-0", "decode-1", "decode-0", "decode-1"]
    assert taken[Policy.NETWORK_COST] == ["decode-1"] * 4


def test_cache_goes_back_to_where_the_prefix_is() -> None:
    """With both idle, the cache policy takes the decode instance with the hit, load the first one."""
    machines = near_and_far()
    machines = replace(machines, instances=tuple(replace(i, prefix_tokens=4096) for i in machines.instances))
    rows = [
        TraceRow(0.0, 1024, 100, (1, 2)),
        TraceRow(0.1, 1024, 100, (3, 4)),
        TraceRow(30.0, 1024, 100, (3, 4)),
    ]
    taken = {}
    for policy in (Policy.CACHE, Policy.LOAD):
        _, kept = records_of(machines, rows, PAYLOAD, policy=policy)
        taken[policy] = [record.decode_worker for record in sorted(kept)]
    assert taken[Policy.CACHE] == ["decode-0", "decode-1", "decode-1"]
    assert taken[Policy.LOAD] == ["decode-0", "decode-1", "decode-0"]


def test_network_cost_spares_a_batch_at_its_target() -> None:
    """The near instance is passed over once one more request would break the TPOT target."""
    rows = [TraceRow(0.1 * n, 1000, 500) for n in range(4)]
    targets = Targets(tpot_seconds=profile().decode_seconds(2, 4000))
    _, kept = records_of(near_and_far(), rows, PAYLOAD, policy=Policy.NETWORK_COST, targets=targets)
    assert Counter(record.decode_worker for record in kept) == {"decode-1": 2, "decode-0": 2}


# --- Goodput, determinism, memory ------------------------------------------------------------------------


@settings(deadline=None, max_examples=20)
@given(st.floats(0.02, 2), st.floats(0.02, 0.1), st.floats(0.3, 1.0), st.floats(0.3, 1.0))
def test_tighter_targets_never_make_goodput_better(ttft: float, tpot: float, f: float, g: float) -> None:
    """Of one run: smaller targets, less or equal goodput and attainment; joint is at most either."""
    rows = list(poisson(6.0, 300, [200, 3000], [20, 80]))
    wide = simulate(fleet(1, 1), rows, PAYLOAD, targets=Targets(ttft, tpot))
    tight = simulate(fleet(1, 1), rows, PAYLOAD, targets=Targets(ttft * f, tpot * g))
    assert tight.goodput <= wide.goodput
    assert tight.slo_attainment <= min(wide.slo_attainment, tight.ttft_attainment, tight.tpot_attainment)


def test_the_seed_decides_and_nothing_else() -> None:
    """Two runs with one seed are the same to the last bit; another seed differs; without spread none does."""
    wide = TierCost(link(1e-3, 1e-6, 20e9, spread=1.8).fits[0].fit)
    system = replace(fleet(2, 2), tiers=(TIER, wide))
    rows = list(poisson(8.0, 500, [200, 3000], [20, 80]))
    runs = [records_of(system, rows, PAYLOAD, seed=seed, policy=Policy.NETWORK_COST) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0][1] != runs[2][1]
    calm = [simulate(system, rows, PAYLOAD, seed=seed, with_spread=False) for seed in (1, 2)]
    assert calm[0] == calm[1]


def test_memory_does_not_grow_with_the_trace() -> None:
    """Ten times the requests take no more memory: the trace is streamed, and nothing is kept."""

    def peak(count: int) -> int:
        rows = poisson_stream(count)
        tracemalloc.start()
        simulate(fleet(2, 2), rows, PAYLOAD)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    peak(100)
    assert peak(5000) < 1.2 * peak(500)


def poisson_stream(count: int) -> Iterator[TraceRow]:
    for number in range(count):
        yield TraceRow(number / 5, 500 + number % 7, 10)


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=200))
def test_percentiles_are_right_within_a_quarter_percent(times: list[float]) -> None:
    """The histogram's percentiles are NumPy's (the lower ones), and its mean is exact."""
    histogram = Histogram()
    for seconds in times:
        histogram.add(seconds)
    for q in (0.5, 0.9, 0.99):
        exact = np.quantile(times, q, method="lower")
        assert histogram.quantile(q) == pytest.approx(exact, rel=0.0026)
    assert histogram.percentiles().mean == pytest.approx(math.fsum(times) / len(times))


def test_rows_without_times_are_refused() -> None:
    """A trace of lengths alone cannot be replayed, and a fleet needs both roles."""
    with pytest.raises(InputError, match="no times"):
        simulate(fleet(), [TraceRow(None, 100, 5)], PAYLOAD)
    with pytest.raises(InputError, match="one for decode"):
        simulate(Fleet((fleet().instances[0],)), [TraceRow(0.0, 100, 5)], PAYLOAD)
