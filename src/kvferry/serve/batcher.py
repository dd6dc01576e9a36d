"""The engine's thread: continuous batching with chunked prefill.

Each turn computes one chunk of the oldest prompt that is not in yet, and one token for every
running request. A request is admitted when its whole length fits beside those that are in, so a
step never lacks a block and nothing is preempted. With nothing to do the thread sleeps.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvferry.engines.reference import ReferenceEngine, StepOutput
from kvferry.errors import CapacityError, InputError, KVFerryError, LocalError
from kvferry.serve.job import Failed, Job, Phase, Token
from kvferry.serve.options import ServeOptions
from kvferry.serve.roles import Roles

__all__ = ["Batcher"]

_FINISH = {"length": "length", "stop_token": "stop", "stop_string": "stop"}
_BUSY_SECONDS = 1.0  # what a client that finds the queue full is told to wait


class Batcher:
    """Owns the engine: after ``start`` only its thread calls it.

    ``submit``, ``cancel``, ``stats`` and ``close`` may be called from any thread.
    """

    def __init__(self, engine: ReferenceEngine, roles: Roles | None, options: ServeOptions) -> None:
        self._engine = engine
        self._roles = roles
        self._options = options
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._running: dict[str, Job] = {}
        self._arriving: set[Job] = set()
        self._promised = 0
        self._num_waiting = 0
        self._lock = threading.RLock()
        self._closing = False
        self.failure: KVFerryError | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-engine")

    def start(self) -> None:
        """Begin to serve."""
        if self._roles is not None:
            self._roles.attach(self)
        self._thread.start()

    # Any thread.

    def submit(self, job: Job) -> None:
        """Take a job. Raises CapacityError when too many wait, InputError when it can never fit."""
        self.check(job)
        with self._lock:
            if self.failure is not None or self._closing:
                raise self.failure or LocalError("the server is ending")
            if self._num_waiting >= self._options.max_waiting:
                raise CapacityError(
                    f"{self._num_waiting} requests wait already, the most allowed",
                    retry_after_seconds=_BUSY_SECONDS,
                )
            self._num_waiting += 1
            self._commands.put(lambda: self._waiting.append(job))

    def check(self, job: Job) -> None:
        """Raises InputError for a job that can never fit."""
        total = self._engine.pool.group.num_blocks
        if job.num_blocks > total:
            raise InputError(
                f"max_tokens: the request needs {job.num_blocks} blocks of KV, the whole pool has {total}"
            )

    def cancel(self, job: Job) -> None:
        """The client is gone; what the job holds is freed."""
        self.call(lambda: self._drop(job))

    def call(self, command: Callable[[], None]) -> None:
        """Run something on the engine's thread, between two turns."""
        self._commands.put(command)

    def stats(self) -> dict[str, int]:
        """What is in the server now; racy by nature."""
        return {
            "waiting": self._num_waiting,
            "prefilling": len(self._prefilling),
            "arriving": len(self._arriving),
            "running": len(self._running),
            "free_blocks": self._engine.pool.num_free_blocks,
            "num_blocks": self._engine.pool.group.num_blocks,
        }

    def close(self) -> None:
        """End the thread; jobs that are under way fail."""
        with self._lock:
            self._closing = True
        self.call(lambda: None)
        if self._thread.ident is not None:
            self._thread.join()

    # The engine's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_commands()
                self._admit()
                self._prefill()
                self._decode()
                time.sleep(0)  # let the HTTP side's thread run, which sends what this step made
            error: KVFerryError = LocalError("the server is ending", next_step="ask another one")
        except Exception as caught:  # noqa: BLE001 - whoever waits has to learn that nothing comes any more
            error = LocalError(f"the engine failed: {caught!r}", next_step="restart the server")
        with self._lock:
            self.failure = error
            self._take_commands(wait=False)
        for job in {*self._waiting, *self._prefilling, *self._running.values(), *self._arriving}:
            job.post(Failed(error))

    def _take_commands(self, *, wait: bool = True) -> None:
        idle = not (self._prefilling or self._running) and not self._closing
        limit: float | None = None
        if wait and idle and self._waiting:
            limit = max(0.0, min(job.waits_until for job in self._waiting) - time.monotonic())
        try:
            if wait and idle:
                self._commands.get(timeout=limit)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return  # nobody wants anything new

    def _admit(self) -> None:
        """Start jobs in order of arrival while the next one fits; those that waited too long fail."""
        now = time.monotonic()
        for job in [job for job in self._waiting if job.waits_until <= now]:
            self._unqueue(job)
            error = CapacityError(
                f"no room within {self._options.queue_seconds:.3g} s", retry_after_seconds=_BUSY_SECONDS
            )
            job.post(Failed(error))
        while self._waiting and self._fits(self._waiting[0]):
            job = self._waiting[0]
            self._unqueue(job)
            try:
                self._start(job)
            except KVFerryError as error:
                self.fail(job, error)

    def _fits(self, job: Job) -> bool:
        if self.held_for(job):
            return True
        busy = len(self._prefilling) + len(self._running) + len(self._arriving)
        total = self._engine.pool.group.num_blocks
        return busy < self._options.max_running and self._promised + job.num_blocks <= total

    def held_for(self, job: Job) -> bool:
        """Whether a reservation holds this job's blocks already."""
        return self._roles is not None and self._roles.has_reservation(job)

    def _unqueue(self, job: Job) -> None:
        self._waiting.remove(job)
        with self._lock:
            self._num_waiting -= 1

    def _start(self, job: Job) -> None:
        handoff = job.ask.handoff
        if handoff is None:
            self._engine.submit(job.request_id, job.ask.prompt_ids, job.ask.sampling, job.ask.limits)
            self.promise(job.num_blocks)
            self.enqueue_prefill(job)
            return
        assert self._roles is not None  # the HTTP side has refused it where there are no handoffs
        self._roles.start(job)

    def promise(self, num_blocks: int) -> None:
        """Count blocks that a request has or will want (negative: no longer)."""
        self._promised += num_blocks

    def enqueue_prefill(self, job: Job) -> None:
        """Its prompt is computed in turn."""
        job.phase = Phase.PREFILL
        self._prefilling.append(job)

    def arriving(self, job: Job) -> None:
        """Its KV is on the way."""
        job.phase = Phase.ARRIVING
        self._arriving.add(job)

    def arrived(self, job: Job) -> None:
        """No longer on the way: it runs, or it failed."""
        self._arriving.discard(job)

    def run(self, job: Job) -> None:
        """It is in the engine, prefilled: decode it from the next turn on."""
        job.phase = Phase.RUNNING
        self._running[job.request_id] = job

    def abandon(self, job: Job, error: KVFerryError) -> None:
        """Its push failed while the prompt was still computed."""
        self._prefilling.remove(job)
        self.fail(job, error)

    def fail(self, job: Job, error: KVFerryError) -> None:
        """Tell the client; what the job held is the caller's to free."""
        self._arriving.discard(job)
        job.phase = Phase.ENDED
        job.post(Failed(error))

    def _prefill(self) -> None:
        if not self._prefilling:
            return
        job = self._prefilling[0]
        handoff = job.ask.handoff
        on_layer = None if handoff is None or self._roles is None else self._roles.on_layer(job)
        if not self._engine.prefill(job.request_id, on_layer):
            return
        self._prefilling.popleft()
        if handoff is None:
            self.run(job)
            return
        assert self._roles is not None
        try:
            self._roles.prefilled(job)
        except KVFerryError as error:
            self.fail(job, error)
            self._roles.give_up(job, error)

    def _decode(self) -> None:
        if not self._running:
            return
        for output in self._engine.step(list(self._running)):
            job = self._running[output.request_id]
            job.post(self.token(output))
            if output.finish is not None:
                del self._running[output.request_id]
                job.phase = Phase.ENDED
                self.release(job)

    def token(self, output: StepOutput) -> Token:
        """A step's output for the HTTP side."""
        made = len(self._engine.request(output.request_id).output_ids)
        return Token(output.text, output.token, output.finish and _FINISH[output.finish], made)

    def release(self, job: Job) -> None:
        """Forget the request in the engine; its blocks are free."""
        self._engine.release(job.request_id)
        self.promise(-job.num_blocks)

    def _drop(self, job: Job) -> None:
        """A cancelled job, whatever its phase."""
        phase, job.phase = job.phase, Phase.ENDED
        if phase is Phase.WAITING and job in self._waiting:
            self._unqueue(job)
        elif phase is Phase.PREFILL:
            self._prefilling.remove(job)
            self._let_go(job)
        elif phase is Phase.RUNNING:
            del self._running[job.request_id]
            self.release(job)
        elif phase is Phase.ARRIVING:
            assert self._roles is not None
            self._roles.give_up(job, LocalError("the client went away"))
        elif phase is Phase.ENDED and self._roles is not None:
            self._roles.nobody_asks(job)

    def _let_go(self, job: Job) -> None:
        if job.ask.handoff is not None and self._roles is not None:
            self._roles.give_up(job, LocalError("the client went away"))
        else:
            self.release(job)

    def when_done(self, future: Future[Any], then: Callable[[Future[Any]], None]) -> None:
        """``then(future)`` on the engine's thread, once the future is resolved."""
        future.add_done_callback(lambda done: self.call(lambda: then(done)))
