"""What both HTTP servers need of Starlette: bounded bodies, JSON, events, and the client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvferry.errors import InputError

__all__ = ["DONE", "MAX_BODY_NBYTES", "EventResponse", "bounded_body", "json_response", "sse", "until_gone"]

MAX_BODY_NBYTES = 16 << 20
BODY_SECONDS = 60.0
DONE = b"data: [DONE]\n\n"
Result = TypeVar("Result")


async def bounded_body(request: Request) -> bytes:
    """The body. Raises InputError beyond the limits of size and time, ClientDisconnect."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > MAX_BODY_NBYTES:
                    raise InputError(f"body: more than {MAX_BODY_NBYTES} bytes")
    except TimeoutError:
        raise InputError(f"body: not whole after {BODY_SECONDS:.0f} s") from None
    return bytes(body)


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """One JSON object."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def sse(data: bytes) -> bytes:
    """One server-sent event of a JSON text."""
    return b"data: " + data + b"\n\n"


class EventResponse(StreamingResponse):
    """Server-sent events; ``leave`` is called when nobody reads them any more, even if nobody ever did."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def until_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of some work, which is cancelled when the client goes away: then ClientDisconnect.

    The request's body has to be read before.
    """
    doing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(request))
    both: list[asyncio.Future[Any]] = [doing, watching]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise ClientDisconnect
        return doing.result()
    finally:
        for task in both:
            if not task.done():
                task.cancel()
        await asyncio.wait(both)  # a cancelled one has cleaned up when this returns


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
