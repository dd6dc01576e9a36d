"""What giving out prefill's token at once saves.

    python bench/first_token.py [--vllm] [--json | --out FILE] [REPEATS]

A prefill server, a decode server and two proxies before them, one for each way, on this machine, with the
tiny random model; the same prompts by turns, streamed. Given out at once, the first token does not wait
for the handoff, which then lies between the first token and the second. Needs the extra ``serve``.

``--vllm``: the workers are vLLM's API servers with ``KVFerryConnector`` (a tiny random Llama, CPU, float32);
``make .venv-vllm/installed`` makes a Python that has it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from transports import machine

IS_VLLM = "--vllm" in sys.argv
PROMPT_TOKENS = 4000 if IS_VLLM else 4096  # of 4096, which is all that the model of vLLM's tests has
TESTS = Path(__file__).parent.parent / "tests"
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


def vllm_servers(stack: ExitStack) -> tuple[str, str]:
    """The URLs of a prefill and a decode server of vLLM."""
    sys.path.insert(0, str(TESTS))
    from vllm_server import Server

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    (folder / "model").mkdir()
    subprocess.run([sys.executable, str(TESTS / "vllm_model.py"), str(folder / "model")], check=True)
    kv: dict[str, Any] = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.engines.vllm",
        "kv_connector_extra_config": {"same_model": True},
    }
    servers = []
    for core, role in enumerate(("kv_producer", "kv_consumer")):
        options = {"no-enable-prefix-caching": None, "max-model-len": 4096, "served-model-name": "m"}
        servers.append(Server(folder / "model", folder / role, kv | {"kv_role": role}, core, **options))
        stack.callback(servers[-1].kill)
    for server in servers:
        server.wait()
    return servers[0].url, servers[1].url


def gaps(client: httpx.Client, url: str, seed: int, expected: str) -> tuple[float, float]:
    """Seconds to the first event, and from it to the second (vLLM may write two tokens at once)."""
    prompt = [(seed * 7919 + 31 * at) % 250 + 5 * IS_VLLM for at in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True, "stream": True}
    if IS_VLLM:  # one letter or digit each: a random model's bytes are seldom whole characters
        prompt[-1] = 70
        body |= {"allowed_token_ids": list(range(36, 97)), "model": "m"}
    started = time.perf_counter()
    with client.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        way = answer.headers["x-kvferry-first-token"]
        times = [time.perf_counter() for line in answer.iter_lines() if line.startswith("data: {")]
    if not times or not way.startswith(expected):
        raise RuntimeError(f"the first token was {way!r}, of {len(times)} events")
    return times[0] - started, times[min(1, len(times) - 1)] - times[0]


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": median(values), "low": min(values), "high": max(values)}


def shown(value: dict[str, float]) -> str:
    """The same for a person."""
    return f"{value['median']:.3f} ({value['low']:.3f} to {value['high']:.3f})"


def main() -> None:
    numbers = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    repeats = numbers[0] if numbers else 15
    facts = machine()
    found: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    with ExitStack() as stack:
        if IS_VLLM:
            prefill, decode = vllm_servers(stack)
        else:
            kv = ("--kv", "tcp://127.0.0.1:0", "--model", "tiny")
            prefill, decode = start(stack, "serve", *kv), start(stack, "serve", *kv)
        ends = ("--prefill", prefill, "--decode", decode)
        urls = {way: start(stack, "proxy", *ends, "--first-token", way) for way in found}
        client = stack.enter_context(httpx.Client())
        for seed in range(repeats + 1):
            for way, url in urls.items():
                seconds = gaps(client, url, seed, way)
                if seed:  # the first of each warms connections up
                    found[way].append(seconds)
    ratios = [a[0] / b[0] for a, b in zip(found["prefill"], found["decode"], strict=True)]
    said: dict[str, Any] = {
        "bench": "first_token",
        "repeats": repeats,
        "engine": "vllm" if IS_VLLM else "reference",
        "prompt_tokens": PROMPT_TOKENS,
        "machine": facts | {"load_at_end": os.getloadavg()[0]},
        "ttft_ratio": spread(ratios),
        "ttft_saved_seconds": spread([b[0] - a[0] for a, b in zip(*found.values(), strict=True)]),
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
    if "--out" in sys.argv:
        place = Path(sys.argv[sys.argv.index("--out") + 1])
        place.write_text(json.dumps(said, indent=1) + "\n", "utf-8")
    for way, one in said["ways"].items():
        print(f"first token from {way}")
        print(f"  TTFT            {shown(one['ttft'])} s")
        print(f"  to the second   {shown(one['second_token_gap'])} s")
    print(f"TTFT ratio        {shown(said['ttft_ratio'])}, {repeats} pairs")
    print(f"TTFT saved        {shown(said['ttft_saved_seconds'])} s")


if __name__ == "__main__":
    main()
