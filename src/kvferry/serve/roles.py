"""What a worker does for a peer: give a prefilled request away, take one in. One endpoint serves both."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvferry.engines.reference import ReferenceEngine
from kvferry.errors import KVFerryError
from kvferry.serve.give import Giving
from kvferry.serve.job import Job
from kvferry.serve.options import ServeOptions
from kvferry.serve.take import Taking
from kvferry.transfer import Endpoint

if TYPE_CHECKING:
    from kvferry.serve.batcher import Batcher

__all__ = ["Roles"]


class Roles:
    """Both roles over one endpoint. All methods but ``close`` run on the engine's thread."""

    def __init__(self, engine: ReferenceEngine, endpoint: Endpoint, options: ServeOptions) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.options = options
        # Calls that wait for a peer: they must not hold up the engine.
        self.waiters = ThreadPoolExecutor(2 * options.max_running, thread_name_prefix="kvferry-serve")
        self._giving = Giving(self)
        self._taking = Taking(self)

    def attach(self, batcher: Batcher) -> None:
        """Whose requests these are."""
        self.batcher = batcher

    def start(self, job: Job) -> None:
        """Begin what the job's handoff asks for. Raises KVFerryError; then nothing is held for it."""
        assert job.ask.handoff is not None
        if job.ask.handoff.kind == "prefill":
            self._giving.start(job)
        else:
            self._taking.start(job)

    def has_reservation(self, job: Job) -> bool:
        """Whether blocks for it are held already."""
        return self._taking.has_reservation(job)

    def on_layer(self, job: Job) -> Callable[[int], None] | None:
        """What the engine is to call when a layer of the next chunk is in the pool."""
        return self._giving.on_layer(job)

    def prefilled(self, job: Job) -> None:
        """The prompt is in: hand over, and answer. Raises KVFerryError; then ``give_up`` follows."""
        self._giving.prefilled(job)

    def give_up(self, job: Job, error: KVFerryError) -> None:
        """Free what the job holds, as soon as no peer can touch it any more."""
        assert job.ask.handoff is not None
        if job.ask.handoff.kind == "prefill":
            self._giving.give_up(job, error)
        else:
            self._taking.give_up(job, error)

    def nobody_asks(self, job: Job) -> None:
        """Its answer was never read: what it offers or reserves will not be used."""
        self._giving.nobody_asks(job)
        self._taking.nobody_asks(job)

    def withdraw(self, ticket: bytes) -> None:
        """Whoever has one of our tickets says that nobody will use it; from any thread."""

        def withdraw() -> None:
            self._giving.withdraw(ticket)
            self._taking.withdraw(ticket)

        self.batcher.call(withdraw)

    def close(self) -> None:
        """After the engine's thread has ended."""
        self._giving.close()
        self.endpoint.close()
        self.waiters.shutdown(wait=True, cancel_futures=True)
