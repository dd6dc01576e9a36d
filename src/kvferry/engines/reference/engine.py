"""The reference engine: requests over one model and one paged pool.

Phases of a request: ``submit``, then ``prefill`` until it says that the prompt is in, then
``step`` until it is finished, then ``release``. Between any two calls it can be exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.local import Built, LocalEngine
from kvferry.engines.record import Cache
from kvferry.engines.reference import handoff, needs
from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.speculative import Drafter
from kvferry.engines.reference.weights import Model
from kvferry.engines.request import Request, StepOutput
from kvferry.engines.sampler import Sampler
from kvferry.errors import InputError, LocalError
from kvferry.layout import BlockTable, PoolLayout, Role
from kvferry.state import ExecutionState, Requirements, Rng, SamplingParameters

__all__ = ["ReferenceEngine"]


class ReferenceEngine(LocalEngine):
    """NumPy, one process, exact: a request's logits depend on its own ids alone, bit by bit.

    Neither other requests, block size, axis order nor placement change them; the size of prefill
    chunks may. Storage in float16 or bfloat16 rounds K and V before anything reads them. With drafts a
    greedy request has the tokens and logits that it has without; a sampled one follows the same law.

    Args:
        model: weights, configuration and tokenizer.
        layout: see ``PagedPool``; layers, KV heads and head size have to be the model's. With one
            for each rank of a tensor or pipeline parallel worker, the ranks are simulated here.
        memory: uint8, flat, at least ``layout.nbytes``, one for each rank; allocated here when None.
        chunk_tokens: prompt tokens of one ``prefill`` call.
        num_drafts: tokens that a draft model proposes a round: as many of the model's first layers as
            the layout has in its second group. 0 where there is no such group.

    Raises LocalError for a layout that does not hold the model's KV.
    """

    def __init__(
        self,
        model: Model,
        layout: PoolLayout | Sequence[PoolLayout],
        memory: NDArray[np.uint8] | Sequence[NDArray[np.uint8]] | None = None,
        *,
        chunk_tokens: int = 256,
        num_drafts: int = 0,
    ) -> None:
        if chunk_tokens < 1:
            raise InputError(f"chunk_tokens: {chunk_tokens} is less than 1")
        super().__init__(model.config.vocab_size, model.config.max_context, model.tokenizer)
        self.model = model
        self.pool = PagedPool(layout, memory)
        num_groups = len(self.pool.layouts[0].groups)
        if num_drafts < 0 or (num_drafts > 0) != (num_groups > 1):
            raise InputError(f"num_drafts: {num_drafts} drafts a round, in a pool of {num_groups} groups")
        _check_layout(model, self.pool.layouts)
        self._decoder = Decoder(model, self.pool)
        self.drafter = Drafter(model, self.pool, num_drafts) if num_drafts else None
        self._chunk_tokens = chunk_tokens
        self._requirements: Requirements | None = None

    @property
    def layout(self) -> PoolLayout:
        """Where the KV lies in ``memory``. Raises LocalError where there are several ranks."""
        self._check_one_rank()
        return self.pool.layouts[0]

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The pool itself. Raises LocalError where there are several ranks."""
        self._check_one_rank()
        return self.pool.memories[0]

    @property
    def layouts(self) -> tuple[PoolLayout, ...]:
        """The layout of each rank."""
        return self.pool.layouts

    @property
    def memories(self) -> tuple[NDArray[np.uint8], ...]:
        """The pool of each rank."""
        return self.pool.memories

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Blocks that ``allocate`` could give now."""
        return (self.pool.num_free_blocks,)

    def prefill(self, request_id: str, on_layer: Callable[[int], None] | None = None) -> bool:
        """Compute one chunk of the prompt. True when the whole prompt is in and ``step`` may follow.

        ``on_layer(layer)`` is called when the chunk's K and V of that layer are in the pool; the draft
        model's layers come last, numbered on from the model's. When it raises, the chunk counts as not
        computed, and the next call does it again.
        """
        request = self.request(request_id)
        if request.is_prefilled:
            raise LocalError("the prompt is in already", request_id=request_id)
        start, stop = request.kv_tokens, min(request.kv_tokens + self._chunk_tokens, request.prompt_tokens)
        span = Span(np.array(request.ids[start:stop], np.int32), start, request.table)
        rows = self._decoder.prefill(span, on_layer)
        if self.drafter is not None:
            self.drafter.prefill(request, span, on_layer)
        request.kv_tokens = stop
        if stop == request.prompt_tokens:
            request.last_logits = self._decoder.logits(rows[-1])
        return request.is_prefilled

    def draft(self, request_ids: Sequence[str] | None = None) -> None:
        """Propose what may follow the pending token of each request that has no drafts yet.

        ``step`` does so itself; apart, a request can be exported with drafts pending. Raises as it does.
        """
        if self.drafter is None:
            raise LocalError("this engine has no draft model")
        self._reserve(requests := [r for r in self._chosen(request_ids) if r.pending is not None])
        for request in requests:
            self.drafter.propose(request)

    def requirements(self) -> Requirements:
        """What this engine needs to start a request; the first call runs the numerics probe."""
        if self._requirements is None:
            self._requirements = needs.requirements(self.model, self.pool, self.drafter)
        return self._requirements

    def allocate(self, tokens: int) -> BlockTables:
        """Blocks for ``tokens`` tokens and a round of drafts, the caller's until imported or freed.

        Raises CapacityError.
        """
        num_drafts = 0 if self.drafter is None else self.drafter.num_drafts
        ids = self.pool.allocate(self.pool.blocks_for(tokens + num_drafts))
        return self._in_each_group(BlockTable(0, np.array(ids, np.int32)))

    def free(self, tables: BlockTables) -> None:
        """Give back what ``allocate`` gave, and no request has taken over."""
        self._check_callers(tables)
        self.pool.free(tables[0].ids)

    def tables(self, request_id: str) -> BlockTables:
        """The blocks that hold the request's KV now; the same in every group and at every rank."""
        return self._in_each_group(self.request(request_id).table)

    def _make_sampler(
        self,
        sampling: SamplingParameters,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        rng: Rng | None,
    ) -> Sampler:
        return Sampler.continued(sampling, self.vocab_size, prompt_ids, output_ids, rng)

    def _admit(self, request: Request) -> None:
        request.blocks += self.pool.allocate(self.pool.blocks_for(request.prompt_tokens))

    def _cache_of(self, request: Request) -> Cache:
        own = None if self.drafter is None else self.drafter.of(request)
        return handoff.describe_cache(request, own, self.pool, self.requirements())

    def _build(self, state: ExecutionState, tables: BlockTables) -> Built:
        own = None if self.drafter is None else handoff.round_of(state, self.vocab_size)
        return Built(handoff.report_of(tables[0], state, self.pool), own=own)

    def _show(self, request: Request, built: Built, tables: BlockTables) -> None:
        request.blocks += tables[0].ids.tolist()
        if self.drafter is not None:
            self.drafter.rounds[request.request_id] = built.own

    def _forget(self, request: Request) -> None:
        self.pool.free(request.blocks)
        if self.drafter is not None:
            self.drafter.forget(request.request_id)

    def _in_each_group(self, table: BlockTable) -> BlockTables:
        return (table,) * len(self.pool.layouts[0].groups)

    def _check_one_rank(self) -> None:
        if len(self.pool.layouts) != 1:
            raise LocalError(f"there are {len(self.pool.layouts)} ranks: ask for their layouts and memories")

    def _check_callers(self, tables: BlockTables) -> None:
        ids = tables[0].ids.tolist()
        alike = [table.ids.tolist() for table in tables] == [ids] * len(self.pool.layouts[0].groups)
        of_requests = {block for request in self._requests.values() for block in request.blocks}
        if not alike or not self.pool.is_held(ids) or of_requests.intersection(ids):
            raise LocalError(
                "the block table is not one that allocate gave and that is still the caller's",
                now_true="no block has changed hands",
            )

    def _advance(self, requests: list[Request]) -> list[StepOutput]:
        if self.drafter is None:
            return super()._advance(requests)
        self._reserve(pending := [r for r in requests if r.pending is not None])
        for request in pending:
            self.drafter.propose(request)
        rows = self._logits([(request, self.drafter.of(request).tokens) for request in pending])
        rows |= {r.request_id: [r.last_logits] for r in requests if r.last_logits is not None}
        verify = self.drafter.verify
        return self._in_turn(requests, lambda request: verify(request, rows[request.request_id]))

    def _run_pending(self, requests: list[Request]) -> None:
        self._reserve(requests)
        rows = self._logits([(request, []) for request in requests])
        for request in requests:
            request.kv_tokens += 1
            request.pending, (request.last_logits,) = None, rows[request.request_id]

    def _reserve(self, requests: list[Request]) -> None:
        """Blocks for the pending token of each and the drafts after it."""
        lengths = [0 if self.drafter is None else self.drafter.round_length(r) for r in requests]
        wanted = [
            max(0, self.pool.blocks_for(r.kv_tokens + 1 + length) - len(r.blocks))
            for r, length in zip(requests, lengths, strict=True)
        ]
        fresh = self.pool.allocate(sum(wanted))
        for request, count in zip(requests, wanted, strict=True):
            request.blocks += [fresh.pop() for _ in range(count)]

    def _logits(self, requests: list[tuple[Request, list[int]]]) -> dict[str, list[NDArray[np.float32]]]:
        """KV of the pending token and the tokens after it, of each request; the logits after each."""
        spans = [
            (r.request_id, Span(np.array([token], np.int32), place, r.table))
            for r, ahead in requests
            for place, token in enumerate([r.ids[-1], *ahead], r.kv_tokens)
        ]
        rows: dict[str, list[NDArray[np.float32]]] = {r.request_id: [] for r, _ in requests}
        if spans:
            hidden = self._decoder.decode([span for _, span in spans])
            for (request_id, _), row in zip(spans, hidden, strict=True):
                rows[request_id].append(self._decoder.logits(row))
        return rows


def _check_layout(model: Model, layouts: Sequence[PoolLayout]) -> None:
    config = model.config
    found = {
        (index, t.layer, t.role, head, t.head_dim)
        for layout in layouts
        for index, group in enumerate(layout.groups)
        for t in group.tensors
        for head in range(t.head_start, t.head_stop)
    }
    drafting = {layer for index, layer, *_ in found if index == 1}
    wanted = {
        (int(layer >= config.layers), layer, role, head, config.head_dim)
        for layer in range(config.layers + min(len(drafting), config.layers))
        for role in (Role.KEY, Role.VALUE)
        for head in range(config.kv_heads)
    }
    if found != wanted:
        raise LocalError(
            f"the layout is not that of {model.name}: {config.layers} layers, each with key and value of"
            f" {config.kv_heads} heads of {config.head_dim}; after them, in another group, a draft's"
        )
