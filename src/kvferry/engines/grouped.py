"""Blocks of a pool with several layer groups, taken and given back together."""

from __future__ import annotations

import numpy as np

from kvferry.engines.base import BlockTables
from kvferry.engines.blocks import Blocks
from kvferry.errors import CapacityError, LocalError
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout

__all__ = ["GroupedBlocks"]

# A window's first block is chosen before it is known whether a token is pending, so one more token is kept.
_SLACK_TOKENS = 2


class GroupedBlocks:
    """Who holds which block of each group. Not for two threads at once."""

    def __init__(self, layout: PoolLayout) -> None:
        self.layout = layout
        self._blocks = [Blocks(group.num_blocks) for group in layout.groups]

    @property
    def num_free(self) -> tuple[int, ...]:
        """Free blocks of each group."""
        return tuple(blocks.num_free for blocks in self._blocks)

    def allocate(self, tokens: int, encoder_tokens: int = 0) -> BlockTables:
        """Blocks that hold a request of ``tokens`` tokens, or one or two fewer, in every group.

        Raises CapacityError naming the group; then none was taken.
        """
        tables: list[BlockTable] = []
        try:
            for group, blocks in zip(self.layout.groups, self._blocks, strict=True):
                first, count, covered = _span(group, tokens, encoder_tokens)
                tables.append(BlockTable(first, np.array(blocks.allocate(count), np.int32), covered))
        except CapacityError as error:
            self._free(tables)
            error.message = f"group {group.name!r}: {error.message}"
            raise
        return tuple(tables)

    def free(self, tables: BlockTables) -> None:
        """Give all blocks of these tables back. Raises LocalError, and frees none, unless all are held."""
        if not self.are_held(tables):
            raise LocalError("the blocks are not all held, once each", now_true="none was freed")
        self._free(tables)

    def are_held(self, tables: BlockTables) -> bool:
        """Whether there is a table a group, and all its blocks are allocated, once each."""
        return len(tables) == len(self._blocks) and all(
            blocks.is_held(table.ids) for blocks, table in zip(self._blocks, tables, strict=True)
        )

    def _free(self, tables: BlockTables | list[BlockTable]) -> None:
        for blocks, table in zip(self._blocks, tables, strict=False):
            blocks.free(table.ids)


def _span(group: GroupLayout, tokens: int, encoder_tokens: int) -> tuple[int, int, int | None]:
    """First logical block, how many from there on, and the tokens that a cross table states."""
    if group.block_size is None:
        return 0, 1, None
    if group.kind is LayerKind.CROSS:
        return 0, -(-encoder_tokens // group.block_size), encoder_tokens
    first = 0
    if group.window is not None:
        first = max(0, tokens - _SLACK_TOKENS - group.window) // group.block_size
    return first, -(-tokens // group.block_size) - first, None
