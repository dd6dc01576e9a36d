"""One side of a handoff in a network namespace: ``python off_host_worker.py prefill|decode OPTIONS``.

OPTIONS is JSON: ``address``, ``identity``, ``plain``, and ``ticket`` (base64) for decode. Prints one
JSON line. Prefill then waits for its stdin to close.
"""

from __future__ import annotations

import base64
import json
import logging
import sys

import numpy as np

from kvferry.errors import KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool
from kvferry.transport import Identity

LAYOUT = PoolLayout.paged(range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=8)
NEEDLE = b"the KV of a prompt that is nobody else's business"
BLOCKS = BlockTable(0, np.array([2, 5]))


class Lines(logging.Handler):
    """Log lines, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    log = Lines()
    logging.getLogger("kvferry").addHandler(log)
    logging.getLogger("kvferry").setLevel(logging.INFO)
    said: dict[str, object] = {}
    identity = options.get("identity")
    pool = Pool.allocate(LAYOUT)
    settings = {
        "pool": pool,
        "process": False,
        "name": role,
        "tls": Identity.load(identity) if identity else None,
        "plain": options.get("plain", "loopback"),
    }
    try:
        with Endpoint.open(**settings) as endpoint:
            if options.get("address"):
                endpoint.add_addresses((options["address"],))
            if role == "prefill":
                pool.array[:] = np.resize(np.frombuffer(NEEDLE, np.uint8), pool.array.nbytes)
                ticket = endpoint.offer(None, BLOCKS, tokens=8, request_id="r")
                print(json.dumps({"ticket": base64.b64encode(ticket).decode()}), flush=True)
                outcome = endpoint.outcome(ticket)
                sys.stdin.read()
                said = {"peer": outcome.result(1).peer if outcome.done() else "", "log": log.lines}
            else:
                move = endpoint.pull(base64.b64decode(options["ticket"]), BLOCKS, timeout_seconds=10)
                move.result()
                move.started()
                said = {"path": move.record.path, "peer": move.record.peer, "log": log.lines}
                said["arrived"] = NEEDLE in bytes(pool.array)
    except KVFerryError as error:
        said = {"error": str(error), "kind": error.kind, "log": log.lines}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
