"""Each action of the protocol's table, done for a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.protocol import messages as m
from kvferry.protocol.table import Action, Event
from kvferry.protocol.ticket import Mode
from kvferry.state import decode_state, encode_state
from kvferry.transfer import exchange
from kvferry.transfer.calls import Arrival, Outcome
from kvferry.transfer.checks import as_stored
from kvferry.transfer.integrity import compare_digests, join_arrived
from kvferry.transfer.payload import WHOLE

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["ACTIONS"]


def _check(session: Session) -> None:
    """Before a byte moves, at decode: does the state fit, is there room, is there time."""
    try:
        session.node.check_before_move(session)
    except KVFerryError as error:
        session.keep_error(error)
        session.then(Event.REFUSED)
        return
    if session.mode is Mode.PULL:
        session.payload.add(WHOLE)
    session.then(Event.CHECKED)


def _verify(session: Session) -> None:
    """After the bytes, before anything is visible."""
    assert session.commit is not None
    try:
        exported, arrived = session.commit.digest_table(), join_arrived(session.payload.arrived)
        if session.config.integrity:
            compare_digests(exported, arrived)
        session.node.check_after_move(session, exported, arrived)
    except KVFerryError as error:
        session.keep_error(error)
        session.then(Event.REFUSED)
        return
    session.then(Event.VERIFIED)


def _settle(session: Session) -> None:
    if session.payload.settle():
        session.then(Event.COPIED)


def _vouch(session: Session) -> None:
    if session.payload.exporting.vouch():
        session.then(Event.VOUCHED)


def _publish(session: Session) -> None:
    session.node.ledger.give_back(session)
    state = session.state
    if state and session.form is not None:
        # What the engine gets is the state of what lies in its blocks now.
        state = encode_state(as_stored(session, decode_state(state)))
    session.published.set_result(Arrival(state, session.record(), session.portions))


def _fail(session: Session) -> None:
    for future in (session.published, session.ended):
        if not future.done():
            # One each: whoever raises an error hangs his frames on it, and ``ended`` is remembered.
            future.set_exception(session.final_error())
    session.node.forget(session)


def _succeed(session: Session) -> None:
    session.ended.set_result(Outcome(session.record()))
    session.node.forget(session)


def _nothing(session: Session) -> None:
    """FREE: the session waited until nothing touches the memory; the futures say the rest."""


ACTIONS: dict[Action, Callable[[Session], None]] = {
    Action.SEND_CLAIM: lambda s: s.post(exchange.claim(s)),
    Action.SEND_OFFERED: lambda s: s.post(exchange.offered(s)),
    Action.SEND_GRANTED: lambda s: s.post(exchange.granted(s)),
    Action.SEND_MOVED: lambda s: s.post(m.Moved(s.transfer)),
    Action.SEND_COMMIT: lambda s: s.post(exchange.commit(s)),
    Action.SEND_COMMITTED: lambda s: s.post(exchange.committed(s)),
    Action.SEND_MISMATCH: lambda s: s.post(m.Mismatch(s.transfer, s.final_error().to_record())),
    Action.SEND_STARTED: lambda s: s.post(m.Started(s.transfer)),
    Action.SEND_RELEASED: lambda s: s.post(m.Released(s.transfer)),
    Action.SEND_ABORT: lambda s: s.post(m.Abort(s.transfer, s.final_error().to_record())),
    Action.SEND_ABORTED: lambda s: s.post(m.Aborted(s.transfer)),
    Action.CHECK: _check,
    Action.OPEN_GRANT: lambda s: s.payload.open_grant(),
    Action.CLOSE_GRANT: lambda s: s.payload.close_grant(s.error),
    Action.COPY: lambda s: s.payload.copy_next(),
    Action.PACK: lambda s: s.payload.packing.go(),
    Action.SETTLE: _settle,
    Action.STOP_COPY: lambda s: s.payload.stop(s.final_error()),
    Action.VOUCH: _vouch,
    Action.VERIFY: _verify,
    Action.PUBLISH: _publish,
    Action.RENEW: lambda s: s.set_timer(),
    Action.FREE: _nothing,
    Action.FAIL: _fail,
    Action.SUCCEED: _succeed,
}
