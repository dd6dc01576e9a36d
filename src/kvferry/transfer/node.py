"""The node: all transfers of one pool, driven from one asyncio loop.

It owns the pool's map, the grants, the peers, the sessions and the copy threads. It is asked by
its engine through calls (calls.py) and by peers through messages; both end in a session.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvferry.errors import (
    CapacityError,
    DeadlineError,
    KVFerryError,
    LocalError,
    PeerError,
)
from kvferry.protocol import messages as m
from kvferry.protocol.table import Event, Phase, Role
from kvferry.protocol.ticket import Mode, Ticket, open_ticket, read_ticket, seal_ticket
from kvferry.transfer import calls as c
from kvferry.transfer.checks import before_move, before_visible
from kvferry.transfer.directory import Directory
from kvferry.transfer.integrity import DigestTable
from kvferry.transfer.lease import Grants
from kvferry.transfer.payload import Part
from kvferry.transfer.peer import Peer
from kvferry.transfer.session import Session
from kvferry.transport.base import Memory

__all__ = ["Node"]

_EVENTS: dict[type[m.TransferMessage], Event] = {
    m.Offered: Event.GOT_OFFERED,
    m.Granted: Event.GOT_GRANTED,
    m.Busy: Event.GOT_BUSY,
    m.Ready: Event.GOT_READY,
    m.Moved: Event.GOT_MOVED,
    m.Commit: Event.GOT_COMMIT,
    m.Committed: Event.GOT_COMMITTED,
    m.Mismatch: Event.GOT_MISMATCH,
    m.Started: Event.GOT_STARTED,
    m.Release: Event.GOT_RELEASE,
    m.Released: Event.GOT_RELEASED,
    m.Renew: Event.GOT_RENEW,
    m.Abort: Event.GOT_ABORT,
    m.Aborted: Event.GOT_ABORTED,
}
# How many ended transfers, and newest attempts of requests, are remembered to say why a late
# ticket or an old attempt is refused.
_REMEMBERED = 4096
_BUSY_RETRY_MS = 50
# Phases in which a session costs blocks but no work.
_HOLDING = frozenset({Phase.HELD, Phase.COMMITTED, Phase.ALONE})


class Node:
    """One pool's transfers. Every method runs on its loop; ``handle`` is the engine's way in."""

    def __init__(self, config: c.NodeConfig, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.grants = Grants()
        self.incarnation = secrets.token_bytes(16)
        # Data threads: copies and digests that this side starts. Named, so that a leak has a name.
        self.copiers = ThreadPoolExecutor(
            config.copy_threads, thread_name_prefix=f"kvferry-copy-{config.name}"
        )
        self._key = secrets.token_bytes(32)
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, asyncio.Future[c.Outcome]] = OrderedDict()
        self._visible: OrderedDict[bytes, None] = OrderedDict()
        self._attempts: OrderedDict[str, int] = OrderedDict()
        timeouts = config.timeouts
        party = m.Party(
            config.name,
            self.incarnation,
            config.layout,
            config.requirements.fingerprint if config.requirements else None,
            heartbeat_ms=int(timeouts.heartbeat * 1e3),
            lost_ms=int(timeouts.lost * 1e3),
            integrity=config.integrity,
        )
        self._handlers: dict[type[c.Call], Callable[[Any], Awaitable[Any]]] = {
            c.ListenCall: self._listen,
            c.OfferCall: self._offer,
            c.ReserveCall: self._reserve,
            c.PullCall: self._pull,
            c.PushCall: self._push,
            c.LayersCall: self._layers,
            c.CommitCall: self._commit,
            c.StartCall: self._start,
            c.CancelCall: self._cancel,
            c.RenewCall: self._renew,
            c.ArrivalCall: self._arrival,
            c.OutcomeCall: self._outcome,
            c.StatsCall: self._stats,
            c.CloseCall: self._close,
        }
        self._directory = Directory(
            party, timeouts, memory, self.grants, on_message=self._message, on_lost=self._lost
        )

    # The engine's calls.

    async def handle(self, call: c.Call) -> Any:
        """Do one call of the engine; returns its value or raises its error."""
        return await self._handlers[type(call)](call)

    async def _listen(self, call: c.ListenCall) -> c.Listening:
        for address in call.addresses:
            await self._directory.listen(address)
        return c.Listening(self._directory.addresses, self.incarnation)

    async def _offer(self, call: c.OfferCall) -> c.Held:
        session = self._hold(Role.PREFILL, Mode.PULL, call)
        session.state = call.state
        session.payload.begin_digests()
        return self._ticketed(session, call.lease_seconds)

    async def _reserve(self, call: c.ReserveCall) -> c.Held:
        return self._ticketed(self._hold(Role.DECODE, Mode.PUSH, call), call.lease_seconds)

    def _hold(self, role: Role, mode: Mode, call: c.OfferCall | c.ReserveCall) -> Session:
        if not self._directory.addresses:
            raise LocalError("this endpoint does not listen, so a peer could not claim a ticket")
        lease = time.monotonic() + call.lease_seconds
        self._make_room(call.transfer, call.request_id)
        session = Session(
            self,
            role,
            mode,
            call.transfer,
            call.request_id,
            call.tokens,
            m.from_wire(call.tables),
            lease,
            lease,
        )
        self._sessions[session.transfer] = session
        return session

    def _ticketed(self, session: Session, lease_seconds: float) -> c.Held:
        ticket = Ticket(
            session.mode,
            session.transfer,
            session.request_id,
            self.incarnation,
            self.config.name,
            self._directory.addresses,
            session.tokens,
            tuple(len(table.ids) for table in session.tables),
            int(lease_seconds * 1e3),
        )
        return c.Held(seal_ticket(ticket, self._key))

    async def _pull(self, call: c.PullCall) -> c.Arrival:
        session = await self._claim(Role.DECODE, Mode.PULL, call)
        session.held_tokens = call.held_tokens
        session.start()
        return await session.published

    async def _push(self, call: c.PushCall) -> c.Nothing:
        session = await self._claim(Role.PREFILL, Mode.PUSH, call)
        session.tokens, session.state = call.tokens, call.state
        session.start()
        return c.Nothing()

    async def _claim(self, role: Role, mode: Mode, call: c.PullCall | c.PushCall) -> Session:
        """Reach the ticket's issuer and open a session that is about to claim."""
        ticket = read_ticket(call.ticket)
        started = time.monotonic()
        deadline = started + call.timeout_seconds
        if ticket.mode is not mode:
            raise LocalError(
                f"ticket: it is for a {ticket.mode}, not for a {mode}", request_id=ticket.request_id
            )
        if ticket.incarnation == self.incarnation:
            raise LocalError("ticket: this endpoint issued it itself", request_id=ticket.request_id)
        try:
            async with asyncio.timeout(call.timeout_seconds):
                peer = await self._directory.reach(ticket, call.transport)
        except TimeoutError:
            raise DeadlineError(
                f"no connection within {call.timeout_seconds} s",
                request_id=ticket.request_id,
                phase="handshake",
                peer=ticket.issuer,
                now_true="nothing moved, nothing is held here",
                next_step="see whether the worker that issued the ticket runs and is reachable",
            ) from None
        except KVFerryError as error:
            raise error.with_context(request_id=ticket.request_id, peer=ticket.issuer) from None
        self._make_room(ticket.transfer, ticket.request_id)
        session = Session(
            self,
            role,
            mode,
            ticket.transfer,
            ticket.request_id,
            ticket.tokens,
            m.from_wire(call.tables),
            deadline,
            deadline,
            ticket=call.ticket,
            peer=peer,
            handshake_seconds=time.monotonic() - started,
        )
        self._sessions[session.transfer] = session
        return session

    async def _layers(self, call: c.LayersCall) -> c.Nothing:
        session = self._session(call.transfer)
        await self._granted(session)
        session.push_part(Part(range(call.first_layer, call.stop_layer), call.first_token, call.stop_token))
        return c.Nothing()

    async def _commit(self, call: c.CommitCall) -> c.Nothing:
        session = self._session(call.transfer)
        await self._granted(session)
        session.state = call.state
        session.local(Event.FINISH)
        return c.Nothing()

    async def _granted(self, session: Session) -> None:
        """Wait until decode has granted the push; raises what ended it instead."""
        await asyncio.shield(session.answered)

    async def _start(self, call: c.StartCall) -> c.Nothing:
        if call.transfer in self._sessions:
            self._sessions[call.transfer].local(Event.START)
        elif call.transfer not in self._ended:
            raise LocalError("no such transfer at this endpoint")
        return c.Nothing()

    async def _cancel(self, call: c.CancelCall) -> c.Nothing:
        session = self._sessions.get(call.transfer)
        if session is not None:
            session.fail(KVFerryError.from_record(call.error))
        return c.Nothing()

    async def _renew(self, call: c.RenewCall) -> c.Nothing:
        session = self._session(call.transfer)
        session.renew(call.lease_seconds)
        return c.Nothing()

    async def _arrival(self, call: c.ArrivalCall) -> c.Arrival:
        return await asyncio.shield(self._session(call.transfer).published)

    async def _outcome(self, call: c.OutcomeCall) -> c.Outcome:
        ended = self._ended.get(call.transfer) or self._session(call.transfer).ended
        return await asyncio.shield(ended)

    async def _stats(self, _: c.StatsCall) -> c.Stats:
        return c.Stats(
            os.getpid(),
            transfers=sum(session.machine.phase is not Phase.HELD for session in self._sessions.values()),
            holds=sum(session.machine.phase is Phase.HELD for session in self._sessions.values()),
            grants=self.grants.num_open,
            peers=self._directory.num_peers,
            copies=sum(session.payload.is_copying for session in self._sessions.values()),
            threads=threading.active_count(),
            fds=len(os.listdir("/proc/self/fd")),
        )

    async def close(self) -> None:
        """End everything: transfers are aborted and acknowledged where peers answer, then all is released."""
        error = LocalError("this endpoint was closed")
        for session in list(self._sessions.values()):
            session.fail(error)
        if self._sessions:
            await asyncio.wait(
                [asyncio.shield(session.ended) for session in self._sessions.values()],
                timeout=2 * self.config.timeouts.abort,
            )
        await self._directory.close()
        self.copiers.shutdown(wait=True)

    async def _close(self, _: c.CloseCall) -> c.Nothing:
        await self.close()
        return c.Nothing()

    # Sessions.

    def _make_room(self, transfer: bytes, request_id: str) -> None:
        """Raise unless one more transfer, of this id, may begin."""
        if transfer in self._sessions:
            raise LocalError(
                "this ticket or transfer id is in use here", request_id=request_id, phase="claim"
            )
        if len(self._sessions) >= self.config.max_transfers:
            raise CapacityError(
                f"{len(self._sessions)} transfers are held or under way here, the most that are allowed",
                request_id=request_id,
                next_step="wait for one to end, or raise max_transfers",
            )

    def _session(self, transfer: bytes) -> Session:
        session = self._sessions.get(transfer)
        if session is None:
            raise LocalError(f"no such transfer at this endpoint now: {self._why_ended(transfer)}")
        return session

    def _why_ended(self, transfer: bytes) -> str:
        ended = self._ended.get(transfer)
        if ended is None:
            return "it was never known here, or ended long ago"
        error = ended.exception()
        return "it is done" if error is None else f"it failed: {error}"

    def forget(self, session: Session) -> None:
        """The session has ended and holds nothing."""
        self._sessions.pop(session.transfer, None)
        self._ended[session.transfer] = session.ended
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    def check_before_move(self, session: Session) -> None:
        """At decode, before a byte moves; raises what does not hold."""
        attempt = before_move(
            session,
            self.config.requirements,
            session.transfer in self._visible,
            self._attempts.get(session.request_id, 0),
        )
        self._attempts[session.request_id] = attempt
        while len(self._attempts) > _REMEMBERED:
            self._attempts.popitem(last=False)

    def check_after_move(self, session: Session, exported: DigestTable, arrived: DigestTable) -> None:
        """At decode, before anything is visible; raises what does not hold."""
        if session.mode is Mode.PUSH:
            self.check_before_move(session)  # the state of a push may have come with the commit only
        before_visible(session, self.config.requirements, exported, arrived)
        self._visible[session.transfer] = None
        while len(self._visible) > _REMEMBERED:
            self._visible.popitem(last=False)

    # Peers.

    def _lost(self, peer: Peer, error: KVFerryError) -> None:
        for session in list(self._sessions.values()):
            if session.peer is peer:
                session.fail(error, Event.PEER_LOST)

    def _message(self, peer: Peer, message: m.TransferMessage) -> None:
        if isinstance(message, m.Claim):
            self._claimed(peer, message)
            return
        session = self._sessions.get(message.transfer)
        if session is not None and session.peer is peer:
            session.message(_EVENTS[type(message)], message)
        elif isinstance(message, m.Abort):
            peer.post(m.Aborted(message.transfer))
        # Anything else is late word of a transfer that ended here; its sender's own clock ends it.

    def _claimed(self, peer: Peer, claim: m.Claim) -> None:
        """A peer takes up a ticket of ours; refused claims hold nothing and are answered by Abort."""
        try:
            ticket = open_ticket(claim.ticket, self._key, self.incarnation)
            session = self._sessions.get(ticket.transfer)
            if (
                session is None
                or session.machine.phase is not Phase.HELD
                or claim.transfer != ticket.transfer
            ):
                raise self._no_hold(ticket)
        except KVFerryError as error:
            peer.post(m.Abort(claim.transfer, error.with_context(phase="claim").to_record()))
            return
        moving = sum(other.machine.phase not in _HOLDING for other in self._sessions.values())
        if moving >= self.config.max_moving:
            peer.post(
                m.Busy(claim.transfer, _BUSY_RETRY_MS, f"{moving} transfers are moving, the most allowed")
            )
            return
        session.peer = peer
        session.message(Event.GOT_CLAIM, claim)

    def _no_hold(self, ticket: Ticket) -> KVFerryError:
        if ticket.transfer in self._sessions:
            return PeerError("the ticket is in use: it can be claimed once", request_id=ticket.request_id)
        return DeadlineError(
            f"the ticket is no longer good: {self._why_ended(ticket.transfer)}",
            request_id=ticket.request_id,
            now_true="nothing is held for it here",
            next_step="prefill again, or recompute at decode",
        )
