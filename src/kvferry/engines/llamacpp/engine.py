"""The llama.cpp engine: requests as sequences of one context, staged in a pool when they move."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.grammar import grammar_kinds
from kvferry.engines.llamacpp.blob import Attention, Part, build
from kvferry.engines.llamacpp.form import LAYOUT
from kvferry.engines.llamacpp.model import LlamaCppModel
from kvferry.engines.llamacpp.staging import Placements, Staging
from kvferry.engines.local import Built
from kvferry.engines.record import Cache
from kvferry.engines.request import Request
from kvferry.engines.sampler import Sampler
from kvferry.engines.staged import StagedEngine
from kvferry.errors import CapacityError, LocalError
from kvferry.layout import BlockTable, GroupLayout, PoolLayout, Role
from kvferry.state import (
    Conversion,
    ExecutionState,
    GroupBlocks,
    GroupNeed,
    ImportReport,
    Placement,
    Requirements,
    Rng,
    RngKind,
    SamplingParameters,
    SequencePosition,
    TensorKey,
    pack_ids,
    unpack_ids,
)

__all__ = ["LlamaCppEngine"]


class LlamaCppEngine(StagedEngine):
    """One process, one sequence a decode call. Sampling is kvferry's own: llama.cpp's cannot be carried.

    Args:
        model: see ``LlamaCppModel``; this engine is the only one that uses its context.
        layout: the model's own, by its ``layout``.
        memory: uint8, flat, at least ``layout.nbytes``; allocated here when None.

    Where cells lie decides the order of sums. Each request has a stream of its own, and an import
    puts the tokens into the same order of cells. A window that has dropped tokens leaves gaps that
    an import does not have, and several threads then share the cells out otherwise: with a window
    and more than one thread ``bits`` are refused. Not for two threads at once.
    """

    def __init__(
        self, model: LlamaCppModel, layout: PoolLayout, memory: NDArray[np.uint8] | None = None
    ) -> None:
        super().__init__(model.vocab_size, model.max_context, model.tokenizer, layout, memory)
        self.model = model
        self._staging = Staging(model.form, layout, self.memory)
        self._free_sequences = list(range(model.options.sequences))
        self._sequences: dict[str, int] = {}
        self._placements: dict[tuple[str, int], Placements] = {}
        self._requirements = self._needs()

    def requirements(self) -> Requirements:
        """What this engine needs to start a request, from the state that its model wrote."""
        return self._requirements

    def prefill(self, request_id: str) -> bool:
        """Compute the whole prompt."""
        request = self.request(request_id)
        if request.is_prefilled:
            raise LocalError("the prompt is in already", request_id=request_id)
        logits = self.model.context.decode(self._sequences[request_id], request.ids, 0)
        request.kv_tokens, request.last_logits = len(request.ids), logits[-1]
        return True

    def close(self) -> None:
        """Free the context; no request can be used any more."""
        self.model.close()

    def _needs(self) -> Requirements:
        model = self.model
        moves_with_threads = model.context.window is not None and model.options.threads > 1
        return Requirements(
            fingerprint=model.fingerprint(),
            layers=tuple(model.form.layers),
            cache=model.form.needs(),
            groups=tuple(GroupNeed.of(group, layout=LAYOUT) for group in self.layout.groups),
            rng_kinds=(RngKind.PHILOX,),
            grammar_kinds=grammar_kinds(),
            placement=Placement.UNCONTROLLED if moves_with_threads else Placement.RESTORABLE,
            proven=(Conversion.LAYOUT, Conversion.BLOCK_TOKENS),
        )

    def _make_sampler(
        self,
        sampling: SamplingParameters,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        rng: Rng | None,
    ) -> Sampler:
        return Sampler.continued(sampling, self.vocab_size, prompt_ids, output_ids, rng)

    def _admit(self, request: Request) -> None:
        self._sequences[request.request_id] = self._take_sequence()

    def _take_sequence(self) -> int:
        if not self._free_sequences:
            raise CapacityError(
                f"all {self.model.options.sequences} sequences of the context are in use",
                now_true="nothing was taken",
                next_step="release a finished request, or give the context more sequences",
            )
        return self._free_sequences.pop()

    def _run_pending(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.pending is not None
            sequence = self._sequences[request.request_id]
            logits = self.model.context.decode(sequence, [request.pending], request.kv_tokens)
            request.kv_tokens += 1
            request.pending, request.last_logits = None, logits[-1]

    def _stage(self, request: Request, tables: BlockTables) -> None:
        parts = self.model.taken_apart(self._sequences[request.request_id])
        key = (request.request_id, request.kv_tokens)
        self._placements[key] = self._staging.store(parts, tables, request.kv_tokens)

    def _cache_of(self, request: Request) -> Cache:
        tables = self.tables(request.request_id)
        placements = self._placements[request.request_id, request.kv_tokens]
        form, tokens = self.model.form, request.kv_tokens
        return Cache(
            layers=form.layer_states(tokens),
            tensors=form.entries(tokens),
            blocks=tuple(
                _group_blocks(group, table, tokens, placements.get(group.name))
                for group, table in zip(self.layout.groups, tables, strict=True)
            ),
        )

    def _build(self, state: ExecutionState, tables: BlockTables) -> Built:
        tokens = state.kv_tokens
        placements = {
            blocks.group: unpack_ids(blocks.placement).astype(np.intp)
            for blocks in state.blocks
            if blocks.placement is not None
        }
        for group in self.layout.groups:  # only bits need the order that it had
            kept = tokens if group.window is None else min(tokens, group.window)
            placements.setdefault(group.name, np.arange(kept))
        self._staging.check_placements(placements, tokens)
        parts = self._staging.load(tables, tokens, placements)
        sequence = self._take_sequence()
        try:
            # The scratch sequence is empty and nobody's; it becomes the request's when all is well.
            data = build(parts)
            taken = self.model.context.read_in(sequence, data)
            same = taken == len(data) and self._is_there(sequence, parts)
            report = ImportReport(
                given_nbytes=len(data),
                accepted_nbytes=taken if same else 0,
                positions=self._positions(sequence, tokens),
            )
        except BaseException:
            self._drop(sequence)
            raise
        return Built(report, self._recurrent(parts), sequence)

    def _is_there(self, sequence: int, parts: tuple[Part, ...]) -> bool:
        """Read back: what llama.cpp writes of it now is what was given, byte by byte."""
        return np.array_equal(build(self.model.taken_apart(sequence)), build(parts))

    def _positions(self, sequence: int, tokens: int) -> tuple[SequencePosition, ...]:
        """By llama.cpp's own word, which counts for all groups together."""
        span = self.model.context.span(sequence)
        reached = None if span is None else span[1] + 1
        return tuple(
            SequencePosition(
                group=group.name,
                first_token=None if reached is None else max(0, reached - (group.window or tokens)),
                num_tokens=reached,
            )
            for group in self.layout.groups
        )

    def _recurrent(self, parts: tuple[Part, ...]) -> dict[TensorKey, NDArray[np.generic]]:
        found: dict[TensorKey, NDArray[np.generic]] = {}
        for form in self.model.form.tensors:
            part = parts[form.at[0]]
            if form.role in (Role.CONV, Role.SSM) and not isinstance(part, Attention):
                found[form.key] = part.rows[form.at[2]].data.view(form.dtype)
        return found

    def _discard(self, built: Built) -> None:
        self._drop(built.own)

    def _show(self, request: Request, built: Built, tables: BlockTables) -> None:
        self._sequences[request.request_id] = built.own
        self._release_tables(tables)  # the rows are in llama.cpp's memory now

    def _forget(self, request: Request) -> None:
        super()._forget(request)
        self._drop(self._sequences.pop(request.request_id))
        for key in [key for key in self._placements if key[0] == request.request_id]:
            del self._placements[key]

    def _drop(self, sequence: int) -> None:
        self.model.context.clear(sequence)
        self._free_sequences.append(sequence)


def _group_blocks(
    group: GroupLayout, table: BlockTable, tokens: int, placement: NDArray[np.intp] | None
) -> GroupBlocks:
    ids = table.ids
    if group.block_size is not None:
        ids = ids[: -(-tokens // group.block_size) - table.first_block]
    return GroupBlocks(
        group=group.name,
        block_tokens=group.block_size,
        layout=LAYOUT,
        first_logical_block=table.first_block,
        ids=pack_ids(ids),
        placement=None if placement is None else pack_ids(placement),
    )
