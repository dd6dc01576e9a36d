"""A transport with faults: it delays, cuts, truncates, duplicates, flips bits, freezes or dies on cue.

    script = FaultScript(Fault(What.FLIP, Where.READ))
    transport = faulty(TcpTransport, script)(memory, guard)
    ...
    assert script.fired                # the fault that the test is about did happen

Which fault can happen where is ``POSSIBLE``; another pair is an InputError when the script is made.
A flipped bit of payload is flipped on the way: digests at arrival see it, the source keeps its byte.
"""

from __future__ import annotations

import asyncio
import enum
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, TransportError
from kvferry.layout import CopyPlan
from kvferry.transport.base import (
    Arrived,
    CancelToken,
    Connection,
    Copy,
    Direction,
    Guard,
    Listener,
    Memory,
    OnConnection,
    Transport,
)
from kvferry.transport.digest import digest_chunks

__all__ = ["POSSIBLE", "Fault", "FaultScript", "What", "Where", "faulty"]


class What(enum.StrEnum):
    """What goes wrong."""

    DELAY = "delay"  # it takes ``seconds`` longer
    CUT = "cut"  # the connection breaks
    TRUNCATE = "truncate"  # half of it is missing, and nobody says so
    DUPLICATE = "duplicate"  # it happens twice
    FLIP = "flip"  # one bit is another
    FREEZE = "freeze"  # this process stops (SIGSTOP)
    DIE = "die"  # this process is killed (SIGKILL)


class Where(enum.StrEnum):
    """At which event. Copies fail in their middle: after the first half of their chunks."""

    CONNECT = "connect"
    SEND = "send"
    RECEIVE = "receive"
    READ = "read"
    WRITE = "write"
    SERVE = "serve"  # the guard is asked to admit a copy by the peer


_FRAMES = frozenset(What)
POSSIBLE: dict[Where, frozenset[What]] = {
    Where.CONNECT: frozenset({What.DELAY, What.CUT, What.FREEZE, What.DIE}),
    Where.SEND: _FRAMES,
    Where.RECEIVE: _FRAMES,
    Where.READ: _FRAMES,
    Where.WRITE: _FRAMES,
    Where.SERVE: frozenset({What.DELAY, What.FREEZE, What.DIE}),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, which happens once: at event ``nth`` (from 0) of those that ``matches`` accepts.

    ``matches`` sees the frame at SEND and RECEIVE, so that a fault can wait for a message or a
    phase of the protocol; elsewhere it sees the transfer id.
    """

    what: What
    where: Where
    nth: int = 0
    seconds: float = 0.0
    matches: Callable[[bytes], bool] | None = None


class FaultScript:
    """The faults of one transport, and which of them have happened. Safe from any thread."""

    def __init__(self, *faults: Fault) -> None:
        for fault in faults:
            if fault.what not in POSSIBLE[fault.where]:
                possible = ", ".join(sorted(POSSIBLE[fault.where]))
                raise InputError(f"fault: {fault.what} cannot happen at {fault.where}; possible: {possible}")
        self._lock = threading.Lock()
        self._faults = faults
        self._counts = [0] * len(faults)
        self.fired: list[Fault] = []

    def has(self, where: Where) -> bool:
        """Some of the faults are of this place."""
        return any(fault.where is where for fault in self._faults)

    def due(self, where: Where, subject: bytes = b"") -> Fault | None:
        """Count an event; the fault that happens at it, if any."""
        found: Fault | None = None
        with self._lock:
            for index, fault in enumerate(self._faults):
                if fault.where is where and (fault.matches is None or fault.matches(subject)):
                    if self._counts[index] == fault.nth:
                        found = found or fault
                    self._counts[index] += 1
            if found is not None:
                self.fired.append(found)
        return found


def faulty(transport: type[Transport], script: FaultScript) -> type[Transport]:
    """A class like ``transport``, of the same scheme, whose instances follow ``script``."""

    class Faulty(FaultyTransport):
        scheme = transport.scheme

        def __init__(self, memory: Memory, guard: Guard) -> None:
            super().__init__(memory, guard)
            self.script = script
            self.inner = transport(memory, FaultyGuard(guard, script))

        @classmethod
        def unavailable(cls) -> str | None:
            return transport.unavailable()

    return Faulty


class FaultyTransport(Transport):
    """Hands out connections that follow the script."""

    script: FaultScript
    inner: Transport

    async def listen(self, address: str, on_connection: OnConnection) -> Listener:
        self.inner.security = self.security
        return await self.inner.listen(address, lambda connection: on_connection(self._wrapped(connection)))

    async def connect(self, address: str, timeout_seconds: float) -> Connection:
        fault = self.script.due(Where.CONNECT)
        if fault is not None:
            end_process(fault)
            await asyncio.sleep(fault.seconds)
            if fault.what is What.CUT:
                raise _cut(address)
        self.inner.security = self.security
        return self._wrapped(await self.inner.connect(address, timeout_seconds))

    def _wrapped(self, connection: Connection) -> Connection:
        return FaultyConnection(connection, self.memory, self.script)


class FaultyGuard:
    """Asks the real guard, after the faults of SERVE; where there are some, no board is shown: all ask."""

    def __init__(self, inner: Guard, script: FaultScript) -> None:
        self.board = None if script.has(Where.SERVE) else inner.board
        self._inner = inner
        self._script = script
        self.landed = inner.landed
        self.leave = inner.leave

    def enter(
        self, transfer_id: bytes, direction: Direction, offset: NDArray[np.int64], nbytes: NDArray[np.int64]
    ) -> CancelToken:
        fault = self._script.due(Where.SERVE, transfer_id)
        if fault is not None:
            end_process(fault)
            time.sleep(fault.seconds)
        return self._inner.enter(transfer_id, direction, offset, nbytes)


class FaultyConnection(Connection):
    """One connection that follows the script; all else is the inner one's."""

    def __init__(self, inner: Connection, memory: Memory, script: FaultScript) -> None:
        self._inner = inner
        self._memory = memory
        self._script = script
        self._again: list[bytes] = []
        self.scheme = inner.scheme  # type: ignore[misc] # of the instance: one class wraps every transport
        self.can_write = inner.can_write  # type: ignore[misc]
        self.peer_address = inner.peer_address
        self.peer_names = inner.peer_names
        self.path = inner.path
        self.notes = inner.notes

    async def send(self, frame: bytes) -> None:
        fault = self._script.due(Where.SEND, frame)
        await self._before(fault)
        await self._inner.send(damaged(frame, fault))
        if fault is not None and fault.what is What.DUPLICATE:
            await self._inner.send(frame)

    async def receive(self) -> bytes:
        if self._again:
            return self._again.pop()
        frame = await self._inner.receive()
        fault = self._script.due(Where.RECEIVE, frame)
        await self._before(fault)
        if fault is not None and fault.what is What.DUPLICATE:
            self._again.append(frame)
        return damaged(frame, fault)

    def read(self, copy: Copy) -> Arrived:
        fault = self._script.due(Where.READ, copy.transfer_id)
        if fault is None:
            return self._inner.read(copy)
        arrived = self._faulty_copy(self._inner.read, copy, fault)
        if fault.what is What.FLIP and copy.plan.total_nbytes:
            self._flip(int(copy.plan.dst_offset[0]))
            arrived = replace(arrived, digests=self._digests(copy))
        return arrived

    def write(self, copy: Copy) -> Arrived:
        fault = self._script.due(Where.WRITE, copy.transfer_id)
        if fault is None:
            return self._inner.write(copy)
        if fault.what is not What.FLIP or not copy.plan.total_nbytes:
            return self._faulty_copy(self._inner.write, copy, fault)
        at = int(copy.plan.src_offset[0])
        self._flip(at)
        try:
            return self._inner.write(copy)
        finally:
            self._flip(at)

    async def close(self) -> None:
        await self._inner.close()

    def abort(self, error: KVFerryError) -> None:
        self._inner.abort(error)

    async def _before(self, fault: Fault | None) -> None:
        """What happens to a frame before it goes on."""
        if fault is None:
            return
        end_process(fault)
        await asyncio.sleep(fault.seconds)
        if fault.what is What.CUT:
            error = _cut(self.peer_address)
            self._inner.abort(error)
            raise error

    def _faulty_copy(self, call: Callable[[Copy], Arrived], copy: Copy, fault: Fault) -> Arrived:
        if fault.what is What.DELAY:
            _wait(copy, fault.seconds)
        if fault.what in (What.DELAY, What.FLIP):
            return call(copy)
        if fault.what is What.DUPLICATE:
            call(copy)
            return call(copy)
        first, rest = halves(copy.plan)
        arrived = call(replace(copy, plan=first))
        end_process(fault)
        if fault.what is What.CUT:
            error = _cut(self.peer_address)
            self._inner.abort(error)
            raise error
        if fault.what is What.TRUNCATE:
            return arrived
        return _joined(arrived, call(replace(copy, plan=rest)))  # thawed: it goes on where it was

    def _flip(self, offset: int) -> None:
        self._memory.array[offset] ^= 1

    def _digests(self, copy: Copy) -> NDArray[np.uint64] | None:
        plan = copy.plan
        if not copy.integrity:
            return None
        return digest_chunks(self._memory.array, plan.dst_offset, plan.nbytes, plan.chunk_start)


def damaged(frame: bytes, fault: Fault | None) -> bytes:
    """The frame as the fault leaves it."""
    if fault is None or not frame:
        return frame
    if fault.what is What.TRUNCATE:
        return frame[: len(frame) // 2]
    if fault.what is What.FLIP:
        middle = len(frame) // 2
        return frame[:middle] + bytes([frame[middle] ^ 1]) + frame[middle + 1 :]
    return frame


def end_process(fault: Fault) -> None:
    """Stop or kill this process if that is the fault. After a SIGCONT it goes on."""
    if fault.what is What.FREEZE:
        # Sent to this very thread: one sent to the process may leave it running for a while.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
    if fault.what is What.DIE:
        os.kill(os.getpid(), signal.SIGKILL)


def halves(plan: CopyPlan) -> tuple[CopyPlan, CopyPlan]:
    """The first half of a plan's chunks, and the rest; of one chunk, nothing and all."""
    middle = len(plan.chunk_id) // 2
    return _some_chunks(plan, 0, middle), _some_chunks(plan, middle, len(plan.chunk_id))


def _some_chunks(plan: CopyPlan, first: int, stop: int) -> CopyPlan:
    starts = plan.chunk_start[first : stop + 1]
    pieces = slice(int(starts[0]), int(starts[-1]))
    return CopyPlan(
        plan.src_offset[pieces],
        plan.dst_offset[pieces],
        plan.nbytes[pieces],
        starts - starts[0],
        plan.chunk_id[first:stop],
        plan.chunk_complete[first:stop],
    )


def _joined(first: Arrived, rest: Arrived) -> Arrived:
    """Two copies, one after the other, as one."""
    digests = None
    if first.digests is not None and rest.digests is not None:
        digests = np.concatenate([first.digests, rest.digests])
    return Arrived(
        path=rest.path,
        seconds=first.seconds + rest.seconds,
        piece_offset=np.concatenate([first.piece_offset, rest.piece_offset]),
        piece_nbytes=np.concatenate([first.piece_nbytes, rest.piece_nbytes]),
        chunk_id=np.concatenate([first.chunk_id, rest.chunk_id]),
        chunk_nbytes=np.concatenate([first.chunk_nbytes, rest.chunk_nbytes]),
        digests=digests,
    )


def _wait(copy: Copy, seconds: float) -> None:
    """Wait as a slow copy would: until the time is over, or the copy is cancelled."""
    until = min(time.monotonic() + seconds, copy.deadline)
    while time.monotonic() < until:
        copy.cancel.raise_if_cancelled()
        time.sleep(min(0.01, seconds))


def _cut(peer: str) -> TransportError:
    return TransportError(
        "the connection was cut by a fault script",
        phase="control",
        peer=peer,
        now_true="the connection is closed",
        next_step="connect again",
    )
