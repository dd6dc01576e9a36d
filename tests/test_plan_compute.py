"""Compute profiles: the laws, the fit, the files, the published figures, and bad files."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError, LocalError
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw, PrefillTable, check_profile
from kvferry.plan.compute_aiconfigurator import aiconfigurator_profile
from kvferry.plan.compute_file import ProfileChoice, parse_profile
from kvferry.plan.compute_fit import ComputeSample, fit_profile, non_negative_fit
from kvferry.plan.interference import MixedStep, colocated, itl_mean_seconds, mixed_step_seconds
from kvferry.plan.public_profiles import PUBLIC_PROFILES, public_profile
from plan_kit import profile, traces

ANY = ProfileChoice()


# Published: DistServe's profiler on A100-80G, prefill of 512 tokens and decode at batch 32, context 512.
@pytest.mark.parametrize(
    ("name", "prefill_ms", "decode_ms"),
    [
        ("distserve-opt-13b-a100-tp1", 72.15, 31.44),
        ("distserve-opt-13b-a100-tp2", 50.50, 20.90),
        ("distserve-opt-66b-a100-tp4", 109.11, 40.19),
    ],
)
def test_published_profile_facts(name: str, prefill_ms: float, decode_ms: float) -> None:
    """The published profiles give the times that DistServe's profiler file gives."""
    found = public_profile(name)
    assert 1000 * found.prefill.seconds(512) == pytest.approx(prefill_ms, abs=0.006)
    assert 1000 * found.decode_seconds(32, 32 * 512) == pytest.approx(decode_ms, abs=0.006)


def test_speedup_of_two_gpus() -> None:
    """OPT-13B at 512 tokens is 1.43 times as fast on two GPUs, the K of DistServe's section 3.1."""
    one, two = (public_profile(f"distserve-opt-13b-a100-tp{tp}") for tp in (1, 2))
    assert one.prefill.seconds(512) / two.prefill.seconds(512) == pytest.approx(1.43, abs=0.005)


# Published medians of splitwise-sim's perf_model.csv: Llama-2-70B, TP8, batch 1.
@pytest.mark.parametrize(
    ("gpu", "prefill_ms", "token_ms"),
    [("h100", (53.9, 136.8, 844.9), 30.6), ("a100", (93.0, 274.2, 1549.8), 45.0)],
)
def test_splitwise_tables(gpu: str, prefill_ms: tuple[float, ...], token_ms: float) -> None:
    """The tables follow the published medians as far as they say that they do."""
    found = public_profile(f"splitwise-llama2-70b-{gpu}-tp8")
    assert found.worst_error is not None
    for tokens, published in zip((512, 2048, 8192), prefill_ms, strict=True):
        assert 1000 * found.prefill.seconds(tokens) == pytest.approx(published, rel=0.09)
    assert 1000 * found.decode_seconds(1, 576) == pytest.approx(token_ms, rel=0.07)


def test_every_published_profile_is_usable() -> None:
    """All of them pass the checks, name their source, and a longer prompt never takes less."""
    for found in PUBLIC_PROFILES.values():
        check_profile(found)
        assert found.source
        times = [found.prefill.seconds(tokens) for tokens in (1, 100, 128, 500, 4096, 8192, 100_000)]
        assert times == sorted(times)


@given(
    tokens=st.integers(1, 100_000),
    cached=st.integers(0, 100_000),
    law=st.sampled_from([PrefillLaw(0.01, 1e-5, 1e-9), PrefillTable((128, 512, 8192), (0.05, 0.06, 0.8))]),
)
def test_a_prefix_hit_saves_what_its_prefix_costs(
    tokens: int, cached: int, law: PrefillLaw | PrefillTable
) -> None:
    """Prefill in two parts costs the whole and one step more; a hit never makes it longer."""
    cached = min(cached, tokens - 1)
    parts = law.seconds(tokens, cached) + law.seconds(cached)
    assert parts == pytest.approx(law.seconds(tokens) + law.step_seconds)
    assert law.seconds(tokens, cached) <= law.seconds(tokens) * (1 + 1e-12)


def test_table_reads_straight_lines() -> None:
    """A table is exact at its points, straight between them, goes on after the last and is flat before."""
    table = PrefillTable((100, 200, 400), (0.1, 0.2, 0.6))
    read = [table.seconds(tokens) for tokens in (1, 100, 150, 200, 300, 400, 500)]
    assert read == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.4, 0.6, 0.8])


@given(
    prefill=st.builds(
        PrefillLaw, st.floats(1e-4, 1.0), st.floats(1e-7, 1e-3), st.sampled_from([0.0, 1e-9, 1e-8])
    ),
    decode=st.builds(DecodeLaw, st.floats(1e-4, 1.0), st.floats(0, 1e-5), st.floats(0, 1e-2)),
)
def test_a_fit_finds_the_law_that_made_the_samples(prefill: PrefillLaw, decode: DecodeLaw) -> None:
    """Samples made by a law give a profile that predicts as the law does, at points not measured too."""
    samples = [
        ComputeSample(is_prefill=True, batch=1, tokens=tokens, seconds=prefill.seconds(tokens))
        for tokens in (128, 512, 1024, 4096, 8192, 16384)
    ]
    samples += [
        ComputeSample(False, batch, tokens, decode.seconds(batch, batch * tokens))
        for batch in (1, 8, 64)
        for tokens in (128, 2048)
    ]
    found = fit_profile(samples, model="m", gpu="g", tp=1)
    assert found.prefill.seconds(3000) == pytest.approx(prefill.seconds(3000), rel=1e-6)
    assert found.decode_seconds(16, 16_000) == pytest.approx(decode.seconds(16, 16_000), rel=1e-6)
    assert found.worst_error == pytest.approx(0, abs=1e-6)


def test_the_fit_is_the_best_of_all_that_are_not_negative() -> None:
    """On noisy samples no coefficient is negative and none of many random ones does better."""
    rng = np.random.default_rng(4)
    tokens = np.array([128, 256, 512, 1024, 2048, 4096], dtype=float)
    matrix = np.column_stack([np.ones(6), tokens, tokens**2])
    seconds = 0.02 + 1e-4 * tokens * rng.uniform(0.8, 1.2, 6)
    found, _ = non_negative_fit(matrix, seconds)
    assert (found >= 0).all()

    def loss(law: np.ndarray) -> float:
        return float((((matrix @ law) / seconds - 1) ** 2).sum())

    tries = found * rng.uniform(0.5, 1.5, (2000, 3)) + rng.uniform(0, 1, (2000, 3)) * [1e-3, 1e-6, 1e-10]
    assert loss(found) <= min(loss(law) for law in tries)


def test_measurements_without_a_law_stay_a_table() -> None:
    """Prefill times with a step in them give a table that is exact where it was measured."""
    points = ((128, 0.05), (512, 0.05), (1024, 0.4), (4096, 0.45), (8192, 2.0))
    samples = [ComputeSample(True, 1, tokens, seconds) for tokens, seconds in points]
    samples += [ComputeSample(False, batch, 100, 0.02 + 0.001 * batch) for batch in (1, 2, 4)]
    samples += [ComputeSample(False, 4, 1000, 0.025)]
    found = fit_profile(samples, model="m", gpu="g", tp=1)
    assert isinstance(found.prefill, PrefillTable)
    assert [found.prefill.seconds(tokens) for tokens, _ in points] == [seconds for _, seconds in points]


def test_mixed_step_lies_between_its_bounds() -> None:
    """A step with both phases takes the longer at least, the sum at most, the measured share between."""
    measured = profile(mixed_share=0.25)
    steps = [mixed_step_seconds(measured, 0.3, 0.1, mixed) for mixed in MixedStep]
    assert steps == pytest.approx([0.3, 0.4, 0.325])
    with pytest.raises(InputError, match="mixed_share"):
        mixed_step_seconds(profile(), 0.3, 0.1, MixedStep.MEASURED)


def test_colocated_latency_follows_the_laws() -> None:
    """Mean 1 / (1 - u); the p95 is a chunk's step as soon as more than 5 % of the steps are."""
    engine = profile(prefill=PrefillLaw(0.01, 1e-4), decode=DecodeLaw(0.02, 0.0, 0.0))
    common = {"prompt_tokens": 4096, "chunk_tokens": 2048, "batch": 8, "context_tokens": 0.0}
    busy = colocated(engine, requests_per_second=1.0, mixed=MixedStep.SUM, **common)  # type: ignore[arg-type]
    share = engine.prefill.seconds(4096)
    assert busy.prefill_share == pytest.approx(share)
    assert busy.itl_mean_seconds == pytest.approx(0.02 / (1 - share))
    assert busy.itl_p95_seconds == pytest.approx(engine.prefill.seconds(2048) + 0.02)
    calm = colocated(engine, requests_per_second=0.4, mixed=MixedStep.SUM, **common)  # type: ignore[arg-type]
    assert calm.itl_p95_seconds == pytest.approx(0.02)
    assert calm.itl_p99_seconds > 0.02
    assert itl_mean_seconds(0.02, 1.0) == float("inf")


def test_own_json_round_trip() -> None:
    """kvferry's own JSON is read, with the keys a, b, c and what an interference run adds."""
    text = json.dumps(
        {
            "model": "m",
            "gpu": "h100",
            "tp": 2,
            "prefill": {"a": 0.01, "b": 1e-4, "c": 1e-9},
            "decode": {"a": 0.02, "b": 1e-7, "c": 1e-4},
            "mixed_share": 0.5,
            "itl_alone": 0.02,
            "itl_mixed": 0.05,
            "tail": {"p95": 0.2},
        }
    )
    found = parse_profile(text, "engine.json", ANY)
    assert found.prefill.seconds(1000) == pytest.approx(0.01 + 0.1 + 0.001)
    assert (found.tp, found.mixed_share, found.source) == (2, 0.5, "engine.json")


DISTSERVE = """{
  "facebook/opt-13b": {
    "1": {
      "decoding_large_small_bs_threshold": 95,
      "prefill": [18.10, 0.10, 7.1e-06],
      "decoding_smallbs": [19.93, 0.0006, 0.04],
      "decoding_largebs": [7.17, 0.0006, 0.16]
    },
    "2": {
      "decoding_large_small_bs_threshold": 95,
      "prefill": [58.4, 0.38, -7.1e-06],
      "decoding_smallbs": [57.1, 0.004, 0.2],
      "decoding_largebs": [27.0, 0.006, 0.4]
    }
  }
}"""


def test_distserve_json_is_read_in_milliseconds() -> None:
    """DistServe's file gives seconds, two regimes of decode, and only the entry that is asked for."""
    found = parse_profile(DISTSERVE, "a100.json", ProfileChoice(tp=1))
    assert found.prefill.seconds(512) == pytest.approx((18.10 + 0.10 * 512 + 7.1e-6 * 512**2) / 1000)
    assert found.decode_seconds(94, 0) == pytest.approx((19.93 + 0.04 * 94) / 1000)
    assert found.decode_seconds(95, 0) == pytest.approx((7.17 + 0.16 * 95) / 1000)


OWN_CSV = "phase,batch,tokens,seconds\n" + "\n".join(
    [
        *(f"prefill,1,{tokens},{0.01 + 1e-4 * tokens}" for tokens in (128, 1024, 4096)),
        *(f"decode,{batch},512,{0.02 + 1e-4 * batch}" for batch in (1, 8, 32)),
    ]
)


def test_own_csv_is_fitted() -> None:
    """A CSV of measured steps gives the law behind it, and the range that it covers."""
    found = parse_profile(OWN_CSV, "steps.csv", ANY)
    assert found.prefill.seconds(2000) == pytest.approx(0.21)
    assert found.outside(5000) is not None
    assert found.outside(2000) is None
    assert found.outside(2000, batch=33) is not None


def own(fields: str) -> str:
    return '{"model": "m", "gpu": "g", ' + fields + ',\n "decode": {"a": 1, "b": 1, "c": 1}}'


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "", "a.json, line 1"),
        ("a.json", "[1]", "a.json, line 1"),
        ("a.json", "{", "not JSON"),
        ("a.json", '{"model": "m",\n "gpu": "g", "tp": 1,\n "decode": {"a": NaN}}', "a.json"),
        (
            "a.json",
            own('"tp": 1,\n "prefil": {"a": 1, "b": 1}'),
            "line 2: prefil",
        ),
        (
            "a.json",
            own('"tp": 1,\n "prefill": {"a": 1, "b": -1}'),
            "line 2: prefill.b",
        ),
        (
            "a.json",
            own('\n "tp": 0,\n "prefill": {"a": 1, "b": 1}'),
            "line 2: tp",
        ),
        (
            "a.json",
            DISTSERVE.replace('"decoding_smallbs": [57.1, 0.004, 0.2]', '"x": 1'),
            "facebook/opt-13b.2",
        ),
        ("a.csv", "phase,batch,tokens\nprefill,1,1", "a.csv, line 1: column seconds"),
        ("a.csv", "phase,batch,tokens,seconds", "a.csv, line 2"),
        (
            "a.csv",
            "phase,batch,tokens,seconds,seconds\nprefill,1,1,1,2",
            "line 1: column seconds comes twice",
        ),
        ("a.csv", OWN_CSV + f"prefill,1,{'1' * 200_000},1", "is not CSV: field larger"),
        ("a.csv", "phase,batch,tokens,seconds\nprefill,1,1", "a.csv, line 2: 3 fields"),
        ("a.csv", OWN_CSV.replace("decode,8", "decoding,8"), "a.csv, line 6: phase: 'decoding'"),
        ("a.csv", OWN_CSV.replace("prefill,1,1024,", "prefill,1,1024,-"), "a.csv, line 3: seconds"),
        ("a.csv", OWN_CSV.replace("prefill,1,1024,", "prefill,1,nan,"), "a.csv, line 3: tokens"),
        ("a.csv", OWN_CSV.replace("decode,8", "decode,8.5"), "a.csv, line 6: batch"),
        ("a.csv", OWN_CSV.rsplit("\n", 2)[0], "decode: needs measured steps"),
    ],
)
def test_a_bad_profile_names_file_line_and_key(name: str, text: str, says: str) -> None:
    """A profile that cannot be used is refused in one line that says where."""
    with pytest.raises(InputError) as caught:
        parse_profile(text, name, ProfileChoice(tp=2) if "opt" in text else ANY)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_negative_coefficients_are_refused_where_they_are() -> None:
    """A published entry whose fit goes below zero is refused, and its neighbour is not."""
    with pytest.raises(InputError, match=r"line 11: facebook/opt-13b\.2\.prefill"):
        parse_profile(DISTSERVE, "a100.json", ProfileChoice(tp=2))


def test_a_choice_must_leave_one() -> None:
    """Several profiles that fit, or none, are an error that lists what the file has."""
    for choice in (ANY, ProfileChoice(tp=7)):
        with pytest.raises(InputError, match="facebook/opt-13b on gpu tp1"):
            parse_profile(DISTSERVE, "file.json", choice)


def test_published_tables_are_what_the_public_file_says() -> None:
    """Fitting splitwise-sim's own file gives the numbers that the package carries."""
    folder = traces()
    text = (folder / "splitwise_perf_model.csv").read_text()
    for known in PUBLIC_PROFILES.values():
        if known.engine != "vLLM 2023":
            continue
        choice = ProfileChoice(known.model, known.gpu, known.tp)
        found = parse_profile(text, "splitwise_perf_model.csv", choice)
        assert same_times(found, known)


def test_published_laws_are_what_the_public_file_says() -> None:
    """DistServe's own file gives the numbers that the package carries."""
    folder = traces()
    name = "distserve_profiler_a100_80g.distserve.json"
    text = (folder / name).read_text()
    for known in PUBLIC_PROFILES.values():
        if known.engine == "DistServe":
            found = parse_profile(text, name, ProfileChoice(f"facebook/{known.model}", tp=known.tp))
            assert same_times(found, known)
            assert found.gpu == known.gpu


def test_aiconfigurator_gives_samples_to_fit() -> None:
    """Its single steps are fitted like measurements; the name says model, system, ranks and backend."""
    asked: list[dict[str, object]] = []

    def estimate(model: str, system: str, **options: object) -> SimpleNamespace:
        asked.append({"model": model, "system": system, **options})
        tokens, batch = int(str(options["isl"])), int(str(options["batch_size"]))
        ttft, tpot = 1000 * (0.01 + 1e-4 * tokens), 1000 * (0.02 + 1e-7 * tokens * batch + 1e-4 * batch)
        return SimpleNamespace(ttft=ttft, tpot=tpot)

    found = aiconfigurator_profile("aiconfigurator:org/model@h200_sxm/tp4/pp2/vllm", estimate)
    assert (found.model, found.gpu, found.tp, found.pp) == ("org/model", "h200_sxm", 4, 2)
    assert found.prefill.seconds(3000) == pytest.approx(0.31)
    assert found.decode_seconds(16, 16_000) == pytest.approx(0.02 + 1e-7 * 16_000 + 1e-4 * 16)
    assert {(a["backend_name"], a["tp_size"], a["pp_size"]) for a in asked} == {("vllm", 4, 2)}
    assert "operator tables" in found.source
    with pytest.raises(InputError, match="MODEL@SYSTEM"):
        aiconfigurator_profile("aiconfigurator:model", estimate)


def test_aiconfigurator_that_refuses_or_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it refuses is one line, and without the extra the line says what to install."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no such\nsystem")

    with pytest.raises(InputError, match="aiconfigurator: no such system"):
        aiconfigurator_profile("aiconfigurator:m@s/tp1", refuse)
    monkeypatch.setitem(sys.modules, "aiconfigurator.cli.api", None)
    with pytest.raises(LocalError, match=r"kvferry\[aiconfigurator\]"):
        aiconfigurator_profile("aiconfigurator:m@s/tp1")


def same_times(one: ComputeProfile, other: ComputeProfile) -> bool:
    asked = [(128, 1), (512, 8), (3000, 32), (20_000, 100)]
    pairs = [(one.prefill.seconds(tokens), other.prefill.seconds(tokens)) for tokens, _ in asked]
    pairs += [
        (one.decode_seconds(batch, batch * 512), other.decode_seconds(batch, batch * 512))
        for _, batch in asked
    ]
    return all(left == pytest.approx(right, rel=1e-3) for left, right in pairs)
