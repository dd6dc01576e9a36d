"""Requests to workers: JSON answers and event streams; every wait has an end, every failure a name."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import httpx
import msgspec

from kvferry.errors import PeerError
from kvferry.proxy.follow import MODEL_KEY
from kvferry.proxy.options import ProxyOptions
from kvferry.proxy.workers import ModelAsked, Worker
from kvferry.sse import event_data

__all__ = ["TICKET_KEY", "RefusedError", "Upstream", "WorkerFailedError"]

TICKET_KEY = "kvferry_ticket"
_WITHDRAW_KEY = "kvferry_withdraw"
# How long a worker's word of its model is good, and how long one that says nothing is not asked again.
# It may be out of date: decode is told the model with each request that rests on it.
_MODEL_SECONDS, _NO_MODEL_SECONDS = 10.0, 1.0

# The status by which decode says that its peer, not itself, is at fault: then prefill is to blame.
_PEERS_FAULT = frozenset({409, 502, 504})
_WORKERS_FAULT = frozenset({408, 429})
_ALLOWED_BY = ("authorization",)
_PASSED_ON = (*_ALLOWED_BY, "x-request-id")
MAX_ANSWER_NBYTES = 64 << 20
T = TypeVar("T")


class WorkerFailedError(Exception):
    """A worker, or the one that it blames, did not do it; another may.

    ``is_nobodys_fault``: its time was up while it was still at it: nobody is blamed, nothing tried again.
    """

    def __init__(
        self,
        worker: Worker,
        reason: str,
        *,
        status: int = 502,
        is_peers_fault: bool = False,
        is_nobodys_fault: bool = False,
    ) -> None:
        super().__init__(f"{worker.place.name} ({worker.place.url}): {reason}")
        self.worker = worker
        self.status = status
        self.is_peers_fault = is_peers_fault
        self.is_nobodys_fault = is_nobodys_fault


class EndingError(WorkerFailedError):
    """The proxy was told to end while the worker was still at it: nobody is blamed, nothing tried again."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, "", status=503, is_nobodys_fault=True)
        self.args = ("the proxy was told to end before this answer was whole; send the request again",)


class _TooLongError(Exception):
    """An answer that began, and was not whole in time."""


class RefusedError(Exception):
    """A worker refused the request itself: the client is to see its answer as it is."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


class Upstream:
    """One client for all workers."""

    def __init__(self, options: ProxyOptions) -> None:
        self._options = options
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256), trust_env=False
        )
        self._open: set[httpx.Response] = set()
        self._asking: set[asyncio.Timeout] = set()
        self._beside: set[asyncio.Task[Any]] = set()
        self.is_ending = False

    async def end(self) -> None:
        """Break off what is under way: each request ends with an error of its own."""
        self.is_ending = True
        for asking in self._asking:
            asking.reschedule(asyncio.get_running_loop().time())
        for answer in list(self._open):
            await answer.aclose()

    async def close(self) -> None:
        await asyncio.gather(*self._beside, return_exceptions=True)
        await self._client.aclose()

    async def check(
        self, worker: Worker, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> None:
        """Ask whether the worker would begin with this body. Raises RefusedError with its 400.

        A worker of another kind has no such route, and one that fails now is found out when it is asked
        in earnest: then nothing is known, and nothing raised.
        """
        if not worker.has_check:
            return
        try:
            await self._question(worker, f"{path}/check", fields, headers)
        except RefusedError as error:
            if error.status == 400:
                raise
            worker.has_check = error.status not in {404, 405}
        except WorkerFailedError:
            return

    def withdraw(self, worker: Worker, ticket: str, name: Any, headers: Mapping[str, str]) -> None:
        """Tell a ticket's issuer, beside all else, that nobody will use it; whoever has it already keeps it.

        A worker that does not hear it, or does not know the question, frees it when the lease ends.
        """
        if self.is_ending:
            return

        async def tell() -> None:
            with contextlib.suppress(WorkerFailedError, RefusedError):
                await self._one_token(worker, {_WITHDRAW_KEY: ticket}, name, headers)

        self._begin(tell())

    async def model(self, worker: Worker, name: Any, headers: Mapping[str, str]) -> str:
        """A digest of the model that a worker runs, as it says itself now or said a moment ago; else "".

        It is asked in a completion of one token, beside all else. ``name``: the client's word for the model.
        """
        asked = self.begin_model(worker, name, headers)
        told = await asyncio.shield(asked.task)
        if told is None and asked.asker != _asker(name, headers):  # refused was another client's name or key
            told = await asyncio.shield(self._new_model(worker, name, headers).task)
        return told or ""

    def begin_model(self, worker: Worker, name: Any, headers: Mapping[str, str]) -> ModelAsked:
        """Ask for what ``model`` gives, unless that is under way or known."""
        asked = worker.model
        if asked is None or (asked.task.done() and asked.until <= time.monotonic()):
            return self._new_model(worker, name, headers)
        return asked

    def _new_model(self, worker: Worker, name: Any, headers: Mapping[str, str]) -> ModelAsked:
        task = self._begin(self._ask_model(worker, name, headers))
        asked = worker.model = ModelAsked(_asker(name, headers), task)

        def hold(done: asyncio.Task[str | None]) -> None:
            is_told = not done.cancelled() and done.exception() is None and done.result()
            asked.until = time.monotonic() + (_MODEL_SECONDS if is_told else _NO_MODEL_SECONDS)

        task.add_done_callback(hold)
        return asked

    async def _ask_model(self, worker: Worker, name: Any, headers: Mapping[str, str]) -> str | None:
        """The digest, "" from a worker that does not say it, None where it refuses this client."""
        try:
            answer = await self._one_token(worker, {MODEL_KEY: "?"}, name, headers)
        except RefusedError:
            return None
        except WorkerFailedError:
            return ""
        told = answer.get("kv_transfer_params")
        model = told.get(MODEL_KEY) if isinstance(told, dict) else None
        return model if isinstance(model, str) else ""

    async def _one_token(
        self, worker: Worker, params: Mapping[str, Any], name: Any, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """A question in the one form that every engine takes: a completion of one token."""
        fields = {"prompt": [0], "max_tokens": 1, "temperature": 0, "kv_transfer_params": params}
        if name is not None:
            fields["model"] = name
        return await self._question(worker, "/v1/completions", fields, headers)

    async def _question(
        self, worker: Worker, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """What the proxy itself asks beside a client's request: with its key, and not by its id.

        Raises as :meth:`ask` does, after ``connect_seconds`` for the answer.
        """
        own = {name: headers[name] for name in _ALLOWED_BY if name in headers}
        return await self.ask(worker, path, fields, own, self._options.connect_seconds)

    def _begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that no request waits for; ``close`` does."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        return task

    async def whole(
        self, worker: Worker, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """A whole answer, which may take ``answer_seconds``: its worker says nothing until it has all of it.

        Raises as :meth:`ask` does; after that time a WorkerFailedError that blames nobody.
        """
        seconds = self._options.answer_seconds
        try:
            return await self.ask(worker, path, fields, headers, seconds)
        except WorkerFailedError as error:
            if not isinstance(error.__cause__, httpx.ReadTimeout | _TooLongError):
                raise
            raise WorkerFailedError(
                worker,
                f"had no whole answer after {seconds:.3g} s (--answer-seconds); stream it, or ask for less",
                status=504,
                is_nobodys_fault=True,
            ) from error

    async def ask(
        self,
        worker: Worker,
        path: str,
        fields: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        limit_seconds: float,
    ) -> dict[str, Any]:
        """The JSON answer (without fields: to a GET), within its limit however it comes.

        Raises WorkerFailedError, RefusedError.
        """
        body = bytearray()
        try:
            # Each byte has the limit too; one now and then must not make it longer.
            async with (
                asyncio.timeout(self._options.connect_seconds + limit_seconds),
                self._request(worker, path, fields, headers, limit_seconds) as answer,
            ):
                async for part in answer.aiter_bytes():
                    body += part
                    if len(body) > MAX_ANSWER_NBYTES:
                        raise WorkerFailedError(worker, f"answered more than {MAX_ANSWER_NBYTES} bytes")
        except TimeoutError as error:
            reason = f"had no whole answer after {limit_seconds:.3g} s"
            raise WorkerFailedError(worker, reason, status=504) from _TooLongError(str(error))
        try:
            parsed = msgspec.json.decode(bytes(body))
        except (msgspec.DecodeError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise WorkerFailedError(worker, "answered no JSON object")
        return parsed

    @contextlib.asynccontextmanager
    async def stream(
        self, worker: Worker, path: str, fields: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of a stream that has begun well. Raises WorkerFailedError, RefusedError.

        An end without [DONE], and an error as an event, are WorkerFailedError too.
        """
        async with self._request(worker, path, fields, headers, self._options.silence_seconds) as answer:
            kind = answer.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                raise WorkerFailedError(worker, f"streams {kind[:60] or 'nothing'}, not text/event-stream")
            yield self._events(worker, answer)

    @contextlib.asynccontextmanager
    async def _request(
        self,
        worker: Worker,
        path: str,
        fields: Mapping[str, Any] | None,
        headers: Mapping[str, str],
        limit_seconds: float,
    ) -> AsyncIterator[httpx.Response]:
        timeout = httpx.Timeout(limit_seconds, connect=self._options.connect_seconds)
        content = None if fields is None else msgspec.json.encode(fields)
        # As bytes, as they came: the client would have ASCII.
        passed = {name.encode(): headers[name].encode("latin-1") for name in _PASSED_ON if name in headers}
        asked = self._client.stream(
            "GET" if fields is None else "POST",
            worker.place.url + path,
            content=content,
            headers=passed | {b"content-type": b"application/json"},
            timeout=timeout,
        )
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(self._named(worker, limit_seconds))
            answer = await self._answer(asked, stack)
            self._open.add(answer)
            stack.callback(self._open.discard, answer)
            if answer.status_code != 200:
                await _raise_status(worker, answer)
            yield answer

    async def _answer(
        self, asked: contextlib.AbstractAsyncContextManager[httpx.Response], stack: contextlib.AsyncExitStack
    ) -> httpx.Response:
        """The beginning of the answer, which ``stack`` closes. TimeoutError when all is to end."""
        async with asyncio.timeout(0 if self.is_ending else None) as asking:
            self._asking.add(asking)
            try:
                return await stack.enter_async_context(asked)
            finally:
                self._asking.discard(asking)

    @contextlib.contextmanager
    def _named(self, worker: Worker, limit_seconds: float) -> Iterator[None]:
        """The client's errors as ours."""
        try:
            yield
        except TimeoutError as error:
            raise EndingError(worker) from error
        except (httpx.HTTPError, httpx.StreamError) as error:
            if self.is_ending:  # it was us who broke it off
                raise EndingError(worker) from error
            if isinstance(error, httpx.ConnectError):
                reason = f"cannot be reached: {str(error) or type(error).__name__}"
                raise WorkerFailedError(worker, reason) from error
            if isinstance(error, httpx.TimeoutException):
                reason = f"said nothing for {limit_seconds:.3g} s"
                raise WorkerFailedError(worker, reason, status=504) from error
            raise WorkerFailedError(worker, f"the connection broke: {error!r}") from error
        except PeerError as error:
            raise WorkerFailedError(worker, error.message) from error

    async def _events(self, worker: Worker, answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
        with self._named(worker, self._options.silence_seconds):
            async for data in event_data(answer.aiter_bytes()):
                if data.strip() == b"[DONE]":
                    return
                yield _event(worker, data)
        if self.is_ending:
            raise EndingError(worker)
        raise WorkerFailedError(worker, "ended its stream in the middle")


def _asker(name: Any, headers: Mapping[str, str]) -> tuple[Any, str]:
    return name, headers.get("authorization", "")


async def _raise_status(worker: Worker, answer: httpx.Response) -> None:
    body = bytearray()
    async for part in answer.aiter_bytes():
        body += part
        if len(body) > 1 << 16:
            break
    status = answer.status_code
    if 400 <= status < 500 and status not in _WORKERS_FAULT | _PEERS_FAULT:
        raise RefusedError(status, bytes(body))
    raise WorkerFailedError(
        worker,
        f"answered {status}: {_message(bytes(body))}",
        status=503 if status in {429, 503} else 502,
        is_peers_fault=status in _PEERS_FAULT,
    )


def _message(body: bytes) -> str:
    """OpenAI's error message, or the beginning of whatever it is."""
    try:
        parsed = msgspec.json.decode(body)
        message = parsed["error"]["message"]
    except (msgspec.DecodeError, RecursionError, KeyError, TypeError, IndexError):
        message = body[:200].decode("utf-8", "replace")
    return " ".join(str(message).split())[:400]


def _event(worker: Worker, data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise WorkerFailedError(worker, "sent an event that is no JSON object")
    if "error" in event:
        raise WorkerFailedError(worker, _message(data))
    return event
