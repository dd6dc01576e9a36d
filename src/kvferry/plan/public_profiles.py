"""Published measurements as compute profiles: to try the planner with, and to check it against.

They are of the engines and GPUs named, of their day. For an answer about your own machines give
your own measurements.
"""

from __future__ import annotations

from kvferry.errors import InputError, did_you_mean
from kvferry.plan.compute import ComputeProfile, DecodeLaw, MeasuredRange, PrefillLaw, PrefillTable

__all__ = ["PUBLIC_PROFILES", "public_profile"]

_DISTSERVE = (
    "LLMServe/DistServe 82831f16, simdistserve/estimators/profile_data, DistServe engine on A100 80 GB"
)
_SPLITWISE = "Mutinifni/splitwise-sim 8f99e7dc, data/perf_model.csv, medians; vLLM of 2023"

# Milliseconds: prefill (a, b, c), decode up to 95 requests (a, b, c), from 95 on (a, b, c); and the
# tokens of KV that the instance holds (simdistserve's max_num_tokens.csv).
Triple = tuple[float, float, float]
_LAWS: dict[tuple[str, int], tuple[Triple, Triple, Triple, int]] = {
    ("opt-13b", 1): (
        (18.1025, 0.101912, 7.12226e-06),
        (19.9347, 0.000626936, 0.038507),
        (7.16619, 0.0005798, 0.158311),
        66_144,
    ),
    ("opt-13b", 2): (
        (14.743, 0.0685772, 2.44957e-06),
        (13.2948, 0.000341092, 0.0629639),
        (10.6387, 0.000311834, 0.0856291),
        163_008,
    ),
    ("opt-13b", 4): (
        (12.0623, 0.0380814, 5.22625e-07),
        (10.2562, 0.000187867, 0.0326927),
        (10.4835, 0.000171209, 0.0456665),
        356_736,
    ),
    ("opt-66b", 2): (
        (43.0588, 0.274229, 2.2478e-05),
        (48.288, 0.000942434, 0.12755),
        (28.7277, 0.000474485, 0.296178),
        11_600,
    ),
    ("opt-66b", 3): (
        (32.9982, 0.195683, 1.22052e-05),
        (35.8015, 0.0005845, 0.095267),
        (22.6539, 0.000535849, 0.208514),
        45_056,
    ),
    ("opt-66b", 4): (
        (29.4416, 0.151352, 8.31745e-06),
        (30.7603, 0.000451948, 0.0632842),
        (27.4708, 0.000404685, 0.124807),
        78_496,
    ),
    ("opt-66b", 8): (
        (25.4907, 0.106592, 3.39105e-06),
        (23.1551, 0.000226915, 0.0480064),
        (21.7177, 0.000375809, 0.0897861),
        212_304,
    ),
}

# Milliseconds: one prompt of 128, 256, ... 8,192 tokens, then 32 and 64 prompts of 512; decode (a, b, c);
# and how far any measurement is off at worst: eight prompts of 512 take less than one of 4,096.
_TABLE_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_TABLES: dict[tuple[str, str, int], tuple[tuple[float, ...], Triple, float]] = {
    ("llama2-70b", "h100-80gb", 4): (
        (49.09, 50.98, 59.72, 105.6, 200.7, 463.5, 953.6, 1726, 3520),
        (28.823, 0.00010077, 0.26419),
        0.091,
    ),
    ("llama2-70b", "h100-80gb", 8): (
        (58.19, 58.19, 58.19, 77.91, 136.8, 390.3, 844.9, 1552, 2936),
        (29.889, 0.0001785, 0.19928),
        0.127,
    ),
    ("llama2-70b", "a100-80gb", 4): (
        (63.65, 78.57, 127.0, 227.1, 403.3, 965.2, 2278, 5132, 10950),
        (43.317, 0.00037156, 0.18254),
        0.295,
    ),
    ("llama2-70b", "a100-80gb", 8): (
        (65.35, 66.76, 93.02, 154.5, 274.2, 661.2, 1550, 3525, 7554),
        (44.072, 0.00033543, 0.18975),
        0.257,
    ),
    ("bloom-176b", "h100-80gb", 8): (
        (48.28, 51.18, 76.14, 132.6, 253.1, 688.7, 1535, 2522, 4996),
        (35.582, 0.00015586, 0.30435),
        0.170,
    ),
    ("bloom-176b", "a100-80gb", 8): (
        (79.67, 99.16, 174.4, 289.2, 540.4, 1348, 3593, 5782, 11250),
        (48.035, 0.00040899, 0.43652),
        0.064,
    ),
}


def _milliseconds(triple: Triple) -> Triple:
    a, b, c = triple
    return a / 1000, b / 1000, c / 1000


def _distserve(model: str, tp: int) -> ComputeProfile:
    prefill, small, large, kv_tokens = _LAWS[model, tp]
    return ComputeProfile(
        model=model,
        gpu="a100-80gb",
        tp=tp,
        engine="DistServe",
        prefill=PrefillLaw(*_milliseconds(prefill)),
        decode=DecodeLaw(*_milliseconds(small)),
        decode_large=DecodeLaw(*_milliseconds(large)),
        large_batch=95,
        kv_tokens=kv_tokens,
        source=_DISTSERVE,
    )


def _splitwise(model: str, gpu: str, tp: int) -> ComputeProfile:
    prefill, decode, worst_error = _TABLES[model, gpu, tp]
    return ComputeProfile(
        model=model,
        gpu=gpu,
        tp=tp,
        engine="vLLM 2023",
        prefill=PrefillTable(_TABLE_TOKENS, tuple(time / 1000 for time in prefill)),
        decode=DecodeLaw(*_milliseconds(decode)),
        worst_error=worst_error,
        covers=MeasuredRange(128, 8192, 64),
        source=_SPLITWISE,
    )


PUBLIC_PROFILES: dict[str, ComputeProfile] = {
    **{f"distserve-{model}-a100-tp{tp}": _distserve(model, tp) for model, tp in _LAWS},
    **{
        f"splitwise-{model}-{gpu.removesuffix('-80gb')}-tp{tp}": _splitwise(model, gpu, tp)
        for model, gpu, tp in _TABLES
    },
}


def public_profile(name: str) -> ComputeProfile:
    """The published profile of that name. Raises InputError that lists the known ones."""
    profile = PUBLIC_PROFILES.get(name)
    if profile is None:
        raise InputError(
            f"profile: {name!r} is no file and no published profile: {', '.join(PUBLIC_PROFILES)}"
            f"{did_you_mean(name, PUBLIC_PROFILES)}"
        )
    return profile
