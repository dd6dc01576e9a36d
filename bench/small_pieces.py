"""Where gathering small pieces first beats copying them from where they lie, and what a conversion costs.

    python bench/small_pieces.py [--nbytes 64MiB] [--repeat 7] [--json FILE]

Scattered pieces of one size go from one pool into another, first straight (``writev`` and ``readv`` for
each piece over tcp, one NumPy copy each over mapped memory), then through the staging buffers on both
sides. Rates are ratios to one-thread ``numpy.copyto`` of as many contiguous bytes, alternated with it;
by the clock over tcp, by the thread's own processor time elsewhere, which other work disturbs less.
The thresholds in use stand beside: ``SMALL_NBYTES`` (tcp) and ``LARGE_NBYTES`` (mapped). Then the two
halves of each conversion, as bytes on the wire a second over that of the copy. Bytes are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from kvferry.layout import (
    BlockTable,
    Conversions,
    Extent,
    PoolLayout,
    WireFormat,
    cut_windows,
    numpy_dtype,
    pack,
    unpack,
    wire_form,
)
from kvferry.transport import create_shared, frames, shared_copy
from kvferry.transport.channel import Channel
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part
from kvferry.units import parse_bytes

SIZES = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768]
FORMS = {"straight": 0, "staged": 1 << 40}  # what the threshold is set to


def patience() -> Patience:
    return Patience(time.monotonic() + 120, (), "bench")


def pieces(size: int, total: int, seed: int) -> np.ndarray:
    """Offsets of scattered pieces that never touch, in a pool of twice the bytes."""
    return np.random.default_rng(seed).permutation(total // size).astype(np.int64) * 2 * size


def over_tcp(size: int, total: int, repeat: int) -> dict[str, list[float]]:
    """Seconds of each form between two processes over loopback, forms by turns."""
    pools = [create_shared(2 * total) for _ in range(2)]
    source, target = (pool.array for pool in pools)
    source.view(np.uint64)[:] = np.arange(source.nbytes // 8, dtype=np.uint64)
    offsets, sizes = [pieces(size, total, seed) for seed in (1, 2)], np.full(total // size, size)
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        channel = Channel(socket.create_connection(listener.getsockname()))
        for _ in range(repeat + 1):
            for threshold in FORMS.values():
                with mock.patch.object(frames, "SMALL_NBYTES", threshold):
                    table = frames.Frames(target, offsets[1], sizes)
                    frames.receive_frames(channel, table, patience(), None)
                    channel.write(patience(), b"done")
        os._exit(0)
    accepted, _ = listener.accept()
    channel, found = Channel(accepted), {form: [] for form in FORMS}
    for _ in range(repeat + 1):
        for form, threshold in FORMS.items():
            with mock.patch.object(frames, "SMALL_NBYTES", threshold):
                started = time.perf_counter()
                frames.send_frames(channel, frames.Frames(source, offsets[0], sizes), patience())
                channel.read(4, patience())
                found[form].append(time.perf_counter() - started)
    os.waitpid(child, 0)
    compare(source, target, offsets, size)
    channel.close()
    listener.close()
    for pool in pools:
        pool.close()
    return {form: seconds[1:] for form, seconds in found.items()}


def mapped(size: int, total: int, repeat: int) -> dict[str, list[float]]:
    """Seconds of each form from one pool into another of this process, forms by turns."""
    source, target = np.zeros(2 * total, np.uint8), np.zeros(2 * total, np.uint8)
    source.view(np.uint64)[:] = np.arange(source.nbytes // 8, dtype=np.uint64)
    offsets, sizes = [pieces(size, total, seed) for seed in (1, 2)], np.full(total // size, size)
    part = Part(offsets[1], offsets[0], sizes, np.array([total]), np.array([0]))
    found: dict[str, list[float]] = {form: [] for form in FORMS}
    for _ in range(repeat + 1):
        for form, threshold in FORMS.items():
            with mock.patch.object(shared_copy, "LARGE_NBYTES", threshold):
                started = time.thread_time()
                shared_copy.copy_part(shared_copy.Mapped(source), part, target, lambda: None, integrity=False)
                found[form].append(time.thread_time() - started)
    compare(source, target, offsets, size)
    return {form: seconds[1:] for form, seconds in found.items()}


def compare(source: np.ndarray, target: np.ndarray, offsets: list[np.ndarray], size: int) -> None:
    rows = [pool.reshape(-1, size)[at // size] for pool, at in zip((source, target), offsets, strict=True)]
    assert np.array_equal(*rows), "wrong bytes"


PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], Conversions]] = {
    "float32 -> bfloat16": ({}, {"dtype": "bfloat16"}, Conversions(lossy=True)),
    "bfloat16 -> float32": ({"dtype": "bfloat16"}, {}, Conversions()),
    "float32 -> float16": ({}, {"dtype": "float16"}, Conversions(lossy=True)),
    "keys transposed": ({}, {"axis_order": "HND", "transposed_keys": True}, Conversions()),
    "bfloat16, wire float8": (
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        Conversions(wire=WireFormat.FP8),
    ),
    "bfloat16, wire int8": ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, Conversions(wire=WireFormat.INT8)),
}


def convert(name: str, total: int, repeat: int) -> dict[str, Any]:
    """Seconds of packing and of unpacking all windows of one request of about ``total`` pool bytes."""
    src_form, dst_form, allowed = PAIRS[name]
    form = {"kv_heads": 8, "head_dim": 128, "dtype": "float32", "block_size": 16}
    count = max(1, total // (2 * 4 * 8 * 128 * 4 * 16))
    src, dst = (
        PoolLayout.paged(range(4), **{**form, **one}, num_blocks=count) for one in (src_form, dst_form)
    )
    tables = [(BlockTable(0, np.random.default_rng(seed).permutation(count)),) for seed in (1, 2)]
    memory = np.zeros(src.nbytes, np.uint8)
    dtype = numpy_dtype(src.groups[0].tensors[0].dtype)
    memory.view(dtype)[:] = np.random.default_rng(3).standard_normal(memory.nbytes // dtype.itemsize)
    target, tokens = np.zeros(dst.nbytes, np.uint8), count * 16
    wire = wire_form(src, dst, allowed)
    assert wire is not None
    sides = (src, tables[0]), (dst, tables[1])
    windows = cut_windows(wire, *sides, Extent(tokens, 0, (0, tokens)), slot_nbytes=4 << 20)
    staging = np.zeros(4 << 20, np.uint8)
    times: dict[str, list[float]] = {"pack": [], "unpack": []}
    for _ in range(repeat + 1):
        packing = unpacking = 0.0
        for window in windows:
            at = window.plan(0, 0).src_offset.tolist()
            started = time.thread_time()
            for offset, segment in zip(at, window.segments, strict=True):
                pack(wire[segment.tensor], segment, sides[0], memory, staging[offset:])
            packed = time.thread_time()
            for offset, segment in zip(at, window.segments, strict=True):
                unpack(wire[segment.tensor], segment, sides[1], target, staging[offset:])
            packing, unpacking = packing + packed - started, unpacking + time.thread_time() - packed
        times["pack"].append(packing)
        times["unpack"].append(unpacking)
    nbytes = sum(window.nbytes for window in windows)
    return {"wire_nbytes": nbytes, **{half: statistics.median(found[1:]) for half, found in times.items()}}


def copy_seconds(total: int) -> Callable[[Callable[[], float]], float]:
    """One-thread copy of ``total`` bytes, touched before, by a clock of the caller's."""
    here, there = np.ones(total, np.uint8), np.zeros(total, np.uint8)

    def run(clock: Callable[[], float] = time.thread_time) -> float:
        started = clock()
        np.copyto(there, here)
        return clock() - started

    run()
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nbytes", default="64MiB")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    total, copy = parse_bytes(options.nbytes), copy_seconds(parse_bytes(options.nbytes))
    rows = []
    print(f"{'pieces':>8}   tcp: straight staged (from {frames.SMALL_NBYTES} on straight)", end="")
    print(f"   mapped: straight staged (from {shared_copy.LARGE_NBYTES} on straight)   of copyto")
    for size in SIZES:
        row: dict[str, Any] = {"piece_nbytes": size}
        for name, measure in (("tcp", over_tcp), ("mapped", mapped)):
            clock = time.perf_counter if name == "tcp" else time.thread_time
            base = statistics.median(copy(clock) for _ in range(5))
            for form, seconds in measure(size, total, options.repeat).items():
                row[f"{name}_{form}"] = base / statistics.median(seconds)
                row[f"{name}_{form}_spread"] = [base / max(seconds), base / min(seconds)]
        rows.append(row)
        print(
            f"{size:>8}   {row['tcp_straight']:13.3f} {row['tcp_staged']:6.3f} {'':27}"
            f"{row['mapped_straight']:16.3f} {row['mapped_staged']:6.3f}"
        )
    conversions = []
    for name in PAIRS:
        found = convert(name, total, options.repeat)
        base = statistics.median(copy(time.thread_time) for _ in range(5)) * found["wire_nbytes"] / total
        found |= {
            "conversion": name,
            "pack_of_copy": base / found["pack"],
            "unpack_of_copy": base / found["unpack"],
        }
        conversions.append(found)
        rates = [found["wire_nbytes"] / found[half] / 1e9 for half in ("pack", "unpack")]
        print(
            f"{name:24} pack {found['pack_of_copy']:.2f} of copyto ({rates[0]:.2f} GB/s),"
            f" unpack {found['unpack_of_copy']:.2f} ({rates[1]:.2f} GB/s), of bytes on the wire"
        )
    if options.json:
        facts = {"cpus": os.cpu_count(), "load": os.getloadavg(), "nbytes": total, "repeat": options.repeat}
        options.json.write_text(
            json.dumps({"run": facts, "pieces": rows, "conversions": conversions}, indent=1)
        )


if __name__ == "__main__":
    main()
