"""An engine whose cache is not paged: it is copied into blocks of a pool when it moves, and out of them."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.grouped import GroupedBlocks
from kvferry.engines.local import LocalEngine
from kvferry.engines.request import Request
from kvferry.engines.text import Tokenizer
from kvferry.errors import LocalError
from kvferry.layout import PoolLayout

__all__ = ["StagedEngine"]


class StagedEngine(LocalEngine):
    """A request that runs holds no block. What was staged for an export stays as it is until ``release``.

    Args:
        layout: of the pool.
        memory: uint8, flat, at least ``layout.nbytes``; allocated here when None.
    """

    def __init__(
        self,
        vocab_size: int,
        max_context: int,
        tokenizer: Tokenizer,
        layout: PoolLayout,
        memory: NDArray[np.uint8] | None,
    ) -> None:
        super().__init__(vocab_size, max_context, tokenizer)
        self._layout = layout
        self._memory = np.zeros(layout.nbytes, np.uint8) if memory is None else memory
        self._blocks = GroupedBlocks(layout)
        self._staged: dict[str, list[tuple[int, BlockTables]]] = {}

    @property
    def layout(self) -> PoolLayout:
        """Where a staged cache lies in ``memory``."""
        return self._layout

    @property
    def memory(self) -> NDArray[np.uint8]:
        """The pool itself."""
        return self._memory

    @property
    def num_free_blocks(self) -> tuple[int, ...]:
        """Blocks that ``allocate`` could give now, in each group."""
        return self._blocks.num_free

    def allocate(self, tokens: int, encoder_tokens: int = 0) -> BlockTables:
        """Blocks for ``tokens`` tokens, the caller's until imported or freed. Raises CapacityError."""
        return self._blocks.allocate(tokens, encoder_tokens)

    def free(self, tables: BlockTables) -> None:
        """Give back what ``allocate`` gave, and nobody has taken over."""
        self._check_callers(tables)
        self._blocks.free(tables)

    def tables(self, request_id: str) -> BlockTables:
        """The blocks that hold the request's cache as it is now, copied there if they do not yet.

        They stay as they are until ``release``, even if the request goes on here. Raises
        CapacityError where the pool has no room for the copy.
        """
        request = self.request(request_id)
        staged = self._staged.setdefault(request_id, [])
        if staged and staged[-1][0] == request.kv_tokens:
            return staged[-1][1]
        tables = self._blocks.allocate(request.kv_tokens, self._encoder_tokens(request))
        try:
            self._stage(request, tables)
        except BaseException:
            self._blocks.free(tables)
            raise
        staged.append((request.kv_tokens, tables))
        return tables

    def _release_tables(self, tables: BlockTables) -> None:
        """An import has copied what was in them."""
        self._blocks.free(tables)

    def _forget(self, request: Request) -> None:
        for _, tables in self._staged.pop(request.request_id, ()):
            self._blocks.free(tables)

    def _check_callers(self, tables: BlockTables) -> None:
        of_requests = [taken for staged in self._staged.values() for _, taken in staged]
        is_taken = any(
            np.intersect1d(mine.ids, theirs.ids).size
            for taken in of_requests
            for mine, theirs in zip(tables, taken, strict=False)
        )
        if is_taken or not self._blocks.are_held(tables):
            raise LocalError(
                "the block tables are not ones that allocate gave and that are still the caller's",
                now_true="no block has changed hands",
            )

    def _encoder_tokens(self, request: Request) -> int:  # noqa: ARG002 - for those with an encoder
        return 0

    @abstractmethod
    def _stage(self, request: Request, tables: BlockTables) -> None:
        """Copy the request's cache into these blocks."""
