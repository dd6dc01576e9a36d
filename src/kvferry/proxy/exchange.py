"""One request through the proxy: prefill, ticket, decode, and what happens when one of them fails."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import msgspec
from starlette.requests import Request

from kvferry.proxy.answers import Answer, Events, failure
from kvferry.proxy.body import Body
from kvferry.proxy.follow import CONTINUE_KEY, MODEL_KEY, PLAIN_KEY, Follow, MisreadError, read_follow
from kvferry.proxy.rewrite import DivergedError, Writer, finish_of, joined
from kvferry.proxy.state import ProxyState
from kvferry.proxy.upstream import TICKET_KEY, RefusedError, WorkerFailedError
from kvferry.proxy.workers import Pair, Worker

__all__ = ["Exchange"]

_PUSH_URL_KEY = "kvferry_prefill_url"


class _Given(msgspec.Struct):
    """What prefill answered. ``params`` None: there is nothing to hand over, for ``reason``.

    ``is_emitted``: its token goes out at once; ``follow``: how decode is to be asked to go on after it, None
    where the ticket says it.
    """

    answer: dict[str, Any]
    params: dict[str, Any] | None
    reason: str
    is_emitted: bool
    follow: Follow | None = None


@contextlib.contextmanager
def _misread(worker: Worker) -> Iterator[None]:
    try:
        yield
    except MisreadError as error:
        raise WorkerFailedError(worker, str(error)) from error


class Exchange:
    """One request. ``answer`` gives the response; nothing is left running when it is cancelled."""

    def __init__(self, state: ProxyState, request: Request, body: Body) -> None:
        self._state = state
        self._options = state.options
        self._path = request.url.path
        self._headers = request.headers
        self._body = body
        self._tokens = body.tokens(state.bytes_per_token)
        self._said: dict[str, str] = {}
        # The worker that issued a ticket which nobody has taken up yet, as far as is known here.
        self._held: tuple[Worker, str] | None = None

    async def answer(self) -> Answer | Events:
        """Hand over, or have one worker do it all. Raises RefusedError, WorkerFailedError."""
        if (reason := self._body.why_alone()) is not None:
            return await self._alone(reason)
        if self._body.max_tokens == 1:
            return await self._one_token()
        tried: list[Worker] = []
        last: WorkerFailedError | None = None
        for _ in range(1 + self._options.retries):
            pair = self._state.workers.pair(self._tokens, tried)
            if pair is None:
                break
            places = pair.prefill.place, pair.decode.place
            if (reason := self._state.costs.why_not(*places, self._tokens)) is not None:
                return await self._alone(reason)
            try:
                return await self._over(pair)
            except WorkerFailedError as error:
                if error.is_nobodys_fault:
                    raise
                last = error
                blamed = pair.prefill if error.is_peers_fault else error.worker
                if error.status != 503:  # one that is only busy is asked again next time
                    self._state.workers.failed(blamed)
                self._state.count("retries")
                tried.append(blamed)
        assert last is not None
        if self._options.fallback == "fail":
            raise last
        return await self._alone(f"no handoff came about: {last}", without=tried)

    async def _one_token(self) -> Answer | Events:
        """Prefill gives all of it; where prefill fails, decode does."""
        worker = self._state.workers.least_prefill()
        try:
            return await self._one_worker(worker, "one token is asked for")
        except WorkerFailedError as error:
            if error.is_nobodys_fault or self._options.fallback == "fail":
                raise
            return await self._alone(f"one token is asked for; {error}", without=[worker])

    async def _over(self, pair: Pair) -> Answer | Events:
        if self._options.mode == "push-by-decode":
            return await self._by_decode(pair)
        # Decode judges the body first: its 400 comes before a token is out, and before anything is held.
        # Not beside the prefill: an answer of prefill that nobody reads would hold blocks for its lease.
        judged = self._body.for_decode(None)
        await self._state.upstream.check(pair.decode, self._path, judged, self._headers)
        try:
            given = await self._prefill(pair)
            pair.prefill.answered += 1
            if given.params is not None:
                first_from = "prefill" if given.is_emitted else given.reason
                self._note(pair.prefill, pair.decode, "handoff", first_from)
                return await self._decode(pair, given, given.params)
        except BaseException:
            self._withdraw()
            raise
        self._withdraw()  # a reservation into which nothing comes
        if finish_of(given.answer) != "length":  # it ended with its first token: that is all of it
            self._note(pair.prefill, None, "ended with its first token", "prefill")
            self._state.count("ended_at_prefill")
            return self._whole(given.answer)
        return await self._alone(given.reason)

    async def _by_decode(self, pair: Pair) -> Answer | Events:
        """One request to decode, which has this prefill worker push.

        What fails is laid to prefill, unless decode itself is not reached: its answer does not say.
        """
        params = {"do_remote_prefill": True, "do_remote_decode": False, _PUSH_URL_KEY: pair.prefill.place.url}
        self._note(pair.prefill, pair.decode, "decode asks prefill to push", "decode; push-by-decode")
        given = _Given({}, params, "", is_emitted=False)
        try:
            # Prefill counts as busy until decode answers, or begins to: nobody tells when it was done.
            with pair.prefill.busy(self._tokens):
                return await self._decode(pair, given, params)
        except WorkerFailedError as error:
            error.is_peers_fault |= error.__cause__ is None and error.status != 503
            raise

    def _hold(self, issuer: Worker, params: dict[str, Any]) -> None:
        if isinstance(ticket := params.get(TICKET_KEY), str):
            self._held = issuer, ticket

    def _withdraw(self) -> None:
        """Nobody will use what is held for this request: it need not wait for the end of its lease."""
        if self._held is not None:
            (issuer, ticket), self._held = self._held, None
            self._state.upstream.withdraw(issuer, ticket, self._body.fields.get("model"), self._headers)

    async def _decode(self, pair: Pair, given: _Given, params: dict[str, Any]) -> Answer | Events:
        if not self._body.stream:
            fields = self._for_decode(params, given.follow)
            with pair.decode.busy(self._tokens):
                then = await self._whole_of(pair.decode, fields)
            if given.follow is not None:
                with _misread(pair.decode):
                    then = given.follow.whole(then)
            pair.decode.answered += 1
            self._state.count("handoffs")
            return Answer(joined(given.answer, then) if given.is_emitted else then, self._said)
        writer = Writer(is_chat=self._body.is_chat)
        if given.is_emitted:
            # The token goes out now; decode is asked while the client reads it.
            first = writer.first(given.answer)
            events = self._stream(writer, pair.decode, params, first=first, follow=given.follow)
            stack = contextlib.AsyncExitStack()
        else:
            stack = contextlib.AsyncExitStack()
            opened = await self._open(stack, pair.decode, self._body.for_decode(params)), stack
            events = self._stream(writer, pair.decode, params, opened=opened)
        stack.callback(self._withdraw)  # a client that leaves before decode has begun
        return Events(events, self._said, stack)

    def _for_decode(self, params: dict[str, Any] | None, follow: Follow | None) -> dict[str, Any]:
        fields = self._body.for_decode(params)
        return fields if follow is None else follow.body(fields)

    async def _prefill(self, pair: Pair) -> _Given:
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        plain = self._body.why_plain() if self._options.first_token != "decode" else "--first-token decode"  # noqa: S105
        if self._options.mode == "push":
            held = await self._ask(pair.decode, self._body.for_reservation(), self._options.prefill_seconds)
            if not isinstance(held.get("kv_transfer_params"), dict):
                raise WorkerFailedError(pair.decode, "answered a reservation without kv_transfer_params")
            params = held["kv_transfer_params"]
            self._hold(pair.decode, params)
        if plain is None:
            params = params | {"kvferry_first_token": "emit"}
            if pair.prefill.continues:
                # Known when prefill is done.
                self._state.upstream.begin_model(pair.decode, self._body.fields.get("model"), self._headers)
        with pair.prefill.busy(self._tokens):
            under_way, started = pair.prefill.tokens, time.monotonic()
            answer = await self._ask(
                pair.prefill, self._body.for_prefill(params), self._options.prefill_seconds
            )
            pair.prefill.took(time.monotonic() - started, under_way)
        self._state.learn(self._body, answer)
        back = answer.get("kv_transfer_params")
        if not isinstance(back, dict) or not back.get("do_remote_prefill"):
            refused = back.get("kvferry_refused") if isinstance(back, dict) else None
            return _Given(answer, None, str(refused or "prefill gave no ticket"), is_emitted=False)
        if self._options.mode == "pull":
            self._hold(pair.prefill, back)
        is_emitted = back.get("kvferry_emitted_tokens") == 1
        if is_emitted and plain is not None:
            raise WorkerFailedError(pair.prefill, "handed over after a token that it was not to emit")
        told, offered, model = (back.pop(key, None) for key in (PLAIN_KEY, CONTINUE_KEY, MODEL_KEY))
        reason = plain or str(told or "prefill does not hand over after its first token")
        if plain is None and offered is not None and not is_emitted:
            pair.prefill.continues = True
            how = read_follow(offered, self._body, answer)
            if isinstance(how, Follow):
                reason = await self._why_another_model(model, pair.decode)
                if not reason:
                    how.model = model
                    return _Given(answer, back, "", is_emitted=True, follow=how)
            else:
                reason = how
        return _Given(answer, back, f"decode; {reason}", is_emitted)

    async def _why_another_model(self, model: Any, decode: Worker) -> str:
        """Why prefill's token may not be decode's, or "": a token that is out cannot be taken back."""
        if not isinstance(model, str) or not model:
            return "prefill does not say which model it runs"
        theirs = await self._state.upstream.model(decode, self._body.fields.get("model"), self._headers)
        if not theirs:
            return "decode does not say which model it runs"
        return "" if theirs == model else "decode runs another model than prefill"

    async def _alone(self, reason: str, without: list[Worker] | None = None) -> Answer | Events:
        """One decode worker does it all."""
        self._state.count("alone")
        return await self._one_worker(self._state.workers.alone(without or ()), f"alone; {reason}")

    async def _one_worker(self, worker: Worker, reason: str) -> Answer | Events:
        self._note(None, worker, reason, "decode")
        fields = self._body.for_decode(None)
        try:
            if not self._body.stream:
                with worker.busy(self._tokens):
                    answer = await self._whole_of(worker, fields)
                worker.answered += 1
                return Answer(answer, self._said)
            stack = contextlib.AsyncExitStack()
            events = await self._open(stack, worker, fields)
        except WorkerFailedError as error:
            if error.status != 503 and not error.is_nobodys_fault:
                self._state.workers.failed(worker)
            raise
        writer = Writer(is_chat=self._body.is_chat)
        return Events(self._stream(writer, worker, None, opened=(events, stack)), self._said, stack)

    async def _ask(self, worker: Worker, fields: dict[str, Any], seconds: float) -> dict[str, Any]:
        return await self._state.upstream.ask(worker, self._path, fields, self._headers, seconds)

    async def _whole_of(self, worker: Worker, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._state.upstream.whole(worker, self._path, fields, self._headers)

    async def _open(
        self, stack: contextlib.AsyncExitStack, worker: Worker, fields: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """The stream, begun; ``stack`` closes it and counts it out. Closed here when it does not begin."""
        try:
            stack.enter_context(worker.busy(self._tokens))
            return await stack.enter_async_context(
                self._state.upstream.stream(worker, self._path, fields, self._headers)
            )
        except BaseException:
            await stack.aclose()
            raise

    async def _stream(
        self,
        writer: Writer,
        worker: Worker,
        params: dict[str, Any] | None,
        *,
        first: dict[str, Any] | None = None,
        follow: Follow | None = None,
        opened: tuple[AsyncIterator[dict[str, Any]], contextlib.AsyncExitStack] | None = None,
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The client's events. A worker that fails is replaced once, where what follows is certain.

        Certain: nothing was sent yet, or the same request gives the same text again (greedy, or with a
        seed): then another worker starts over, and what the client has is compared and left out.
        """
        if first is not None:
            yield first
        may_restart = self._options.fallback == "decode"
        upstream = self._state.upstream
        while True:
            events, stack = opened or (None, contextlib.AsyncExitStack())
            async with stack:
                try:
                    if events is None:
                        events = await self._open(stack, worker, self._for_decode(params, follow))
                    async for event in events:
                        self._held = None  # decode has taken it up, or will not
                        with _misread(worker):
                            known = event if follow is None else follow.event(event)
                        if known is not None and (written := writer.next(known)) is not None:
                            yield written
                except (WorkerFailedError, RefusedError) as error:
                    self._withdraw()
                    if isinstance(error, WorkerFailedError) and not error.is_nobodys_fault:
                        self._state.workers.failed(worker)
                    if upstream.is_ending or not may_restart or not self._may_repeat(writer):
                        yield failure(error)
                        return
                except DivergedError:
                    yield failure(DivergedError(f"{worker.place.name}, started over, wrote another text"))
                    return
                else:
                    worker.answered += 1
                    self._state.count("streams")
                    return
            may_restart, params, opened, follow = False, None, None, None
            worker = self._state.workers.alone([worker])
            writer.start_over()
            self._state.count("restarts")

    def _may_repeat(self, writer: Writer) -> bool:
        """Whether the same request, from its beginning, gives what the client has, and the rest of it."""
        if not writer.has_begun:
            return True
        return writer.is_text_only and self._body.is_deterministic and self._body.why_alone() is None

    def _whole(self, answer: dict[str, Any]) -> Answer | Events:
        answer.pop("kv_transfer_params", None)
        if not self._body.stream:
            return Answer(answer, self._said)
        writer = Writer(is_chat=self._body.is_chat)
        options = self._body.fields.get("stream_options")
        with_usage = isinstance(options, dict) and options.get("include_usage") is True

        async def events() -> AsyncGenerator[dict[str, Any], None]:
            yield writer.first(answer, is_end=True)
            if with_usage:
                yield writer.usage(answer)

        return Events(events(), self._said)

    def _note(self, prefill: Worker | None, decode: Worker | None, way: str, first_from: str) -> None:
        """What the response's headers say about how it came about."""
        said = {
            "x-kvferry-way": way,
            "x-kvferry-prefill": "" if prefill is None else self._state.workers.shown(prefill),
            "x-kvferry-decode": "" if decode is None else self._state.workers.shown(decode),
            "x-kvferry-first-token": first_from,
        }
        self._said = {
            name: value.encode("ascii", "replace").decode().replace("\r", " ").replace("\n", " ")[:400]
            for name, value in said.items()
            if value
        }
