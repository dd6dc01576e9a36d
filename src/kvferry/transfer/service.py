"""What an engine may ask of its node: each call of calls.py, answered once, when it is finished."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError
from kvferry.protocol import messages as m
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.table import Event, Phase, Role
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.transfer import calls as c
from kvferry.transfer.exporting import known
from kvferry.transfer.node import Node
from kvferry.transfer.payload import Part
from kvferry.transfer.portions import check_portions
from kvferry.transfer.session import Session
from kvferry.transfer.windows import check_form

__all__ = ["Service"]


class Service:
    """The engine's way into a node. Every method runs on the node's loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Claims whose peer is being reached, and the word that came meanwhile to give one up.
        self._reaching: dict[bytes, KVFerryError | None] = {}
        self._handlers: dict[type[c.Call], Callable[[Any], Awaitable[Any]]] = {
            c.ListenCall: self._listen,
            c.MeetCall: self._meet,
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
            c.TransfersCall: self._transfers,
            c.CloseCall: self._close,
        }

    async def handle(self, call: c.Call) -> Any:
        """Do one call of the engine; returns its value or raises its error."""
        return await self._handlers[type(call)](call)

    async def _listen(self, call: c.ListenCall) -> c.Listening:
        for address in call.addresses:
            await self._node.directory.listen(address)
        return c.Listening(self._node.directory.addresses, self._node.incarnation)

    async def _meet(self, call: c.MeetCall) -> c.Nothing:
        try:
            async with asyncio.timeout(call.timeout_seconds):
                await self._node.directory.meet(call.address)
        except TimeoutError:
            raise _no_connection(call.timeout_seconds, call.address) from None
        return c.Nothing()

    async def _offer(self, call: c.OfferCall) -> c.Held:
        like = self._node.ledger.find(call.like)
        if like is not None and (m.to_wire(like.tables), like.tokens) != (call.tables, call.tokens):
            raise InputError("like: that offer is of other blocks or tokens")
        session = self._hold(Role.PREFILL, Mode.PULL, call)
        session.state = call.state
        try:
            session.payload.exporting.begin(None if like is None else like.payload.exporting)
            if session.payload.exporting.exported is not None:
                await asyncio.shield(session.payload.exporting.exported)
        except Exception as error:
            session.fail(known(error, "taking digests"))  # no ticket goes out: nobody could take it back
            raise
        return c.Held(self._node.ticket(session, call.lease_seconds))

    async def _reserve(self, call: c.ReserveCall) -> c.Held:
        session = self._hold(Role.DECODE, Mode.PUSH, call)
        return c.Held(self._node.ticket(session, call.lease_seconds))

    def _hold(self, role: Role, mode: Mode, call: c.OfferCall | c.ReserveCall) -> Session:
        if not self._node.directory.addresses:
            raise LocalError("this endpoint does not listen, so a peer could not claim a ticket")
        lease = time.monotonic() + call.lease_seconds
        self._node.ledger.make_room(call.transfer, call.request_id)
        session = Session(
            self._node,
            role,
            mode,
            call.transfer,
            call.request_id,
            call.tokens,
            m.from_wire(call.tables),
            lease,
            lease,
            held=call.held if isinstance(call, c.ReserveCall) else HeldPrefix(),
            together=call.together if isinstance(call, c.ReserveCall) else b"",
            for_peer=call.peer,
        )
        return self._node.ledger.take_in(session)

    async def _pull(self, call: c.PullCall) -> c.Arrival:
        session = await self._claim(Role.DECODE, Mode.PULL, call)
        session.start()
        return await session.published

    async def _push(self, call: c.PushCall) -> c.Nothing:
        session = await self._claim(Role.PREFILL, Mode.PUSH, call)
        session.state, session.prompt_ids = call.state, call.prompt_ids
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
        if ticket.incarnation == self._node.incarnation:
            raise LocalError("ticket: this endpoint issued it itself", request_id=ticket.request_id)
        if ticket.transfer in self._reaching:
            raise LocalError(
                "this ticket is being claimed here already", request_id=ticket.request_id, phase="claim"
            )
        self._reaching[ticket.transfer] = None
        try:
            async with asyncio.timeout(call.timeout_seconds):
                peer = await self._node.directory.reach(ticket, call.transport)
            if (given_up := self._reaching[ticket.transfer]) is not None:
                raise given_up
            check_portions(call.portions, self._node.config.layout, peer.party.layout)
            check_form(self._node.party, peer.party, gives=role is Role.PREFILL, portions=call.portions)
        except TimeoutError:
            raise _no_connection(call.timeout_seconds, ticket.issuer, ticket.request_id) from None
        except KVFerryError as error:
            # A copy: one connection that fails is the error of every claim that waited for it.
            raise error.retold(request_id=ticket.request_id, peer=error.peer or ticket.issuer) from None
        finally:
            del self._reaching[ticket.transfer]
        self._node.ledger.make_room(ticket.transfer, ticket.request_id)
        session = Session(
            self._node,
            role,
            mode,
            ticket.transfer,
            ticket.request_id,
            call.tokens if isinstance(call, c.PushCall) else ticket.tokens,
            m.from_wire(call.tables),
            deadline,
            deadline,
            ticket=call.ticket,
            held=call.held if isinstance(call, c.PullCall) else HeldPrefix(),
            together=call.together if isinstance(call, c.PullCall) else b"",
            peer=peer,
            handshake_seconds=time.monotonic() - started,
            portions=call.portions,
        )
        return self._node.ledger.take_in(session)

    async def _layers(self, call: c.LayersCall) -> c.Nothing:
        session = self._node.ledger.get(call.transfer)
        await self._granted(session)
        part = Part(range(call.first_layer, call.stop_layer), (call.first_token, call.stop_token))
        await session.push_part(part)
        return c.Nothing()

    async def _commit(self, call: c.CommitCall) -> c.Nothing:
        session = self._node.ledger.get(call.transfer)
        await self._granted(session)
        session.finish_push(call.state)
        return c.Nothing()

    async def _granted(self, session: Session) -> None:
        """Wait until decode has granted the push; raises what ended it instead."""
        await asyncio.shield(session.answered)

    async def _start(self, call: c.StartCall) -> c.Nothing:
        session = self._node.ledger.find(call.transfer)
        if session is not None:
            session.local(Event.START)
        else:
            await self._node.ledger.outcome(call.transfer)  # ended already: well, or by its error
        return c.Nothing()

    async def _cancel(self, call: c.CancelCall) -> c.Nothing:
        session = self._node.ledger.find(call.transfer)
        error = KVFerryError.from_record(call.error)
        if session is None:
            if call.transfer in self._reaching:
                self._reaching[call.transfer] = error
        elif session.machine.phase is Phase.HELD or not call.unclaimed_only:
            session.fail(error)
        return c.Nothing()

    async def _renew(self, call: c.RenewCall) -> c.Renewed:
        return c.Renewed(self._node.ledger.get(call.transfer).renew(call.lease_seconds))

    async def _arrival(self, call: c.ArrivalCall) -> c.Arrival:
        return await asyncio.shield(self._node.ledger.get(call.transfer).published)

    async def _outcome(self, call: c.OutcomeCall) -> c.Outcome:
        return await asyncio.shield(self._node.ledger.outcome(call.transfer))

    async def _stats(self, _: c.StatsCall) -> c.Stats:
        return c.Stats(
            os.getpid(),
            transfers=sum(session.machine.phase is not Phase.HELD for session in self._node.ledger),
            holds=sum(session.machine.phase is Phase.HELD for session in self._node.ledger),
            grants=self._node.grants.num_open,
            peers=self._node.directory.num_peers,
            copies=sum(session.payload.is_copying for session in self._node.ledger),
            digesting=sum(session.payload.exporting.is_busy for session in self._node.ledger),
            packing=self._node.staging.num_taken,
            threads=threading.active_count(),
            fds=len(os.listdir("/proc/self/fd")),
            registration_seconds=self._node.directory.registration_seconds,
        )

    async def _transfers(self, call: c.TransfersCall) -> c.Transfers:
        sessions = itertools.islice(self._node.ledger, call.limit)
        return c.Transfers(tuple(session.in_flight() for session in sessions))

    async def _close(self, _: c.CloseCall) -> c.Nothing:
        await self._node.close()
        return c.Nothing()


def _no_connection(seconds: float, peer: str, request_id: str = "") -> DeadlineError:
    return DeadlineError(
        f"no connection within {seconds} s",
        request_id=request_id,
        phase="handshake",
        peer=peer,
        now_true="nothing moved, nothing is held here",
        next_step="see whether the worker that listens there runs and is reachable",
    )
