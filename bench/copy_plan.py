"""Time to plan a copy: 160 tensors x 256 blocks, scattered ids, several pairs of layouts.

    python bench/copy_plan.py [--repeats N] [--json]

``first`` is the first plan of a pair of layouts, ``plan`` a later one (the pair's route is kept),
``product`` finding its strided form, ``per_block`` what one line of Python a block would take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvferry.layout import BlockTable, CopyPlan, PoolLayout, copy_plan
from kvferry.layout.clusters import source_clusters
from kvferry.layout.match import places
from kvferry.layout.route import route

LAYERS, TOKENS, NUM_BLOCKS = 80, 256 * 16, 300
FORM = {"kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "block_size": 16, "num_blocks": NUM_BLOCKS}
PAIRS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "same layout": ({}, {}),
    "blocks 16 -> 64": ({}, {"block_size": 64}),
    "blocks 48 -> 32": ({"block_size": 48}, {"block_size": 32}),
    "per layer -> all layers joined": ({}, {"cross_layer": True, "joined_kv": True}),
    "HND 16 -> HND 32": ({"axis_order": "HND"}, {"axis_order": "HND", "block_size": 32}),
    "NHD -> HND": ({}, {"axis_order": "HND"}),
    "1 of 8 heads (TP 1 -> 8)": ({}, {"kv_heads": 1, "head_start": 3}),
}


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def forget() -> None:
    for cache in (route, source_clusters, places):
        cache.cache_clear()


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_ms": 1e3 * statistics.median(ordered),
        "p10_ms": 1e3 * ordered[len(ordered) // 10],
        "p90_ms": 1e3 * ordered[len(ordered) * 9 // 10],
    }


def measure(src_form: dict[str, object], dst_form: dict[str, object], repeats: int) -> dict[str, object]:
    rng = np.random.default_rng(0)
    layouts = [PoolLayout.paged(range(LAYERS), **{**FORM, **form}) for form in (src_form, dst_form)]
    tables = [
        [BlockTable(0, rng.permutation(NUM_BLOCKS)[: -(-TOKENS // layout.groups[0].block_size)])]
        for layout in layouts
    ]

    def plan() -> CopyPlan:
        return copy_plan(*layouts, *tables, TOKENS)

    def first() -> None:
        forget()
        plan()

    first_seconds = timed(first, max(3, repeats // 10))
    made = plan()
    plan_seconds = timed(plan, repeats)
    product_seconds = timed(lambda: plan().product, repeats)
    return {
        "pieces": made.num_pieces,
        "nbytes": made.total_nbytes,
        "strided_copies": None if made.product is None else len(made.product),
        "first": spread(first_seconds),
        "plan": spread(plan_seconds),
        "plan_and_product": spread(product_seconds),
    }


def per_block_loop() -> list[tuple[int, int, int]]:
    """The loop that the plan replaces, for scale: one tuple for each of 160 x 256 blocks."""
    block, region = 16 * 8 * 128 * 2, NUM_BLOCKS * 16 * 8 * 128 * 2
    ids = np.random.default_rng(0).permutation(NUM_BLOCKS)[:256].tolist()
    return [
        (tensor * region + a * block, tensor * region + a * block, block)
        for tensor in range(2 * LAYERS)
        for a in ids
    ]


def machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],  # noqa: S607 - the caller's git
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parent,
    ).stdout.strip()
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    options = parser.parse_args()
    pairs = {name: measure(*forms, options.repeats) for name, forms in PAIRS.items()}
    loop = spread(timed(per_block_loop, max(3, options.repeats // 10)))
    if options.json:
        print(json.dumps({"machine": machine(), "pairs": pairs, "per_block_loop": loop}, indent=2))
        return
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    print(
        f"{'pair':32} {'pieces':>9} {'strided':>8}   first ms   plan ms: median (p10 to p90)   with product"
    )
    for name, row in pairs.items():
        plan = row["plan"]
        print(
            f"{name:32} {row['pieces']:9} {row['strided_copies'] or '-':>8} {row['first']['median_ms']:10.2f}"
            f"   {plan['median_ms']:8.3f} ({plan['p10_ms']:.3f} to {plan['p90_ms']:.3f})"
            f" {row['plan_and_product']['median_ms']:14.3f}"
        )
    print(f"one line of Python a block, for scale: {loop['median_ms']:.2f} ms")


if __name__ == "__main__":
    main()
