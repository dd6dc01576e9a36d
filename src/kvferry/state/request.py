"""The request outside the model: tokens, sampling, random state, drafts, grammar, text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import LocalError
from kvferry.state.cache import LayerState, TensorEntry
from kvferry.state.digest import ids_digest
from kvferry.state.values import (
    Count,
    Digest,
    InlineTensor,
    Int32Bytes,
    Name,
    Record,
    RngKind,
    TokenId,
    pack_ids,
    require_whole_ids,
)

__all__ = [
    "Draft",
    "DraftFingerprint",
    "Encoder",
    "Grammar",
    "Limits",
    "LogitBias",
    "LogprobRow",
    "Logprobs",
    "Multimodal",
    "Positions",
    "Rng",
    "SamplingParameters",
    "TextPosition",
    "Tokens",
    "Usage",
]


class Tokens(Record, frozen=True, kw_only=True):
    """All token ids, prompt and output, with the border between them and what happens next.

    Exactly one of ``pending`` (the last id was sampled, its KV is not computed) and
    ``last_logits`` (float32, one value a vocabulary entry; nothing is pending) is set.
    ``emitted_tokens``: outputs that the client already has. ``digest``: sha256 of ``ids``.
    """

    ids: Int32Bytes
    prompt_tokens: Count
    digest: Digest
    emitted_tokens: Count
    pending: TokenId | None = None
    last_logits: InlineTensor | None = None

    def __post_init__(self) -> None:
        require_whole_ids(self.ids, "token ids")

    @classmethod
    def of(
        cls,
        ids: NDArray[np.integer] | Sequence[int],
        *,
        prompt_tokens: int,
        emitted_tokens: int,
        pending: int | None = None,
        last_logits: InlineTensor | None = None,
    ) -> Tokens:
        """The record of a token history; packs the ids and takes their digest."""
        raw = pack_ids(ids)
        return cls(
            ids=raw,
            prompt_tokens=prompt_tokens,
            digest=ids_digest(raw),
            emitted_tokens=emitted_tokens,
            pending=pending,
            last_logits=last_logits,
        )


class Positions(Record, frozen=True, kw_only=True):
    """The next position id, the rope offset of multimodal input, and its per-token position rows."""

    next: Count
    rope_delta: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0
    mrope: InlineTensor | None = None


class LogitBias(Record, frozen=True, kw_only=True):
    """Added to one token's logit before sampling."""

    token: TokenId
    bias: float


class SamplingParameters(Record, frozen=True, kw_only=True):
    """Resolved values: what the engine really uses, a seed that it drew itself too. None means off."""

    temperature: float
    top_k: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Annotated[tuple[LogitBias, ...], Meta(max_length=1 << 20)] = ()
    allowed_tokens: Int32Bytes | None = None
    bad_tokens: Annotated[tuple[Int32Bytes, ...], Meta(max_length=1 << 16)] = ()
    seed: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=1 << 16)] = 1

    def __post_init__(self) -> None:
        require_whole_ids(self.allowed_tokens, "allowed tokens")
        for sequence in self.bad_tokens:
            require_whole_ids(sequence, "bad tokens")


class Limits(Record, frozen=True, kw_only=True):
    """When to stop, counted on from where prefill is, not restarted."""

    max_tokens_left: Count
    min_tokens_left: Count = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=1 << 16)] = ()
    stop_strings: Annotated[tuple[str, ...], Meta(max_length=1 << 12)] = ()
    ignore_eos: bool = False


class Rng(Record, frozen=True, kw_only=True):
    """The random state, in one of the kinds. ``draws``: how many were made, or the next position."""

    kind: RngKind
    state: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    seed: Annotated[int, Meta(ge=0)] | None = None
    draws: Count = 0


class DraftFingerprint(Record, frozen=True, kw_only=True):
    """The identity of a draft model."""

    weights: Digest
    config: Digest


class Draft(Record, frozen=True, kw_only=True):
    """Speculative decoding: the drafts not yet verified and the drafter's own state.

    ``between_rounds``: no draft is pending, so ``tokens`` is empty and ``probs`` None.
    ``probs``: the draft distributions, first axis one row a draft token; sampled exactness needs
    them. ``hidden``: the last hidden row that EAGLE and MTP heads continue from.
    ``kv_tokens``: tokens that the draft cache covers.
    """

    method: Name
    between_rounds: bool
    fingerprint: DraftFingerprint | None = None
    tokens: Int32Bytes = b""
    probs: InlineTensor | None = None
    hidden: InlineTensor | None = None
    kv_tokens: Count = 0
    layers: Annotated[tuple[LayerState, ...], Meta(max_length=1 << 13)] = ()
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 16)] = ()

    def __post_init__(self) -> None:
        require_whole_ids(self.tokens, "draft tokens")


class Grammar(Record, frozen=True, kw_only=True):
    """A grammar's text; decode replays all output ids and compares the mask that results.

    ``digest``: ``grammar_digest(kind, text)``. ``mask_digest``: sha256 of the mask for the next
    token at prefill, as packed bits in token order.
    """

    kind: Name
    text: str
    digest: Digest
    accepted_tokens: Count
    mask_digest: Digest


class TextPosition(Record, frozen=True, kw_only=True):
    """Where the output text stands: characters sent, and the tail in which a stop string may half match."""

    emitted_chars: Count
    tail: str = ""


class Encoder(Record, frozen=True, kw_only=True):
    """Encoder-decoder models: cross KV travels, encoder output need not. ``digest``: of the input."""

    cross_tokens: Count
    digest: Digest


class Multimodal(Record, frozen=True, kw_only=True):
    """Content hashes of images, audio and video in the prompt, in order."""

    hashes: Annotated[tuple[Name, ...], Meta(max_length=1 << 14)]


class LogprobRow(Record, frozen=True, kw_only=True):
    """One token's log-probability and its best rivals: raw int32 ids, raw float32 values, equally many."""

    token: TokenId
    logprob: float
    top_ids: Int32Bytes = b""
    top_logprobs: Int32Bytes = b""

    def __post_init__(self) -> None:
        require_whole_ids(self.top_ids, "logprob ids")
        if len(self.top_ids) != len(self.top_logprobs):
            raise LocalError(f"{len(self.top_ids)} bytes of logprob ids, {len(self.top_logprobs)} of values")


class Logprobs(Record, frozen=True, kw_only=True):
    """Rows of the outputs that the client does not have yet, and the prompt's where they were asked for."""

    output: Annotated[tuple[LogprobRow, ...], Meta(max_length=1 << 20)] = ()
    prompt: Annotated[tuple[LogprobRow, ...], Meta(max_length=1 << 20)] = ()


class Usage(Record, frozen=True, kw_only=True):
    """Counts for the bill, in tokens."""

    prompt_tokens: Count
    cached_tokens: Count = 0
    image_tokens: Count = 0
    audio_tokens: Count = 0
    video_tokens: Count = 0
