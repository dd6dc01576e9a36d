"""The live page over real sockets: who may look, what is streamed, and that it ends when its worker does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvferry.cli import run
from kvferry.errors import KVFerryError
from kvferry.link import Mode
from kvferry.probe import AgentSite, Payload, Room, sizes_up_to
from kvferry.probe import words as w
from kvferry.transfer import Ended, Tallied, Tally, Timings, TransferRecord
from kvferry.transport.certificates import init_authority, issue
from kvferry.transport.security import Identity
from kvferry.web.agent import agent_with_page
from kvferry.web.app import MAX_STREAMS, LivePage
from kvferry.web.run import page_options, serving_page
from kvferry.web.view import View

SMALL = Payload(256 << 10, 16 << 10)
ROOM = Room.of(sizes_up_to(SMALL))
MANY = httpx.Limits(max_connections=None)
EVERYWHERE = "0.0.0.0"  # noqa: S104 - the address that needs a token
TOKEN = "0123456789abcdef"  # noqa: S105 - it opens nothing


@contextlib.asynccontextmanager
async def site_at(address: str) -> AsyncIterator[AgentSite]:
    """An agent with a probe open."""
    site = await AgentSite.connect(address)
    try:
        await site.open(60.0, room=ROOM, transports=("tcp",), integrity=True)
        yield site
    finally:
        await site.close()


async def next_view(lines: AsyncIterator[str]) -> dict[str, Any]:
    async for line in lines:
        if line.startswith("data: "):
            view: dict[str, Any] = json.loads(line[6:])
            return view
    raise AssertionError("the stream has ended")


@pytest.mark.usefixtures("nothing_left")
def test_the_page_follows_what_happens_and_ends_with_its_agent(capfd: pytest.CaptureFixture[str]) -> None:
    """A lease, then a transfer that went well and one that failed show in the open stream and in /metrics."""

    async def check() -> None:
        options = {"name": "n", "process": False}
        page = page_options("127.0.0.1:0", None, None)
        async with contextlib.AsyncExitStack() as looking, contextlib.AsyncExitStack() as stack:
            two = [
                await stack.enter_async_context(agent_with_page("tcp://127.0.0.1:0", options, page))
                for _ in range(2)
            ]
            url = two[1][1]
            client = await looking.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20))
            # No probe, no endpoint: an alarm on endpoints that are down has nothing to say.
            assert "kvferry_endpoint_up" not in (await client.get("/metrics")).text
            giver, taker = [await stack.enter_async_context(site_at(agent.address)) for agent, _ in two]
            answer = await looking.enter_async_context(client.stream("GET", "/events"))
            lines = answer.aiter_lines()
            assert (await next_view(lines))["tallied"] == {"ways": [], "recent": []}
            fields = {"mode": Mode.PULL, "payload": SMALL, "slot": 0}
            (ticket,) = (await giver.call(w.HoldCall, 20.0, **fields, count=1, seconds=30.0)).tickets
            move = fields | {"tickets": (ticket,), "transport": "tcp", "seconds": 10.0}
            await taker.call(w.MoveCall, 20.0, **move)
            with pytest.raises(KVFerryError):  # a ticket works once
                await taker.call(w.MoveCall, 20.0, **move)
            async with asyncio.timeout(20):
                while len((view := await next_view(lines))["tallied"]["recent"]) < 2:
                    pass
            failed, well = view["tallied"]["recent"]
            assert (well["error"], well["record"]["nbytes"]) == ("", SMALL.moved_nbytes)
            assert well["record"]["timings"]["move"] > 0
            assert failed["error"]
            assert view["stats"]["peers"] == 1
            text = (await client.get("/metrics")).text
            assert 'outcome="ok",path="tcp",role="decode",transport="tcp"} 1.0' in text
            assert "kvferry_endpoint_up 1.0" in text
            assert (await client.post("/now")).status_code == 405
            refused = await client.get("/now", headers={"Host": "rebound.example:80"})
            assert (refused.status_code, "this host only" in refused.text) == (403, True)
            csp = (await client.get("/")).headers["content-security-policy"]
            assert "default-src 'none'" in csp
            assert "unsafe" not in csp

    asyncio.run(check())
    # The stream was open to the end; the server need not have cut it off, of which it would complain.
    assert capfd.readouterr().err == ""


def test_off_loopback_it_wants_a_token_and_tls(tmp_path: Path) -> None:
    """TLS with the agent's certificate; the token as a bearer or a password, anything else is 401."""
    init_authority(tmp_path)
    identity = Identity.load(issue(tmp_path, "node", hosts=("127.0.0.1",)))
    (tmp_path / "token").write_text(TOKEN + "\n")

    async def check() -> None:
        page = page_options(f"{EVERYWHERE}:0", tmp_path / "token", identity)
        async with agent_with_page("tcp://127.0.0.1:0", {"tls": identity}, page) as (_, url):
            verify = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
            async with httpx.AsyncClient(
                base_url=url.replace(EVERYWHERE, "127.0.0.1"), verify=verify
            ) as client:

                async def status(value: str | bytes | None, path: str = "/now") -> int:
                    headers = {} if value is None else {"Authorization": value}
                    return (await client.get(path, headers=headers)).status_code

                wrong = (None, "", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Basic !", TOKEN)
                for value in (*wrong, b"Bearer \xff", "Basic " + "OjAxMjM="):
                    assert await status(value) == 401, value
                assert await status(None, "/metrics") == await status(None, "/page.js") == 401
                assert await status(f"Bearer {TOKEN}") == 200
                assert (await client.get("/", auth=("anybody", TOKEN))).status_code == 200
                asked = await client.get("/")
                assert asked.headers["www-authenticate"].startswith("Basic realm=")

    asyncio.run(check())


def test_a_renewed_certificate_is_shown_without_a_restart(tmp_path: Path) -> None:
    """The next connection has it; a file that is none changes nothing."""
    init_authority(tmp_path)
    pem = issue(tmp_path, "node", hosts=("127.0.0.1",))
    identity = Identity.load(pem)
    (tmp_path / "token").write_text(TOKEN)

    async def source() -> View:
        return View("w", 0.0, 1.0, (), None, (), Tallied(), ())

    async def check() -> None:
        page = page_options(f"{EVERYWHERE}:0", tmp_path / "token", identity)
        async with serving_page(LivePage(source, token=TOKEN), page) as url:

            async def shown() -> str:
                place = ("127.0.0.1", int(url.rpartition(":")[2]))
                return await asyncio.to_thread(ssl.get_server_certificate, place, timeout=20)

            first = await shown()
            assert await shown() == first
            issue(tmp_path, "node", hosts=("127.0.0.1",))
            second = await shown()
            assert second != first
            assert second.strip() in pem.read_text()
            pem.write_text("half a file")
            assert await shown() == second

    asyncio.run(check())


def test_pages_that_are_open_at_once_are_bounded() -> None:
    """One more than the most is told so; one that closes makes room."""

    async def check() -> None:
        async def source() -> View:
            return View("w", 0.0, 1.0, (), None, (), Tallied(), ())

        page = LivePage(source)
        async with contextlib.AsyncExitStack() as stack:
            url = await stack.enter_async_context(serving_page(page, page_options("127.0.0.1:0", None, None)))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, limits=MANY))
            opened = [client.send(client.build_request("GET", "/events"), stream=True) for _ in range(20)]
            answers = await asyncio.gather(*opened)
            taken = [answer for answer in answers if answer.status_code == 200]
            assert len(taken) == MAX_STREAMS
            assert {answer.status_code for answer in answers} == {200, 503}
            for answer in answers:
                await answer.aclose()
            async with asyncio.timeout(20):
                while True:
                    async with client.stream("GET", "/events") as answer:
                        if answer.status_code == 200:
                            break

    asyncio.run(check())


async def _ended(reader: asyncio.StreamReader) -> bool:
    """Whether the server has ended this connection, by its own word or by a reset."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(1 << 16):
            pass
    return True


@pytest.mark.usefixtures("nothing_left")
def test_clients_that_neither_ask_nor_read_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent ones, half a head, half a second head, an answer not read; beyond the most, closed at once."""
    monkeypatch.setattr("kvferry.web.run.MAX_CONNECTIONS", 4)
    monkeypatch.setattr("kvferry.serve.patience.PATIENCE_SECONDS", 0.5)
    get = b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    slow = (b"", get, b"POST /now HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n1")

    async def source() -> View:
        return View("w", 0.0, 1.0, (), None, (), Tallied(), ())

    async def check() -> None:
        large = b"x" * (64 << 20)  # more than the kernel holds
        page = LivePage(source, lambda: large)
        async with serving_page(page, page_options("127.0.0.1:0", None, None)) as url, asyncio.timeout(30):
            port = int(url.rpartition(":")[2])
            writers = []

            async def send(data: bytes) -> asyncio.StreamReader:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writers.append(writer)
                writer.write(data)
                return reader

            async def answers() -> bool:
                answer = await send(b"GET /now HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")
                with contextlib.suppress(ConnectionError):
                    return (await answer.read()).startswith(b"HTTP/1.1 200")
                return False

            unread = await send(get + b"\r\n")  # first, so that its slot is its own
            readers = [await send(data) for data in slow]
            assert await _ended(await send(b"")), "a fifth connection, while four are open"
            assert all([await _ended(reader) for reader in readers])
            monkeypatch.setattr("kvferry.serve.patience.PATIENCE_SECONDS", 60.0)
            _ = [await send(b"") for _ in range(3)]
            while not await answers():  # until the slot of what nobody reads is free too
                pass
            received = 0
            with contextlib.suppress(ConnectionError):
                while part := await unread.read(1 << 20):
                    received += len(part)
            assert received < len(large)
            for writer in writers:
                writer.close()

    asyncio.run(check())


@pytest.mark.usefixtures("nothing_left")
def test_a_client_that_stalls_within_the_tls_handshake_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Having said nothing, or a part of its hello."""
    monkeypatch.setattr("kvferry.web.run.HANDSHAKE_SECONDS", 0.5)
    init_authority(tmp_path)
    identity = Identity.load(issue(tmp_path, "node", hosts=("127.0.0.1",)))
    (tmp_path / "token").write_text(TOKEN)

    async def source() -> View:
        return View("w", 0.0, 1.0, (), None, (), Tallied(), ())

    async def check() -> None:
        page = page_options(f"{EVERYWHERE}:0", tmp_path / "token", identity)
        async with serving_page(LivePage(source, token=TOKEN), page) as url, asyncio.timeout(20):
            place = ("127.0.0.1", int(url.rpartition(":")[2]))
            stalled = [await asyncio.open_connection(*place) for _ in range(2)]
            stalled[1][1].write(b"\x16\x03\x01\x02\x00\x01\x00")
            for reader, writer in stalled:
                assert await _ended(reader)
                writer.close()

    asyncio.run(check())


@pytest.mark.slow
def test_a_frozen_transfer_process_is_told_within_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page and metrics answer nevertheless; ten that look wait for one answer, not each for its own."""
    monkeypatch.setattr("kvferry.transfer.endpoint.LOOK_SECONDS", 0.5)

    async def check() -> None:
        page = page_options("127.0.0.1:0", None, None)
        async with contextlib.AsyncExitStack() as stack:
            agent, url = await stack.enter_async_context(agent_with_page("tcp://127.0.0.1:0", {}, page))
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, limits=MANY))
            site = await stack.enter_async_context(site_at(agent.address))
            pid = (await client.get("/now")).json()["stats"]["pid"]
            assert pid in [child.pid for child in psutil.Process().children()]
            os.kill(pid, signal.SIGSTOP)
            try:
                asked = {thread.name for thread in threading.enumerate()}
                views = await asyncio.gather(*(client.get("/now") for _ in range(10)))
                waited = {thread.name for thread in threading.enumerate()} - asked
                text = (await client.get("/metrics")).text
                await site.call(w.PingCall, 20.0)
            finally:
                os.kill(pid, signal.SIGCONT)
            assert {view.json()["stats"] for view in views} == {None}
            assert "says nothing" in dict(views[0].json()["facts"])["last error"]
            assert "kvferry_endpoint_up 0.0" in text
            assert len(waited) <= 1

    asyncio.run(check())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--web", "0.0.0.0:0"],
            "web: 0.0.0.0 can be reached from other hosts, so the page needs --web-token",
        ),
        (["--web", "0.0.0.0:0", "--web-token", "TOKEN"], "needs --web-token FILE and --cert FILE"),
        (["--web", "nowhere"], "web: 'nowhere' does not read HOST:PORT"),
        (["--web-token", "TOKEN"], "web_token: it is of a page; give --web too"),
        (["--web", "127.0.0.1:0", "--web-token", "SHORT"], "5 letters, fewer than 16"),
        (["--web", "127.0.0.1:0", "--web-token", "WORDS"], "one word of ASCII"),
        (["--web", "127.0.0.1:0", "--web-token", "GONE"], "No such file"),
    ],
)
def test_what_is_not_safe_is_refused(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, exit 2, and nothing was opened."""
    for name, text in (("TOKEN", TOKEN), ("SHORT", "short"), ("WORDS", "two words of more than 16")):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / each) if each.isupper() else each for each in arguments]
    assert run(["agent", "--listen", "tcp://127.0.0.1:0", *files]) == 2
    out = capsys.readouterr()
    assert (out.out, out.err.count("\n")) == ("", 1)
    assert said in out.err


def test_a_fallback_is_told_as_one() -> None:
    """Better transports that did not work, and a fast network's library that went over tcp; not plain tcp."""
    tally = Tally()
    ways: dict[str, tuple[str, tuple[str, ...]]] = {
        "tcp": ("tcp", ()),
        "nixl-tcp": ("nixl", ()),
        "mapped": ("shm", ()),
        "sealed": ("tcp", ("shm: gone",)),
    }
    for path, (transport, passed_over) in ways.items():
        record = TransferRecord(
            "r", "decode", "pull", "p at tcp://h:1", transport, path, 8, 1, 1, 0, True, Timings(total=2.0),
            passed_over=passed_over,
        )  # fmt: skip
        tally(Ended(record))
    found = {each.path: each.fallback for each in tally.now().ways}
    assert found == {
        "tcp": "",
        "nixl-tcp": "nixl went over tcp: path nixl-tcp",
        "mapped": "",
        "sealed": "tcp instead of shm: gone",
    }
