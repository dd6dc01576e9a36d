"""A worker of several ranks: one Endpoint a rank, one request, one word to the peer.

The ranks split layers (pipeline parallel) and heads (tensor parallel) as their pools' layouts
say; the peer's ranks may split them in another way. Which rank gives what to which is planned
by the side that claims, from the layouts in the bundle.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import msgspec

from kvferry.errors import InputError, KVFerryError
from kvferry.layout import BlockTable, Conversions, PoolLayout
from kvferry.protocol.messages import Portion
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.state import ExecutionState
from kvferry.transfer.bundle import MAX_RANKS, Bundle, pack_layouts, read_bundle, seal_bundle
from kvferry.transfer.endpoint import Endpoint
from kvferry.transfer.group_moves import GroupMove, GroupPush, Pair, give_up, named, settle
from kvferry.transfer.handles import Move, Push
from kvferry.transfer.portions import share_out
from kvferry.transfer.trace import TransferRecord

__all__ = ["RankGroup"]

RankTables = Sequence[BlockTable | Sequence[BlockTable]]
"""The block tables of each rank, by rank."""


class RankGroup:
    """The ranks of one worker, in order; see ``Endpoint`` for what each call does.

    The endpoints stay the caller's to close. Raises InputError where they do not belong together:
    unlike requirements, or a layer group that is needed and that no rank holds.
    """

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        if not 0 < len(endpoints) <= MAX_RANKS:
            raise InputError(f"endpoints: {len(endpoints)} ranks, not from 1 to {MAX_RANKS}")
        self._endpoints = tuple(endpoints)
        self.layouts: tuple[PoolLayout, ...] = tuple(endpoint.pool.layout for endpoint in endpoints)
        # What this side allows at most: the handshake of each pair of ranks says what both do.
        allows = any(endpoint.conversions for endpoint in endpoints)
        self._allowed = Conversions(lossy=True) if allows else None
        self._packed_layouts = pack_layouts(self.layouts)
        requirements = endpoints[0].requirements
        if any(endpoint.requirements != requirements for endpoint in endpoints):
            raise InputError("endpoints: ranks of one worker have the same requirements")
        held = {group.name for layout in self.layouts for group in layout.groups}
        for need in () if requirements is None else requirements.groups:
            if need.group not in held:
                raise InputError(f"endpoints: no rank holds the layer group {need.group!r}")

    # Prefill.

    def offer(
        self,
        state: ExecutionState | None,
        tables_by_rank: RankTables,
        *,
        claims: int,
        lease_seconds: float = 30.0,
        tokens: int | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """Hold a finished request for decode's ``claims`` ranks to pull; returns the bundle to give to it.

        The blocks of all ranks are lent until ``outcome(bundle)`` resolves: ask for it, since
        that also lets go of pairs of ranks that turn out to have nothing to move.
        """

        def hold(rank: int, claim: int, first: bytes) -> bytes:
            return self._endpoints[rank].offer(
                _for_pair(state, rank, claim),
                tables_by_rank[rank],
                lease_seconds=lease_seconds,
                tokens=tokens,
                request_id=request_id,
                like=first,
            )

        return self._hold(hold, tables_by_rank, claims, Mode.PULL)

    def push(
        self,
        bundle: bytes,
        tables_by_rank: RankTables,
        *,
        tokens: int | None = None,
        state: ExecutionState | None = None,
        prompt_ids: Sequence[int] | None = None,
        timeout_seconds: float = 5.0,
        transport: str = "",
    ) -> GroupPush:
        """Begin to push into the reservations of all ranks of decode."""
        self._check_tables(tables_by_rank)
        pushes: list[tuple[Pair, Push, tuple[Portion, ...]]] = []
        for pair, portions in self._claimed(read_bundle(bundle), Mode.PUSH):
            try:
                push = pair.endpoint.push(
                    pair.ticket,
                    tables_by_rank[pair.src_rank],
                    tokens=tokens,
                    state=state,
                    prompt_ids=prompt_ids,
                    timeout_seconds=timeout_seconds,
                    transport=transport,
                    portions=portions,
                )
            except KVFerryError as error:
                GroupPush(pushes).abort(failed := named([(pair, error)]))
                raise failed from error
            pushes.append((pair, push, portions))
        return GroupPush(pushes)

    # Decode.

    def pull(
        self,
        bundle: bytes,
        tables_by_rank: RankTables,
        *,
        timeout_seconds: float = 5.0,
        have: HeldPrefix | None = None,
        transport: str = "",
    ) -> GroupMove:
        """Fetch what a bundle offers into the blocks of all ranks.

        Raises IncompatibleError where the layouts do not fit, or where a head or layer that a
        rank here holds is at no rank of prefill.
        """
        self._check_tables(tables_by_rank)
        moves: list[tuple[Pair, Move]] = []
        together = secrets.token_bytes(8)
        for pair, portions in self._claimed(read_bundle(bundle), Mode.PULL):
            try:
                move = pair.endpoint.pull(
                    pair.ticket,
                    tables_by_rank[pair.dst_rank],
                    timeout_seconds=timeout_seconds,
                    have=have,
                    transport=transport,
                    portions=portions,
                    together=together,
                )
            except KVFerryError as error:
                GroupMove(self.layouts, moves).abort(failed := named([(pair, error)]))
                raise failed from error
            moves.append((pair, move))
        return GroupMove(self.layouts, moves)

    def reserve(
        self,
        request_id: str,
        tokens: int,
        tables_by_rank: RankTables,
        *,
        claims: int,
        lease_seconds: float = 30.0,
        have: HeldPrefix | None = None,
    ) -> bytes:
        """Hold the blocks of all ranks for what ``claims`` ranks of prefill push; returns its bundle."""

        together = secrets.token_bytes(8)

        def hold(rank: int, claim: int, first: bytes) -> bytes:
            del claim, first
            tables = tables_by_rank[rank]
            return self._endpoints[rank].reserve(
                request_id, tokens, tables, lease_seconds=lease_seconds, have=have, together=together
            )

        return self._hold(hold, tables_by_rank, claims, Mode.PUSH)

    def arrival(self, bundle: bytes) -> GroupMove:
        """The future of what is pushed into this worker's reservations."""
        pairs = self._issued(read_bundle(bundle))
        return GroupMove(self.layouts, [(pair, pair.endpoint.arrival(pair.ticket)) for pair in pairs])

    # Both.

    def outcome(self, bundle: bytes) -> Future[TransferRecord]:
        """Resolves when this side's blocks are the engine's again, at every rank: record or error."""
        return settle(self._mine(read_bundle(bundle)))

    def renew(self, bundle: bytes, lease_seconds: float) -> float:
        """Hold on for ``lease_seconds`` from now, at every rank; the seconds that all of them last now."""
        pairs = self._mine(read_bundle(bundle))
        return min(pair.endpoint.renew(pair.ticket, lease_seconds) for pair in pairs)

    def withdraw(self, bundle: bytes, reason: KVFerryError | str = "withdrawn") -> None:
        """Take back an offer or a reservation; moves that are under way are aborted."""
        give_up(self._mine(read_bundle(bundle)), reason)

    def _hold(
        self, hold: Callable[[int, int, bytes], bytes], tables_by_rank: RankTables, claims: int, mode: Mode
    ) -> bytes:
        """A ticket for each pair of ranks: ``hold(rank, claim, the rank's first ticket)``; all or none."""
        self._check_tables(tables_by_rank)
        if not 0 < claims <= MAX_RANKS:
            raise InputError(f"claims: {claims} is not from 1 to {MAX_RANKS}")
        tickets: list[list[bytes]] = [[] for _ in self._endpoints]
        for rank, row in enumerate(tickets):
            try:
                for claim in range(claims):
                    row.append(hold(rank, claim, row[0] if row else b""))
            except KVFerryError as error:
                give_up([*self._pairs_of(tickets, mode)], failed := named([(f"rank {rank}", error)]))
                raise failed from error
            except BaseException:  # Ctrl-C, or a fault of the caller's: what was held is given back
                give_up([*self._pairs_of(tickets, mode)], "the call that held it did not end")
                raise
        return seal_bundle(self._packed_layouts, tickets)

    def _pairs_of(self, tickets: Sequence[Sequence[bytes]], mode: Mode) -> Iterator[Pair]:
        """All pairs of tickets that this worker issued."""
        for rank, row in enumerate(tickets):
            for claim, ticket in enumerate(row):
                src, dst = (rank, claim) if mode is Mode.PULL else (claim, rank)
                yield Pair(src, dst, self._endpoints[rank], ticket)

    def _issued(self, bundle: Bundle) -> list[Pair]:
        if len(bundle.tickets) != len(self._endpoints):
            raise InputError(
                f"bundle: of {len(bundle.tickets)} ranks, this worker has {len(self._endpoints)}"
            )
        return list(self._pairs_of(bundle.tickets, bundle.mode))

    def _claimed(self, bundle: Bundle, mode: Mode) -> Iterator[tuple[Pair, tuple[Portion, ...]]]:
        """The pairs that move anything, out of tickets that the peer issued, and what each moves."""
        if bundle.mode is not mode:
            raise InputError(f"bundle: it is for a {bundle.mode}, not for a {mode}")
        claims = len(bundle.tickets[0])
        if claims != len(self._endpoints):
            raise InputError(f"bundle: for {claims} ranks, this worker has {len(self._endpoints)}")
        pulls = mode is Mode.PULL
        src, dst = (bundle.layouts, self.layouts) if pulls else (self.layouts, bundle.layouts)
        for (src_rank, dst_rank), portions in share_out(src, dst, self._allowed).items():
            here, there = (dst_rank, src_rank) if pulls else (src_rank, dst_rank)
            yield Pair(src_rank, dst_rank, self._endpoints[here], bundle.tickets[there][here]), portions

    def _mine(self, bundle: Bundle) -> list[Pair]:
        """This side's pairs, whoever issued the tickets."""
        if read_ticket(bundle.tickets[0][0]).incarnation == self._endpoints[0].incarnation:
            return self._issued(bundle)
        return [pair for pair, _ in self._claimed(bundle, bundle.mode)]

    def _check_tables(self, tables_by_rank: RankTables) -> None:
        if len(tables_by_rank) != len(self._endpoints):
            raise InputError(
                f"tables_by_rank: of {len(tables_by_rank)} ranks, this worker has {len(self._endpoints)}"
            )


def _for_pair(state: ExecutionState | None, src_rank: int, dst_rank: int) -> ExecutionState | None:
    """The state under a transfer id of the pair's own; the same export always gets the same ones.

    So a second handoff of one export is refused at each rank, as it is between two endpoints.
    """
    if state is None:
        return None
    name = state.transfer_id + bytes((src_rank, dst_rank))
    return msgspec.structs.replace(state, transfer_id=hashlib.sha256(name).digest()[:16])
