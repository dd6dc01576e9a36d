"""Requests a minute that the simulator replays on one core. ``python bench/simulate.py [--json] [REQUESTS]``

Claim in the documentation: a million a minute, with memory that does not grow with the trace. The
fleet has 8 prefill and 8 decode instances on 16 nodes; Poisson arrivals, log-normal prompts,
geometric outputs. Time is that of this process (CPU), so that a busy machine tells the same.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator

import numpy as np

from kvferry.model import load_shape
from kvferry.plan.fleet import Fleet, Instance, Role, Spot
from kvferry.plan.payload import PayloadTable, PoolFormat
from kvferry.plan.public_profiles import public_profile
from kvferry.plan.route import Policy
from kvferry.plan.sim_metrics import Targets
from kvferry.plan.simulate import simulate
from kvferry.plan.tier import TierCost
from kvferry.plan.trace import TraceRow

REQUESTS = 200_000
CHUNK = 8192
RATE = 30.0


def fleet() -> Fleet:
    """Eight and eight instances of Llama-2-70B on H100, each on its own node."""
    engine = public_profile("splitwise-llama2-70b-h100-tp8")
    instances = [
        Instance(f"{role}-{n}", role, engine, Spot(f"{role}{n}", f"{role}{n}"), pool_tokens=400_000)
        for role in (Role.PREFILL, Role.DECODE)
        for n in range(8)
    ]
    tiers = (TierCost.typed(1e-5, 1e-6, 300e9), TierCost.typed(1e-3, 2e-6, 47e9))
    return Fleet(tuple(instances), tiers, node_rate=100e9)


def requests(count: int) -> Iterator[TraceRow]:
    """Drawn as they are asked for, so that the trace itself takes no memory."""
    rng = np.random.default_rng(1)
    now = 0.0
    for first in range(0, count, CHUNK):
        size = min(CHUNK, count - first)
        gaps = rng.exponential(1 / RATE, size).tolist()
        prompts = rng.lognormal(6.8, 0.8, size).astype(int).clip(16, 8000).tolist()
        outputs = rng.geometric(1 / 200, size).tolist()
        for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
            now += gap
            yield TraceRow(now, prompt, output)


def peak_mebibytes() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    counts = [int(text) for text in sys.argv[1:] if text.isdigit()]
    count = counts[0] if counts else REQUESTS
    payload = PayloadTable(load_shape("shape:80x8x128"), PoolFormat())
    simulate(fleet(), requests(count // 10), payload, targets=Targets(1.0, 0.1))
    after_tenth = peak_mebibytes()
    results = {}
    for policy in (Policy.ROUND_ROBIN, Policy.LOAD, Policy.NETWORK_COST):
        start = time.process_time()
        found = simulate(fleet(), requests(count), payload, policy=policy, targets=Targets(1.0, 0.1))
        seconds = time.process_time() - start
        results[str(policy)] = {
            "requests_per_minute": round(60 * found.requests / seconds),
            "seconds": round(seconds, 2),
            "mean_ttft_seconds": found.ttft.mean,
        }
    record = {
        "bench": "simulate",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "requests": count,
        "peak_mebibytes_after_a_tenth": round(after_tenth, 1),
        "peak_mebibytes": round(peak_mebibytes(), 1),
        "results": results,
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(record))
        return
    print(f"{record['machine']}, {record['date']}, {count:,} requests, 8 prefill and 8 decode instances")
    for name, result in results.items():
        print(f"{name:14} {result['requests_per_minute']:12,} requests a minute of CPU")
    print(f"peak memory {record['peak_mebibytes']} MiB; after a tenth of the requests {after_tenth:.1f} MiB")


if __name__ == "__main__":
    main()
