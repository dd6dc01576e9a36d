"""The requests that one instance decodes together, step after step, without walking through the steps.

Every step gives each request a token. While nobody joins or leaves, step i takes ``first + i * growth``
seconds (each context grows by one a step), so the time of many steps and the steps in a time are
closed forms: the result is that of a loop over steps, at the price of one event a change.
"""

from __future__ import annotations

import heapq
import math

from kvferry.plan.compute import ComputeProfile
from kvferry.plan.sim_request import Request

__all__ = ["DecodeBatch"]

_SAME_MOMENT = 1e-9
"""Seconds: a step border so near is now."""


class DecodeBatch:
    """A batch with its own clock, which stands on a border between steps.

    ``start`` is the border, ``step`` counts steps, ``count`` requests, ``context`` their tokens.
    ``joined`` counts all that came, ``joined_too_far`` those that made it larger than its profile reaches.
    """

    __slots__ = (
        "_base",
        "_finish",
        "_fresh",
        "_order",
        "_profile",
        "_reach",
        "_slope",
        "context",
        "count",
        "joined",
        "joined_too_far",
        "start",
        "step",
    )

    def __init__(self, profile: ComputeProfile) -> None:
        self._profile = profile
        self._reach = profile.reach[1]
        self.joined = self.joined_too_far = 0
        self.count = 0
        self.context = 0
        self.start = 0.0
        self.step = 0
        self._order = 0
        self._finish: list[tuple[int, int, Request]] = []
        self._fresh: list[Request] = []
        self._base = self._slope = 0.0
        self._set_law()

    def _set_law(self) -> None:
        law = self._profile.decode_law(self.count)
        self._base = law.a_seconds + law.c_seconds_per_request * self.count
        self._slope = law.b_seconds_per_context_token

    @property
    def step_seconds(self) -> float:
        """The next step."""
        return self._base + self._slope * self.context

    def seconds(self, steps: int) -> float:
        """The next ``steps`` steps."""
        growth = self._slope * self.count
        return steps * (self.step_seconds + growth * (steps - 1) / 2)

    def steps_within(self, seconds: float) -> int:
        """The fewest steps that take ``seconds`` or more."""
        growth = self._slope * self.count
        lead = self.step_seconds - growth / 2
        steps = math.ceil(2 * seconds / (lead + math.sqrt(lead * lead + 2 * seconds * growth)) - 1e-6)
        while self.seconds(steps) < seconds - _SAME_MOMENT:
            steps += 1
        return steps

    def advance_to(self, now: float) -> None:
        """Go to the first border at ``now`` or after it; an empty batch begins anew."""
        ahead = now - self.start
        if not self.count:
            self.start = max(now, self.start)
        elif ahead > _SAME_MOMENT:
            self._go(self.steps_within(ahead))

    def join(self, request: Request) -> None:
        """Take a request in at this border; it leaves after its ``tokens_left`` steps."""
        self.count += 1
        self.joined += 1
        self.joined_too_far += self.count > self._reach
        self.context += request.context_tokens
        self._order += 1
        request.joined_step = self.step
        heapq.heappush(self._finish, (self.step + request.tokens_left, self._order, request))
        if request.first is None:
            self._fresh.append(request)
        self._set_law()

    @property
    def next_finish(self) -> float:
        """When the next request leaves; infinite for an empty batch."""
        if not self._finish:
            return math.inf
        return self.start + self.seconds(self._finish[0][0] - self.step)

    def finish_next(self) -> list[Request]:
        """Go to the border where the next one leaves; returns all that leave there."""
        self._go(self._finish[0][0] - self.step)
        return self.leave_finished()

    def leave_finished(self) -> list[Request]:
        """Those whose last token was made at this border."""
        left = []
        while self._finish and self._finish[0][0] <= self.step:
            request = heapq.heappop(self._finish)[2]
            self.context -= request.context_tokens + self.step - request.joined_step
            left.append(request)
        self.count -= len(left)
        self._set_law()
        return left

    def stretch_step(self, seconds: float) -> None:
        """Make one step that takes ``seconds``, with something else in it."""
        self._first_tokens(self.start + seconds)
        self.start += seconds
        self.context += self.count
        self.step += 1

    def drop_all(self, now: float) -> list[Request]:
        """Everything that is in it; tokens made by ``now`` are no longer left to make."""
        if self.count and now > self.start:
            whole = self.steps_within(now - self.start)
            self._go(whole if self.seconds(whole) <= now - self.start + _SAME_MOMENT else whole - 1)
        dropped = [request for _, _, request in sorted(self._finish)]
        for request in dropped:
            request.tokens_left -= self.step - request.joined_step
        self._finish.clear()
        self._fresh.clear()
        self.count = self.context = 0
        self._set_law()
        return dropped

    def _go(self, steps: int) -> None:
        if steps <= 0:
            return
        self._first_tokens(self.start + self.step_seconds)
        self.start += self.seconds(steps)
        self.context += self.count * steps
        self.step += steps

    def _first_tokens(self, when: float) -> None:
        for request in self._fresh:
            request.first = when
        self._fresh.clear()
