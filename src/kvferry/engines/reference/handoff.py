"""What the reference engine says of its own cache and drafts in a state, and what it reads from one."""

from __future__ import annotations

import math

import numpy as np

from kvferry.engines.record import Cache
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.speculative import DraftToken, Round
from kvferry.engines.request import Request
from kvferry.errors import CorruptError, IncompatibleError
from kvferry.layout import ITEMSIZE, BlockTable
from kvferry.state import (
    Draft,
    DraftNeed,
    ExecutionState,
    GroupBlocks,
    ImportReport,
    InlineTensor,
    LayerNeed,
    LayerState,
    Requirements,
    SequencePosition,
    TensorEntry,
    TensorNeed,
    pack_ids,
    unpack_ids,
)

__all__ = ["describe_cache", "report_of", "round_of"]


def describe_cache(request: Request, own: Round | None, pool: PagedPool, local: Requirements) -> Cache:
    """The request's cache, which lies in the pool already, by what this engine itself needs of one."""
    covered = BlockTable(0, request.table.ids[: pool.blocks_for(request.kv_tokens)])
    return Cache(
        layers=_layers(local.layers),
        tensors=_tensors(local.cache, request.kv_tokens),
        blocks=tuple(
            GroupBlocks.of(need.group, covered, block_tokens=need.block_tokens, layout=need.layout)
            for need in local.groups
        ),
        draft=None if local.draft is None or own is None else _draft(request, own, local.draft),
    )


def report_of(table: BlockTable, state: ExecutionState, pool: PagedPool) -> ImportReport:
    """For check 14: bytes that the state speaks of, and those that its blocks reach in the pool."""
    reached = min(state.kv_tokens, len(table.ids) * pool.block_size)
    entries = state.tensors + (() if state.draft is None else state.draft.tensors)
    rows = [pool.kv_heads * t.row_nbytes for tensors in pool.tensors.values() for t in tensors.values()]
    return ImportReport(
        given_nbytes=sum(math.prod(entry.shape) * ITEMSIZE[entry.dtype] for entry in entries),
        accepted_nbytes=reached * sum(rows),
        positions=tuple(
            SequencePosition(group=name, first_token=0, num_tokens=reached) for name in pool.tensors
        ),
    )


def round_of(state: ExecutionState, vocab_size: int) -> Round:
    """The drafts that are pending, with what verifies them, or none between rounds.

    Raises IncompatibleError for what this engine cannot continue though the record may hold it.
    """
    draft = state.draft
    ids = [] if draft is None else unpack_ids(draft.tokens).tolist()
    if draft is None or draft.kv_tokens != state.kv_tokens or (ids and state.tokens.pending is None):
        raise IncompatibleError(
            "draft: this engine needs a draft cache of as many tokens as the cache, and drafts that follow"
            " a pending token",
            request_id=state.request_id,
        )
    if not ids or state.sampling.temperature == 0:
        return Round(state.kv_tokens, [DraftToken(token, None) for token in ids])
    probs, shape = draft.probs, (len(ids), vocab_size)
    if probs is None or (probs.dtype, probs.shape) != ("float64", shape):
        raise IncompatibleError(f"draft.probs: not float64{list(shape)}", request_id=state.request_id)
    rows = probs.array().astype(np.float64)
    if not ((rows >= 0) & (rows <= 1)).all():
        raise CorruptError("draft.probs: not probabilities", request_id=state.request_id)
    return Round(state.kv_tokens, [DraftToken(token, row) for token, row in zip(ids, rows, strict=True)])


def _layers(needs: tuple[LayerNeed, ...]) -> tuple[LayerState, ...]:
    return tuple(LayerState(layer=need.layer, kind=need.kind) for need in needs)


def _tensors(needs: tuple[TensorNeed, ...], tokens: int) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(
            layer=need.layer,
            role=need.role,
            dtype=need.dtype,
            axes=need.axes,
            shape=need.spec(tokens, 0).shape,
            group=need.group,
        )
        for need in needs
    )


def _draft(request: Request, own: Round, need: DraftNeed) -> Draft:
    """Rows of pending drafts are not of the state: decode computes them again, with the same bits."""
    probs = [draft.probs for draft in own.drafts if draft.probs is not None]
    return Draft(
        method=need.method,
        between_rounds=not own.drafts,
        fingerprint=need.fingerprint,
        tokens=pack_ids(own.tokens),
        probs=InlineTensor.of(np.stack(probs)) if probs else None,
        kv_tokens=request.kv_tokens,
        layers=_layers(need.layers),
        tensors=_tensors(need.tensors, request.kv_tokens),
    )
