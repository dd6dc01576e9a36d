"""The order in which a source gives its bytes, and the chunks that its digests are taken over.

Both follow from the source layout alone. A digest is taken at export, when the destination is
not known, and compared at arrival with the one over the destination's pieces of the same chunk;
so neither may depend on the other side, nor on what part of the request moves.

Order: group, layer, cluster, block, then address inside the block. A cluster is one tensor, or
those tensors of one layer whose bytes touch or interleave inside a block (K and V joined):
reading those together makes the runs at the source as long as they can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.records import GroupLayout, PoolLayout, TensorLayout

__all__ = ["CHUNK_NBYTES", "ChunkGrid", "Cluster", "chunk_name", "source_clusters"]

# 256 KiB to 4 MiB differ little in speed over shared memory and TCP; 1 MiB still fits the
# second-level cache of the cores in use, so a staged chunk is summed and sent while hot.
CHUNK_NBYTES = 1 << 20

# chunk_id = cluster number << 40 | number of the chunk in its cluster. 2**14 tensors and
# 2**56 bytes of pool leave room in both parts.
_INDEX_BITS = 40


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """Cuts the bytes of one cluster into chunks of at most CHUNK_NBYTES, at fixed entries.

    Whole blocks where a block fits; otherwise each block is cut into steps of as many entries
    as fit, at least one. ``entries_per_block`` and ``entry_nbytes`` are the source's; for a
    state slot the entries are its bytes in source order.
    """

    entries_per_block: int
    entry_nbytes: int

    @property
    def step(self) -> int:
        """Entries of a chunk that is not cut short by the end of its block."""
        block_nbytes = self.entries_per_block * self.entry_nbytes
        if block_nbytes <= CHUNK_NBYTES:
            return self.entries_per_block * (CHUNK_NBYTES // block_nbytes)
        return max(1, CHUNK_NBYTES // self.entry_nbytes)

    @property
    def cuts_blocks(self) -> bool:
        """A block holds several chunks."""
        return self.step < self.entries_per_block

    def index(self, entry: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of the chunk that holds each entry."""
        if not self.cuts_blocks:
            return entry // self.step
        block, inside = np.divmod(entry, self.entries_per_block)
        index: NDArray[np.int64] = block * self._chunks_per_block + inside // self.step
        return index

    def start(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """First entry of each chunk; ``start(index + 1)`` is where it stops."""
        if not self.cuts_blocks:
            return index * self.step
        block, inside = np.divmod(index, self._chunks_per_block)
        entry: NDArray[np.int64] = block * self.entries_per_block + inside * self.step
        return entry

    @property
    def _chunks_per_block(self) -> int:
        return -(-self.entries_per_block // self.step)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Tensors of one layer that are read together, by offset. ``number`` counts in source order."""

    number: int
    group_index: int
    group: GroupLayout
    tensors: tuple[TensorLayout, ...]

    @property
    def layer(self) -> int:
        return self.tensors[0].layer

    @property
    def offset(self) -> int:
        return self.tensors[0].offset

    @property
    def entry_nbytes(self) -> int:
        """Bytes of one entry (of a whole slot, for state) over all tensors and heads."""
        return sum(tensor.heads * tensor.row_nbytes for tensor in self.tensors)

    @property
    def grid(self) -> ChunkGrid:
        if self.group.is_state:
            return ChunkGrid(self.entry_nbytes, 1)
        return ChunkGrid(self.group.entries_per_block, self.entry_nbytes)

    @property
    def first_chunk_id(self) -> int:
        return self.number << _INDEX_BITS


@lru_cache(maxsize=16)
def source_clusters(layout: PoolLayout) -> tuple[Cluster, ...]:
    """All clusters of a layout in source order."""
    clusters: list[Cluster] = []
    for group_index, group in enumerate(layout.groups):
        by_layer = sorted(group.tensors, key=lambda tensor: (tensor.layer, tensor.offset))
        for _, tensors in groupby(by_layer, key=lambda tensor: tensor.layer):
            for members in _joined(group, list(tensors)):
                clusters.append(Cluster(len(clusters), group_index, group, members))
    return tuple(clusters)


def _joined(group: GroupLayout, tensors: list[TensorLayout]) -> Iterator[tuple[TensorLayout, ...]]:
    """Split the tensors of a layer, sorted by offset, where a gap or another block stride parts them.

    State tensors are large and few: each is a cluster of its own, which keeps their order plain.
    """
    members: list[TensorLayout] = []
    stop = 0
    for tensor in tensors:
        if members and (
            group.is_state or tensor.block_stride != members[0].block_stride or tensor.offset > stop
        ):
            yield tuple(members)
            members, stop = [], 0
        members.append(tensor)
        stop = max(stop, tensor.offset + _block_extent(group, tensor))
    yield tuple(members)


def _block_extent(group: GroupLayout, tensor: TensorLayout) -> int:
    dims, dim_stride, inner_nbytes = tensor.inner
    outer = (group.entries_per_block - 1) * tensor.token_stride + (tensor.heads - 1) * tensor.head_stride
    return outer + (dims - 1) * dim_stride + inner_nbytes


def chunk_name(layout: PoolLayout, chunk_id: int) -> str:
    """Say which bytes a chunk of this source layout holds, for a message about a failed digest.

    Raises InputError for an id that this layout does not have.
    """
    clusters = source_clusters(layout)
    if not 0 <= chunk_id >> _INDEX_BITS < len(clusters):
        raise InputError(f"chunk_id: {chunk_id} is not one of this layout")
    cluster = clusters[chunk_id >> _INDEX_BITS]
    what = f"layer {cluster.layer} " + ", ".join(
        tensor.role.value + (f" part {tensor.part}" if tensor.part else "") for tensor in cluster.tensors
    )
    index = np.array([chunk_id & ((1 << _INDEX_BITS) - 1)])
    grid = cluster.grid
    start, stop = int(grid.start(index)[0]), int(grid.start(index + 1)[0])
    if cluster.group.is_state:
        slot = start // cluster.entry_nbytes
        return f"{what}, slot {slot} of the request, bytes from {start - slot * cluster.entry_nbytes}"
    scale = cluster.group.tokens_per_entry
    return f"{what}, tokens {start * scale} to {stop * scale - 1}"
