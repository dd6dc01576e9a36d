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

import msgspec

from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.layout import BlockTable
from kvferry.protocol.messages import WireTable, to_wire
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.ticket import read_ticket
from kvferry.state import ExecutionState, Requirements, decode_state, encode_state, pack_ids
from kvferry.transfer import calls as c
from kvferry.transfer.client import NodeClient, wait_for
from kvferry.transfer.pool import Pool
from kvferry.transfer.trace import TransferRecord

__all__ = ["Endpoint", "Move", "Push"]

Tables = BlockTable | Sequence[BlockTable]
_CALL_SECONDS = 10.0
_MAX_REQUEST_ID = 256
_MAX_SECONDS = 7 * 24 * 3600


class Move:
    """Decode's side of one transfer: a future of the execution state.

    Until ``result`` returns, nothing is visible. After it, the state and all its blocks are.
    """

    def __init__(
        self, client: NodeClient, transfer: bytes, arrival: Future[Any], limit_seconds: float
    ) -> None:
        self._client = client
        self._arrival = arrival
        self._limit_seconds = limit_seconds
        self.transfer = transfer

    def result(self) -> ExecutionState | None:
        """Wait for the commit; None when the payload came without a state (a probe).

        Raises the KVFerryError that ended the transfer; then nothing is visible and the
        blocks are the caller's again. Ends by the timeout of the pull, or the lease of the
        reservation, plus the time an abort may take.
        """
        state = wait_for(self._arrival, self._limit_seconds, "this endpoint").state
        return decode_state(state) if state else None

    @property
    def record(self) -> TransferRecord:
        """What moved and how; after ``result`` returned."""
        record: TransferRecord = self._arrival.result(0).record
        return record

    def started(self) -> None:
        """The engine runs on from the state: prefill may forget its copy."""
        self._client.call(c.StartCall, _CALL_SECONDS, transfer=self.transfer)

    def abort(self, error: KVFerryError | str) -> None:
        """Give the transfer up, before or after it arrived (an import that refused, a cancelled request)."""
        _cancel(self._client, self.transfer, error)


class Push:
    """Prefill's side of a push that is under way: parts, then one commit."""

    def __init__(self, client: NodeClient, transfer: bytes, tokens: int, limit_seconds: float) -> None:
        self._client = client
        self._limit_seconds = limit_seconds
        self._tokens = tokens
        self.transfer = transfer

    def layers(
        self, first_layer: int, stop_layer: int, *, first_token: int = 0, stop_token: int | None = None
    ) -> None:
        """These layers are final for these tokens: they may move now, while prefill computes on.

        Raises what ended the transfer, once it has ended.
        """
        self._client.call(
            c.LayersCall,
            self._limit_seconds,
            transfer=self.transfer,
            first_layer=first_layer,
            stop_layer=stop_layer,
            first_token=first_token,
            stop_token=self._tokens if stop_token is None else stop_token,
        )

    def layer(self, layer: int) -> None:
        """One layer is final for all tokens."""
        self.layers(layer, layer + 1)

    def commit(self, state: ExecutionState | None) -> None:
        """All parts were given and this is the state; decode's answer comes by ``Endpoint.outcome``."""
        encoded = (
            b"" if state is None else encode_state(_for_transfer(state, self.transfer, self._limit_seconds))
        )
        self._client.call(c.CommitCall, self._limit_seconds, transfer=self.transfer, state=encoded)

    def abort(self, error: KVFerryError | str) -> None:
        """Give the push up; decode's reservation ends too."""
        _cancel(self._client, self.transfer, error)


class Endpoint:
    """One worker's way to its peers; owns the node, its sockets and its threads until ``close``."""

    def __init__(self, client: NodeClient, pool: Pool, timeouts: c.Timeouts) -> None:
        self._client = client
        self._timeouts = timeouts
        self.pool = pool
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
    ) -> Endpoint:
        """An endpoint that can pull and push, but that nobody can reach yet.

        Args:
            pool: the blocks that move.
            name: what logs and errors of both sides call this worker.
            requirements: what this worker's engine needs to start a request; None for a worker
                without an engine (probes).
            integrity: take digests at export and compare them before commit; both sides alike.
            process: run the node in a process of its own (the default for shared pools), or
                in threads of this one.
            timeouts: ends of all waits that have no timeout of their own.
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
        )
        client = NodeClient(config, memory, process=memory.fd is not None if process is None else process)
        return cls(client, pool, timeouts)

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
        listening = self._client.call(c.ListenCall, _CALL_SECONDS, addresses=tuple(addresses))
        self.addresses, self.incarnation = listening.addresses, listening.incarnation

    # Prefill.

    def offer(
        self,
        state: ExecutionState | None,
        tables: Tables,
        *,
        lease_seconds: float = 30.0,
        tokens: int | None = None,
        request_id: str | None = None,
    ) -> bytes:
        """Hold a finished request for decode to pull; returns the ticket to give to it.

        The digests that decode compares are taken now. ``tokens`` and ``request_id`` come from
        the state where there is one. The blocks are lent until ``outcome(ticket)`` resolves,
        which is at the latest when the lease ends.
        """
        transfer = secrets.token_bytes(16) if state is None else state.transfer_id
        encoded = b"" if state is None else encode_state(_for_transfer(state, transfer, lease_seconds))
        held = self._client.call(
            c.OfferCall,
            _CALL_SECONDS,
            transfer=transfer,
            request_id=_given(request_id, state and state.request_id, "request_id"),
            state=encoded,
            tokens=_given(tokens, state and state.kv_tokens, "tokens"),
            tables=self._wire(tables),
            lease_seconds=_positive("lease_seconds", lease_seconds),
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
    ) -> Push:
        """Begin to push into decode's reservation.

        With ``state``, decode checks it before a byte moves. ``prompt_ids`` (taken from the state
        where there is one) let prefill leave out the prefix that decode holds. Raises when the
        reservation's owner cannot be reached; ``timeout_seconds`` covers all up to Committed.
        """
        transfer = read_ticket(ticket).transfer
        covered = _given(tokens, state and state.kv_tokens, "tokens")
        encoded = b"" if state is None else encode_state(_for_transfer(state, transfer, timeout_seconds))
        self._client.call(
            c.PushCall,
            timeout_seconds,
            ticket=bytes(ticket),
            tables=self._wire(tables),
            tokens=covered,
            timeout_seconds=_positive("timeout_seconds", timeout_seconds),
            state=encoded,
            prompt_ids=b"" if prompt_ids is None else pack_ids(prompt_ids),
            transport=transport,
        )
        return Push(self._client, transfer, covered, timeout_seconds)

    # Decode.

    def pull(
        self,
        ticket: bytes,
        tables: Tables,
        *,
        timeout_seconds: float = 5.0,
        have: HeldPrefix | None = None,
        transport: str = "",
    ) -> Move:
        """Fetch what a ticket offers into these blocks; ``timeout_seconds`` covers all up to Committed.

        ``have`` names the prefix whose KV these blocks hold already (``hold_prefix``): what prefill
        finds equal does not move, and a full hit moves only the state.
        """
        transfer = read_ticket(ticket).transfer
        arrival = self._client.submit(
            c.PullCall,
            ticket=bytes(ticket),
            tables=self._wire(tables),
            timeout_seconds=_positive("timeout_seconds", timeout_seconds),
            held=have or HeldPrefix(),
            transport=transport,
        )
        return Move(self._client, transfer, arrival, timeout_seconds + self._timeouts.abort)

    def reserve(
        self,
        request_id: str,
        tokens: int,
        tables: Tables,
        *,
        lease_seconds: float = 30.0,
        have: HeldPrefix | None = None,
    ) -> bytes:
        """Hold blocks for at most ``tokens`` tokens that prefill will push; returns the ticket for it.

        ``have``: as in ``pull``.
        """
        held = self._client.call(
            c.ReserveCall,
            _CALL_SECONDS,
            transfer=secrets.token_bytes(16),
            request_id=_given(request_id, None, "request_id"),
            tokens=tokens,
            tables=self._wire(tables),
            lease_seconds=_positive("lease_seconds", lease_seconds),
            held=have or HeldPrefix(),
        )
        return bytes(held.ticket)

    def arrival(self, ticket: bytes) -> Move:
        """The future of what is pushed into one of this endpoint's reservations."""
        opened = read_ticket(ticket)
        arrival = self._client.submit(c.ArrivalCall, transfer=opened.transfer)
        limit = opened.lease_ms / 1e3 + self._timeouts.abort
        return Move(self._client, opened.transfer, arrival, limit)

    # Both.

    def outcome(self, ticket: bytes) -> Future[TransferRecord]:
        """Resolves when this side's blocks are the engine's again: with the record, or the error."""
        inner = self._client.submit(c.OutcomeCall, transfer=read_ticket(ticket).transfer)
        outer: Future[TransferRecord] = Future()
        inner.add_done_callback(lambda done: _pass_on(done, outer))
        return outer

    def renew(self, ticket: bytes, lease_seconds: float) -> None:
        """Hold on for ``lease_seconds`` from now; the side that claimed asks its peer to."""
        self._client.call(
            c.RenewCall, _CALL_SECONDS, transfer=read_ticket(ticket).transfer, lease_seconds=lease_seconds
        )

    def withdraw(self, ticket: bytes, reason: KVFerryError | str = "withdrawn") -> None:
        """Take back an offer or a reservation; a move that is under way is aborted."""
        _cancel(self._client, read_ticket(ticket).transfer, reason)

    def stats(self) -> c.Stats:
        """What the node holds now."""
        stats: c.Stats = self._client.call(c.StatsCall, _CALL_SECONDS)
        return stats

    def _wire(self, tables: Tables) -> tuple[WireTable, ...]:
        several = (tables,) if isinstance(tables, BlockTable) else tuple(tables)
        if len(several) != len(self.pool.layout.groups):
            raise InputError(
                f"tables: {len(several)} block tables, but the pool has {len(self.pool.layout.groups)} groups"
            )
        return to_wire(several)

    def close(self) -> None:
        """Abort what is under way, release everything, end the node. Safe to call twice."""
        self._client.close(4 * self._timeouts.abort + 2.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _given(value: Any, from_state: Any, field: str) -> Any:
    """The argument, or what the state says; a request id has at most 256 characters."""
    chosen = from_state if value is None else value
    if chosen is None or chosen == "":
        raise InputError(f"{field}: needed where there is no state to take it from")
    if isinstance(chosen, str) and len(chosen) > _MAX_REQUEST_ID:
        raise InputError(f"{field}: {len(chosen)} characters, more than {_MAX_REQUEST_ID}")
    return chosen


def _positive(field: str, seconds: float) -> float:
    if not 0 < seconds < _MAX_SECONDS:  # not NaN either
        raise InputError(f"{field}: {seconds} is not a number of seconds from 0 to {_MAX_SECONDS}")
    return float(seconds)


def _for_transfer(state: ExecutionState, transfer: bytes, lease_seconds: float) -> ExecutionState:
    """The state as this attempt carries it: the id that both sides echo, and the lease from now on."""
    return msgspec.structs.replace(state, transfer_id=transfer, lease_ms=int(lease_seconds * 1e3))


def _cancel(client: NodeClient, transfer: bytes, error: KVFerryError | str) -> None:
    known = LocalError(error) if isinstance(error, str) else error
    client.call(c.CancelCall, _CALL_SECONDS, transfer=transfer, error=known.to_record())


def _pass_on(done: Future[Any], outer: Future[TransferRecord]) -> None:
    error = done.exception()
    if error is not None:
        outer.set_exception(error)
    else:
        outer.set_result(done.result().record)
