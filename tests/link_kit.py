"""Synthetic copies over a link with known costs, and files made from them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.link import ConditionFit, LinkFile, LinkProfile, Mode, Node, Sample, fit_link

KIB, MIB = 2**10, 2**20
SIZES = tuple(2**power for power in range(16, 27, 2))  # 64 KiB to 64 MiB
BLOCKS = (8 * KIB, 64 * KIB, 1 * MIB)
MARCH = datetime(2026, 3, 1, tzinfo=UTC)
MAY = datetime(2026, 5, 1, tzinfo=UTC)

Cost = Callable[[int, int], float]


def line(a: float, o: float, rate: float) -> Cost:
    return lambda nbytes, descriptors: a + o * descriptors + nbytes / rate


def overlap(a: float, o: float, rate: float) -> Cost:
    return lambda nbytes, descriptors: a + max(o * descriptors, nbytes / rate)


GOOD = line(50e-6, 2e-6, 5e9)


def sweep(
    cost: Cost = GOOD,
    *,
    noise: float = 0.0,
    repeats: int = 1,
    seed: int = 0,
    sizes: Sequence[int] = SIZES,
    blocks: Sequence[int] = BLOCKS,
    **conditions: Any,
) -> list[Sample]:
    """Copies of every size in pieces of every block size, with lognormal noise around their cost."""
    rng = np.random.default_rng(seed)
    shapes = dict.fromkeys((nbytes, max(1, nbytes // block)) for nbytes in sizes for block in blocks)
    return [
        Sample(
            nbytes=nbytes,
            descriptors=descriptors,
            seconds=cost(nbytes, descriptors) * float(rng.lognormal(0.0, noise)),
            **{"mode": Mode.PULL, **conditions},
        )
        for nbytes, descriptors in shapes
        for _ in range(repeats)
    ]


def profile(
    samples: Sequence[Sample] | None = None,
    from_node: str = "a",
    to_node: str = "b",
    *,
    keep: bool = True,
    **fields: Any,
) -> LinkProfile:
    """A measured pair from samples; those of several conditions are fitted apart."""
    samples = sweep(noise=0.01, repeats=5) if samples is None else samples
    conditions = dict.fromkeys(sample.conditions for sample in samples)
    fits = tuple(
        ConditionFit(
            mode=key.mode,
            tls=key.tls,
            incast=key.incast,
            under_load=key.under_load,
            fit=fit_link([sample for sample in samples if sample.conditions == key]),
        )
        for key in conditions
    )
    fields = {"transport": "tcp", "measured": True, "date": MARCH, **fields}
    return LinkProfile(
        from_node=from_node, to_node=to_node, fits=fits, samples=tuple(samples) if keep else (), **fields
    )


def links(*pairs: LinkProfile) -> LinkFile:
    names = dict.fromkeys(name for pair in pairs for name in (pair.from_node, pair.to_node))
    return LinkFile(nodes=tuple(Node(name=name) for name in names), pairs=pairs)


def published(table: str) -> list[Sample]:
    """The copies of a published table; how many pieces they had is not published."""
    text = (Path(__file__).parent / "golden" / "link_tables.csv").read_text("utf-8")
    rows = csv.DictReader(row for row in text.splitlines() if not row.startswith("#"))
    return [
        Sample(
            mode=Mode.PUSH,
            nbytes=int(row["nbytes"]),
            descriptors=1,
            seconds=float(row["milliseconds"]) / 1e3,
        )
        for row in rows
        if row["table"] == table
    ]
