"""One peer: the handshake, then messages both ways and a heartbeat, until it closes or is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvferry.errors import DeadlineError, IncompatibleError, KVFerryError, PeerError, TransportError
from kvferry.protocol.compat import hello_reasons, pair_reasons
from kvferry.protocol.messages import (
    MAGIC,
    VERSION,
    Accept,
    Heartbeat,
    Hello,
    Message,
    Party,
    Refuse,
    TransferMessage,
    decode,
    encode,
)
from kvferry.transfer.calls import Timeouts
from kvferry.transport.base import Connection

__all__ = ["Peer", "greet", "welcome"]


async def greet(connection: Connection, local: Party, timeouts: Timeouts) -> Party:
    """The connecting side's handshake; returns who the peer says it is.

    Raises IncompatibleError (either side's reasons), PeerError, DeadlineError, TransportError;
    the connection is closed after any of them.
    """
    hello = encode(Hello(MAGIC, VERSION[0], VERSION[1], local))
    answer = await _first_message(connection, timeouts, say=hello)
    if isinstance(answer, Refuse):
        connection.abort(error := _unfit(answer.reasons, connection, "the peer refuses"))
        raise error
    if not isinstance(answer, Accept):
        raise _not_a_handshake(connection, answer)
    if reasons := pair_reasons(local, answer.party):
        connection.abort(error := _unfit(reasons, connection, "this side refuses"))
        raise error
    return answer.party


async def welcome(connection: Connection, local: Party, timeouts: Timeouts) -> Party:
    """The listening side's handshake; the same errors as ``greet``."""
    hello = await _first_message(connection, timeouts)
    if not isinstance(hello, Hello):
        raise _not_a_handshake(connection, hello)
    if reasons := hello_reasons(hello, local):
        await connection.send(encode(Refuse(reasons)))
        await connection.close()
        raise _unfit(reasons, connection, "this side refuses")
    await connection.send(encode(Accept(local)))
    return hello.party


async def _first_message(connection: Connection, timeouts: Timeouts, say: bytes = b"") -> Message:
    try:
        async with asyncio.timeout(timeouts.handshake):
            if say:
                await connection.send(say)
            return decode(await connection.receive())
    except TimeoutError:
        error: KVFerryError = DeadlineError(
            f"no handshake within {timeouts.handshake} s",
            phase="handshake",
            peer=connection.peer_address,
            now_true="nothing is held on either side",
            next_step="is a kvferry endpoint listening at this address, and is its process running?",
        )
    except asyncio.CancelledError:
        connection.abort(TransportError("the handshake was given up", phase="handshake"))
        raise
    except KVFerryError as failure:
        error = failure.retold(
            phase="handshake", peer=connection.peer_address, now_true="nothing is held on either side"
        )
    connection.abort(error)
    raise error


def _unfit(reasons: tuple[str, ...], connection: Connection, who: str) -> IncompatibleError:
    return IncompatibleError(
        f"{who}: {'; '.join(reasons)}",
        phase="handshake",
        peer=connection.peer_address,
        now_true="nothing moved, nothing is held",
        next_step="start both workers with the same model, and layouts that fit",
    )


def _not_a_handshake(connection: Connection, message: Message) -> PeerError:
    error = PeerError(
        f"{type(message).__name__} came instead of a handshake",
        phase="handshake",
        peer=connection.peer_address,
        now_true="nothing is held on either side",
    )
    connection.abort(error)
    return error


class Peer:
    """A connection after its handshake. Lives on the node's loop.

    ``on_message`` gets every message of a transfer; ``on_lost`` is called once, with the reason,
    when the connection is gone, whoever ended it.
    """

    def __init__(
        self,
        connection: Connection,
        party: Party,
        timeouts: Timeouts,
        on_message: Callable[[Peer, TransferMessage], None],
        on_lost: Callable[[Peer, KVFerryError], None],
    ) -> None:
        self.connection = connection
        self.party = party
        self.name = f"{party.name} at {connection.peer_address}"
        self._timeouts = timeouts
        self._on_message = on_message
        self._on_lost = on_lost
        self._outbox: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.error: KVFerryError | None = None  # why it was lost
        self.chosen = ""  # why this address, where that was left to this side
        self.passed_over: tuple[str, ...] = ()  # which better ones did not work then, and why
        self._loop = asyncio.get_running_loop()
        self.heard = self._said = self._loop.time()  # ``heard``: when it said something last
        self._tasks = [
            asyncio.ensure_future(task) for task in (self._read_all(), self._write_all(), self._watch())
        ]

    def post(self, message: Message) -> None:
        """Send in order, without waiting. A peer that takes nothing in is found by its silence."""
        self._outbox.append(encode(message))
        self._said = self._loop.time()
        self._wake.set()

    def lose(self, error: KVFerryError) -> None:
        """Break the connection now and say so, once."""
        if self.error is not None:
            return
        self.error = error
        self.connection.abort(error)
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self._on_lost(self, error)

    async def close(self) -> None:
        """Send what is queued, within the abort timeout, then end the connection."""
        if self.error is None:
            try:
                async with asyncio.timeout(self._timeouts.abort):
                    while self._outbox:
                        await self.connection.send(self._outbox.popleft())
                    await self.connection.close()
            except (TimeoutError, KVFerryError):
                # Whatever could not be flushed is the peer's to find by a broken connection.
                self.connection.abort(TransportError("closing"))
            self.lose(TransportError("this side closed the connection", peer=self.name))
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read_all(self) -> None:
        try:
            while True:
                message = decode(await self.connection.receive())
                self.heard = self._loop.time()
                if isinstance(message, Hello | Accept | Refuse):
                    raise PeerError(f"{type(message).__name__} after the handshake")
                if not isinstance(message, Heartbeat):
                    self._on_message(self, message)
        except KVFerryError as error:
            self.lose(error.with_context(peer=self.name))

    async def _write_all(self) -> None:
        try:
            while True:
                while self._outbox:
                    await self.connection.send(self._outbox.popleft())
                self._wake.clear()
                await self._wake.wait()
        except KVFerryError as error:
            self.lose(error.with_context(peer=self.name))

    async def _watch(self) -> None:
        """Beat where nothing else was said for so long; hear the peer's silence.

        Silence for ``lost`` seconds is loss; the handshake saw to it that a beat fits in twice.
        """
        limit, beat = self._timeouts.lost, self._timeouts.heartbeat
        while (quiet := self._loop.time() - self.heard) < limit:
            if self._loop.time() - self._said >= beat:
                self.post(Heartbeat())
            await asyncio.sleep(max(0.0, min(limit - quiet, self._said + beat - self._loop.time())))
        self.lose(
            DeadlineError(
                f"the peer said nothing for {limit:.3g} s (it promised a heartbeat each "
                f"{self.party.heartbeat_ms} ms): frozen, or the network between us is",
                peer=self.name,
                next_step="look at the peer's process; the request can be retried on another worker",
            )
        )
