"""Who still uses what a connection owns; the last one out releases it."""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterator

from kvferry.errors import KVFerryError

__all__ = ["Users", "forget_locals"]


class Users:
    """Counts threads that may touch sockets and maps. From ``end`` on nobody new gets in.

    ``release`` runs exactly once, in whichever thread is last out, or in the one that ends.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._lock = threading.Lock()
        self._count = 0
        self._error: KVFerryError | None = None

    @property
    def error(self) -> KVFerryError | None:
        """Why it ended; None while it stands."""
        return self._error

    def enter(self) -> None:
        """Raises the error that was given to ``end``."""
        with self._lock:
            if self._error is not None:
                raise self._error
            self._count += 1

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = self._error is not None and self._count == 0
        if is_last:
            self._release()

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def end(self, error: KVFerryError) -> bool:
        """Let nobody new in; True for the first call, which names the error."""
        with self._lock:
            if self._error is not None:
                return False
            self._error = error
            is_last = self._count == 0
        if is_last:
            self._release()
        return True


def forget_locals(error: BaseException) -> None:
    """Empty the frames that an error has left behind: it outlives them, and they hold pool memory mapped."""
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
