"""The live page's HTTP side: the page, its events, and metrics. Everything is read only."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from kvferry.observe.prometheus import CONTENT_TYPE
from kvferry.serve.http import EventResponse, json_response, sse
from kvferry.web.guard import Guard
from kvferry.web.view import Source

__all__ = ["LivePage", "metrics_route"]

Result = TypeVar("Result")
INTERVAL_SECONDS = 0.5
# Each browser's stream asks the endpoint twice a second.
MAX_STREAMS = 16
_ASSETS = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


class LivePage:
    """The page over one source; ``app`` is what a server runs or mounts. ``close`` ends its streams."""

    def __init__(self, source: Source, metrics: Callable[[], bytes] | None = None, token: str = "") -> None:
        self._source = _together(source)
        self._streams = 0
        self._closing = asyncio.Event()
        pages = files("kvferry.web")
        routes = [
            Route("/" if name == "page.html" else f"/{name}", _asset(pages.joinpath(name).read_bytes(), kind))
            for name, kind in _ASSETS.items()
        ]
        routes += [Route("/events", self._events), Route("/now", self._now)]
        if metrics is not None:
            routes.append(metrics_route(metrics))
        self.app = Guard(Starlette(routes=routes), token)

    def close(self) -> None:
        """End the streams, so that a server that ends need not wait for browsers."""
        self._closing.set()

    async def _now(self, _: Request) -> Response:
        return json_response(await self._source())

    async def _events(self, _: Request) -> Response:
        if self._streams >= MAX_STREAMS:
            return PlainTextResponse(f"{MAX_STREAMS} pages are open, the most allowed\n", 503)
        self._streams += 1  # here, before another asks
        return EventResponse(self._moments(), self._leave)

    def _leave(self) -> None:
        self._streams -= 1

    async def _moments(self) -> AsyncIterator[bytes]:
        while not self._closing.is_set():
            yield sse(msgspec.json.encode(await self._source()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), INTERVAL_SECONDS)


def metrics_route(text: Callable[[], bytes]) -> Route:
    """``/metrics``; ``text`` may wait for a node, so it is called in a thread."""

    async def read() -> bytes:
        return await asyncio.to_thread(text)

    read_together = _together(read)

    async def metrics(_: Request) -> Response:
        return Response(await read_together(), media_type=CONTENT_TYPE)

    return Route("/metrics", metrics)


def _together(ask: Callable[[], Awaitable[Result]]) -> Callable[[], Awaitable[Result]]:
    """Ask once for all that want to know at the same time: lookers must not take the worker's threads."""
    asked: asyncio.Future[Result] | None = None

    async def answer() -> Result:
        nonlocal asked
        if asked is None or asked.done():
            asked = asyncio.ensure_future(ask())
        return await asyncio.shield(asked)

    return answer


def _asset(body: bytes, kind: str) -> Callable[[Request], Response]:
    def give(_: Request) -> Response:
        return Response(body, media_type=kind)

    return give
