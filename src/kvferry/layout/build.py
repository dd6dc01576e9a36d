"""Makes the layouts that engines use most, so that nobody writes strides by hand."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.errors import InputError
from kvferry.layout.bounds import MAX_NBYTES, check_int
from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout
from kvferry.layout.words import ITEMSIZE, LayerKind, Role

__all__ = ["beside", "paged_pool"]

AXIS_ORDERS = ("NHD", "HND")


def paged_pool(
    layers: tuple[int, ...],
    *,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    block_size: int,
    num_blocks: int,
    axis_order: str,
    joined_kv: bool,
    cross_layer: bool,
    head_start: int,
    alignment: int,
    name: str,
    window: int | None,
    transposed_keys: bool,
) -> PoolLayout:
    """See ``PoolLayout.paged``."""
    if axis_order not in AXIS_ORDERS:
        raise InputError(f"axis_order: {axis_order!r} is not one of {', '.join(AXIS_ORDERS)}")
    if dtype not in ITEMSIZE:
        raise InputError(f"dtype: {dtype!r} is not known; known are {', '.join(ITEMSIZE)}")
    if not layers:
        raise InputError("layers: empty")
    _check_counts(kv_heads, head_dim, block_size, num_blocks, alignment)
    if transposed_keys and axis_order != "HND":
        raise InputError("transposed_keys: only blocks of order HND keep a head's keys together")
    itemsize = ITEMSIZE[dtype]
    row = head_dim * itemsize
    token_stride, head_stride = (kv_heads * row, row) if axis_order == "NHD" else (row, block_size * row)
    body = block_size * kv_heads * row
    roles = (Role.KEY, Role.VALUE)
    block_stride = body * (len(layers) if cross_layer else 1) * (len(roles) if joined_kv else 1)
    region = -(-num_blocks * block_stride // alignment) * alignment
    tensors = []
    for i, layer in enumerate(layers):
        for j, role in enumerate(roles):
            # The index of this tensor's region, and its place inside a block of that region.
            outer = (0 if cross_layer else i) * (1 if joined_kv else len(roles)) + (0 if joined_kv else j)
            inner = (i if cross_layer else 0) * (len(roles) if joined_kv else 1) + (j if joined_kv else 0)
            is_transposed = transposed_keys and role is Role.KEY
            tensors.append(
                TensorLayout(
                    layer,
                    role,
                    dtype,
                    offset=outer * region + inner * body,
                    block_stride=block_stride,
                    token_stride=itemsize if is_transposed else token_stride,
                    head_stride=head_stride,
                    heads=kv_heads,
                    head_dim=head_dim,
                    head_start=head_start,
                    dim_stride=block_size * itemsize if is_transposed else 0,
                )
            )
    regions = (1 if cross_layer else len(layers)) * (1 if joined_kv else len(roles))
    kind = LayerKind.FULL if window is None else LayerKind.SLIDING
    group = GroupLayout(name, kind, block_size, num_blocks, tuple(tensors), window)
    return PoolLayout((group,), regions * region)


def _check_counts(kv_heads: int, head_dim: int, block_size: int, num_blocks: int, alignment: int) -> None:
    for field, value in (
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("block_size", block_size),
        ("num_blocks", num_blocks),
        ("alignment", alignment),
    ):
        check_int(field, value, 1, MAX_NBYTES)


def beside(pools: Sequence[PoolLayout], alignment: int) -> PoolLayout:
    """See ``PoolLayout.beside``."""
    check_int("alignment", alignment, 1, MAX_NBYTES)
    groups: list[GroupLayout] = []
    start = 0
    for pool in pools:
        for group in pool.groups:
            moved = tuple(
                msgspec.structs.replace(tensor, offset=tensor.offset + start) for tensor in group.tensors
            )
            groups.append(msgspec.structs.replace(group, tensors=moved))
        start += -(-pool.nbytes // alignment) * alignment
    return PoolLayout(tuple(groups), start)
