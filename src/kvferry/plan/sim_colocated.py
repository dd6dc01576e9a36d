"""An instance that prefills and decodes: chunks of prompts share their steps with the decoding batch."""

from __future__ import annotations

from collections import deque

from kvferry.plan.decode_batch import DecodeBatch
from kvferry.plan.events import Events
from kvferry.plan.fleet import EngineRules, Instance
from kvferry.plan.interference import mixed_step_seconds
from kvferry.plan.sim_request import Request
from kvferry.plan.sim_workers import Stage

__all__ = ["ColocatedWorker"]


class ColocatedWorker:
    """Chunked prefill: every step decodes the whole batch and computes up to ``chunk_tokens`` of prompts.

    A prompt is begun when there is room for it and its output. The step that ends it makes its first
    token. While no prompt waits, steps are pure decode and run in closed form.
    """

    __slots__ = (
        *("_events", "_rules", "_stage", "_steps_alone", "_version", "alive", "batch", "busy_seconds"),
        *("free_tokens", "instance", "number", "prompts", "queue", "ready_at", "wanted_tokens"),
    )

    def __init__(
        self, instance: Instance, number: int, events: Events, rules: EngineRules, stage: Stage
    ) -> None:
        self.instance = instance
        self.number = number
        self.batch = DecodeBatch(instance.profile)
        self.queue: deque[Request] = deque()
        self.prompts: deque[Request] = deque()
        self.free_tokens = float("inf") if instance.pool_tokens is None else instance.pool_tokens
        self.wanted_tokens = 0
        self.ready_at = 0.0
        self.busy_seconds = 0.0
        self.alive = True
        self._steps_alone = True
        self._version = 0
        self._events = events
        self._rules = rules
        self._stage = stage

    def enqueue(self, now: float, request: Request, expected_seconds: float) -> None:
        """Take a request; ``expected_seconds`` of prefill are what others reckon with."""
        self.ready_at = max(now, self.ready_at) + expected_seconds
        request.prefill = request.decode = self.instance.name
        request.needs_tokens = request.context_tokens + request.tokens_left
        self.wanted_tokens += request.needs_tokens
        self.queue.append(request)
        if self._steps_alone:
            # A step that has begun is not changed: the prompt comes in at the next border.
            self.batch.advance_to(now)
            self._version += 1
            self._events.at(self.batch.start, self._at_border, self._version)

    def _admit(self, now: float) -> None:
        room = self.instance.max_batch - self.batch.count - len(self.prompts)
        while self.queue and room > 0 and self.queue[0].needs_tokens <= self.free_tokens:
            request = self.queue.popleft()
            room -= 1
            self.free_tokens -= request.needs_tokens
            request.prefill_start = now
            hit = self._stage.begin_prefill(now, request)
            request.prefill_hit_tokens = request.chunk_done = min(hit, request.context_tokens - 1)
            self.prompts.append(request)

    def _next(self) -> None:
        """Ask for the next event: the end of a step with a chunk, or the next finish."""
        self._version += 1
        self._steps_alone = not self.prompts
        if self.prompts:
            seconds, ended = self._mixed_step()
            self._events.at(self.batch.start + seconds, self._mixed_done, (self._version, seconds, ended))
        elif self.batch.count:
            self._events.at(self.batch.next_finish, self._finish, self._version)
        else:
            self.ready_at = self.batch.start

    def _mixed_step(self) -> tuple[float, list[Request]]:
        """Plan a step: its seconds, and the prompts that end in it."""
        profile, left = self.instance.profile, self._rules.chunk_tokens
        seconds = profile.prefill.step_seconds
        ended = []
        for request in self.prompts:
            part = min(left, request.context_tokens - request.chunk_done)
            seconds += profile.prefill.work_seconds(request.chunk_done + part, request.chunk_done)
            request.chunk_done += part
            left -= part
            if request.chunk_done == request.context_tokens:
                ended.append(request)
            if not left:
                break
        self.busy_seconds += seconds
        decode = self.batch.step_seconds if self.batch.count else 0.0
        return mixed_step_seconds(profile, seconds, decode, self._rules.mixed), ended

    def _mixed_done(self, now: float, ticket: tuple[int, float, list[Request]]) -> None:
        version, seconds, ended = ticket
        if version != self._version:
            return
        self.batch.stretch_step(seconds)
        self._leave(now)
        for request in ended:
            self.prompts.remove(request)
            request.prefill_end = request.room_asked = request.room_given = request.handed_over = now
            self._stage.end_prefill(now, request)
            if request.first is None:
                request.first = now
            # The step that ends a prompt makes a token, the first or, after a failure, the next one.
            request.tokens_left -= 1
            if request.tokens_left:
                self.batch.join(request)
            else:
                self._end(now, request)
        self._admit(now)
        self._next()

    def _finish(self, now: float, version: int) -> None:
        if version != self._version:
            return
        for request in self.batch.finish_next():
            self._end(now, request)
        self._admit(now)
        self._next()

    def _at_border(self, now: float, version: int) -> None:
        if version != self._version:
            return
        self._leave(now)
        self._admit(now)
        self._next()

    def _leave(self, now: float) -> None:
        for request in self.batch.leave_finished():
            self._end(now, request)

    def _end(self, now: float, request: Request) -> None:
        self.free_tokens += request.needs_tokens
        self.wanted_tokens -= request.needs_tokens
        self._stage.end_request(now, request)

    def kill(self, now: float) -> list[Request]:
        """Everything that it had."""
        self._version += 1
        self.alive = False
        self._steps_alone = True
        lost = [*self.batch.drop_all(now), *self.prompts, *self.queue]
        self.prompts.clear()
        self.queue.clear()
        self.wanted_tokens = 0
        return lost

    def revive(self, now: float) -> None:
        """Start again with an empty pool."""
        pool = self.instance.pool_tokens
        self.free_tokens = float("inf") if pool is None else pool
        self.ready_at = now
        self.alive = True
