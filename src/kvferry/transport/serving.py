"""The data channels that the peer asks on: a thread each, asleep in the kernel between requests."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from kvferry.errors import (
    CapacityError,
    DeadlineError,
    KVFerryError,
    LocalError,
    PeerError,
    TransportError,
)
from kvferry.transport.address import MAX_STREAMS
from kvferry.transport.base import CancelToken, Direction, Guard, Memory
from kvferry.transport.channel import Channel
from kvferry.transport.patience import SLICE_SECONDS, Patience
from kvferry.transport.users import Users, forget_locals
from kvferry.transport.wire import (
    ONE_PIECE_NBYTES,
    REQUEST,
    Head,
    Kind,
    Operation,
    Request,
    decode,
    decode_head,
    malformed,
)

__all__ = ["Handler", "Serving", "Slots"]

# Reads and writes of one peer that are served at once, over all of its connections: each may take
# 16 MiB of tables and 4 MiB of staging. More wait, within the time that a request has.
MAX_SERVED_PER_PEER = 32

# From the first byte of a request to the end of its tables.
REQUEST_SECONDS = 10.0
# How long a refused peer may take to notice; it costs this thread, and nobody else, that time.
DRAIN_SECONDS = 2.0

_log = logging.getLogger(__name__)

#: Serves one admitted request; raises whatever ends it early.
Handler = Callable[[Channel, Request, Patience], None]


@dataclass(frozen=True, slots=True)
class Served:
    """What a connection serves from: its memory, who admits, and one handler for each operation."""

    memory: Memory
    guard: Guard
    handlers: Mapping[Operation, Handler]
    slots: Slots


class Slots:
    """Room for the requests of one peer."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(MAX_SERVED_PER_PEER)

    def take(self, patience: Patience) -> None:
        """Take a place, to be given back. Raises CapacityError where none comes free in time."""
        while not self._free.acquire(timeout=SLICE_SECONDS):
            try:
                patience.check()
            except DeadlineError as error:
                raise CapacityError(
                    f"{MAX_SERVED_PER_PEER} copies of this peer are served at once, the most allowed",
                    phase="request",
                    peer=patience.peer,
                    next_step="ask again when others have ended",
                ) from error

    def give_back(self) -> None:
        self._free.release()


class Serving:
    """The serving threads of one connection. They end when their channel or ``ended`` does."""

    def __init__(self, served: Served, peer: str, users: Users, ended: CancelToken) -> None:
        self._served = served
        self._peer = peer
        self._users = users
        self._ended = ended
        self._lock = threading.Lock()
        self._threads: dict[Channel, threading.Thread] = {}

    def start(self, channel: Channel) -> bool:
        """Serve a channel until it ends; False when there are too many, and the caller closes it."""
        with self._lock:
            self._threads = {c: thread for c, thread in self._threads.items() if thread.is_alive()}
            if len(self._threads) >= MAX_STREAMS:
                return False
            try:
                self._users.enter()
            except KVFerryError:
                return False
            name = f"kvferry serves {self._peer}"
            thread = threading.Thread(target=self._run, args=(channel,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system has no thread to give
                self._users.leave()
                return False
            self._threads[channel] = thread
            return True

    def shut(self) -> None:
        """Wake every serving thread; from any thread."""
        with self._lock:
            for channel in self._threads:
                channel.shut()

    def join(self) -> None:
        """Wait for threads that have left already to be gone."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self, channel: Channel) -> None:
        try:
            while channel.is_in_step:
                channel.wait_input()
                self._serve(channel)
        except KVFerryError as error:
            _log.debug("%s: %s", self._peer, error)
        finally:
            channel.close()
            self._users.leave()

    def _serve(self, channel: Channel) -> None:
        """Serve one request; on return the channel is in step, or the peer was told why it is not."""
        channel.is_in_step = False
        patience = Patience(time.monotonic() + REQUEST_SECONDS, (self._ended,), self._peer, "request")
        # The tables of one piece come with it, and no request has smaller ones.
        start = channel.read_start(REQUEST.size, REQUEST.size + ONE_PIECE_NBYTES, patience, is_there=True)
        takes_slot = False
        try:
            head = decode_head(start[: REQUEST.size], self._peer)
            if head.operation is not Operation.LOOK:  # which takes no staging, and may last
                self._served.slots.take(patience)
                takes_slot = True
        except (PeerError, CapacityError) as error:  # the tables are not read: of no more use
            self._tell(channel, error)
            channel.drain(DRAIN_SECONDS)
            return
        try:
            self._serve_tables(channel, head, start[REQUEST.size :])
        finally:
            if takes_slot:
                self._served.slots.give_back()

    def _serve_tables(self, channel: Channel, head: Head, start: bytes) -> None:
        if len(start) == head.tables_nbytes:
            tables = np.frombuffer(start, np.uint8)
        else:
            patience = Patience(time.monotonic() + REQUEST_SECONDS, (self._ended,), self._peer, "request")
            tables = channel.read(head.tables_nbytes, patience, start)
        operation = head.operation
        # A reader has said all that it had to say: in step until its answer begins.
        channel.is_in_step = operation is not Operation.WRITE
        try:
            self._admit_and_serve(channel, decode(head, tables, self._served.memory.nbytes, self._peer))
        except TransportError:
            raise
        except KVFerryError as error:
            forget_locals(error)
            self._refuse(channel, operation, error)
        except Exception as error:  # noqa: BLE001 - the guard is the caller's code; logged, and told
            _log.exception("%s: serving a request failed", self._peer)
            self._refuse(channel, operation, LocalError(f"the other side failed: {type(error).__name__}"))

    def _admit_and_serve(self, channel: Channel, request: Request) -> None:
        direction = Direction.WRITE if request.operation is Operation.WRITE else Direction.READ
        guard = self._served.guard
        deadline = time.monotonic() + request.seconds
        handler = self._served.handlers.get(request.operation)
        if handler is None:
            raise malformed(f"operation {request.operation.name}, which this transport has not", self._peer)
        token = guard.enter(request.transfer_id, direction, request.offset, request.nbytes)
        try:
            patience = Patience(deadline, (self._ended, token), self._peer)
            handler(channel, request, patience)
        finally:
            guard.leave(request.transfer_id)
        if request.operation in (Operation.WRITE, Operation.LOOK):
            # The copy is over: that the grant ends from here on is for the protocol to say.
            patience = Patience(deadline, (self._ended,), self._peer)
            channel.write_mark(Kind.DONE, patience, request.total_nbytes)
            channel.is_in_step = True

    def _refuse(self, channel: Channel, operation: Operation, error: KVFerryError) -> None:
        if channel.is_in_step:
            self._tell(channel, error)
        elif operation is Operation.WRITE:
            self._tell(channel, error)
            channel.drain(DRAIN_SECONDS)

    def _tell(self, channel: Channel, error: KVFerryError) -> None:
        patience = Patience(time.monotonic() + DRAIN_SECONDS, (self._ended,), self._peer)
        with contextlib.suppress(KVFerryError):  # the peer may be gone, which it then knows itself
            channel.write_ended(error, patience)
