"""Two sides of a transport in one process, with the event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kvferry.layout import CopyPlan
from kvferry.testing.guards import ScriptedGuard
from kvferry.transport.base import (
    Arrived,
    CancelToken,
    Connection,
    Copy,
    Direction,
    Listener,
    Memory,
    Transport,
)
from kvferry.transport.board import Board

__all__ = ["TRANSFER_ID", "WAIT_SECONDS", "LoopThread", "Side", "TransportPair"]

T = TypeVar("T")

WAIT_SECONDS = 30.0
TRANSFER_ID = b"0123456789abcdef"


class LoopThread:
    """An event loop that runs in a thread, so that blocking calls can be made beside it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        # A daemon, so that a test that fails before it closes the loop does not keep pytest from ending.
        self._thread = threading.Thread(target=self.loop.run_forever, name="kvferry test loop", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` to its end; it must come within WAIT_SECONDS."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, WAIT_SECONDS), self.loop).result()

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start ``work`` and go on."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, WAIT_SECONDS), self.loop)

    def close(self) -> None:
        self.run(self.loop.shutdown_default_executor())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass(slots=True, eq=False)
class Side:
    """One side: its pool, its guard, its transport, and its connection once there is one."""

    memory: Memory
    guard: ScriptedGuard
    transport: Transport
    connection: Connection

    def copy(
        self,
        direction: Direction,
        plan: CopyPlan,
        *,
        integrity: bool = True,
        seconds: float = WAIT_SECONDS,
        cancel: CancelToken | None = None,
    ) -> Arrived:
        """Read or write by ``plan``, blocking."""
        copy = Copy(TRANSFER_ID, plan, time.monotonic() + seconds, integrity, cancel or CancelToken())
        return self.connection.read(copy) if direction is Direction.READ else self.connection.write(copy)


class TransportPair:
    """A listening and a connecting side that are connected.

    ``listen_memory`` and ``connect_memory`` are taken over and closed with the pair. ``through`` is
    given the listener's address and says where to connect instead, as to something in between. The
    listening side's guard has a board where ``with_board`` is set.
    """

    def __init__(
        self,
        transport: type[Transport],
        address: str,
        listen_memory: Memory,
        connect_memory: Memory,
        *,
        through: Callable[[str], str] = str,
        with_board: bool = False,
    ) -> None:
        self.loop = LoopThread()
        self.threads = ThreadPoolExecutor(16, thread_name_prefix="kvferry test")
        self.accepted: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        self.board = Board.create() if with_board else None
        guards = ScriptedGuard(self.board), ScriptedGuard()
        transports = transport(listen_memory, guards[0]), transport(connect_memory, guards[1])
        self.listener: Listener = self.loop.run(transports[0].listen(address, self.accepted.put))
        connection = self.loop.run(transports[1].connect(through(self.listener.address), WAIT_SECONDS))
        self.listening = Side(listen_memory, guards[0], transports[0], self.next_accepted())
        self.connecting = Side(connect_memory, guards[1], transports[1], connection)
        self._opened: list[Connection] = [self.listening.connection, connection]

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.listening, self.connecting

    def next_accepted(self) -> Connection:
        return self.accepted.get(timeout=WAIT_SECONDS)

    def connect(self) -> tuple[Side, Side]:
        """One more connection between the same two pools: its listening and its connecting side."""
        connection = self.loop.run(self.connecting.transport.connect(self.listener.address, WAIT_SECONDS))
        ends = self.next_accepted(), connection
        self._opened += ends
        listening, connecting = (
            replace(side, connection=end) for side, end in zip(self.sides, ends, strict=True)
        )
        return listening, connecting

    def close_connections(self) -> None:
        async def close_all() -> None:
            await asyncio.gather(*(connection.close() for connection in self._opened))

        self.loop.run(close_all())

    def close(self) -> None:
        self.close_connections()
        self.loop.run(self.listener.close())
        self.loop.close()
        self.threads.shutdown()
        for side in self.sides:
            side.memory.close()
        if self.board is not None:
            self.board.close()
