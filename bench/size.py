"""How many sizes a second ``kv_size`` gives. ``python bench/size.py [--json]``

Claim in the documentation: at least 10,000 a second for any model, which lets a planner ask for
every request of a trace. Several runs of a fixed count; the median and the range are printed.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import statistics
import sys
import time

from kvferry.model import ModelShape
from kvferry.size import kv_size

RUNS = 7
CALLS = 5_000
MODELS: dict[str, dict[str, object]] = {
    "llama-3.1-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "hidden_size": 8192,
        "dtype": "bfloat16",
    },
    "gemma-3-27b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "dtype": "bfloat16",
    },
    "deepseek-v4-flash": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4],
        "dtype": "bfloat16",
    },
}


def sizes_per_second(shape: ModelShape) -> list[float]:
    """One figure a run; every call asks about another number of tokens."""
    rates = []
    for _ in range(RUNS):
        start = time.perf_counter()
        for tokens in range(1000, 1000 + CALLS):
            kv_size(shape, tokens, cached_tokens=512, tp=8, pp=4, block_size=16)
        rates.append(CALLS / (time.perf_counter() - start))
    return rates


def main() -> None:
    results = {}
    for name, config in MODELS.items():
        rates = sizes_per_second(ModelShape.from_config(config))
        results[name] = {
            "sizes_per_second_median": round(statistics.median(rates)),
            "sizes_per_second_min": round(min(rates)),
            "sizes_per_second_max": round(max(rates)),
        }
    record = {
        "bench": "size",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "runs": RUNS,
        "calls_per_run": CALLS,
        "results": results,
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(record))
        return
    print(f"{record['machine']}, {record['date']}, {RUNS} runs of {CALLS} calls (tp 8, pp 4, blocks of 16)")
    for name, result in results.items():
        low, high = result["sizes_per_second_min"], result["sizes_per_second_max"]
        print(f"{name:20} {result['sizes_per_second_median']:8,} sizes/s  ({low:,} to {high:,})")


if __name__ == "__main__":
    main()
