"""What ended since vLLM asked last, collected from the threads that end it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import KVFerryError
from kvferry.transfer import TransferRecord

__all__ = ["Outbox", "Results"]


@dataclass
class Results:
    """What ended since the last step. ``failed`` are among ``loaded``, as vLLM wants it."""

    saved: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    moves: list[TransferRecord] = field(default_factory=list)
    errors: list[KVFerryError] = field(default_factory=list)
    expired: int = 0


class Outbox:
    """Results until vLLM takes them; any thread may add. Errors are logged too."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._results = Results()

    def take(self) -> Results:
        """All so far; the next one starts empty."""
        with self._lock:
            results, self._results = self._results, Results()
        return results

    def loaded(self, request_id: str, outcome: TransferRecord | KVFerryError) -> None:
        """A load ended: its blocks are vLLM's, with the KV or without."""
        with self._lock:
            self._results.loaded.add(request_id)
            if isinstance(outcome, KVFerryError):
                self._results.failed.add(request_id)
                self._results.errors.append(outcome)  # the step that fails the request counts it too
            else:
                self._results.moves.append(outcome)
        if isinstance(outcome, KVFerryError):
            self._log(str(outcome))

    def failed(self, error: KVFerryError) -> None:
        """A handoff ended with an error here."""
        self._log(str(error))
        with self._lock:
            self._results.errors.append(error)

    def expired(self, error: BaseException) -> None:
        """An offer ended without decode having it."""
        self._log(f"a handoff ended without decode: {error}")
        with self._lock:
            self._results.expired += 1

    def note(self, text: str) -> None:
        """For the log alone."""
        self._log(text)
