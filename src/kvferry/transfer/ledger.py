"""What a node remembers: its transfers now, and of ended ones enough to say why a ticket is refused."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from typing import TypeVar

from kvferry.errors import CapacityError, KVFerryError, LocalError
from kvferry.layout import PoolLayout
from kvferry.protocol.table import Phase, Role
from kvferry.transfer.calls import Outcome
from kvferry.transfer.directory import origin_of
from kvferry.transfer.lent import LentBlocks
from kvferry.transfer.session import Session

__all__ = ["Ledger"]

# Ended transfers and newest attempts that are remembered; a ticket older than that is "unknown".
_REMEMBERED = 4096
# Phases in which a session costs blocks but no work.
_HOLDING = frozenset({Phase.HELD, Phase.COMMITTED, Phase.ALONE})


class Ledger:
    """The sessions of one node, by transfer id. Lives on the node's loop."""

    def __init__(self, max_transfers: int, layout: PoolLayout) -> None:
        self._max_transfers = max_transfers
        self._lent = LentBlocks(layout)
        self._sessions: dict[bytes, Session] = {}
        self._ended: OrderedDict[bytes, asyncio.Future[Outcome]] = OrderedDict()
        self._visible: OrderedDict[bytes, None] = OrderedDict()
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def __contains__(self, transfer: bytes) -> bool:
        return transfer in self._sessions

    @property
    def num_working(self) -> int:
        """Sessions that are more than held blocks."""
        return sum(session.machine.phase not in _HOLDING for session in self)

    def num_working_with(self, origin: str) -> int:
        """Those of them whose peer that is (``origin_of``)."""
        return sum(
            session.peer is not None
            and session.machine.phase not in _HOLDING
            and origin_of(session.peer.connection) == origin
            for session in self
        )

    def make_room(self, transfer: bytes, request_id: str) -> None:
        """Raise unless one more transfer, of this id, may begin."""
        if transfer in self._sessions:
            raise LocalError(
                "this ticket or transfer id is in use here", request_id=request_id, phase="claim"
            )
        if len(self._sessions) >= self._max_transfers:
            raise CapacityError(
                f"{len(self._sessions)} transfers are held or under way here, the most that are allowed",
                request_id=request_id,
                next_step="wait for one to end, or raise max_transfers",
            )

    def take_in(self, session: Session) -> Session:
        """Hold the session, if its blocks can hold its tokens and are its own; else nothing of it stays."""
        try:
            session.payload.check_tables()
            if session.role is Role.DECODE:
                self._lent.lend(session)
        except KVFerryError:
            session.dismiss()
            raise
        self._sessions[session.transfer] = session
        return session

    def lend_again(self, session: Session) -> None:
        """A push covers fewer tokens than were reserved. Raises LocalError, InputError."""
        self._lent.lend_again(session)

    def find(self, transfer: bytes) -> Session | None:
        """The session, while it lasts."""
        return self._sessions.get(transfer)

    def get(self, transfer: bytes) -> Session:
        """The session; raises the error that ended it, or LocalError if it ended well or was never known."""
        session = self._sessions.get(transfer)
        if session is not None:
            return session
        ended = self._ended.get(transfer)
        if ended is not None and (error := ended.exception()) is not None:
            raise error
        raise LocalError(f"no such transfer at this endpoint now: {self.why_ended(transfer)}")

    def outcome(self, transfer: bytes) -> asyncio.Future[Outcome]:
        """How a transfer ends or has ended; of a transfer id that is tried again, the attempt that lives."""
        session = self._sessions.get(transfer)
        if session is not None:
            return session.ended
        return self._ended.get(transfer) or self.get(transfer).ended

    def why_ended(self, transfer: bytes) -> str:
        """In words, for someone who comes late."""
        ended = self._ended.get(transfer)
        if ended is None:
            return "it was never known here, or ended long ago"
        error = ended.exception()
        return "it is done" if error is None else f"it failed: {error}"

    def give_back(self, session: Session) -> None:
        """Nothing is written into the session's blocks any more."""
        self._lent.give_back(session.transfer)

    def forget(self, session: Session) -> None:
        """The session has ended and holds nothing."""
        self.give_back(session)
        self._sessions.pop(session.transfer, None)
        ended = self._ended.get(session.transfer)
        if ended is not None and ended.exception() is None:
            return  # a late second claim of its ticket failed, as it had to: what arrived has arrived
        _remember(self._ended, session.transfer, session.ended)

    # What makes "visible exactly once" and "newest attempt" checkable.

    def was_visible(self, transfer: bytes) -> bool:
        """The transfer's state became visible here before."""
        return transfer in self._visible

    def note_visible(self, transfer: bytes) -> None:
        """The transfer's state becomes visible now."""
        _remember(self._visible, transfer, None)

    def newest_attempt(self, request_id: str) -> int:
        """The highest attempt of this request that was shown here."""
        return self._attempts.get(request_id, 0)

    def note_attempt(self, request_id: str, attempt: int) -> None:
        """A state of this attempt was shown and fits."""
        _remember(self._attempts, request_id, attempt)


K = TypeVar("K")
V = TypeVar("V")


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
