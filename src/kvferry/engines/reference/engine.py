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
from kvferry.engines.reference import handoff
from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.weights import Model
from kvferry.engines.request import Request
from kvferry.engines.sampler import Sampler
from kvferry.errors import InputError, LocalError
from kvferry.layout import BlockTable, PoolLayout, Role
from kvferry.state import ExecutionState, Requirements, Rng, SamplingParameters

__all__ = ["ReferenceEngine"]


class ReferenceEngine(LocalEngine):
    """NumPy, one process, exact: a request's logits depend on its own ids alone, bit by bit.

    Neither other requests, block size, axis order nor placement change them; the size of prefill
    chunks may. Storage in float16 or bfloat16 rounds K and V before anything reads them.

    Args:
        model: weights, configuration and tokenizer.
        layout: see ``PagedPool``; layers, KV heads and head size have to be the model's. With one
            for each rank of a tensor or pipeline parallel worker, the ranks are simulated here.
        memory: uint8, flat, at least ``layout.nbytes``, one for each rank; allocated here when None.
        chunk_tokens: prompt tokens of one ``prefill`` call.

    Raises LocalError for a layout that does not hold the model's KV.
    """

    def __init__(
        self,
        model: Model,
        layout: PoolLayout | Sequence[PoolLayout],
        memory: NDArray[np.uint8] | Sequence[NDArray[np.uint8]] | None = None,
        *,
        chunk_tokens: int = 256,
    ) -> None:
        if chunk_tokens < 1:
            raise InputError(f"chunk_tokens: {chunk_tokens} is less than 1")
        super().__init__(model.config.vocab_size, model.config.max_context, model.tokenizer)
        self.model = model
        self.pool = PagedPool(layout, memory)
        _check_layout(model, self.pool.layouts)
        self._decoder = Decoder(model, self.pool)
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

    def prefill(self, request_id: str, on_layer: Callable[[int], None] | None = None) -> bool:
        """Compute one chunk of the prompt. True when the whole prompt is in and ``step`` may follow.

        ``on_layer(layer)`` is called when the chunk's K and V of that layer are in the pool.
        When it raises, the chunk counts as not computed, and the next call does it again.
        """
        request = self.request(request_id)
        if request.is_prefilled:
            raise LocalError("the prompt is in already", request_id=request_id)
        start, stop = request.kv_tokens, min(request.kv_tokens + self._chunk_tokens, request.prompt_tokens)
        ids = np.array(request.ids[start:stop], np.int32)
        rows = self._decoder.prefill(Span(ids, start, request.table), on_layer)
        request.kv_tokens = stop
        if stop == request.prompt_tokens:
            request.last_logits = self._decoder.logits(rows[-1])
        return request.is_prefilled

    def requirements(self) -> Requirements:
        """What this engine needs to start a request; the first call runs the numerics probe."""
        if self._requirements is None:
            self._requirements = handoff.requirements(self.model, self.pool)
        return self._requirements

    def allocate(self, tokens: int) -> BlockTables:
        """Blocks for ``tokens`` tokens, the caller's until imported or freed. Raises CapacityError."""
        return (BlockTable(0, np.array(self.pool.allocate(self.pool.blocks_for(tokens)), np.int32)),)

    def free(self, tables: BlockTables) -> None:
        """Give back what ``allocate`` gave, and no request has taken over."""
        (table,) = tables
        self._check_callers(tables)
        self.pool.free(table.ids)

    def tables(self, request_id: str) -> BlockTables:
        """The blocks that hold the request's KV now; the same at every rank."""
        return (self.request(request_id).table,)

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
        return handoff.describe_cache(request, self.pool)

    def _build(self, state: ExecutionState, tables: BlockTables) -> Built:
        (table,) = tables
        return Built(handoff.report_of(table, state, self.pool))

    def _show(self, request: Request, built: Built, tables: BlockTables) -> None:  # noqa: ARG002
        (table,) = tables
        request.blocks += table.ids.tolist()

    def _forget(self, request: Request) -> None:
        self.pool.free(request.blocks)

    def _check_one_rank(self) -> None:
        if len(self.pool.layouts) != 1:
            raise LocalError(f"there are {len(self.pool.layouts)} ranks: ask for their layouts and memories")

    def _check_callers(self, tables: BlockTables) -> None:
        (table,) = tables
        ids = table.ids.tolist()
        of_requests = {block for request in self._requests.values() for block in request.blocks}
        if not self.pool.is_held(ids) or of_requests.intersection(ids):
            raise LocalError(
                "the block table is not one that allocate gave and that is still the caller's",
                now_true="no block has changed hands",
            )

    def _run_pending(self, requests: list[Request]) -> None:
        if not requests:
            return
        wanted = [self.pool.blocks_for(r.kv_tokens + 1) - len(r.blocks) for r in requests]
        fresh = self.pool.allocate(sum(max(0, count) for count in wanted))
        for request, count in zip(requests, wanted, strict=True):
            request.blocks += [fresh.pop() for _ in range(count)]
        spans = [Span(np.array([r.pending], np.int32), r.kv_tokens, r.table) for r in requests]
        for request, row in zip(requests, self._decoder.decode(spans), strict=True):
            request.kv_tokens += 1
            request.pending, request.last_logits = None, self._decoder.logits(row)


def _check_layout(model: Model, layouts: Sequence[PoolLayout]) -> None:
    config = model.config
    found = {
        (t.layer, t.role, head, t.head_dim)
        for layout in layouts
        for t in layout.groups[0].tensors
        for head in range(t.head_start, t.head_stop)
    }
    wanted = {
        (layer, role, head, config.head_dim)
        for layer in range(config.layers)
        for role in (Role.KEY, Role.VALUE)
        for head in range(config.kv_heads)
    }
    if found != wanted:
        raise LocalError(
            f"the layout is not that of {model.name}: {config.layers} layers, each with key and value of"
            f" {config.kv_heads} heads of {config.head_dim}"
        )
