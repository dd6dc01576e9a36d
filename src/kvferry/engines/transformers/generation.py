"""A ``GenerationConfig`` as sampling parameters and limits, or a refusal that names the field."""

from __future__ import annotations

import secrets
from typing import Any

from transformers import GenerationConfig

from kvferry.errors import InputError
from kvferry.state import Limits, LogitBias, SamplingParameters, pack_ids

__all__ = ["from_generation_config"]

_TOP_K = 50  # what generate takes where the configuration says nothing
_SEVERAL = "one request is one sequence: beams and several samples are not handed over"
# Fields that change no token, and those that say how the cache or the output is kept.
_SILENT = {
    "_from_model_config",
    "bos_token_id",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "max_length",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "use_cache",
}
_TAKEN = {
    "bad_words_ids",
    "do_sample",
    "eos_token_id",
    "max_new_tokens",
    "min_new_tokens",
    "min_p",
    "repetition_penalty",
    "sequence_bias",
    "stop_strings",
    "temperature",
    "top_k",
    "top_p",
}
# What leaves the logits as they are, in fields that are refused otherwise.
_NEUTRAL: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "num_beam_groups": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "encoder_repetition_penalty": 1.0,
    "typical_p": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "min_length": 0,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "guidance_scale": 1,
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
}


def from_generation_config(
    config: GenerationConfig, *, seed: int | None = None
) -> tuple[SamplingParameters, Limits]:
    """What ``submit`` takes, for the tokens that ``generate`` would make with ``torch.manual_seed(seed)``.

    ``seed`` None draws one, where tokens are sampled. Raises InputError naming the first field that
    changes tokens in a way that is not handed over.
    """
    given = {name: value for name, value in config.to_dict().items() if value is not None}
    for name, value in given.items():
        if name in _SILENT or name in _TAKEN or (name in _NEUTRAL and value == _NEUTRAL[name]):
            continue
        why = _SEVERAL if name in ("num_beams", "num_return_sequences") else "it is not handed over"
        raise InputError(f"{name}: {value!r}: {why}")
    if "max_new_tokens" not in given:
        raise InputError("max_new_tokens: missing; max_length counts the prompt too, and is not taken")
    eos = given.get("eos_token_id", [])
    limits = Limits(
        max_tokens_left=given["max_new_tokens"],
        min_tokens_left=given.get("min_new_tokens", 0),
        stop_token_ids=tuple(eos) if isinstance(eos, list) else (eos,),
        stop_strings=_strings(given.get("stop_strings", ())),
        ignore_eos=True,  # its own are named above
    )
    return _sampling(given, seed), limits


def _sampling(given: dict[str, Any], seed: int | None) -> SamplingParameters:
    common: dict[str, Any] = {
        "repetition_penalty": float(given.get("repetition_penalty", 1.0)),
        "bad_tokens": tuple(pack_ids(ids) for ids in given.get("bad_words_ids", ())),
        "logit_bias": _bias(given.get("sequence_bias", {})),
    }
    if not given.get("do_sample"):
        return SamplingParameters(temperature=0.0, **common)
    return SamplingParameters(
        temperature=float(given.get("temperature", 1.0)),
        top_k=int(given.get("top_k", _TOP_K)) or None,
        top_p=float(given.get("top_p", 1.0)),
        min_p=float(given.get("min_p", 0.0)),
        seed=secrets.randbits(63) if seed is None else seed,
        **common,
    )


def _bias(given: Any) -> tuple[LogitBias, ...]:
    rows = given.items() if isinstance(given, dict) else given
    found = []
    for ids, bias in rows:
        if len(ids) != 1:
            raise InputError(f"sequence_bias: {list(ids)} is more than one token: it is not handed over")
        found.append(LogitBias(token=int(ids[0]), bias=float(bias)))
    return tuple(found)


def _strings(given: Any) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
