"""The proxy's HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvferry.errors import InputError
from kvferry.link import LinkFile
from kvferry.proxy.answers import Answer, Events, failure
from kvferry.proxy.body import read_body
from kvferry.proxy.exchange import Exchange
from kvferry.proxy.metrics import metrics_of
from kvferry.proxy.state import ProxyState
from kvferry.proxy.upstream import RefusedError, WorkerFailedError
from kvferry.proxy.watch import watch_workers
from kvferry.serve.http import DONE, bounded_body, json_response, sse, until_gone
from kvferry.web.app import metrics_route

__all__ = ["make_app"]


def make_app(state: ProxyState, links: LinkFile | None = None) -> Starlette:
    """The application over one state; ``links``: what its costs were made from."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.ensure_future(watch_workers(state, links))
        try:
            yield
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await state.upstream.close()

    async def completions(request: Request) -> Response:
        return await _answer(state, request, is_chat=False)

    async def chat(request: Request) -> Response:
        return await _answer(state, request, is_chat=True)

    async def models(request: Request) -> Response:
        worker = state.workers.alone()
        try:
            seconds = state.options.silence_seconds
            return json_response(
                await state.upstream.ask(worker, "/v1/models", None, request.headers, seconds)
            )
        except (WorkerFailedError, RefusedError) as error:
            return _failed(error)

    async def health(_: Request) -> Response:
        return json_response({"status": "ok"} | state.report())

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            metrics_route(metrics_of(state)),
        ],
        lifespan=lifespan,
    )


async def _answer(state: ProxyState, request: Request, *, is_chat: bool) -> Response:
    try:
        body = read_body(await bounded_body(request), is_chat=is_chat)
        answer = await until_gone(request, Exchange(state, request, body).answer())
    except InputError as error:
        said: dict[str, Any] = {"message": str(error), "type": error.kind, "code": 400, "param": None}
        return json_response({"error": said}, 400)
    except (WorkerFailedError, RefusedError) as error:
        state.count("failed")
        return _failed(error)
    except ClientDisconnect:
        return Response(status_code=499)  # nobody reads it
    if isinstance(answer, Answer):
        return json_response(answer.body, headers=answer.headers)
    return _EventResponse(answer)


def _failed(error: WorkerFailedError | RefusedError) -> Response:
    if isinstance(error, RefusedError):
        return Response(error.body, error.status, media_type="application/json")
    headers = {"Retry-After": "1"} if error.status == 503 else None
    return json_response(failure(error), error.status, headers)


class _EventResponse(StreamingResponse):
    """A stream whose upstream is closed whatever becomes of it."""

    def __init__(self, events: Events) -> None:
        super().__init__(_encoded(events.events), headers=events.headers, media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._events.events.aclose()
            if self._events.stack is not None:
                await self._events.stack.aclose()


async def _encoded(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    is_done = True
    async for event in events:
        is_done = "error" not in event
        yield sse(msgspec.json.encode(event))
    if is_done:
        yield DONE
