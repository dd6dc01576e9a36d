"""The prefill role: compute a prompt and give the request away, by offer or by push."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvferry.engines.base import BlockTables
from kvferry.errors import KVFerryError, LocalError
from kvferry.serve.job import Handed, Job, Phase, Token, as_known, transfer_params
from kvferry.state import Exactness, ExecutionState
from kvferry.transfer import Endpoint

if TYPE_CHECKING:
    from kvferry.serve.roles import Roles

__all__ = ["Giving"]

_log = logging.getLogger("kvferry.serve")
_Layer = tuple[int, int, int]
"""layer, first token, stop token"""


class Giving:
    """Prefilled requests and their blocks, until decode has them or the lease ends."""

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self._pushes: dict[str, _Pusher] = {}
        self._offers: dict[Job, bytes] = {}

    def start(self, job: Job) -> None:
        """Take the prompt in; with decode's ticket the push begins at once, beside the computation."""
        assert job.ask.handoff is not None
        if job.ask.handoff.says is not None:
            job.request_id = job.ask.handoff.says.request_id  # decode's reservation is for that request
        # What ends a request after its first token is decode's to judge; a stop of its own is not.
        limits = msgspec.structs.replace(job.ask.limits, max_tokens_left=job.ask.limits.max_tokens_left + 1)
        engine, batcher = self._roles.engine, self._roles.batcher
        engine.submit(job.request_id, job.ask.prompt_ids, job.ask.sampling, limits)
        batcher.promise(job.num_blocks)
        if (ticket := job.ask.handoff.ticket) is not None:
            tables, tokens = engine.tables(job.request_id), len(job.ask.prompt_ids)
            pusher = _Pusher(
                self._roles.endpoint, ticket, tables, tokens, self._roles.options.timeout_seconds
            )
            self._pushes[job.request_id] = pusher
            batcher.when_done(self._roles.waiters.submit(pusher.run), partial(self._ended, job))
        batcher.enqueue_prefill(job)

    def on_layer(self, job: Job) -> Callable[[int], None] | None:
        """Hand each layer of the next chunk to the push."""
        pusher = self._pushes.get(job.request_id)
        if pusher is None:
            return None
        request = self._roles.engine.request(job.request_id)
        start = request.kv_tokens
        stop = min(start + self._roles.options.chunk_tokens, request.prompt_tokens)
        return lambda layer: pusher.add((layer, start, stop))

    def prefilled(self, job: Job) -> None:
        """Sample the first token, hand the request over, answer.

        Where the first token counts as given to the client, it goes with the state; else the state
        is of before it, and decode samples it again. A request that ends with it needs no decode.
        """
        handoff, engine, batcher = job.ask.handoff, self._roles.engine, self._roles.batcher
        assert handoff is not None
        before = None if handoff.may_emit else engine.export_state(job.request_id, Exactness.BITS)
        (output,) = engine.step([job.request_id])
        token = batcher.token(output)
        if output.finish is not None:
            self._answer(job, token, None)
            self.give_up(job, LocalError("the request ended with its first token"))
            return
        state = before or engine.export_state(job.request_id, Exactness.BITS)
        if (pusher := self._pushes.get(job.request_id)) is None:
            ticket = self._roles.endpoint.offer(
                state, engine.tables(job.request_id), lease_seconds=self._roles.options.lease_seconds
            )
            self._offers[job] = ticket
            batcher.when_done(self._roles.endpoint.outcome(ticket), partial(self._ended, job))
        else:
            assert handoff.ticket is not None
            ticket = handoff.ticket
            pusher.add(state)
        self._answer(job, token, ticket)

    def give_up(self, job: Job, error: KVFerryError) -> None:
        """Free the blocks: at once, or when the push has let go of them."""
        if (pusher := self._pushes.get(job.request_id)) is None:
            self._roles.batcher.release(job)
        else:
            pusher.add(error)

    def nobody_asks(self, job: Job) -> None:
        """Its answer was never read: take the offer back, unless decode has it all the same."""
        if (ticket := self._offers.get(job)) is not None:
            self._roles.endpoint.cancel(ticket, "the client went away", unclaimed_only=True)

    def withdraw(self, ticket: bytes) -> None:
        """Nobody will fetch it: take that offer back, as above."""
        if ticket in self._offers.values():
            self._roles.endpoint.cancel(ticket, "its caller gave it up", unclaimed_only=True)

    def close(self) -> None:
        """The engine's thread has ended: no push gets another part."""
        for pusher in self._pushes.values():
            pusher.add(LocalError("the server is ending"))

    def _answer(self, job: Job, token: Token, ticket: bytes | None) -> None:
        handoff = job.ask.handoff
        assert handoff is not None
        job.phase = Phase.ENDED
        if ticket is not None:
            emitted = 1 if handoff.may_emit else 0
            params = transfer_params(
                ticket,
                to_decode=True,
                kvferry_tokens=len(job.ask.prompt_ids),
                kvferry_emitted_tokens=emitted,
            )
            job.post(Handed(params))
        finish = token.finish or "length"
        job.post(Token(token.text, token.token, finish, token.completion_tokens))

    def _ended(self, job: Job, outcome: Future[object]) -> None:
        """The blocks are ours again."""
        self._pushes.pop(job.request_id, None)
        self._offers.pop(job, None)
        if (error := outcome.exception()) is not None:
            _log.warning("request %s was not handed over: %s", job.request_id, error)
            if job.phase is Phase.PREFILL:
                self._roles.batcher.abandon(job, as_known(error))
        self._roles.batcher.release(job)


class _Pusher:
    """One push, fed by the engine's thread, run by another: decode's silence holds nobody up."""

    def __init__(
        self, endpoint: Endpoint, ticket: bytes, tables: BlockTables, tokens: int, timeout_seconds: float
    ) -> None:
        self._endpoint = endpoint
        self._ticket = ticket
        self._tables = tables
        self._tokens = tokens
        self._timeout_seconds = timeout_seconds
        self._parts: queue.SimpleQueue[_Layer | ExecutionState | KVFerryError] = queue.SimpleQueue()

    def add(self, part: _Layer | ExecutionState | KVFerryError) -> None:
        """A layer that is final, the state as the last part, or the reason to stop."""
        self._parts.put(part)

    def run(self) -> None:
        """Push until the end; returns, or raises what ended it, when the blocks are the engine's again."""
        push = self._endpoint.push(
            self._ticket, self._tables, tokens=self._tokens, timeout_seconds=self._timeout_seconds
        )
        outcome = self._endpoint.outcome(self._ticket)
        try:
            while True:
                part = self._parts.get()
                if isinstance(part, ExecutionState):
                    push.commit(part)
                    break
                if isinstance(part, KVFerryError):
                    push.abort(part)
                    break
                layer, first, stop = part
                push.layers(layer, layer + 1, first_token=first, stop_token=stop)
        finally:
            outcome.result()
