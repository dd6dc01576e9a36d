"""The worker side: one endpoint over this rank's pool, offers of finished prompts, loads of others'.

vLLM's thread only hands work over and collects results; offers and loads run in threads here, the
bytes in the endpoint's. A block is reported free only when the endpoint says that nothing touches
it any more, and a request is reported once, in the way and at the time that vLLM expects.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.engines.vllm.identity import prompt_state
from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.step import Load, Save, Step, block_tables
from kvferry.errors import CorruptError, DeadlineError, KVFerryError, LocalError, TransportError
from kvferry.layout import BlockTable, GroupLayout
from kvferry.protocol.prefix import HeldPrefix, hold_prefix, prefix_salt
from kvferry.protocol.ticket import read_ticket
from kvferry.state import Requirements, unpack_ids
from kvferry.transfer import Endpoint, Move, Pool, Timeouts, TransferRecord
from kvferry.transport.security import Identity

__all__ = ["Results", "WorkerSide"]

_ENDED = "the request was ended at decode"


@dataclass
class Results:
    """What ended since the last step. ``failed`` are among ``loaded``, as vLLM wants it."""

    saved: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    moves: list[TransferRecord] = field(default_factory=list)
    errors: list[KVFerryError] = field(default_factory=list)
    expired: int = 0


@dataclass
class _Offer:
    """``ended``: its blocks are vLLM's again; ``finished``: vLLM has asked for them back."""

    ticket: Future[bytes]
    ended: threading.Event = field(default_factory=threading.Event)
    finished: bool = False


class WorkerSide:
    """One rank's transfers. Everything but the callbacks is called by vLLM's worker thread."""

    def __init__(
        self,
        pool: Pool,
        needs: Requirements,
        options: Options,
        *,
        rank: int,
        name: str,
        log: Callable[[str], None],
    ) -> None:
        self._needs = needs
        self._rank = rank
        self._options = options
        self._log = log
        self._groups = pool.layout.groups
        self._salt = prefix_salt(needs.fingerprint)
        self._lock = threading.Lock()
        self._results = Results()
        self._offers: dict[str, _Offer] = {}
        self._loads: dict[str, bytes] = {}
        self._cancelled: set[str] = set()
        self.endpoint = Endpoint.listen(
            _addresses(options, rank),
            pool=pool,
            name=name,
            requirements=needs,
            integrity=options.integrity,
            copy_threads=options.copy_threads,
            timeouts=Timeouts(heartbeat=options.lost_seconds / 5, lost=options.lost_seconds),
            tls=Identity.load(options.identity) if options.identity else None,
        )
        self._meet_peers()
        self._savers = ThreadPoolExecutor(2, thread_name_prefix="kvferry-offer")
        self._decliner = ThreadPoolExecutor(1, thread_name_prefix="kvferry-decline")
        self._loaders = ThreadPoolExecutor(options.max_pulls, thread_name_prefix="kvferry-load")

    def _meet_peers(self) -> None:
        """Compare this worker with its peers before any request. Raises IncompatibleError, all closed.

        A peer that does not answer yet makes the comparison when it starts and meets this one.
        """
        try:
            for address in _of_rank(self._options.peers, self._rank):
                try:
                    self.endpoint.meet(address)
                except (TransportError, DeadlineError) as error:
                    self._log(f"peer {address} is not there yet, so whether it fits is not known: {error}")
        except BaseException:
            self.endpoint.close()
            raise

    # Each step.

    def before_step(self, step: Step) -> None:
        """Before the step overwrites blocks of preempted requests: their offers have ended on return."""
        for request_id in step.preempted:
            if (offer := self._offers.pop(request_id, None)) is not None:
                self._withdraw(request_id, offer, "the request was preempted")
                offer.ended.wait()

    def begin_loads(self, step: Step) -> None:
        """Fetch what this step asks for; tell prefill what nobody needs any more."""
        for request_id in step.withdrawn:
            if (offer := self._offers.get(request_id)) is not None:
                self._withdraw(request_id, offer, "the request ended without a handoff")
        for load in step.loads:
            with self._lock:
                self._loads[load.request_id] = load.tickets[self._rank]
            self._loaders.submit(self._load, load)
        for load in step.unwanted:
            self._decliner.submit(self._decline, load)

    def begin_saves(self, step: Step) -> None:
        """The step has computed the last of these prompts: offer them."""
        for save in step.saves:
            offer = _Offer(Future())
            self._offers[save.request_id] = offer
            self._savers.submit(self._save, save, offer)

    def collect(self, finished: set[str]) -> Results:
        """What ended; ``finished`` are requests that vLLM has ended since the last step."""
        for request_id in finished:
            if (offer := self._offers.get(request_id)) is not None:
                offer.finished = True
            with self._lock:
                if (ticket := self._loads.get(request_id)) is not None:
                    self._cancelled.add(request_id)
            if ticket is not None:
                self.endpoint.cancel(ticket, _ENDED)
        done = [key for key, offer in self._offers.items() if offer.finished and offer.ended.is_set()]
        for request_id in done:
            del self._offers[request_id]
        with self._lock:
            results, self._results = self._results, Results()
        results.saved.update(done)
        return results

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
        """Abort what is under way and release everything. Safe to call twice."""
        self.endpoint.close()
        for executor in (self._savers, self._loaders, self._decliner):
            executor.shutdown(wait=True, cancel_futures=True)

    # Prefill.

    def _save(self, save: Save, offer: _Offer) -> None:
        try:
            tokens = len(save.ids) // 4 - 1
            tables = block_tables(save.blocks, self._groups, tokens)
            state = prompt_state(save.request_id, save.ids, self._needs, tables)
            ticket = self.endpoint.offer(state, tables, lease_seconds=self._options.lease_seconds)
            outcome = self.endpoint.outcome(ticket)
        except Exception as error:  # noqa: BLE001 - whatever it was, the request must not wait for ever
            failure = error if isinstance(error, KVFerryError) else LocalError(f"kvferry failed: {error!r}")
            self._failed(failure)
            offer.ended.set()
            offer.ticket.set_exception(failure)
            return
        outcome.add_done_callback(lambda done: self._offer_ended(offer, done))
        offer.ticket.set_result(ticket)

    def _offer_ended(self, offer: _Offer, outcome: Future[TransferRecord]) -> None:
        error = outcome.exception()
        if error is not None:
            self._log(f"a handoff ended without decode: {error}")
            with self._lock:
                self._results.expired += 1
        offer.ended.set()

    def _withdraw(self, request_id: str, offer: _Offer, reason: str) -> None:
        def cancel(done: Future[bytes]) -> None:
            if done.exception() is None:
                self.endpoint.cancel(done.result(), LocalError(reason, request_id=request_id))

        offer.ticket.add_done_callback(cancel)

    # Decode.

    def _load(self, load: Load) -> None:
        failure: KVFerryError | None = None
        record = None
        try:
            record = self._fetch(load)
        except KVFerryError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - whatever it was, the request must not wait for ever
            failure = LocalError(f"kvferry failed: {error!r}", request_id=load.request_id)
        with self._lock:
            del self._loads[load.request_id]
            self._cancelled.discard(load.request_id)
            self._results.loaded.add(load.request_id)
            if failure is not None:
                self._results.failed.add(load.request_id)
            if record is not None:
                self._results.moves.append(record)
        if failure is not None:
            self._failed(failure)

    def _fetch(self, load: Load) -> TransferRecord:
        ids, ticket = unpack_ids(load.ids), load.tickets[self._rank]
        tokens = read_ticket(ticket).tokens
        with self._lock:
            if load.request_id in self._cancelled:
                raise LocalError(_ENDED, request_id=load.request_id)
        held = HeldPrefix()
        if load.held_tokens:
            held = hold_prefix(ids[: load.held_tokens], _common_block_size(self._groups), self._salt)
        move = self.endpoint.pull(
            ticket,
            # Room for the next token is asked for before anything moves; vLLM gives it later.
            block_tables(load.blocks, self._groups, tokens, spare=2),
            timeout_seconds=self._options.pull_timeout_seconds,
            have=held,
            transport=self._options.transport,
        )
        state = _settled(move)
        theirs = None if state is None else unpack_ids(state.tokens.ids)
        if theirs is None or not np.array_equal(theirs[: tokens + 1], ids[: tokens + 1]):
            error = CorruptError(
                "prompt: prefill computed other token ids than decode was asked for",
                request_id=load.request_id,
                phase="check",
                now_true="the loaded blocks are not used",
                next_step="the router gave decode another prompt, or another ticket, than prefill's",
            )
            move.abort(error)
            raise error
        move.started()
        return move.record

    def _decline(self, load: Load) -> None:
        """Prefill's blocks come free now instead of at the end of the lease: a move of no blocks.

        Decode names the whole prompt as held, so only the state crosses. Nothing is written into the
        blocks of the table; the last is vLLM's null block, since it counts as lent, and one thread
        does this, since it can be lent once.
        """
        if any(group.window for group in self._groups):
            return  # a window's tail would move all the same; prefill's lease ends instead
        ids, ticket = unpack_ids(load.ids), load.tickets[self._rank]
        tables = []
        for group in self._groups:
            whole = range(1, load.held_tokens // (group.block_size or 1) + 1)
            table = np.asarray((*whole, 0, group.num_blocks, group.num_blocks + 1), np.int32)
            tables.append(BlockTable(0, table))
        try:
            move = self.endpoint.pull(
                ticket,
                tables,
                timeout_seconds=self._options.pull_timeout_seconds,
                have=hold_prefix(ids[: load.held_tokens], 1, self._salt),
                transport=self._options.transport,
            )
            move.result()
            move.started()
        except KVFerryError as error:
            self._log(f"prefill was not told that decode needs nothing of it; its lease will end: {error}")

    def _failed(self, error: KVFerryError) -> None:
        self._log(str(error))
        with self._lock:
            self._results.errors.append(error)


def _addresses(options: Options, rank: int) -> tuple[str, ...]:
    """Where this rank listens."""
    unique = f"shm://kvferry-vllm-{os.getpid()}-{os.urandom(6).hex()}"
    return _of_rank(options.listen, rank) or (unique,)


def _of_rank(addresses: tuple[str, ...], rank: int) -> tuple[str, ...]:
    """The first rank's addresses as this rank's: tcp ports other than 0 counted up, names numbered."""

    def port(found: re.Match[str]) -> str:
        return str(int(found[1]) + rank)

    return tuple(
        re.sub(r"(?<=:)([1-9]\d*)(?=$|\?)", port, address)
        if address.startswith("tcp:")
        else address + (f"-{rank}" if rank else "")
        for address in addresses
    )


def _settled(move: Move) -> Any:
    """The arrival's state or error, but not before the transfer has let go of the blocks.

    A starved node may fail to answer in time while it still writes; only its own word counts.
    """
    while True:
        try:
            return move.result()
        except KVFerryError:
            if move.arrival.done():
                raise


def _common_block_size(groups: tuple[GroupLayout, ...]) -> int:
    """Prefix hits are whole blocks of every group."""
    return int(np.lcm.reduce([group.block_size or 1 for group in groups]))
