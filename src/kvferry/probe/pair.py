"""One pair of endpoints, measured: each copy is a whole handoff without a state, its bytes compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvferry.errors import CorruptError
from kvferry.layout import source_pieces
from kvferry.link import Mode, Sample
from kvferry.probe.payload import Payload
from kvferry.transfer import Endpoint, Pool, TransferRecord

__all__ = ["LoopbackPair", "sizes_up_to"]

TIMEOUT_SECONDS = 60.0
_names = itertools.count()


def sizes_up_to(largest: Payload) -> list[Payload]:
    """Payloads from 64 KiB up to the largest by factors of four, in blocks of two sizes.

    Two block sizes, so that the cost of a byte and of a descriptor can be told apart.
    """
    payloads = []
    for block in dict.fromkeys((largest.block_bytes, max(64, largest.block_bytes // 32 * 4))):
        size = largest.nbytes
        while size >= max(64 << 10, 4 * block):
            payloads.append(Payload(size, block))
            size //= 4
        payloads.append(Payload(max(size, 2 * block), block))
    return list(dict.fromkeys(payloads))


class LoopbackPair:
    """Two endpoints on this host, each with its transfer process, over one payload's pools."""

    def __init__(self, payload: Payload, transport: str, *, integrity: bool = True) -> None:
        self.payload = payload
        self._transport = transport
        self._integrity = integrity
        self._owned: list[Pool | Endpoint] = []

    def __enter__(self) -> Self:
        layout = self.payload.layout()
        self._prefill, self._decode = (
            self._endpoint(layout_name, Pool.allocate(layout)) for layout_name in NAMES
        )
        self._src, self._dst = self.payload.table(1), self.payload.table(2)
        self._fill()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owned in reversed(self._owned):
            owned.close()

    def move(self, mode: Mode) -> TransferRecord:
        """One handoff; returns decode's record. Raises the KVFerryError that ended it."""
        tokens, name = self.payload.blocks, f"probe-{next(_names)}"
        if mode is Mode.PULL:
            ticket = self._prefill.offer(None, self._src, tokens=tokens, request_id=name)
            move = self._decode.pull(ticket, self._dst, timeout_seconds=TIMEOUT_SECONDS)
        else:
            ticket = self._decode.reserve(name, tokens, self._dst, lease_seconds=TIMEOUT_SECONDS)
            move = self._decode.arrival(ticket)
            push = self._prefill.push(ticket, self._src, tokens=tokens, timeout_seconds=TIMEOUT_SECONDS)
            push.layers(0, self.payload.layers)
            push.commit(None)
        outcome = self._prefill.outcome(ticket)
        move.result()
        move.started()
        outcome.result(TIMEOUT_SECONDS)
        return move.record

    def rss_beyond_pools(self) -> int:
        """The larger of both nodes' resident bytes that are not a pool's, from /proc; Linux only."""
        sizes = []
        for endpoint in (self._prefill, self._decode):
            status = Path(f"/proc/{endpoint.stats().pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
            # RssShmem are the pools (ours and the peer's); everything else is anonymous or files.
            sizes.append(1024 * (int(lines["RssAnon"].split()[0]) + int(lines["RssFile"].split()[0])))
        return max(sizes)

    def measure(self, mode: Mode, repeats: int, on_done: Callable[[], None]) -> list[Sample]:
        """One cold copy, which carries connecting and first touch, then warm ones; bytes compared."""
        samples = []
        for number in range(repeats + 1):
            record = self.move(mode)
            timings = record.timings
            samples.append(
                Sample(
                    mode=mode,
                    nbytes=record.nbytes,
                    descriptors=record.descriptors,
                    seconds=timings.total - timings.handshake,
                    is_cold=number == 0,
                )
            )
            self.record = record
            on_done()
        self._compare()
        return samples

    def _endpoint(self, name: str, pool: Pool) -> Endpoint:
        self._owned.append(pool)
        address = (
            "tcp://127.0.0.1:0" if self._transport == "tcp" else f"{self._transport}://{name}-{next(_names)}"
        )
        endpoint = Endpoint.listen(address, pool=pool, name=name, integrity=self._integrity)
        self._owned.append(endpoint)
        return endpoint

    def _fill(self) -> None:
        words = self._prefill.pool.array[: self._prefill.pool.array.nbytes // 8 * 8].view(np.uint64)
        words[:] = np.arange(len(words), dtype=np.uint64)
        words *= np.uint64(0x9E3779B97F4A7C15)  # every word its own: a block in the wrong place shows

    def _compare(self) -> None:
        """Each block of decode against prefill's, byte by byte, by address and not by plan."""
        for tensor in self.payload.layout().groups[0].tensors:
            ours, theirs = [
                endpoint.pool.array[tensor.offset :][
                    : tensor.block_stride * (2 * self.payload.blocks + 2)
                ].reshape(-1, tensor.block_stride)[table.ids]
                for endpoint, table in ((self._prefill, self._src), (self._decode, self._dst))
            ]
            if not np.array_equal(ours, theirs):
                raise CorruptError(f"bytes of {tensor} differ after the move", phase="probe")
        decode = source_pieces(self.payload.layout(), (self._dst,), self.payload.blocks)
        if decode.total_nbytes != self.payload.moved_nbytes:
            raise CorruptError("the payload is not the size that was asked for", phase="probe")


NAMES = ("probe-prefill", "probe-decode")
