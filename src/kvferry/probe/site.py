"""A node as the coordinator sees it: an agent behind a connection, or a node of this process."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from kvferry.errors import DeadlineError, InputError, KVFerryError, LocalError, TransportError
from kvferry.probe import words as w
from kvferry.probe.addresses import loopback_address, plain_of
from kvferry.probe.agent import NoMemory
from kvferry.probe.facts import host_facts, host_id, software, transport_facts
from kvferry.probe.snapshot import AgentSnapshot
from kvferry.probe.worker import Worker
from kvferry.transport.base import Connection
from kvferry.transport.memory import private
from kvferry.transport.registry import transport_for
from kvferry.transport.security import Identity, Security

__all__ = ["CONNECT_SECONDS", "OPEN_SECONDS", "AgentSite", "LocalSite", "Site"]

CONNECT_SECONDS = 15.0
OPEN_SECONDS = 30.0
# Patient: nodes under probe are busy, and some are busy with other work beside.
PING_SECONDS, SILENT_SECONDS = 1.0, 15.0
_encoder = msgspec.msgpack.Encoder()


class Site(ABC):
    """One node under probe. ``error``: why it is of no more use, or None."""

    about: w.About
    address: str = ""
    error: KVFerryError | None = None
    opened: w.Opened
    #: The words to it are encrypted; so is data, unless somebody wants to know the price of that.
    is_encrypted: bool = False

    async def open(self, seconds: float, **fields: Any) -> None:
        """Open a probe there that lasts ``seconds``. Raises as the call."""
        # Touching a pool is slow where memory is short.
        limit = OPEN_SECONDS + fields["room"].nbytes / 100e6
        who = f"{socket.gethostname()[:100]} ({os.getpid()})"
        self.opened = await self.call(w.OpenCall, limit, coordinator=who, seconds=seconds, **fields)

    @abstractmethod
    async def call(self, kind: type[Any], limit_seconds: float, **fields: Any) -> Any:
        """One call, answered within the limit. Raises the answer's error, DeadlineError, TransportError."""

    @abstractmethod
    async def close(self) -> None:
        """Give the probe back and let go of the node. Raises nothing; safe to call twice."""


class AgentSite(Site):
    """An agent. A call that it does not answer in time makes it silent: nothing more is asked of it."""

    def __init__(self, address: str, connection: Connection) -> None:
        self.address = address
        self._connection = connection
        self.is_encrypted = connection.path == "tcp-sealed"
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._heard = time.monotonic()
        self._tasks = [asyncio.ensure_future(task) for task in (self._read_all(), self._watch())]

    @classmethod
    async def connect(
        cls, address: str, timeout_seconds: float = CONNECT_SECONDS, *, tls: Identity | None = None
    ) -> AgentSite:
        """Reach an agent and ask who it is; ``tls``: who this side is, where the address is encrypted.

        Raises InputError, TransportError, DeadlineError, PeerError, IncompatibleError.
        """
        kind = transport_for(address)
        if (why := kind.unavailable()) is not None:
            raise LocalError(f"{kind.scheme} does not work here: {why}")
        transport = kind(private(np.zeros(64, np.uint8)), NoMemory())
        transport.security = Security(tls, plain_of(address, None))
        connection = await transport.connect(address, timeout_seconds)
        site = cls(address, connection)
        try:
            site.about = await site.call(w.AboutCall, timeout_seconds, version=w.VERSION)
        except BaseException:
            await site.close()
            raise
        return site

    async def snapshot(self) -> AgentSnapshot:
        """What the agent does now: what a page can show of it. Raises as ``call``."""
        seen: w.Seen = await self.call(w.SnapshotCall, CONNECT_SECONDS)
        return seen.snapshot

    async def call(self, kind: type[Any], limit_seconds: float, **fields: Any) -> Any:
        if self.error is not None:
            raise self.error
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(limit_seconds):
                await self._send(kind(number, **fields))
                return await future
        except TimeoutError:
            self._give_up(
                DeadlineError(
                    f"the agent did not answer within {limit_seconds:.3g} s",
                    phase="probe",
                    peer=self._name,
                    next_step="see whether its process is frozen, or its node overloaded",
                )
            )
            assert self.error is not None
            raise self.error from None
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        if self.error is None:
            with contextlib.suppress(KVFerryError):  # none is open, or it is gone: it holds nothing of ours
                await self.call(w.CloseCall, CONNECT_SECONDS)
        self._give_up(LocalError("this side closed the connection"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._connection.close()

    async def _send(self, call: w.Call) -> None:
        try:
            await self._connection.send(_encoder.encode(call))
        except TransportError as error:
            self._give_up(error)
            raise

    async def _read_all(self) -> None:
        try:
            while True:
                answer = w.decode_answer(await self._connection.receive(), self._name)
                self._heard = time.monotonic()
                future = self._waiting.get(answer.id)
                if future is None or future.done():
                    continue  # its caller has given up
                if answer.error is not None:
                    future.set_exception(KVFerryError.from_record(answer.error))
                else:
                    future.set_result(answer.value)
        except KVFerryError as error:
            self._give_up(
                error.retold(
                    phase="probe",
                    peer=self._name,
                    next_step="see whether the agent still runs on that node, and start it again",
                )
            )

    async def _watch(self) -> None:
        """An agent answers a ping whatever else it does: one that is silent for long is frozen or cut off."""
        with contextlib.suppress(KVFerryError):  # broken: the reader tells
            while self.error is None:
                await self._send(w.PingCall(0))
                await asyncio.sleep(PING_SECONDS)
                if time.monotonic() - self._heard > SILENT_SECONDS:
                    self._give_up(
                        DeadlineError(
                            f"the agent has said nothing for {SILENT_SECONDS:g} s",
                            phase="probe",
                            peer=self._name,
                            next_step="see whether its process is frozen, or its node cut off",
                        )
                    )

    def _give_up(self, error: KVFerryError) -> None:
        if self.error is None:
            self.error = error
        self._connection.abort(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    @property
    def _name(self) -> str:
        about = getattr(self, "about", None)
        return f"{about.name} at {self.address}" if about else self.address


class LocalSite(Site):
    """A node of this process: the same calls, in threads."""

    def __init__(self, name: str, max_bytes: int, tls: Identity | None = None, *, peer: str = "") -> None:
        """``peer``: the address, as a person gave it, of the agent that this node will talk to."""
        self._max_bytes = max_bytes
        self._security = Security(tls, plain_of(peer, None))
        self._ids = itertools.count(1)
        self._worker: Worker | None = None
        self._threads = ThreadPoolExecutor(4, thread_name_prefix=f"kvferry-{name}")
        self.about = w.About(
            version=w.VERSION,
            name=name,
            incarnation=os.urandom(16),
            host=socket.gethostname()[:256],
            host_id=host_id(),
            software=software(),
            facts=host_facts(),
            transports=transport_facts(),
            max_bytes=max_bytes,
            can_encrypt=tls is not None,
        )

    async def call(self, kind: type[Any], limit_seconds: float, **fields: Any) -> Any:
        call = kind(next(self._ids), **fields)
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._handle, call)
        work.add_done_callback(_retrieve)  # whoever asked may have given up
        try:
            return await asyncio.wait_for(asyncio.shield(work), limit_seconds)
        except TimeoutError:
            raise DeadlineError(
                f"a copy on this host did not end within {limit_seconds:.3g} s", phase="probe"
            ) from None

    def _handle(self, call: w.Call) -> Any:
        if isinstance(call, w.OpenCall):
            name = self.about.name
            addresses = [loopback_address(scheme, name, tls=call.tls) for scheme in call.transports]
            self._worker = Worker(name, call, addresses, self._max_bytes, self._security)
            return self._worker.opened
        if isinstance(call, w.CloseCall):
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.close()
            return w.Done()
        if self._worker is None:
            raise InputError("probe: none is open at this node")
        return self._worker.handle(call)

    async def close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await asyncio.to_thread(worker.close)
        self._threads.shutdown(wait=True)


def _retrieve(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


async def close_all(sites: Sequence[Site]) -> None:
    """Close every one, at the same time."""
    await asyncio.gather(*(site.close() for site in sites), return_exceptions=True)
