"""Single faults on the way and at the source: nothing wrong ever becomes visible to decode's engine.

``KVFERRY_FAULTS=10000 pytest tests/test_corruption.py`` (``make corruption``) plays ten thousand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait

import numpy as np
import pytest

from kvferry.errors import KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.protocol.ticket import Mode
from kvferry.testing.faults import POSSIBLE, Fault, FaultScript, What, Where, faulty
from kvferry.transfer import Endpoint, Timeouts, TransferRecord, directory
from kvferry.transport.registry import transport_for
from tls_kit import NODE

NUM_FAULTS = int(os.environ.get("KVFERRY_FAULTS", "150"))
NUM_SETS = 48
LAYOUT = PoolLayout.paged(
    range(2), kv_heads=1, head_dim=16, dtype="float32", block_size=4, num_blocks=4 * NUM_SETS
)
TOKENS = 11
SCHEMES = {"tcp": {}, "tcp-sealed": {"tls": NODE, "plain": "never"}, "shm": {}}
KINDS = (What.FLIP, What.TRUNCATE, What.DUPLICATE)
QUICK = Timeouts(handshake=5.0, heartbeat=1.0, lost=5.0, abort=0.2, start=0.5)
# A message that was damaged into one of nobody is waited for no longer than this.
SECONDS = 1.5

Opened = Callable[..., Endpoint]


class Handoffs:
    """Two endpoints and the blocks that they may use: each set is used again when its last use has ended."""

    def __init__(self, prefill: Endpoint, decode: Endpoint) -> None:
        self.prefill, self.decode = prefill, decode
        self._ends: dict[int, list[Future[TransferRecord]]] = {}

    def tables(self, number: int) -> tuple[BlockTable, BlockTable]:
        """Blocks of prefill and of decode, in unlike orders."""
        first = number % NUM_SETS * 4
        wait(self._ends.get(first, []), 20.0)
        return BlockTable(0, np.array([first, first + 2, first + 1])), BlockTable(
            0, np.array([first + 3, first, first + 2])
        )

    def settle(self) -> None:
        """Wait until nothing is under way."""
        wait([end for ends in self._ends.values() for end in ends], 20.0)

    def play(self, number: int, mode: Mode, name: str, spoil: Callable[[], None], seconds: float) -> None:
        """One handoff; ``spoil`` comes between export and move. Raises the error that ended it."""
        src, dst = self.tables(number)
        prefill, decode = self.prefill, self.decode
        if mode is Mode.PULL:
            ticket = prefill.offer(None, src, tokens=TOKENS, request_id=name, lease_seconds=seconds)
        else:
            ticket = decode.reserve(name, TOKENS, dst, lease_seconds=seconds)
        ends = self._ends[number % NUM_SETS * 4] = []
        try:
            if mode is Mode.PULL:
                ends.append(prefill.outcome(ticket))
                spoil()
                move = decode.pull(ticket, dst, timeout_seconds=seconds)
                ends.append(decode.outcome(ticket))
            else:
                move = decode.arrival(ticket)
                ends.append(decode.outcome(ticket))
                push = prefill.push(ticket, src, tokens=TOKENS, timeout_seconds=seconds)
                ends.append(prefill.outcome(ticket))
                push.layer(0)
                spoil()
                push.layer(1)
                push.commit(None)
            move.result()
        except BaseException:
            ends.append(move.arrival) if "move" in locals() else None
            raise
        move.started()


def live(endpoint: Endpoint, blocks: BlockTable) -> bytes:
    """The live bytes of a request, layer by layer, by address alone."""
    found = []
    for tensor in sorted(endpoint.pool.layout.groups[0].tensors, key=lambda t: (t.layer, t.role)):
        for token in range(TOKENS):
            at = tensor.offset + int(blocks.ids[token // 4]) * tensor.block_stride
            at += token % 4 * tensor.token_stride
            found.append(endpoint.pool.array[at : at + tensor.row_nbytes].tobytes())
    return b"".join(found)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_single_fault_is_caught_before_commit(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """Flipped, cut, repeated frames and copies, and blocks reused after export: an error, or right bytes.

    Handoffs without a fault in between must succeed, so that no error is of the one before.
    """
    rng = np.random.default_rng(list(SCHEMES).index(scheme))
    script = FaultScript()
    monkeypatch.setattr(directory, "transport_for", lambda address: faulty(transport_for(address), script))
    address = "tcp://127.0.0.1:0" if scheme != "shm" else f"shm://corruption-{os.getpid()}-{{}}"
    prefill, decode = (
        opened(LAYOUT, address.format(role), name=role, timeouts=QUICK, **SCHEMES[scheme])
        for role in ("prefill", "decode")
    )
    handoffs = Handoffs(prefill, decode)
    prefill.pool.array[:] = rng.integers(0, 256, prefill.pool.array.nbytes, np.uint8)
    seen: Counter[str] = Counter()
    for case in range(NUM_FAULTS // len(SCHEMES)):
        mode = Mode.PULL if rng.integers(0, 2) else Mode.PUSH
        copies = Where.WRITE if mode is Mode.PUSH and scheme != "shm" else Where.READ
        what, where = KINDS[case % 3], (copies, Where.SEND, Where.RECEIVE)[case // 3 % 3]
        kind = "stale" if case % 5 == 4 else "none" if case % 7 == 6 else str(what)
        assert what in POSSIBLE[where]
        if kind == "none":
            handoffs.settle()
        src, dst = handoffs.tables(case)
        sent = live(prefill, src)
        # A pull is one copy, a push two here; of frames there are more.
        nth = int(rng.integers(0, 3 if where is not copies else 2 if mode is Mode.PUSH else 1))
        faults = (Fault(what, where, nth=nth),) if kind == what else ()
        script.__init__(*faults)  # type: ignore[misc] # the transports keep the script that they have

        def spoil(kind: str = kind, src: BlockTable = src) -> None:
            if kind == "stale":  # a bit of a block of layer 0: its engine reused it too early
                tensor = prefill.pool.layout.groups[0].tensors[0]
                at = tensor.offset + int(src.ids[1]) * tensor.block_stride + 5
                prefill.pool.array[at] ^= 1 << int(rng.integers(0, 8))

        error = None
        try:
            handoffs.play(case, mode, f"{scheme}-{case}", spoil, SECONDS if faults else 30.0)
        except KVFerryError as failure:
            error = failure
        if error is None:
            assert live(decode, dst) == sent, (case, what, where, mode)
            assert kind != "stale"
        else:
            assert kind != "none", error
        ending = "refused" if error else "harmless" if script.fired else "did not happen"
        seen[f"{kind} {ending}"] += 1
    print(f"{scheme}: {NUM_FAULTS // len(SCHEMES)} handoffs: {dict(sorted(seen.items()))}")
    assert seen["none did not happen"] > 0
    assert all(seen[f"{kind} refused"] > 0 for kind in ("stale", *KINDS))
