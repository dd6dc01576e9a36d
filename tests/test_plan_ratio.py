"""Ratio: capacities by their equations, whole numbers against all others, slack, drift."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.compute import DecodeLaw, PrefillLaw
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.prefix import prefix_hits
from kvferry.plan.ratio import Demand, Side, best_ratio, capacity, decode_batch, decode_rate, drift
from kvferry.plan.trace import TraceRow, read_trace
from plan_kit import LLAMA_70B, profile, traces

sides = st.builds(
    Side,
    prefill_rate=st.floats(0.1, 50),
    decode_rate=st.floats(0.1, 50),
    prefill_gpus=st.sampled_from([1, 2, 4, 8]),
    decode_gpus=st.sampled_from([1, 2, 4, 8]),
    link_rate=st.floats(0.1, 1000),
    staging_rate=st.floats(0.1, 1000),
)


def demand(prompts: list[int], outputs: list[int], hits: list[int] | None = None) -> Demand:
    return Demand(np.array(prompts), np.array(outputs), np.array(hits or [0] * len(prompts)))


def test_means_of_a_demand() -> None:
    """T_p, E[V] and the context are means over the requests; long outputs weigh more at decode."""
    found = demand([1000, 3000], [100, 300], [0, 512])
    engine = profile(prefill=PrefillLaw(0.01, 1e-4, 1e-9))
    times = [engine.prefill.seconds(1000), engine.prefill.seconds(3000, 512)]
    assert found.mean_prefill_seconds(engine) == pytest.approx(np.mean(times))
    payload = PayloadTable(LLAMA_70B, PoolFormat())
    sizes = [payload.at(1000).nbytes, payload.at(3000, 512).nbytes]
    assert found.mean_wire_bytes(payload) == pytest.approx(np.mean(sizes))
    assert found.decode_context == pytest.approx((100 * 1050 + 300 * 3150) / 400)
    assert found.decode_room == pytest.approx((100 * 1100 + 300 * 3300) / 400)


@given(
    tpot=st.floats(0.005, 0.2),
    context=st.floats(1, 10_000),
    pool=st.sampled_from([None, 5_000, 100_000]),
    most=st.integers(1, 300),
)
def test_decode_batch_is_the_largest_that_keeps_the_target(
    tpot: float, context: float, pool: int | None, most: int
) -> None:
    """One more would break the target, the pool or the engine's limit."""
    engine = profile(decode=DecodeLaw(0.01, 1e-7, 1e-4))
    batch = decode_batch(
        engine,
        tpot_seconds=tpot,
        context_tokens=context,
        room_tokens=context,
        pool_tokens=pool,
        max_batch=most,
    )

    def is_good(number: int) -> bool:
        in_time = engine.decode_seconds(number, number * context) <= tpot
        return in_time and number <= most and (pool is None or number * context <= pool)

    assert batch == 0 or is_good(batch)
    assert not is_good(batch + 1)


def test_decode_rate_is_batch_over_output_and_step() -> None:
    """b / (m tau)."""
    engine = profile(decode=DecodeLaw(0.02, 1e-6, 1e-4))
    found = demand([1000], [100])
    step = 0.02 + 1e-6 * 8 * 1050 + 1e-4 * 8
    assert decode_rate(engine, 8, found) == pytest.approx(8 / (100 * step))
    assert decode_rate(engine, 0, found) == 0


@given(sides, st.integers(1, 6), st.integers(1, 6))
def test_capacity_is_the_least_part_and_slack_is_the_rest(side: Side, prefill: int, decode: int) -> None:
    """The limit has no slack, every other part has what the equation says."""
    found = capacity(side, prefill, decode)
    parts = {
        "prefill": prefill * side.prefill_rate,
        "decode": decode * side.decode_rate,
        "link": min(prefill, decode) * side.link_rate,
        "staging": decode * side.staging_rate,
    }
    assert found.requests_per_second == min(parts.values())
    assert found.slack[found.limit] == 0
    for part, rate in parts.items():
        assert (1 + found.slack[part]) * found.requests_per_second == pytest.approx(rate)
    assert found.per_gpu == pytest.approx(
        found.requests_per_second / (prefill * side.prefill_gpus + decode * side.decode_gpus)
    )


@given(sides, st.integers(2, 32))
def test_the_best_ratio_beats_all_others(side: Side, gpus: int) -> None:
    """No whole numbers within the GPUs carry more for each GPU."""
    best = best_ratio(side, gpus)
    others = [
        capacity(side, prefill, decode)
        for prefill, decode in itertools.product(range(1, gpus + 1), repeat=2)
        if prefill * side.prefill_gpus + decode * side.decode_gpus <= gpus
    ]
    if best is None:
        assert not others
    else:
        assert best.per_gpu >= max(other.per_gpu for other in others) * (1 - 1e-8)


def test_the_ratio_follows_the_equation() -> None:
    """n_p / n_d is T_p b / (m tau) where both sides divide: here 2 to 3."""
    side = Side(prefill_rate=3.0, decode_rate=2.0, prefill_gpus=1, decode_gpus=1)
    best = best_ratio(side, 100)
    assert best is not None
    assert (best.prefill, best.decode) == (2, 3)
    assert best.slack["prefill"] == best.slack["decode"] == 0


def test_drift_says_what_a_ratio_loses() -> None:
    """With prompts twice as long 2:3 keeps half; 4:3 would be right."""
    side = Side(prefill_rate=3.0, decode_rate=2.0, prefill_gpus=1, decode_gpus=1)
    now = best_ratio(side, 16)
    assert now is not None
    longer = Side(prefill_rate=1.5, decode_rate=2.0, prefill_gpus=1, decode_gpus=1)
    (found,) = drift({"prompts twice as long": longer}, now, 16)
    assert (found.best_prefill, found.best_decode) == (4, 3)
    assert found.per_gpu == pytest.approx(3 / 5)
    assert found.loss == pytest.approx(1 - (3 / 5) / (6 / 7))
    assert demand([100], [10], [50]).scaled(2.0, 0.5).hit_tokens.tolist() == [100]


def test_prefix_hits_of_an_endless_cache() -> None:
    """A hit is the leading blocks seen before, never more than the prompt, and not across a gap."""
    found = list(
        prefix_hits(
            [
                TraceRow(0, 1000, 1, (1, 2)),
                TraceRow(1, 1200, 1, (1, 2, 3)),
                TraceRow(2, 1000, 1, (9, 2)),
                TraceRow(3, 900, 1, (1, 2)),
            ]
        )
    )
    assert found == [0, 1024, 0, 900]


def test_mooncake_conversation_traffic() -> None:
    """Llama-3.1-70B on Mooncake's conversation trace moves 13.4 GB/s, 8.4 after prefix hits (3 %)."""
    name = "mooncake_conversation_trace.jsonl"
    with (traces() / name).open() as file:
        found = list(read_trace(file, name))
    span = found[-1].arrival_seconds
    assert span is not None
    prompts = np.array([row.prompt_tokens for row in found])
    hits = np.array(list(prefix_hits(found)))
    assert hits.sum() / prompts.sum() == pytest.approx(0.374, abs=0.001)
    payload = PayloadTable(LLAMA_70B, PoolFormat())
    asked = Demand(prompts, prompts, np.zeros_like(hits)), Demand(prompts, prompts, hits)
    whole, rest = (len(found) / span * one.mean_wire_bytes(payload) / 1e9 for one in asked)
    assert whole == pytest.approx(13.4, rel=0.03)
    assert rest == pytest.approx(8.4, rel=0.03)


def test_azure_conversation_traffic() -> None:
    """Llama-3.1-70B on Azure's conversation trace moves 2.1 GB/s."""
    name = "AzureLLMInferenceTrace_conv.csv"
    with (traces() / name).open() as file:
        found = list(read_trace(file, name))
    span = found[-1].arrival_seconds
    assert span is not None
    tokens = sum(row.prompt_tokens for row in found) / span
    assert tokens * 327_680 / 1e9 == pytest.approx(2.1, rel=0.03)
