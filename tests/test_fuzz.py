"""The fuzzer's targets under random mutation: short, seeded, without the fuzzer itself."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from fuzz_targets import SEEDS, TARGETS, run
from kvferry.errors import KVFerryError

CASES = 1500


def mutated(rng: np.random.Generator, seed: bytes) -> bytes:
    """One to four changes: bits, bytes, cuts, repetitions, numbers at their borders."""
    data = bytearray(seed)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(0, len(data) + 1))
        what = int(rng.integers(0, 6))
        if what == 0 and data:
            data[at % len(data)] ^= 1 << int(rng.integers(0, 8))
        elif what == 1 and data:
            data[at % len(data)] = int(rng.integers(0, 256))
        elif what == 2:
            del data[at : at + int(rng.integers(1, 40))]
        elif what == 3:
            data[at:at] = data[max(0, at - int(rng.integers(1, 40))) : at]
        elif what == 4:
            data[at : at + 8] = rng.choice([0, 1, 127, 255], 8).astype(np.uint8).tobytes()
        else:
            border = [2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1][int(rng.integers(0, 5))]
            data[at : at + 8] = border.to_bytes(8, "little")
    return bytes(data)


@pytest.mark.parametrize("index", range(len(TARGETS)), ids=lambda index: TARGETS[index].__name__)
def test_no_bytes_do_anything_but_be_taken_or_refused(index: int) -> None:
    """Seeds are taken; whatever becomes of them by mutation ends in a value or an error of ours."""
    seeds = [seed[1:] for seed in SEEDS if seed[0] == index]
    rng = np.random.default_rng(index)
    for case in range(CASES):
        with contextlib.suppress(KVFerryError):
            run(bytes([index]) + mutated(rng, seeds[case % len(seeds)]))


def test_every_target_has_a_seed_that_gets_through() -> None:
    """A target whose seed is refused at its first check fuzzes nothing."""
    through = set()
    for seed in SEEDS:
        with contextlib.suppress(KVFerryError):
            run(seed)
            through.add(TARGETS[seed[0]].__name__)
    assert through == {target.__name__ for target in TARGETS}
