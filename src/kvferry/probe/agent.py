"""An agent: a node's end of probes. It does what a coordinator asks, one probe at a time, and nothing else.

It listens for coordinators with kvferry's own transports. For a probe it makes a pool of its own and
an endpoint over it; both are gone when the coordinator closes, is lost, or its time is over. A peer
reads or writes that pool only by a ticket of this probe: that is the endpoint's rule for everyone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self

import msgspec
import numpy as np

from kvferry.errors import (
    CapacityError,
    DeadlineError,
    IncompatibleError,
    InputError,
    KVFerryError,
    LocalError,
    PeerError,
)
from kvferry.probe import words as w
from kvferry.probe.addresses import check_data, check_reachable, data_addresses, plain_of
from kvferry.probe.facts import host_facts, host_id, software, transport_facts
from kvferry.probe.snapshot import AgentSnapshot, ProbeSnapshot
from kvferry.probe.worker import Worker
from kvferry.transfer import Observer, Stats, Tally
from kvferry.transport.base import Arrived, CancelToken, Connection, Direction, Listener
from kvferry.transport.memory import private
from kvferry.transport.registry import transport_for
from kvferry.transport.security import Identity, Plain, Security

__all__ = ["DEFAULT_MAX_BYTES", "Agent", "NoMemory"]

DEFAULT_MAX_BYTES = 8 << 30
MAX_SECONDS = 6 * 3600.0
# A coordinator that says nothing and has no probe open.
IDLE_SECONDS = 60.0
MAX_CONNECTIONS = 16
MAX_CALLS = 256

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


class NoMemory:
    """The guard of a control connection: there is nothing behind it that could be read or written."""

    board = None

    def enter(self, transfer_id: bytes, direction: Direction, offset: Any, nbytes: Any) -> CancelToken:
        """Refuse."""
        raise PeerError(
            f"refused: this connection is for words only, not for a {direction} of {len(offset)} pieces "
            f"of {nbytes.sum()} bytes of transfer {transfer_id.hex()}",
            phase="probe",
        )

    def landed(self, transfer_id: bytes, arrived: Arrived) -> NoReturn:
        """Never comes, as nobody enters."""
        raise AssertionError(
            f"nothing is admitted here, but {arrived.nbytes} bytes of {transfer_id.hex()} are"
        )

    def leave(self, transfer_id: bytes) -> NoReturn:
        """Never comes, as nobody enters."""
        raise AssertionError(f"nothing is admitted here, but {transfer_id.hex()} leaves")


class Agent:
    """Owns its listener, its connections and the probe that runs; all of it is gone after ``close``."""

    def __init__(
        self, name: str, zone: str, max_bytes: int, data: tuple[str, ...], security: Security
    ) -> None:
        self.name = name
        self.zone = zone
        self.incarnation = secrets.token_bytes(16)
        self.address = ""
        self._max_bytes = max_bytes
        self._data = data
        self._security = security
        self._process = True
        self.tally = Tally()
        self._observers: tuple[Observer, ...] = (self.tally,)
        self._listener: Listener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._worker: Worker | None = None
        self._opening = ""
        self._born = time.monotonic()
        self._served = self._refused = 0

    @classmethod
    async def listen(
        cls,
        address: str,
        *,
        name: str = "",
        zone: str = "",
        max_bytes: int = DEFAULT_MAX_BYTES,
        data: tuple[str, ...] = (),
        tls: Identity | None = None,
        plain: Plain | None = None,
        process: bool = True,
        observers: Sequence[Observer] = (),
    ) -> Agent:
        """Answer coordinators at ``scheme://...`` until ``close``.

        Args:
            name: what the matrix calls this node; by default the host's name.
            zone: its rack or domain; pairs are compared within their class.
            max_bytes: the largest pool that a probe may have here.
            data: where a probe's endpoint listens, by transport; by default the same host, any port.
            tls: who this agent is, to encrypt tcp with; needed off loopback.
            plain: where it may send in plain; by default on loopback, and anywhere if ``address`` says
                ``?plain=yes``.
            process: run a probe's endpoint in a process of its own, as production does, or in threads.
            observers: told of each transfer of a probe that ends here, well or not.

        Raises InputError, TransportError; nothing is held after either.
        """
        check_reachable(address)
        check_data(data)
        for field, value, most in (("name", name, 128), ("zone", zone, 64)):
            if len(value) > most:
                raise InputError(f"{field}: {len(value)} characters, more than {most}")
        security = Security(tls, plain_of(address, plain))
        agent = cls(name or socket.gethostname(), zone, max_bytes, data, security)
        agent._process = process
        agent._observers += tuple(observers)
        transport = transport_for(address)
        if (why := transport.unavailable()) is not None:
            raise LocalError(f"{transport.scheme} does not work here: {why}")
        bare = transport(private(np.zeros(64, np.uint8)), NoMemory())
        bare.security = security
        agent._listener = await bare.listen(address, agent._accept)
        agent.address = agent._listener.address
        return agent

    async def close(self) -> None:
        """End the probe that runs, and everything else. Safe to call twice."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def about(self) -> w.About:
        """What it says of itself to whoever asks."""
        worker = self._worker
        return w.About(
            version=w.VERSION,
            name=self.name,
            incarnation=self.incarnation,
            host=socket.gethostname()[:256],
            host_id=host_id(),
            zone=self.zone,
            software=software(),
            facts=host_facts(self.address),
            transports=transport_facts(),
            max_bytes=self._max_bytes,
            can_encrypt=self._security.identity is not None,
            plain=self._security.plain,
            busy=f"under probe by {worker.coordinator}" if worker else "",
        )

    def stats(self) -> Stats | None:
        """What the endpoint of the probe that runs holds; None without one. Waits; from any thread."""
        worker = self._worker
        return None if worker is None else worker.stats()

    async def snapshot(self) -> AgentSnapshot:
        """What happens here now; reads only."""
        worker, probe = self._worker, None
        if worker is not None:
            silence: tuple[str, ...] = ()
            try:
                stats = await asyncio.to_thread(worker.stats)
                transfers = await asyncio.to_thread(worker.transfers)
            except KVFerryError as error:
                stats, transfers = None, ()
                if isinstance(error, DeadlineError):  # else it is being closed
                    silence = (str(error),)
            probe = ProbeSnapshot(
                coordinator=worker.coordinator,
                seconds_left=max(0.0, worker.deadline - time.monotonic()),
                pool_nbytes=worker.nbytes,
                addresses=worker.opened.addresses,
                stats=stats,
                transfers=transfers,
                errors=(*worker.errors, *silence),
            )
        return AgentSnapshot(
            name=self.name,
            incarnation=self.incarnation.hex(),
            address=self.address,
            zone=self.zone,
            up_seconds=time.monotonic() - self._born,
            probes_served=self._served,
            calls_refused=self._refused,
            tallied=self.tally.now(),
            probe=probe,
        )

    def _accept(self, connection: Connection) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            connection.abort(CapacityError(f"{MAX_CONNECTIONS} coordinators are connected, the most allowed"))
            task = asyncio.ensure_future(connection.close())
        else:
            task = asyncio.ensure_future(_Desk(self, connection).serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What a desk asks.

    async def open_worker(self, call: w.OpenCall, threads: ThreadPoolExecutor) -> Worker:
        """A probe for one coordinator. Raises CapacityError while another runs."""
        if self._opening:
            raise CapacityError(
                f"this agent is under probe by {self._opening}",
                peer=self.name,
                now_true="nothing was opened here",
                next_step="wait for that probe to end: two at once would measure each other",
            )
        if call.seconds > MAX_SECONDS:
            raise InputError(f"seconds: a probe lasts at most {MAX_SECONDS:g} s, not {call.seconds:g}")
        self._opening = call.coordinator
        try:
            addresses = data_addresses(self.address, call.transports, self._data, tls=call.tls, via=call.via)
            make = partial(
                Worker,
                self.name,
                call,
                addresses,
                self._max_bytes,
                self._security,
                process=self._process,
                observers=self._observers,
            )
            self._worker = await asyncio.get_running_loop().run_in_executor(threads, make)
        except BaseException:
            self._opening = ""
            raise
        self._served += 1
        return self._worker

    async def close_worker(self, worker: Worker) -> None:
        """Give a probe's pool and endpoint back."""
        try:
            await asyncio.to_thread(worker.close)
        finally:
            self._worker, self._opening = None, ""

    def note_refusal(self) -> None:
        """A call was answered by an error."""
        self._refused += 1


class _Desk:
    """One coordinator: its calls, in threads; its probe, while it has one open."""

    def __init__(self, agent: Agent, connection: Connection) -> None:
        self._agent = agent
        self._connection = connection
        self._worker: Worker | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._limit = asyncio.timeout(IDLE_SECONDS)
        self._threads = ThreadPoolExecutor(160, thread_name_prefix=f"kvferry-probe-{agent.name}")

    async def serve(self) -> None:
        """Until the coordinator is gone or its time is over."""
        try:
            async with asyncio.timeout(IDLE_SECONDS) as self._limit:
                while True:
                    frame = await self._connection.receive()
                    self._set_limit()
                    call = w.decode_call(frame, self._connection.peer_address)
                    if len(self._calls) >= MAX_CALLS:
                        raise PeerError(f"more than {MAX_CALLS} calls at once", phase="probe")
                    task = asyncio.ensure_future(self._answer(call))
                    self._calls.add(task)
                    task.add_done_callback(self._calls.discard)
        except TimeoutError:
            why: KVFerryError = PeerError("the coordinator's time is over", phase="probe")
        except KVFerryError as error:
            why = error
        except asyncio.CancelledError:
            why = LocalError("the agent was closed")
        _log.info("%s: a coordinator is gone: %s", self._agent.name, why)
        await self._end(why)

    def _set_limit(self) -> None:
        """A probe has its time; whoever has none open must say something now and then."""
        left = IDLE_SECONDS if self._worker is None else self._worker.deadline - time.monotonic()
        self._limit.reschedule(asyncio.get_running_loop().time() + left)

    async def _end(self, why: KVFerryError) -> None:
        await self._give_back()
        # Closing the endpoint ended what the calls were waiting for; one of them may have opened it.
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._give_back()
        self._connection.abort(why)
        await self._connection.close()
        self._threads.shutdown(wait=False)

    async def _give_back(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._agent.close_worker(worker)

    async def _answer(self, call: w.Call) -> None:
        try:
            answer = w.Answer(call.id, value=await self._do(call))
        except KVFerryError as error:
            self._agent.note_refusal()
            answer = w.Answer(call.id, error=error.with_context(peer=self._agent.name).to_record())
        except Exception as error:  # noqa: BLE001 - a bug here must reach the coordinator as an error, not as a hang
            self._agent.note_refusal()
            failure = LocalError(f"the agent failed inside: {error!r}", peer=self._agent.name)
            answer = w.Answer(call.id, error=failure.to_record())
        with contextlib.suppress(KVFerryError):  # the coordinator is gone: the reader ends this desk
            await self._connection.send(_encoder.encode(answer))

    async def _do(self, call: w.Call) -> Any:
        if isinstance(call, w.AboutCall):
            if call.version != w.VERSION:
                raise IncompatibleError(
                    f"the agent speaks probes of version {w.VERSION}, the coordinator {call.version}",
                    next_step="run the same kvferry on all nodes",
                )
            return await asyncio.to_thread(self._agent.about)
        if isinstance(call, w.PingCall):
            return w.Done()
        if isinstance(call, w.SnapshotCall):
            return w.Seen(await self._agent.snapshot())
        if isinstance(call, w.OpenCall):
            if self._worker is not None:
                raise PeerError("this coordinator has a probe open already", phase="probe")
            self._worker = await self._agent.open_worker(call, self._threads)
            self._set_limit()
            return self._worker.opened
        if self._worker is None:
            raise PeerError("no probe is open: nothing is held, moved or told without one", phase="probe")
        if isinstance(call, w.CloseCall):
            await self._give_back()
            return w.Done()
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._worker.handle, call)
