"""When a blocking copy gives up: at its deadline, or soon after a cancel token is set."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass

from kvferry.errors import DeadlineError, KVFerryError, TransportError
from kvferry.transport.base import CancelToken

__all__ = ["SLICE_SECONDS", "Patience"]

# A cancel token has no descriptor to poll, so a wait looks at it this often; nothing waits idle.
SLICE_SECONDS = 0.05

_NOW_TRUE = "some of the destination bytes may have changed"


@dataclass(frozen=True, slots=True, eq=False)
class Patience:
    """The limits of one copy, and the words for its errors.

    ``deadline`` is ``time.monotonic()`` seconds. Any of ``tokens`` ends the copy. Where
    ``is_polite``, a wait looks at the tokens only when nothing happened for one slice: what was
    begun is finished unless the peer stalls, so that the peer can be told why.
    """

    deadline: float
    tokens: tuple[CancelToken, ...]
    peer: str
    phase: str = "move"
    is_polite: bool = False

    def check(self) -> None:
        """Raise the error of a token that is set, or DeadlineError; else return at once."""
        for token in self.tokens:
            token.raise_if_cancelled()
        self.check_deadline()

    def is_over(self) -> bool:
        """``check`` would raise."""
        return time.monotonic() >= self.deadline or any(token.is_cancelled for token in self.tokens)

    def check_deadline(self) -> None:
        if time.monotonic() >= self.deadline:
            raise DeadlineError(
                "the copy did not finish before its deadline",
                phase=self.phase,
                peer=self.peer,
                now_true=_NOW_TRUE,
                next_step="check that the peer is alive, or allow more time",
            )

    def politely(self) -> Patience:
        """The same limits, polite."""
        return Patience(self.deadline, self.tokens, self.peer, self.phase, is_polite=True)

    def wait(self, poll: select.poll) -> list[tuple[int, int]]:
        """Wait until a descriptor of ``poll`` is ready; never longer than the limits allow."""
        must_check = not self.is_polite
        while True:
            if must_check:
                self.check()
            else:
                self.check_deadline()
            left = max(0.0, min(SLICE_SECONDS, self.deadline - time.monotonic()))
            events = poll.poll(left * 1e3)
            if events:
                return events
            must_check = True

    def lost(self, reason: str, bytes_done: int = 0) -> KVFerryError:
        """The error for a channel that broke under the copy."""
        return TransportError(
            f"the data channel broke: {reason}",
            phase=self.phase,
            peer=self.peer,
            bytes_done=bytes_done,
            now_true=_NOW_TRUE,
            next_step="see whether the peer is alive, then ask again",
        )
