"""HTTP as every server here speaks it: by h11, and no wait for a client without an end.

Needs the extra ``serve``. h11 whatever else is installed: it bounds a request's head, httptools does not.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

__all__ = ["PatientProtocol"]

PATIENCE_SECONDS = 20.0
"""A connection is looked at this often; one whose client did nothing since the last look is cut off."""


class PatientProtocol(H11Protocol):
    """One connection, cut off where its client neither asks nor reads: such a one would hold it for ever.

    A request in work waits for its answer as long as that takes, and an answer as long as some of it
    is read.
    """

    _answered = 0
    _seen: tuple[int, int] | None = None
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def on_response_complete(self) -> None:
        self._answered += 1
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        unread = self.transport.get_write_buffer_size()
        at_work = self.cycle is not None and not self.cycle.response_complete
        seen = None if at_work and not unread else (self._answered, unread)
        if seen is not None and seen == self._seen:
            self.transport.abort()
            return
        self._seen = seen
        self._timer = self.loop.call_later(PATIENCE_SECONDS, self._look)
