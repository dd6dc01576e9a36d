"""What a node does for one probe, call by call: the same for an agent and for a node of this process.

Blocking; several calls may run at once, each in a thread of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.errors import CapacityError, InputError, KVFerryError
from kvferry.link import Mode
from kvferry.probe import words as w
from kvferry.probe.node import Copied, ProbeNode, finish
from kvferry.transfer import Ended, InFlight, Move, Observer, Stats, Timings, TransferRecord
from kvferry.transport.security import HOST_ONLY, Security

__all__ = ["Worker"]

_KEPT_ERRORS = 20
_numbers = itertools.count()


class Worker:
    """One probe at one node, until ``close``. Raises as ProbeNode; CapacityError beyond ``max_bytes``."""

    def __init__(
        self,
        name: str,
        call: w.OpenCall,
        addresses: Sequence[str],
        max_bytes: int,
        security: Security = HOST_ONLY,
        *,
        process: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        if call.room.nbytes > max_bytes:
            raise CapacityError(
                f"the probe wants a pool of {call.room.nbytes} bytes here, {max_bytes} are allowed",
                peer=name,
                next_step="probe a smaller payload or incast, or start the agent with a larger --max-bytes",
            )
        self.coordinator = call.coordinator
        self.nbytes = call.room.nbytes
        self.deadline = time.monotonic() + call.seconds
        self._observers = tuple(observers)
        self.errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        self._node = ProbeNode(
            name, call.room, addresses, integrity=call.integrity, security=security, process=process
        )
        self.opened = w.Opened(self._node.endpoint.addresses, self._node.registration, self._node.seed)
        self._handlers: dict[type[Any], Callable[[Any], Any]] = {
            w.HoldCall: self._hold,
            w.MoveCall: self._move,
            w.CollectCall: self._collect,
            w.CompareCall: self._compare,
        }

    def handle(self, call: w.Call) -> Any:
        """Do one call and return its value; raises the KVFerryError that it ended with."""
        try:
            return self._handlers[type(call)](call)
        except KVFerryError as error:
            self.errors.append(str(error))
            if isinstance(call, w.MoveCall | w.CollectCall) and not isinstance(error, InputError):
                self._tell(Ended(_unmoved(call, error), error.to_record()))
            raise

    def stats(self) -> Stats:
        """What the endpoint holds now."""
        return self._node.endpoint.stats()

    def transfers(self) -> tuple[InFlight, ...]:
        """The same, one by one."""
        return self._node.endpoint.transfers()

    def close(self) -> None:
        """Everything is given back. Safe to call twice."""
        self._node.close()

    def _hold(self, call: w.HoldCall) -> w.Held:
        return w.Held(self._node.hold(call.mode, call.payload, call.slot, call.count, call.seconds))

    def _move(self, call: w.MoveCall) -> w.Copies:
        copies, handshakes = [], []
        deadline = time.monotonic() + call.seconds
        for ticket in call.tickets:
            left = max(0.001, deadline - time.monotonic())
            if call.mode is Mode.PULL:
                record = self._node.pull(ticket, call.payload, call.slot, call.transport, left)
                copies.append(Copied.of(record))
            else:
                self._node.push(ticket, call.payload, call.transport, left)
                record = self._node.await_release(ticket, left)
            self._tell(Ended(record))
            handshakes.append(record.timings.handshake)
        return w.Copies(tuple(copies), tuple(handshakes))

    def _collect(self, call: w.CollectCall) -> w.Copies:
        try:
            if call.mode is Mode.PUSH:
                # Asked for before the first arrives: a copy that has come and gone is no longer known.
                moves = [self._node.expect(ticket) for ticket in call.tickets]
                return w.Copies(tuple(self._finished(move) for move in moves))
            for ticket in call.tickets:
                self._tell(Ended(self._node.await_release(ticket, call.seconds)))
        except KVFerryError:
            self._node.withdraw(call.tickets)
            raise
        return w.Copies()

    def _finished(self, move: Move) -> Copied:
        record = finish(move)
        self._tell(Ended(record))
        return Copied.of(record)

    def _tell(self, ended: Ended) -> None:
        # Here and not by the endpoint, which would say each word between two measurements.
        for observer in self._observers:
            observer(ended)

    def _compare(self, call: w.CompareCall) -> w.Done:
        self._node.compare(call.payload, call.slot, call.seed)
        return w.Done()


def _unmoved(call: w.MoveCall | w.CollectCall, error: KVFerryError) -> TransferRecord:
    """A transfer that failed, as far as its error tells."""
    claims, pulls = isinstance(call, w.MoveCall), call.mode is Mode.PULL
    return TransferRecord(
        request_id=error.request_id,
        role="decode" if claims == pulls else "prefill",
        mode=call.mode.value,
        peer=error.peer,
        transport=call.transport if isinstance(call, w.MoveCall) else "",
        path="",
        nbytes=error.bytes_done,
        descriptors=0,
        chunks=0,
        state_nbytes=0,
        integrity=False,
        timings=Timings(),
    )
