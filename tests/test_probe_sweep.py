"""How many copies of which shape a sweep makes, with nodes whose copies only claim to have taken time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, cast

from kvferry.link import Conditions, Mode
from kvferry.probe import Payload, words
from kvferry.probe.node import Copied
from kvferry.probe.sweep import Flow, Limits, sweep

if TYPE_CHECKING:
    from kvferry.probe.site import Site

KIB, MIB = 1 << 10, 1 << 20


class Claimed(Flow):
    """A flow whose copies take what a table says, now and then ten times as long; no node is asked."""

    def __init__(self, took: dict[Payload, float]) -> None:
        nobody = cast("Site", None)
        super().__init__(nobody, nobody, Mode.PULL, "tcp", Conditions(mode=Mode.PULL))
        self.took, self.made = took, Counter[Payload]()

    async def copy(self, payload: Payload, count: int) -> words.Copies:
        self.made[payload] += count
        slow = [10.0 if number % 5 == 0 else 1.0 + number % 2 / 4 for number in range(count)]
        copies = [
            Copied(
                nbytes=payload.nbytes,
                descriptors=payload.descriptors,
                seconds=self.took[payload] * ratio,
                handshake_seconds=0.0,
                transport="tcp",
                path="tcp",
            )
            for ratio in slow
        ]
        return words.Copies(tuple(copies), (0.0,) * count)

    async def compare(self, payload: Payload) -> None:
        assert payload in self.took


def made(took: dict[Payload, float], repeats: int) -> list[int]:
    """Copies that were kept of each shape."""
    flow = Claimed(took)
    asyncio.run(sweep([flow], list(took), Limits(repeats, time.monotonic() + 60), lambda _: None))
    assert flow.error is None
    return [len(flow.seconds[payload]) for payload in took]


def test_the_tail_of_small_copies_is_measured_as_far_as_it_is_cheap() -> None:
    """Five times the copies of up to 256 KiB, or as many as take a second; never fewer than of others."""
    took = [(64 * KIB, 1e-3), (128 * KIB, 0.011), (256 * KIB, 0.1), (MIB, 1e-3)]
    found = made({Payload(nbytes, 4 * KIB): seconds for nbytes, seconds in took}, repeats=40)
    assert found[0] == 200
    assert 40 < found[1] < 200
    assert found[2] == 40
    assert found[3] <= 40
