"""Decode's part of a worker: loads of prompts that were computed elsewhere, pulled or pushed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.vllm.options import Options
from kvferry.engines.vllm.push import ask_prefill
from kvferry.engines.vllm.results import Outbox
from kvferry.engines.vllm.step import Load, block_tables
from kvferry.errors import CapacityError, CorruptError, KVFerryError, LocalError, PeerError
from kvferry.layout import BlockTable, GroupLayout
from kvferry.protocol.prefix import HeldPrefix, hold_prefix, prefix_salt
from kvferry.protocol.ticket import read_ticket
from kvferry.state import ExecutionState, Requirements, unpack_ids
from kvferry.transfer import Endpoint, Move, TransferRecord
from kvferry.transfer.retry import NextTry, advice

__all__ = ["Loads"]

_ENDED = "the request was ended at decode"
_LEAST_SECONDS = 0.05


class Loads:
    """The requests that wait for KV here. Called by vLLM's worker thread; each ends in the outbox once."""

    def __init__(
        self, endpoint: Endpoint, needs: Requirements, options: Options, rank: int, outbox: Outbox
    ) -> None:
        self._endpoint, self._options, self._rank, self._outbox = endpoint, options, rank, outbox
        self._groups = endpoint.pool.layout.groups
        self._salt = prefix_salt(needs.fingerprint)
        self._lock = threading.Lock()
        self._loads: dict[str, bytes] = {}
        self._cancelled: set[str] = set()
        self._decliner = ThreadPoolExecutor(1, thread_name_prefix="kvferry-decline")
        self._askers = ThreadPoolExecutor(options.max_pulls, thread_name_prefix="kvferry-ask")
        self._loaders = ThreadPoolExecutor(options.max_pulls, thread_name_prefix="kvferry-load")

    def begin(self, load: Load) -> None:
        """Have the KV come into the request's blocks."""
        with self._lock:
            self._loads[load.request_id] = load.tickets[self._rank] if load.tickets else b""
        self._loaders.submit(self._load, load)

    def decline(self, load: Load) -> None:
        """Nothing is needed of what prefill offers."""
        self._decliner.submit(self._decline, load)

    def cancel(self, request_id: str) -> None:
        """The request was ended; its load is reported all the same, when its blocks are free."""
        with self._lock:
            if (ticket := self._loads.get(request_id)) is not None:
                self._cancelled.add(request_id)
        if ticket:
            self._endpoint.cancel(ticket, _ENDED)

    def close(self) -> None:
        """End the threads; the endpoint was closed before."""
        for executor in (self._loaders, self._askers, self._decliner):
            executor.shutdown(wait=True, cancel_futures=True)

    def _load(self, load: Load) -> None:
        outcome: TransferRecord | KVFerryError
        move = None
        try:
            move = self._fetch(load)
            outcome = move.record
        except KVFerryError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - whatever it was, the request must not wait for ever
            outcome = LocalError(f"kvferry failed: {error!r}", request_id=load.request_id)
        with self._lock:
            del self._loads[load.request_id]
            self._cancelled.discard(load.request_id)
        self._outbox.loaded(load.request_id, outcome)
        if move is None:
            return
        try:
            move.started()  # after the report: the request need not wait for it
        except KVFerryError as error:  # all is here and checked; prefill's clock frees its copy
            self._outbox.note(f"prefill was not told that decode has started: {error}")

    def _fetch(self, load: Load) -> Move:
        """The KV is in its blocks and checked, or this raises."""
        ids = unpack_ids(load.ids)
        tokens = read_ticket(load.tickets[self._rank]).tokens if load.tickets else ids.size - 1
        held = HeldPrefix()
        if load.held_tokens:
            held = hold_prefix(ids[: load.held_tokens], _common_block_size(self._groups), self._salt)
        # Room for the next token is asked for before anything moves; vLLM gives it later.
        tables = block_tables(load.blocks, self._groups, tokens, spare=2)
        move, state = (
            self._pull(load, tables, held) if load.tickets else self._ask_for(load, ids, tables, held)
        )
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
        return move

    def _pull(
        self, load: Load, tables: tuple[BlockTable, ...], held: HeldPrefix
    ) -> tuple[Move, ExecutionState | None]:
        """Pull, and once more while prefill says that it is busy: its ticket stays good then."""
        deadline = time.monotonic() + self._options.pull_timeout_seconds
        while True:
            self._check_wanted(load)
            move = self._endpoint.pull(
                load.tickets[self._rank],
                tables,
                timeout_seconds=max(deadline - time.monotonic(), _LEAST_SECONDS),
                have=held,
                transport=self._options.transport,
            )
            try:
                return move, _settled(move)
            except CapacityError as error:
                told = advice(error, 1, deadline - time.monotonic())
                if told.next_try is not NextTry.RETRY_SAME:
                    raise
                time.sleep(told.after_seconds)

    def _check_wanted(self, load: Load) -> None:
        with self._lock:
            if load.request_id in self._cancelled:
                raise LocalError(_ENDED, request_id=load.request_id)

    def _ask_for(
        self, load: Load, ids: NDArray[np.int32], tables: tuple[BlockTable, ...], held: HeldPrefix
    ) -> tuple[Move, ExecutionState | None]:
        """Reserve the blocks, and have prefill push into them."""
        self._check_wanted(load)
        seconds = self._options.push_timeout_seconds
        ticket = self._endpoint.reserve(
            load.request_id, ids.size - 1, tables, lease_seconds=seconds, have=held
        )
        with self._lock:
            self._loads[load.request_id] = ticket
        move = self._endpoint.arrival(ticket)

        def answered(done: Future[None]) -> None:
            if (error := done.exception()) is not None:
                known = error if isinstance(error, KVFerryError) else f"kvferry failed: {error!r}"
                self._endpoint.cancel(ticket, known)

        def ask() -> None:
            ask_prefill(load.prefill_url, ids, ticket, seconds, cache_salt=load.cache_salt)
            # Its server has answered for its worker, which is pushing by now or never will.
            wait([move.arrival], self._options.lost_seconds)
            self._endpoint.cancel(ticket, _not_taken_up(load.prefill_url), unclaimed_only=True)

        self._askers.submit(ask).add_done_callback(answered)
        return move, _settled(move)

    def _decline(self, load: Load) -> None:
        """Prefill's blocks come free now instead of at the end of the lease: a move of no blocks.

        Decode names the whole prompt as held, so only the state crosses. Nothing is written into the
        blocks of the table; the last is vLLM's null block, since it counts as lent, and one thread
        does this, since it can be lent once.
        """
        if len(self._groups) > 1 or self._groups[0].window:
            return  # a window's tail would move all the same, and so would a state; prefill's lease ends
        ids, ticket = unpack_ids(load.ids), load.tickets[self._rank]
        tables = []
        for group in self._groups:
            whole = range(1, load.held_tokens // (group.block_size or 1) + 1)
            table = np.asarray((*whole, 0, group.num_blocks, group.num_blocks + 1), np.int32)
            tables.append(BlockTable(0, table))
        try:
            move = self._endpoint.pull(
                ticket,
                tables,
                timeout_seconds=self._options.pull_timeout_seconds,
                have=hold_prefix(ids[: load.held_tokens], 1, self._salt),
                transport=self._options.transport,
            )
            move.result()
            move.started()
        except KVFerryError as error:
            self._outbox.note(f"prefill is not told that decode needs nothing; its lease will end: {error}")


def _not_taken_up(url: str) -> PeerError:
    return PeerError(
        "prefill has computed the prompt and does not push it",
        peer=url,
        phase="claim",
        now_true="nothing moved; decode's blocks are free",
        next_step="the log of prefill's worker says why; most often the pair does not fit",
    )


def _settled(move: Move) -> ExecutionState | None:
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
