"""Grants: which bytes of this side's pool one transfer's peer may touch, now.

Asked from the transports' data threads, changed from the node's loop; one lock. A grant that is
closed admits nobody new; its blocks are free only when the last copy inside has left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, PeerError
from kvferry.transport.base import Arrived, CancelToken, Direction
from kvferry.transport.board import Board
from kvferry.transport.staging import FEW

__all__ = ["Grants"]

# Of so many pieces it is found out whether they are few ranges; of more only all are read without a word.
MAX_SEARCHED_PIECES = 64
# The digest of so many takes a tenth of the time of being asked for leave; a copy of more is long anyway.
MAX_POSTED_PIECES = 1 << 14


@dataclass(eq=False)
class _Grant:
    """``offset`` and ``nbytes``: int64, the pieces that may be touched, in the order of the plan."""

    direction: Direction
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]
    on_landed: Callable[[Arrived], None]
    on_empty: list[Callable[[], None]] = field(default_factory=list)
    users: int = 0
    closed: bool = False
    token: CancelToken = field(default_factory=CancelToken)

    @cached_property
    def ranges(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First bytes and ends, ascending; pieces that touch are one: a peer's need not end where ours do."""
        order = np.argsort(self.offset, kind="stable")
        start, stop = self.offset[order], (self.offset + self.nbytes)[order]
        first = np.ones(len(start), bool)
        first[1:] = start[1:] > np.maximum.accumulate(stop)[:-1]
        index = np.flatnonzero(first)
        return start[index], np.maximum.reduceat(stop, index) if len(index) else stop

    def check(self, offset: NDArray[np.int64], nbytes: NDArray[np.int64]) -> None:
        """Raise PeerError unless each descriptor lies inside. The very pieces need no search for each."""
        if len(offset) <= FEW:
            self._check_few(offset.tolist(), nbytes.tolist())
            return
        if np.array_equal(offset, self.offset) and np.array_equal(nbytes, self.nbytes):
            return
        # nbytes < 0 or offset + nbytes past 2^63 must not pass as "small".
        if int(nbytes.min()) < 0 or int(offset.min()) < 0 or int(offset.max()) > 2**62:
            raise _refused("a descriptor is negative or beyond any pool")
        start, stop = self.ranges
        at = np.searchsorted(start, offset, side="right") - 1
        inside = (at >= 0) & (nbytes <= stop[at] - offset) if len(start) else np.zeros(len(offset), bool)
        if not inside.all():
            worst = int(np.flatnonzero(~inside)[0])
            raise _outside(worst, int(offset[worst]), int(nbytes[worst]))

    def _check_few(self, offsets: list[int], sizes: list[int]) -> None:
        """The same in Python's own numbers, which do not wrap."""
        is_all = len(offsets) == len(self.offset)
        if is_all and offsets == self.offset.tolist() and sizes == self.nbytes.tolist():
            return
        for piece, (offset, nbytes) in enumerate(zip(offsets, sizes, strict=True)):
            start, stop = self.ranges
            at = int(start.searchsorted(offset, side="right")) - 1
            if nbytes < 0 or at < 0 or offset + nbytes > int(stop[at]):
                raise _outside(piece, offset, nbytes)


class Grants:
    """The guard of one node: every descriptor of a peer is checked against a live grant."""

    def __init__(self, board: Board | None = None) -> None:
        #: Where grants to read are posted. Owned; ``end`` gives it back.
        self.board = board
        self._lock = threading.Lock()
        self._grants: dict[bytes, _Grant] = {}

    def open(
        self,
        transfer_id: bytes,
        direction: Direction,
        offset: NDArray[np.int64],
        nbytes: NDArray[np.int64],
        on_landed: Callable[[Arrived], None],
    ) -> None:
        """Allow ``direction`` inside these pieces. ``on_landed`` is called from a data thread."""
        grant = _Grant(direction, offset, nbytes, on_landed)
        with self._lock:
            assert transfer_id not in self._grants
            self._grants[transfer_id] = grant
            is_short = len(offset) <= MAX_POSTED_PIECES
            if self.board is not None and is_short and direction is Direction.READ:
                ranges = grant.ranges if len(offset) <= MAX_SEARCHED_PIECES else None
                self.board.post(transfer_id, offset, nbytes, ranges)

    def close(self, transfer_id: bytes, error: KVFerryError | None = None) -> None:
        """Admit no new copy; with ``error``, end those that run. Closing twice is fine."""
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is None:
                return
            grant.closed = True
            if self.board is not None:
                self.board.withdraw(transfer_id)
            if grant.users == 0:
                del self._grants[transfer_id]
        if error is not None:
            grant.token.cancel(error)

    def when_empty(self, transfer_id: bytes, call: Callable[[], None]) -> bool:
        """True if no copy touches the memory now; else ``call`` runs, in a data thread, when none does."""
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is None or grant.users == 0:
                return True
            grant.on_empty.append(call)
            return False

    def end(self) -> None:
        """Give the board back; nobody is admitted by it any more."""
        with self._lock:
            if self.board is not None:
                self.board.close()

    @property
    def num_open(self) -> int:
        """Grants that are open or still in use."""
        with self._lock:
            return len(self._grants)

    def enter(
        self, transfer_id: bytes, direction: Direction, offset: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> CancelToken:
        """See ``Guard.enter``: one vectorised check of all descriptors."""
        with self._lock:
            grant = self._grants.get(transfer_id)
            if grant is None or grant.closed:
                raise _refused("there is no live grant for this transfer")
            if grant.direction is not direction:
                raise _refused(f"the grant is to {grant.direction}, not to {direction}")
            grant.users += 1
        try:
            grant.check(offset, nbytes)
        except BaseException:
            self.leave(transfer_id)
            raise
        return grant.token

    def landed(self, transfer_id: bytes, arrived: Arrived) -> None:
        """See ``Guard.landed``."""
        with self._lock:
            grant = self._grants.get(transfer_id)
        if grant is not None:
            grant.on_landed(arrived)

    def leave(self, transfer_id: bytes) -> None:
        """See ``Guard.leave``."""
        with self._lock:
            grant = self._grants[transfer_id]
            grant.users -= 1
            calls: list[Callable[[], None]] = []
            if grant.users == 0:
                calls, grant.on_empty = grant.on_empty, calls
                if grant.closed:
                    del self._grants[transfer_id]
        for call in calls:
            call()


def _outside(worst: int, offset: int, nbytes: int) -> PeerError:
    return _refused(f"descriptor {worst} (offset {offset}, {nbytes} bytes) lies outside the grant")


def _refused(why: str) -> PeerError:
    return PeerError(
        f"refused: {why}",
        phase="move",
        now_true="no byte moved for this copy",
        next_step="claim the transfer with a ticket that is live, and stay inside its blocks",
    )
