"""Speculative decoding: the model's first layers draft, all of it verifies (Leviathan et al., ICML 2023).

The draft model has a cache of its own, in the pool's second group, under the block ids of the first.
Between rounds it covers the tokens that the model's cache covers. While drafts are pending it is
ahead by them; those rows do not travel, since each is computed again with the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.weights import Model
from kvferry.engines.request import Request, StepOutput
from kvferry.engines.sampler import Sampler, distribution
from kvferry.errors import LocalError

__all__ = ["DraftToken", "Drafter", "Round", "accept_or_draw"]

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class DraftToken:
    """A proposed token, and the distribution it was drawn from, (vocab_size,); None when greedy."""

    token: int
    probs: Float64 | None


@dataclass(slots=True, eq=False)
class Round:
    """What speculation adds to a request.

    ``drafts``: proposed to follow the pending token, not verified. ``kv_tokens``: rows of the draft
    cache that are right; as many as the request's, or more while drafts are pending.
    """

    kv_tokens: int = 0
    drafts: list[DraftToken] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Ids of the drafts."""
        return [draft.token for draft in self.drafts]


class Drafter:
    """Proposes ``num_drafts`` tokens a round, by as many layers as the pool's second group has."""

    def __init__(self, model: Model, pool: PagedPool, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.group = pool.layouts[0].groups[1].name
        self.layers = sorted({layer for layer, _ in pool.tensors[self.group]})
        first_layers = dataclasses.replace(model, layers=model.layers[: len(self.layers)])
        self._decoder = Decoder(first_layers, pool, model.config.layers)
        self._max_context = model.config.max_context
        self.rounds: dict[str, Round] = {}

    def forget(self, request_id: str) -> None:
        """The request is released."""
        self.rounds.pop(request_id, None)

    def of(self, request: Request) -> Round:
        """The request's drafts and draft cache."""
        return self.rounds.setdefault(request.request_id, Round())

    def prefill(self, request: Request, span: Span, on_layer: Callable[[int], None] | None) -> None:
        """Store the draft model's KV of a part of the prompt."""
        self._decoder.prefill(span, on_layer)
        self.of(request).kv_tokens = span.start + len(span.ids)

    @property
    def method(self) -> str:
        """What has to be equal at both sides of a handoff, in words."""
        return f"first {len(self.layers)} layers, {self.num_drafts} a round"

    def round_length(self, request: Request) -> int:
        """Drafts that are pending, or that the next round proposes: none that the limits would cut off."""
        room = min(request.limits_left().max_tokens_left, self._max_context - len(request.ids)) - 1
        return len(self.of(request).drafts) or max(0, min(self.num_drafts, room))

    def propose(self, request: Request) -> None:
        """Draft what may follow the pending token, unless it was done. ``request.blocks`` hold a round."""
        own, sampler, token = self.of(request), _sampler(request), request.ids[-1]
        if own.drafts:
            return
        own.kv_tokens = min(own.kv_tokens, request.kv_tokens)  # a round may have ended in an error
        for _ in range(self.round_length(request)):
            if request.grammar is not None and request.grammar.is_done(own.tokens):
                return
            logits = self._run(request, [token])
            try:
                adjusted = sampler.adjusted(logits, request.forbidden(own.tokens))
            except LocalError:
                return  # nothing may follow; whether that is so, the model's own round says
            probs = distribution(adjusted, sampler.parameters) if sampler.parameters.temperature else None
            token = int(adjusted.argmax()) if probs is None else sampler.draw(probs)
            own.drafts.append(DraftToken(token, probs))

    def verify(self, request: Request, rows: list[Float32]) -> list[StepOutput]:
        """Take the drafts that hold, and one token more.

        ``rows``: logits after the pending token and after each draft. Raises LocalError where no token
        may come; then nothing has changed.
        """
        own = self.of(request)
        outputs: list[StepOutput] = []
        for logits, draft in zip(rows, (*own.drafts, None), strict=True):
            try:
                token = accept_or_draw(_sampler(request), logits, request.forbidden(), draft)
            except LocalError:
                if not outputs:
                    raise
                break  # the next round says so
            outputs.append(request.append(token, logits, self._max_context))
            if request.finish is not None or draft is None or token != draft.token:
                break
        own.drafts = []
        request.kv_tokens, request.last_logits = len(request.ids) - 1, None
        # What was accepted may be ahead of the draft cache: by the last draft, or by all after an import.
        own.kv_tokens = min(own.kv_tokens, request.kv_tokens)
        if request.finish is None and (ids := request.ids[own.kv_tokens : request.kv_tokens]):
            self._run(request, ids)
        return outputs

    def _run(self, request: Request, ids: list[int]) -> Float32:
        """Logits after the last of these tokens, which come next in the draft cache."""
        own = self.of(request)
        spans = [Span(np.array([t], np.int32), at, request.table) for at, t in enumerate(ids, own.kv_tokens)]
        own.kv_tokens += len(ids)
        return self._decoder.logits(self._decoder.decode(spans)[-1])


def accept_or_draw(sampler: Sampler, logits: Float32, forbidden: list[int], draft: DraftToken | None) -> int:
    """The draft, with probability min(1, p / q), else a token by max(0, p - q): together, a token by p.

    Never the draft when it is refused, since p < q there. Greedy, the model's own choice decides.
    """
    if draft is None or draft.probs is None:
        return sampler.sample(logits, forbidden)
    probs, token = distribution(sampler.adjusted(logits, forbidden), sampler.parameters), draft.token
    if sampler.uniform() * draft.probs[token] >= probs[token]:
        rest = np.maximum(probs - draft.probs, 0)
        token = sampler.draw(rest if rest.any() else probs)  # none is left only by rounding: p equals q
    sampler.count(token)
    return token


def _sampler(request: Request) -> Sampler:
    assert isinstance(request.sampler, Sampler)
    return request.sampler
