"""Run an application of ours with uvicorn until it is told to end. Needs the extra ``serve``."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import uvicorn

from kvferry.serve.patience import PatientProtocol

__all__ = ["run_app"]

_GRACE_SECONDS = 5
# For answers that were just made to fail to be written, where nobody waits any longer.
_LAST_SECONDS = 2.0


def run_app(
    app: Any,
    sock: socket.socket,
    on_ready: Callable[[], None],
    on_end: Callable[[], Awaitable[None]],
    on_shutdown: Callable[[], None] = lambda: None,
) -> None:
    """Run an application on a socket until SIGINT or SIGTERM.

    What is under way has 5 s then, or until a second SIGINT; ``on_end`` makes the rest fail in order;
    ``on_shutdown`` comes before all that, for streams that have no end of their own.
    An error of ``on_ready`` (stdout is gone) ends it in order too, and is raised.
    """
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        http=PatientProtocol,
        ws="none",
        timeout_graceful_shutdown=2 * _GRACE_SECONDS,
    )
    server = _Server(config, on_ready, on_end, on_shutdown)
    asyncio.run(server.serve(sockets=[sock]))
    if server.failure is not None:
        raise server.failure


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        on_ready: Callable[[], None],
        on_end: Callable[[], Awaitable[None]],
        on_shutdown: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self.failure: Exception | None = None
        self._on_ready = on_ready
        self._on_end = on_end
        self._on_shutdown = on_shutdown

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            try:
                self._on_ready()
            except Exception as error:  # noqa: BLE001 - raised again by run_app, when all has ended in order
                self.failure = error
                self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        ending = asyncio.ensure_future(self._end())
        await super().shutdown(sockets)
        if self.force_exit:  # then uvicorn leaves all three out
            await ending
            if self.server_state.tasks:
                await asyncio.wait(list(self.server_state.tasks), timeout=_LAST_SECONDS)
            await self.lifespan.shutdown()
        ending.cancel()

    async def _end(self) -> None:
        end = asyncio.get_running_loop().time() + _GRACE_SECONDS
        while not self.force_exit and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.1)
        await self._on_end()
