"""A handoff while nothing can be logged: ``python full_disk_worker.py process|threads pull|push tcp|shm``.

Its log file is /dev/full, and whoever starts it puts stderr there too, which its transfer processes
inherit. Prints a JSON line of how it ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool

FULL = "/dev/full"
LAYOUT = PoolLayout.paged(range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=8)


class FullDisk(logging.FileHandler):
    """Counts the lines that could not be written."""

    refused = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self.refused += 1
        super().handleError(record)


def play(where: str, mode: str, scheme: str) -> dict[str, object]:
    """Run it in a process of its own; what it said."""
    with open(FULL, "w") as full:
        done = subprocess.run(
            [sys.executable, str(Path(__file__)), where, mode, scheme],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=True,
        )
    said: dict[str, object] = json.loads(done.stdout)
    return said


def hand_over(prefill: Endpoint, decode: Endpoint, mode: str, scheme: str) -> dict[str, object]:
    """Two blocks, and what is held afterwards."""
    prefill.pool.array[:] = 7
    source, target = BlockTable(0, np.array([1, 2])), BlockTable(0, np.array([4, 5]))
    if mode == "pull":
        ticket = prefill.offer(None, source, tokens=8, request_id="r")
        move = decode.pull(ticket, target, transport=scheme)
    else:
        ticket = decode.reserve("r", 8, target)
        move = decode.arrival(ticket)
        push = prefill.push(ticket, source, tokens=8, transport=scheme)
        push.layers(0, 2)
        push.commit(None)
    move.result()
    move.started()
    record = prefill.outcome(ticket).result(10)
    both = (prefill.stats(), decode.stats())
    return {
        "arrived": record.nbytes > 0 and int(decode.pool.array.sum()) == 7 * record.nbytes,
        "path": record.path,
        "held": sum(stats.transfers + stats.holds + stats.grants + stats.copies for stats in both),
    }


def main() -> None:
    where, mode, scheme = sys.argv[1:]
    disk = FullDisk(FULL)
    logging.basicConfig(handlers=[disk], level=logging.DEBUG)
    is_process = where == "process"

    def listen(name: str) -> Endpoint:
        addresses = ("tcp://127.0.0.1:0", f"shm://full-{os.getpid()}-{name}")
        return Endpoint.listen(addresses, pool=Pool.allocate(LAYOUT), process=is_process, name=name)

    with listen("prefill") as prefill, listen("decode") as decode:
        host, port = prefill.addresses[0].removeprefix("tcp://").rsplit(":", 1)
        for _ in range(3):  # peers that are dropped, which is logged
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(b"GET / HTTP/1.1" + bytes(40))
                with contextlib.suppress(ConnectionError):
                    stranger.recv(100)
        logging.getLogger("kvferry.transport").error("this line cannot be written")
        said = hand_over(prefill, decode, mode, scheme)
    print(json.dumps(said | {"refused_lines": disk.refused}), flush=True)
    os._exit(0)  # not by way of a last flush to the full disk


if __name__ == "__main__":
    main()
