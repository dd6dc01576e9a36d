"""Random copy plans, and what they must do, said once more in plain loops."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.layout import CopyPlan

__all__ = ["expected_copy", "expected_digests", "make_plan", "random_plan"]

Bytes = NDArray[np.uint8]


def make_plan(
    src_offset: list[int], dst_offset: list[int], nbytes: list[int], chunk_start: list[int] | None = None
) -> CopyPlan:
    """A plan from lists. ``chunk_start`` has one entry a chunk and one more; by default one chunk."""
    starts = [0, len(nbytes)] if chunk_start is None else chunk_start
    if not nbytes:
        starts = [0]
    num_chunks = len(starts) - 1
    return CopyPlan(
        src_offset=np.array(src_offset, np.int64),
        dst_offset=np.array(dst_offset, np.int64),
        nbytes=np.array(nbytes, np.int64),
        chunk_start=np.array(starts, np.int64),
        chunk_id=np.arange(num_chunks, dtype=np.int64) * 7 + 3,
        chunk_complete=np.ones(num_chunks, np.bool_),
    )


def random_plan(seed: int, pool_nbytes: int, sizes: list[int], num_chunks: int = 1) -> CopyPlan:
    """Pieces of ``sizes`` bytes at random places of two pools; those at the destination are disjoint.

    The pieces leave random gaps of any length on both sides, so nothing is aligned.
    """
    rng = np.random.default_rng(seed)
    places = []
    for _ in range(2):
        order = rng.permutation(len(sizes))
        gaps = rng.multinomial(pool_nbytes - sum(sizes), np.full(len(sizes) + 1, 1 / (len(sizes) + 1)))
        offset, at = [0] * len(sizes), 0
        for gap, piece in zip(gaps.tolist(), order.tolist(), strict=False):
            offset[piece] = at + gap
            at = offset[piece] + sizes[piece]
        places.append(offset)
    borders = rng.choice(np.arange(1, len(sizes)), min(num_chunks, len(sizes)) - 1, replace=False)
    return make_plan(places[0], places[1], sizes, [0, *sorted(borders.tolist()), len(sizes)])


def expected_copy(plan: CopyPlan, source: Bytes, destination: Bytes) -> Bytes:
    """What ``destination`` holds after the plan was carried out, piece by piece."""
    result = destination.copy()
    for src, dst, nbytes in zip(
        plan.src_offset.tolist(), plan.dst_offset.tolist(), plan.nbytes.tolist(), strict=True
    ):
        result[dst : dst + nbytes] = source[src : src + nbytes]
    return result


def expected_digests(plan: CopyPlan, source: Bytes) -> list[int]:
    """xxh3-64 of each chunk's bytes, joined first."""
    starts = plan.chunk_start.tolist()
    return [
        xxhash.xxh3_64_intdigest(
            b"".join(
                source[plan.src_offset[i] : plan.src_offset[i] + plan.nbytes[i]].tobytes()
                for i in range(first, last)
            )
        )
        for first, last in pairwise(starts)
    ]
