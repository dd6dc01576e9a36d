"""A guard that does what a test says, and tells what was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.transport.base import Arrived, CancelToken, Direction
from kvferry.transport.board import Board

__all__ = ["Entered", "ScriptedGuard"]

WAIT_SECONDS = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Entered:
    """One call of ``enter``: offsets and sizes are int64, in the guarded memory."""

    transfer_id: bytes
    direction: Direction
    offset: NDArray[np.int64]
    nbytes: NDArray[np.int64]


class ScriptedGuard:
    """Admits everything until told otherwise.

    ``refusal`` is raised by ``enter`` while it is set. ``on_enter`` is called with each token
    before it is returned, ``on_leave`` when a copy leaves. A ``board`` says what the test posts on it.
    """

    def __init__(self, board: Board | None = None) -> None:
        self.board = board
        self.refusal: KVFerryError | None = None
        self.on_enter: Callable[[CancelToken], None] | None = None
        self.on_leave: Callable[[], None] | None = None
        self.entered: list[Entered] = []
        self.landed_copies: list[tuple[bytes, Arrived]] = []
        self.tokens: list[CancelToken] = []
        self.num_active = 0
        self._changed = threading.Condition()

    def enter(
        self, transfer_id: bytes, direction: Direction, offset: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> CancelToken:
        with self._changed:
            self.entered.append(Entered(transfer_id, direction, offset.copy(), nbytes.copy()))
            if self.refusal is not None:
                raise self.refusal
            token = CancelToken()
            self.tokens.append(token)
            self.num_active += 1
            self._changed.notify_all()
        if self.on_enter is not None:
            self.on_enter(token)
        return token

    def landed(self, transfer_id: bytes, arrived: Arrived) -> None:
        with self._changed:
            self.landed_copies.append((transfer_id, arrived))

    def leave(self, transfer_id: bytes) -> None:  # noqa: ARG002 - the signature is Guard's
        if self.on_leave is not None:
            self.on_leave()
        with self._changed:
            self.num_active -= 1
            self._changed.notify_all()

    def end_all(self, error: KVFerryError) -> None:
        """End every grant that was given."""
        for token in self.tokens:
            token.cancel(error)

    def wait_until_idle(self) -> None:
        """Wait until every copy that entered has left. Raises AssertionError after WAIT_SECONDS."""
        with self._changed:
            is_idle = self._changed.wait_for(lambda: self.num_active == 0, WAIT_SECONDS)
        assert is_idle, f"{self.num_active} copies entered the guard and did not leave"
