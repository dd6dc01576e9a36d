"""Blocks of this pool that transfers are about to write: each is of one request.

An engine that lends a block twice would get a payload that passed every check and was overwritten
after it. The ranks of one request may share blocks: each writes its own heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LocalError
from kvferry.layout import GroupLayout, LayerKind, PoolLayout

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["LentBlocks"]


class LentBlocks:
    """How many transfers write each block. Lives on the node's loop."""

    def __init__(self, layout: PoolLayout) -> None:
        self._groups = layout.groups
        self._writers = [np.zeros(group.num_blocks, np.uint16) for group in layout.groups]
        self._lent: dict[bytes, tuple[str, list[NDArray[np.int64]]]] = {}

    def lend(self, session: Session) -> None:
        """Note what a transfer to this side writes.

        Raises LocalError, and notes nothing, when a block of it is lent for another request.
        """
        blocks = [
            _written(group, table.first_block, np.asarray(table.ids, np.int64), session.held.tokens)
            for group, table in zip(self._groups, session.tables, strict=True)
        ]
        for index, (writers, ids) in enumerate(zip(self._writers, blocks, strict=True)):
            if writers[ids].any():
                self._check(index, ids, session.request_id)
        for writers, ids in zip(self._writers, blocks, strict=True):
            writers[ids] += 1
        self._lent[session.transfer] = (session.request_id, blocks)

    def give_back(self, transfer: bytes) -> None:
        """The transfer writes no more; nothing happens if it never did, or gave back before."""
        _, blocks = self._lent.pop(transfer, ("", []))
        for writers, ids in zip(self._writers, blocks, strict=False):
            writers[ids] -= 1

    def _check(self, group: int, ids: NDArray[np.int64], request_id: str) -> None:
        for other, blocks in self._lent.values():
            shared = np.intersect1d(ids, blocks[group])
            if other != request_id and len(shared):
                raise LocalError(
                    f"tables: block {int(shared[0])} of group {self._groups[group].name!r} is lent "
                    f"for request {other} already",
                    request_id=request_id,
                    now_true="nothing moved; the blocks are the caller's",
                    next_step="allocate blocks of its own to each request; lend none before its outcome",
                )


def _written(
    group: GroupLayout, first_block: int, ids: NDArray[np.int64], held_tokens: int
) -> NDArray[np.int64]:
    """Blocks of a table that are written: all but those of a held prefix, where the group keeps every token.

    What a table names beyond the pool is no block: if it is needed, the plan refuses the table.
    """
    ids = ids[(ids >= 0) & (ids < group.num_blocks)]
    if group.block_size is None or group.window is not None or group.kind is LayerKind.CROSS:
        return ids
    return ids[max(0, held_tokens // group.block_size - first_block) :]
