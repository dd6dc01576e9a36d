"""Properties of ``kv_size`` that hold for every mixture of layer groups."""

from __future__ import annotations

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.model import LayerKind, ModelShape
from kvferry.size import KVSize, kv_size
from size_strategies import (
    GROWING,
    KINDS,
    Asked,
    asked,
    live_rows,
    rank_row_nbytes,
    row_nbytes,
    shapes,
)

MONOTONE_KINDS = tuple(kind for kind in KINDS if kind is not LayerKind.CHUNKED)


def size_of(
    shape: ModelShape, request: Asked, tokens: int | None = None, cached: int | None = None
) -> KVSize:
    return kv_size(
        shape,
        request.tokens if tokens is None else tokens,
        cached_tokens=request.cached if cached is None else cached,
        tp=request.tp,
        pp=request.pp,
        block_size=request.block,
    )


@given(shapes(), asked())
def test_logical_is_the_count_of_live_rows(shape: ModelShape, request: Asked) -> None:
    """``logical_bytes`` is what a walk over every layer and token finds still needed."""
    walked = sum(
        len(group.layers) * live_rows(group, request.tokens) * row_nbytes(group) for group in shape.groups
    )
    assert size_of(shape, request).logical_bytes == walked


@given(shapes(), asked())
def test_additive_over_layers(shape: ModelShape, request: Asked) -> None:
    """The size of a model is the sum of the sizes of its layers taken one by one."""
    whole = size_of(shape, request)
    parts = [
        size_of(
            msgspec.structs.replace(shape, groups=(msgspec.structs.replace(group, layers=(layer,)),)), request
        )
        for group in shape.groups
        for layer in group.layers
    ]
    for field in ("logical_bytes", "blocked_bytes", "allocated_bytes", "descriptors", "constant_bytes"):
        assert getattr(whole, field) == sum(getattr(part, field) for part in parts)
    assert whole.wire_bytes - whole.state_bytes == sum(part.wire_bytes - part.state_bytes for part in parts)
    assert whole.bytes_per_token == sum(part.bytes_per_token for part in parts)


@given(shapes(MONOTONE_KINDS), asked(), st.integers(1, 50))
def test_monotone_in_tokens(shape: ModelShape, request: Asked, more: int) -> None:
    """More tokens never make any of the sizes smaller (chunked local apart, whose chunks end)."""
    small = size_of(shape, request, cached=0)
    large = size_of(shape, request, tokens=request.tokens + more, cached=0)
    for field in ("logical_bytes", "blocked_bytes", "allocated_bytes", "wire_bytes", "descriptors"):
        assert getattr(small, field) <= getattr(large, field)


@given(shapes((LayerKind.CHUNKED,)), asked())
def test_a_chunk_is_never_more_than_full(shape: ModelShape, request: Asked) -> None:
    """Chunked local attention holds less than a chunk per layer, whatever the number of tokens."""
    for group, size in zip(shape.groups, size_of(shape, request).groups, strict=True):
        assert size.logical_bytes < group.limit_tokens * row_nbytes(group) * len(group.layers)


@given(shapes(), asked(), st.integers(0, 6), st.integers(0, 6))
def test_residual_and_cached_make_the_whole(
    shape: ModelShape, request: Asked, held_blocks: int, more_blocks: int
) -> None:
    """At block borders, what moves plus what decode holds is all; only what grows is ever held."""
    block = request.block or 4
    held, tokens = held_blocks * block, max((held_blocks + more_blocks) * block, 1)
    assume(held <= tokens)
    fitting = all(block % group.ratio == 0 for group in shape.groups)
    assume(fitting)
    residual, whole = (size_of(shape, request, tokens, cached) for cached in (held, 0))
    for i, group in enumerate(shape.groups):
        kept = 0
        if group.kind in GROWING and held:
            kept = size_of(shape, request, held, 0).groups[i].blocked_bytes
        assert residual.groups[i].wire_bytes + kept == whole.groups[i].wire_bytes


@given(shapes(), asked())
def test_cached_tokens_count_in_whole_blocks(shape: ModelShape, request: Asked) -> None:
    """Cached tokens past the last whole block change nothing."""
    block = request.block or 1
    floor = request.cached // block * block
    assert size_of(shape, request).wire_bytes == size_of(shape, request, cached=floor).wire_bytes


@given(shapes(), asked())
def test_ranks_hold_what_a_walk_over_heads_finds(shape: ModelShape, request: Asked) -> None:
    """Each rank holds its heads, replicated ones too; the ranks together are ``allocated_bytes``."""
    size = size_of(shape, request)
    for rank in range(request.tp):
        walked = sum(
            size.groups[i].blocked_bytes // row_nbytes(group) * rank_row_nbytes(group, rank, request.tp)
            for i, group in enumerate(shape.groups)
        )
        assert size.rank_bytes[rank] == walked
    assert size.allocated_bytes == sum(size.rank_bytes)
    assert size.allocated_bytes == sum(part.allocated_bytes for part in size.groups)


@given(shapes((LayerKind.FULL, LayerKind.WINDOW)), asked(), st.sampled_from((1, 2, 4, 8)))
def test_ranks_sum_to_replication_times_logical(shape: ModelShape, request: Asked, heads: int) -> None:
    """With ``h`` KV heads on ``tp`` ranks the ranks together hold max(1, tp / h) copies."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            tensors=tuple(msgspec.structs.replace(tensor, heads=heads) for tensor in group.tensors),
        )
        for group in shape.groups
    )
    shape = msgspec.structs.replace(shape, groups=groups)
    size = kv_size(shape, request.tokens, tp=request.tp)
    assert sum(size.rank_bytes) == max(1, request.tp // heads) * size.logical_bytes


@given(shapes(), asked(max_pp=8))
def test_stages_split_layers_and_nothing_else(shape: ModelShape, request: Asked) -> None:
    """Pipeline stages only distribute: the ranks of all stages hold what one stage would."""
    assume(request.pp <= shape.num_layers)
    size = size_of(shape, request)
    one_stage = size_of(shape, Asked(request.tokens, request.cached, request.block, request.tp, 1))
    assert len(size.rank_bytes) == request.tp * request.pp
    assert sum(size.rank_bytes) == sum(one_stage.rank_bytes)
    assert size.wire_bytes == one_stage.wire_bytes


@given(shapes(), asked())
def test_the_wire_never_carries_more_than_is_allocated(shape: ModelShape, request: Asked) -> None:
    """What crosses, the record apart, is at most one blocked copy, and that at most what ranks hold."""
    size = size_of(shape, request)
    assert size.wire_bytes - size.state_bytes <= size.blocked_bytes <= size.allocated_bytes
    assert size.logical_bytes <= size.blocked_bytes


@given(shapes(), asked())
def test_constant_and_slope_make_the_logical_size(shape: ModelShape, request: Asked) -> None:
    """constant + slope x tokens is the logical size, to within one compressed row; later chunks apart."""
    size = size_of(shape, request)
    for group, part in zip(shape.groups, size.groups, strict=True):
        if group.kind is LayerKind.CHUNKED and request.tokens >= group.limit_tokens:
            assert (part.constant_bytes, part.bytes_per_token) == (0, 0)
            continue
        rest = part.constant_bytes + part.bytes_per_token * request.tokens - part.logical_bytes
        row = len(group.layers) * row_nbytes(group) if group.kind is LayerKind.COMPRESSED else 1
        assert 0 <= rest < row


@given(shapes(), asked())
def test_a_full_hit_moves_what_never_shrinks(shape: ModelShape, request: Asked) -> None:
    """With everything cached at a block border, growing groups move nothing and all others move whole."""
    block = request.block or 1
    tokens = -(-request.tokens // block) * block
    assume(all(tokens % group.ratio == 0 for group in shape.groups))
    size = size_of(shape, request, tokens, tokens)
    for group, part in zip(shape.groups, size.groups, strict=True):
        assert part.wire_bytes == (0 if group.kind in GROWING else part.blocked_bytes)
