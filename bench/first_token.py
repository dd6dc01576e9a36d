"""What it saves to give prefill's token out at once. ``python bench/first_token.py [--json] [REPEATS]``

A prefill server, a decode server and two proxies before them, one for each way, on this machine, with the
tiny random model; the same prompts by turns, streamed. Given out at once, the first token does not wait
for the handoff, which then lies between the first token and the second. Needs the extra ``serve``.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

import httpx

PROMPT_TOKENS = 4096
COMMAND = [sys.executable, "-m", "kvferry"]


def start(stack: ExitStack, *arguments: str) -> str:
    """A server's URL; it ends with the stack."""
    process = subprocess.Popen(
        [*COMMAND, *arguments, "--json", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    )
    stack.callback(process.wait, 30)
    stack.callback(process.terminate)
    assert process.stdout is not None
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def gaps(client: httpx.Client, url: str, seed: int) -> tuple[float, float]:
    """Seconds to the first token, and from it to the second."""
    prompt = [(seed * 7919 + 31 * at) % 250 for at in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    return times[0] - started, times[1] - times[0]


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def shown(value: dict[str, float]) -> str:
    """The same for a person."""
    return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def main() -> None:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    repeats = numbers[0] if numbers else 15
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    with ExitStack() as stack:
        kv = ("--kv", "tcp://127.0.0.1:0", "--model", "tiny")
        prefill, decode = start(stack, "serve", *kv), start(stack, "serve", *kv)
        ends = ("--prefill", prefill, "--decode", decode)
        urls = {way: start(stack, "proxy", *ends, "--first-token", way) for way in found}
        client = stack.enter_context(httpx.Client())
        for seed in range(repeats + 1):
            for way, url in urls.items():
                seconds = gaps(client, url, seed)
                if seed:  # the first of each warms connections up
                    found[way].append(seconds)
    ratios = [a[0] / b[0] for a, b in zip(found["prefill"], found["decode"], strict=True)]
    said: dict[str, Any] = {
        "repeats": repeats,
        "prompt_tokens": PROMPT_TOKENS,
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "ttft_ratio": spread(ratios),
        "ways": {
            way: {
                "ttft": spread([one[0] for one in seen]),
                "second_token_gap": spread([one[1] for one in seen]),
            }
            for way, seen in found.items()
        },
    }
    if "--json" in sys.argv:
        print(json.dumps(said))
        return
    for way, one in said["ways"].items():
        print(f"first token from {way}")
        print(f"  TTFT            {shown(one['ttft'])} s")
        print(f"  to the second   {shown(one['second_token_gap'])} s")
    print(f"TTFT ratio        {shown(said['ttft_ratio'])}, {repeats} pairs")


if __name__ == "__main__":
    main()
