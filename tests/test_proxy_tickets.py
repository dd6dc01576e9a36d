"""A ticket that the proxy will not use is given up at its issuer at once, and one that is used never is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from kvferry.proxy.answers import Answer, Events
from kvferry.proxy.body import Body
from kvferry.proxy.exchange import Exchange
from kvferry.proxy.options import Place, ProxyOptions
from kvferry.proxy.pays import Costs
from kvferry.proxy.state import ProxyState
from kvferry.proxy.upstream import RefusedError, Upstream, WorkerFailedError
from kvferry.proxy.workers import Worker

P, D, D2 = (Place(name, f"http://127.0.0.1:{port}") for name, port in (("p", 9), ("d", 10), ("d2", 11)))
CHOICE = {"index": 0, "text": "A", "finish_reason": "length"}
REFUSED = RefusedError(400, b'{"error": {"message": "no"}}')
HEADERS = [(b"authorization", b"Bearer key"), (b"x-request-id", b"theirs")]


class Scripted(Upstream):
    """Workers that answer in turn: prefill what ``prefill`` says, decode what ``decode`` says.

    A list of events is a stream; an error is raised; None is no answer before the client has gone.
    ``withdrawn``: who was told to hold which ticket no longer.
    """

    def __init__(self, options: ProxyOptions, prefill: list[Any], decode: list[Any]) -> None:
        super().__init__(options)
        self._answers = {"p": list(prefill), "d": list(decode), "d2": list(decode)}
        self._num_tickets = 0
        self.is_silent, self.has_left = asyncio.Event(), asyncio.Event()
        self.withdrawn: list[tuple[str, str]] = []

    async def ask(
        self, worker: Worker, path: str, fields: Any, headers: Mapping[str, str], _: float
    ) -> dict[str, Any]:
        params = fields.get("kv_transfer_params") or {}
        if "kvferry_withdraw" in params:
            assert (path, dict(headers)) == ("/v1/completions", {"authorization": "Bearer key"})
            assert (fields["model"], fields["max_tokens"]) == ("m", 1)
            self.withdrawn.append((worker.place.name, params["kvferry_withdraw"]))
            return {}
        if path.endswith("/check"):
            raise RefusedError(404, b"")
        if params.get("kvferry_model"):
            return await self._next(worker, "d")
        answer = await self._next(worker, "p" if worker.place is P else "d")
        if answer.get("kv_transfer_params") == "ticket":
            self._num_tickets += 1
            there = {"do_remote_prefill": worker.place is P, "kvferry_ticket": f"t{self._num_tickets}"}
            answer = answer | {"kv_transfer_params": there | answer.get("more", {})}
        elif answer.get("kv_transfer_params") == "theirs":
            answer = answer | {"kv_transfer_params": params | {"do_remote_prefill": True}}
        return answer

    @contextlib.asynccontextmanager
    async def stream(self, worker: Worker, *_: Any) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        answer = await self._next(worker, "d")

        async def events() -> AsyncIterator[dict[str, Any]]:
            for event in answer:
                yield event

        yield events()

    async def _next(self, worker: Worker, side: str) -> Any:
        answer = self._answers[side].pop(0)
        if answer is None:
            self.is_silent.set()
            await self.has_left.wait()
            answer = WorkerFailedError
        if isinstance(answer, type):
            raise answer(worker, "failed", status=503)
        if isinstance(answer, Exception):
            raise answer
        return answer


OFFER = {"choices": [CHOICE], "kv_transfer_params": "ticket"}
EMITTED = OFFER | {"more": {"kvferry_emitted_tokens": 1}}
ASKS_MODEL = OFFER | {
    "usage": {"prompt_tokens": 3},
    "more": {
        "kvferry_continue": {"ids": [5, 6, 7, 9], "room_tokens": 90, "default_tokens": 90},
        "kvferry_model": "ab",
    },
}
RESERVED = {"choices": [], "kv_transfer_params": "ticket"}
PUSHED = {"choices": [CHOICE], "kv_transfer_params": "theirs"}
WHOLE = {"choices": [CHOICE | {"text": "Bc"}]}
EVENTS = [{"choices": [CHOICE | {"text": "B", "finish_reason": None}]}, {"choices": [CHOICE]}]
ENDED = {"choices": [CHOICE | {"finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("mode", "reads", "prefill", "decode", "withdrawn"),
    [
        ("pull", None, [OFFER], [WHOLE], []),
        ("pull", 9, [OFFER], [EVENTS], []),
        ("pull", 9, [EMITTED], [EVENTS], []),
        ("pull", 2, [EMITTED], [EVENTS], []),  # the client leaves; decode has it
        ("push", None, [PUSHED], [RESERVED, WHOLE], []),
        ("pull", None, [OFFER], [REFUSED], ["p t1"]),
        ("pull", 9, [OFFER], [REFUSED], ["p t1"]),
        ("pull", 9, [EMITTED], [REFUSED, EVENTS], ["p t1"]),
        ("pull", 1, [EMITTED], [EVENTS], ["p t1"]),  # the client leaves before decode is asked
        ("pull", 0, [EMITTED], [EVENTS], ["p t1"]),
        ("pull", 9, [EMITTED], [None], ["p t1"]),  # or while it is silent
        ("pull", None, [OFFER], [None], ["p t1"]),
        ("pull", None, [ASKS_MODEL], [None], ["p t1"]),  # while decode's model is asked for
        ("pull", None, [OFFER, OFFER], [WorkerFailedError, WHOLE], ["p t1"]),  # tried again, with another
        ("push", None, [WorkerFailedError], [RESERVED, WHOLE], ["d t1"]),
        ("push", None, [REFUSED], [RESERVED], ["d t1"]),
        ("push", None, [None], [RESERVED], ["d t1"]),
        ("push", None, [ENDED], [RESERVED], ["d t1"]),
        ("push", 9, [PUSHED], [RESERVED, REFUSED], ["d t1"]),
    ],
)
def test_what_nobody_will_use_is_given_up_at_its_issuer(
    mode: str, reads: int | None, prefill: list[Any], decode: list[Any], withdrawn: list[str]
) -> None:
    """Refused, failed, or the client has left: with the ticket of that attempt, and no other.

    ``reads``: the events of a stream that the client reads before it leaves; None: it asks for no stream.
    """

    async def check() -> None:
        options = ProxyOptions((P,), (D,), mode=mode, retries=1)  # type: ignore[arg-type]
        state = ProxyState(options, Costs(options, None))
        await state.upstream.close()
        upstream = state.upstream = Scripted(options, prefill, decode)
        body = {"model": "m", "prompt": "abc", "max_tokens": 3, "temperature": 0, "stream": reads is not None}
        request = Request({"type": "http", "path": "/v1/completions", "headers": HEADERS})
        working = asyncio.ensure_future(
            _read(Exchange(state, request, Body(body, is_chat=False)), reads or 0)
        )
        silent = asyncio.ensure_future(upstream.is_silent.wait())
        await asyncio.wait([working, silent], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():  # then the client goes
            working.cancel()
        silent.cancel()
        await asyncio.gather(working, silent, return_exceptions=True)
        upstream.has_left.set()
        await upstream.close()
        assert [" ".join(told) for told in upstream.withdrawn] == withdrawn

    asyncio.run(check())


async def _read(exchange: Exchange, reads: int) -> None:
    """As a client that reads so many events of a stream and then leaves."""
    answer = await exchange.answer()
    if isinstance(answer, Answer):
        assert msgspec.json.encode(answer.body)
        return
    assert isinstance(answer, Events)
    try:
        async with contextlib.aclosing(answer.events) as events:
            for _ in range(reads):
                await anext(events)
    except StopAsyncIteration:
        return
    finally:
        assert answer.stack is not None
        await answer.stack.aclose()
