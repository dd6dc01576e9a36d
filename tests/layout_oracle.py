"""What a copy between two pools means, written as naive loops over the byte formula.

Shares nothing with kvferry.layout but its records: one dictionary entry a row, one pair a byte.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from kvferry.layout import BlockTable, CopyPlan, GroupLayout, LayerKind, PieceTable, PoolLayout, TensorLayout

Pair = tuple[int, int]
RowKey = tuple[int, str, int, int, int]  # layer, role, part, entry, head


def live(
    group: GroupLayout,
    table: BlockTable,
    tokens: int,
    first_token: int,
    token_range: tuple[int, int] | None = None,
) -> range:
    """Entries that move, by the rules of each kind of group."""
    start, stop = token_range or (0, tokens)
    if group.block_size is None:
        return range(len(table.ids) if stop == tokens else 0)
    if group.kind is LayerKind.CROSS:
        return range(table.tokens if stop == tokens else 0)
    if group.kind is LayerKind.SLIDING:
        return range(max(tokens - group.window, start), stop)
    # An entry of several tokens is computed with the last of them.
    return range(max(first_token, start) // group.tokens_per_entry, stop // group.tokens_per_entry)


def row_at(group: GroupLayout, tensor: TensorLayout, table: BlockTable, entry: int, head: int) -> int:
    """Byte of (entry, head), head counted in this tensor."""
    per_block = 1 if group.block_size is None else group.block_size // group.tokens_per_entry
    block = int(table.ids[entry // per_block - table.first_block])
    inside = entry % per_block
    return (
        tensor.offset + block * tensor.block_stride + inside * tensor.token_stride + head * tensor.head_stride
    )


def rows(
    layout: PoolLayout,
    tables: Sequence[BlockTable],
    tokens: int,
    first_token: int = 0,
    token_range: tuple[int, int] | None = None,
) -> dict[RowKey, int]:
    found = {}
    for group, table in zip(layout.groups, tables, strict=True):
        for tensor in group.tensors:
            for entry, head in itertools.product(
                live(group, table, tokens, first_token, token_range), range(tensor.heads)
            ):
                key = (tensor.layer, tensor.role.value, tensor.part, entry, tensor.head_start + head)
                found[key] = row_at(group, tensor, table, entry, head)
    return found


SIZE = {"float32": 4, "float16": 2, "bfloat16": 2, "uint8": 1}


def row_bytes(tensor: TensorLayout) -> list[int]:
    """The bytes of one row, counted from its first, element by element."""
    size = SIZE[tensor.dtype]
    step = tensor.dim_stride or size
    return [element * step + byte for element in range(tensor.head_dim) for byte in range(size)]


def row_forms(layout: PoolLayout) -> dict[tuple[int, str, int], list[int]]:
    return {
        (tensor.layer, tensor.role.value, tensor.part): row_bytes(tensor)
        for group in layout.groups
        for tensor in group.tensors
    }


def byte_pairs(
    src_rows: dict[RowKey, int], dst_rows: dict[RowKey, int], src: PoolLayout, dst: PoolLayout
) -> set[Pair]:
    """(source byte, destination byte) of every byte that both sides have."""
    forms, others = row_forms(src), row_forms(dst)
    return {
        (src_rows[key] + i, dst_rows[key] + j)
        for key in src_rows.keys() & dst_rows.keys()
        for i, j in zip(forms[key[:3]], others[key[:3]], strict=True)
    }


def plan_pairs(plan: CopyPlan) -> list[Pair]:
    """Every byte that a plan copies, in plan order."""
    return [
        (src + i, dst + i)
        for src, dst, nbytes in zip(
            plan.src_offset.tolist(), plan.dst_offset.tolist(), plan.nbytes.tolist(), strict=True
        )
        for i in range(nbytes)
    ]


def source_order(
    layout: PoolLayout, tables: Sequence[BlockTable], tokens: int, chunk_nbytes: int
) -> dict[int, tuple[int, ...]]:
    """Byte of the source -> its place in source order, as a key that sorts."""
    places = {}
    for group_index, (group, table) in enumerate(zip(layout.groups, tables, strict=True)):
        for layer in {tensor.layer for tensor in group.tensors}:
            for cluster in clusters(group, layer):
                for tensor in cluster:
                    for entry in live(group, table, tokens, 0):
                        for head in range(tensor.heads):
                            byte = row_at(group, tensor, table, entry, head)
                            unit = chunk_unit(group, cluster, entry, chunk_nbytes)
                            for i in row_bytes(tensor):
                                places[byte + i] = (group_index, layer, cluster[0].offset, *unit, byte + i)
    return places


def clusters(group: GroupLayout, layer: int) -> list[list[TensorLayout]]:
    """Tensors of a layer whose bytes inside a block touch or interleave."""
    found: list[list[TensorLayout]] = []
    stop = None
    for tensor in sorted((t for t in group.tensors if t.layer == layer), key=lambda t: t.offset):
        per_block = 1 if group.block_size is None else group.block_size // group.tokens_per_entry
        rows_in_block = [
            tensor.offset + entry * tensor.token_stride + head * tensor.head_stride
            for entry in range(per_block)
            for head in range(tensor.heads)
        ]
        joins = found and group.block_size is not None and tensor.offset <= stop
        if joins and tensor.block_stride == found[-1][0].block_stride:
            found[-1].append(tensor)
        else:
            found.append([tensor])
            stop = 0
        stop = max(stop, max(rows_in_block) + max(row_bytes(tensor)) + 1)
    return found


def chunk_unit(
    group: GroupLayout, cluster: Sequence[TensorLayout], entry: int, chunk_nbytes: int
) -> tuple[int, int]:
    """(block, step inside the block): the bytes of one unit are ordered by address."""
    if group.block_size is None:
        return entry, 0
    per_block = group.block_size // group.tokens_per_entry
    entry_nbytes = sum(tensor.heads * tensor.row_nbytes for tensor in cluster)
    if per_block * entry_nbytes <= chunk_nbytes:
        return entry // per_block, 0
    return entry // per_block, entry % per_block // max(1, chunk_nbytes // entry_nbytes)


def copy_by_plan(plan: CopyPlan, src: np.ndarray, dst: np.ndarray) -> None:
    for a, b, n in zip(plan.src_offset, plan.dst_offset, plan.nbytes, strict=True):
        dst[b : b + n] = src[a : a + n]


def chunks(table: PieceTable | CopyPlan, memory: np.ndarray, *, at: str) -> dict[int, bytes]:
    """chunk id -> its bytes in plan order, read at ``at`` (offset, src_offset or dst_offset)."""
    return {
        chunk_id: b"".join(
            memory[offset : offset + nbytes].tobytes()
            for offset, nbytes in zip(getattr(table, at)[start:stop], table.nbytes[start:stop], strict=True)
        )
        for chunk_id, (start, stop) in zip(
            table.chunk_id.tolist(), itertools.pairwise(table.chunk_start.tolist()), strict=True
        )
    }


def random_pool(layout: PoolLayout, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, layout.nbytes, dtype=np.uint8)


def all_bytes(layout: PoolLayout) -> Iterator[tuple[str, int]]:
    """(tensor, byte) of every byte that the layout describes; for pools small enough to enumerate."""
    for group in layout.groups:
        per_block = 1 if group.block_size is None else group.block_size // group.tokens_per_entry
        for tensor in group.tensors:
            for block, entry, head in itertools.product(
                range(group.num_blocks), range(per_block), range(tensor.heads)
            ):
                start = (
                    tensor.offset
                    + block * tensor.block_stride
                    + entry * tensor.token_stride
                    + head * tensor.head_stride
                )
                for i in row_bytes(tensor):
                    yield f"{tensor.layer}/{tensor.role}/{tensor.part}", start + i
