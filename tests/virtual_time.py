"""An event loop whose clock jumps to the next timer, and a server with a planted latency law on it."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

Result = TypeVar("Result")


class _Jumping(selectors.DefaultSelector):
    """Waits for nothing: what would be a wait moves the clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready and timeout is None:
            raise RuntimeError("everything waits, and no timer is set")
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Exact times, and none of them real."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _Jumping()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work on a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass(slots=True, eq=False)
class _Request:
    tokens: int
    left: int
    out: asyncio.Queue[int | None] = field(default_factory=asyncio.Queue)
    computed: int = 0


@dataclass
class PlantedServer(httpx.AsyncBaseTransport):
    """A server of one engine: chunked prefill beside decode, each step as long as its laws say.

    ``prefill``, ``decode``: a, b, c of the two laws; ``share``: where a mixed step lies; the other
    fields plant what a measurement has to refuse or to bear.
    """

    prefill: tuple[float, float, float] = (0.004, 1e-4, 2e-9)
    decode: tuple[float, float, float] = (0.010, 1e-7, 3e-4)
    share: float = 0.4
    chunk: int = 512
    buffers: int = 0  # so many streamed answers come all at once
    streams: bool = True
    burst: int = 1
    cached_share: float = 0.0
    has_prefix_cache: bool = False
    max_len: int | None = 32768
    refuses_ignore_eos: bool = False
    stops_after: int | None = None
    dies_after: int | None = None
    usage: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._prompts: list[_Request] = []
        self._decoding: list[_Request] = []
        self._wake: asyncio.Event | None = None
        self._engine: asyncio.Task[None] | None = None
        self._seen: set[tuple[int, ...]] = set()
        self.served = 0
        self.hung_up = 0

    def prefill_seconds(self, tokens: int, start: int = 0) -> float:
        a, b, c = self.prefill
        return a + b * (tokens - start) + c * (tokens**2 - start**2)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._engine is None:
            self._wake = asyncio.Event()
            self._engine = asyncio.ensure_future(self._run())
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "planted", "max_model_len": self.max_len}]})
        body = json.loads(request.content)
        if self.refuses_ignore_eos and "ignore_eos" in body:
            return httpx.Response(400, json={"error": {"message": "ignore_eos: unknown"}})
        self.served += 1
        if self.dies_after is not None and self.served > self.dies_after:
            raise httpx.ConnectError("gone", request=request)
        if not self.streams:
            return httpx.Response(200, json={"choices": [{"text": "x"}]})
        ids = body["prompt"]
        tokens = body["max_tokens"] if self.stops_after is None else min(body["max_tokens"], self.stops_after)
        asked = _Request(len(ids), tokens)
        hit = self.has_prefix_cache and tuple(ids) in self._seen
        self._seen.add(tuple(ids))
        asked.computed = len(ids) - 1 if hit else 0
        self._prompts.append(asked)
        assert self._wake is not None
        self._wake.set()
        usage = {
            "prompt_tokens": len(ids),
            "completion_tokens": tokens,
            "prompt_tokens_details": {
                "cached_tokens": len(ids) - 1 if hit else int(self.cached_share * len(ids))
            },
        }
        usage |= self.usage or {}
        return httpx.Response(
            200, headers={"content-type": "text/event-stream"}, stream=_Events(self, asked, usage)
        )

    def gone(self, asked: _Request) -> None:
        """The client hung up."""
        self.hung_up += asked.left > 0
        for queue in (self._prompts, self._decoding):
            if asked in queue:
                queue.remove(asked)

    async def aclose(self) -> None:
        if self._engine is not None:
            self._engine.cancel()
            await asyncio.wait([self._engine])

    async def _run(self) -> None:
        assert self._wake is not None
        while True:
            if not self._prompts and not self._decoding:
                self._wake.clear()
                await self._wake.wait()
            await self._step()

    async def _step(self) -> None:
        prompt = self._prompts[0] if self._prompts else None
        batch = list(self._decoding)
        p = d = 0.0
        if prompt is not None:
            stop = min(prompt.tokens, prompt.computed + self.chunk)
            p = self.prefill_seconds(stop, prompt.computed)
        if batch:
            a, b, c = self.decode
            d = a + b * sum(one.tokens for one in batch) + c * len(batch)
        await asyncio.sleep(max(p, d) + self.share * min(p, d))
        for one in batch:
            self._emit(one)
        if prompt is not None and prompt in self._prompts:
            prompt.computed = stop
            if stop == prompt.tokens:
                self._prompts.remove(prompt)
                self._decoding.append(prompt)
                self._emit(prompt)

    def _emit(self, one: _Request) -> None:
        one.tokens += 1
        one.left -= 1
        one.out.put_nowait(1)
        if one.left <= 0:
            one.out.put_nowait(None)
            if one in self._decoding:
                self._decoding.remove(one)


class _Events(httpx.AsyncByteStream):
    def __init__(self, server: PlantedServer, asked: _Request, usage: dict[str, Any]) -> None:
        self._server = server
        self._asked = asked
        self._usage = usage

    async def __aiter__(self) -> AsyncIterator[bytes]:
        waiting = 0
        collects = self._asked.left > 1 and self._server.buffers > 0
        self._server.buffers -= collects
        event = b'data: {"choices":[{"text":"x"}]}\n\n'
        while (await self._asked.out.get()) is not None:
            waiting += 1
            if not collects and waiting >= self._server.burst:
                waiting = 0
                yield event
        for _ in range(waiting if collects else min(waiting, 1)):
            yield event
        yield b"data: " + json.dumps({"choices": [], "usage": self._usage}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        self._server.gone(self._asked)
