"""The decode role: take a request in, out of prefill's offer or into a reservation, and run it on."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvferry.engines.base import BlockTables
from kvferry.engines.reference import resolve_limits
from kvferry.errors import DeadlineError, IncompatibleError, InputError, KVFerryError, LocalError
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.serve.ask import Ask
from kvferry.serve.job import Handed, Job, Phase, as_known, transfer_params
from kvferry.state import ExecutionState, unpack_ids
from kvferry.transfer import Move

if TYPE_CHECKING:
    from kvferry.serve.roles import Roles

__all__ = ["Taking"]


@dataclass(slots=True, eq=False)
class _Taken:
    """Blocks lent to one move, and what counts against the pool until they are free or in a request."""

    tables: BlockTables
    ticket: bytes
    move: Move
    num_blocks: int
    job: Job | None = None
    is_imported: bool = False
    is_freed: bool = False


class Taking:
    """Requests on their way here."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._reservations: dict[bytes, _Taken] = {}
        self._moves: dict[Job, _Taken] = {}

    def has_reservation(self, job: Job) -> bool:
        """Whether blocks are held for it already."""
        handoff = job.ask.handoff
        return (
            handoff is not None and handoff.says is not None and handoff.says.transfer in self._reservations
        )

    def start(self, job: Job) -> None:
        """Reserve, or begin to take in. Raises KVFerryError; then nothing is held for the job."""
        handoff = job.ask.handoff
        assert handoff is not None
        if handoff.kind == "reserve":
            self._reserve(job)
            return
        assert handoff.says is not None
        if handoff.says.tokens > len(job.ask.prompt_ids):
            raise InputError(
                f"kv_transfer_params.kvferry_ticket: is of {handoff.says.tokens} tokens, the prompt has "
                f"{len(job.ask.prompt_ids)}"
            )
        taken = self._pull(job) if handoff.says.mode is Mode.PULL else self._reserved(job)
        taken.job = job
        self._moves[job] = taken
        self._roles.batcher.arriving(job)
        self._roles.batcher.when_done(taken.move.arrival, lambda _: self._arrived(job, taken))

    def give_up(self, job: Job, error: KVFerryError) -> None:
        """Stop the move; ``_arrived`` or ``_started`` frees what it had."""
        if (taken := self._moves.get(job)) is not None and not taken.is_imported:
            self._roles.waiters.submit(taken.move.abort, error)

    def nobody_asks(self, job: Job) -> None:
        """Its answer was never read: take the reservation back."""
        if job.ask.handoff is not None and job.ask.handoff.kind == "reserve":
            tickets = [taken.ticket for taken in self._reservations.values()]
            for ticket in tickets:
                if read_ticket(ticket).request_id == job.request_id:
                    self.withdraw(ticket)

    def withdraw(self, ticket: bytes) -> None:
        """Nobody will ask for what is pushed there: free the reservation, unless a request has it already.

        What has arrived in it is given up, and prefill told.
        """
        taken = self._reservations.get(read_ticket(ticket).transfer)
        if taken is not None and taken.ticket == ticket and taken.job is None:
            self._roles.endpoint.cancel(ticket, "its caller gave it up")

    def _reserve(self, job: Job) -> None:
        engine, batcher, endpoint = self._roles.engine, self._roles.batcher, self._roles.endpoint
        tokens = len(job.ask.prompt_ids)
        tables = engine.allocate(tokens + 1)
        try:
            ticket = endpoint.reserve(
                job.request_id, tokens, tables, lease_seconds=self._roles.options.lease_seconds
            )
        except BaseException:
            engine.free(tables)
            raise
        taken = _Taken(tables, ticket, endpoint.arrival(ticket), job.num_blocks)
        batcher.promise(job.num_blocks)
        transfer = read_ticket(ticket).transfer
        self._reservations[transfer] = taken
        batcher.when_done(endpoint.outcome(ticket), lambda _: self._reservation_ended(transfer, taken))
        job.phase = Phase.ENDED
        job.post(Handed(transfer_params(ticket, to_decode=False)))

    def _pull(self, job: Job) -> _Taken:
        engine, handoff = self._roles.engine, job.ask.handoff
        assert handoff is not None
        assert handoff.ticket is not None
        tables = engine.allocate(len(job.ask.prompt_ids) + 1)
        try:
            move = self._roles.endpoint.pull(
                handoff.ticket, tables, timeout_seconds=self._roles.options.timeout_seconds
            )
        except BaseException:
            engine.free(tables)
            raise
        self._roles.batcher.promise(job.num_blocks)
        return _Taken(tables, handoff.ticket, move, job.num_blocks)

    def _reserved(self, job: Job) -> _Taken:
        assert job.ask.handoff is not None
        assert job.ask.handoff.says is not None
        taken = self._reservations.get(job.ask.handoff.says.transfer)
        if taken is None or taken.job is not None:
            raise DeadlineError(
                "no such reservation is held here"
                if taken is None
                else "the reservation is taken up already",
                next_step="reserve again, or compute the request without prefill",
            )
        if job.num_blocks > taken.num_blocks:
            raise InputError("max_tokens: more than was reserved for")
        return taken

    def _arrived(self, job: Job, taken: _Taken) -> None:
        """Everything is in the pool, or nothing is: run on from it, or free the blocks."""
        del self._moves[job]
        self._roles.batcher.arrived(job)
        try:
            state = taken.move.result()
        except KVFerryError as error:
            if job.phase is not Phase.ENDED:
                self._roles.batcher.fail(job, error)
            if read_ticket(taken.ticket).mode is Mode.PULL:
                self._free(taken)
            return
        try:
            if job.phase is Phase.ENDED:
                raise LocalError("the client went away")
            if taken.is_freed:
                raise DeadlineError("the lease ended before the request could start here")
            assert state is not None
            state = as_asked(state, job.ask, self._stops())
            job.request_id = self._roles.engine.import_state(state, taken.tables)
        except KVFerryError as error:
            if job.phase is not Phase.ENDED:
                self._roles.batcher.fail(job, error)
            self._refuse(taken, error)
            return
        # From here on the blocks are the request's; it counts what the client may have at most.
        taken.is_imported = True
        self._moves[job] = taken
        self._roles.batcher.arriving(job)
        job.num_blocks = taken.num_blocks
        started = self._roles.waiters.submit(taken.move.started)
        self._roles.batcher.when_done(started, partial(self._started, job))

    def _started(self, job: Job, told: Future[object]) -> None:
        """Prefill knows that the request runs here; only now it does."""
        del self._moves[job]
        self._roles.batcher.arrived(job)
        error = told.exception()
        if error is None and job.phase is not Phase.ENDED:
            self._roles.batcher.run(job)
            return
        if error is not None and job.phase is not Phase.ENDED:
            self._roles.batcher.fail(job, as_known(error))
        self._roles.batcher.release(job)

    def _refuse(self, taken: _Taken, error: KVFerryError) -> None:
        """What arrived is not wanted: tell prefill, then free."""

        def refuse() -> None:
            taken.move.abort(error)
            self._roles.endpoint.outcome(taken.ticket).exception()

        done = self._roles.waiters.submit(refuse)
        if read_ticket(taken.ticket).mode is Mode.PULL:
            self._roles.batcher.when_done(done, lambda _: self._free(taken))

    def _reservation_ended(self, transfer: bytes, taken: _Taken) -> None:
        del self._reservations[transfer]
        if not taken.is_imported:
            self._free(taken)

    def _free(self, taken: _Taken) -> None:
        taken.is_freed = True
        self._roles.engine.free(taken.tables)
        self._roles.batcher.promise(-taken.num_blocks)

    def _stops(self) -> tuple[int, ...]:
        return self._roles.engine.model.tokenizer.stop_token_ids


def as_asked(state: ExecutionState, ask: Ask, stop_token_ids: tuple[int, ...]) -> ExecutionState:
    """The state, if it is of this very request, with the limits that decode was asked to keep.

    Prefill was asked for one token; how far the request goes, decode's own body says. Raises
    IncompatibleError where prompt or sampling differ: the tokens would be those of another request.
    """
    ids, border = unpack_ids(state.tokens.ids).tolist(), state.tokens.prompt_tokens
    if ids[:border] != ask.prompt_ids:
        raise IncompatibleError("the ticket is of another prompt than this request's")
    theirs = state.sampling
    if ask.sampling.seed is None or theirs.temperature == 0:
        theirs = msgspec.structs.replace(theirs, seed=ask.sampling.seed)
    if theirs != ask.sampling:
        raise IncompatibleError("the ticket is of a request with other sampling parameters")
    made = len(ids) - border
    limits = resolve_limits(ask.limits, stop_token_ids)
    if limits.max_tokens_left <= made:
        raise InputError(
            f"max_tokens: {made} tokens were made already, {limits.max_tokens_left} are asked for"
        )
    limits = msgspec.structs.replace(
        limits,
        max_tokens_left=limits.max_tokens_left - made,
        min_tokens_left=max(0, limits.min_tokens_left - made),
    )
    return msgspec.structs.replace(state, limits=limits)
