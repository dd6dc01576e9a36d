"""Several sessions as one: what the ranks of two workers move for a request is whole or is nothing.

Each pair of ranks runs the protocol for itself and commits for itself. Here their ends are put
together: a request is decode's when all pairs have committed, and one that fails ends the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import msgspec

from kvferry.errors import (
    CapacityError,
    CorruptError,
    DeadlineError,
    InputError,
    KVFerryError,
    LocalError,
    PeerError,
)
from kvferry.layout import PoolLayout
from kvferry.protocol.messages import Portion
from kvferry.protocol.table import Phase
from kvferry.state import ExecutionState, decode_state
from kvferry.transfer.calls import Arrival
from kvferry.transfer.endpoint import Endpoint
from kvferry.transfer.handles import CALL_SECONDS, Move, Push
from kvferry.transfer.portions import Coverage
from kvferry.transfer.trace import TransferRecord, combined

__all__ = ["GroupMove", "GroupPush", "Pair", "give_up", "named", "settle"]

# Beyond the limit of each move: how long a node may take to say that the limit has passed.
_GRACE_SECONDS = 5.0
# The reason given to tickets of pairs of ranks that turned out to have nothing to move.
_LET_GO = "the other ranks brought everything"
_RANKS = " to destination rank "


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A source and a destination rank; ``endpoint`` is this side's, ``ticket`` names their session."""

    src_rank: int
    dst_rank: int
    endpoint: Endpoint
    ticket: bytes

    def __str__(self) -> str:
        return f"source rank {self.src_rank}{_RANKS}{self.dst_rank}"


class GroupMove:
    """Decode's side of one request that comes from several ranks to several: a future of its state.

    Until ``result`` returns, nothing is visible. After it, the state and all blocks of all ranks
    are. Not for two threads at once.
    """

    def __init__(self, layouts: Sequence[PoolLayout], moves: Sequence[tuple[Pair, Move]]) -> None:
        self._layouts = layouts
        self._moves = tuple(moves)
        self._arrived: list[tuple[Pair, Move]] = []
        self._state: ExecutionState | None = None
        self._error: KVFerryError | None = None
        limit = max((move.limit_seconds for _, move in self._moves), default=0.0)
        self._deadline = time.monotonic() + limit + _GRACE_SECONDS

    def result(self) -> ExecutionState | None:
        """Wait until all pairs have committed; None when the payload came without a state (a probe).

        What they moved together is then every head of every layer that each rank holds, each
        once. Raises the error of the pair that failed, which names its ranks; then the others were
        aborted, nothing is visible, and the blocks of all ranks are the caller's again.
        """
        if self._error is not None:
            raise self._error
        if not self._arrived:
            try:
                arrived = self._all_that_is_needed()
                self._state = _one_state(arrived)
            except KVFerryError as error:
                self.abort(error)
                raise
            self._arrived = arrived
        return self._state

    @property
    def records(self) -> dict[tuple[int, int], TransferRecord]:
        """(source rank, destination rank) -> what that pair moved; after ``result`` returned."""
        return {(pair.src_rank, pair.dst_rank): move.record for pair, move in self._arrived}

    @property
    def record(self) -> TransferRecord:
        """All of it as one transfer; see ``combined`` for the times."""
        return combined(list(self.records.values()))

    def started(self) -> None:
        """The engine runs on from the state: all ranks of prefill may forget their copies."""
        if not self._arrived:
            raise LocalError("started: the request has not arrived here")
        failed = []
        for pair, move in self._arrived:
            try:
                move.started()
            except KVFerryError as error:
                failed.append((pair, error))
        if failed:
            raise named(failed)

    def abort(self, error: KVFerryError | str) -> None:
        """Give all of it up, before or after it arrived; on return the blocks are the caller's again."""
        self._error = LocalError(error) if isinstance(error, str) else error
        self._arrived = []
        still_held = give_up([pair for pair, _ in self._moves], self._error)
        self._error.now_true = "nothing is visible to decode's engine, at any rank; " + (
            f"held still: {', '.join(map(str, still_held))}" if still_held else "all blocks here are free"
        )

    def _all_that_is_needed(self) -> list[tuple[Pair, Move]]:
        """Wait for pairs until what they brought is everything; let go of the others."""
        coverage = [Coverage(layout) for layout in self._layouts]
        pending = {move.arrival: (pair, move) for pair, move in self._moves}
        arrived = []
        while not all(rank.is_complete for rank in coverage):
            done = self._next_of(pending)
            if failed := [(pending[one][0], error) for one in done if (error := _error_of(one)) is not None]:
                raise named(failed)
            for one in done:
                pair, move = pending.pop(one)
                try:
                    coverage[pair.dst_rank].add(one.result().portions)
                except InputError as error:
                    raise PeerError(f"{pair}: {error.message}", phase="verify") from error
                arrived.append((pair, move))
        for pair, _ in pending.values():
            pair.endpoint.cancel(pair.ticket, _LET_GO)
        while pending:
            for one in self._next_of(pending):
                pair, _ = pending.pop(one)
                error_of_unused = _error_of(one)
                if error_of_unused is None or error_of_unused.phase != Phase.HELD:
                    # What it moved lies where another rank's bytes were verified before.
                    raise PeerError(f"{pair}: taken up, though the other ranks bring everything")
        return arrived

    def _next_of(self, pending: dict[Future[Arrival], tuple[Pair, Move]]) -> set[Future[Arrival]]:
        if not pending:
            raise CorruptError(
                "all pairs of ranks have committed, but heads or layers are missing",
                phase="verify",
                next_step="the sides share out the ranks in unlike ways: compare their versions",
            )
        done, _ = wait(pending, max(0.0, self._deadline - time.monotonic()), FIRST_COMPLETED)
        if not done:
            names = ", ".join(str(pair) for pair, _ in pending.values())
            raise DeadlineError(f"no answer from this worker's own transfer processes for {names}")
        return done


class GroupPush:
    """Prefill's side of a push from several ranks that is under way: parts, then one commit."""

    def __init__(self, pushes: Sequence[tuple[Pair, Push, tuple[Portion, ...]]]) -> None:
        self._pushes = [
            (pair, push, sorted({layer for portion in portions for layer in portion.layers}))
            for pair, push, portions in pushes
        ]

    def layers(
        self, first_layer: int, stop_layer: int, *, first_token: int = 0, stop_token: int | None = None
    ) -> None:
        """These layers are final for these tokens, at every rank: they may move now.

        Raises what ended a pair, named by its ranks; the others are aborted then.
        """
        for pair, push, layers in self._pushes:
            if any(first_layer <= layer < stop_layer for layer in layers):
                self._do(
                    pair,
                    partial(
                        push.layers, first_layer, stop_layer, first_token=first_token, stop_token=stop_token
                    ),
                )

    def layer(self, layer: int) -> None:
        """One layer is final for all tokens."""
        self.layers(layer, layer + 1)

    def commit(self, state: ExecutionState | None) -> None:
        """All parts were given and this is the state; decode's answer comes by ``RankGroup.outcome``.

        Raises as ``layers`` does: decode may refuse one pair before the last has committed.
        """
        for pair, push, _ in self._pushes:
            self._do(pair, partial(push.commit, state))

    def abort(self, error: KVFerryError | str) -> None:
        """Give all of it up; on return the blocks are the caller's again."""
        give_up([pair for pair, _, _ in self._pushes], error)

    def _do(self, pair: Pair, call: partial[None]) -> None:
        try:
            call()
        except KVFerryError as error:
            self.abort(failed := named([(pair, error)]))
            raise failed from error


def give_up(pairs: Sequence[Pair], error: KVFerryError | str) -> list[Pair]:
    """End every session of these pairs and wait; returns those whose blocks are not free yet."""
    ended: dict[Future[TransferRecord], Pair] = {}
    for pair in pairs:
        with suppress(KVFerryError):  # an endpoint that is closed holds nothing
            pair.endpoint.cancel(pair.ticket, error)
            ended[pair.endpoint.outcome(pair.ticket)] = pair
    _, late = wait(ended, CALL_SECONDS)
    return [ended[one] for one in late]


def settle(pairs: Sequence[Pair]) -> Future[TransferRecord]:
    """Resolves when this side's blocks are the engine's again, at every rank: with the record, or the error.

    Decode says started only after all pairs have committed. So the first pair that was started
    means that a pair nobody has taken up is not needed, and it is let go; the first that failed
    means that all have.
    """
    return _Settling(pairs).outcome


class _Settling:
    """Futures of several pairs -> one. Its callbacks run in the endpoints' own threads: they never wait."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.outcome: Future[TransferRecord] = Future()
        self._lock = threading.Lock()
        self._pairs = pairs
        self._records: list[TransferRecord] = []
        self._failed: list[tuple[Pair, KVFerryError]] = []
        self._unused: list[tuple[Pair, KVFerryError]] = []
        for pair, ended in [(pair, pair.endpoint.outcome(pair.ticket)) for pair in pairs]:
            ended.add_done_callback(partial(self._ended, pair))

    def _ended(self, pair: Pair, ended: Future[TransferRecord]) -> None:
        error = _error_of(ended)
        with self._lock:
            decided = bool(self._records or self._failed)
            if error is None:
                self._records.append(ended.result())
            elif error.message == _LET_GO or (error.phase == Phase.HELD and isinstance(error, DeadlineError)):
                self._unused.append((pair, error))  # let go of, or nobody came for it
            else:
                self._failed.append((pair, error))
            decides = not decided and bool(self._records or self._failed)
            is_last = len(self._records) + len(self._failed) + len(self._unused) == len(self._pairs)
        if decides and not is_last:
            reason = _LET_GO if error is None else named([(pair, error)])
            for other in self._pairs:
                with suppress(KVFerryError):  # an endpoint that is closed holds nothing
                    other.endpoint.cancel(other.ticket, reason, unclaimed_only=error is None)
        if is_last:
            if self._records:
                self.outcome.set_result(combined(self._records))
            else:
                self.outcome.set_exception(named([*self._failed, *self._unused][:1]))


def _one_state(arrived: Sequence[tuple[Pair, Move]]) -> ExecutionState | None:
    """The state that every pair brought. Raises PeerError unless they brought the same."""
    found: ExecutionState | None = None
    for number, (pair, move) in enumerate(arrived):
        encoded = move.arrival.result(0).state
        state = decode_state(encoded) if encoded else None
        if number == 0:
            found = state
        elif _less_transfer(state) != _less_transfer(found):
            raise PeerError(f"{pair}: it brought another state than the ranks before it", phase="verify")
    return found


def _less_transfer(state: ExecutionState | None) -> ExecutionState | None:
    """Without what belongs to the pair and not to the request."""
    return None if state is None else msgspec.structs.replace(state, transfer_id=bytes(16), lease_ms=0)


def _error_of(future: Future[Arrival] | Future[TransferRecord]) -> KVFerryError | None:
    error = future.exception()
    if error is not None and not isinstance(error, KVFerryError):
        raise error
    return error


def named(failed: Sequence[tuple[Pair | str, KVFerryError]]) -> KVFerryError:
    """The first error, with the ranks and the words of every one that failed in its message."""
    words = [
        # One that was ended for another pair's sake names that one.
        error.message if _RANKS in error.message else f"{pair}: {error.message}"
        for pair, error in failed
    ]
    message = "; ".join(dict.fromkeys(words))
    first = failed[0][1]
    told = KVFerryError.from_record(msgspec.structs.replace(first.to_record(), message=message))
    if isinstance(first, CapacityError) and isinstance(failed[0][0], Pair):
        told.next_step = "ask for a new bundle, here or elsewhere: the other pairs of this one are used up"
    told.__cause__ = first
    return told
