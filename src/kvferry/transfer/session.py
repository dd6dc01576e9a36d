"""One transfer at one side: events in, the table's actions done, each wait with its end.

Lives on the node's loop and never waits itself: copies and digests run in threads and come back
as events, sends are queued, and FREE goes on when the last copy has left the memory.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.errors import DeadlineError, KVFerryError, LocalError, PeerError
from kvferry.layout import BlockTable, WireTensor
from kvferry.protocol import messages as m
from kvferry.protocol.compat import pair_form
from kvferry.protocol.machine import Machine
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.table import (
    IN_DOUBT,
    TRUTH,
    TRUTH_BY_DECODES_WORD,
    WAITS,
    Action,
    Event,
    Phase,
    Role,
    Wait,
)
from kvferry.protocol.ticket import Mode
from kvferry.transfer.actions import ACTIONS
from kvferry.transfer.calls import Arrival, InFlight, NodeConfig, Outcome
from kvferry.transfer.exchange import take
from kvferry.transfer.payload import Part, Payload
from kvferry.transfer.trace import PhaseClock, TransferRecord
from kvferry.transfer.windows import used_conversions
from kvferry.transport.base import CopyEndedError

if TYPE_CHECKING:
    from kvferry.transfer.node import Node
    from kvferry.transfer.peer import Peer

__all__ = ["Session"]

# Out of these phases decode's peer cannot take anything back: its word changes nothing here.
_SAFE_AT_DECODE = frozenset({Phase.COMMITTED, Phase.ALONE, Phase.STARTING})


@dataclass(eq=False)
class Session:
    """State of one transfer. ``tables`` are this side's blocks, ``peer_tables`` the other's.

    ``held`` is the prefix that decode said it holds (at decode), ``held_tokens`` what both agreed on.
    ``for_peer``: who may claim this hold, by certificate. ``portions``: what of the pair moves;
    empty for all that both layouts hold. ``grant`` names the grant under which the bytes move: this
    side's own, or the one that the peer told of.

    Futures: ``published`` resolves at decode when the state is visible (or with the error);
    ``ended`` resolves when this side's blocks are its engine's again; ``answered`` when a claim of
    this side is no longer waiting for its answer, whatever came of it.
    """

    node: Node
    role: Role
    mode: Mode
    transfer: bytes
    request_id: str
    tokens: int
    tables: tuple[BlockTable, ...]
    lease_deadline: float
    timeout_deadline: float
    ticket: bytes = b""
    state: bytes = b""
    held: HeldPrefix = field(default_factory=HeldPrefix)
    held_tokens: int = 0
    prompt_ids: bytes = b""
    portions: tuple[m.Portion, ...] = ()
    together: bytes = b""
    for_peer: str = ""
    peer_tokens: int = 0
    peer: Peer | None = None
    handshake_seconds: float = 0.0
    peer_tables: tuple[BlockTable, ...] = ()
    commit: m.Commit | None = None
    committed: m.Committed | None = None
    error: KVFerryError | None = None
    peer_gave_up: bool = False
    grant: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    def __post_init__(self) -> None:
        self.config: NodeConfig = self.node.config
        self.machine = Machine(self.role, self.mode)
        self.clock = PhaseClock(self.machine.phase, self.handshake_seconds)
        self.payload: Payload = Payload(self)
        self._loop = asyncio.get_running_loop()
        self.published: asyncio.Future[Arrival] = self._loop.create_future()
        self.ended: asyncio.Future[Outcome] = self._loop.create_future()
        self.answered: asyncio.Future[None] = self._loop.create_future()
        for future in (self.published, self.ended):
            future.add_done_callback(_retrieve)  # nobody need ask for each
        self._born = time.monotonic()
        self._events: deque[Event] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._due: tuple[float, Event] | None = None
        self._failing_phase = self.machine.phase
        self.set_timer()

    @property
    def form(self) -> tuple[WireTensor, ...] | None:
        """What of this transfer crosses converted; None where copies do. Once the peer is known."""
        assert self.peer is not None
        gives = self.role is Role.PREFILL
        return pair_form(self.node.party, self.peer.party, gives=gives, portions=self.portions)

    # Events.

    def start(self) -> None:
        """Send the claim; only for the side that claims."""
        ACTIONS[Action.SEND_CLAIM](self)

    def message(self, event: Event, message: m.TransferMessage) -> None:
        """A message came from this transfer's peer; one that the table refuses ends the transfer."""
        try:
            self.machine.expect(event)
            take(self, message)
        except PeerError as error:
            # A peer that talks nonsense is as good as lost where its word can change nothing any more.
            self.fail(error, Event.PEER_LOST if self._is_safe else Event.CANCEL)
            return
        self.feed(event)

    def claimed(self, peer: Peer, claim: m.Claim) -> None:
        """A peer takes up this hold; raises what is wrong with its claim, and then nothing has changed."""
        self.machine.expect(Event.GOT_CLAIM)
        self.peer = peer
        try:
            take(self, claim)
        except KVFerryError:
            self.peer = None
            raise
        self.feed(Event.GOT_CLAIM)

    def local(self, event: Event) -> None:
        """A call of this side's engine; raises LocalError, or the error that ended the transfer."""
        self._allow(event)
        self.feed(event)

    def fail(self, error: KVFerryError, event: Event = Event.CANCEL) -> None:
        """Something ended the transfer; the first error is the one that is told."""
        if not self.machine.is_final and not self._is_ignored(event):
            self.keep_error(error)
        self.feed(event)

    def _is_ignored(self, event: Event) -> bool:
        """What prefill calls off once decode has everything is decode's: it has no say, and no error."""
        if self.role is not Role.PREFILL or self.machine.phase is not Phase.COMMITTED:
            return False
        return not self.machine.expect(event).actions

    def feed(self, event: Event) -> None:
        """Move on ``event`` and do what the table says; raises as ``Machine.handle`` does."""
        self._events.append(event)
        if len(self._events) > 1:
            return  # caused by the event that is being handled: it comes after that one's actions
        try:
            while self._events:
                self._step(self._events[0])
                self._events.popleft()
        except BaseException:
            self._events.clear()
            raise

    def then(self, event: Event) -> None:
        """An action's own result, handled after the actions that stand beside it."""
        self._events.append(event)

    def _step(self, event: Event) -> None:
        before = self.machine.phase
        row = self.machine.handle(event)
        if self.machine.phase is not before:
            self.clock.enter(self.machine.phase)
            self.set_timer()
            if not self.answered.done():
                self.answered.set_result(None)
        self._perform(list(row.actions))

    def _perform(self, actions: list[Action]) -> None:
        while actions:
            if actions[0] is Action.FREE and not self.payload.when_quiet(lambda: self._perform(actions)):
                # Goes on, from FREE, when nothing touches the memory any more. A copy that has come to its
                # end leaves at once; a peer that stays is put out.
                self._loop.call_later(self.config.timeouts.abort, self.payload.close_grant, _overstayed())
                return
            ACTIONS[actions.pop(0)](self)

    async def push_part(self, part: Part) -> None:
        """Prefill: this part is final; digest it, then move it. Raises as ``local``; then it stays."""
        self._allow(Event.LAYERS)
        digests = await self.payload.exporting.take(part)
        self._allow(Event.LAYERS)
        self.payload.add(part, digests)
        self.feed(Event.LAYERS)

    def finish_push(self, state: bytes) -> None:
        """Prefill: that was the last part, and this is the state. Raises as ``local``."""
        self._allow(Event.FINISH)
        self.state = state
        self.feed(Event.FINISH)

    def _allow(self, event: Event) -> None:
        """Refuse a call of this side's engine before anything has changed."""
        if self.machine.phase in (Phase.FAILED, Phase.ABORTING):
            raise self.final_error()
        self.machine.expect(event)

    # Time.

    def renew(self, lease_seconds: float) -> float:
        """Hold on for ``lease_seconds`` from now, and let the peer do so too, if there is one yet.

        Returns the seconds that are left now.
        """
        self.extend_lease(lease_seconds)
        self.set_timer()
        if self.peer is not None:
            self.post(m.Renew(self.transfer, int(lease_seconds * 1e3)))
        return max(0.0, self.lease_deadline - time.monotonic())

    def extend_lease(self, lease_seconds: float) -> None:
        """Never shorter than it was, never beyond the node's limit."""
        limit = self._born + self.config.max_lease_seconds
        self.lease_deadline = max(self.lease_deadline, min(time.monotonic() + lease_seconds, limit))

    def dismiss(self) -> None:
        """It never began: stop its clock."""
        if self._timer is not None:
            self._timer.cancel()

    def set_timer(self) -> None:
        """One timer, for the clock that ends this phase.

        A timer that stands is moved only to come earlier: most phases end long before it, and the
        one that it comes in looks when it is really due.
        """
        wait = WAITS.get(self.machine.phase)
        if wait is None:
            self._due = None
            if self.machine.is_final and self._timer is not None:
                self._timer.cancel()
            return
        timeouts, now = self.config.timeouts, time.monotonic()
        event, at = Event.LEASE_END, self.lease_deadline
        if wait is Wait.ABORT:
            event, at = Event.DEADLINE, now + timeouts.abort
        elif wait is Wait.TIMEOUT:
            limit = now + timeouts.start if self.machine.phase is Phase.STARTING else self.timeout_deadline
            if limit <= at:
                event, at = Event.DEADLINE, limit
        self._due = (at, event)
        self._arm(at)

    def _arm(self, at: float) -> None:
        # The loop's clock is time.monotonic.
        if self._timer is not None:
            if not self._timer.cancelled() and self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._timer = None
        if self._due is None:
            return
        at, event = self._due
        if at <= time.monotonic():
            self._time_out(event)
        else:
            self._arm(at)

    def _time_out(self, event: Event) -> None:
        what = "lease" if event is Event.LEASE_END else "timeout"
        self.fail(
            DeadlineError(
                f"the {what} ended while {self.machine.phase}",
                next_step="give it longer, renew the lease, or see what the peer was doing then",
            ),
            event,
        )

    @property
    def named_tokens(self) -> int:
        """Decode: the leading tokens that it said it holds, of those that this transfer covers."""
        return min(self.held.tokens, self.tokens)

    # Words.

    def post(self, message: m.Message) -> None:
        """Send, in order, without waiting."""
        if self.peer is not None:
            self.peer.post(message)

    @property
    def peer_name(self) -> str:
        return "" if self.peer is None else self.peer.name

    @property
    def is_unheard(self) -> bool:
        """This side claims, and the peer's connection has said nothing since before."""
        claims = self.machine.phase is Phase.CLAIMING
        return claims and self.peer is not None and self.peer.heard < self._born

    @property
    def _is_safe(self) -> bool:
        """Everything is decode's, whatever its peer does now."""
        return self.role is Role.DECODE and self.machine.phase in _SAFE_AT_DECODE

    def keep_error(self, error: KVFerryError) -> None:
        """The first error, and the phase it came in; unless everything is decode's already."""
        if self._is_safe:
            self._failing_phase = self.machine.phase
            self.error = error  # told only if decode gives up what it has
        elif self.error is None:
            self.error, self._failing_phase = error, self.machine.phase

    def peer_said(self, error: KVFerryError) -> None:
        """The peer's own word why it gave up. Its data path may have been first to say that it did."""
        self.peer_gave_up = True
        if isinstance(self.error, CopyEndedError):
            self.error = error
        else:
            self.keep_error(error)

    def final_error(self) -> KVFerryError:
        """What ended the transfer, with all that is known about it here."""
        error = self.error or LocalError("the transfer was ended here")
        # A copy: one lost connection ends many transfers with one error. What a transport or the
        # peer knows of where it was and what is true is less than what this transfer knows.
        place = (self.role, self._failing_phase)
        in_doubt = place in IN_DOUBT and not self.peer_gave_up
        return error.retold(
            request_id=self.request_id,
            phase=self._failing_phase.value,
            peer=self.peer_name,
            bytes_done=self.payload.nbytes,
            now_true=TRUTH_BY_DECODES_WORD
            if place in IN_DOUBT and self.peer_gave_up
            else TRUTH.get(place, ""),
            in_doubt=in_doubt,
        )

    def in_flight(self) -> InFlight:
        """Where it is now."""
        now = time.monotonic()
        return InFlight(
            self.record(), self.machine.phase.value, now - self._born, max(0.0, self.lease_deadline - now)
        )

    def record(self) -> TransferRecord:
        """What moved until now."""
        connection = None if self.peer is None else self.peer.connection
        nbytes, descriptors, chunks = self.payload.counts()
        if self.committed is not None:  # decode counted what arrived; prefill may not have seen it pass
            nbytes, descriptors, chunks = (
                self.committed.nbytes,
                self.committed.descriptors,
                self.committed.chunks,
            )
        return TransferRecord(
            request_id=self.request_id,
            role=self.role,
            mode=self.mode,
            peer=self.peer_name,
            transport="" if connection is None else connection.scheme,
            path="" if connection is None else connection.path,
            nbytes=nbytes,
            descriptors=descriptors,
            chunks=chunks,
            state_nbytes=len(self.state),
            integrity=self.config.integrity,
            conversions=() if self.peer is None else used_conversions(self.form),
            timings=self.clock.timings(),
            chosen="" if self.peer is None else self.peer.chosen,
            passed_over=() if self.peer is None else self.peer.passed_over,
        )


def _overstayed() -> PeerError:
    return PeerError("the transfer has ended, and the peer is still in its memory")


def _retrieve(future: asyncio.Future[Arrival] | asyncio.Future[Outcome]) -> None:
    if not future.cancelled():
        future.exception()
