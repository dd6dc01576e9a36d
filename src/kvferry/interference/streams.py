"""Streams that decode side by side, for as long as they are wanted, and the prompts that come beside them."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from kvferry.interference.client import Client, Reply, UniquePrompts

__all__ = ["Decoding", "arrive", "decode_alone", "decoding"]

_MAX_IN_FLIGHT = 64


@dataclass(slots=True)
class Decoding:
    """``batch`` streams under way. ``events``: time, gap before it and context of its stream, of every
    token but first ones.

    ``began``: when a stream that began anew had its first token, and how long its prompt was: it, too,
    is a prompt that the others decode beside. ``lives``: times of first and last token of each stream.
    """

    prompt_tokens: int
    batch: int
    events: list[tuple[float, float, int]] = field(default_factory=list)
    began: list[tuple[float, int]] = field(default_factory=list)
    lives: list[list[float]] = field(default_factory=list)
    stopped: bool = False

    def between(self, start: float, end: float) -> tuple[list[float], float]:
        """The gaps that end in a stretch of time, and the sum of all contexts in it."""
        inside = [(gap, context) for at, gap, context in self.events if start < at <= end]
        contexts = [context for _, context in inside]
        return [gap for gap, _ in inside], self.batch * sum(contexts) / max(1, len(contexts))

    def share_at(self, moment: float) -> float:
        """Which share of the streams decoded then: one that begins anew waits, and has no gap."""
        return sum(first < moment <= last for first, last in self.lives) / self.batch


@contextlib.asynccontextmanager
async def decoding(
    client: Client, prompts: UniquePrompts, batch: int, prompt_tokens: int, max_tokens: int
) -> AsyncIterator[Decoding]:
    """Keep ``batch`` streams decoding; one that ends begins anew. Entered when all have their first token.

    Raises what ended one of them; on leaving all are hung up.
    """
    state = Decoding(prompt_tokens, batch)
    all_run = asyncio.Event()

    async def keep() -> None:
        while not state.stopped:
            life: list[float] = []

            def on_token(reply: Reply, life: list[float] = life) -> bool:
                now = reply.times[-1]
                if not life:
                    life += [now, now]
                    state.lives.append(life)
                    state.began.append((now, prompt_tokens))
                    if len(state.lives) == batch:
                        all_run.set()
                else:
                    state.events.append((now, now - life[1], prompt_tokens + len(reply.times)))
                    life[1] = now
                return not state.stopped

            await client.stream(prompts.make(prompt_tokens), max_tokens, on_token)

    keepers = [asyncio.ensure_future(keep()) for _ in range(batch)]
    entered = asyncio.ensure_future(all_run.wait())
    try:
        await asyncio.wait([*keepers, entered], return_when=asyncio.FIRST_COMPLETED)
        _raise_first(keepers)
        state.began.clear()
        yield state
        _raise_first(keepers)
    finally:
        state.stopped = True
        entered.cancel()
        for keeper in keepers:
            keeper.cancel()
        await asyncio.wait([*keepers, entered])


def _raise_first(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            raise error


async def decode_alone(
    client: Client, prompts: UniquePrompts, batch: int, prompt_tokens: int, tokens: int
) -> tuple[list[float], float]:
    """Gaps of ``batch`` streams while all of them decode, and the mean context of one then."""
    try:
        async with asyncio.TaskGroup() as group:
            streams = [
                group.create_task(client.stream(prompts.make(prompt_tokens), tokens)) for _ in range(batch)
            ]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others were ended by it
    replies = [stream.result() for stream in streams]
    start, end = max(reply.times[0] for reply in replies), min(reply.times[-1] for reply in replies)
    gaps = [
        gap
        for reply in replies
        for at, gap in zip(reply.times[1:], reply.gaps, strict=True)
        if start <= at - gap and at <= end
    ]
    middle = (start + end) / 2
    contexts = [prompt_tokens + sum(at <= middle for at in reply.times) for reply in replies]
    return gaps, sum(contexts) / batch


async def arrive(
    client: Client,
    prompts: UniquePrompts,
    lengths: Sequence[int],
    load: tuple[float, float],
    seed: int,
) -> list[tuple[float, float, int]]:
    """Poisson arrivals: (sent, first token, tokens) of each prompt that was answered.

    ``load``: how many a second, for how many seconds. The next one waits where 64 are unanswered.
    Waits for those that are, at the end.
    """
    rate, seconds = load
    draw = random.Random(seed)  # noqa: S311 - a workload
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    room = asyncio.Semaphore(_MAX_IN_FLIGHT)
    done: list[tuple[float, float, int]] = []

    async def one(tokens: int) -> None:
        try:
            reply = await client.stream(prompts.make(tokens), 1)
            done.append((reply.sent, reply.times[0], tokens))
        finally:
            room.release()

    async with asyncio.TaskGroup() as group:
        at = loop.time() + draw.expovariate(rate)
        while at < end:
            await asyncio.sleep(max(0.0, at - loop.time()))
            await room.acquire()
            group.create_task(one(draw.choice(lengths)))
            at += draw.expovariate(rate)
        await asyncio.sleep(max(0.0, end - loop.time()))
    return done
