"""What the proxy asks of workers has an end, and one client's key or name is not another's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any

import pytest
from starlette.datastructures import Headers

from kvferry.proxy.options import Place, ProxyOptions
from kvferry.proxy.pays import Costs
from kvferry.proxy.upstream import RefusedError, Upstream, WorkerFailedError
from kvferry.proxy.workers import Worker, Workers

BOTH = Place("both", "http://127.0.0.1:9")
OPTIONS = ProxyOptions((BOTH,), (BOTH,), connect_seconds=0.2)
BAD, GOOD = {"authorization": "Bearer bad"}, {"authorization": "Bearer good"}


class Scripted(Upstream):
    """Workers that refuse one key, and say nothing before they are told to. ``asked``: by whom."""

    def __init__(self) -> None:
        super().__init__(OPTIONS)
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()

    async def ask(self, _worker: Any, _path: Any, _fields: Any, headers: Mapping[str, str], _: Any) -> Any:
        self.asked.append(headers["authorization"])
        await self.may_answer.wait()
        if headers == BAD:
            raise RefusedError(401, b"{}")
        return {"kv_transfer_params": {"kvferry_model": "ab"}}


def test_a_model_that_one_client_may_not_ask_for_is_asked_for_another() -> None:
    """A refused key ends at its own request; the answer to the other one is then everybody's."""

    async def check() -> None:
        upstream, worker = Scripted(), Worker(BOTH)
        calls = [
            asyncio.ensure_future(upstream.model(worker, "m", headers)) for headers in (BAD, GOOD, GOOD, BAD)
        ]
        left = asyncio.ensure_future(upstream.model(worker, "m", GOOD))
        await asyncio.sleep(0)
        left.cancel()  # its client has gone
        upstream.may_answer.set()
        assert await asyncio.gather(*calls) == ["", "ab", "ab", ""]
        before = len(upstream.asked)
        assert await upstream.model(worker, "m", BAD) == "ab"
        assert len(upstream.asked) == before
        await upstream.close()

    asyncio.run(check())


@pytest.mark.parametrize("is_under_way", [True, False])
def test_a_word_of_a_model_does_not_outlive_its_worker(*, is_under_way: bool) -> None:
    """One server of both roles: it failed as prefill, so decode's is asked anew."""

    async def check() -> None:
        upstream, workers = Scripted(), Workers(OPTIONS, Costs(OPTIONS, None))
        (prefill,), (decode,) = workers.prefill, workers.decode
        first = asyncio.ensure_future(upstream.model(decode, "m", GOOD))
        await asyncio.sleep(0)
        if not is_under_way:
            upstream.may_answer.set()
            await first
        workers.failed(prefill)
        upstream.may_answer.set()
        assert await upstream.model(decode, "m", GOOD) == await first == "ab"
        assert len(upstream.asked) == 2
        await upstream.close()

    asyncio.run(check())


def test_an_answer_byte_by_byte_has_an_end_too() -> None:
    """A worker that says a little now and then; and what a client's key has beyond ASCII arrives."""
    heard: list[bytes] = []
    handlers: list[asyncio.Task[None] | None] = []

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def check() -> None:
        server = await asyncio.start_server(trickle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        upstream, worker = Upstream(OPTIONS), Worker(Place("slow", f"http://127.0.0.1:{port}"))
        headers = Headers(raw=[(b"authorization", b"Bearer \xe9")])
        async with asyncio.timeout(20):
            with pytest.raises(WorkerFailedError, match=r"no whole answer after 0\.2 s") as caught:
                await upstream.ask(worker, "/v1/completions", {}, headers, 0.2)
            assert caught.value.status == 504
            assert not await upstream.model(worker, None, headers)
            await upstream.close()
        server.close()
        await asyncio.gather(*filter(None, handlers))

    asyncio.run(check())
    assert all(b"Bearer \xe9\r\n" in request for request in heard)
