"""What a node does for one probe, call by call: the same for an agent and for a node of this process.

Blocking; several calls may run at once, each in a thread of its own.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvferry.errors import CapacityError, KVFerryError
from kvferry.link import Mode
from kvferry.probe import words as w
from kvferry.probe.node import ProbeNode, finish
from kvferry.probe.snapshot import PeerRate, Rates
from kvferry.transfer import Stats
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
        self.rates = Rates()
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
            raise

    def stats(self) -> Stats:
        """What the endpoint holds now."""
        return self._node.endpoint.stats()

    def peers(self) -> tuple[PeerRate, ...]:
        """What came from each peer so far."""
        return self.rates.peers()

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
                copies.append(self.rates.note(record))
            else:
                self._node.push(ticket, call.payload, call.transport, left)
                record = self._node.await_release(ticket, left)
            handshakes.append(record.timings.handshake)
        return w.Copies(tuple(copies), tuple(handshakes))

    def _collect(self, call: w.CollectCall) -> w.Copies:
        try:
            if call.mode is Mode.PUSH:
                # Asked for before the first arrives: a copy that has come and gone is no longer known.
                moves = [self._node.expect(ticket) for ticket in call.tickets]
                return w.Copies(tuple(self.rates.note(finish(move)) for move in moves))
            for ticket in call.tickets:
                self._node.await_release(ticket, call.seconds)
        except KVFerryError:
            self._node.withdraw(call.tickets)
            raise
        return w.Copies()

    def _compare(self, call: w.CompareCall) -> w.Done:
        self._node.compare(call.payload, call.slot, call.seed)
        return w.Done()
