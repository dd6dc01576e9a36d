"""One transfer's place in the table: events in, actions out. No sockets, threads or clocks.

A machine never looks at bytes or time; whoever drives it says what happened and does what the
row says. Its history is kept, so that a failure can tell the story of its transfer.
"""

from __future__ import annotations

from kvferry.errors import LocalError, PeerError
from kvferry.protocol.table import FINAL, MESSAGES, ROWS, START_PHASE, Event, Phase, Role, Row
from kvferry.protocol.ticket import Mode

__all__ = ["Machine"]

_TABLE = {(row.role, row.mode, row.phase, row.event): row for row in ROWS}


class Machine:
    """The state of one transfer at one side."""

    def __init__(self, role: Role, mode: Mode) -> None:
        self.role = role
        self.mode = mode
        self.phase = START_PHASE[role, mode]
        self.history: list[tuple[Phase, Event]] = []

    @property
    def is_final(self) -> bool:
        """Nothing is held and nothing more can happen."""
        return self.phase in FINAL

    def handle(self, event: Event) -> Row:
        """Move on ``event``; returns the row whose actions the caller must now do, in order.

        Raises:
            PeerError: the peer may not send this now. The phase is unchanged; abort the transfer.
            LocalError: this side may not do this now. Nothing has changed.
        """
        row = self.expect(event)
        self.history.append((self.phase, event))
        self.phase = row.then
        return row

    def expect(self, event: Event) -> Row:
        """The row for ``event`` in this phase, without moving; raises as ``handle`` does."""
        row = _TABLE.get((self.role, self.mode, self.phase, event))
        if row is None:
            kind = PeerError if event in MESSAGES else LocalError
            raise kind(
                f"{event.value} has no meaning for {self.role} in a {self.mode} that is {self.phase}",
                phase=self.phase,
                now_true="this transfer is as it was before",
                next_step=self.story(),
            )
        return row

    def story(self) -> str:
        """What has happened to this transfer, oldest first."""
        return "so far: " + (
            ", ".join(f"{phase}: {event.value}" for phase, event in self.history) or "nothing"
        )
