"""The transformers engine: requests over one model, their caches staged in a pool when they move."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.grammar import GrammarText
from kvferry.engines.local import Built
from kvferry.engines.record import Cache
from kvferry.engines.request import Request, StepOutput
from kvferry.engines.staged import StagedEngine
from kvferry.engines.transformers.assisted import Drafter
from kvferry.engines.transformers.describe import describe_cache, positions, requirements
from kvferry.engines.transformers.model import ModelCache, TransformersModel
from kvferry.engines.transformers.sampler import TorchSampler
from kvferry.engines.transformers.staging import Staging
from kvferry.errors import InputError, LocalError
from kvferry.layout import PoolLayout
from kvferry.state import (
    ExecutionState,
    ImportReport,
    Limits,
    Requirements,
    Rng,
    SamplingParameters,
)

__all__ = ["TransformersEngine"]


class TransformersEngine(StagedEngine):
    """One process, CPU, one sequence a forward: as exact as ``generate`` with batch size 1.

    Args:
        model: see ``TransformersModel``.
        layout: the model's own, by its ``layout``; other block sizes and orders in ours cost no bits.
        memory: uint8, flat, at least ``layout.nbytes``; allocated here when None.
        drafter: for assisted decoding; the layout is then the drafter's.

    Not for two threads at once. Raises LocalError for a layout of another model.
    """

    def __init__(
        self,
        model: TransformersModel,
        layout: PoolLayout,
        memory: NDArray[np.uint8] | None = None,
        *,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__(model.vocab_size, model.max_context, model.tokenizer, layout, memory)
        self.model = model
        self.drafter = drafter
        self._own = Staging(model.form, layout, self.memory, model.key_order)
        self._cross = Staging(model.cross_form, layout, self.memory)
        self._drafted = None if drafter is None else Staging(drafter.form, layout, self.memory)
        self._requirements = requirements(model, layout, drafter)
        self._caches: dict[str, ModelCache] = {}

    def requirements(self) -> Requirements:
        """What this engine needs to start a request, from the cache that its model filled."""
        return self._requirements

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        limits: Limits,
        grammar: GrammarText | None = None,
        *,
        encoder_input: torch.Tensor | None = None,
    ) -> Request:
        """Take a request. ``encoder_input``: ids or features (1, ...), for a model with an encoder.

        Raises as the other engines do, then nothing is held.
        """
        cache = self.model.new_cache(encoder_input)
        if self.drafter is not None:
            if len(prompt_ids) < 2:
                raise InputError("prompt: with a draft model, two tokens or more are needed")
            cache.draft = self.drafter.draft.new_cache()
        request = super().submit(request_id, prompt_ids, sampling, limits, grammar)
        self._caches[request_id] = cache
        return request

    def prefill(self, request_id: str) -> bool:
        """Compute the whole prompt at once."""
        request = self.request(request_id)
        if request.is_prefilled:
            raise LocalError("the prompt is in already", request_id=request_id)
        if self.drafter is not None:
            self.drafter.prefill(request, self._caches[request_id])
            return True
        logits = self.model.forward(self._caches[request_id], request.ids)
        request.kv_tokens, request.last_logits = len(request.ids), logits[-1].numpy()
        return True

    def allocate(self, tokens: int, encoder_tokens: int = 0) -> BlockTables:
        """Blocks for ``tokens`` tokens and a round of drafts, the caller's until imported or freed."""
        drafts = 0 if self.drafter is None else self.drafter.num_drafts
        return super().allocate(tokens + drafts, encoder_tokens)

    def _advance(self, requests: list[Request]) -> list[StepOutput]:
        if (drafter := self.drafter) is None:
            return super()._advance(requests)
        rounds = [
            drafter.round(request, self._caches[request.request_id], self.max_context) for request in requests
        ]
        return [output for outputs in rounds for output in outputs]

    def _make_sampler(
        self,
        sampling: SamplingParameters,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        rng: Rng | None,
    ) -> TorchSampler:
        return TorchSampler(sampling, np.concatenate([prompt_ids, output_ids]), rng)

    def _admit(self, request: Request) -> None:
        """A cache grows as it must; there is nothing to take."""

    def _run_pending(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.pending is not None
            logits = self.model.forward(self._caches[request.request_id], [request.pending])
            request.kv_tokens += 1
            request.pending, request.last_logits = None, logits[-1].numpy()

    def _cache_of(self, request: Request) -> Cache:
        tables = self.tables(request.request_id)
        cache = describe_cache(
            self.model, self.layout, tables, request.kv_tokens, self._caches[request.request_id]
        )
        if self.drafter is None:
            return cache
        return replace(cache, draft=self.drafter.describe(request.kv_tokens))

    def _encoder_tokens(self, request: Request) -> int:
        return self._caches[request.request_id].cross_tokens

    def _stage(self, request: Request, tables: BlockTables) -> None:
        held = self._caches[request.request_id]
        self._own.store(held.layers, tables, request.kv_tokens, held.cross_tokens)
        self._cross.store(held.cross, tables, request.kv_tokens, held.cross_tokens)
        if self._drafted is not None and held.draft is not None:
            self._drafted.store(held.draft.layers, tables, request.kv_tokens, 0)

    def _build(self, state: ExecutionState, tables: BlockTables) -> Built:
        tokens, cross, digest = state.kv_tokens, 0, ""
        if state.encoder is not None:
            cross, digest = state.encoder.cross_tokens, state.encoder.digest
        own, other = (staging.load(tables, tokens, cross) for staging in (self._own, self._cross))
        held = self.model.filled_cache(own, other, cross, digest)
        parts = [(self._own, held.layers, tokens), (self._cross, held.cross, tokens)]
        if self._drafted is not None and self.drafter is not None and state.draft is not None:
            covered = state.draft.kv_tokens
            layers = self._drafted.load(tables, covered, 0)
            held.draft = self.drafter.draft.filled_cache(layers, [], 0, "")
            parts.append((self._drafted, layers, covered))
        report = ImportReport(
            given_nbytes=sum(staging.nbytes(covered, cross) for staging, _, covered in parts),
            accepted_nbytes=sum(
                staging.read_back(layers, tables, covered, cross) for staging, layers, covered in parts
            ),
            positions=positions(self.model, self.layout, held, tokens, self.drafter),
        )
        return Built(report, self._own.recurrent(tables), held)

    def _show(self, request: Request, built: Built, tables: BlockTables) -> None:
        self._caches[request.request_id] = built.own
        self._release_tables(tables)  # the cache is the engine's own tensors now

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        del self._caches[request.request_id]
