"""The one way in: offer and pull, reserve and push, over any transport.

Prefill: ``offer`` a finished request and give the ticket to decode, or take decode's ticket and
``push``. Decode: ``pull`` with prefill's ticket, or ``reserve`` and wait for the ``arrival``.
The result is the execution state, its blocks are in the pool, and both were checked before
anything became visible. Then import it and say ``started``: only then does prefill forget it.

Blocks belong to the engine. From ``offer``, ``reserve``, ``pull`` or ``push`` on they are lent to
the transfer, and they are the engine's again when ``outcome`` resolves, or when the call that
lent them raises.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.layout import BlockTable, Conversions, numpy_dtype
from kvferry.link import LinkFile
from kvferry.protocol.messages import Portion, to_wire
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.state import ExecutionState, Requirements, pack_ids
from kvferry.transfer import calls as c
from kvferry.transfer.arguments import given, name_of, positive
from kvferry.transfer.choosing import measured_seconds
from kvferry.transfer.client import NodeClient, Observer
from kvferry.transfer.handles import CALL_SECONDS, LOOK_SECONDS, Move, Push, cancel, encode_for
from kvferry.transfer.pool import Pool
from kvferry.transfer.staging import MIN_WINDOW_NBYTES, window_nbytes
from kvferry.transfer.trace import TransferRecord
from kvferry.transport.security import Identity, Plain, Security

__all__ = ["Endpoint", "Move", "Push"]

Tables = BlockTable | Sequence[BlockTable]


class Endpoint:
    """One worker's way to its peers; owns the node, its sockets and its threads until ``close``."""

    def __init__(
        self, client: NodeClient, pool: Pool, timeouts: c.Timeouts, requirements: Requirements | None
    ) -> None:
        self._client = client
        self._timeouts = timeouts
        self.pool = pool
        self.requirements = requirements
        self.conversions: Conversions | None = None
        self.addresses: tuple[str, ...] = ()
        self.incarnation = b""

    @classmethod
    def open(
        cls,
        *,
        pool: Pool,
        name: str = "endpoint",
        requirements: Requirements | None = None,
        integrity: bool = True,
        process: bool | None = None,
        timeouts: c.Timeouts | None = None,
        max_transfers: int = 1024,
        copy_threads: int = 2,
        tls: Identity | None = None,
        plain: Plain | str = Plain.LOOPBACK,
        conversions: Conversions | None = None,
        observers: Sequence[Observer] = (),
        links: LinkFile | None = None,
    ) -> Endpoint:
        """An endpoint that can pull and push, but that nobody can reach yet.

        Args:
            pool: the blocks that move.
            name: what logs and errors of both sides call this worker.
            requirements: what this worker's engine needs to start a request; None without an engine.
            integrity: take digests at export and compare them before commit; both sides alike.
            process: run the node in a process of its own (the default for shared pools), or
                in threads of this one.
            timeouts: ends of all waits that have no timeout of their own.
            tls: who this endpoint is, to encrypt tcp with; needed for addresses off loopback.
            plain: where tcp may be plain: ``never``, on ``loopback``, or ``anywhere`` that an address
                says ``?plain=yes``.
            conversions: what may be done to blocks that the peer stores otherwise; both sides say so.
                The pool needs staging for it. None: an unlike pair is refused.
            observers: told of each transfer that ends here, well or not (``kvferry.observe`` has some).
            links: what was measured with peers, by their names; ``transport="auto"`` goes by it.
        """
        timeouts = timeouts or c.Timeouts()
        memory = pool.memory
        config = c.NodeConfig(
            name,
            pool.layout,
            requirements,
            integrity,
            timeouts,
            memory.fd,
            memory.owner_pid,
            memory.owner_address,
            max_transfers=max_transfers,
            copy_threads=copy_threads,
            security=Security(tls, Plain.of(plain)),
            conversions=conversions,
            staging_nbytes=_staging(pool, conversions, copy_threads),
            is_observed=bool(observers),
            measured={} if links is None else measured_seconds(links, name),
        )
        in_process = memory.fd is not None if process is None else process
        client = NodeClient(config, memory, process=in_process, observers=observers)
        endpoint = cls(client, pool, timeouts, requirements)
        endpoint.conversions = conversions
        return endpoint

    @classmethod
    def listen(cls, address: str | Sequence[str], *, pool: Pool, **options: Any) -> Endpoint:
        """``open``, then listen at ``scheme://...`` addresses (tcp port 0: any free port), best first.

        ``addresses`` are then what peers connect to. Raises InputError, TransportError; nothing
        is held after either.
        """
        endpoint = cls.open(pool=pool, **options)
        try:
            endpoint.add_addresses((address,) if isinstance(address, str) else tuple(address))
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def add_addresses(self, addresses: Sequence[str]) -> None:
        """Listen at these too. Raises InputError, TransportError; those before the bad one stay."""
        if not addresses:
            raise InputError("address: needs one to listen at")
        listening = self._client.call(c.ListenCall, CALL_SECONDS, addresses=tuple(addresses))
        self.addresses, self.incarnation = listening.addresses, listening.incarnation

    def meet(self, address: str, timeout_seconds: float = 5.0) -> None:
        """Connect to a worker now, so that a pair that does not fit is told before any request.

        Raises IncompatibleError naming each field that differs, TransportError or DeadlineError when
        nobody answers there, InputError for a bad address. The connection is kept for transfers.
        """
        self._client.call(
            c.MeetCall,
            timeout_seconds,
            address=address,
            timeout_seconds=positive("timeout_seconds", timeout_seconds),
        )

    # Prefill.

    def offer(
        self,
        state: ExecutionState | None,
        tables: Tables,
        *,
        lease_seconds: float = 30.0,
        tokens: int | None = None,
        request_id: str | None = None,
        like: bytes = b"",
        peer: str = "",
    ) -> bytes:
        """Hold a finished request for decode to pull; returns the ticket to give to it.

        The digests that decode compares are taken now. ``tokens`` and ``request_id`` come from
        the state where there is one. The blocks are lent until ``outcome(ticket)`` resolves,
        which is at the latest when the lease ends. ``like``: the ticket of another offer of the
        same blocks, whose digests then serve for both. ``peer``: a name, ``*`` allowed, that the
        certificate of whoever claims the ticket must carry; empty for any peer that gets in.
        """
        transfer = secrets.token_bytes(16) if state is None else state.transfer_id
        lent = self._by_group(tables)
        encoded = encode_for(state, transfer, lease_seconds, lent)
        held = self._client.call(
            c.OfferCall,
            CALL_SECONDS,
            transfer=transfer,
            request_id=given(request_id, state and state.request_id, "request_id"),
            state=encoded,
            tokens=given(tokens, state and state.kv_tokens, "tokens"),
            tables=to_wire(lent.values()),
            lease_seconds=positive("lease_seconds", lease_seconds),
            like=read_ticket(like).transfer if like else b"",
            peer=name_of(peer),
        )
        return bytes(held.ticket)

    def push(
        self,
        ticket: bytes,
        tables: Tables,
        *,
        tokens: int | None = None,
        state: ExecutionState | None = None,
        prompt_ids: Sequence[int] | None = None,
        timeout_seconds: float = 5.0,
        transport: str = "",
        portions: tuple[Portion, ...] = (),
    ) -> Push:
        """Begin to push into decode's reservation.

        With ``state``, decode checks it before a byte moves. ``prompt_ids`` (taken from the state
        where there is one) let prefill leave out the prefix that decode holds. Raises when the
        reservation's owner cannot be reached; ``timeout_seconds`` covers all up to Committed.
        ``portions``: what of the pair moves, where other ranks bring the rest (``RankGroup``).
        """
        transfer = read_ticket(ticket).transfer
        covered = given(tokens, state and state.kv_tokens, "tokens")
        lent = self._by_group(tables)
        encoded = encode_for(state, transfer, timeout_seconds, lent)
        self._client.call(
            c.PushCall,
            timeout_seconds,
            ticket=bytes(ticket),
            tables=to_wire(lent.values()),
            tokens=covered,
            timeout_seconds=positive("timeout_seconds", timeout_seconds),
            state=encoded,
            prompt_ids=b"" if prompt_ids is None else pack_ids(prompt_ids),
            transport=transport,
            portions=portions,
        )
        return Push(
            self._client, transfer, covered, timeout_seconds, read_ticket(ticket).request_id, lent=lent
        )

    # Decode.

    def pull(
        self,
        ticket: bytes,
        tables: Tables,
        *,
        timeout_seconds: float = 5.0,
        have: HeldPrefix | None = None,
        transport: str = "",
        portions: tuple[Portion, ...] = (),
        together: bytes = b"",
    ) -> Move:
        """Fetch what a ticket offers into these blocks; ``timeout_seconds`` covers all up to Committed.

        ``have`` names the prefix whose KV these blocks hold already (``hold_prefix``): it does not
        move, its blocks are not written, and a full hit moves only the state. Prefill refuses a
        prefix that it cannot confirm. ``portions``: as in ``push``;
        ``together``: the same random bytes for all pulls of a group of ranks, which share blocks.
        """
        opened = read_ticket(ticket)
        arrival = self._client.submit(
            c.PullCall,
            ticket=bytes(ticket),
            tables=to_wire(self._by_group(tables).values()),
            timeout_seconds=positive("timeout_seconds", timeout_seconds),
            held=have or HeldPrefix(),
            transport=transport,
            portions=portions,
            together=together,
        )
        limit = timeout_seconds + self._timeouts.abort
        return Move(self._client, opened.transfer, arrival, limit, opened.request_id)

    def reserve(
        self,
        request_id: str,
        tokens: int,
        tables: Tables,
        *,
        lease_seconds: float = 30.0,
        have: HeldPrefix | None = None,
        together: bytes = b"",
        peer: str = "",
    ) -> bytes:
        """Hold blocks for at most ``tokens`` tokens that prefill will push; returns the ticket for it.

        ``have``: as in ``pull``. ``peer``: as in ``offer``.
        """
        held = self._client.call(
            c.ReserveCall,
            CALL_SECONDS,
            transfer=secrets.token_bytes(16),
            request_id=given(request_id, None, "request_id"),
            tokens=tokens,
            tables=to_wire(self._by_group(tables).values()),
            lease_seconds=positive("lease_seconds", lease_seconds),
            held=have or HeldPrefix(),
            together=together,
            peer=name_of(peer),
        )
        return bytes(held.ticket)

    def arrival(self, ticket: bytes) -> Move:
        """The future of what is pushed into one of this endpoint's reservations."""
        opened = read_ticket(ticket)
        arrival = self._client.submit(c.ArrivalCall, transfer=opened.transfer)
        limit = opened.lease_ms / 1e3 + self._timeouts.abort
        return Move(self._client, opened.transfer, arrival, limit, opened.request_id)

    # Both.

    def outcome(self, ticket: bytes) -> Future[TransferRecord]:
        """Resolves when this side's blocks are the engine's again: with the record, or the error."""
        opened = read_ticket(ticket)
        inner = self._client.submit(c.OutcomeCall, transfer=opened.transfer)
        outer: Future[TransferRecord] = Future()
        outer.set_running_or_notify_cancel()
        gives = (opened.mode is Mode.PULL) == (opened.incarnation == self.incarnation)
        inner.add_done_callback(lambda done: _pass_on(done, outer, opened.request_id, gives))
        return outer

    def renew(self, ticket: bytes, lease_seconds: float) -> float:
        """Hold on for ``lease_seconds`` from now; once the ticket is claimed, both sides do.

        Returns the seconds that the lease lasts now. That may be more, since a lease is never made
        shorter, or less: an hour after it began it ends, however often it is renewed.
        """
        renewed: c.Renewed = self._client.call(
            c.RenewCall,
            CALL_SECONDS,
            transfer=read_ticket(ticket).transfer,
            lease_seconds=positive("lease_seconds", lease_seconds),
        )
        return renewed.lease_seconds

    def withdraw(self, ticket: bytes, reason: KVFerryError | str = "withdrawn") -> None:
        """Take back an offer or a reservation; a move that is under way is aborted."""
        self._client.wait(self.cancel(ticket, reason), CALL_SECONDS)

    def cancel(
        self, ticket: bytes, reason: KVFerryError | str, *, unclaimed_only: bool = False
    ) -> Future[Any]:
        """``withdraw``, without waiting; with ``unclaimed_only`` only if no peer has taken it up."""
        transfer = read_ticket(ticket).transfer
        return cancel(self._client, transfer, reason, unclaimed_only=unclaimed_only)

    def stats(self) -> c.Stats:
        """What the node holds now. Raises DeadlineError where it does not answer within about 5 s."""
        stats: c.Stats = self._client.call(c.StatsCall, LOOK_SECONDS)
        return stats

    def transfers(self, limit: int = 100) -> tuple[c.InFlight, ...]:
        """What is held or under way here now, the oldest first. Raises as ``stats``."""
        found: c.Transfers = self._client.call(c.TransfersCall, LOOK_SECONDS, limit=limit)
        return found.transfers

    def _by_group(self, tables: Tables) -> dict[str, BlockTable]:
        several = (tables,) if isinstance(tables, BlockTable) else tuple(tables or ())
        if not all(isinstance(table, BlockTable) for table in several):
            raise InputError("tables: needs a BlockTable for each group of the pool")
        if len(several) != len(self.pool.layout.groups):
            raise InputError(
                f"tables: {len(several)} block tables, but the pool has {len(self.pool.layout.groups)} groups"
            )
        return {group.name: table for group, table in zip(self.pool.layout.groups, several, strict=True)}

    def close(self) -> None:
        """Abort what is under way, release everything, end the node. Safe to call twice."""
        self._client.close(4 * self._timeouts.abort + 2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _staging(pool: Pool, conversions: Conversions | None, copy_threads: int) -> int:
    """The staging that the node may use. Raises InputError, or LocalError where a package is missing."""
    if conversions is None:
        return 0
    if pool.memory.device is not None:
        raise InputError(
            f"conversions: work on host memory, and this pool lies on {pool.memory.device.name}",
            next_step="make both pools alike, or use a pool in host memory",
        )
    if window_nbytes(pool.staging_nbytes, copy_threads) < MIN_WINDOW_NBYTES:
        raise InputError(
            f"pool: {pool.staging_nbytes} bytes of staging are too few for conversions",
            next_step="make it by Pool.allocate(layout, staging_nbytes=DEFAULT_STAGING_NBYTES)",
        )
    dtypes = {tensor.dtype for group in pool.layout.groups for tensor in group.tensors}
    for name in (*dtypes, *([conversions.wire.value] if conversions.wire else ())):
        numpy_dtype(name)
    return pool.staging_nbytes


def _pass_on(done: Future[Any], outer: Future[TransferRecord], request_id: str, gives: bool) -> None:
    error = done.exception()
    if error is None:
        outer.set_result(done.result().record)
    else:
        assert isinstance(error, KVFerryError)
        if gives and isinstance(error, LocalError) and not error.phase:
            error.in_doubt = True  # the node is gone, and with it what it knew of decode
        outer.set_exception(error.with_context(request_id=request_id))
