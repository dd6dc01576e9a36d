"""One 4 KiB block by ``Connection.read`` and ``write``: how long, beside bare round trips, and whose CPU.

    sudo chrt -r 5 python bench/small_copy.py [--count 300] [--repeat 5] [--json FILE]

Two processes with a pool each, the real guard, no digests. Copies follow each other; each way has its
turn in every repetition, as have bare round trips of 64 bytes between two processes that sleep in
``poll`` for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from transports import machine, scheduling

from kvferry.layout import CopyPlan
from kvferry.testing.transport_pair import TRANSFER_ID, LoopThread
from kvferry.transfer.lease import Grants
from kvferry.transport import Connection, Copy, create_shared, transport_for
from kvferry.transport.base import Direction
from kvferry.transport.board import Board

NBYTES = 4096
POOL_NBYTES = 4 << 20
SECONDS = 60.0
#: Way: address, what the serving side grants, and whether it has a board to post that on.
WAYS = {
    "shm mapped, read": ("shm://NAME?path=mapped", Direction.READ, True),
    "shm mapped, read, asked for": ("shm://NAME-asked?path=mapped", Direction.READ, False),
    "shm cma, read": ("shm://NAME-cma?path=cma", Direction.READ, True),
    "tcp, read": ("tcp://127.0.0.1:0", Direction.READ, False),
    "tcp, write": ("tcp://127.0.0.1:0", Direction.WRITE, False),
}


def serve() -> None:
    """The other process: listens for every way, then says its CPU seconds for each line that it gets."""
    loop, kept, bound = LoopThread(), [], []
    memory = create_shared(POOL_NBYTES)
    pieces = np.array([0]), np.array([POOL_NBYTES])
    for address, direction, is_posted in WAYS.values():
        grants = Grants(Board.create() if is_posted else None)
        grants.open(TRANSFER_ID, direction, *pieces, lambda _: None)
        where = address.replace("NAME", f"small-copy-{os.getpid()}")
        listener = loop.run(transport_for(where)(memory, grants).listen(where, kept.append))
        kept.append(listener)
        bound.append(listener.address)
    print(json.dumps(bound), flush=True)
    for _ in sys.stdin:
        print(time.process_time(), flush=True)
    os._exit(0)


def copies(connection: Connection, direction: Direction, count: int) -> list[float]:
    """Seconds of copies that follow each other."""
    zero, call = np.zeros(1, np.int64), connection.read if direction is Direction.READ else connection.write
    times = []
    for _ in range(count):
        plan = CopyPlan(zero, zero, np.array([NBYTES]), np.array([0, 1]), zero, np.ones(1, np.bool_))
        copy = Copy(TRANSFER_ID, plan, time.monotonic() + SECONDS, integrity=False)
        started = time.perf_counter()
        call(copy)
        times.append(time.perf_counter() - started)
    return times


def round_trips(pair: Callable[[], tuple[socket.socket, socket.socket]], count: int) -> list[float]:
    """Seconds of bare ones with a process that answers."""
    here, there = pair()
    polls = [select.poll(), select.poll()]
    for poll, sock in zip(polls, (here, there), strict=True):
        sock.setblocking(False)
        poll.register(sock, select.POLLIN)

    def hear(poll: select.poll, sock: socket.socket) -> bytes:
        poll.poll()
        return sock.recv(64)

    child = os.fork()
    if child == 0:
        for _ in range(count):
            there.send(hear(polls[1], there))
        os._exit(0)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        here.send(bytes(64))
        hear(polls[0], here)
        times.append(time.perf_counter() - started)
    os.waitpid(child, 0)
    here.close()
    there.close()
    return times


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for sock in (here, there):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, there


def run(count: int, repeat: int) -> list[dict[str, Any]]:
    """Rows: a way, its seconds, and CPU seconds of each side for a copy."""
    other = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    stdin, stdout = other.stdin, other.stdout

    def cpu_there() -> float:
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    loop, memory, connections = LoopThread(), create_shared(POOL_NBYTES), {}
    for way, address in zip(WAYS, json.loads(stdout.readline()), strict=True):
        connections[way] = loop.run(transport_for(address)(memory, Grants()).connect(address, SECONDS))
    rows = {way: {"way": way, "seconds": [], "cpu_here": [], "cpu_there": []} for way in WAYS}
    bare: dict[str, list[float]] = {"unix": [], "tcp": []}
    for turn in range(repeat + 1):
        for way, (_, direction, _) in WAYS.items():
            here, there = time.process_time(), cpu_there()
            times = copies(connections[way], direction, count)
            found = rows[way], (time.process_time() - here) / count, (cpu_there() - there) / count
            if turn:  # the first finds sockets and code that were not used yet
                found[0]["seconds"].append(statistics.median(times))
                found[0]["cpu_here"].append(found[1])
                found[0]["cpu_there"].append(found[2])
        for name, pair in (("unix", socket.socketpair), ("tcp", tcp_pair)):
            if turn:
                bare[name].append(statistics.median(round_trips(pair, count)))
    stdin.close()
    other.wait()
    for way, row in rows.items():
        row["round_trip_seconds"] = bare["unix" if way.startswith("shm") else "tcp"]
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="copies of a way in a turn")
    parser.add_argument("--repeat", type=int, default=5, help="measured turns")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
    facts = machine()
    rows = run(options.count, options.repeat)
    for row in rows:
        median = {key: 1e6 * statistics.median(value) for key, value in row.items() if key != "way"}
        words = "{seconds:5.0f} us, a bare round trip {round_trip_seconds:4.0f};"
        words += " CPU {cpu_here:4.0f} here, {cpu_there:4.0f} there"
        print(f"{row['way']:28}", words.format(**median))
    if options.json:
        facts |= {"load_at_end": os.getloadavg()[0], "scheduling": scheduling()}
        result = {"bench": "small_copy", "machine": facts, "count": options.count, "rows": rows}
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
