"""One streamed completion at a time: when each token came, and what the server counted."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from kvferry.errors import CapacityError, DeadlineError, InputError, NoPlanError, TransportError
from kvferry.interference.options import InterferenceOptions
from kvferry.sse import event_data

__all__ = ["Budget", "Client", "Reply", "UniquePrompts"]

# Ids that every vocabulary of 250 tokens or more has, and no special token of a known one.
_FIRST_ID, _NUM_IDS = 100, 150


class UniquePrompts:
    """Prompts of token ids, no two of which begin alike: no prefix cache can have seen one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - texts, not secrets
        # Where the last run stopped is not known: begin somewhere.
        self._numbers = itertools.count(
            self._random.randrange(_NUM_IDS**3) + random.SystemRandom().randrange(10**6)
        )

    def make(self, tokens: int) -> list[int]:
        """One prompt; the first three ids are its number."""
        number = next(self._numbers)
        head = [_FIRST_ID + number // _NUM_IDS**power % _NUM_IDS for power in (2, 1, 0)]
        body = [_FIRST_ID + self._random.randrange(_NUM_IDS) for _ in range(tokens - len(head))]
        return (head + body)[:tokens]


@dataclass(slots=True)
class Budget:
    """The bounds of the whole measurement; by the event loop's clock."""

    ends_at: float
    requests_left: int

    def seconds_left(self) -> float:
        return self.ends_at - asyncio.get_running_loop().time()

    def spend(self) -> None:
        """One more request. Raises DeadlineError when time or requests are used up."""
        if self.requests_left <= 0:
            raise DeadlineError(
                "the requests allowed are used up",
                next_step="give more with --max-requests, or fewer repeats",
            )
        if self.seconds_left() <= 0:
            raise DeadlineError(
                "the time allowed is used up", next_step="give more with --max-seconds, or shorter prompts"
            )
        self.requests_left -= 1


@dataclass(slots=True)
class Reply:
    """One stream. ``times``: of each event with a token; ``tokens``: that the server counted, or events."""

    prompt_tokens: int
    sent: float
    times: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    is_whole: bool = False

    @property
    def first_seconds(self) -> float:
        """To the first token."""
        return self.times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Between tokens."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]

    @property
    def tokens(self) -> int:
        counted = _count((self.usage or {}).get("completion_tokens"))
        return len(self.times) if counted is None else counted

    @property
    def counted_prompt_tokens(self) -> int | None:
        """Tokens of the prompt as the server counts them; None where it does not."""
        return _count((self.usage or {}).get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server says it had cached; 0 where it says nothing."""
        details = (self.usage or {}).get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) or 0 if isinstance(details, dict) else 0


def _count(said: object) -> int | None:
    """A count that a server tells; None where it is none: absent, negative, a text, true."""
    return said if isinstance(said, int) and not isinstance(said, bool) and said >= 0 else None


class Client:
    """Streams of one server, within a budget."""

    def __init__(
        self, options: InterferenceOptions, budget: Budget, transport: httpx.AsyncBaseTransport | None
    ) -> None:
        self._base = options.url.rstrip("/").removesuffix("/v1")
        self._budget = budget
        self._extra: dict[str, Any] = {"ignore_eos": True}
        self._http = httpx.AsyncClient(
            transport=transport,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=1024),
            trust_env=False,
        )
        self.model = options.model or ""

    async def close(self) -> None:
        await self._http.aclose()

    async def find_model(self) -> int | None:
        """Take the server's model where none was given; returns its longest context, if it says one."""
        try:
            # The whole answer has this time, and not each piece of it.
            async with asyncio.timeout(self._seconds()):
                answer = await self._http.get(f"{self._base}/v1/models", timeout=None)
        except TimeoutError:
            raise TransportError(
                f"url: {self._base}/v1/models: no answer within {self._seconds():.3g} s",
                next_step="look whether the server has finished loading, and whether this is its address",
            ) from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        except httpx.InvalidURL as error:
            raise InputError(f"url: {self._base!r}: {error}") from error
        try:
            models = msgspec.json.decode(answer.content)["data"]
            named = [model for model in models if self.model in ("", model["id"])]
            self.model = str(named[0]["id"])
            longest = named[0].get("max_model_len")
        except (msgspec.DecodeError, KeyError, TypeError, IndexError, AttributeError):
            if self.model and answer.status_code != 200:
                return None  # it has no list; the name was given
            raise InputError(
                f"model: {self._base}/v1/models (status {answer.status_code}) names no model"
                + (f" {self.model!r}" if self.model else "; give --model")
            ) from None
        return _count(longest) or None

    async def learn_extras(self, prompts: UniquePrompts) -> None:
        """Whether it takes ``ignore_eos``; without it outputs may be short. Raises NoPlanError."""
        try:
            await self.stream(prompts.make(16), 2)
        except NoPlanError:
            self._extra = {}
            await self.stream(prompts.make(16), 2)

    async def stream(
        self, ids: list[int], max_tokens: int, on_token: Callable[[Reply], bool] | None = None
    ) -> Reply:
        """One streamed completion; ``on_token`` false ends it by hanging up.

        Raises NoPlanError for a server that refuses the body or does not stream, TransportError,
        DeadlineError when the budget is used up.
        """
        self._budget.spend()
        loop = asyncio.get_running_loop()
        body = {
            "model": self.model, "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **self._extra,
        }  # fmt: skip
        reply = Reply(len(ids), loop.time())
        try:
            async with (
                asyncio.timeout(max(0.0, self._budget.seconds_left())),
                self._http.stream(
                    "POST",
                    f"{self._base}/v1/completions",
                    content=msgspec.json.encode(body),
                    headers={"content-type": "application/json"},
                    timeout=None,  # the line above ends it
                ) as answer,
            ):
                await self._check(answer, len(ids))
                async for data in event_data(answer.aiter_bytes()):
                    if not _take(reply, data, loop.time()):
                        continue
                    if on_token is not None and not on_token(reply):
                        return reply
        except TimeoutError:
            raise DeadlineError(
                "the time allowed ended within a request", next_step="give more with --max-seconds"
            ) from None
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not reply.times:
            raise NoPlanError(f"the server sent no token for a prompt of {len(ids)} tokens")
        reply.is_whole = True
        return reply

    async def _check(self, answer: httpx.Response, tokens: int) -> None:
        if answer.status_code != 200:
            text = " ".join((await answer.aread())[:400].decode("utf-8", "replace").split())
            message = (
                f"the server refused a prompt of {tokens} token ids (status {answer.status_code}): {text}"
            )
            if answer.status_code in {429, 503}:
                raise CapacityError(message, next_step="it is busy, or has no room: fewer --concurrency")
            raise NoPlanError(message, next_step="it has to take token ids at /v1/completions, streamed")
        kind = answer.headers.get("content-type", "")
        if not kind.startswith("text/event-stream"):
            raise NoPlanError(
                f"the server does not stream: it answers {kind[:60] or 'without a type'} to stream: true",
                now_true="without a time for each token there is no inter-token latency",
                next_step="turn streaming on, or measure the engine itself and not a proxy that buffers",
            )

    def _seconds(self) -> float:
        return max(0.1, min(10.0, self._budget.seconds_left()))

    def _unreachable(self, error: httpx.HTTPError) -> TransportError:
        return TransportError(f"url: {self._base}: {str(error) or type(error).__name__}")


def _take(reply: Reply, data: bytes, now: float) -> bool:
    """Whether the event is a token. Raises NoPlanError for one that is an error, or none that is known."""
    if data.strip() == b"[DONE]":
        return False
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        event = None
    if not isinstance(event, dict) or "error" in event:
        what = "an error" if isinstance(event, dict) else "an event that is no JSON object"
        said = data[:200].decode("utf-8", "replace").strip()
        raise NoPlanError(f"the server sent {what} in its stream: {said}")
    if isinstance(event.get("usage"), dict):
        reply.usage = event["usage"]
    if not event.get("choices"):
        return False
    reply.times.append(now)
    return True
