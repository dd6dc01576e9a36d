"""A session's messages: what it says, built from its state; what it hears, kept in its state.

What a message means is the table's affair (protocol/table.py); this is only its content.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.errors import CapacityError, KVFerryError, LocalError, PeerError
from kvferry.protocol import messages as m
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode
from kvferry.transfer.checks import agree
from kvferry.transfer.payload import Part

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["claim", "commit", "committed", "granted", "offered", "take"]


def claim(session: Session) -> m.Claim:
    """Take up the ticket; a push shows its blocks, and its state where that is known."""
    return m.Claim(
        session.transfer,
        ticket=session.ticket,
        timeout_ms=_ms_until(session.timeout_deadline),
        tables=m.to_wire(session.tables),
        state=session.state if session.role is Role.PREFILL else b"",
        tokens=session.tokens,
        held=session.held,
        portions=session.portions,
    )


def offered(session: Session) -> m.Offered:
    """What is offered and where it lies."""
    lease_ms = _ms_until(session.lease_deadline)
    return m.Offered(
        session.transfer,
        session.state,
        m.to_wire(session.tables),
        session.tokens,
        session.held_tokens,
        lease_ms,
        session.grant,
    )


def granted(session: Session) -> m.Granted:
    """Where a push may go."""
    lease_ms = _ms_until(session.lease_deadline)
    tables = m.to_wire(session.tables)
    return m.Granted(session.transfer, tables, session.tokens, session.held, lease_ms, session.grant)


def commit(session: Session) -> m.Commit:
    """Prefill vouches for what it exported."""
    chunk_id, digests = session.payload.exporting.table()
    return m.Commit(
        session.transfer,
        session.state if session.mode is Mode.PUSH else b"",
        chunk_id.astype("<i8").tobytes(),
        digests.astype("<u8").tobytes(),
        session.held_tokens,
    )


def committed(session: Session) -> m.Committed:
    """Decode has everything; the counts are what it recorded."""
    record = session.record()
    return m.Committed(session.transfer, record.nbytes, record.descriptors, record.chunks)


def take(session: Session, message: m.TransferMessage) -> None:
    """Keep what a message says. Raises PeerError when its content makes no sense."""
    keep = _TAKE.get(type(message))
    if keep is not None:
        keep(session, message)


def _take_claim(session: Session, message: m.Claim) -> None:
    # What can be refused comes first: a claim that is refused leaves the hold as it was.
    tables = m.from_wire(message.tables)
    if session.mode is Mode.PULL:
        session.held_tokens = _agree_on_all(session, message.held)
    else:
        session.state = message.state
    session.timeout_deadline = time.monotonic() + message.timeout_ms / 1e3
    session.peer_tables = tables
    session.peer_tokens, session.portions = message.tokens, message.portions


def _take_offered(session: Session, message: m.Offered) -> None:
    session.state, session.peer_tokens = message.state, message.tokens
    session.grant = message.grant
    _take_held(session, message.held_tokens)
    session.peer_tables = m.from_wire(message.tables)
    session.lease_deadline = time.monotonic() + message.lease_ms / 1e3


def _take_granted(session: Session, message: m.Granted) -> None:
    session.peer_tables = m.from_wire(message.tables)
    if session.payload.writes:  # else decode will read, by a grant of ours
        session.grant = message.grant
    session.held_tokens = _agree_on_all(session, message.held)
    session.lease_deadline = time.monotonic() + message.lease_ms / 1e3


def _take_ready(session: Session, message: m.Ready) -> None:
    _take_held(session, message.held_tokens)
    session.grant = message.grant
    layers = range(message.first_layer, message.stop_layer)
    session.payload.add(Part(layers, (message.first_token, min(message.stop_token, session.tokens))))


def _take_pack(session: Session, message: m.Pack) -> None:
    session.payload.packing.ask(message)


def _take_packed(session: Session, message: m.Packed) -> None:
    session.payload.unpacking.packed(message)


def _take_commit(session: Session, message: m.Commit) -> None:
    session.commit = message
    _take_held(session, message.held_tokens)
    if session.mode is Mode.PUSH:
        session.state = message.state


def _agree_on_all(session: Session, held: HeldPrefix) -> int:
    """The tokens that prefill leaves out: all that decode holds, or the transfer ends.

    Blocks of a held prefix may be another request's too, so nothing may be written into them.
    """
    agreed, named = agree(session, held), min(held.tokens, session.tokens)
    if agreed < named:
        raise PeerError(
            f"held prefix: {session.peer_name} holds {named} tokens, of which {agreed} are known here "
            f"to be this request's",
            phase="claim",
            now_true="nothing moved; the held blocks were not written",
            next_step="name no held prefix, or give push the state or the prompt_ids",
        )
    return named


def _take_held(session: Session, held_tokens: int) -> None:
    """Prefill leaves out what decode said it holds: no more, and no less."""
    named = session.named_tokens
    if held_tokens != named:
        raise PeerError(f"held_tokens: {held_tokens} were left out, {named} are held here")
    session.held_tokens = held_tokens


def _take_committed(session: Session, message: m.Committed) -> None:
    session.committed = message


def _take_busy(session: Session, message: m.Busy) -> None:
    session.keep_error(
        CapacityError(
            f"{session.peer_name} has no room now: {message.reason}",
            next_step=f"try again in {message.retry_after_ms} ms (the ticket stays good), or elsewhere",
            retry_after_seconds=message.retry_after_ms / 1e3,
        )
    )


def _take_error(session: Session, message: m.Abort | m.Mismatch) -> None:
    error = KVFerryError.from_record(message.error)
    if isinstance(error, LocalError):  # its own fault there is the peer's here
        error = PeerError(error.message, next_step=error.next_step)
    error.message = f"{session.peer_name} gave up: {error.message}"
    error.next_step = error.next_step or "try another worker, or recompute the request"
    session.peer_said(error)


def _take_renew(session: Session, message: m.Renew) -> None:
    session.extend_lease(message.lease_ms / 1e3)


_TAKE: dict[type[m.TransferMessage], Callable[[Session, Any], None]] = {
    m.Claim: _take_claim,
    m.Offered: _take_offered,
    m.Granted: _take_granted,
    m.Ready: _take_ready,
    m.Pack: _take_pack,
    m.Packed: _take_packed,
    m.Commit: _take_commit,
    m.Committed: _take_committed,
    m.Busy: _take_busy,
    m.Abort: _take_error,
    m.Mismatch: _take_error,
    m.Renew: _take_renew,
}


def _ms_until(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1e3))
