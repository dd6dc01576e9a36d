"""Accepting sockets: each is greeted in a task of its own, so a silent peer holds up nobody."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from kvferry.errors import KVFerryError, LocalError
from kvferry.transport.base import Listener
from kvferry.transport.greeting import GREETING_SECONDS

__all__ = ["BACKLOG", "SocketListener"]

BACKLOG = 128

# More peers than this at once in their first five seconds, of all hosts or of one: the oldest is dropped.
MAX_GREETING = 256
MAX_GREETING_PER_HOST = 64

_log = logging.getLogger(__name__)


class SocketListener(Listener):
    """Owns a listening socket. ``greet`` takes a fresh socket over, or raises and leaves it to be closed."""

    def __init__(
        self, sock: socket.socket, address: str, greet: Callable[[socket.socket], Awaitable[None]]
    ) -> None:
        self.address = address
        self._sock = sock
        self._greet = greet
        self._greeting: dict[asyncio.Task[bool], str] = {}
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    async def close(self) -> None:
        tasks = [self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await loop.sock_accept(self._sock)
            except OSError as error:
                # A peer that is gone already costs nothing; no descriptors left costs a second.
                _log.warning("%s: cannot accept: %s", self.address, error)
                await asyncio.sleep(0 if isinstance(error, ConnectionError) else 1.0)
                continue
            host = _host(where)
            self._make_room(host)
            task = loop.create_task(self._welcome(sock))
            self._greeting[task] = host
            task.add_done_callback(partial(self._welcomed, sock))

    def _make_room(self, host: str) -> None:
        """Drop who has waited longest: of this host if it has its share, so that others stay."""
        of_host = [task for task, other in self._greeting.items() if other == host]
        waiting = of_host if len(of_host) >= MAX_GREETING_PER_HOST else list(self._greeting)
        if len(of_host) >= MAX_GREETING_PER_HOST or len(waiting) >= MAX_GREETING:
            waiting[0].cancel()
            del self._greeting[waiting[0]]  # now: the next may come before it has ended

    async def _welcome(self, sock: socket.socket) -> bool:
        """Whether ``greet`` has taken the socket over."""
        sock.setblocking(False)
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                await self._greet(sock)
        except (OSError, TimeoutError, KVFerryError) as error:
            # A certificate of ours that cannot be read, or that peers refuse, is nobody else's to find.
            level = logging.WARNING if isinstance(error, LocalError) else logging.INFO
            _log.log(level, "%s: dropped a peer: %s", self.address, error or "it said nothing in time")
        except Exception:  # noqa: BLE001 - on_connection is the caller's code; logged, its peer is dropped
            _log.exception("%s: a peer could not be handed over", self.address)
        else:
            return True
        return False

    def _welcomed(self, sock: socket.socket, task: asyncio.Task[bool]) -> None:
        # Here, not in the task: one that is cancelled before it began never runs.
        self._greeting.pop(task, None)
        if task.cancelled() or not task.result():
            sock.close()


def _host(where: Any) -> str:
    """What a socket address says of the host; Unix sockets are all of this one."""
    return str(where[0]) if isinstance(where, tuple) else ""
