"""Paged KV in memory that someone else gives, addressed by nothing but the strides of its PoolLayout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError, LocalError
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout, Role, TensorLayout

__all__ = ["PagedPool"]

Float32 = NDArray[np.float32]


class PagedPool:
    """K and V of one model's layers, in blocks, and which blocks are free.

    Args:
        layout: one group of kind full with a key and a value tensor for each layer, in float32,
            float16 or bfloat16; any strides.
        memory: uint8, one axis, at least ``layout.nbytes``; the KV lives in it, nowhere else.

    Not for two threads at once. Raises LocalError for a layout that the engine cannot run on, or
    where bfloat16 is asked for and the package ``ml-dtypes`` is missing.
    """

    def __init__(self, layout: PoolLayout, memory: NDArray[np.uint8]) -> None:
        if memory.dtype != np.uint8 or memory.ndim != 1 or memory.nbytes < layout.nbytes:
            raise LocalError(f"the pool needs {layout.nbytes} bytes as a flat uint8 array")
        self.layout, self.memory = layout, memory
        self.group = _only_group(layout)
        self.block_size = _block_size(self.group)
        self._views = {(t.layer, t.role): self._view(t) for t in self.group.tensors}
        self._free = list(range(self.group.num_blocks))
        self._held: set[int] = set()

    @property
    def row_shape(self) -> tuple[int, int]:
        """(kv_heads, head_dim): what one token stores on either side."""
        return self.group.tensors[0].heads, self.group.tensors[0].head_dim

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` could give now."""
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks. Raises CapacityError, and takes none, where there are fewer."""
        if num_blocks > len(self._free):
            raise CapacityError(
                f"{num_blocks} blocks wanted, {len(self._free)} of {self.group.num_blocks} free",
                now_true="none was taken",
                next_step="release a finished request, or give the engine a larger pool",
            )
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        self._held.update(taken)
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back. Raises LocalError, and frees none, unless each is held and comes once."""
        given = [int(block) for block in ids]
        if len(set(given)) != len(given) or not self._held.issuperset(given):
            raise LocalError(f"blocks {given} are not all held, once each", now_true="none was freed")
        self._held.difference_update(given)
        self._free.extend(given)

    def is_held(self, ids: Iterable[int]) -> bool:
        """Whether all these blocks are allocated."""
        return self._held.issuperset(int(block) for block in ids)

    def write(self, layer: int, table: BlockTable, start: int, keys: Float32, values: Float32) -> None:
        """Store (tokens, kv_heads, head_dim) at positions from ``start``, rounded to the storage dtype."""
        positions = np.arange(start, start + len(keys))
        blocks, slots = table.ids[positions // self.block_size], positions % self.block_size
        self._views[layer, Role.KEY][blocks, slots] = keys
        self._views[layer, Role.VALUE][blocks, slots] = values

    def read(self, layer: int, table: BlockTable, tokens: int) -> tuple[Float32, Float32]:
        """K and V of the first ``tokens`` positions, each float32 (kv_heads, tokens, head_dim).

        Always in that one order, whatever the layout, so that no layout can change a bit later.
        """
        blocks = table.ids[: self.blocks_for(tokens)]
        return (
            self._gather(self._views[layer, Role.KEY], blocks)[:, :tokens],
            self._gather(self._views[layer, Role.VALUE], blocks)[:, :tokens],
        )

    def _gather(self, view: NDArray[np.floating], blocks: NDArray[np.int32]) -> Float32:
        out = np.empty((view.shape[2], len(blocks), *view.shape[1:2], view.shape[3]), np.float32)
        np.copyto(out, view.transpose(2, 0, 1, 3)[:, blocks])
        return out.reshape(view.shape[2], -1, view.shape[3])

    def _view(self, tensor: TensorLayout) -> NDArray[np.floating]:
        """(num_blocks, block_size, kv_heads, head_dim), any strides."""
        dtype = _storage_dtype(tensor.dtype)
        return np.ndarray(
            (self.group.num_blocks, self.block_size, tensor.heads, tensor.head_dim),
            dtype,
            buffer=self.memory.data,
            offset=tensor.offset,
            strides=(tensor.block_stride, tensor.token_stride, tensor.head_stride, dtype.itemsize),
        )


def _only_group(layout: PoolLayout) -> GroupLayout:
    if len(layout.groups) != 1 or (group := layout.groups[0]).kind is not LayerKind.FULL:
        raise LocalError("the reference engine runs on a pool of one group, of kind full")
    return group


def _block_size(group: GroupLayout) -> int:
    if group.block_size is None or group.tokens_per_entry != 1:
        raise LocalError(f"group {group.name!r}: one entry a token, in blocks, is needed")
    return group.block_size


def _storage_dtype(name: str) -> np.dtype[Any]:
    if name in ("float32", "float16"):
        return np.dtype(name)
    if name != "bfloat16":
        raise LocalError(f"the reference engine stores float32, float16 or bfloat16, not {name}")
    try:
        import ml_dtypes  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            "bfloat16 needs the package 'ml-dtypes'", next_step="pip install 'kvferry[demo]'"
        ) from error
    bfloat16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return bfloat16
