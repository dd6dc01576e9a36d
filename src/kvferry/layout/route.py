"""What of one layout goes where in another, apart from any request: computed once a pair.

A route is a list of runs. The clusters of a run have one shape (the same strides on both sides,
the same groups), so that the pieces of a request are computed for one of them and shifted by the
offsets of the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import IncompatibleError, InputError
from kvferry.layout.clusters import ChunkGrid, Cluster, source_clusters
from kvferry.layout.match import Key, Place, layer_ranges, mismatches, places
from kvferry.layout.records import PoolLayout, TensorLayout
from kvferry.layout.words import Role

__all__ = ["Part", "Run", "Selection", "Shape", "Steps", "route"]


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a pair of layouts is asked for; None is everything that both hold."""

    layers: tuple[int, ...] | None = None
    parts: frozenset[tuple[Role, int]] | None = None
    head_range: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """Address of (block, token, head, element) in bytes, counted from the first moved head of a tensor.

    ``dim`` is 0 where a row is one run.
    """

    offset: int
    block: int
    token: int
    head: int
    dim: int


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a cluster: ``heads`` rows an entry, from source to destination.

    A row is ``dims`` runs of ``run_nbytes``: one, unless its elements lie apart on both sides. Offsets
    count from the run's offsets. ``first_head`` is the first moved head's place among the source
    tensor's heads.
    """

    src: Steps
    dst: Steps
    dst_group: int
    first_head: int
    heads: int
    dims: int
    run_nbytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """All that the pieces of a cluster depend on, besides its offsets and the request."""

    src_group: int
    grid: ChunkGrid
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Clusters of one shape that follow each other in source order; int64 arrays, one entry a cluster."""

    shape: Shape
    src_offset: NDArray[np.int64]
    dst_offset: NDArray[np.int64]
    first_chunk_id: NDArray[np.int64]


@lru_cache(maxsize=64)
def route(src: PoolLayout, dst: PoolLayout, selection: Selection) -> tuple[Run, ...]:
    """All runs from ``src`` to ``dst`` in source order.

    Raises IncompatibleError naming tensors and fields where the pair has no plan, InputError for
    a selection that names a layer which one of them does not hold.
    """
    reasons = mismatches(src, dst)
    if reasons:
        raise IncompatibleError("; ".join(reasons))
    common = set(src.layers) & set(dst.layers)
    chosen = common if selection.layers is None else set(selection.layers)
    if not chosen <= common:
        raise InputError(f"layers: {layer_ranges(chosen - common)} not held by both sides")
    there = places(dst)
    rows = [
        (shape, cluster.offset, dst_offset, cluster.first_chunk_id)
        for cluster in source_clusters(src)
        if cluster.layer in chosen
        for shape, dst_offset in _shapes(cluster, there, selection)
    ]
    runs = []
    for shape, members in groupby(rows, key=lambda row: row[0]):
        columns = np.array([row[1:] for row in members], dtype=np.int64).T
        runs.append(Run(shape, *np.ascontiguousarray(columns)))
    return tuple(runs)


def _shapes(
    cluster: Cluster, there: Mapping[Key, Place], selection: Selection
) -> Iterator[tuple[Shape, int]]:
    """The shape of a cluster and its offset at the destination; nothing if no part of it is selected."""
    parts = []
    first: int | None = None
    for tensor in cluster.tensors:
        if selection.parts is not None and (tensor.role, tensor.part) not in selection.parts:
            continue
        dst_group, other = there[tensor.layer, tensor.role, tensor.part]
        low, high = selection.head_range or (0, tensor.head_stop)
        start = max(low, tensor.head_start, other.head_start)
        heads = min(high, tensor.head_stop, other.head_stop) - start
        if heads <= 0:
            continue
        first = other.offset if first is None else first
        parts.append(
            Part(
                src=_steps(tensor, start, cluster.offset),
                dst=_steps(other, start, first),
                dst_group=dst_group,
                first_head=start - tensor.head_start,
                heads=heads,
                dims=tensor.inner[0],
                run_nbytes=tensor.inner[2],
            )
        )
    if first is not None:
        yield Shape(cluster.group_index, cluster.grid, tuple(parts)), first


def _steps(tensor: TensorLayout, head: int, base: int) -> Steps:
    offset = tensor.offset - base + (head - tensor.head_start) * tensor.head_stride
    return Steps(offset, tensor.block_stride, tensor.token_stride, tensor.head_stride, tensor.inner[1])
