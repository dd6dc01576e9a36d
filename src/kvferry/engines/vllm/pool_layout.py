"""Where the KV lies in vLLM's pool: its tensors and groups as a ``PoolLayout``.

Since 0.32 a layer's tensor is logically (block, head, token, 2 x head size), K before V. The CPU
backend reads it otherwise: the first half of each (block, head) is K transposed, (element, token),
the second V as (token, element). What it does is looked at, not assumed (``packing.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvferry.errors import IncompatibleError
from kvferry.layout import ITEMSIZE, GroupLayout, LayerKind, PoolLayout, Role, TensorLayout

__all__ = ["Group", "LayerTensor", "layer_number", "pool_layout"]

LAYOUT_NAME = "vllm-cpu-k-transposed"


@dataclass(frozen=True)
class LayerTensor:
    """One layer's part of the pool: byte offset, and byte strides of (block, head)."""

    offset: int
    block_stride: int
    head_stride: int


@dataclass(frozen=True)
class Group:
    """A KV cache group: ``layers`` by vLLM's names; ``window`` in tokens, as attention counts it, or None."""

    layers: tuple[str, ...]
    block_size: int
    kv_heads: int
    head_dim: int
    window: int | None = None


def pool_layout(
    groups: Sequence[Group],
    tensors: Mapping[str, LayerTensor],
    *,
    dtype: str,
    num_blocks: int,
    nbytes: int,
    first_head: int = 0,
) -> PoolLayout:
    """The layout of a CPU worker's pool, one ``GroupLayout`` for each of vLLM's groups, in its order.

    Raises IncompatibleError for a layer whose number cannot be read.
    """
    found = []
    for index, group in enumerate(groups):
        parts: list[TensorLayout] = []
        for name in group.layers:
            parts += _layer(layer_number(name), tensors[name], group, dtype, first_head)
        # A window of W tokens with the one that is computed: W - 1 before it are what is kept.
        window = None if group.window is None else group.window - 1
        kind = LayerKind.FULL if window is None else LayerKind.SLIDING
        found.append(
            GroupLayout(f"group{index}", kind, group.block_size, num_blocks, tuple(parts), window or None)
        )
    # vLLM has one pool of blocks for all groups: layers of two groups lie in the same memory.
    return PoolLayout(tuple(found), nbytes, groups_share_blocks=len(found) > 1)


def _layer(
    layer: int, tensor: LayerTensor, group: Group, dtype: str, first_head: int
) -> tuple[TensorLayout, TensorLayout]:
    itemsize, size, dim = ITEMSIZE[dtype], group.block_size, group.head_dim
    key = TensorLayout(
        layer,
        Role.KEY,
        dtype,
        offset=tensor.offset,
        block_stride=tensor.block_stride,
        token_stride=itemsize,
        head_stride=tensor.head_stride,
        heads=group.kv_heads,
        head_dim=dim,
        head_start=first_head,
        dim_stride=size * itemsize,
    )
    value = msgspec.structs.replace(
        key,
        role=Role.VALUE,
        offset=tensor.offset + size * dim * itemsize,
        token_stride=dim * itemsize,
        dim_stride=0,
    )
    return key, value


def layer_number(name: str) -> int:
    """``model.layers.7.self_attn.attn`` -> 7. Raises IncompatibleError."""
    numbers = re.findall(r"\.(\d+)\.", name)
    if len(numbers) != 1:
        raise IncompatibleError(
            f"kv cache layer {name!r}: its number cannot be read",
            next_step="run this model without kvferry, and report its layer names",
        )
    return int(numbers[0])
