"""What prefill costs the requests that decode beside it on one instance (the colocated arm).

Mean: a GPU that spends the share u of its time on prefill decodes at the rest of its speed, so
``ITL_colocated = ITL_alone / (1 - u)``. Tail: the steps that also compute a chunk of a prompt are
longer by ``delta``; where more than 5 % of the steps are such, the p95 of the inter-token latency
is such a step.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec

from kvferry.errors import InputError
from kvferry.plan.compute import ComputeProfile

__all__ = ["Interference", "MixedStep", "colocated", "mixed_step_seconds"]


class MixedStep(StrEnum):
    """How long a step with both prefill and decode takes, between its two bounds."""

    LONGER = "longer"  # max: one phase is bound by compute, the other by memory, and they hide each other
    SUM = "sum"  # nothing is hidden
    MEASURED = "measured"  # the profile's mixed_share between the two


def mixed_step_seconds(
    profile: ComputeProfile, prefill_seconds: float, decode_seconds: float, mixed: MixedStep
) -> float:
    """A step that computes a chunk of a prompt and a token for each decoding request.

    Args:
        profile: whose ``mixed_share`` is used for ``MEASURED``.
        prefill_seconds: the chunk alone.
        decode_seconds: the decode step alone, 0 where nothing decodes.

    The bounds are max(t_compute, t_memory), and the sum of both phases as in DistServe's model of
    vLLM; published rules lie between them (Splitwise: 1.1 x prefill). Raises InputError where the
    profile has no ``mixed_share`` and MEASURED is asked for.
    """
    longer = max(prefill_seconds, decode_seconds)
    match mixed:
        case MixedStep.LONGER:
            return longer
        case MixedStep.SUM:
            return prefill_seconds + decode_seconds
    if profile.mixed_share is None:
        raise InputError(f"mixed_share: {profile.name} was not measured with prefill and decode in one step")
    return longer + profile.mixed_share * min(prefill_seconds, decode_seconds)


class Interference(msgspec.Struct, frozen=True):
    """Inter-token latency of a colocated instance.

    Args:
        prefill_share: the share u of its time that prefill takes.
        itl_alone_seconds: a decode step without prefill beside it.
        itl_mean_seconds: by the time-share law; infinite where prefill alone takes all the time.
        chunk_step_seconds: a step with a chunk of a prompt in it.
        chunk_step_share: the share of the steps that are such.
        itl_p95_seconds, itl_p99_seconds: by the law of the tail.
    """

    prefill_share: float
    itl_alone_seconds: float
    itl_mean_seconds: float
    chunk_step_seconds: float
    chunk_step_share: float
    itl_p95_seconds: float
    itl_p99_seconds: float


def colocated(
    profile: ComputeProfile,
    *,
    requests_per_second: float,
    prompt_tokens: int,
    chunk_tokens: int,
    batch: int,
    context_tokens: float,
    mixed: MixedStep,
) -> Interference:
    """The inter-token latency of one instance that also prefills ``requests_per_second`` prompts.

    Args:
        profile: the instance.
        requests_per_second: of this instance.
        prompt_tokens: tokens computed for each prompt.
        chunk_tokens: the engine's chunked prefill size.
        batch: requests that decode at the same time.
        context_tokens: the sum of their contexts.
        mixed: how long a step with both phases takes.
    """
    alone = profile.decode_seconds(batch, context_tokens)
    share = requests_per_second * profile.prefill.seconds(prompt_tokens)
    chunk = profile.prefill.seconds(min(chunk_tokens, prompt_tokens))
    step = mixed_step_seconds(profile, chunk, alone, mixed)
    chunks = math.ceil(prompt_tokens / chunk_tokens)
    mean = itl_mean_seconds(alone, share)
    chunk_share = min(requests_per_second * chunks * mean, 1.0)
    return Interference(
        prefill_share=share,
        itl_alone_seconds=alone,
        itl_mean_seconds=mean,
        chunk_step_seconds=step,
        chunk_step_share=chunk_share,
        itl_p95_seconds=step if chunk_share > 0.05 else alone,
        itl_p99_seconds=step if chunk_share > 0.01 else alone,
    )


def itl_mean_seconds(alone_seconds: float, prefill_share: float) -> float:
    """``alone / (1 - u)``; infinite from u = 1 on."""
    return alone_seconds / (1 - prefill_share) if prefill_share < 1 else math.inf
