"""The bytes of one transfer at one side: copies, digests, the grant. Results come back as events.

Parts of one transfer move in order, one at a time, in the node's copy threads; so one large
transfer does not take all of them. Nothing here decides what happens next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.errors import KVFerryError
from kvferry.layout import CopyPlan, PieceTable, check_tables, source_pieces
from kvferry.protocol import messages as m
from kvferry.protocol.table import Event, Phase, Role
from kvferry.protocol.ticket import Mode
from kvferry.transfer.exporting import Exporting, known
from kvferry.transfer.integrity import (
    NO_DIGESTS,
    DigestTable,
    check_coverage,
    nothing_arrived,
)
from kvferry.transfer.portions import plan_portions
from kvferry.transfer.windows import Packing, PartKey, Unpacking
from kvferry.transport.base import Arrived, CancelToken, Copy, Direction

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = ["WHOLE", "Part", "Payload"]


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of the payload one copy moves: these layers, these tokens; None means all."""

    layers: range | None = None
    token_range: tuple[int, int] | None = None


WHOLE = Part()


class Payload:
    """Moves the bytes of one session. Everything runs on the loop but the two ``_in_thread``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._parts: deque[Part] = deque()
        self._cancel = CancelToken()
        self._when_quiet: Callable[[], None] | None = None
        self.given: list[tuple[Part, DigestTable]] = []
        self._planned: tuple[tuple[Part, int, int], CopyPlan] | None = None
        # Made when the tables were checked, kept until the digests are taken of them.
        self._home: PieceTable | None = None
        self.exporting = Exporting(session, self)
        self.is_copying = False
        self.arrived: list[Arrived] = []
        # Of a transfer that converts: what prefill packs, and what decode stores.
        self.packing = Packing(session, self.quiet_again)
        self.unpacking = Unpacking(session, self._cancel)

    @property
    def nbytes(self) -> int:
        """Bytes that have arrived, here or at the peer that this side writes to."""
        return sum(part.nbytes for part in self.arrived)

    def counts(self) -> tuple[int, int, int]:
        """Bytes, descriptors and chunks that have arrived."""
        descriptors = sum(part.descriptors for part in self.arrived)
        return self.nbytes, descriptors, sum(len(part.chunk_id) for part in self.arrived)

    def check_tables(self) -> None:
        """Raise InputError when this side's block tables do not hold the session's tokens."""
        session = self._session
        if session.role is Role.PREFILL and session.mode is Mode.PULL and session.config.integrity:
            self._home = self.own_pieces()
        else:
            check_tables(session.config.layout, session.tables, session.tokens)

    def take_own_pieces(self) -> PieceTable:
        """``own_pieces`` of an offer, which are kept for this one call."""
        pieces, self._home = self._home, None
        return self.own_pieces() if pieces is None else pieces

    def own_pieces(self) -> PieceTable:
        """What this side's blocks hold of the request, piece by piece."""
        return source_pieces(self._session.config.layout, self._session.tables, self._session.tokens)

    def plan(self, part: Part = WHOLE, *, held_tokens: int | None = None) -> CopyPlan:
        """The copies of one part, the same at both sides: the session's portions, in prefill's order."""
        session = self._session
        held = session.held_tokens if held_tokens is None else held_tokens
        # The whole is asked for by the grant, the copy, the digests and the last check.
        wanted = (part, held, session.tokens)
        planned = self._planned  # read once: a copy thread may ask for another part meanwhile
        if planned is None or planned[0] != wanted:
            planned = self._planned = (wanted, self._make_plan(part, held))
        return planned[1]

    def _make_plan(self, part: Part, held_tokens: int) -> CopyPlan:
        session = self._session
        assert session.peer is not None
        ours = (session.config.layout, session.tables)
        theirs = (session.peer.party.layout, session.peer_tables)
        src, dst = (ours, theirs) if session.role is Role.PREFILL else (theirs, ours)
        return plan_portions(
            session.portions,
            src,
            dst,
            session.tokens,
            first_token=held_tokens,
            layers=part.layers,
            token_range=part.token_range,
        )

    @property
    def converts(self) -> bool:
        """What moves is packed at prefill and stored otherwise at decode."""
        return self._session.form is not None

    @property
    def writes(self) -> bool:
        """Prefill writes into decode's blocks; else decode reads, also what is pushed.

        What converts is always read: decode's windows are few, and it knows when one is free.
        """
        session = self._session
        assert session.peer is not None
        return session.mode is Mode.PUSH and session.peer.connection.can_write and not self.converts

    def _key(self, part: Part) -> PartKey:
        layers = range(1 << 20) if part.layers is None else part.layers
        first, stop = (0, self._session.tokens) if part.token_range is None else part.token_range
        return layers.start, layers.stop, first, min(stop, self._session.tokens)

    def check_covered(self) -> None:
        """At decode, after the bytes: raise CorruptError unless all of the request is in its place, once."""
        if self.converts:
            self.unpacking.check_stored()
        else:
            check_coverage(self.plan(), self.arrived)

    # Copies.

    def add(self, part: Part, digests: DigestTable = NO_DIGESTS) -> None:
        """This part may move when its turn comes; ``digests`` are of a push's part, as it was given."""
        self._parts.append(part)
        self.given.append((part, digests))

    def copy_next(self) -> None:
        """Move the next part, unless one is on its way."""
        session = self._session
        assert session.peer is not None
        if self.is_copying or not self._parts:
            return
        part = self._parts.popleft()
        if session.role is Role.PREFILL and not self.writes:
            # Decode carries the push out by reading; our word starts it at once.
            key = self._key(part)
            if self.converts:
                self.packing.add(key)
            session.post(m.Ready(session.transfer, *key, session.held_tokens, session.grant))
            self.copy_next()
            return
        self.is_copying = True
        work: asyncio.Future[Arrived] = (
            asyncio.ensure_future(self.unpacking.fetch(self._key(part)))
            if self.converts
            else self._loop.run_in_executor(session.node.copiers, self._copy_in_thread, part)
        )
        work.add_done_callback(self._copied)

    def settle(self) -> bool:
        """Everything was asked for: true if nothing is on its way any more; else COPIED comes later.

        What the peer writes here counts: it has said that it is done, and is still let out properly.
        """
        if self.is_copying or self._parts or not self.packing.is_done:
            return False
        return self._session.role is Role.PREFILL or self._when_empty(self._all_left)

    def _all_left(self) -> None:
        if self._session.machine.phase is Phase.SETTLING:
            self._session.feed(Event.COPIED)

    def stop(self, error: KVFerryError) -> None:
        """End the copy that runs, soon, and forget those that wait."""
        self._parts.clear()
        self._cancel.cancel(error)
        self.packing.stop()
        self.unpacking.stop(error)

    def _copy_in_thread(self, part: Part) -> Arrived:
        session = self._session
        assert session.peer is not None
        connection = session.peer.connection
        plan = self.plan(part)
        if not plan.num_pieces:  # decode holds it all, or this part is outside a window
            return nothing_arrived(connection.path)
        # Not the lease's end: that may move on while this runs, and the session's clock keeps it.
        deadline = session.timeout_deadline
        copy = Copy(session.grant, plan, deadline, session.config.integrity, self._cancel)
        self._cancel.raise_if_cancelled()
        return connection.write(copy) if session.role is Role.PREFILL else connection.read(copy)

    def _copied(self, done: asyncio.Future[Arrived]) -> None:
        session = self._session
        self.is_copying = False
        error = done.exception()
        if error is not None:
            self._parts.clear()
            session.fail(known(error, "a copy"), Event.COPY_FAILED)
        else:
            self.arrived.append(done.result())
            session.clock.copy_seconds += done.result().seconds
            if self._parts:
                self.copy_next()
            else:
                session.feed(Event.COPIED)
        self.quiet_again()

    # What the peer does in this side's memory.

    def open_grant(self) -> None:
        """Let the peer read or write this transfer's bytes, if it is the peer that starts the copies."""
        session = self._session
        assert session.peer is not None
        writes = self.writes
        if self.converts:
            self._open_windows()
            return
        if writes is (session.role is Role.PREFILL):
            return
        # A push says only with its words what it left out; what decode holds is not to be written.
        plan = self.plan(held_tokens=session.named_tokens if writes else None)
        session.node.grants.open(
            session.grant,
            Direction.WRITE if writes else Direction.READ,
            plan.dst_offset if writes else plan.src_offset,
            plan.nbytes,
            self._landed_in_thread,
        )

    def _open_windows(self) -> None:
        """An offer's windows may be asked for; those of a push as its parts are given."""
        session = self._session
        if session.role is Role.PREFILL and session.mode is Mode.PULL:
            try:
                self.packing.add(self._key(WHOLE))
            except KVFerryError as error:
                session.fail(error)

    def close_grant(self, error: KVFerryError | None) -> None:
        """Admit no new copy by the peer; with ``error``, end those that run."""
        self._session.node.grants.close(self._session.grant, error)

    def _landed_in_thread(self, arrived: Arrived) -> None:
        self._loop.call_soon_threadsafe(self._landed, arrived)

    def _landed(self, arrived: Arrived) -> None:
        self.arrived.append(arrived)
        self._session.clock.copy_seconds += arrived.seconds
        if self._session.machine.phase is Phase.MOVING:
            self._session.feed(Event.LANDED)

    # The end.

    def when_quiet(self, call: Callable[[], None]) -> bool:
        """True if nothing touches this side's memory; else ``call`` runs, on the loop, once that is so."""
        if self.is_copying or self.exporting.is_busy or self.packing.is_busy:
            self._when_quiet = call
            return False

        return self._when_empty(call)

    def _when_empty(self, call: Callable[[], None]) -> bool:
        """True if no copy of the peer is in this side's memory; else ``call`` runs, on the loop, then."""

        def in_thread() -> None:
            self._loop.call_soon_threadsafe(call)

        return self._session.node.grants.when_empty(self._session.grant, in_thread)

    def quiet_again(self) -> None:
        if self._when_quiet is not None:
            call, self._when_quiet = self._when_quiet, None
            call()
