"""One end of a probe: an endpoint over a pool of its own, and the moves that are asked of it.

Blocking; each call is of one copy or a few. The pool is made here and for nothing else, so no probe
can touch a pool that serves; tickets that are of no probe are refused before anything is sent.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CorruptError, DeadlineError, InputError, KVFerryError
from kvferry.layout import TensorLayout
from kvferry.link import Mode, Registration
from kvferry.probe.payload import TOKENS, Payload, Room
from kvferry.protocol.ticket import read_ticket
from kvferry.transfer import Endpoint, Move, Pool, Timeouts, TransferRecord
from kvferry.transport.security import HOST_ONLY, Security

__all__ = ["TIMEOUTS", "Copied", "ProbeNode"]

# A probe loads the machines that it runs on: silence counts as loss later than in production.
TIMEOUTS = Timeouts(handshake=10.0, heartbeat=0.5, lost=5.0)
REQUEST = "probe-"
_names = itertools.count()
# Copies of a probe go into the same blocks, one after the other; the next is held before the last has ended.
_TOGETHER = b"probe"


class Copied(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One copy as decode saw it; ``handshake_seconds`` is 0 over a connection that was there."""

    nbytes: int
    descriptors: int
    seconds: float
    handshake_seconds: float
    transport: str
    path: str

    @staticmethod
    def of(record: TransferRecord) -> Copied:
        """From a record; the handshake is kept apart."""
        timings = record.timings
        return Copied(
            record.nbytes,
            record.descriptors,
            timings.total - timings.handshake,
            timings.handshake,
            record.transport,
            record.path,
        )


class ProbeNode:
    """An endpoint and its pool; both are given back by ``close``."""

    def __init__(
        self,
        name: str,
        room: Room,
        addresses: Sequence[str],
        *,
        integrity: bool = True,
        security: Security = HOST_ONLY,
        process: bool = True,
    ) -> None:
        started = time.perf_counter()
        self.pool = Pool.allocate(room.layout())
        try:
            touched = time.perf_counter() - started
            self.endpoint = Endpoint.open(
                pool=self.pool,
                name=name,
                integrity=integrity,
                timeouts=TIMEOUTS,
                tls=security.identity,
                plain=security.plain,
                process=process,
            )
        except BaseException:
            self.pool.close()
            raise
        try:
            self.endpoint.add_addresses(addresses)
            # The pool's pages, and what transports did with them; starting a process is no part of it.
            registered = touched + self.endpoint.stats().registration_seconds
            self.registration = Registration(nbytes=self.pool.layout.nbytes, seconds=registered)
            self.room = room
            self.seed = secrets.randbits(32)
            _scattered_words(self.pool.array, self.seed)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Abort what is under way and give everything back. Safe to call twice."""
        self.endpoint.close()
        self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The side that holds: prefill for a pull, decode for a push.

    def hold(self, mode: Mode, payload: Payload, slot: int, count: int, seconds: float) -> tuple[bytes, ...]:
        """Tickets for ``count`` copies of the same blocks, one after the other; held for ``seconds``.

        All are of one request: a block is lent to one request at a time.
        """
        name = f"{REQUEST}{next(_names)}"
        tables = self.room.tables(payload, None if mode is Mode.PULL else slot)
        tickets: list[bytes] = []
        try:
            for _ in range(count):
                if mode is Mode.PULL:
                    like = tickets[0] if tickets else b""
                    ticket = self.endpoint.offer(
                        None, tables, tokens=TOKENS, request_id=name, lease_seconds=seconds, like=like
                    )
                else:
                    ticket = self.endpoint.reserve(
                        name, TOKENS, tables, lease_seconds=seconds, together=_TOGETHER
                    )
                tickets.append(ticket)
        except KVFerryError:
            self.withdraw(tickets)
            raise
        return tuple(tickets)

    def withdraw(self, tickets: Sequence[bytes]) -> None:
        """Hold these no longer, whatever became of them."""
        for ticket in tickets:
            self.endpoint.cancel(ticket, "the probe gave this batch of copies up")

    def await_release(self, ticket: bytes, seconds: float) -> TransferRecord:
        """Until this side's blocks are its own again; raises what ended the transfer."""
        try:
            return self.endpoint.outcome(ticket).result(seconds)
        except TimeoutError:
            raise DeadlineError(
                f"a copy did not end within {seconds:.3g} s", phase="probe", next_step="see its peer's log"
            ) from None

    def expect(self, ticket: bytes) -> Move:
        """What is pushed into one of this node's reservations."""
        return self.endpoint.arrival(ticket)

    # The side that claims: decode for a pull, prefill for a push.

    def pull(
        self, ticket: bytes, payload: Payload, slot: int, transport: str, seconds: float
    ) -> TransferRecord:
        """One copy, up to started; decode's record."""
        _check_ticket(ticket)
        move = self.endpoint.pull(
            ticket,
            self.room.tables(payload, slot),
            timeout_seconds=seconds,
            transport=transport,
            together=_TOGETHER,
        )
        return finish(move)

    def push(self, ticket: bytes, payload: Payload, transport: str, seconds: float) -> None:
        """One copy, up to the commit; ``await_release`` tells how it ended."""
        _check_ticket(ticket)
        push = self.endpoint.push(
            ticket,
            self.room.tables(payload),
            tokens=TOKENS,
            timeout_seconds=seconds,
            transport=transport,
        )
        push.layers(*self.room.layers(payload))
        push.commit(None)

    def compare(self, payload: Payload, slot: int, seed: int) -> None:
        """What arrived last in ``slot`` against the words of the node with ``seed``: by address, not by plan.

        Raises CorruptError.
        """
        group = self.room.index(payload)
        source = self.room.tables(payload)[group].ids
        here = self.room.tables(payload, slot)[group].ids
        for tensor in self.pool.layout.groups[group].tensors:
            for start in range(0, len(source), _STEP_BLOCKS):
                part = slice(start, start + _STEP_BLOCKS)
                found = _blocks(self.pool.array, tensor, here[part])
                if not np.array_equal(found, _expected(tensor, source[part], seed)):
                    raise CorruptError(
                        f"bytes of {tensor} differ after the move",
                        phase="probe",
                        next_step="do not trust this pair: look for failing memory or hardware",
                    )


def finish(move: Move) -> TransferRecord:
    """Wait until it has arrived, say started, and return decode's record."""
    move.result()
    move.started()
    return move.record


# Blocks that are compared at a time: the words that are expected take as much memory again.
_STEP_BLOCKS = 4096


def _check_ticket(ticket: bytes) -> None:
    name = read_ticket(ticket).request_id
    if not name.startswith(REQUEST):
        raise InputError(f"ticket: it is of request {name!r}, which is no probe; nothing was sent")


def _scattered_words(array: NDArray[np.uint8], seed: int) -> None:
    """Every four bytes their own, and another node's unlike: a block in the wrong place shows."""
    words = array[: array.nbytes // 4 * 4].view(np.uint32)
    step = 1 << 22
    for start in range(0, len(words), step):
        part = words[start : start + step]
        part[:] = _words(np.arange(start, start + len(part), dtype=np.uint32), seed)


def _words(index: NDArray[np.uint32], seed: int) -> NDArray[np.uint32]:
    return (index ^ np.uint32(seed)) * np.uint32(0x9E3779B1)


def _blocks(array: NDArray[np.uint8], tensor: TensorLayout, ids: NDArray[np.int32]) -> NDArray[np.uint32]:
    words = array[tensor.offset :]
    width = tensor.block_stride
    return words[: len(words) // width * width].view(np.uint32).reshape(-1, width // 4)[ids]


def _expected(tensor: TensorLayout, ids: NDArray[np.int32], seed: int) -> NDArray[np.uint32]:
    first = (tensor.offset + ids.astype(np.int64) * tensor.block_stride) // 4
    index = np.add.outer(first, np.arange(tensor.block_stride // 4))
    return _words(index.astype(np.uint32), seed)
