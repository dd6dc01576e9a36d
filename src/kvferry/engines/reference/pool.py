"""Paged KV in memory that someone else gives, addressed by nothing but the strides of its layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.blocks import Blocks
from kvferry.errors import LocalError
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout, Role, TensorLayout

__all__ = ["PagedPool"]

Float32 = NDArray[np.float32]
_HeadView: TypeAlias = tuple[int, int, NDArray[np.floating]]
"""The model's heads [start, stop), and where one rank has them: (num_blocks, block_size, heads, head_dim)."""


class PagedPool:
    """K and V of one model's layers, in blocks, and which blocks are free.

    It may be split over ranks, each with a layout and memory of its own: by layers, by heads, with
    heads that several hold. A block id is then a block at every rank, and in every group.

    Args:
        layout: a group of kind full with a key and a value tensor for each layer, in float32,
            float16 or bfloat16; any strides. A second one for a draft model's layers, with as many
            blocks of the same size, where there is one. Or such a layout for each rank.
        memory: uint8, one axis, at least ``layout.nbytes``; the KV lives in it, nowhere else. One for
            each rank. Allocated here when None.

    Not for two threads at once. Raises LocalError for a layout that the engine cannot run on, or
    where bfloat16 is asked for and the package ``ml-dtypes`` is missing.
    """

    def __init__(
        self,
        layout: PoolLayout | Sequence[PoolLayout],
        memory: NDArray[np.uint8] | Sequence[NDArray[np.uint8]] | None = None,
    ) -> None:
        self.layouts = (layout,) if isinstance(layout, PoolLayout) else tuple(layout)
        self.memories = _memories(self.layouts, memory)
        _check_alike(self.layouts)
        self.group = self.layouts[0].groups[0]
        self.block_size = _block_size(self.group)
        self.kv_heads = max(t.head_stop for layout in self.layouts for t in layout.groups[0].tensors)
        self.tensors: dict[str, dict[tuple[int, Role], TensorLayout]] = {}
        self._views: defaultdict[tuple[int, Role], list[_HeadView]] = defaultdict(list)
        for layout_of_rank, bytes_of_rank in zip(self.layouts, self.memories, strict=True):
            for group in layout_of_rank.groups:
                found = self.tensors.setdefault(group.name, {})
                for t in group.tensors:
                    found[t.layer, t.role] = t
                    view = self._view(t, bytes_of_rank)
                    self._views[t.layer, t.role].append((t.head_start, t.head_stop, view))
        self._blocks = Blocks(self.group.num_blocks)

    @property
    def row_shape(self) -> tuple[int, int]:
        """(kv_heads, head_dim): what one token stores on either side."""
        return self.kv_heads, self.group.tensors[0].head_dim

    @property
    def num_free_blocks(self) -> int:
        """Blocks that ``allocate`` could give now."""
        return self._blocks.num_free

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks. Raises CapacityError, and takes none, where there are fewer."""
        return self._blocks.allocate(num_blocks)

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back. Raises LocalError, and frees none, unless each is held and comes once."""
        self._blocks.free(ids)

    def is_held(self, ids: Iterable[int]) -> bool:
        """Whether all these blocks are allocated, and none comes twice."""
        return self._blocks.is_held(ids)

    def write(self, layer: int, table: BlockTable, start: int, keys: Float32, values: Float32) -> None:
        """Store (tokens, kv_heads, head_dim) at positions from ``start``, rounded to the storage dtype."""
        positions = np.arange(start, start + len(keys))
        blocks, slots = table.ids[positions // self.block_size], positions % self.block_size
        for role, rows in ((Role.KEY, keys), (Role.VALUE, values)):
            for start_head, stop_head, view in self._views[layer, role]:
                view[blocks, slots] = rows[:, start_head:stop_head]

    def read(self, layer: int, table: BlockTable, tokens: int) -> tuple[Float32, Float32]:
        """K and V of the first ``tokens`` positions, each float32 (kv_heads, tokens, head_dim).

        Always in that one order, whatever the layout and the split over ranks, so that neither can
        change a bit later.
        """
        blocks = table.ids[: self.blocks_for(tokens)]
        return (
            self._gather(self._views[layer, Role.KEY], blocks)[:, :tokens],
            self._gather(self._views[layer, Role.VALUE], blocks)[:, :tokens],
        )

    def _gather(self, views: list[_HeadView], blocks: NDArray[np.int32]) -> Float32:
        kv_heads, head_dim = self.row_shape
        out = np.empty((kv_heads, len(blocks), self.block_size, head_dim), np.float32)
        for start_head, stop_head, view in views:
            np.copyto(out[start_head:stop_head], view.transpose(2, 0, 1, 3)[:, blocks])
        return out.reshape(kv_heads, -1, head_dim)

    def _view(self, tensor: TensorLayout, memory: NDArray[np.uint8]) -> NDArray[np.floating]:
        """(num_blocks, block_size, kv_heads, head_dim), any strides."""
        dtype = _storage_dtype(tensor.dtype)
        return np.ndarray(
            (self.group.num_blocks, self.block_size, tensor.heads, tensor.head_dim),
            dtype,
            buffer=memory.data,
            offset=tensor.offset,
            strides=(
                tensor.block_stride,
                tensor.token_stride,
                tensor.head_stride,
                tensor.dim_stride if tensor.is_split else dtype.itemsize,
            ),
        )


def _memories(
    layouts: tuple[PoolLayout, ...], given: NDArray[np.uint8] | Sequence[NDArray[np.uint8]] | None
) -> tuple[NDArray[np.uint8], ...]:
    """One array for each layout, large enough."""
    if given is None:
        return tuple(np.zeros(layout.nbytes, np.uint8) for layout in layouts)
    memories = (given,) if isinstance(given, np.ndarray) else tuple(given)
    if len(memories) != len(layouts):
        raise LocalError(f"memory: {len(memories)} arrays for {len(layouts)} layouts")
    for layout, memory in zip(layouts, memories, strict=True):
        if memory.dtype != np.uint8 or memory.ndim != 1 or memory.nbytes < layout.nbytes:
            raise LocalError(f"the pool needs {layout.nbytes} bytes as a flat uint8 array")
    return memories


def _check_alike(layouts: Sequence[PoolLayout]) -> None:
    """Ranks and groups may differ in layers, heads and strides, and in nothing else."""
    names = {tuple(group.name for group in layout.groups) for layout in layouts}
    groups = [group for layout in layouts for group in layout.groups]
    if len(names) != 1 or len(min(names)) not in (1, 2) or {g.kind for g in groups} != {LayerKind.FULL}:
        raise LocalError(
            "the reference engine runs on a pool of one group of kind full, or one and a draft's"
        )
    forms = {
        (group.block_size, group.num_blocks, tensor.dtype, tensor.head_dim)
        for group in groups
        for tensor in group.tensors
    }
    if len(forms) != 1:
        raise LocalError(
            f"all ranks need one block size, number of blocks and dtype in all groups, not {forms}"
        )


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
