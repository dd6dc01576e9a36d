"""Pages in a real Chromium: they load without a network, draw, and say nothing on the console.

Needs Playwright's package and a Chromium on PATH: `make test-browser`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvferry.cli import run
from report_kit import write_all

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext

sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: make test-browser installs it")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")


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
