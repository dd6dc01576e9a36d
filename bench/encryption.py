"""Cost of encryption: tcp sealed and plain, and the same payload through Python's ``ssl``, side by side.

    python bench/encryption.py [--nbytes 1GiB] [--block 32KiB] [--repeat 5] [--out FILE]

Two processes on this host; payload is read from scattered blocks of one pool into scattered blocks of
another. Each repetition runs every row once, one after the other, so that rows are compared within it:
"of plain" is the median, and the range, of these ratios to plain tcp with its checksum; CPU seconds are
of both processes. The bytes of each row are compared once. Nothing is asserted about speed.
Needs kvferry[tls].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from transports import check, fill, machine, make_plan, timed

from kvferry.layout import CopyPlan
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.transport_pair import TRANSFER_ID, LoopThread
from kvferry.transport import Copy, Identity, Memory, Plain, Security, create_shared
from kvferry.transport.certificates import init_authority, issue
from kvferry.transport.staging import Pieces, step_starts, thread_staging
from kvferry.transport.tcp import TcpTransport
from kvferry.units import parse_bytes

SECONDS = 300.0
BASE = "plain, summed"
ROWS = (BASE, "plain", "sealed, summed", "sealed", "sealed, 2 streams", "ssl")


def transport(memory: Memory, identity: Identity, plain: Plain) -> TcpTransport:
    made = TcpTransport(memory, ScriptedGuard())
    made.security = Security(identity, plain)
    return made


async def serve(pool_nbytes: int, certificate: str, tables: str) -> None:
    """The other process: two listeners and an ``ssl`` server over one pool, until stdin closes."""
    memory, identity = create_shared(pool_nbytes), Identity.load(certificate)
    fill(memory)
    kept: list[object] = []
    listeners = [
        await transport(memory, identity, plain).listen("tcp://127.0.0.1:0", kept.append)
        for plain in (Plain.LOOPBACK, Plain.NEVER)
    ]
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_ssl, args=(server, memory, identity, tables), daemon=True).start()
    print(*(listener.address for listener in listeners), server.getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def serve_ssl(server: socket.socket, memory: Memory, identity: Identity, tables: str) -> None:
    """Send the blocks of the table, step by step, each time that a byte asks for them."""
    offset, nbytes = np.load(tables)
    pieces, starts = Pieces(memory.array, offset, nbytes), step_starts(nbytes).tolist()
    sock, _ = server.accept()
    with identity.context(server_side=True).wrap_socket(sock, server_side=True) as stream:
        while stream.recv(1):
            for first, last in itertools.pairwise(starts):
                staged = thread_staging(memory.array)[: int(nbytes[first:last].sum())]
                pieces.gather(first, last, staged)
                stream.sendall(staged.data)


class Bench:
    """This process, its pool and its connections to the other one."""

    def __init__(self, nbytes: int, block_nbytes: int, folder: Path) -> None:
        pool_nbytes = nbytes + nbytes // 4
        self.block_nbytes = block_nbytes
        self.plan = make_plan(nbytes, block_nbytes, pool_nbytes, same_ids=False)
        self.memory = create_shared(pool_nbytes)
        init_authority(folder)
        identity = Identity.load(issue(folder, "bench", hosts=["127.0.0.1"]))
        np.save(folder / "tables.npy", np.stack((self.plan.src_offset, self.plan.nbytes)))
        command = [sys.executable, __file__, "--serve", str(pool_nbytes), identity.certificate]
        self.server = subprocess.Popen(
            [*command, str(folder / "tables.npy")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        plain, sealed, port = self.server.stdout.readline().split()
        self.loop = LoopThread()
        self.connections = {}
        for name, address in (("plain", plain), ("sealed", sealed), ("sealed, 2 streams", sealed)):
            self.connections[name] = self.loop.run(
                transport(self.memory, identity, Plain.LOOPBACK).connect(
                    address + ("&streams=2" if "streams" in name else ""), SECONDS
                )
            )
        context = identity.context(server_side=False)
        self.stream = context.wrap_socket(
            socket.create_connection(("127.0.0.1", int(port))), server_hostname="127.0.0.1"
        )

    def close(self) -> None:
        for connection in self.connections.values():
            self.loop.run(connection.close())
        self.stream.close()
        assert self.server.stdin is not None
        self.server.stdin.close()
        self.server.wait()
        self.loop.close()

    def call(self, row: str) -> Callable[[], object]:
        if row == "ssl":
            return lambda: receive_ssl(self.stream, self.memory, self.plan)
        name, _, summed = row.removesuffix(", summed"), None, row.endswith("summed")
        return lambda: self.connections[name].read(
            Copy(TRANSFER_ID, self.plan, time.monotonic() + SECONDS, summed)
        )

    def measure(self, row: str) -> tuple[float, float]:
        """Seconds, and CPU seconds of both processes."""
        before = self.cpu_seconds()
        took = timed(self.call(row))
        return took, self.cpu_seconds() - before

    def compare(self, row: str) -> None:
        self.memory.array[:] = 0
        self.call(row)()
        check(self.memory, self.plan.dst_offset, self.plan.src_offset, self.block_nbytes)

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.server.pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def receive_ssl(stream: ssl.SSLSocket, memory: Memory, plan: CopyPlan) -> None:
    pieces, starts = Pieces(memory.array, plan.dst_offset, plan.nbytes), step_starts(plan.nbytes).tolist()
    stream.sendall(b"!")
    for first, last in itertools.pairwise(starts):
        staged = thread_staging(memory.array)[: int(plan.nbytes[first:last].sum())]
        view = staged.data
        while view:
            view = view[stream.recv_into(view) :]
        pieces.scatter(first, last, staged)


def run(bench: Bench, repeat: int) -> list[dict[str, object]]:
    found: dict[str, list[tuple[float, float]]] = {row: [] for row in ROWS}
    for row in ROWS:
        bench.compare(row)  # also warms up sockets, tables and page tables
    for number in range(repeat):
        for row in ROWS if number % 2 else reversed(ROWS):
            found[row].append(bench.measure(row))
    results = []
    for row, measured in found.items():
        seconds, cpu = zip(*measured, strict=True)
        ratios = [base / took for (base, _), took in zip(found[BASE], seconds, strict=True)]
        results.append(
            {
                "row": row,
                "seconds": seconds,
                "bytes_per_second_median": bench.plan.total_nbytes / statistics.median(seconds),
                "of_plain_median": statistics.median(ratios),
                "of_plain_range": (min(ratios), max(ratios)),
                "cpu_seconds_per_gib": statistics.median(cpu) * (1 << 30) / bench.plan.total_nbytes,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nbytes", default="1GiB", help="payload of each copy")
    parser.add_argument("--block", default="32KiB", help="bytes of one block")
    parser.add_argument("--repeat", type=int, default=5, help="measured repetitions")
    parser.add_argument("--out", help="write the results there as JSON")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        pool_nbytes, certificate, tables = arguments.serve
        asyncio.run(serve(int(pool_nbytes), certificate, tables))
        return
    result: dict[str, object] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        bench = Bench(
            parse_bytes(arguments.nbytes, "--nbytes"), parse_bytes(arguments.block, "--block"), Path(folder)
        )
        stack.callback(bench.close)
        rows = result["rows"] = run(bench, arguments.repeat)
    print(json.dumps(result["machine"]))
    print(f"{'':20}{'GB/s':>7}  of {BASE} (range)  CPU s/GiB, both")
    for row in rows:
        low, high = row["of_plain_range"]
        print(
            f"{row['row']:20}{row['bytes_per_second_median'] / 1e9:>7.2f}"
            f"  {row['of_plain_median']:.2f} ({low:.2f} to {high:.2f})  {row['cpu_seconds_per_gib']:.3f}"
        )
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
