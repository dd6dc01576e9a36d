"""Who this node can talk to: its transports and listeners, and one connection for each peer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from kvferry.errors import (
    CapacityError,
    DeadlineError,
    KVFerryError,
    LocalError,
    PeerError,
    TransportError,
)
from kvferry.protocol.messages import Party, TransferMessage
from kvferry.protocol.ticket import Ticket
from kvferry.transfer.calls import Timeouts
from kvferry.transfer.choosing import AUTO, rank
from kvferry.transfer.peer import Peer, greet, welcome
from kvferry.transport.base import Connection, Guard, Listener, Memory, Transport
from kvferry.transport.registry import transport_for
from kvferry.transport.security import Security

__all__ = ["Directory", "origin_of"]


# Ranks of several workers on one host each have a connection to each rank here.
MAX_CONNECTIONS_PER_PEER = 256
# Who joins an attempt to connect later than this part of the handshake's time does not share its failure.
_SHARED_PART = 0.25

_log = logging.getLogger(__name__)


def origin_of(connection: Connection) -> str:
    """Whose connection it is: the names of its certificate, else the host that it comes from."""
    if connection.peer_names:
        return ", ".join(connection.peer_names)
    return connection.peer_address.partition("?")[0].rpartition(":")[0]


class Directory:
    """Owns every listener, connection and transport of a node."""

    def __init__(
        self,
        party: Party,
        timeouts: Timeouts,
        memory: Memory,
        guard: Guard,
        security: Security,
        *,
        on_message: Callable[[Peer, TransferMessage], None],
        on_lost: Callable[[Peer, KVFerryError], None],
    ) -> None:
        self._party = party
        self._timeouts = timeouts
        self._memory = memory
        self._guard = guard
        self._security = security
        self._on_message = on_message
        self._on_lost = on_lost
        self._transports: dict[str, Transport] = {}
        self._listeners: list[Listener] = []
        self._peers: set[Peer] = set()
        self._welcoming: dict[Connection, None] = {}
        self._by_address: dict[str, asyncio.Future[Peer]] = {}
        self._began: dict[asyncio.Future[Peer], float] = {}
        self._welcomes: set[asyncio.Task[None]] = set()
        #: By peer and transport, the seconds of a payload to compare by: see choosing.py.
        self.measured: Mapping[str, Mapping[str, float]] = {}
        #: What it took so far to make the pool known to transports.
        self.registration_seconds = 0.0

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where peers can connect to, best first."""
        return tuple(listener.address for listener in self._listeners)

    @property
    def num_peers(self) -> int:
        """Connections that have passed their handshake."""
        return len(self._peers)

    async def listen(self, address: str) -> None:
        """Accept peers at an address. Raises as ``Transport.listen``."""
        self._listeners.append(await self._transport(address).listen(address, self._accept))

    async def reach(self, ticket: Ticket, scheme: str) -> Peer:
        """The issuer of a ticket, by the first of its addresses that has the scheme asked for.

        One connection a pair and address, however many transfers ask. No other address is tried:
        a fallback that nobody asked for would be measured, and trusted, as something it is not.
        Raises TransportError, IncompatibleError, PeerError, DeadlineError.
        """
        if scheme == AUTO:
            return _of_this_life(await self._best(ticket), ticket)
        prefix = f"{scheme}://" if scheme else ""
        fit = [address for address in ticket.addresses if address.startswith(prefix)]
        if not fit:
            raise TransportError(
                f"the ticket's issuer cannot be reached by {scheme or 'any transport'}",
                next_step=f"it listens at {', '.join(ticket.addresses) or 'no address'}",
            )
        return _of_this_life(await self._connected(fit[0]), ticket)

    async def _best(self, ticket: Ticket) -> Peer:
        """The first address in order that works, and stays the pair's; the record says why it was taken."""
        failures = []
        for ranked in rank(ticket.addresses, self.measured.get(ticket.issuer, {})):
            try:
                peer = await self._connected(ranked.address)
            except (TransportError, DeadlineError, LocalError) as error:
                failures.append(f"{ranked.scheme}: {error.message}")
                continue
            if not peer.chosen:
                peer.chosen = "; ".join((f"{ranked.scheme}, {ranked.why}", *failures))
                peer.passed_over = tuple(failures)
                _log.info("%s: %s", peer.name, peer.chosen)
            return peer
        raise TransportError(
            f"no transport works with {ticket.issuer}: {'; '.join(failures) or 'it listens nowhere'}",
            phase="connect",
            now_true="nothing moved, nothing is held",
            next_step="see `kvferry doctor`, here and with the peer's address",
        )

    async def meet(self, address: str) -> None:
        """Connect, or find connected, whoever listens at an address. Raises as ``reach``."""
        peer = await self._connected(address)
        if peer.error is not None:
            raise peer.error.retold(phase="handshake", now_true="nothing moved, nothing is held")

    async def close(self) -> None:
        """Release everything; peers get what was queued for them, within the abort timeout."""
        for listener in self._listeners:
            await listener.close()
        for task in list(self._welcomes):
            task.cancel()
        for connecting in self._by_address.values():
            connecting.cancel()
        await asyncio.gather(*self._welcomes, *self._by_address.values(), return_exceptions=True)
        for peer in list(self._peers):
            await peer.close()

    async def _connected(self, address: str) -> Peer:
        """One connection for all who ask; who joined a failing attempt late, as a retry may, gets another.

        So a call never fails by what was the case, and may be mended, long before it.
        """
        came = asyncio.get_running_loop().time()
        future = self._attempt(address)
        shared_until = self._began.get(future, came) + _SHARED_PART * self._timeouts.handshake
        try:
            # Shielded: one caller's timeout must not end the attempt that others wait for.
            peer = await asyncio.shield(future)
        except (TransportError, DeadlineError):
            if came <= shared_until:
                raise
        else:
            if peer.error is None:
                return peer
        return await asyncio.shield(self._attempt(address))

    def _attempt(self, address: str) -> asyncio.Future[Peer]:
        """The connection that there is, or is being made; else a new attempt."""
        future = self._by_address.get(address)
        if future is None:
            future = asyncio.ensure_future(self._connect(address))
            self._by_address[address] = future
            self._began[future] = asyncio.get_running_loop().time()
            future.add_done_callback(lambda done: self._forget_failed(address, done))
        return future

    def _forget_failed(self, address: str, done: asyncio.Future[Peer]) -> None:
        del self._began[done]
        if (done.cancelled() or done.exception() is not None) and self._by_address.get(address) is done:
            del self._by_address[address]

    async def _connect(self, address: str) -> Peer:
        connection = await self._transport(address).connect(address, self._timeouts.handshake)
        return self._know(connection, await greet(connection, self._party, self._timeouts))

    def _transport(self, address: str) -> Transport:
        cls = transport_for(address)
        if cls.scheme not in self._transports:
            if (why := cls.unavailable()) is not None:
                raise TransportError(f"{cls.scheme} does not work here: {why}")
            started = time.perf_counter()
            transport = cls(self._memory, self._guard)
            self.registration_seconds += time.perf_counter() - started
            transport.security = self._security
            self._transports[cls.scheme] = transport
        return self._transports[cls.scheme]

    def _accept(self, connection: Connection) -> None:
        task = asyncio.ensure_future(self._welcome(connection))
        self._welcomes.add(task)
        task.add_done_callback(self._welcomes.discard)

    async def _welcome(self, connection: Connection) -> None:
        if (error := self._too_many(connection)) is not None:
            _log.warning("%s", error)
            connection.abort(error)
            await connection.close()
            return
        self._welcoming[connection] = None
        try:
            await self._shake_hands(connection)
        finally:
            del self._welcoming[connection]

    def _too_many(self, connection: Connection) -> KVFerryError | None:
        """Why one peer may not have one more connection."""
        origin = origin_of(connection)
        here = [*self._welcoming, *(peer.connection for peer in self._peers)]
        if sum(origin_of(other) == origin for other in here) < MAX_CONNECTIONS_PER_PEER:
            return None
        return CapacityError(
            f"{origin} has {MAX_CONNECTIONS_PER_PEER} connections here, the most that one peer may have",
            phase="handshake",
            peer=connection.peer_address,
            now_true="the new one was dropped",
            next_step="look for what connects again and again, or does not close",
        )

    async def _shake_hands(self, connection: Connection) -> None:
        try:
            party = await welcome(connection, self._party, self._timeouts)
        except KVFerryError as error:
            _log.info("%s: dropped at the handshake: %s", connection.peer_address, error)
            return  # it was told why, or is gone; nothing is held for it
        except asyncio.CancelledError:
            connection.abort(LocalError("this endpoint was closed"))
            raise
        self._know(connection, party)

    def _know(self, connection: Connection, party: Party) -> Peer:
        peer = Peer(connection, party, self._timeouts, self._on_message, self._lost)
        self._peers.add(peer)
        return peer

    def _lost(self, peer: Peer, error: KVFerryError) -> None:
        self._peers.discard(peer)
        for address, future in list(self._by_address.items()):
            if (
                future.done()
                and not future.cancelled()
                and future.exception() is None
                and future.result() is peer
            ):
                del self._by_address[address]
        self._on_lost(peer, error)


def _result(future: asyncio.Future[Peer]) -> Peer | None:
    failed = not future.done() or future.cancelled() or future.exception() is not None
    return None if failed else future.result()


def _of_this_life(peer: Peer, ticket: Ticket) -> Peer:
    """The peer, if it still is the one that issued the ticket."""
    if peer.error is not None:  # lost since then; its sessions were told, and this is not one yet
        raise peer.error.retold(phase="handshake", now_true="nothing moved, nothing is held")
    if peer.party.incarnation != ticket.incarnation:
        raise PeerError(
            "the ticket is from an earlier life of its issuer, or another endpoint listens there now",
            phase="handshake",
            now_true="nothing moved, nothing is held",
            next_step="ask the router for a new ticket",
        )
    return peer
