"""What the reference engine needs of a state, and what it says of its own cache in one."""

from __future__ import annotations

import math
from functools import cache

import msgspec
import numpy as np

from kvferry.engines.record import Cache
from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.weights import Model
from kvferry.engines.request import Request
from kvferry.layout import ITEMSIZE, BlockTable, LayerKind, PoolLayout
from kvferry.state import (
    Axis,
    Conversion,
    ExecutionState,
    Fingerprint,
    GroupBlocks,
    GroupNeed,
    ImportReport,
    LayerNeed,
    LayerState,
    Parallel,
    RankPart,
    Requirements,
    RngKind,
    SequencePosition,
    TensorEntry,
    TensorNeed,
    config_digest,
    probe_digest,
    probe_token_ids,
)

__all__ = ["describe_cache", "report_of", "requirements"]

ENGINE = "kvferry-reference"
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


def describe_cache(request: Request, pool: PagedPool) -> Cache:
    """The request's cache, which lies in the pool already."""
    shape = (request.kv_tokens, *pool.row_shape)
    covered = BlockTable(0, request.table.ids[: pool.blocks_for(request.kv_tokens)])
    return Cache(
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
    )


def report_of(table: BlockTable, state: ExecutionState, pool: PagedPool) -> ImportReport:
    """For check 14: bytes that the state speaks of, and those that its blocks reach in the pool."""
    reached = min(state.kv_tokens, len(table.ids) * pool.block_size)
    nbytes_per_token = sum(pool.kv_heads * t.row_nbytes for t in pool.tensors.values())
    position = SequencePosition(group=pool.group.name, first_token=0, num_tokens=reached)
    return ImportReport(
        given_nbytes=sum(math.prod(t.shape) * ITEMSIZE[t.dtype] for t in state.tensors),
        accepted_nbytes=reached * nbytes_per_token,
        positions=(position,),
    )


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
