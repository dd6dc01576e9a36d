"""Whether decode may go on after the token that prefill sampled, as if that were the prompt's last.

Decode is then asked with the prompt's ids and that token as its prompt, and one token less. That gives what
one server gives wherever sampling does not tell the prompt from the output: greedy or unseeded, with
nothing that counts, matches or constrains the output. Fields that are not known here are not allowed, so a
new one of vLLM goes the plain way. Which are known, and why: docs/decisions/0177-first-token-vllm.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.engines.vllm.options import Options

__all__ = ["CONTINUE_KEY", "EMIT_KEY", "PLAIN_KEY", "UNKNOWN", "FirstToken", "first_token_of"]

EMIT_KEY = "kvferry_first_token"
CONTINUE_KEY = "kvferry_continue"
PLAIN_KEY = "kvferry_plain"

_GREEDY_BELOW = 1e-5
"""vLLM's own bound (``_SAMPLING_EPS``): below it no random number is drawn."""

_ALLOWED = frozenset(
    {
        # They act on one step's logits and nothing else.
        *("temperature", "top_p", "top_k", "min_p", "logit_bias", "allowed_token_ids"),
        # Over the union of prompt and output (``prompt_mask | output_mask``): the same tokens either way.
        "repetition_penalty",
        # Counted by whoever asks decode: one less.
        *("max_tokens", "min_tokens"),
        # By the newest token alone, or by the text of one token.
        *("stop_token_ids", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"),
        # How answers are told, not what they are. Off where the engine has no watermark.
        *("output_kind", "stream_interval", "skip_clone", "skip_reading_prefix_cache", "watermarking"),
    }
)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What of an engine's own settings decides.

    ``max_model_tokens``: prompt and output at most; ``default_tokens``: the limit of a request that gives
    none; ``never``: why no request may, whatever it asks for.
    """

    max_model_tokens: int = 0
    default_tokens: int | None = None
    never: str = "this worker does not say what its sampling does"

    def told(self, request: Any) -> dict[str, Any]:
        """What prefill's answer says of it: how to go on, or why that would not be exact."""
        ids = [int(token) for token in request.output_token_ids]
        reason = self.never or _why_not(request.sampling_params)
        if not reason and len(ids) != 1:
            reason = f"prefill sampled {len(ids)} tokens"
        if reason:
            return {PLAIN_KEY: reason}
        room = self.max_model_tokens - request.num_prompt_tokens
        default = room if self.default_tokens is None else min(room, self.default_tokens)
        prompt = [int(token) for token in request.prompt_token_ids]
        return {CONTINUE_KEY: {"ids": prompt + ids, "room_tokens": room, "default_tokens": default}}

    def is_whole(self, request: Any) -> bool:
        """Whether the request has ended by its first token itself, so that nothing is left to decode."""
        return request.status.name == "FINISHED_STOPPED" and CONTINUE_KEY in self.told(request)


UNKNOWN = FirstToken()
"""Of an engine that was not looked at: every request goes the plain way."""


def _why_not(sampling: Any) -> str:
    """The first field that is neither allowed nor what it is by default, or ""."""
    if sampling is None:
        return "it has no sampling parameters"
    for field in msgspec.structs.fields(type(sampling)):
        value, default = getattr(sampling, field.name), field.default
        if field.name.startswith("_") or field.name in _ALLOWED or value == default:
            continue  # what begins with _ is derived from the others
        if default is None and isinstance(value, list | dict) and not value:
            continue
        if field.name == "extra_args" and set(value) <= {"kv_transfer_params"}:
            continue
        if field.name == "seed" and sampling.temperature < _GREEDY_BELOW:
            continue
        if field.name == "output_text_buffer_length" and not sampling.stop:
            continue
        return str(field.name)
    return ""


def first_token_of(vllm_config: Any, options: Options) -> FirstToken:
    """The settings of an engine. Fields that another vLLM lacks count as not set.

    A token that is out cannot be taken back, and decode finds that the pair does not fit only
    after it: so it has to be known before.
    """
    model = vllm_config.model_config
    never = ""
    if not options.same_model and not options.peers:
        never = "neither same_model nor peers says that decode runs this model"
    elif getattr(model, "logits_processors", None):
        never = "this server has logits processors of its own"
    elif getattr(vllm_config, "watermark_config", None) is not None:
        never = "this server watermarks what it writes"
    elif _reasoning_parser(vllm_config):
        never = "this server splits off reasoning"
    elif model.generation_config not in ("auto", "vllm") or "max_new_tokens" in (
        model.override_generation_config or {}
    ):
        never = "this server caps max_tokens by a generation config"
    default = None if never else model.get_diff_sampling_param().get("max_tokens")
    return FirstToken(model.max_model_len, default, never)


def _reasoning_parser(vllm_config: Any) -> str:
    outputs = getattr(vllm_config, "structured_outputs_config", None)
    reasoning = getattr(vllm_config, "reasoning_config", None)
    return getattr(outputs, "reasoning_parser", "") or getattr(reasoning, "reasoning_parser", "") or ""
