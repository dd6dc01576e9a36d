"""Pages in a real Chromium: they load without a network, draw, and say nothing on the console.

Needs Playwright's package and a Chromium on PATH: `make test-browser`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shlex
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli import run
from kvferry.transfer import Ended, Tally, Timings, TransferRecord
from kvferry.web.app import LivePage
from kvferry.web.run import page_options, serving_page
from kvferry.web.view import View
from probe_kit import agents, probing
from report_kit import write_all
from serve_kit import Server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")
expect = sync_api.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_all(tmp_path_factory.mktemp("files"))


def watch(context: BrowserContext) -> tuple[Any, list[str]]:
    """A page of a context, and what it says on its console or fails with."""
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    return page, said


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_the_report_opens_without_a_network(
    browser: Browser, files: list[str], tmp_path: Path, scheme: Any, width: int
) -> None:
    """Every chart is drawn, nothing is asked of anybody, nothing is wider than a phone, keys reach all."""
    out = tmp_path / "report.html"
    assert run(["report", *files, "--out", str(out)]) == 0
    context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 800})
    page, said = watch(context)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(out.as_uri())
    charts = page.locator(".chart").count()
    page.wait_for_function(f"document.querySelectorAll('.chart .plot-container').length == {charts}")
    assert charts > 10
    assert (asked, said) == ([out.as_uri()], [])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first link of the contents
    assert page.evaluate("location.hash") == "#section-0"
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details[open] table").first.is_visible()
    page.screenshot(path=tmp_path / f"report-{scheme}.png", full_page=True)
    context.close()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 360)])
def test_the_live_page_follows_a_probe(browser: Browser, tmp_path: Path, scheme: Any, width: int) -> None:
    """Leases, transfers and rates show as they come, and that the agent is gone; keys reach all."""
    options = [["--listen", "127.0.0.1:0", "--name", name] for name in ("left", "right")]
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page, said = watch(context)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with agents(options[0], [*options[1], "--web", "127.0.0.1:0"]) as found:
        url = found[1].ready["web"]
        page.goto(url)
        link, recent = page.locator("#link"), page.locator("#recent .bar")
        expect(link).to_have_text("● live", timeout=20_000)
        assert page.locator("h1").inner_text() == "agent right"
        assert "Nothing has moved yet." in page.locator("#ways").inner_text()
        small = ("--bytes", "8MiB", "--seconds", "30", "--repeat", "5", "--transport", "tcp", "--json")
        with probing(*(agent.address for agent in found), *small) as process:
            # While it runs: what is held or moves, then what has ended, without a reload.
            page.locator("#leases td, #in-flight td").nth(2).wait_for(timeout=30_000)
            recent.nth(3).wait_for(timeout=30_000)
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0, stderr + stdout
        expect(page.locator("#leases")).to_contain_text("None.", timeout=20_000)
        ways = page.locator("#ways").inner_text()
        assert "left at tcp://127.0.0.1" in ways
        assert "GB/s" in ways or "MB/s" in ways
        assert page.locator("#alarm").is_hidden()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert page.locator("details[open] #facts").is_visible()
        assert "".join(said) == ""
        assert {each.removeprefix(url) for each in asked} == {"/", "/page.css", "/page.js", "/events"}
        page.screenshot(path=tmp_path / f"live-{scheme}.png", full_page=True)
    expect(link).to_contain_text("▲ no word for", timeout=20_000)
    context.close()


def test_the_live_page_sounds_its_alarm_and_shows_text_as_text(browser: Browser) -> None:
    """A fallback is said in words; a peer that calls itself a script is shown as letters."""
    tally = Tally()
    evil = "<script>document.title='x'</script><img src=x onerror=alert(1)>"
    record = TransferRecord(
        evil, "decode", "pull", f"{evil} at tcp://h:1", "nixl", "nixl-tcp", 1 << 20, 1, 1, 0, True,
        Timings(move=0.5, total=0.5),
    )  # fmt: skip
    tally(Ended(record))

    async def source() -> View:
        return View("w", 0.0, 1.0, (("fact", evil),), None, (), tally.now(), ("p: nixl went over tcp",))

    with serving(LivePage(source)) as url:
        context = browser.new_context()
        page, said = watch(context)
        page.goto(url)
        page.wait_for_selector("#alarm:visible")
        assert page.locator("#alarm").get_attribute("role") == "alert"
        assert "nixl went over tcp" in page.locator("#alarm").inner_text()
        assert evil in page.locator("#recent").inner_text()
        assert "▲ nixl" in page.locator("#ways").inner_text()
        assert page.title() == "w · kvferry"
        assert said == []
        context.close()


def test_a_page_too_many_says_so_and_comes_in_when_there_is_room(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused stream is not opened again by the browser itself; "connecting" for ever would be a lie."""
    monkeypatch.setattr("kvferry.web.app.MAX_STREAMS", 0)

    async def source() -> View:
        return View("w", 0.0, 1.0, (), None, (), Tally().now(), ())

    with serving(LivePage(source)) as url:
        context = browser.new_context()
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#link")).to_contain_text("▲ refused: too many pages", timeout=20_000)
        monkeypatch.setattr("kvferry.web.app.MAX_STREAMS", 1)
        expect(page.locator("#link")).to_have_text("● live", timeout=20_000)
        context.close()


@contextlib.contextmanager
def serving(page: LivePage) -> Iterator[str]:
    """A page served by a thread."""
    ready: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, str]] = queue.SimpleQueue()
    ended = asyncio.Event()

    async def serve() -> None:
        async with serving_page(page, page_options("127.0.0.1:0", None, None)) as url:
            ready.put((asyncio.get_running_loop(), url))
            await ended.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, url = ready.get(timeout=20)
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(20)


def test_the_live_page_of_a_server_follows_a_demo(browser: Browser) -> None:
    """`demo --serve`: decode's page shows the handoff of a request while it is open."""
    with Server("--serve", "--tokens", "5", verb="demo", model=("--model", "tiny")) as demo:
        context = browser.new_context()
        page, said = watch(context)
        page.goto(demo.line["live"][1])
        expect(page.locator("h1")).to_have_text("server decode", timeout=20_000)
        demo.stream(json.loads(shlex.split(demo.line["curl"])[-1]), "/v1/chat/completions")
        row = page.locator("#ways tbody tr")
        expect(row).to_contain_text("shm, mapped", timeout=20_000)
        expect(row).to_contain_text("prefill at shm://")
        expect(page.locator("#recent .bar")).to_have_count(1)
        assert said == []
        context.close()
