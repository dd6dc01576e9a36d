"""Check: the published checks of the model, closed forms on an idle pair, verdicts, flips, monotony."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from kvferry.errors import InputError
from kvferry.link import FAR, Knee, LinkProfile, Mode, Span, Spread
from kvferry.link.load import load_links
from kvferry.plan.check import Answer, Binding, Verdict, answer
from kvferry.plan.compute import PrefillLaw
from kvferry.plan.explain import explain_check
from kvferry.plan.flips import flips
from kvferry.plan.handoff import Overlap, Way, exposed_seconds, link_time
from kvferry.plan.interference import itl_mean_seconds
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.promise import FirstToken, GivenPrefill, Promise
from kvferry.plan.public_profiles import public_profile
from kvferry.plan.queue import Service, empirical_waits
from kvferry.plan.reuse import least_reuse_rate
from plan_kit import LLAMA_8B, LLAMA_70B, link, profile, promise, shape_of
from size_cases import golden_cases

RANK = {Verdict.HOLDS: 0, Verdict.UNKNOWN: 1, Verdict.DOES_NOT_HOLD: 2}


# --- Published figures -----------------------------------------------------------------------------------

OPT_66B = shape_of(
    model_type="opt", num_hidden_layers=64, num_attention_heads=72, hidden_size=9216, torch_dtype="float16"
)
QWEN3_8B = shape_of(
    model_type="qwen3",
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    hidden_size=4096,
    torch_dtype="bfloat16",
)


def test_opt_66b_needs_90_gigabits() -> None:
    """10 requests a second of 512 tokens of OPT-66B: 12.08 GB/s; DistServe's 1.13 GB and 90 Gb/s are GiB."""
    logical = PoolFormat(block_size=16).size(OPT_66B, 512).logical_bytes
    assert logical == 1_207_959_552
    assert logical / 2**30 == pytest.approx(1.13, abs=0.006)
    assert 10 * logical / 1e9 == pytest.approx(12.08, abs=0.005)
    assert 8 * 10 * logical / 2**30 == pytest.approx(90, abs=0.5)


# Mooncake, docs/source/performance: vLLM on 8 x RoCE H800 and SGLang on 4 x 400G H20; prompt, bytes, ms.
TABLES = {
    "qwen3-8b": (
        (0.378e-3, 146.1e9),
        {
            128: (21.2e6, 0.54),
            512: (77.9e6, 0.92),
            2048: (304e6, 2.51),
            8192: (1.21e9, 8.84),
            32768: (4.83e9, 31.65),
        },
    ),
    "qwen3-235b": (
        (1.835e-3, 171.0e9),
        {
            128: (49.3e6, 2.07),
            512: (197e6, 2.98),
            2048: (789e6, 6.43),
            8192: (3.15e9, 20.31),
            32768: (12.62e9, 76.78),
        },
    ),
}


@pytest.mark.parametrize("model", TABLES)
def test_mooncake_tables(model: str) -> None:
    """One start cost and one rate meet every published handoff within 7 %."""
    (start, rate), rows = TABLES[model]
    way = Way(link(a=start, rate=rate))
    errors = [abs(link_time(way, round(nbytes), 1).seconds / (1e-3 * ms) - 1) for nbytes, ms in rows.values()]
    assert max(errors) <= 0.07


def test_bytes_of_the_mooncake_table() -> None:
    """The table's sizes are whole blocks of 16 of the prompt and about 14 template tokens, one copy."""
    for tokens, (nbytes, _) in TABLES["qwen3-8b"][1].items():
        assert PoolFormat(block_size=16).size(QWEN3_8B, tokens + 14).blocked_bytes == pytest.approx(
            nbytes, rel=0.003
        )


@pytest.mark.parametrize(("teraflops", "gigabytes", "printed"), [(8 * 312, 5.86, 6), (8 * 989, 18.57, 19)])
def test_mooncake_reuse_rule(teraflops: float, gigabytes: float, printed: float) -> None:
    """Mooncake's Eq. 2 for Llama-3-70B at 8,192 tokens: 5.86 and 18.57 GB/s, which the paper rounds up."""
    rate = least_reuse_rate(teraflops * 1e12, tokens=8192, hidden=8192, gqa=8, nbytes_per_value=2) / 1e9
    assert rate == pytest.approx(gigabytes, abs=0.005)
    assert math.ceil(rate) == printed


BLOOM = shape_of(
    model_type="bloom",
    num_hidden_layers=70,
    num_attention_heads=112,
    hidden_size=14336,
    torch_dtype="bfloat16",
)


@pytest.mark.parametrize(
    ("gpu", "rate", "shares"), [("a100", 200e9, (5.9, 7.1, 7.6)), ("h100", 400e9, (6.8, 7.7, 8.1))]
)
def test_splitwise_serialized_shares(gpu: str, rate: float, shares: tuple[float, ...]) -> None:
    """BLOOM-176B over 8 NICs at line rate: 5.9 to 8.1 % of the prompt time; published: under 7 %."""
    engine = public_profile(f"splitwise-bloom-176b-{gpu}-tp8")
    for tokens, share in zip((512, 1024, 2048), shares, strict=True):
        nbytes = PoolFormat(block_size=None).size(BLOOM, tokens).logical_bytes
        seconds = link_time(Way(link(rate=rate)), nbytes, 1).seconds
        assert 100 * seconds / engine.prefill.seconds(tokens) == pytest.approx(share, abs=0.1)
        assert 100 * seconds / engine.prefill.seconds(tokens) < 7 + 2


def test_splitwise_residual_is_synchronisation() -> None:
    """Layer by layer 0.59 ms are left of BLOOM's 2,048 tokens; the published 8 ms need 7.4 ms of sync."""
    nbytes = PoolFormat(block_size=None).size(BLOOM, 2048).logical_bytes
    prefill = public_profile("splitwise-bloom-176b-a100-tp8").prefill.seconds(2048)
    left = exposed_seconds(nbytes / 200e9, prefill, groups=70)
    assert 1000 * left == pytest.approx(0.59, abs=0.005)
    assert 1000 * exposed_seconds(nbytes / 200e9, prefill, 70, 7.4e-3) == pytest.approx(8.0, abs=0.05)


def test_dynamo_efa_table() -> None:
    """NVIDIA Dynamo's EFA page at 8,000 tokens: 16.9 ms alone and u = 0.353 give 26.1 (28.5 measured)."""
    assert 1000 * itl_mean_seconds(16.9e-3, 0.353) == pytest.approx(26.1, abs=0.05)
    assert 1000 * itl_mean_seconds(16.9e-3, 2 * 0.353) == pytest.approx(57.5, abs=0.1)
    # 37 ms of handoff against 11.6 ms saved a token.
    assert pytest.approx(4.2, abs=0.02) == 1 + 37 / (28.5 - 16.9)


def test_dynamo_over_tcp_does_not_pay() -> None:
    """The same at 1.2 GB/s: 874 ms, 706 ms of them exposed layer by layer, so 62 tokens to break even."""
    nbytes = PoolFormat(block_size=None).size(LLAMA_8B, 8000).logical_bytes
    seconds = link_time(Way(link(rate=1.2e9)), nbytes, 1).seconds
    assert 1000 * seconds == pytest.approx(874, abs=1)
    left = exposed_seconds(seconds, 0.1735, groups=32)
    assert 1000 * left == pytest.approx(706, abs=1)
    assert 1 + 1000 * left / (28.5 - 16.9) > 60


def test_sglang_chunks_need_queueing_to_be_explained() -> None:
    """sgl-project/sglang#23515, 72B, 4 x 400G, 32 at once: overlap hides 1 % of what was gained."""
    nbytes = PoolFormat(block_size=None).size(LLAMA_70B, 1024).logical_bytes
    hidden = nbytes / 200e9
    assert hidden < 0.01 * (0.696 - 0.274)
    # The same handoffs behind one another: the mean wait of a batch of 32 is what can explain it.
    assert 31 / 2 * hidden > 0.05 * (0.696 - 0.274)


def test_vllm_ascend_pull_follows_its_chunks() -> None:
    """vllm-project/vllm-ascend#16984: 22 chunks in 2,156 ms; the same cost for 6 lies in 354 to 862 ms."""
    cost = 2.156 / 22
    seconds = link_time(Way(link(o=cost, rate=1e15)), 1, 6).seconds
    assert 0.354 <= seconds <= 0.862


GPT_OSS_120B = shape_of(
    model_type="gpt_oss",
    num_hidden_layers=36,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=64,
    hidden_size=2880,
    sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 18,
    torch_dtype="bfloat16",
)


def test_gpt_oss_pool() -> None:
    """5.38 GiB hold 78.4k tokens of gpt-oss-120b where every layer keeps full pages; vLLM said 78,384."""
    per_token = PoolFormat(block_size=None).size(GPT_OSS_120B, 1).logical_bytes
    assert per_token == 73_728
    assert 5.38 * 2**30 / per_token == pytest.approx(78_384, rel=0.001)


# Dynamo's ladder of prompt lengths: throughput gained by disaggregation.
def test_dynamo_ladder_rises_with_the_prefill_share() -> None:
    """The longer the prompt, the larger u, and the larger the latency that colocation costs."""
    shares = [0.353 * tokens / 8000 for tokens in (1000, 2000, 4000, 8000)]
    gains = [1 - 16.9e-3 / itl_mean_seconds(16.9e-3, u) for u in shares]
    assert gains == sorted(gains)
    assert gains == pytest.approx(shares)


# --- The question on an idle pair ------------------------------------------------------------------------


def test_the_split_adds_up() -> None:
    """TTFT on an idle pair is prefill, the whole move and the step, each by its own equation."""
    question = promise(way=Way(link(a=0.001, o=2e-6, rate=40e9)), decode_step_seconds=0.015)
    found = answer(question)
    size = PoolFormat().size(LLAMA_70B, 4096)
    move = 0.001 + 2e-6 * size.descriptors + size.wire_bytes / 40e9
    assert found.split.exposed_transfer_seconds == pytest.approx(move)
    assert found.ttft_seconds == pytest.approx(0.08 + move + 0.015)
    assert found.slack_seconds == pytest.approx(0.2 - 0.08 - move - 0.015)
    assert found.verdict is Verdict.HOLDS


def test_the_quantile_and_links_side_by_side() -> None:
    """The spread of the link multiplies the move; two links halve bytes and pieces, not the start cost."""
    one = answer(promise(way=Way(link(a=0.01, o=1e-6, rate=10e9, spread=1.5)))).transfer
    two = answer(promise(way=Way(link(a=0.01, o=1e-6, rate=10e9, spread=1.5), links=2))).transfer
    assert one.seconds == pytest.approx(1.5 * (one.start_seconds + one.descriptor_seconds + one.byte_seconds))
    assert two.start_seconds == one.start_seconds
    assert two.byte_seconds == pytest.approx(one.byte_seconds / 2, rel=1e-6)
    assert two.descriptor_seconds == pytest.approx(one.descriptor_seconds / 2, rel=1e-3)


@given(
    transfer=st.floats(1e-6, 100),
    prefill=st.floats(0, 100),
    groups=st.integers(1, 200),
    sync=st.floats(0, 1),
)
def test_overlap_against_a_walk_through_the_groups(
    transfer: float, prefill: float, groups: int, sync: float
) -> None:
    """What is exposed is what a walk through the groups finds: each waits for its compute and the link."""
    free = 0.0
    for group in range(1, groups + 1):
        free = max(free, group * prefill / groups) + transfer / groups
    assert exposed_seconds(transfer, prefill, groups, sync) == pytest.approx(free - prefill + sync, abs=1e-9)


def test_first_token_from_prefill_puts_the_move_in_the_gap() -> None:
    """Then the link is no part of the TTFT, and an unmeasured one does not make it unknown."""
    way = Way(load_links("eth100").select())
    found = answer(promise(first_token=FirstToken.PREFILL, way=way, decode_step_seconds=0.01))
    assert (found.verdict, found.ttft_seconds) == (Verdict.HOLDS, 0.08)
    assert found.gap_seconds == pytest.approx(found.transfer.seconds + 0.01)


def test_waits_come_from_the_rate() -> None:
    """With a rate both queues are M/G/1 quantiles of their own service times."""
    question = promise(requests_per_second=4.0, prompt_lengths=np.array([1024, 4096, 4096, 8192]))
    found = answer(question)
    prefill = Service.of(np.array([0.02, 0.08, 0.08, 0.16]))
    assert found.split.queue_seconds == pytest.approx(prefill.wait_quantile_seconds(4.0, 0.95))
    sizes = [PoolFormat().size(LLAMA_70B, tokens).wire_bytes for tokens in (1024, 4096, 4096, 8192)]
    wait = Service.of(np.array(sizes) / 10e9).wait_quantile_seconds(4.0, 0.95)
    assert found.split.link_queue_seconds == pytest.approx(wait)
    endless = answer(promise(requests_per_second=20.0))
    assert endless.verdict is Verdict.DOES_NOT_HOLD
    assert endless.ttft_seconds == math.inf
    assert endless.binding is Binding.QUEUE


@pytest.mark.parametrize("lengths", [None, [1024, 4096, 4096, 8192]])
def test_the_link_is_busy_for_its_mean_handoff_and_the_quantile_is_of_the_wait(
    lengths: list[int] | None,
) -> None:
    """A link whose p95 is four times its typical copy: the load is 0.62, not 2; against a simulated queue."""
    pair = link(rate=10e9)
    band = Spread(up_to_nbytes=2**50, samples=100, p50=1.0, p95=4.0, p99=8.0, mean=1.2, deviation=0.9)
    fits = tuple(replace(entry, fit=replace(entry.fit, spreads=(band,))) for entry in pair.fits)
    way = Way(replace(pair, fits=fits))
    asked = np.array(lengths or [4096])
    sizes = np.array([PoolFormat().size(LLAMA_70B, int(tokens)).wire_bytes for tokens in asked])
    rate = 0.62 / (1.2 * float(sizes.mean()) / 10e9)
    found = answer(
        promise(
            way=way,
            requests_per_second=rate,
            queue_seconds=0.0,
            prompt_lengths=None if lengths is None else asked,
        )
    )
    rng = np.random.default_rng(11)
    n = 400_000
    shape = (1.2 / 0.9) ** 2  # gamma with that mean and deviation
    times = rng.choice(sizes, n) / 10e9 * rng.gamma(shape, 1.2 / shape, n)
    waits = empirical_waits(np.cumsum(rng.exponential(1 / rate, n)), times)
    assert found.split.link_queue_seconds == pytest.approx(np.quantile(waits, 0.95), rel=0.1)
    (queue,) = [
        e for e in explain_check(promise(way=way, requests_per_second=rate), found) if e.name == "link load"
    ]
    assert lengths is not None or queue.value == pytest.approx(0.62)


def test_a_preset_has_no_spread_and_waits_for_typical_handoffs() -> None:
    """Fixed service of the brochure's time."""
    way = Way(load_links("eth100").select())
    found = answer(promise(way=way, requests_per_second=4.0, queue_seconds=0.0))
    typical = Service.fixed(found.transfer.seconds)
    assert found.split.link_queue_seconds == pytest.approx(typical.wait_quantile_seconds(4.0, 0.95))


def test_waits_behind_a_traces_own_bursts() -> None:
    """With arrivals the waits are those of a walk through the queue, stretched to the rate."""
    rng = np.random.default_rng(2)
    bursts = np.repeat(np.cumsum(rng.exponential(10.0, 50)), 8)
    lengths = rng.choice([1024, 4096], len(bursts))
    question = promise(requests_per_second=2.0, prompt_lengths=lengths, arrival_seconds=bursts - bursts[0])
    found = answer(question)
    arrivals = (bursts - bursts[0]) * len(bursts) / 2.0 / (bursts[-1] - bursts[0])
    free, waits = 0.0, []
    for arrival, length in zip(arrivals, lengths, strict=True):
        start = max(free, arrival)
        waits.append(start - arrival)
        free = start + 0.08 * length / 4096
    assert found.split.queue_seconds == pytest.approx(np.quantile(waits, 0.95))
    smooth = answer(replace(question, arrival_seconds=None))
    assert found.split.queue_seconds > 3 * smooth.split.queue_seconds


def test_a_given_queue_is_used_as_it_is() -> None:
    """A measured wait replaces the one from the rate."""
    found = answer(promise(requests_per_second=4.0, queue_seconds=0.03))
    assert found.split.queue_seconds == 0.03


# --- Verdicts that are no promise ------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["eth100", "ib-ndr400", "nvlink4", "efa-p5"])
def test_a_preset_is_unknown(preset: str) -> None:
    """A brochure rate gives unknown with an estimate, even where the estimate would hold easily."""
    found = answer(promise(way=Way(load_links(preset).select()), target_seconds=100.0))
    assert found.verdict is Verdict.UNKNOWN
    assert found.binding is Binding.UNMEASURED
    assert found.ttft_seconds is not None
    assert "unmeasured" in found.unknown[0]


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"prefill": GivenPrefill(5.0, 4096, 0)}, Binding.PREFILL),
        ({"queue_seconds": 2.0}, Binding.QUEUE),
        ({"queue_seconds": 2.0, "prefill": None}, Binding.QUEUE),
        ({"requests_per_second": 13.0}, Binding.QUEUE),  # without end
        ({"decode_step_seconds": 2.0}, Binding.STEP),
        ({"prefill": GivenPrefill(5.0, 4096, 0), "first_token": FirstToken.PREFILL}, Binding.PREFILL),
    ],
)
def test_no_link_mends_what_is_too_long_without_it(changes: dict[str, object], binding: Binding) -> None:
    """The link is unmeasured, but the rest alone exceeds the promise: that is no unknown."""
    way = Way(load_links("eth100").select())
    found = answer(promise(**{"way": way, "target_seconds": 1.0} | changes))
    assert (found.verdict, found.binding) == (Verdict.DOES_NOT_HOLD, binding)


def test_no_prefill_time_is_unknown() -> None:
    """Without a prefill time there is no TTFT, and the answer says what to give."""
    found = answer(promise(prefill=None))
    assert (found.verdict, found.ttft_seconds) == (Verdict.UNKNOWN, None)
    assert found.unknown == ("unknown: give --prefill-seconds or a profile",)
    assert flips(promise(prefill=None), found) == {}


def test_other_conditions_are_unknown() -> None:
    """What was measured pulled and in clear says nothing sure about pushed or encrypted."""
    for way in (Way(link(), mode=Mode.PUSH), Way(link(), tls=True), Way(link(), incast=4)):
        found = answer(promise(way=way, target_seconds=10.0))
        assert found.verdict is Verdict.UNKNOWN
        assert "not measured under" in found.unknown[0]


def test_what_is_not_covered_is_said() -> None:
    """Outside the measured range, without a decode step, or with overlap and no sync, a warning says so."""
    engine = profile(covers=None, worst_error=0.5)
    found = answer(promise(prefill=engine, overlap=Overlap.LAYER, groups=80))
    text = " ".join(found.warnings)
    for part in ("first decode step", "misses one of its measurements by 50%", "--sync-seconds"):
        assert part in text


@pytest.mark.parametrize(
    ("changes", "binding"),
    [
        ({"way": Way(link(rate=5e9))}, Binding.BANDWIDTH),
        ({"way": Way(link(o=1e-4, rate=1e12))}, Binding.DESCRIPTORS),
        ({"way": Way(link(a=1.0, rate=1e12))}, Binding.START),
        ({"way": Way(link(rate=100e9, spread=50.0))}, Binding.SPREAD),
        ({"way": Way(link(rate=1e12)), "sync_seconds": 0.3}, Binding.SYNC),
        ({"prefill": GivenPrefill(0.3, 4096, 0)}, Binding.PREFILL),
        ({"queue_seconds": 0.3}, Binding.QUEUE),
        ({"decode_step_seconds": 0.3}, Binding.STEP),
        (
            {"way": Way(link(rate=20e9)), "requests_per_second": 13.0, "queue_seconds": 0.0},
            Binding.LINK_QUEUE,
        ),
    ],
)
def test_what_binds(changes: dict[str, object], binding: Binding) -> None:
    """Each part, made to break the promise alone, is named as what binds."""
    found = answer(promise(**changes))
    assert found.verdict is Verdict.DOES_NOT_HOLD
    assert found.binding is binding


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"cached_tokens": 5000}, "cached_tokens"),
        ({"target_seconds": 0.0}, "ttft"),
        ({"target_seconds": math.nan}, "ttft"),
        ({"groups": 0}, "groups"),
        ({"way": Way(link(), links=0)}, "links"),
        ({"way": Way(link(), quantile=0.3)}, "quantile"),
        ({"requests_per_second": -1.0}, "rate"),
        ({"prefill": GivenPrefill(math.inf, 4096, 0)}, "prefill_seconds"),
    ],
)
def test_bad_numbers_are_named(changes: dict[str, object], says: str) -> None:
    """A number that cannot be asked about is refused with its name."""
    with pytest.raises(InputError, match=says):
        answer(promise(**changes))


# --- Flips -----------------------------------------------------------------------------------------------


def turned(question: Promise, **changes: object) -> Answer:
    return answer(replace(question, **changes))


@settings(deadline=None, max_examples=30)
@given(
    rate=st.floats(1e9, 2e11),
    tokens=st.integers(256, 20_000),
    target=st.floats(0.02, 2.0),
    with_profile=st.booleans(),
)
def test_flips_are_borders(rate: float, tokens: int, target: float, *, with_profile: bool) -> None:
    """On one side of each flip the promise holds, on the other it does not."""
    prefill = (
        profile(prefill=PrefillLaw(0.005, 1e-5, 1e-10)) if with_profile else GivenPrefill(0.05, tokens, 0)
    )
    question = promise(
        way=Way(link(a=1e-3, o=1e-6, rate=rate)), prompt_tokens=tokens, target_seconds=target, prefill=prefill
    )
    found = answer(question)
    borders = flips(question, found)
    holds = found.verdict is Verdict.HOLDS
    longest = borders["max_prompt_tokens"].value
    if isinstance(longest, int):
        at, beyond = (turned(question, prompt_tokens=prompt) for prompt in (longest, longest + 1))
        if borders["max_prompt_tokens"].is_estimate:
            assert longest > FAR * tokens  # what a time of one prompt says of far longer ones
            assert at.verdict is Verdict.UNKNOWN
            assert at.ttft_seconds <= target < beyond.ttft_seconds
        else:
            assert at.verdict is Verdict.HOLDS
            assert beyond.verdict is (Verdict.UNKNOWN if beyond.unknown else Verdict.DOES_NOT_HOLD)
        assert holds == (tokens <= longest)
    fewest = borders["min_cached_tokens"].value
    if isinstance(fewest, int):
        assert turned(question, cached_tokens=fewest).verdict is Verdict.HOLDS
        if fewest:
            below = (fewest - 1) // 16 * 16
            assert turned(question, cached_tokens=below).verdict is Verdict.DOES_NOT_HOLD
        assert holds == (fewest == 0)
    least = borders["min_bytes_per_second"].value
    if isinstance(least, float) and least > 0:
        for factor, verdict in ((1.001, Verdict.HOLDS), (0.999, Verdict.DOES_NOT_HOLD)):
            way = Way(link(a=1e-3, o=1e-6, rate=least * factor))
            assert turned(question, way=way).verdict is verdict
    assert ("kv_dtype" in borders) <= (not holds)
    groups = borders.get("overlap_groups")
    if groups is not None and isinstance(groups.value, int):
        assert turned(question, groups=groups.value).verdict is Verdict.HOLDS
        assert turned(question, groups=groups.value - 1).verdict is Verdict.DOES_NOT_HOLD


def test_the_least_rate_counts_the_wait_for_the_link() -> None:
    """With a queue before the link the flip of the rate is a border too."""
    question = promise(requests_per_second=4.0, queue_seconds=0.0, target_seconds=0.3)
    least = flips(question, answer(question))["min_bytes_per_second"].value
    assert isinstance(least, float)
    assert answer(question).split.link_queue_seconds > 0.05
    assert turned(question, way=Way(link(rate=1.001 * least))).verdict is Verdict.HOLDS
    assert turned(question, way=Way(link(rate=0.999 * least))).verdict is Verdict.DOES_NOT_HOLD


def test_a_smaller_dtype_is_proposed() -> None:
    """Where fp8 makes it hold, fp8 is named; where nothing does, that is said."""
    question = promise(way=Way(link(rate=9e9)))
    assert flips(question, answer(question))["kv_dtype"].value == "fp8_e4m3"
    hopeless = promise(way=Way(link(rate=1e9)))
    assert flips(hopeless, answer(hopeless))["kv_dtype"].value is None


# --- Monotony --------------------------------------------------------------------------------------------


def measured_up_to(nbytes: int, descriptors: int, knee: Knee | None) -> LinkProfile:
    """A pair with a spread, measured with such copies at the largest: most prompts are far beyond."""
    pair = link(2e-3, 1e-6, 5e9, spread=1.3)
    fit = replace(
        pair.fits[0].fit,
        nbytes=Span(low=2**16, high=nbytes),
        descriptors=Span(low=1, high=descriptors),
        knee=knee,
    )
    return replace(pair, fits=(replace(pair.fits[0], fit=fit),))


KNEE = Knee(a_seconds=0.03, o_seconds=0.0, bytes_per_second=2e10, from_nbytes=2**27)
SMALL = [
    measured_up_to(2**27, 2**30, None),
    measured_up_to(2**50, 4096, None),
    measured_up_to(2**29, 8192, KNEE),
]

questions = st.builds(
    lambda tokens, cached, groups, chunk, rate, target, way: promise(
        prompt_tokens=tokens,
        cached_tokens=min(cached, tokens),
        groups=groups,
        chunk_tokens=chunk,
        decode_batch=8,
        requests_per_second=rate,
        target_seconds=target,
        prefill=profile(prefill=PrefillLaw(0.005, 1e-5, 1e-10)),
        way=way,
    ),
    st.one_of(st.integers(1, 50_000), st.integers(1, 5000)),
    st.one_of(st.integers(0, 50_000), st.just(0)),
    st.sampled_from([1, 8, 80]),
    st.sampled_from([None, None, 256, 2048]),
    st.sampled_from([None, 0.5, 2.0]),
    st.one_of(st.floats(0.02, 3.0), st.floats(0.02, 0.3)),
    st.sampled_from([Way(link()), Way(load_links("eth25").select()), *(Way(small) for small in SMALL)]),
)
costs = st.tuples(st.floats(0, 0.1), st.floats(0, 1e-5), st.floats(1e8, 1e12))


@settings(deadline=None)
@given(questions, costs, costs)
def test_a_faster_link_is_never_worse(
    question: Promise, one: tuple[float, float, float], other: tuple[float, float, float]
) -> None:
    """Less start cost, less cost a piece and more rate never raise the TTFT or worsen the verdict."""
    slow = Way(link(max(one[0], other[0]), max(one[1], other[1]), min(one[2], other[2])))
    fast = Way(link(min(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2])))
    before, after = turned(question, way=slow), turned(question, way=fast)
    assert before.ttft_seconds is not None
    assert after.ttft_seconds is not None
    assert after.ttft_seconds <= before.ttft_seconds * (1 + 1e-12)
    assert RANK[after.verdict] <= RANK[before.verdict]


@settings(deadline=None)
@given(questions, st.one_of(st.integers(0, 50_000), st.integers(0, 3000)))
@example(
    promise(prompt_tokens=2000, prefill=GivenPrefill(0.01, 2000, 0), target_seconds=0.1, way=Way(SMALL[0])),
    1500,
)
def test_more_hits_are_never_worse(question: Promise, left: int) -> None:
    """More cached tokens never raise the TTFT or worsen the verdict, nor what is left after far too much."""
    cached = max(question.cached_tokens, question.prompt_tokens - left)
    before, after = answer(question), turned(question, cached_tokens=cached)
    assert before.ttft_seconds is not None
    assert after.ttft_seconds is not None
    assert after.ttft_seconds <= before.ttft_seconds * (1 + 1e-12)
    assert RANK[after.verdict] <= RANK[before.verdict]


@settings(deadline=None)
@given(questions, st.floats(0.01, 1.0))
def test_a_tighter_promise_is_never_easier(question: Promise, factor: float) -> None:
    """A smaller target never turns "does not hold" into "holds"."""
    tighter = turned(question, target_seconds=question.target_seconds * factor)
    assert RANK[tighter.verdict] >= RANK[answer(question).verdict]


# --- Explanation and payloads ----------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(questions, costs, st.sampled_from(FirstToken))
def test_filled_equations_come_out(
    question: Promise, cost: tuple[float, float, float], first: FirstToken
) -> None:
    """Every equation's filled-in form, evaluated, is its value; the last one is the TTFT."""
    asked = replace(question, way=Way(link(*cost, spread=1.2)), first_token=first)
    found = answer(asked)
    equations = explain_check(asked, found)
    for equation in equations:
        value = eval(equation.filled, {"math": math, "max": max, "__builtins__": {}})  # noqa: S307 - our own text
        assert value == pytest.approx(equation.value, rel=1e-4, abs=1e-9)
    assert equations[-1].value == found.ttft_seconds
    # Every part of the sum that is not 0 has an equation of its own.
    parts = {name.removesuffix("_seconds").replace("_", " "): seconds for name, seconds in parts_of(found)}
    shown = {
        ("prefill queue" if name == "queue" else name): seconds for name, seconds in parts.items() if seconds
    }
    assert shown.items() <= {equation.name: equation.value for equation in equations}.items()


def parts_of(found: Answer) -> list[tuple[str, float]]:
    """The parts of the split with their names."""
    return list(asdict(found.split).items())


@pytest.mark.parametrize("block_size", [None, 16, 64])
def test_payload_table_is_kv_size(block_size: int | None) -> None:
    """The remembered sizes are those of kv_size for every family, with any prefix hit."""
    rng = np.random.default_rng(3)
    asked = 0
    for case in golden_cases()[::3]:
        try:
            shape = shape_of(**case.config)
            pool = PoolFormat(block_size=block_size)
            table = PayloadTable(shape, pool)
            table.at(1)
        except InputError:  # needs an encoder's length, or is given by hand
            continue
        for tokens in rng.integers(1, 9000, 6).tolist():
            cached = int(rng.integers(0, tokens + 1))
            size, found = pool.size(shape, tokens, cached), table.at(tokens, cached)
            assert (found.nbytes, found.descriptors) == (size.wire_bytes, size.descriptors)
            asked += 1
    assert asked > 100
