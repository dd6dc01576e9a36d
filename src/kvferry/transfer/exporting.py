"""Digests of prefill's blocks: taken before the call that lends the blocks returns.

So they are of what the engine had computed, whatever becomes of the blocks while they move. The
methods named ``_in_thread`` run in the node's copy threads, the rest on its loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from kvferry.errors import KVFerryError, LocalError
from kvferry.layout import CopyPlan, PieceTable
from kvferry.protocol.table import Event, Phase
from kvferry.transfer.integrity import (
    NO_DIGESTS,
    DigestTable,
    compare_digests,
    digest_pieces,
    digest_plan,
    join_digests,
    select_digests,
)
from kvferry.transfer.portions import plan_portions
from kvferry.transport.device import pool_bytes

if TYPE_CHECKING:
    from kvferry.transfer.payload import Part, Payload
    from kvferry.transfer.session import Session

__all__ = ["Exporting", "known"]

P = ParamSpec("P")
T = TypeVar("T")

# Planned and summed in no more time than a thread takes to wake and to report (0.12 ms each, on a
# 2 vCPU EPYC), on the loop's own core.
SMALL_NBYTES = 512 << 10


class Exporting:
    """What prefill vouches for of one session; ``exported`` is of an offer, once it was begun."""

    def __init__(self, session: Session, payload: Payload) -> None:
        self._session = session
        self._payload = payload
        self._loop = asyncio.get_running_loop()
        self._taking = 0
        self._vouching: asyncio.Future[DigestTable] | None = None
        self.exported: asyncio.Future[DigestTable] | None = None

    def begin(self, like: Exporting | None = None) -> None:
        """Take an offer's digests.

        ``like``: of another offer of the same blocks; its digests are these.
        """
        if not self._session.config.integrity:
            return
        pieces = self._payload.take_own_pieces()
        if like is None or like.exported is None:
            self.exported = self._in_thread(self._export_in_thread, pieces)
        else:
            self.exported = like.exported
        self.exported.add_done_callback(lambda _: self._payload.quiet_again())

    async def take(self, part: Part) -> DigestTable:
        """The digests of one part of a push as it lies now."""
        if not self._session.config.integrity:
            return NO_DIGESTS
        self._taking += 1
        try:
            return await self._in_thread(self._digest_part_in_thread, part)
        finally:
            self._taking -= 1
            self._payload.quiet_again()

    def _digest_part_in_thread(self, part: Part) -> DigestTable:
        return digest_plan(pool_bytes(self._session.node.memory), self._given_plan(part))

    def _given_plan(self, part: Part) -> CopyPlan:
        return self._at_home(part) if self._payload.converts else self._payload.plan(part)

    @property
    def is_busy(self) -> bool:
        """Digests are being taken now."""
        tasks = (self.exported, self._vouching)
        return self._taking > 0 or any(task is not None and not task.done() for task in tasks)

    def vouch(self) -> bool:
        """True where no digests are wanted; else VOUCHED comes when those of all that moved are there."""
        if not self._session.config.integrity:
            return True
        self._vouching = asyncio.ensure_future(self._vouch())
        self._vouching.add_done_callback(self._vouched)
        self._vouching.add_done_callback(lambda _: self._payload.quiet_again())
        return False

    def table(self) -> DigestTable:
        """The digests of all that moved; after VOUCHED."""
        return NO_DIGESTS if self._vouching is None else self._vouching.result()

    async def _vouch(self) -> DigestTable:
        exported = None if self.exported is None else await self.exported
        return await self._in_thread(self._vouch_in_thread, exported)

    def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Have digests taken beside the loop; those of a few blocks now: sooner than a thread wakes.

        A device may have much to do first, and the loop waits for nobody.
        """
        if self._home_nbytes > SMALL_NBYTES or self._session.node.memory.device is not None:
            call = functools.partial(work, *args, **kwargs)
            return self._loop.run_in_executor(self._session.node.copiers, call)
        done: asyncio.Future[T] = self._loop.create_future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - as an executor's future has it
            done.set_exception(error)
        return done

    @functools.cached_property
    def _home_nbytes(self) -> int:
        """What this side's blocks of the request hold, live or not."""
        tables = zip(self._session.tables, self._session.node.block_nbytes, strict=True)
        return sum(len(table.ids) * nbytes for table, nbytes in tables)

    def _export_in_thread(self, pieces: PieceTable) -> DigestTable:
        return digest_pieces(pool_bytes(self._session.node.memory), pieces)

    def _vouch_in_thread(self, exported: DigestTable | None) -> DigestTable:
        """For each part that moved, in order: its chunks' digests, taken at export wherever that can be."""
        memory = pool_bytes(self._session.node.memory)
        if exported is None:
            # A push: what was given must be what is there now, or a part was pushed before it was
            # final, or its blocks were reused.
            now = join_digests(
                [digest_plan(memory, self._given_plan(part)) for part, _ in self._payload.given]
            )
            compare_digests(join_digests([digests for _, digests in self._payload.given]), now)
            return self._payload.packing.digest_table() if self._payload.converts else now
        if self._payload.converts:
            # What was packed is what was exported if the blocks are still what they were then.
            compare_digests(exported, digest_pieces(memory, self._payload.own_pieces()))
            return self._payload.packing.digest_table()
        plan = self._payload.plan()
        if plan.chunk_complete.all():
            return select_digests(exported, plan.chunk_id)
        # Part of a chunk moved (a held prefix, another split of heads): its digest is taken now, and
        # means what was exported only if the whole chunk still has its digest of then.
        pieces = self._payload.own_pieces()
        cut = np.unique(plan.chunk_id[~plan.chunk_complete])  # portions may share a chunk
        compare_digests(select_digests(exported, cut), digest_pieces(memory, pieces, only=cut))
        return join_digests([digest_plan(memory, plan)])

    def _vouched(self, digests: asyncio.Future[DigestTable]) -> None:
        session, error = self._session, digests.exception()
        if session.machine.phase is not Phase.VOUCHING:
            return  # something else ended it meanwhile
        if error is None:
            session.feed(Event.VOUCHED)
        else:
            session.fail(known(error, "taking digests"))

    def _at_home(self, part: Part) -> CopyPlan:
        """One part of this side's own blocks: what it gives, however decode stores it."""
        session = self._session
        ours = (session.config.layout, session.tables)
        return plan_portions(
            session.portions,
            ours,
            ours,
            session.tokens,
            first_token=session.held_tokens,
            layers=part.layers,
            token_range=part.token_range,
        )


def known(error: BaseException, what: str) -> KVFerryError:
    """The error as one of ours; one that nobody foresaw is this side's fault."""
    if isinstance(error, KVFerryError):
        return error
    unforeseen = LocalError(f"{what} failed in a way that kvferry did not foresee: {error!r}")
    unforeseen.__cause__ = error
    return unforeseen
