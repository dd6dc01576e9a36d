"""Model shape x tokens x dtype x ranks x blocks -> the five numbers of a request's state.

A size is a constant plus a slope per layer group and per rank. What is stored, what crosses
the wire and what is allocated differ, so five numbers are kept apart:

- ``logical_bytes``: the exact live state, one copy.
- ``blocked_bytes``: the same, attention rounded up to whole blocks.
- ``rank_bytes``: what each rank holds, blocks and replication included (index: stage * tp + rank).
- ``allocated_bytes``: their sum.
- ``wire_bytes``: what crosses: the blocks that decode does not hold, each byte once even where
  ranks replicate it, plus ``state_bytes`` for the record of the execution state. The record is in no
  pool: ``wire_bytes - state_bytes <= blocked_bytes <= allocated_bytes``, and for a short prompt
  ``wire_bytes`` alone may be more than all of them.

Prefix hits count in whole blocks and shrink only what grows with every token. Recurrent state,
cross attention and the tail of a window always move.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from itertools import accumulate, pairwise
from math import lcm

import msgspec

from kvferry.dtypes import SCALE_NBYTES, WIRE_FORMATS
from kvferry.errors import InputError
from kvferry.model import Growth, LayerGroup, LayerKind, ModelShape
from kvferry.model.row import Row, assumed_dtypes, resolve_dtypes, row_of, tp_error

__all__ = ["MAX_TOKENS", "GroupSize", "KVSize", "kv_size", "state_record_bytes"]

MAX_TOKENS = 10**12
MAX_RANKS = 10**5


class GroupSize(msgspec.Struct, frozen=True):
    """One layer group's share of a :class:`KVSize`.

    ``constant_bytes + bytes_per_token * tokens`` is ``logical_bytes`` at this number of tokens;
    a window counts as growing until it is full. Two exceptions: compressed rows follow the slope to
    within one row, and a chunk, once the first is over, comes and goes between nothing and
    ``limit_tokens`` rows, so it counts in neither.
    ``limit_tokens`` is the window or chunk, 0 where there is none; ``ratio`` the tokens per row.
    """

    kind: LayerKind
    is_draft: bool
    layers: int
    dtypes: tuple[str, ...]
    limit_tokens: int
    ratio: int
    logical_bytes: int
    blocked_bytes: int
    allocated_bytes: int
    wire_bytes: int
    descriptors: int
    constant_bytes: int
    bytes_per_token: int | float


class KVSize(msgspec.Struct, frozen=True):
    """The size of one request's state; the module's text defines the numbers.

    ``descriptors`` are contiguous pieces by the rule of ``kvferry.model.row``. ``block_size`` None
    means that nothing is paged: sizes are exact and each region of a layer is one piece.
    """

    model_type: str
    tokens: int
    cached_tokens: int
    block_size: int | None
    tp: int
    pp: int
    logical_bytes: int
    blocked_bytes: int
    rank_bytes: tuple[int, ...]
    allocated_bytes: int
    wire_bytes: int
    descriptors: int
    constant_bytes: int
    bytes_per_token: int | float
    state_bytes: int
    groups: tuple[GroupSize, ...]
    warnings: tuple[str, ...]


class _Request(msgspec.Struct, frozen=True):
    """What is asked, checked."""

    tokens: int
    cached_tokens: int
    block_size: int | None
    tp: int
    pp: int
    encoder_tokens: int
    wire_format: str | None


class _Rows(msgspec.Struct, frozen=True):
    """Rows of one layer: live, rounded up to blocks, to be moved; and its blocks, all and to be moved."""

    live: int
    blocked: int
    wire: int
    blocks: int
    wire_blocks: int


def kv_size(
    shape: ModelShape,
    tokens: int,
    *,
    cached_tokens: int = 0,
    kv_dtype: str | None = None,
    k_dtype: str | None = None,
    v_dtype: str | None = None,
    tp: int = 1,
    pp: int = 1,
    block_size: int | None = None,
    encoder_tokens: int | None = None,
    last_logits: bool = False,
    wire_format: str | None = None,
) -> KVSize:
    """The size of a request's state after ``tokens`` tokens, of which decode holds ``cached_tokens``.

    Args:
        shape: the model; :func:`kvferry.model.with_draft` adds a draft's cache.
        tokens: tokens with KV, prompt and output together; at least 1.
        cached_tokens: prefix tokens that decode holds; counted in whole blocks.
        kv_dtype: dtype of K and V; None or ``auto``: the config's own.
        k_dtype, v_dtype: the dtype of one side, over ``kv_dtype``.
        tp, pp: ranks. Heads divide over tp, or are replicated; layers are split over pp.
        block_size: tokens per block; None: not paged.
        encoder_tokens: length of what cross attention reads, where the model does not fix it.
        last_logits: the record carries a row of logits instead of a pending token.
        wire_format: what floating-point K and V cross as, of ``kvferry.dtypes.WIRE_FORMATS``.

    Raises InputError, which names the argument.
    """
    encoder = _encoder_tokens(shape, encoder_tokens)
    request = _Request(tokens, cached_tokens, block_size, tp, pp, encoder, wire_format)
    _check(shape, request)
    asked = (_asked("kv_dtype", kv_dtype), _asked("k_dtype", k_dtype), _asked("v_dtype", v_dtype))
    dtypes = resolve_dtypes(shape.dtype, *asked)
    logits = _logits_row(shape) if last_logits else 0
    starts, stages = _stage_starts(shape.num_layers, pp), [0] * pp
    groups = []
    num_layers = num_tensors = num_blocks = 0
    for group in shape.groups:
        own = dtypes if group.dtype is None else resolve_dtypes(group.dtype, *asked)
        row, rows = row_of(group.kind, group.tensors, own, tp, group.query_heads), _rows(group, request)
        if row is None:
            raise tp_error(shape.groups, group, tp)
        groups.append(_group_size(group, row, rows, request))
        num_layers += len(group.layers)
        num_tensors += len(group.layers) * len(group.tensors)
        num_blocks += rows.blocks
        for stage, layers in enumerate(_layers_by_stage(group.layers, starts)):
            stages[stage] += layers * rows.blocked * row.rank_nbytes
    state_bytes = state_record_bytes(
        tokens, layers=num_layers, tensors=num_tensors, blocks=num_blocks, logits=logits
    )
    assumed: tuple[str, ...] = ()
    if shape.dtype is None:
        assumed = assumed_dtypes(
            dtypes, tuple([tensor for g in shape.groups if g.dtype is None for tensor in g.tensors])
        )
    return _total(shape, request, stages, tuple(groups), state_bytes=state_bytes, assumed=assumed)


def state_record_bytes(tokens: int, *, layers: int, tensors: int, blocks: int, logits: int = 0) -> int:
    """Estimate of the execution state's record, encoded.

    4,096 for identity, fingerprints, sampling, RNG and text; 96 for each layer's entry and 120 for
    each tensor's; 4 for each token id, block id, and logit that travels. The fixed numbers are what
    records of real requests take as msgpack; a draft's probabilities are not in them.
    """
    return 4096 + 96 * layers + 120 * tensors + 4 * (tokens + blocks + logits)


def _total(
    shape: ModelShape,
    request: _Request,
    stages: list[int],
    groups: tuple[GroupSize, ...],
    *,
    state_bytes: int,
    assumed: tuple[str, ...],
) -> KVSize:
    tp = request.tp
    return KVSize(
        model_type=shape.model_type,
        tokens=request.tokens,
        cached_tokens=request.cached_tokens,
        block_size=request.block_size,
        tp=tp,
        pp=request.pp,
        logical_bytes=sum([g.logical_bytes for g in groups]),
        blocked_bytes=sum([g.blocked_bytes for g in groups]),
        rank_bytes=tuple([nbytes for nbytes in stages for _ in range(tp)]),
        allocated_bytes=tp * sum(stages),
        wire_bytes=sum([g.wire_bytes for g in groups]) + state_bytes,
        descriptors=sum([g.descriptors for g in groups]),
        constant_bytes=sum([g.constant_bytes for g in groups]),
        bytes_per_token=_slope(groups),
        state_bytes=state_bytes,
        groups=groups,
        warnings=shape.warnings + assumed,
    )


def _group_size(group: LayerGroup, row: Row, rows: _Rows, request: _Request) -> GroupSize:
    layers = len(group.layers)
    layer_row = layers * row.nbytes
    logical = rows.live * layer_row
    growth = group.kind.growth
    is_chunk = growth is Growth.CHUNK
    is_growing = growth in {Growth.TOKENS, Growth.COMPRESSED} or (
        growth in {Growth.WINDOW, Growth.CHUNK} and request.tokens < group.limit_tokens
    )
    return GroupSize(
        kind=group.kind,
        is_draft=group.is_draft,
        layers=layers,
        dtypes=row.dtypes,
        limit_tokens=group.limit_tokens,
        ratio=group.ratio,
        logical_bytes=logical,
        blocked_bytes=rows.blocked * layer_row,
        allocated_bytes=rows.blocked * layers * row.rank_nbytes * request.tp,
        wire_bytes=_wire_bytes(row, rows, request) * layers,
        descriptors=rows.wire_blocks * layers * row.pieces,
        constant_bytes=0 if is_growing or is_chunk else logical,
        bytes_per_token=_over(layer_row, group.ratio) if is_growing else 0,
    )


def _wire_bytes(row: Row, rows: _Rows, request: _Request) -> int:
    """What one layer sends."""
    if request.wire_format is None:
        return rows.wire * row.nbytes
    return rows.wire * row.narrow_nbytes + rows.wire_blocks * row.scaled_heads * SCALE_NBYTES


def _rows(group: LayerGroup, request: _Request) -> _Rows:
    """How many rows a layer of this group has. A block holds ``block_size`` tokens.

    A window's blocks are counted as one run from a block border. A pool that keeps blocks at
    their absolute positions touches at most one block more per layer.
    """
    tokens, block = request.tokens, request.block_size
    if block is not None and group.own_block is not None:
        block = group.own_block
    match group.kind.growth:
        case Growth.CONSTANT:
            return _Rows(1, 1, 1, 1, 1)
        case Growth.ENCODER:
            return _all_move(request.encoder_tokens, block)
        case Growth.WINDOW:
            return _all_move(min(tokens, group.limit_tokens), block)
        case Growth.CHUNK:
            return _all_move(tokens % group.limit_tokens, block)
    ratio = group.ratio
    live = tokens // ratio
    if block is None:
        wire = live - request.cached_tokens // ratio
        return _Rows(live, live, wire, 1, 1 if wire else 0)
    rows_per_block = -(-block // ratio)  # a block of fewer tokens than make a row holds one all the same
    blocks = -(-live // rows_per_block)
    held_blocks = request.cached_tokens // block * block // ratio // rows_per_block
    blocked, held = blocks * rows_per_block, held_blocks * rows_per_block
    return _Rows(live, blocked, blocked - held, blocks, blocks - held_blocks)


def _all_move(live: int, block: int | None) -> _Rows:
    blocks = _blocks(live, block)
    blocked = live if block is None else blocks * block
    return _Rows(live, blocked, blocked, blocks, blocks)


def _blocks(rows: int, block: int | None) -> int:
    """Blocks for so many rows; not paged: one piece, if there is anything."""
    return min(rows, 1) if block is None else -(-rows // block)


@lru_cache(maxsize=1024)
def _stage_starts(num_layers: int, pp: int) -> tuple[int, ...]:
    """First layer of each stage but the first.

    The rule is vLLM's (``get_pp_indices``): an even split, and the rest goes one each to the
    stages before the last, counted from the end, because the last stage has the logits too.
    """
    share, rest = divmod(num_layers, pp)
    sizes = [share + (pp - 1 - rest <= stage < pp - 1) for stage in range(pp)]
    return tuple(accumulate(sizes[:-1]))


def _layers_by_stage(layers: tuple[int, ...], starts: tuple[int, ...]) -> list[int]:
    """How many of these layers each stage has; a draft's layers are past the last, so on the last stage."""
    borders = [0, *[bisect_left(layers, start) for start in starts], len(layers)]
    return [after - before for before, after in pairwise(borders)]


def _check(shape: ModelShape, request: _Request) -> None:
    _check_range("tokens", request.tokens, 1, MAX_TOKENS)
    _check_range("cached_tokens", request.cached_tokens, 0, request.tokens)
    _check_range("tp", request.tp, 1, MAX_RANKS)
    _check_range("pp", request.pp, 1, shape.num_layers)
    if request.wire_format not in (None, *WIRE_FORMATS):
        raise InputError(f"wire_format: {request.wire_format!r} is not one of {', '.join(WIRE_FORMATS)}")
    if request.tp * request.pp > MAX_RANKS:
        raise InputError(f"tp: {request.tp} x pp {request.pp} is more than {MAX_RANKS} ranks")
    if request.block_size is not None:
        _check_range("block_size", request.block_size, 1, MAX_TOKENS)


def _check_range(name: str, value: int, low: int, high: int) -> None:
    # A bool is an int to Python, and a float could be nan: both are refused here by type.
    if type(value) is not int:
        raise InputError(f"{name}: {value!r} is not a whole number")
    if not low <= value <= high:
        raise InputError(f"{name}: {value} is not from {low} to {high}")


def _encoder_tokens(shape: ModelShape, encoder_tokens: int | None) -> int:
    has_cross = any(group.kind is LayerKind.CROSS for group in shape.groups)
    if encoder_tokens is not None:
        _check_range("encoder_tokens", encoder_tokens, 0, MAX_TOKENS)
        if not has_cross:
            raise InputError(f"encoder_tokens: {shape.model_type} has no cross attention")
        return encoder_tokens
    if not has_cross:
        return 0
    if shape.encoder_tokens is None:
        raise InputError(
            f"encoder_tokens: needed; {shape.model_type} has cross attention and does not fix its length"
        )
    return shape.encoder_tokens


def _logits_row(shape: ModelShape) -> int:
    if shape.vocab_size is None:
        raise InputError(
            "last_logits: the config has no vocab_size, so the length of a logits row is not known"
        )
    return shape.vocab_size


def _asked(name: str, dtype: str | None) -> str | None:
    """The dtype that was asked for; ``auto``, the word of engines for the model's own, is none."""
    if dtype is not None and not isinstance(dtype, str):
        raise InputError(f"{name}: {dtype!r} is not the name of a dtype")
    return None if dtype == "auto" else dtype


def _slope(groups: tuple[GroupSize, ...]) -> int | float:
    """Bytes per token of all groups: exact where that is a whole number."""
    growing = [group for group in groups if group.bytes_per_token]
    whole = [slope for group in growing if isinstance(slope := group.bytes_per_token, int)]
    if len(whole) == len(growing):
        return sum(whole)
    common = lcm(*[group.ratio for group in growing])
    parts = [round(group.bytes_per_token * group.ratio) * (common // group.ratio) for group in growing]
    return _over(sum(parts), common)


def _over(value: int, parts: int) -> int | float:
    return value // parts if value % parts == 0 else value / parts
