"""A prefill instance and a decode instance in the simulator: queues, memory, and their clocks."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kvferry.plan.decode_batch import DecodeBatch
from kvferry.plan.events import Events
from kvferry.plan.fleet import EngineRules, Instance
from kvferry.plan.sim_request import Request

__all__ = ["DecodeWorker", "PrefillWorker", "Stage"]


class Stage(Protocol):
    """What the workers tell the simulation."""

    def begin_prefill(self, now: float, request: Request) -> int:
        """Prefill of a request begins; returns the prompt tokens that its cache holds."""

    def end_prefill(self, now: float, request: Request) -> None:
        """Its prompt has been computed."""

    def room_given(self, now: float, request: Request) -> None:
        """Decode has room: the handoff may begin."""

    def end_request(self, now: float, request: Request) -> None:
        """Its last token has been made."""


class PrefillWorker:
    """First come, first served; one prompt at a time, or several up to a number of tokens.

    KV stays in its pool until the handoff is over, so a slow link stops it when the pool is full.
    With pp stages the next prompt may follow when the first stage is free.
    """

    __slots__ = (
        *("_busy", "_events", "_rules", "_stage", "_version", "alive", "busy_seconds", "free_tokens"),
        *("held", "instance", "number", "queue", "ready_at"),
    )

    def __init__(
        self, instance: Instance, number: int, events: Events, rules: EngineRules, stage: Stage
    ) -> None:
        self.instance = instance
        self.number = number
        self.queue: deque[Request] = deque()
        self.held: dict[Request, int] = {}
        self.free_tokens = float("inf") if instance.pool_tokens is None else instance.pool_tokens
        self.ready_at = 0.0
        self.busy_seconds = 0.0
        self.alive = True
        self._busy = False
        self._version = 0
        self._events = events
        self._rules = rules
        self._stage = stage

    def enqueue(self, now: float, request: Request, expected_seconds: float) -> None:
        """Take a request; ``expected_seconds`` of prefill are what others reckon with."""
        self.ready_at = max(now, self.ready_at) + expected_seconds
        request.prefill = self.instance.name
        self.queue.append(request)
        if not self._busy:
            self.start(now)

    def start(self, now: float) -> None:
        """Begin with whoever is next, if there is room for its KV."""
        queue, law = self.queue, self.instance.profile.prefill
        batch: list[Request] = []
        tokens = 0
        seconds = law.step_seconds
        while queue and (not batch or tokens + queue[0].context_tokens <= self._rules.prefill_batch_tokens):
            if queue[0].context_tokens > self.free_tokens:
                break
            request = queue.popleft()
            request.prefill_start = now
            hit = min(self._stage.begin_prefill(now, request), request.context_tokens - 1)
            request.prefill_hit_tokens = hit
            self.held[request] = request.context_tokens
            self.free_tokens -= request.context_tokens
            tokens += request.context_tokens
            seconds += law.work_seconds(request.context_tokens, hit)
            batch.append(request)
        if not batch:
            if not queue:
                self.ready_at = now
            return
        self._busy = True
        stages = self.instance.profile.pp
        self.busy_seconds += seconds / stages
        for request in batch:
            request.prefill_end = now + seconds
        if stages > 1:
            self._events.at(now + seconds / stages, self._free, self._version)
        self._events.at(now + seconds, self._done, (self._version, batch))

    def _free(self, now: float, version: int) -> None:
        if version == self._version:
            self._busy = False
            self.start(now)

    def _done(self, now: float, ticket: tuple[int, list[Request]]) -> None:
        version, batch = ticket
        if version != self._version:
            return
        for request in batch:
            if request in self.held:  # else decode failed meanwhile, and it has begun again elsewhere
                self._stage.end_prefill(now, request)
        if self.instance.profile.pp == 1:
            self._free(now, version)

    def release(self, now: float, request: Request) -> None:
        """Its KV has been handed over, or is not needed: the room is free again."""
        self.free_tokens += self.held.pop(request)
        if self.queue and not self._busy:
            self.start(now)

    def kill(self) -> list[Request]:
        """Everything that it had: queued, in prefill, or waiting for its handoff."""
        self._version += 1
        self.alive = self._busy = False
        lost = [*self.held, *self.queue]
        self.held.clear()
        self.queue.clear()
        return lost

    def revive(self, now: float) -> None:
        """Start again with an empty pool."""
        pool = self.instance.pool_tokens
        self.free_tokens = float("inf") if pool is None else pool
        self.ready_at = now
        self.alive = True


class DecodeWorker:
    """Room is reserved for the whole request before its KV is sent; then it joins the batch.

    The reservation is for prompt and output together, so that nothing is ever put out of the batch:
    engines that admit more and preempt do better on average and worse at the tail.
    """

    __slots__ = (
        *("_events", "_rules", "_stage", "_version", "alive", "arriving", "batch", "free_tokens"),
        *("instance", "number", "reserved", "wanted_tokens", "wants_batch", "wants_room"),
    )

    def __init__(
        self, instance: Instance, number: int, events: Events, rules: EngineRules, stage: Stage
    ) -> None:
        self.instance = instance
        self.number = number
        self.batch = DecodeBatch(instance.profile)
        self.free_tokens = float("inf") if instance.pool_tokens is None else instance.pool_tokens
        self.wants_room: deque[Request] = deque()
        self.wants_batch: deque[Request] = deque()
        self.reserved: dict[Request, None] = {}
        self.wanted_tokens = 0
        self.arriving = 0
        self.alive = True
        self._version = 0
        self._events = events
        self._rules = rules
        self._stage = stage

    def reserve(self, now: float, request: Request) -> None:
        """Ask for room; ``room_given`` follows, at once or later."""
        request.decode = self.instance.name
        request.needs_tokens = request.context_tokens + request.tokens_left
        request.room_asked = now
        self.wanted_tokens += request.needs_tokens
        self.wants_room.append(request)
        self._give_room(now)

    def _give_room(self, now: float) -> None:
        limit = self._rules.staging
        while self.wants_room:
            request = self.wants_room[0]
            if request.needs_tokens > self.free_tokens or (limit is not None and self.arriving >= limit):
                return
            self.wants_room.popleft()
            self.free_tokens -= request.needs_tokens
            self.arriving += 1
            self.reserved[request] = None
            request.room_given = now
            self._stage.room_given(now, request)

    def arrive(self, now: float, request: Request) -> None:
        """Its KV is here."""
        self.arriving -= 1
        if self.batch.count < self.instance.max_batch and not self.wants_batch:
            self.batch.advance_to(now)
            self.batch.join(request)
            self._wake_later()
        else:
            self.wants_batch.append(request)
        if self.wants_room:
            self._give_room(now)

    def _wake_later(self) -> None:
        self._version += 1
        self._events.at(self.batch.next_finish, self._wake, self._version)

    def _wake(self, now: float, version: int) -> None:
        if version != self._version:
            return
        for request in self.batch.finish_next():
            self.free_tokens += request.needs_tokens
            self.wanted_tokens -= request.needs_tokens
            del self.reserved[request]
            self._stage.end_request(now, request)
        while self.wants_batch and self.batch.count < self.instance.max_batch:
            self.batch.advance_to(now)
            self.batch.join(self.wants_batch.popleft())
        if self.batch.count:
            self._wake_later()
        if self.wants_room:
            self._give_room(now)

    def cancel(self, now: float, request: Request) -> None:
        """A request that was to come does not: its sender is gone."""
        self.wanted_tokens -= request.needs_tokens
        if request in self.reserved:
            del self.reserved[request]
            self.free_tokens += request.needs_tokens
            self.arriving -= 1
        else:
            self.wants_room.remove(request)
        self._give_room(now)

    def kill(self, now: float) -> list[Request]:
        """Everything that it had: decoding, arriving, or waiting for room."""
        self._version += 1
        self.alive = False
        self.batch.drop_all(now)
        lost = [*self.reserved, *self.wants_room]
        self.reserved.clear()
        self.wants_room.clear()
        self.wants_batch.clear()
        self.wanted_tokens = self.arriving = 0
        return lost

    def revive(self) -> None:
        """Start again with an empty pool."""
        pool = self.instance.pool_tokens
        self.free_tokens = float("inf") if pool is None else pool
        self.alive = True
