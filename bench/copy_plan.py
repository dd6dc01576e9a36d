"""Time to plan a copy, 160 tensors x 256 blocks with scattered ids, and what the strided form gains.

    python bench/copy_plan.py [--repeats N] [--json]

Plans: ``first`` is the first plan of a pair of layouts, ``plan`` a later one (the pair's route is
kept), each then with its strided form. For scale: one line of Python a block. Copies: 256 MiB of
scattered blocks inside one process, by strided copies and by one slice assignment a piece, as ratios
to ``numpy.copyto`` of as many bytes, alternated with it; both results are compared byte for byte.
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


def copies(block_nbytes: int, repeats: int) -> dict[str, float]:
    """Median ratios to copyto: how fast the plan's two forms move 256 MiB of scattered blocks."""
    total = 256 << 20
    count = total // (2 * LAYERS) // block_nbytes
    layout = PoolLayout.paged(
        range(LAYERS),
        kv_heads=1,
        head_dim=block_nbytes // 16,
        dtype="uint8",
        block_size=16,
        num_blocks=2 * count,
    )
    rng = np.random.default_rng(0)
    tables = [[BlockTable(0, rng.permutation(2 * count)[:count])] for _ in range(2)]
    plan = copy_plan(layout, layout, *tables, count * 16)
    src = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
    by_product, by_pieces = np.zeros_like(src), np.zeros_like(src)
    half = np.zeros(plan.total_nbytes, np.uint8)  # touched by the first repetition, which is dropped

    def strided() -> None:
        for to, of in plan.product.views(src, by_product):
            np.copyto(to, of)

    def pieces() -> None:
        rows = zip(plan.src_offset.tolist(), plan.dst_offset.tolist(), plan.nbytes.tolist(), strict=True)
        for a, b, n in rows:
            by_pieces[b : b + n] = src[a : a + n]

    forms = {"strided": strided, "pieces": pieces}
    ratios: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeats + 1):
        for name, form in forms.items():
            base = timed(lambda: np.copyto(half, src[: half.size]), 1)[0]
            ratios[name].append(base / timed(form, 1)[0])
    assert np.array_equal(by_product, by_pieces)
    return {name: statistics.median(found[1:]) for name, found in ratios.items()}


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
        ["git", "rev-parse", "--short", "HEAD"],
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
    moved = {f"{size >> 10} KiB": copies(size, 10) for size in (4 << 10, 32 << 10)}
    if options.json:
        found = {"machine": machine(), "pairs": pairs, "per_block_loop": loop, "ratio_to_copyto": moved}
        print(json.dumps(found, indent=2))
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
    for size, ratio in moved.items():
        print(
            f"{size} blocks, ratio to copyto: strided {ratio['strided']:.2f}, by piece {ratio['pieces']:.2f}"
        )


if __name__ == "__main__":
    main()
