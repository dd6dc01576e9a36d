"""A synthetic payload shaped like a request's KV: blocks of one size, scattered alike in every layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvferry.errors import InputError
from kvferry.layout import BlockTable, PoolLayout

__all__ = ["MAX_PAYLOAD_NBYTES", "Payload"]

MAX_PAYLOAD_NBYTES = 64 << 30
# K and V of 32 layers, as in an 8B model; a payload of fewer blocks has fewer layers.
_LAYERS = 32


@dataclass(frozen=True, slots=True)
class Payload:
    """``nbytes`` of payload in blocks of ``block_bytes``, in a pool with twice the room.

    The pool has 2 x layers regions of blocks; a request has the same block ids in each, in no
    order, as a worker that has served for a while gives them. Raises InputError naming the field.
    """

    nbytes: int
    block_bytes: int

    def __post_init__(self) -> None:
        if self.block_bytes < 64 or self.block_bytes % 4:
            raise InputError(f"block_bytes: {self.block_bytes} is not a multiple of 4, from 64 on")
        if not 2 * self.block_bytes <= self.nbytes <= MAX_PAYLOAD_NBYTES:
            least = 2 * self.block_bytes
            raise InputError(f"bytes: {self.nbytes} is not from two blocks ({least}) to {MAX_PAYLOAD_NBYTES}")

    @property
    def layers(self) -> int:
        return min(_LAYERS, self.nbytes // (2 * self.block_bytes))

    @property
    def blocks(self) -> int:
        """Blocks in each region."""
        return self.nbytes // (2 * self.layers * self.block_bytes)

    @property
    def moved_nbytes(self) -> int:
        """What really moves: whole blocks in every region, at most ``nbytes``."""
        return 2 * self.layers * self.blocks * self.block_bytes

    def layout(self) -> PoolLayout:
        """The pool: one token a block, one head of ``block_bytes``."""
        return PoolLayout.paged(
            range(self.layers),
            kv_heads=1,
            head_dim=self.block_bytes // 4,
            dtype="float32",
            block_size=1,
            num_blocks=2 * self.blocks + 2,
        )

    def table(self, seed: int) -> BlockTable:
        """Blocks for the payload: every second one, shuffled, so that no two touch."""
        shuffled = np.random.default_rng(seed).permutation(self.blocks)
        return BlockTable(0, (2 * shuffled).astype(np.int32))
