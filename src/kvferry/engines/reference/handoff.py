"""Execution state out of a request of the reference engine, and a request out of a state."""

from __future__ import annotations

import math
import secrets
import time
from functools import cache

import msgspec
import numpy as np

from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.request import Request
from kvferry.engines.reference.sampler import Sampler
from kvferry.engines.reference.text import OutputText
from kvferry.engines.reference.weights import Model
from kvferry.errors import IncompatibleError
from kvferry.layout import ITEMSIZE, BlockTable, LayerKind, PoolLayout
from kvferry.state import (
    Axis,
    Conversion,
    Exactness,
    ExecutionState,
    Fingerprint,
    GroupBlocks,
    GroupNeed,
    ImportReport,
    InlineTensor,
    LayerNeed,
    LayerState,
    Parallel,
    Positions,
    RankPart,
    Replay,
    Requirements,
    Rng,
    RngKind,
    SequencePosition,
    TensorEntry,
    TensorNeed,
    TextPosition,
    Tokens,
    Usage,
    config_digest,
    ids_digest,
    pack_ids,
    probe_digest,
    probe_token_ids,
    unpack_ids,
)

__all__ = ["export_state", "rebuild", "replay_of", "report_of", "requirements"]

ENGINE = "kvferry-reference"
_LEASE_MS = 30_000
_AXES = (Axis.TOKEN, Axis.HEAD, Axis.DIM)


def requirements(model: Model, pool: PagedPool) -> Requirements:
    """What this engine needs to start a request, from the model's configuration and the pool's dtype.

    Layout, block size and the split over ranks are proven to keep the bits: K and V are read into
    one order first.
    """
    config, group = model.config, pool.group
    shape = (0, config.kv_heads, config.head_dim)
    return Requirements(
        fingerprint=_fingerprint(model, pool),
        layers=tuple(LayerNeed(layer=layer, kind=LayerKind.FULL) for layer in range(config.layers)),
        cache=tuple(
            TensorNeed(layer=t.layer, role=t.role, dtype=t.dtype, axes=_AXES, shape=shape, group=group.name)
            for t in pool.tensors.values()
        ),
        groups=(GroupNeed(group=group.name, block_tokens=pool.block_size, layout=_order(pool)),),
        rng_kinds=(RngKind.PHILOX,),
        proven=(Conversion.LAYOUT, Conversion.BLOCK_TOKENS, Conversion.PARALLEL),
    )


def export_state(
    request: Request, pool: PagedPool, fingerprint: Fingerprint, exactness: Exactness
) -> ExecutionState:
    """All of a prefilled, unfinished request but its KV bytes. Attempt 0, a fresh id, 30 s of lease."""
    shape = (request.kv_tokens, *pool.row_shape)
    covered = BlockTable(0, request.table.ids[: pool.blocks_for(request.kv_tokens)])
    return ExecutionState(
        transfer_id=secrets.token_bytes(16),
        request_id=request.request_id,
        attempt=0,
        created_unix_ns=time.time_ns(),
        lease_ms=_LEASE_MS,
        exactness=exactness,
        fingerprint=fingerprint,
        layers=tuple(
            LayerState(layer=layer, kind=LayerKind.FULL)
            for layer in sorted({layer for layer, _ in pool.tensors})
        ),
        tensors=tuple(
            TensorEntry(
                layer=t.layer, role=t.role, dtype=t.dtype, axes=_AXES, shape=shape, group=pool.group.name
            )
            for t in pool.tensors.values()
        ),
        blocks=(GroupBlocks.of(pool.group.name, covered, block_tokens=pool.block_size, layout=_order(pool)),),
        kv_tokens=request.kv_tokens,
        tokens=_tokens(request),
        positions=Positions(next=request.kv_tokens),
        sampling=request.sampler.parameters,
        limits=request.limits_left(),
        rng=_rng(request),
        text=_text(request),
        usage=Usage(prompt_tokens=request.prompt_tokens),
    )


def rebuild(state: ExecutionState, table: BlockTable, model: Model) -> Request:
    """A request made of a state that passed the checks before the move, visible to nobody yet.

    Raises IncompatibleError for what this engine cannot continue though the record may hold it.
    """
    if state.text is None or state.positions != Positions(next=state.kv_tokens):
        raise IncompatibleError(
            "the reference engine needs the text position, and positions that count the tokens",
            request_id=state.request_id,
        )
    ids, border = unpack_ids(state.tokens.ids), state.tokens.prompt_tokens
    text = OutputText(model.tokenizer, state.limits.stop_strings)
    text.replay(ids[border:].tolist())
    sampling, draws, logits = state.sampling, 0, state.tokens.last_logits
    if state.rng is not None:
        sampling, draws = msgspec.structs.replace(sampling, seed=state.rng.seed), state.rng.draws
    return Request(
        request_id=state.request_id,
        ids=ids.tolist(),
        prompt_tokens=border,
        limits=state.limits,
        limits_from=len(ids) - border,
        sampler=Sampler(sampling, model.config.vocab_size, ids[:border], ids[border:], draws),
        text=text,
        blocks=table.ids.tolist(),
        kv_tokens=state.kv_tokens,
        pending=state.tokens.pending,
        last_logits=None if logits is None else np.array(logits.array(), np.float32),
    )


def report_of(request: Request, state: ExecutionState, pool: PagedPool) -> ImportReport:
    """For check 14: bytes that the state speaks of, and those that the request reaches in the pool."""
    reached = min(request.kv_tokens, len(request.blocks) * pool.block_size)
    nbytes_per_token = sum(pool.kv_heads * t.row_nbytes for t in pool.tensors.values())
    position = SequencePosition(group=pool.group.name, first_token=0, num_tokens=reached)
    return ImportReport(
        given_nbytes=sum(math.prod(t.shape) * ITEMSIZE[t.dtype] for t in state.tensors),
        accepted_nbytes=reached * nbytes_per_token,
        positions=(position,),
    )


def replay_of(request: Request) -> Replay:
    """For check 15: what sampler and text of the rebuilt request say of themselves."""
    tokens = _tokens(request)
    return Replay(
        tokens_digest=tokens.digest,
        prompt_tokens=tokens.prompt_tokens,
        rng=_rng(request),
        text=_text(request),
    )


def _tokens(request: Request) -> Tokens:
    ids, logits = pack_ids(request.ids), request.last_logits
    return Tokens(
        ids=ids,
        prompt_tokens=request.prompt_tokens,
        digest=ids_digest(ids),
        emitted_tokens=len(request.ids) - request.prompt_tokens,
        pending=request.pending,
        last_logits=None if logits is None else InlineTensor.of(logits),
    )


def _rng(request: Request) -> Rng | None:
    given = request.sampler.parameters
    if given.temperature == 0:
        return None
    return Rng(kind=RngKind.PHILOX, seed=given.seed, draws=request.sampler.draws)


def _text(request: Request) -> TextPosition:
    return TextPosition(emitted_chars=request.text.emitted_chars, tail=request.text.tail)


def _order(pool: PagedPool) -> str:
    tensor = pool.group.tensors[0]
    return "NHD" if tensor.token_stride >= tensor.head_stride else "HND"


def _fingerprint(model: Model, pool: PagedPool) -> Fingerprint:
    return Fingerprint(
        engine=ENGINE,
        build=_build(),
        weights=model.weights_digest,
        config=config_digest(msgspec.structs.asdict(model.config)),
        tokenizer=model.tokenizer.digest,
        vocab_size=model.config.vocab_size,
        max_context=model.config.max_context,
        probe=_probe(model, pool.group.tensors[0].dtype),
        parallel=_parallel(pool.layouts),
    )


def _parallel(layouts: tuple[PoolLayout, ...]) -> Parallel:
    """Ranks with equal layers are one stage's."""
    if len(layouts) == 1:
        return Parallel()
    stages = len({layout.layers for layout in layouts})
    ranks = []
    for rank, layout in enumerate(layouts):
        first = layout.groups[0].tensors[0]
        part = RankPart(
            rank=rank,
            first_layer=layout.layers[0],
            num_layers=len(layout.layers),
            first_kv_head=first.head_start,
            num_kv_heads=first.heads,
        )
        ranks.append(part)
    return Parallel(tp=len(layouts) // stages, pp=stages, ranks=tuple(ranks))


@cache
def _build() -> str:
    """NumPy, its BLAS and the vector instructions that it may use: they decide the bits of a product."""
    config = np.show_config(mode="dicts")
    blas = config["Build Dependencies"]["blas"]
    found = "+".join(config["SIMD Extensions"]["found"]) or "baseline"
    return f"numpy {np.__version__}, {blas['name']} {blas['version']}, {found}"


def _probe(model: Model, dtype: str) -> str:
    """The numerics probe, with K and V stored as the pool stores them, but in a small pool apart."""
    config, probe = model.config, probe_token_ids(model.config.vocab_size)
    layout = PoolLayout.paged(
        range(config.layers),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        block_size=len(probe.prefill) + 1,
        num_blocks=1,
    )
    decoder = Decoder(model, PagedPool(layout))
    table = BlockTable(0, np.zeros(1, np.int32))
    rows = decoder.prefill(Span(probe.prefill, 0, table))
    step = decoder.decode([Span(np.array([probe.step], np.int32), len(probe.prefill), table)])
    return probe_digest([decoder.logits(row) for row in (*rows, *step)])
