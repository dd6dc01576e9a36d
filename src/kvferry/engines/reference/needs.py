"""What the reference engine needs to start a request, and who it is: all from its own configuration."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np

from kvferry.engines.grammar import grammar_kinds
from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.speculative import Drafter
from kvferry.engines.reference.weights import Model
from kvferry.layout import BlockTable, LayerKind, PoolLayout
from kvferry.state import (
    Axis,
    Conversion,
    DraftFingerprint,
    DraftNeed,
    Fingerprint,
    GroupNeed,
    LayerNeed,
    Parallel,
    RankPart,
    Requirements,
    RngKind,
    TensorNeed,
    TokenSource,
    config_digest,
    probe_digest,
    probe_token_ids,
)

__all__ = ["requirements"]

ENGINE = "kvferry-reference"
_AXES = (Axis.TOKEN, Axis.HEAD, Axis.DIM)


def requirements(model: Model, pool: PagedPool, drafter: Drafter | None) -> Requirements:
    """What this engine needs to start a request, from the model's configuration and the pool's dtype.

    Layout, block size and the split over ranks are proven to keep the bits: K and V are read into
    one order first.
    """
    name = pool.group.name
    groups = [GroupNeed(group=name, block_tokens=pool.block_size, layout=_order(pool))]
    if drafter is not None:
        groups.append(msgspec.structs.replace(groups[0], group=drafter.group, covers=TokenSource.DRAFT))
    return Requirements(
        fingerprint=_fingerprint(model, pool),
        layers=_layer_needs(pool, name),
        cache=_tensor_needs(pool, name),
        groups=tuple(groups),
        rng_kinds=(RngKind.PHILOX,),
        grammar_kinds=grammar_kinds(),
        draft=None if drafter is None else _draft_need(model, pool, drafter),
        proven=(Conversion.LAYOUT, Conversion.BLOCK_TOKENS, Conversion.PARALLEL),
    )


def _draft_need(model: Model, pool: PagedPool, drafter: Drafter) -> DraftNeed:
    """The draft model is as many of the first layers of the same weights; what a round is changes draws."""
    config = msgspec.structs.asdict(model.config) | {"layers": len(drafter.layers)}
    return DraftNeed(
        method=drafter.method,
        fingerprint=DraftFingerprint(weights=model.weights_digest, config=config_digest(config)),
        layers=_layer_needs(pool, drafter.group),
        tensors=_tensor_needs(pool, drafter.group),
        tokens_per_round=drafter.num_drafts,
    )


def _layer_needs(pool: PagedPool, group: str) -> tuple[LayerNeed, ...]:
    layers = sorted({layer for layer, _ in pool.tensors[group]})
    return tuple(LayerNeed(layer=layer, kind=LayerKind.FULL) for layer in layers)


def _tensor_needs(pool: PagedPool, group: str) -> tuple[TensorNeed, ...]:
    shape = (0, *pool.row_shape)
    return tuple(
        TensorNeed(layer=t.layer, role=t.role, dtype=t.dtype, axes=_AXES, shape=shape, group=group)
        for t in pool.tensors[group].values()
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
