"""Prefill's part of a worker: offers and pushes of finished prompts, until their blocks come back."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from kvferry.engines.vllm.identity import prompt_state
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.push import Pusher
from kvferry.engines.vllm.results import Outbox
from kvferry.engines.vllm.step import PushSave, Save, Tickets, block_tables
from kvferry.errors import KVFerryError, LocalError
from kvferry.state import Requirements
from kvferry.transfer import Endpoint, TransferRecord

__all__ = ["Offers"]

_PREEMPT_SECONDS = 5.0


@dataclass
class _Offer:
    """``ended``: its blocks are vLLM's again; ``finished``: vLLM has asked for them back."""

    ticket: Future[bytes]
    ended: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


class Offers:
    """The prompts that this rank holds for decode. Called by vLLM's worker thread, ``ticket`` by any."""

    def __init__(
        self, endpoint: Endpoint, needs: Requirements, options: Options, rank: int, outbox: Outbox
    ) -> None:
        self._endpoint, self._needs, self._options = endpoint, needs, options
        self._rank, self._outbox = rank, outbox
        self._groups = endpoint.pool.layout.groups
        self._offers: dict[str, _Offer] = {}
        self._pushers: list[Pusher] = []
        self._savers = ThreadPoolExecutor(2, thread_name_prefix="kvferry-offer")

    def begin(self, save: Save) -> None:
        """The prompt is computed: offer it."""
        offer = _Offer(Future())
        self._offers[save.request_id] = offer
        self._savers.submit(self._save, save, offer)

    def begin_push(self, save: PushSave) -> None:
        """This step's forward computes the last of the prompt: claim the reservation."""
        ticket = save.tickets[self._rank]
        offer = _Offer(Future())
        offer.ticket.set_result(ticket)
        self._offers[save.request_id] = offer
        self._pushers.append(
            Pusher(
                self._endpoint,
                save,
                ticket,
                block_tables(save.blocks, self._groups, len(save.ids) // 4 - 1),
                needs=self._needs,
                timeout_seconds=self._options.push_timeout_seconds,
                transport=self._options.transport,
                ended=functools.partial(self._push_ended, offer),
            )
        )

    def layer_done(self, layer: int) -> None:
        """The forward has written this layer."""
        for pusher in self._pushers:
            pusher.layer_done(layer)

    def finish_pushes(self) -> None:
        """The forward is over."""
        for pusher in self._pushers:
            pusher.finish()
        self._pushers = []

    def withdraw(self, request_id: str) -> None:
        """The request ended without a handoff."""
        if (offer := self._offers.get(request_id)) is not None:
            self._cancel(request_id, offer, "the request ended without a handoff")

    def give_up(self, tickets: Tickets) -> None:
        """The caller that was given these says that nobody will fetch them; what decode has goes on."""
        for request_id, offer in self._offers.items():
            if offer.ticket.done() and not offer.ticket.exception() and offer.ticket.result() in tickets:
                reason = LocalError("its caller gave it up", request_id=request_id)
                self._endpoint.cancel(offer.ticket.result(), reason, unclaimed_only=True)

    def preempt(self, request_id: str) -> None:
        """The request's blocks are about to be reused: its offer has ended on return.

        Nobody has its ticket yet, so where a starved endpoint does not end it in time, nothing reads
        the blocks; decode's part of a push would be refused by its digests.
        """
        if (offer := self._offers.pop(request_id, None)) is not None:
            self._cancel(request_id, offer, "the request was preempted")
            if not offer.ended.wait(_PREEMPT_SECONDS):
                self._outbox.note(f"the offer of preempted request {request_id} ends late")

    def collect(self, finished: Iterable[str]) -> set[str]:
        """Requests that vLLM has ended and whose blocks are its again; each is named once."""
        for request_id in finished:
            if (offer := self._offers.get(request_id)) is not None:
                offer.finished = True
        done = {key for key, offer in self._offers.items() if offer.finished and offer.ended.is_set()}
        for request_id in done:
            del self._offers[request_id]
        return done

    def ticket(self, request_id: str, timeout_seconds: float) -> bytes:
        """The ticket of an offered request; from any thread. Raises what kept it from being offered."""
        offer = self._offers.get(request_id)
        if offer is None:
            raise LocalError(f"request {request_id!r} is not offered here")
        try:
            return offer.ticket.result(timeout_seconds)
        except TimeoutError:
            raise LocalError(
                f"the offer of request {request_id!r} took more than {timeout_seconds} s",
                next_step="set ticket_timeout_seconds higher, or integrity to false",
            ) from None

    def close(self) -> None:
        """End the threads; the endpoint was closed before."""
        self._savers.shutdown(wait=True, cancel_futures=True)

    def _save(self, save: Save, offer: _Offer) -> None:
        try:
            tokens = len(save.ids) // 4 - 1
            tables = block_tables(save.blocks, self._groups, tokens)
            state = prompt_state(save.request_id, save.ids, self._needs, tables)
            ticket = self._endpoint.offer(state, tables, lease_seconds=self._options.lease_seconds)
            outcome = self._endpoint.outcome(ticket)
        except Exception as error:  # noqa: BLE001 - whatever it was, the request must not wait for ever
            failure = error if isinstance(error, KVFerryError) else LocalError(f"kvferry failed: {error!r}")
            self._outbox.failed(failure)
            offer.ended.set()
            offer.ticket.set_exception(failure)
            return
        outcome.add_done_callback(lambda done: self._offer_ended(offer, done))
        offer.ticket.set_result(ticket)

    def _push_ended(self, offer: _Offer, outcome: TransferRecord | KVFerryError) -> None:
        if isinstance(outcome, KVFerryError):
            self._outbox.failed(outcome)
        offer.ended.set()

    def _offer_ended(self, offer: _Offer, outcome: Future[TransferRecord]) -> None:
        error = outcome.exception()
        if error is not None:
            self._outbox.expired(error)
        offer.ended.set()

    def _cancel(self, request_id: str, offer: _Offer, reason: str) -> None:
        def cancel(done: Future[bytes]) -> None:
            if done.exception() is None:
                self._endpoint.cancel(done.result(), LocalError(reason, request_id=request_id))

        offer.ticket.add_done_callback(cancel)
