"""The node: all transfers of one pool, driven from one asyncio loop.

It owns the pool's map, the grants, the peers, the sessions and the copy threads. Its engine asks
through the service (service.py), peers through messages; both end in a session.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError, PeerError
from kvferry.layout import PoolLayout
from kvferry.protocol import messages as m
from kvferry.protocol.table import Event, Phase, Role
from kvferry.protocol.ticket import Ticket, open_ticket, seal_ticket
from kvferry.transfer.calls import NodeConfig
from kvferry.transfer.checks import before_move, before_visible
from kvferry.transfer.directory import Directory, origin_of
from kvferry.transfer.integrity import DigestTable
from kvferry.transfer.lease import Grants
from kvferry.transfer.ledger import Ledger
from kvferry.transfer.peer import Peer
from kvferry.transfer.pool import staging_offset
from kvferry.transfer.portions import check_portions
from kvferry.transfer.session import Session
from kvferry.transfer.staging import Staging
from kvferry.transfer.windows import check_form
from kvferry.transport.base import Memory
from kvferry.transport.board import Board
from kvferry.transport.security import names_match

__all__ = ["Node"]

_EVENTS: dict[type[m.TransferMessage], Event] = {
    m.Offered: Event.GOT_OFFERED,
    m.Granted: Event.GOT_GRANTED,
    m.Busy: Event.GOT_BUSY,
    m.Ready: Event.GOT_READY,
    m.Pack: Event.GOT_PACK,
    m.Packed: Event.GOT_PACKED,
    m.Moved: Event.GOT_MOVED,
    m.Commit: Event.GOT_COMMIT,
    m.Committed: Event.GOT_COMMITTED,
    m.Mismatch: Event.GOT_MISMATCH,
    m.Started: Event.GOT_STARTED,
    m.Released: Event.GOT_RELEASED,
    m.Renew: Event.GOT_RENEW,
    m.Abort: Event.GOT_ABORT,
    m.Aborted: Event.GOT_ABORTED,
}
_BUSY_RETRY_MS = 50
_ELSEWHERE = "see whether the peer's process lives; try another worker, or recompute the request"
_AGAIN = (
    "this connection had been silent since before the attempt, and a new attempt makes a new one: "
    "try again, try another worker, or recompute the request"
)


class Node:
    """One pool's transfers. Every method runs on its loop."""

    def __init__(self, config: NodeConfig, memory: Memory) -> None:
        self.config = config
        self.memory = memory
        self.grants = Grants(Board.create())
        self.ledger = Ledger(config.max_transfers, config.layout)
        self.on_ended: Callable[[Session], None] | None = None
        self.staging = Staging(staging_offset(config.layout), config.staging_nbytes, config.copy_threads)
        self.incarnation = secrets.token_bytes(16)
        # Copies and digests that this side starts. Named, so that a leak has a name.
        self.copiers = ThreadPoolExecutor(
            config.copy_threads, thread_name_prefix=f"kvferry-copy-{config.name}"
        )
        #: What a block of each group holds, all its tensors together.
        self.block_nbytes = tuple(
            group.entries_per_block * sum(tensor.row_nbytes for tensor in group.tensors)
            for group in config.layout.groups
        )
        self._key = secrets.token_bytes(32)
        self.party = _party(config, self.incarnation, self.staging.window_nbytes)
        self.directory = Directory(
            self.party,
            config.timeouts,
            memory,
            self.grants,
            config.security,
            on_message=self._message,
            on_lost=self._lost,
        )
        self.directory.measured = config.measured

    async def close(self) -> None:
        """Abort what is under way, acknowledged where peers answer; then release everything."""
        error = LocalError("this endpoint was closed", next_step="open another, or use another worker")
        for session in self.ledger:
            session.fail(error)
        if endings := [session.ended for session in self.ledger]:
            await asyncio.wait(endings, timeout=2 * self.config.timeouts.abort)
        await self.directory.close()
        self.grants.end()
        self.copiers.shutdown(wait=True)

    def ticket(self, session: Session, lease_seconds: float) -> bytes:
        """The bytes that name a hold of this node to a peer."""
        ticket = Ticket(
            session.mode,
            session.transfer,
            session.request_id,
            self.incarnation,
            self.config.name,
            self.directory.addresses,
            session.tokens,
            tuple(len(table.ids) for table in session.tables),
            int(lease_seconds * 1e3),
            session.for_peer,
        )
        return seal_ticket(ticket, self._key)

    # What sessions ask.

    def forget(self, session: Session) -> None:
        """The session has ended and holds nothing."""
        session.payload.packing.release()
        self.ledger.forget(session)
        if self.on_ended is not None:
            self.on_ended(session)

    def check_before_move(self, session: Session) -> None:
        """At decode, before a byte moves; raises what does not hold."""
        reserved = session.tokens
        attempt = before_move(
            session,
            self.config.requirements,
            self.ledger.was_visible(session.transfer),
            self.ledger.newest_attempt(session.request_id),
        )
        if session.tokens < reserved:
            self.ledger.lend_again(session)
        self.ledger.note_attempt(session.request_id, attempt)

    def check_after_move(self, session: Session, exported: DigestTable, arrived: DigestTable) -> None:
        """At decode, before anything is visible; raises what does not hold."""
        self.check_before_move(session)  # a push shows its state with the commit; and time has passed
        before_visible(session, self.config.requirements, exported, arrived)
        self.ledger.note_visible(session.transfer)

    # Peers.

    def _lost(self, peer: Peer, error: KVFerryError) -> None:
        error = error.retold(next_step=_ELSEWHERE)  # a transport's word is about the connection
        for session in self.ledger:
            if session.peer is peer:
                session.fail(error.retold(next_step=_AGAIN) if session.is_unheard else error, Event.PEER_LOST)

    def _message(self, peer: Peer, message: m.TransferMessage) -> None:
        if isinstance(message, m.Claim):
            self._claimed(peer, message)
            return
        session = self.ledger.find(message.transfer)
        if session is not None and session.peer is peer:
            session.message(_EVENTS[type(message)], message)
        elif isinstance(message, m.Abort):
            peer.post(m.Aborted(message.transfer))
        # Anything else is late word of a transfer that ended here; its sender's own clock ends it.

    def _claimed(self, peer: Peer, claim: m.Claim) -> None:
        """A peer takes up a ticket of ours; refused claims hold nothing and are answered by Abort."""
        try:
            ticket = open_ticket(claim.ticket, self._key, self.incarnation)
            if claim.transfer != ticket.transfer:
                raise PeerError(
                    "the ticket is of another transfer than the one that is claimed with it",
                    request_id=ticket.request_id,
                    now_true="nothing was granted",
                    next_step="claim with the ticket of that transfer",
                )
            session = self.ledger.find(ticket.transfer)
            if session is None or session.machine.phase is not Phase.HELD:
                raise self._no_hold(ticket)
            _check_claimant(ticket, peer)
            _check_claimed(claim.portions, self.config.layout, peer.party.layout)
            gives = session.role is Role.PREFILL
            check_form(self.party, peer.party, gives=gives, portions=claim.portions)
            busy = self._busy(peer)
            if not busy:
                session.claimed(peer, claim)
                return
        except KVFerryError as error:
            peer.post(m.Abort(claim.transfer, error.with_context(phase="claim").to_record()))
            return
        peer.post(m.Busy(claim.transfer, _BUSY_RETRY_MS, busy))

    def _busy(self, peer: Peer) -> str:
        """Why one more transfer may not move now, or "". One peer leaves a quarter for the others."""
        most, moving = self.config.max_moving, self.ledger.num_working
        if moving >= most:
            return f"{moving} transfers are moving, the most allowed"
        share = max(1, most * 3 // 4)
        of_peer = self.ledger.num_working_with(origin_of(peer.connection))
        return f"{of_peer} transfers of yours are moving, the most for one peer" if of_peer >= share else ""

    def _no_hold(self, ticket: Ticket) -> KVFerryError:
        if ticket.transfer in self.ledger:
            return PeerError(
                "the ticket is in use: it can be claimed once",
                request_id=ticket.request_id,
                now_true="nothing was granted; the transfer that uses it goes on",
                next_step="ask for a ticket of your own",
            )
        return DeadlineError(
            f"the ticket is no longer good: {self.ledger.why_ended(ticket.transfer)}",
            request_id=ticket.request_id,
            now_true="nothing is held for it here",
            next_step="prefill again, or recompute at decode",
        )


def _check_claimant(ticket: Ticket, peer: Peer) -> None:
    names = peer.connection.peer_names
    if ticket.peer and not names_match(names, (ticket.peer,)):
        who = f"a certificate for {', '.join(names)}" if names else "no certificate on this connection"
        raise PeerError(
            f"the ticket is for {ticket.peer}, and its claimant has {who}",
            request_id=ticket.request_id,
            now_true="nothing was granted; the ticket stays good for whom it is for",
            next_step="give the ticket to the worker that it was made for",
        )


def _check_claimed(portions: tuple[m.Portion, ...], ours: PoolLayout, theirs: PoolLayout) -> None:
    try:
        check_portions(portions, ours, theirs)
    except InputError as error:
        raise PeerError(error.message, now_true="nothing was granted; the ticket stays good") from None


def _party(config: NodeConfig, incarnation: bytes, window_nbytes: int) -> m.Party:
    return m.Party(
        config.name,
        incarnation,
        config.layout,
        config.requirements.fingerprint if config.requirements else None,
        heartbeat_ms=int(config.timeouts.heartbeat * 1e3),
        lost_ms=int(config.timeouts.lost * 1e3),
        integrity=config.integrity,
        conversions=config.conversions,
        window_nbytes=window_nbytes,
    )
