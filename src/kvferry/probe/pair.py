"""One pair of endpoints on this host, for benches: each copy is a whole handoff without a state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from kvferry.link import Mode, Sample
from kvferry.probe.addresses import loopback_address
from kvferry.probe.node import Copied, ProbeNode, finish
from kvferry.probe.payload import Payload, Room
from kvferry.transfer import TransferRecord

__all__ = ["NAMES", "LoopbackPair"]

NAMES = ("probe-prefill", "probe-decode")
TIMEOUT_SECONDS = 60.0


class LoopbackPair:
    """Two endpoints on this host, each with its transfer process, over one payload's pools."""

    def __init__(self, payload: Payload, transport: str, *, integrity: bool = True) -> None:
        self.payload = payload
        self._transport = transport
        self._integrity = integrity
        self._nodes: list[ProbeNode] = []

    def __enter__(self) -> Self:
        room = Room.of([self.payload])
        try:
            for name in NAMES:
                address = loopback_address(self._transport, name)
                self._nodes.append(ProbeNode(name, room, (address,), integrity=self._integrity))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self.prefill, self.decode = self._nodes
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in reversed(self._nodes):
            node.close()

    def move(self, mode: Mode) -> TransferRecord:
        """One handoff; returns decode's record. Raises the KVFerryError that ended it."""
        if mode is Mode.PULL:
            (ticket,) = self.prefill.hold(mode, self.payload, 0, 1, TIMEOUT_SECONDS)
            record = self.decode.pull(ticket, self.payload, 0, "", TIMEOUT_SECONDS)
        else:
            (ticket,) = self.decode.hold(mode, self.payload, 0, 1, TIMEOUT_SECONDS)
            move = self.decode.expect(ticket)
            self.prefill.push(ticket, self.payload, "", TIMEOUT_SECONDS)
            record = finish(move)
        self.prefill.await_release(ticket, TIMEOUT_SECONDS)
        return record

    def rss_beyond_pools(self) -> int:
        """The larger of both nodes' resident bytes that are not a pool's, from /proc; Linux only."""
        sizes = []
        for node in self._nodes:
            status = Path(f"/proc/{node.endpoint.stats().pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines() if line.startswith("Rss"))
            # RssShmem are the pools (ours and the peer's); everything else is anonymous or files.
            sizes.append(1024 * (int(lines["RssAnon"].split()[0]) + int(lines["RssFile"].split()[0])))
        return max(sizes)

    def measure(self, mode: Mode, repeats: int, on_done: Callable[[], None]) -> list[Sample]:
        """One cold copy, which carries connecting and first touch, then warm ones; bytes compared."""
        samples = []
        for number in range(repeats + 1):
            self.record = self.move(mode)
            copied = Copied.of(self.record)
            samples.append(
                Sample(
                    mode=mode,
                    nbytes=copied.nbytes,
                    descriptors=copied.descriptors,
                    seconds=copied.seconds,
                    is_cold=number == 0,
                )
            )
            on_done()
        self.decode.compare(self.payload, 0, self.prefill.seed)
        return samples
