"""Assisted decoding: a small model drafts, the large one verifies (Leviathan et al., ICML 2023).

A step is a whole round, so a request is handed over between rounds, with no draft pending. Both
caches then cover all tokens but the newest, which is pending. The draft model's cache travels: with
a rebuilt or empty one sampled tokens are others, since the random numbers are spent otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.engines.request import Request, StepOutput
from kvferry.engines.transformers.form import CacheForm
from kvferry.engines.transformers.model import ModelCache, TransformersModel
from kvferry.engines.transformers.sampler import TorchSampler
from kvferry.errors import LocalError
from kvferry.layout import LayerKind, PoolLayout
from kvferry.state import Draft, DraftFingerprint, DraftNeed

__all__ = ["DRAFT_PREFIX", "Drafter"]

DRAFT_PREFIX = "draft-"
_METHOD = "draft model"
# Kinds of cache that can be cut back to before the drafts that did not hold.
_CROPPABLE = {LayerKind.FULL, LayerKind.MLA, LayerKind.INDEXED}


@dataclass(frozen=True, slots=True)
class _Drafted:
    token: int
    probabilities: torch.Tensor  # float32 (vocab_size,)


class Drafter:
    """Proposes ``num_drafts`` tokens a round. ``form``: of its cache, numbered after the model's own layers.

    Raises LocalError for models of other vocabularies, and for a cache that cannot be cut back.
    """

    def __init__(self, model: TransformersModel, draft: TransformersModel, num_drafts: int) -> None:
        if num_drafts < 1:
            raise LocalError(f"num_drafts: {num_drafts} is less than 1")
        if draft.vocab_size != model.vocab_size:
            raise LocalError(f"the draft model has {draft.vocab_size} tokens, the model {model.vocab_size}")
        for name, one in (("model", model), ("draft model", draft)):
            for layer in one.form.layers:
                if layer.kind not in _CROPPABLE:
                    raise LocalError(
                        f"assisted decoding: layer {layer.layer} of the {name} is {layer.kind.value}, "
                        "which cannot be cut back to before a draft"
                    )
        self.model = model
        self.draft = draft
        self.num_drafts = num_drafts
        first = 1 + max(layer.layer for layer in model.form.layers)
        self.form: CacheForm = draft.form.renumbered(first, DRAFT_PREFIX)

    @property
    def method(self) -> str:
        """What has to be equal at both sides of a handoff, in words."""
        return f"{_METHOD}, {self.num_drafts} a round"

    def need(self) -> DraftNeed:
        """What decode asks of a state."""
        return DraftNeed(
            method=self.method,
            fingerprint=self._fingerprint(),
            layers=self.form.layers,
            tensors=tuple(form.need() for form in self.form.tensors),
            tokens_per_round=self.num_drafts,
        )

    def describe(self, tokens: int) -> Draft:
        """The draft model's part of a record, between rounds."""
        return Draft(
            method=self.method,
            between_rounds=True,
            fingerprint=self._fingerprint(),
            kv_tokens=tokens,
            layers=self.form.layer_states(tokens, 0),
            tensors=self.form.entries(tokens, 0),
        )

    def layout(self, *, tokens: int, requests: int = 16, block_size: int = 16) -> PoolLayout:
        """A pool for handoffs of both caches; see ``TransformersModel.layout``."""
        form = self.model.form.beside(self.form)
        return form.layout(tokens=tokens, requests=requests, block_size=block_size)

    def prefill(self, request: Request, held: ModelCache) -> None:
        """Run all of the prompt but its last token, which is pending then."""
        assert held.draft is not None
        self.model.forward(held, request.ids[:-1])
        self.draft.forward(held.draft, request.ids[:-1])
        request.kv_tokens, request.pending = len(request.ids) - 1, request.ids[-1]

    def round(self, request: Request, held: ModelCache, max_context: int) -> list[StepOutput]:
        """Draft, verify, and take the drafts that hold and one token more."""
        sampler, drafted = request.sampler, held.draft
        assert isinstance(sampler, TorchSampler)
        assert drafted is not None
        room = min(request.limits_left().max_tokens_left, max_context - len(request.ids)) - 1
        drafts = self._propose(request, sampler, drafted, max(0, min(self.num_drafts, room)))
        fed = [request.ids[-1], *(draft.token for draft in drafts)]
        rows = self.model.forward(held, fed, every_row=True)
        outputs = []
        for logits, draft in zip(rows, (*drafts, None), strict=True):
            token = _accept_or_draw(request, sampler, logits, draft)
            sampler.ids.append(token)
            outputs.append(request.append(token, logits.numpy().copy(), max_context))
            if request.finish is not None or draft is None or token != draft.token:
                break
        request.kv_tokens = len(request.ids) - 1
        _crop(held, request.kv_tokens)
        self._catch_up(request, drafted)
        return outputs

    def _propose(
        self, request: Request, sampler: TorchSampler, drafted: ModelCache, count: int
    ) -> list[_Drafted]:
        drafts: list[_Drafted] = []
        token = request.ids[-1]
        for _ in range(count):
            (logits,) = self.draft.forward(drafted, [token])
            ahead = [draft.token for draft in drafts]
            found = sampler.distribution(logits, [*request.ids, *ahead], request.forbidden(ahead))
            token = sampler.draw(found)
            drafts.append(_Drafted(token, found))
        return drafts

    def _catch_up(self, request: Request, drafted: ModelCache) -> None:
        """The draft cache covers what the model's covers: drafts that did not hold go, the last one comes."""
        _crop(drafted, request.kv_tokens)
        missing = request.ids[_covered(drafted) : request.kv_tokens]
        if missing and request.finish is None:
            self.draft.forward(drafted, missing)

    def _fingerprint(self) -> DraftFingerprint:
        return DraftFingerprint(weights=self.draft.identity.weights, config=self.draft.identity.config)


def _accept_or_draw(
    request: Request, sampler: TorchSampler, logits: torch.Tensor, draft: _Drafted | None
) -> int:
    """The draft with probability min(1, p / q), else a token by max(0, p - q): together, a token by p."""
    found = sampler.distribution(logits, request.ids, request.forbidden())
    if draft is None or sampler.generator is None:
        return sampler.draw(found)
    chance = torch.rand((), generator=sampler.generator)
    if chance * draft.probabilities[draft.token] < found[draft.token]:
        return draft.token
    rest = (found - draft.probabilities).clamp(min=0)
    return sampler.draw(rest if rest.any() else found)  # none is left only by rounding: p equals q


def _covered(held: ModelCache) -> int:
    return int(held.cache.get_seq_length())


def _crop(held: ModelCache, tokens: int) -> None:
    if (beyond := _covered(held) - tokens) > 0:
        held.cache.crop(-beyond)
