"""Giving up, in every phase of every seat: acknowledged, told on both sides, and nothing stays held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from conftest import fill_random, unique_address, wait_until
from kvferry.errors import KVFerryError, LocalError
from kvferry.protocol.table import ROWS, Event, Phase, Role, phases_of
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, Timeouts
from kvferry.transfer.session import Session
from test_transfer import TOKENS, is_idle, layout, live, move, table

pytestmark = pytest.mark.usefixtures("nothing_left")

WORDS = "given up on purpose"
# Long enough for a busy machine: a word that is lost shows as an abort that no peer has answered.
PATIENT = Timeouts(handshake=20.0, heartbeat=0.5, lost=20.0, abort=20.0, start=20.0)
# What only follows when the peer is lost; and the ends.
OTHER = {Phase.ALONE, Phase.ABORTING, Phase.DONE, Phase.FAILED}
POINTS = [
    (role, mode, phase) for role in Role for mode in Mode for phase in sorted(phases_of(role, mode) - OTHER)
]
THEN = {(row.role, row.mode, row.phase): row.then for row in ROWS if row.event is Event.CANCEL}


class Spy:
    """Gives a transfer up as soon as one seat is in one phase; remembers what the seat then hears."""

    def __init__(self, role: Role, mode: Mode, phase: Phase) -> None:
        self._point = (role, mode, phase)
        self.is_armed, self.has_struck = True, False
        self.heard: list[Event] = []

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        set_timer, message = Session.set_timer, Session.message

        def on_phase(session: Session) -> None:
            set_timer(session)  # called as each phase begins
            at = (session.role, session.mode, session.machine.phase)
            if at == self._point and self.is_armed:
                self.is_armed = False
                if session._events:  # as the first thing in this phase, before what its actions bring
                    self.has_struck = True
                    session.keep_error(LocalError(WORDS))
                    session.then(Event.CANCEL)
                else:
                    session._loop.call_soon(self._strike, session)

        def on_message(session: Session, event: Event, given: Any) -> None:
            if self.has_struck and (session.role, session.mode) == self._point[:2]:
                self.heard.append(event)
            message(session, event, given)

        monkeypatch.setattr(Session, "set_timer", on_phase)
        monkeypatch.setattr(Session, "message", on_message)

    def _strike(self, session: Session) -> None:
        assert session.machine.phase is self._point[2]
        self.has_struck = True
        session.fail(LocalError(WORDS))  # as the node does when its engine cancels


@pytest.fixture(params=["shm", "tcp"])
def ends(
    request: pytest.FixtureRequest, opened: Callable[..., Endpoint]
) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Prefill and decode."""
    prefill, decode = (
        opened(layout(), unique_address(request.param), timeouts=PATIENT, name=name)
        for name in ("prefill", "decode")
    )
    fill_random(prefill.pool, 1)
    return prefill, decode


def handoff(
    prefill: Endpoint, decode: Endpoint, mode: Mode
) -> tuple[KVFerryError | None, KVFerryError | None]:
    """One handoff, as far as it goes; what prefill's and decode's engine are told."""
    errors: dict[Endpoint, KVFerryError] = {}
    outcomes: dict[Endpoint, Future[Any]] = {}

    def attempt(side: Endpoint, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except KVFerryError as error:
            errors.setdefault(side, error)
            return None

    src, dst = table(8, 2), table(8, 3)
    if mode is Mode.PULL:
        ticket = prefill.offer(None, src, tokens=TOKENS, request_id="r", lease_seconds=20.0)
        outcomes[prefill] = prefill.outcome(ticket)
        arrived = decode.pull(ticket, dst, timeout_seconds=20.0)
    else:
        ticket = decode.reserve("r", TOKENS, dst, lease_seconds=20.0)
        outcomes[decode] = decode.outcome(ticket)
        arrived = decode.arrival(ticket)
        push = attempt(prefill, lambda: prefill.push(ticket, src, tokens=TOKENS, timeout_seconds=20.0))
        if push is not None:
            outcomes[prefill] = prefill.outcome(ticket)
            for layer in range(3):
                attempt(prefill, lambda layer=layer: push.layer(layer))
            attempt(prefill, lambda: push.commit(None))
    attempt(decode, arrived.result)
    if decode not in errors:
        attempt(decode, arrived.started)
    for side, outcome in outcomes.items():
        attempt(side, lambda outcome=outcome: outcome.result(30))
    return errors.get(prefill), errors.get(decode)


@pytest.mark.parametrize(("role", "mode", "phase"), POINTS)
def test_given_up(
    ends: tuple[Endpoint, Endpoint],
    monkeypatch: pytest.MonkeyPatch,
    role: Role,
    mode: Mode,
    phase: Phase,
) -> None:
    """The seat says why and in which phase, its peer is told, both are free; the next goes through."""
    prefill, decode = ends
    spy = Spy(role, mode, phase)
    with monkeypatch.context() as patch:
        spy.watch(patch)
        told = handoff(prefill, decode, mode)
        wait_until(lambda: is_idle(prefill) and is_idle(decode))
    assert spy.has_struck
    own, peers = told if role is Role.PREFILL else reversed(told)
    if THEN[role, mode, phase] is phase:  # too late to give up: decode has it, and goes on
        assert told == (None, None)
        assert live(decode, table(8, 3)) == live(prefill, table(8, 2))
    else:
        assert own is not None
        assert own.message == WORDS
        assert own.phase == phase
        assert own.now_true
        if peers is None:  # the commit had left already: decode may have it, and prefill cannot know
            assert own.in_doubt
            assert live(decode, table(8, 3)) == live(prefill, table(8, 2))
    if THEN[role, mode, phase] is Phase.ABORTING:
        # Answered, by Aborted or by the peer's own end that crossed it; never waited out.
        assert {Event.GOT_ABORTED, Event.GOT_ABORT, Event.GOT_MISMATCH, Event.GOT_RELEASED} & set(spy.heard)
    move(prefill, decode, table(8, 4), table(8, 5), mode)
    assert live(decode, table(8, 5)) == live(prefill, table(8, 4))
