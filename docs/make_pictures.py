"""Write ``docs/img/live.png`` and ``docs/img/report.png``: real pages of a real run on this machine.

    make pictures

Two agents are probed while the live page of one is open, then the report of that measurement and of one
answer of `kvferry check` is opened. Needs Playwright and a Chromium on PATH. Each run measures anew, so the
figures in the pictures are this machine's at that hour.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parent / "img"
KVFERRY = [sys.executable, "-m", "kvferry"]
MODEL, TOKENS = "shape:16x8x64", 2048
WIDTH = 1080


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("needs chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        live(browser, Path(folder))
        report(browser, Path(folder))
        browser.close()


def live(browser: Browser, folder: Path) -> None:
    """An agent while it is probed; the measurement stays in ``folder``."""
    names = ("node-a", "node-b")
    agents = [agent(name, *(["--web", "127.0.0.1:0"] if name == "node-b" else [])) for name in names]
    try:
        ready = [json.loads(each.stdout.readline()) for each in agents if each.stdout is not None]
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        page.goto(ready[1]["web"])
        # A little longer than what is asked later, so that nothing is read beyond what was measured.
        payload = ["--model", MODEL, "--tokens", str(2 * TOKENS), "--transport", "tcp"]
        probe = subprocess.Popen(
            [*KVFERRY, "probe", *(each["address"] for each in ready), *payload, "--out", "links.json"],
            stdout=subprocess.DEVNULL,
            cwd=folder,
        )
        # The payloads come last and are the largest: a row that moves shows bytes under way.
        page.locator("#ways tbody tr").nth(3).wait_for(timeout=120_000)
        page.locator("#in-flight td").nth(2).wait_for(timeout=120_000)
        page.screenshot(path=IMAGES / "live.png")
        if probe.wait(300):
            sys.exit("the probe failed")
    finally:
        for each in agents:
            each.send_signal(signal.SIGTERM)
            each.wait(30)


def agent(name: str, *more: str) -> subprocess.Popen[str]:
    command = [*KVFERRY, "agent", "--json", "--listen", "tcp://127.0.0.1:0", "--name", name, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def report(browser: Browser, folder: Path) -> None:
    """One answer: where the time to the first token goes, and which requests a move pays for."""
    page_file = folder / "report.html"
    question = ["--prompt-tokens", str(TOKENS), "--ttft", "250ms", "--prefill-seconds", "0.1", "--json"]
    pair = ["--link", "links.json", "--from-node", "node-a", "--to-node", "node-b"]
    check = subprocess.run(
        [*KVFERRY, "check", MODEL, *pair, *question], stdout=subprocess.PIPE, cwd=folder, check=False
    )
    (folder / "check.json").write_bytes(check.stdout)
    command = [*KVFERRY, "report", "links.json", "check.json", "--out", "report.html"]
    subprocess.run(command, check=True, cwd=folder)
    page = browser.new_page(viewport={"width": WIDTH, "height": 800})
    page.goto(page_file.as_uri())
    charts = page.locator("#section-1 .chart")
    charts.last.locator(".plot-container").wait_for()
    page.locator("#section-1").screenshot(path=IMAGES / "report.png")


if __name__ == "__main__":
    main()
