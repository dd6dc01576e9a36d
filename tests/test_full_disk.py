"""A disk that is full for logs stops no handoff: /dev/full is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import contextlib, logging, os, socket, sys
import numpy as np
logging.basicConfig(filename="/dev/full", level=logging.DEBUG)
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool
layout = PoolLayout.paged(range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=8)
process = sys.argv[1] == "process"
address = "tcp://127.0.0.1:0"
with Endpoint.listen(address, pool=Pool.allocate(layout), process=process, name="prefill") as prefill, \\
        Endpoint.open(pool=Pool.allocate(layout), process=process, name="decode") as decode:
    prefill.pool.array[:] = 7
    host, port = prefill.addresses[0].removeprefix("tcp://").rsplit(":", 1)
    for _ in range(3):  # peers that are dropped, which is logged
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1" + bytes(40))
            with contextlib.suppress(ConnectionError):
                stranger.recv(100)
    logging.getLogger("kvferry.transport").error("this line cannot be written")
    ticket = prefill.offer(None, BlockTable(0, np.array([1, 2])), tokens=8, request_id="r")
    move = decode.pull(ticket, BlockTable(0, np.array([4, 5])))
    move.result()
    move.started()
    prefill.outcome(ticket).result(10)
    print(int(decode.pool.array.sum()) == 7 * move.record.nbytes, move.record.nbytes > 0, flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("where", ["process", "threads"])
@pytest.mark.slow
def test_a_handoff_goes_on_when_nothing_can_be_logged(where: str) -> None:
    """With logs and stderr of both processes at a full disk, bytes arrive and every hold ends."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, where],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stdout == "True True\n"
    assert done.returncode == 0
