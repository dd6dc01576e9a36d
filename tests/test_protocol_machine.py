"""The transition table: complete, closed, bounded in time, and safe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LocalError, PeerError
from kvferry.protocol.machine import Machine
from kvferry.protocol.table import (
    FINAL,
    MESSAGES,
    ROWS,
    START_PHASE,
    TRUTH,
    WAITS,
    Action,
    Event,
    Phase,
    Role,
    Wait,
    phases_of,
)
from kvferry.protocol.ticket import Mode

SEATS = [(role, mode) for role in Role for mode in Mode]
TABLE = {(row.role, row.mode, row.phase, row.event): row for row in ROWS}
ENDINGS = {Event.CANCEL, Event.LEASE_END, Event.DEADLINE, Event.PEER_LOST}


def machine_in(role: Role, mode: Mode, phase: Phase) -> Machine:
    machine = Machine(role, mode)
    machine.phase = phase
    return machine


def test_no_pair_is_defined_twice() -> None:
    """Each (role, mode, phase, event) has at most one row."""
    keys = [(row.role, row.mode, row.phase, row.event) for row in ROWS]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(("role", "mode"), SEATS)
def test_every_pair_moves_or_is_refused_by_name(role: Role, mode: Mode) -> None:
    """In every phase of every seat each event moves by its row, or is refused with whose fault it is."""
    for phase in phases_of(role, mode):
        for event in Event:
            machine = machine_in(role, mode, phase)
            row = TABLE.get((role, mode, phase, event))
            if row is not None:
                assert machine.handle(event) is row
                assert machine.phase is row.then
                continue
            with pytest.raises(PeerError if event in MESSAGES else LocalError, match=event.value):
                machine.handle(event)
            assert machine.phase is phase


@pytest.mark.parametrize(("role", "mode"), SEATS)
def test_time_and_loss_are_defined_everywhere(role: Role, mode: Mode) -> None:
    """In every phase a cancel, a lease end, a deadline and a lost peer have a row."""
    for phase in phases_of(role, mode):
        for event in ENDINGS:
            assert (role, mode, phase, event) in TABLE, (phase, event)


@pytest.mark.parametrize(("role", "mode"), SEATS)
def test_each_phase_that_is_not_final_ends_by_a_clock(role: Role, mode: Mode) -> None:
    """Every wait has a clock, and that clock's event alone leads to the end without any peer."""
    fires = {Wait.LEASE: Event.LEASE_END, Wait.TIMEOUT: Event.DEADLINE, Wait.ABORT: Event.DEADLINE}
    for start in phases_of(role, mode) - FINAL:
        phase = start
        for _ in range(3):
            if phase in FINAL:
                break
            phase = TABLE[role, mode, phase, fires[WAITS[phase]]].then
        assert phase in FINAL, start


@pytest.mark.parametrize(("role", "mode"), SEATS)
def test_all_phases_are_reached_from_the_start(role: Role, mode: Mode) -> None:
    """No phase of a seat is dead."""
    seen, todo = set(), [START_PHASE[role, mode]]
    while todo:
        phase = todo.pop()
        if phase not in seen:
            seen.add(phase)
            todo += [row.then for row in ROWS if (row.role, row.mode, row.phase) == (role, mode, phase)]
    assert seen == phases_of(role, mode)


def test_failure_always_frees_and_says_so() -> None:
    """Every way into FAILED frees blocks and reports; every way into DONE at prefill frees."""
    for row in ROWS:
        if row.phase in FINAL:
            assert row.then is row.phase
            assert not {Action.FREE, Action.FAIL, Action.SUCCEED} & set(row.actions)
            continue
        assert (row.then is Phase.FAILED) == (Action.FAIL in row.actions), row
        assert (row.then is Phase.DONE) == (Action.SUCCEED in row.actions), row
        frees = row.then is Phase.FAILED or (row.then is Phase.DONE and row.role is Role.PREFILL)
        assert frees == (Action.FREE in row.actions), row


def test_copies_are_stopped_before_blocks_are_freed() -> None:
    """A row that frees out of a phase in which bytes move stops the copy first."""
    moving = {Phase.MOVING, Phase.SETTLING, Phase.VOUCHING, Phase.COMMITTING, Phase.VERIFYING, Phase.CHECKING}
    for row in ROWS:
        if Action.FREE in row.actions and row.phase in moving and row.event is not Event.REFUSED:
            assert row.actions.index(Action.STOP_COPY) < row.actions.index(Action.FREE), row


def test_every_failing_phase_says_what_is_true() -> None:
    """A transfer that fails out of a phase, or aborts there, has a sentence for what is true now."""
    for row in ROWS:
        if row.then in {Phase.FAILED, Phase.ABORTING} and row.phase not in {Phase.FAILED, Phase.ABORTING}:
            assert (row.role, row.phase) in TRUTH, row


def test_visible_exactly_once_and_only_after_verify() -> None:
    """PUBLISH stands in one row a mode: decode, verified."""
    rows = [row for row in ROWS if Action.PUBLISH in row.actions]
    assert {(row.role, row.mode, row.phase, row.event) for row in rows} == {
        (Role.DECODE, mode, Phase.VERIFYING, Event.VERIFIED) for mode in Mode
    }
    for row in ROWS:
        if row.then is Phase.COMMITTED and row.phase is not Phase.COMMITTED and row.role is Role.DECODE:
            assert Action.PUBLISH in row.actions


@given(st.sampled_from(SEATS), st.lists(st.sampled_from(sorted(Event)), max_size=30))
def test_any_story_publishes_at_most_once_and_frees_at_most_once(
    seat: tuple[Role, Mode], events: list[Event]
) -> None:
    """Whatever happens in whatever order, a transfer publishes once at most and frees once at most."""
    machine = Machine(*seat)
    actions: list[Action] = []
    for event in events:
        try:
            actions += machine.handle(event).actions
        except (PeerError, LocalError):
            continue
    assert actions.count(Action.PUBLISH) <= 1
    assert actions.count(Action.FREE) <= 1
    assert actions.count(Action.FAIL) + actions.count(Action.SUCCEED) <= 1
    if machine.is_final:
        assert actions.count(Action.FAIL) + actions.count(Action.SUCCEED) == 1
    assert "so far" in machine.story()
