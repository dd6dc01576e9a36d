"""The data channels that this side asks on: opened when needed, at most a few, used by turns."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvferry.errors import KVFerryError
from kvferry.transport.address import MAX_STREAMS
from kvferry.transport.channel import Channel
from kvferry.transport.patience import SLICE_SECONDS, Patience

__all__ = ["Asking"]


class Asking:
    """A pool of idle channels. ``open_one`` starts to open another; it ends in ``adopt`` or ``failed``.

    ``num_opening`` channels are on their way already.
    """

    def __init__(self, open_one: Callable[[], None], num_opening: int) -> None:
        self._open_one = open_one
        self._changed = threading.Condition()
        self._idle: list[Channel] = []
        self._busy: set[Channel] = set()
        self._num_opening = num_opening
        self._failure: KVFerryError | None = None
        self._is_shut = False

    def channel(self, patience: Patience) -> Borrowed:
        """Borrow a channel, waiting for one where all are in use; one left out of step is closed."""
        return Borrowed(self, patience)

    def take(self, patience: Patience) -> Channel:
        """A channel on which the last request is over for the peer too, to be given back."""
        while True:
            channel = self._take(patience)
            is_settled = False
            try:
                is_settled = channel.settle(patience)
            finally:
                if not is_settled:
                    self.give_back(channel)
            if is_settled:
                return channel

    def give_back(self, channel: Channel) -> None:
        """Nobody uses it any more; out of step it is closed."""
        with self._changed:
            self._busy.discard(channel)
            if channel.is_in_step and not self._is_shut:
                self._idle.append(channel)
            else:
                channel.close()
            self._changed.notify_all()

    def adopt(self, channel: Channel) -> bool:
        """A channel was opened. False when it is not wanted; the caller closes it."""
        with self._changed:
            self._num_opening = max(0, self._num_opening - 1)
            if self._is_shut or len(self._idle) + len(self._busy) >= MAX_STREAMS:
                return False
            self._failure = None
            self._idle.append(channel)
            self._changed.notify_all()
            return True

    def failed(self, error: KVFerryError) -> None:
        """A channel could not be opened."""
        with self._changed:
            self._num_opening = max(0, self._num_opening - 1)
            self._failure = error
            self._changed.notify_all()

    def shut(self) -> None:
        """Wake everybody who waits on a channel; from any thread."""
        with self._changed:
            self._is_shut = True
            for channel in (*self._idle, *self._busy):
                channel.shut()
            self._changed.notify_all()

    def close(self) -> None:
        """Close what is idle; nobody may be using the rest."""
        with self._changed:
            self._is_shut = True
            while self._idle:
                self._idle.pop().close()

    def _take(self, patience: Patience) -> Channel:
        with self._changed:
            while True:
                patience.check()
                if self._idle:
                    channel = self._idle.pop()
                    self._busy.add(channel)
                    return channel
                self._ask_for_more()
                self._changed.wait(SLICE_SECONDS)

    def _ask_for_more(self) -> None:
        if self._failure is not None and not self._busy and not self._num_opening:
            failure, self._failure = self._failure, None
            raise failure
        if not self._num_opening and len(self._busy) < MAX_STREAMS and self._failure is None:
            self._num_opening += 1
            self._open_one()


class Borrowed:
    """One channel, for the time of a block."""

    def __init__(self, asking: Asking, patience: Patience) -> None:
        self._asking = asking
        self._patience = patience

    def __enter__(self) -> Channel:
        self._channel = self._asking.take(self._patience)
        return self._channel

    def __exit__(self, *_: object) -> None:
        self._asking.give_back(self._channel)
