"""The workers as the proxy sees them: what is under way at each, how fast it was, whether it failed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.proxy.options import Place, ProxyOptions, shown_name
from kvferry.proxy.pays import Costs

__all__ = ["Pair", "Worker", "Workers"]

_NEW_SHARE = 0.2
"""How much the newest measurement counts in a running mean."""
_GUESSED_SECONDS_PER_TOKEN = 1e-4
"""Until a worker has answered once; alike for all, so it only weighs load against links."""
_STEP_SECONDS = 1e-3
"""What one more running request counts at decode, beside links: it breaks ties between equal ways."""


@dataclass(slots=True, eq=False)
class ModelAsked:
    """A worker's word of its model. ``asker``: the name and the key of the client that it was asked for;
    ``task``: the digest, "" where it says none, None where it refuses the asker; ``until``: how long it is
    good, once it is there."""

    asker: tuple[Any, str]
    task: asyncio.Task[str | None]
    until: float = 0.0


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. ``tokens``: of prompts under way; ``requests``: under way; ``answered``: requests that it
    answered whole, a stream to its end; ``has_check``: whether it may have the route that judges a body
    without beginning it; ``continues``: whether it has said how to go on after its token; ``model``: what it
    says of its model, good for a while."""

    place: Place
    requests: int = 0
    tokens: int = 0
    seconds_per_token: float = _GUESSED_SECONDS_PER_TOKEN
    failed_until: float = 0.0
    answered: int = 0
    failed: int = 0
    has_check: bool = True
    continues: bool = False
    model: ModelAsked | None = None
    _is_timed: bool = False

    @contextlib.contextmanager
    def busy(self, tokens: int) -> Iterator[None]:
        """One request of so many prompt tokens is under way here."""
        self.requests += 1
        self.tokens += tokens
        try:
            yield
        finally:
            self.requests -= 1
            self.tokens -= tokens

    def took(self, seconds: float, tokens: int) -> None:
        """A prompt came back; ``tokens`` were under way when it was sent, itself included."""
        found = seconds / max(1, tokens)
        share = _NEW_SHARE if self._is_timed else 1.0
        self._is_timed = True
        self.seconds_per_token += share * (found - self.seconds_per_token)


@dataclass(frozen=True, slots=True)
class Pair:
    """Who computes the prompt, and who goes on."""

    prefill: Worker
    decode: Worker


class Workers:
    """All of them, and which to take next."""

    def __init__(self, options: ProxyOptions, costs: Costs) -> None:
        self.prefill: list[Worker] = []
        self.decode: list[Worker] = []
        self._cooldown_seconds = options.cooldown_seconds
        self.replace(options, costs)

    def replace(self, options: ProxyOptions, costs: Costs) -> None:
        """Take these workers from now on; of those that stay all is still known.

        What is under way at one that leaves goes on there.
        """
        self._costs = costs
        for field in ("prefill", "decode"):
            known = {worker.place: worker for worker in getattr(self, field)}
            places = getattr(options, field)
            setattr(self, field, [known.get(place) or Worker(place) for place in places])

    def shown(self, worker: Worker) -> str:
        """Its name, with its URL where another one of its role has that name too."""
        side = self.prefill if worker in self.prefill else self.decode
        return shown_name(worker.place, [other.place for other in side])

    def failed(self, worker: Worker) -> None:
        """Leave it out for a while."""
        worker.failed += 1
        for other in (*self.prefill, *self.decode, worker):
            if other.place.url == worker.place.url:
                other.model = None  # who comes up again there may run another
        worker.failed_until = time.monotonic() + self._cooldown_seconds

    def pair(self, tokens: int, without: Sequence[Worker] = ()) -> Pair | None:
        """The pair whose decode can go on soonest: prefill's queue, the move, and load at decode.

        None when every prefill worker is excluded.
        """
        prefill = _usable([worker for worker in self.prefill if worker not in without])
        if not prefill:
            return None
        decode = _usable([worker for worker in self.decode if worker not in without] or self.decode)

        def seconds(pair: tuple[Worker, Worker]) -> float:
            giver, taker = pair
            queue = (giver.tokens + tokens) * giver.seconds_per_token
            move = self._costs.move_seconds(giver.place, taker.place, tokens)
            return queue + move + taker.requests * _STEP_SECONDS

        return Pair(*min(((giver, taker) for giver in prefill for taker in decode), key=seconds))

    def alone(self, without: Sequence[Worker] = ()) -> Worker:
        """The decode worker with the least load, for a request that it computes alone."""
        return min(
            _usable([worker for worker in self.decode if worker not in without] or self.decode),
            key=lambda worker: (worker.requests, worker.tokens),
        )

    def least_prefill(self) -> Worker:
        """The prefill worker with the least load, for a request that ends there."""
        return min(_usable(self.prefill), key=lambda worker: (worker.tokens, worker.requests))


def _usable(workers: list[Worker]) -> list[Worker]:
    """Those that have not failed lately; all, when all have."""
    now = time.monotonic()
    return [worker for worker in workers if worker.failed_until <= now] or workers
