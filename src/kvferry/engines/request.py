"""One request inside an engine, and what a step says about it."""

from __future__ import annotations

import enum
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.engines.grammar import OutputGrammar
from kvferry.engines.sampler import TokenSampler, logprob
from kvferry.engines.text import OutputText
from kvferry.errors import InputError
from kvferry.layout import BlockTable
from kvferry.state import Limits, SamplingParameters, unpack_ids

__all__ = ["FinishReason", "Request", "StepOutput", "check_sampling", "resolve_limits", "resolve_sampling"]

Float32 = NDArray[np.float32]
_SEED_BITS = 63


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP_TOKEN = "stop_token"  # noqa: S105
    STOP_STRING = "stop_string"
    GRAMMAR = "grammar"  # nothing can follow
    LENGTH = "length"


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """One new token. ``text``: what the client may see now; ``logits``: float32 (vocab_size,)."""

    request_id: str
    token: int
    text: str
    logits: Float32
    finish: FinishReason | None

    def logprob(self) -> float:
        """Natural log of the probability that the raw logits give to the token."""
        return logprob(self.logits, self.token)


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output ids, and everything that decides the next one.

    Once prefilled, exactly one of ``pending`` (sampled, its KV not computed) and ``last_logits``
    (not sampled yet) is set. ``limits`` count from the output of ``limits_from`` tokens on.
    """

    request_id: str
    ids: list[int]
    prompt_tokens: int
    limits: Limits
    limits_from: int
    sampler: TokenSampler
    text: OutputText
    grammar: OutputGrammar | None = None
    blocks: list[int] = field(default_factory=list)
    kv_tokens: int = 0
    pending: int | None = None
    last_logits: Float32 | None = None
    finish: FinishReason | None = None

    @property
    def output_ids(self) -> list[int]:
        """What was sampled, here or where the request came from."""
        return self.ids[self.prompt_tokens :]

    @property
    def is_prefilled(self) -> bool:
        """A step may be made."""
        return self.pending is not None or self.last_logits is not None

    @property
    def table(self) -> BlockTable:
        """The blocks in token order."""
        return BlockTable(0, np.array(self.blocks, np.int32))

    def limits_left(self) -> Limits:
        """The limits as they stand now, counted down."""
        made = len(self.ids) - self.prompt_tokens - self.limits_from
        return msgspec.structs.replace(
            self.limits,
            max_tokens_left=self.limits.max_tokens_left - made,
            min_tokens_left=max(0, self.limits.min_tokens_left - made),
        )

    def forbidden(self, ahead: Sequence[int] = ()) -> list[int]:
        """Ids that may not come next, or after drafts ``ahead``.

        Stop tokens before the minimum, the ends of bad sequences, what does not fit the grammar.
        """
        outputs = [*self.output_ids, *ahead]
        out = list(self.limits.stop_token_ids) if self.limits_left().min_tokens_left > len(ahead) else []
        for sequence in self.sampler.parameters.bad_tokens:
            *head, last = unpack_ids(sequence).tolist()
            if not head or outputs[-len(head) :] == head:
                out.append(last)
        return out if self.grammar is None else out + np.flatnonzero(~self.grammar.allowed(ahead)).tolist()

    def advance(self, max_context: int) -> StepOutput:
        """Sample from ``last_logits``, and take the token into ids, text and limits."""
        logits = self.last_logits
        assert logits is not None
        output = self.append(self.sampler.sample(logits, self.forbidden()), logits, max_context)
        self.last_logits = None
        return output

    def append(self, token: int, logits: Float32, max_context: int) -> StepOutput:
        """Take a token that was chosen from ``logits`` into ids, text and limits; it is then pending."""
        self.ids.append(token)
        self.pending = token
        if self.grammar is not None:
            self.grammar.accept([token])
        left = self.limits_left()
        if token in self.limits.stop_token_ids:
            self.finish = FinishReason.STOP_TOKEN
        elif self.text.push(token, can_stop=left.min_tokens_left == 0):
            self.finish = FinishReason.STOP_STRING
        elif self.grammar is not None and self.grammar.is_done():
            self.finish = FinishReason.GRAMMAR
        elif left.max_tokens_left == 0 or len(self.ids) >= max_context:
            self.finish = FinishReason.LENGTH
        text = self.text.take(is_last=self.finish is not None)
        return StepOutput(self.request_id, token, text, logits, self.finish)


def resolve_sampling(sampling: SamplingParameters, vocab_size: int) -> SamplingParameters:
    """The parameters as they will be used: checked, and with a seed drawn now if one is needed."""
    check_sampling(sampling, vocab_size)
    if sampling.temperature > 0 and sampling.seed is None:
        return msgspec.structs.replace(sampling, seed=secrets.randbits(_SEED_BITS))
    return sampling


def check_sampling(given: SamplingParameters, vocab_size: int) -> None:
    """Raise InputError naming the first parameter that has no meaning here."""
    ids = [entry.token for entry in given.logit_bias]
    for packed in (*given.bad_tokens, given.allowed_tokens or b""):
        ids += unpack_ids(packed).tolist()
    biases = [entry.bias for entry in given.logit_bias]
    penalties = (given.presence_penalty, given.frequency_penalty)
    for name, value, is_right, rule in (
        ("temperature", given.temperature, 0 <= given.temperature < math.inf, "0 or more"),
        ("top_p", given.top_p, 0 < given.top_p <= 1, "above 0, at most 1"),
        ("min_p", given.min_p, 0 <= given.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", given.repetition_penalty, 0 < given.repetition_penalty < math.inf, "above 0"),
        ("presence and frequency penalty", penalties, all(map(math.isfinite, penalties)), "finite"),
        ("logit_bias", biases, all(bias < math.inf for bias in biases), "below infinity"),
        ("seed", given.seed, 0 <= (given.seed or 0) < 1 << _SEED_BITS, f"from 0 to 2^{_SEED_BITS}"),
        ("n", given.n, given.n == 1, "1"),
        ("token ids", max(ids, default=0), max(ids, default=0) < vocab_size, f"below {vocab_size}"),
        ("bad_tokens", "", all(given.bad_tokens), "not empty"),
        ("allowed_tokens", "", given.allowed_tokens != b"", "not empty"),
    ):
        if not is_right:
            raise InputError(f"{name}: {value!r} is not {rule}")


def resolve_limits(limits: Limits, stop_token_ids: Sequence[int]) -> Limits:
    """Add the model's own stop tokens unless they are to be ignored. Raises InputError naming the field."""
    if limits.max_tokens_left < 1:
        raise InputError(f"max_tokens: {limits.max_tokens_left} is less than 1")
    if not all(limits.stop_strings):
        raise InputError("stop_strings: an empty string would stop at once")
    own = () if limits.ignore_eos else stop_token_ids
    return msgspec.structs.replace(
        limits, stop_token_ids=tuple(dict.fromkeys((*limits.stop_token_ids, *own)))
    )
