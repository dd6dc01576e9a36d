"""One side of a handoff in a network namespace: ``python off_host_worker.py prefill|decode OPTIONS``.

OPTIONS is JSON: ``mode``, ``tokens``, ``address``, ``identity``, ``plain``, and ``ticket`` (base64) for the
side that claims. The side that holds prints its ticket, and ends with its hold or its stdin. Both print
a JSON line of how it ended.
"""

from __future__ import annotations

import base64
import json
import logging
import select
import sys
import time

import numpy as np

from kvferry.errors import KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool, TransferRecord
from kvferry.transport import Identity

REQUEST = "request-whose-name-is-told-on-the-control-connection"
NEEDLE = b"the KV of a prompt that is nobody else's business"


class Lines(logging.Handler):
    """Log lines, kept."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def hold(endpoint: Endpoint, role: str, table: BlockTable, tokens: int) -> str:
    """Hold blocks for the peer until that has ended, or nobody wants to know; the peer's name."""
    if role == "prefill":
        ticket = endpoint.offer(None, table, tokens=tokens, request_id=REQUEST)
    else:
        ticket = endpoint.reserve(REQUEST, tokens, table)
    print(json.dumps({"ticket": base64.b64encode(ticket).decode()}), flush=True)
    outcome = endpoint.outcome(ticket)
    while not outcome.done() and not select.select([sys.stdin], [], [], 0.02)[0]:
        pass
    return outcome.result(1).peer if outcome.done() else ""


def claim(endpoint: Endpoint, role: str, table: BlockTable, tokens: int, ticket: bytes) -> TransferRecord:
    """Take the ticket up; the record."""
    if role == "decode":
        move = endpoint.pull(ticket, table, timeout_seconds=20)
        move.result()
        move.started()
        return move.record
    push = endpoint.push(ticket, table, tokens=tokens, timeout_seconds=20)
    push.layers(0, 2)
    push.commit(None)
    return endpoint.outcome(ticket).result(30)


def main() -> None:
    role, options = sys.argv[1], json.loads(sys.argv[2])
    log = Lines()
    logging.getLogger("kvferry").addHandler(log)
    logging.getLogger("kvferry").setLevel(logging.INFO)
    identity, tokens = options.get("identity"), options.get("tokens", 8)
    count = -(-tokens // 4)
    layout = PoolLayout.paged(
        range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=count + 6
    )
    table = BlockTable(0, np.arange(2, 2 + count))
    pool = Pool.allocate(layout)
    if role == "prefill":
        pool.array[:] = np.resize(np.frombuffer(NEEDLE, np.uint8), pool.array.nbytes)
    said: dict[str, object] = {}
    tls = Identity.load(identity) if identity else None
    plain = options.get("plain", "loopback")
    try:
        with Endpoint.open(pool=pool, process=False, name=role, tls=tls, plain=plain) as endpoint:
            if options.get("address"):
                endpoint.add_addresses((options["address"],))
            if "ticket" not in options:
                said = {"peer": hold(endpoint, role, table, tokens)}
            else:
                record = claim(endpoint, role, table, tokens, base64.b64decode(options["ticket"]))
                said = {"path": record.path, "peer": record.peer, "arrived": NEEDLE in bytes(pool.array)}
    except KVFerryError as error:
        said = {"error": str(error), "kind": error.kind, "phase": error.phase, "next": error.next_step}
    print(json.dumps(said | {"log": log.lines, "at": time.time()}), flush=True)


if __name__ == "__main__":
    main()
