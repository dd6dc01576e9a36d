"""Blocks of this pool that transfers are about to write: each is of one request.

An engine that lends a block twice would get a payload that passed every check and was overwritten
after it. Transfers of one group of ranks (``together``) may share blocks: each writes its own heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["LentBlocks"]


class LentBlocks:
    """How many transfers write each block. Lives on the node's loop."""

    def __init__(self, layout: PoolLayout) -> None:
        self._groups = layout.groups
        self._shares = layout.groups_share_blocks
        counted = layout.groups[:1] if self._shares else layout.groups
        most = max(group.num_blocks for group in layout.groups)
        sizes = [most if self._shares else group.num_blocks for group in counted]
        self._writers = [np.zeros(size, np.uint16) for size in sizes]
        self._holders = [np.zeros(size, np.uint16) for size in sizes]
        self._lent: dict[bytes, _Loan] = {}

    def lend(self, session: Session) -> None:
        """Note what a transfer to this side writes, and which blocks of a held prefix it relies on.

        Raises LocalError, and notes nothing, when a block that it writes is another's, or when one
        that it holds is being written; InputError when groups that share their blocks share one here.
        """
        loan = self._loan(session)
        for group, (written, held) in enumerate(zip(loan.written, loan.held, strict=True)):
            if self._writers[group][written].any() or self._holders[group][written].any():
                self._check(loan, group, written, held_too=True)
            if self._writers[group][held].any():
                self._check(loan, group, held, held_too=False)
        self._count(loan, 1)
        self._lent[session.transfer] = loan

    def lend_again(self, session: Session) -> None:
        """The transfer covers fewer tokens than when it was lent its blocks, so a window begins earlier.

        Raises as ``lend``; then what was lent before stays lent.
        """
        before = self._lent.pop(session.transfer, None)
        if before is None:
            return
        self._count(before, -1)
        try:
            self.lend(session)
        except KVFerryError:
            self._count(before, 1)
            self._lent[session.transfer] = before
            raise

    def _loan(self, session: Session) -> _Loan:
        parts = [
            _parts(group, table, session.tokens, session.held.tokens)
            for group, table in zip(self._groups, session.tables, strict=True)
        ]
        if self._shares:
            parts = [self._as_one(parts)]
        return _Loan(session.request_id, session.together, *(list(part) for part in zip(*parts, strict=True)))

    def _as_one(
        self, parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of groups in the same memory: what all of them write, each block once, and what they hold."""
        # A group's own table may name a block twice where nothing is live; that is one group's all the same.
        parts = [(np.unique(written), np.unique(held)) for written, held in parts]
        written, held = (np.concatenate(of_all) for of_all in zip(*parts, strict=True))
        ids, counts = np.unique(written, return_counts=True)
        twice = np.union1d(ids[counts > 1], np.intersect1d(ids, held))
        if len(twice):
            block = int(twice[0])
            named = [
                repr(group.name)
                for group, used in zip(self._groups, parts, strict=True)
                if any(block in ids for ids in used)
            ]
            raise InputError(
                f"tables: block {block} is in the tables of groups {' and '.join(named)}, "
                "whose blocks are one shared memory",
                next_step="give each block of a request to one group",
            )
        return ids, np.unique(held)

    def give_back(self, transfer: bytes) -> None:
        """The transfer writes no more; nothing happens if it never did, or gave back before."""
        loan = self._lent.pop(transfer, None)
        if loan is not None:
            self._count(loan, -1)

    def _count(self, loan: _Loan, by: int) -> None:
        for counts, blocks in ((self._writers, loan.written), (self._holders, loan.held)):
            for count, ids in zip(counts, blocks, strict=True):
                count[ids] += np.int16(by).astype(np.uint16)  # wraps: -1 is 65,535

    def _of_group(self, group: int) -> str:
        return "" if self._shares else f" of group {self._groups[group].name!r}"

    def _check(self, loan: _Loan, group: int, ids: NDArray[np.int64], *, held_too: bool) -> None:
        for other in self._lent.values():
            if loan.together and other.together == loan.together:
                continue
            used = np.union1d(other.written[group], other.held[group]) if held_too else other.written[group]
            shared = np.intersect1d(ids, used)
            if len(shared):
                raise LocalError(
                    f"tables: block {int(shared[0])}{self._of_group(group)} is lent "
                    f"for request {other.request_id} already",
                    request_id=loan.request_id,
                    now_true="nothing moved; the blocks are the caller's",
                    next_step="allocate blocks of its own to each transfer; lend none before its outcome",
                )


@dataclass(frozen=True, slots=True)
class _Loan:
    """``together``: the same for transfers that bring parts of one request by turns; empty for none."""

    request_id: str
    together: bytes
    written: list[NDArray[np.int64]]
    held: list[NDArray[np.int64]]


def _parts(
    group: GroupLayout, table: BlockTable, tokens: int, held_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of a table that are written, and those of a held prefix (of groups that keep every token).

    What a table names before a window's tail may stand for blocks that were let go of: none of them is
    touched. What it names beyond the pool is no block: if it is needed, the plan refuses the table.
    """
    ids = np.asarray(table.ids, np.int64)
    border, is_held = 0, False
    if group.block_size is not None and group.kind is not LayerKind.CROSS:
        is_held = group.window is None
        first = held_tokens if is_held else group.first_live_token(tokens)
        border = max(0, first // group.block_size - table.first_block)
    written, before = (part[part < group.num_blocks] for part in (ids[border:], ids[:border]))
    return written, before if is_held else before[:0]
