"""Whole handoffs through Endpoint, beside what the machine can do: ratios of one run, bytes compared.

    python bench/transfer.py [--large-bytes 1GiB] [--repeat 7] [--json FILE]

Rows: rate of a large payload against a one-thread copy of as many bytes, by transport and mode;
the p50 of a whole 4 KiB handoff (offer, claim, move, commit, started, released) in bare tcp round
trips of 64 bytes; what a process has resident beyond its pool. Every row pre-faults its memory and
drops its first repetition.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import socket
import subprocess
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from kvferry.link import Mode
from kvferry.probe import LoopbackPair, Payload
from kvferry.units import format_bytes, format_rate, format_seconds, parse_bytes


def copy_seconds(nbytes: int, repeat: int) -> list[float]:
    """One-thread numpy.copyto of as many bytes, pools touched before."""
    src, dst = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    times = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        np.copyto(dst, src)
        times.append(time.perf_counter() - started)
    return times[1:]


def round_trip_seconds(count: int) -> list[float]:
    """Bare tcp round trips of 64 bytes over loopback, blocking, between two threads' sockets."""
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def echo() -> None:
        while data := server.recv(64):
            server.sendall(data)

    thread = threading.Thread(target=echo)
    thread.start()
    times = []
    for _ in range(count):
        started = time.perf_counter()
        client.sendall(b"x" * 64)
        client.recv(64, socket.MSG_WAITALL)
        times.append(time.perf_counter() - started)
    client.close()
    thread.join()
    server.close()
    listener.close()
    return times


def large(payload: Payload, transport: str, repeat: int, *, integrity: bool) -> list[dict[str, Any]]:
    """Rows of one payload over one transport."""
    rows = []
    with LoopbackPair(payload, transport, integrity=integrity) as pair:
        for mode in Mode:
            pair.measure(mode, repeat, lambda: None)  # warms, and compares the bytes
            moves = [pair.move(mode) for _ in range(repeat)]
            copies = copy_seconds(payload.moved_nbytes, repeat)
            inside = [record.timings.copy for record in moves]
            whole = [record.timings.total - record.timings.handshake for record in moves]
            rows.append(
                {
                    "case": f"{format_bytes(payload.moved_nbytes)} in {payload.block_bytes >> 10} KiB blocks",
                    "by": f"{transport} ({pair.record.path}), {mode}, digests {'on' if integrity else 'off'}",
                    "copy_over_memcpy": median(copies) / median(inside),
                    "handoff_over_memcpy": median(copies) / median(whole),
                    "bytes_per_second": payload.moved_nbytes / median(whole),
                    "seconds": sorted(whole),
                    "memcpy_seconds": sorted(copies),
                    "rss_beyond_pool_nbytes": pair.rss_beyond_pools(),
                }
            )
    return rows


def small(transport: str, count: int) -> list[dict[str, Any]]:
    """The p50 of whole handoffs of one 4 KiB block pair, in bare round trips measured beside it."""
    rows = []
    with LoopbackPair(Payload(8192, 4096), transport) as pair:
        for mode in Mode:
            for _ in range(20):
                pair.move(mode)
            trips, times = [], []
            for _ in range(count):
                started = time.perf_counter()
                pair.move(mode)
                times.append(time.perf_counter() - started)
                trips += round_trip_seconds(20)[5:]
            rows.append(
                {
                    "case": "one 4 KiB block of K and V, whole handoff",
                    "by": f"{transport}, {mode}",
                    "p50_seconds": median(times),
                    "round_trip_seconds": median(trips),
                    "round_trips": median(times) / median(trips),
                    "seconds": sorted(times),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--large-bytes", default="1GiB")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--transports", nargs="+", default=["shm", "tcp"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nbytes = parse_bytes(options.large_bytes)
    rows = []
    for transport in options.transports:
        rows += small(transport, 10 * options.repeat)
        for payload in (Payload(nbytes, 32 << 10), Payload(nbytes // 4, 4 << 10)):
            for integrity in (True, False):
                rows += large(payload, transport, options.repeat, integrity=integrity)
    for row in rows:
        if "round_trips" in row:
            trips = f"{row['round_trips']:.1f} round trips of {format_seconds(row['round_trip_seconds'])}"
            print(f"{row['case']}, {row['by']}: {format_seconds(row['p50_seconds'])} = {trips}")
        else:
            print(
                f"{row['case']}, {row['by']}: copy {row['copy_over_memcpy']:.2f}, whole handoff "
                f"{row['handoff_over_memcpy']:.2f} of memcpy, {format_rate(row['bytes_per_second'])}, "
                f"RSS beyond pools {format_bytes(row['rss_beyond_pool_nbytes'])}"
            )
    if options.json:
        options.json.write_text(json.dumps({"run": facts(), "rows": rows}, indent=1))


def facts() -> dict[str, Any]:
    """Where and when: a figure without them is none."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": platform.processor() or platform.machine(),
        "cpus": psutil.cpu_count(),
        "load": psutil.getloadavg(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
