"""The HTTP side: /v1/completions, /v1/chat/completions, /v1/models, /health, /metrics and /live."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from kvferry.engines.reference import Model, ReferenceEngine
from kvferry.errors import CapacityError, InputError, KVFerryError
from kvferry.serve.ask import Ask, read_chat, read_completion
from kvferry.serve.batcher import Batcher
from kvferry.serve.http import DONE, EventResponse, bounded_body, json_response, sse, until_gone
from kvferry.serve.job import Event, Failed, Handed, Job, Token, new_request_id
from kvferry.serve.look import Look
from kvferry.serve.options import ServeOptions
from kvferry.serve.shapes import Shape, error_body, http_status
from kvferry.web.app import metrics_route

__all__ = ["make_app"]


def make_app(
    engine: ReferenceEngine,
    batcher: Batcher,
    options: ServeOptions,
    look: Look,
    *,
    has_peers: bool,
    withdraw: Callable[[bytes], None],
    close: Callable[[], None],
) -> Starlette:
    """The application; ``withdraw`` takes a ticket back, ``close`` is called when it ends."""
    server = _Server(engine, batcher, options, has_peers=has_peers, withdraw=withdraw)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batcher.start()
        try:
            yield
        finally:
            await asyncio.to_thread(close)

    return Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/completions/check", server.check_completion, methods=["POST"]),
            Route("/v1/chat/completions/check", server.check_chat, methods=["POST"]),
            Route("/v1/models", server.models),
            Route("/health", server.health),
            metrics_route(look.metrics.text),
            *([] if look.page is None else [Mount("/live", look.page.app)]),
        ],
        lifespan=lifespan,
    )


class _Server:
    def __init__(
        self,
        engine: ReferenceEngine,
        batcher: Batcher,
        options: ServeOptions,
        *,
        has_peers: bool,
        withdraw: Callable[[bytes], None],
    ) -> None:
        self._model = engine.model
        self._blocks_for = engine.pool.blocks_for
        self._batcher = batcher
        self._options = options
        self._has_peers = has_peers
        self._withdraw = withdraw

    async def health(self, _: Request) -> Response:
        """200 and what is in the server now; 500 when the engine has ended."""
        failure = self._batcher.failure
        status = {"status": "ok" if failure is None else str(failure)}
        return json_response(status | self._batcher.stats(), 200 if failure is None else 500)

    async def models(self, _: Request) -> Response:
        """The one model."""
        model = {"id": self._model.name, "object": "model", "owned_by": "kvferry"}
        return json_response(
            {"object": "list", "data": [model | {"max_model_len": self._model.config.max_context}]}
        )

    async def completions(self, request: Request) -> Response:
        return await self._serve(request, read_completion)

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, read_chat)

    async def check_completion(self, request: Request) -> Response:
        return await self._judge(request, read_completion)

    async def check_chat(self, request: Request) -> Response:
        return await self._judge(request, read_chat)

    async def _judge(self, request: Request, read: Callable[[bytes, Model], Ask]) -> Response:
        """200 where this server would begin with such a body, 400 as it would answer; nothing is begun."""
        try:
            ask = await asyncio.to_thread(read, await bounded_body(request), self._model)
            self._check(ask)
            self._batcher.check(self._job(ask))
        except KVFerryError as error:
            return _error(error)
        return json_response({})

    async def _serve(self, request: Request, read: Callable[[bytes, Model], Ask]) -> Response:
        try:
            ask = await asyncio.to_thread(read, await bounded_body(request), self._model)
            self._check(ask)
            if ask.handoff is not None and ask.handoff.kind == "withdraw":
                assert ask.handoff.ticket is not None
                self._withdraw(ask.handoff.ticket)
                return json_response(Shape(ask, self._model.name, new_request_id()).withdrawal())
            exchange = _Exchange(self._job(ask), self._batcher, self._model.name)
            return await until_gone(request, exchange.answer())
        except KVFerryError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it

    def _check(self, ask: Ask) -> None:
        if ask.model not in ("", self._model.name):
            raise InputError(f"model: {ask.model!r} is not served here, {self._model.name!r} is")
        if ask.handoff is not None and not self._has_peers:
            raise InputError("kv_transfer_params: this server has no address for KV; start it with --kv")
        if ask.handoff is not None and ask.handoff.kind in ("reserve", "withdraw") and ask.stream:
            raise InputError("stream: what is answered at once is no stream")

    def _job(self, ask: Ask) -> Job:
        tokens = len(ask.prompt_ids)
        if ask.handoff is None or ask.handoff.kind != "prefill":
            tokens += ask.limits.max_tokens_left
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def post(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(ask, post, time.monotonic() + self._options.queue_seconds, self._blocks_for(tokens + 1))
        job.events = events
        return job


class _Exchange:
    """One request on its way through the engine; the job is cancelled unless it came to its end."""

    def __init__(self, job: Job, batcher: Batcher, model: str) -> None:
        self._job = job
        self._batcher = batcher
        self._shape = Shape(job.ask, model, job.request_id)
        self._is_over = False

    async def answer(self) -> Response:
        """Submit, and answer with the status that the first event has. Raises KVFerryError."""
        self._batcher.submit(self._job)
        streams = False
        try:
            first = await self._next()
            params: dict[str, Any] | None = None
            if isinstance(first, Handed):
                params = first.params
                if self._job.ask.handoff is not None and self._job.ask.handoff.kind == "reserve":
                    self._is_over = True
                    return json_response(self._shape.reservation(params))
                first = await self._next()
            assert isinstance(first, Token)
            if self._job.ask.stream:
                streams = True
                return EventResponse(self._stream(first, params), self._leave)
            tokens = [first]
            while tokens[-1].finish is None:
                tokens.append(await self._token())
            self._is_over = True
            return json_response(self._shape.whole(tokens, params))
        finally:
            if not streams:
                self._leave()

    async def _stream(self, token: Token, params: dict[str, Any] | None) -> AsyncIterator[bytes]:
        while True:
            yield _event(self._shape.chunk(token, params if token.finish else None))
            if token.finish is not None:
                break
            try:
                token = await self._token()
            except KVFerryError as error:
                yield _event(error_body(error, http_status(error)))
                return
        self._is_over = True
        if self._job.ask.include_usage:
            yield _event(self._shape.usage_chunk(token.completion_tokens))
        yield DONE

    def _leave(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._batcher.cancel(self._job)

    async def _token(self) -> Token:
        event = await self._next()
        assert isinstance(event, Token)
        return event

    async def _next(self) -> Token | Handed:
        """The next event. Raises the job's error."""
        event = await self._job.events.get()
        if isinstance(event, Failed):
            self._is_over = True
            raise event.error
        return event


def _event(data: dict[str, Any]) -> bytes:
    return sse(msgspec.json.encode(data))


def _error(error: KVFerryError) -> Response:
    """429 where too many wait already, else by whose fault it is; Retry-After where asking again may help."""
    status = http_status(error)
    headers = None
    if isinstance(error, CapacityError):
        status = 429 if "wait already" in error.message else status
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_seconds)))}
    return json_response(error_body(error, status), status, headers)
