"""What crosses when a pair of layouts is not copied but converted, in windows that fit into staging.

The wire form of one tensor is (tokens, heads, elements), C order, in the dtype that crosses: what both
sides can make without knowing how the other stores it. Prefill packs, decode unpacks (``pack.py``).
A window is a run of segments; a segment is some tokens and heads of one tensor, behind its scales
where it has any. Both sides cut windows from the same arguments, so they name one by its number.

Segments are cut where a block of the source begins, so a (block, head) has one scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CapacityError, IncompatibleError, InputError
from kvferry.layout.clusters import CHUNK_NBYTES
from kvferry.layout.conversion import SCALE_NBYTES, Conversion, Conversions, conversion
from kvferry.layout.match import mismatches, places
from kvferry.layout.plan import CopyPlan
from kvferry.layout.records import PoolLayout, TensorLayout
from kvferry.layout.route import Selection
from kvferry.layout.segments import Extent, live_entries
from kvferry.layout.tables import BlockTable
from kvferry.layout.words import ITEMSIZE

__all__ = [
    "Segment",
    "Side",
    "Window",
    "WireTensor",
    "cut_windows",
    "least_window_nbytes",
    "wire_form",
    "wire_nbytes",
]

Side = tuple[PoolLayout, Sequence[BlockTable]]
"""One side's layout and its block tables of the request, one a group."""

# 64 GiB in segments of 1 MiB, or half a minute of cutting: more is a window far too small for its request.
MAX_SEGMENTS = 1 << 16
# A segment's tensor, first entry and first head as one number, which names it in digest tables.
_ENTRY_BITS, _HEAD_BITS = 31, 16


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One tensor that both sides hold, and which of the model's heads of it cross: [start, stop).

    ``src_group`` and ``dst_group`` are indexes into either layout's groups; ``src_entries`` are the entries
    of a block of the source, which share a scale.
    """

    src: TensorLayout
    dst: TensorLayout
    src_group: int
    dst_group: int
    heads: tuple[int, int]
    src_entries: int
    conversion: Conversion


@dataclass(frozen=True, slots=True)
class Segment:
    """Entries [first, stop) and the model's heads [first_head, stop_head) of one tensor of a wire form.

    ``scales``: blocks of the source that it touches, where the tensor crosses with scales; else 0.
    ``nbytes`` counts scales and values.
    """

    tensor: int
    first: int
    stop: int
    first_head: int
    stop_head: int
    scales: int
    nbytes: int

    @property
    def scales_nbytes(self) -> int:
        """They come first."""
        return self.scales * (self.stop_head - self.first_head) * SCALE_NBYTES

    @property
    def chunk_id(self) -> int:
        """Names the segment among all of a request."""
        return (self.tensor << _ENTRY_BITS | self.first) << _HEAD_BITS | self.first_head


@dataclass(frozen=True, slots=True)
class Window:
    """Segments that cross together, one after the other."""

    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return sum(segment.nbytes for segment in self.segments)

    def plan(self, src_offset: int, dst_offset: int) -> CopyPlan:
        """The copy from one staging memory into another, a chunk for each segment."""
        nbytes = np.array([segment.nbytes for segment in self.segments], np.int64)
        inside = np.cumsum(nbytes) - nbytes
        return CopyPlan(
            src_offset=src_offset + inside,
            dst_offset=dst_offset + inside,
            nbytes=nbytes,
            chunk_start=np.arange(len(nbytes) + 1),
            chunk_id=self.chunk_ids(),
            chunk_complete=np.ones(len(nbytes), np.bool_),
        )

    def chunk_ids(self) -> NDArray[np.int64]:
        """int64, one for each segment, in their order."""
        return np.array([segment.chunk_id for segment in self.segments], np.int64)


@lru_cache(maxsize=64)
def wire_form(
    src: PoolLayout, dst: PoolLayout, allowed: Conversions, selections: tuple[Selection, ...] = (Selection(),)
) -> tuple[WireTensor, ...] | None:
    """Every tensor that crosses, in the order of the selections and then of the source's groups.

    None where all of them are plain copies: a copy plan does that without staging. Raises
    IncompatibleError naming tensors and fields where neither a copy nor an allowed conversion exists.
    """
    reasons = mismatches(src, dst, allowed)
    if reasons:
        raise IncompatibleError("; ".join(reasons))
    found = [wire for selection in selections for wire in _selected(src, dst, allowed, selection)]
    changes = mismatches(src, dst) or any(wire.conversion.changes for wire in found)
    return tuple(found) if changes else None


def _selected(
    src: PoolLayout, dst: PoolLayout, allowed: Conversions, selection: Selection
) -> Iterator[WireTensor]:
    there = places(dst)
    for index, group in enumerate(src.groups):
        for tensor in sorted(group.tensors, key=lambda tensor: (tensor.layer, tensor.offset)):
            place = there.get((tensor.layer, tensor.role, tensor.part))
            if place is None or not _is_selected(tensor, selection):
                continue
            dst_group, other = place
            low, high = selection.head_range or (0, tensor.head_stop)
            heads = (
                max(low, tensor.head_start, other.head_start),
                min(high, tensor.head_stop, other.head_stop),
            )
            how = conversion(tensor, other, allowed)
            assert how is not None  # mismatches would have said so
            if heads[0] < heads[1]:
                yield WireTensor(tensor, other, index, dst_group, heads, group.entries_per_block, how)


def _is_selected(tensor: TensorLayout, selection: Selection) -> bool:
    return (selection.layers is None or tensor.layer in selection.layers) and (
        selection.parts is None or (tensor.role, tensor.part) in selection.parts
    )


def least_window_nbytes(form: tuple[WireTensor, ...]) -> int:
    """Bytes that a window must have: one head of one block of the tensor where that is most."""
    return max((_nbytes(wire, wire.src_entries, 1, 1) for wire in form), default=0)


def cut_windows(
    form: tuple[WireTensor, ...],
    src: Side,
    dst: Side,
    extent: Extent,
    *,
    slot_nbytes: int,
    layers: Collection[int] | None = None,
) -> tuple[Window, ...]:
    """The windows of one part of a request, each of at most ``slot_nbytes``.

    ``layers``: only these. Raises InputError where the two sides' tables are for unlike numbers of
    entries, CapacityError where one head of one block needs more than ``slot_nbytes``, or where that is
    far too little for the request.
    """
    windows: list[Window] = []
    taken: list[Segment] = []
    nbytes = 0
    segments = _segments(form, src, dst, extent, slot_nbytes=slot_nbytes, layers=layers)
    for count, segment in enumerate(segments):
        if count == MAX_SEGMENTS:
            raise CapacityError(
                f"staging: windows of {slot_nbytes} bytes cut the request into more than {count} segments",
                next_step="give both pools more staging",
            )
        if taken and nbytes + segment.nbytes > slot_nbytes:
            windows.append(Window(tuple(taken)))
            taken, nbytes = [], 0
        taken.append(segment)
        nbytes += segment.nbytes
    return (*windows, Window(tuple(taken))) if taken else ()


def _segments(
    form: tuple[WireTensor, ...],
    src: Side,
    dst: Side,
    extent: Extent,
    *,
    slot_nbytes: int,
    layers: Collection[int] | None,
) -> Iterator[Segment]:
    for index, wire in enumerate(form):
        if layers is not None and wire.src.layer not in layers:
            continue
        group, other = src[0].groups[wire.src_group], dst[0].groups[wire.dst_group]
        span = live_entries(group, src[1][wire.src_group], extent)
        there = live_entries(other, dst[1][wire.dst_group], extent)
        if span != there:
            raise InputError(
                f"destination table of group {other.name!r}: it is for {there[1]} entries,"
                f" the source has {span[1]}"
            )
        if span[0] < span[1]:
            yield from _cut(index, wire, span, slot_nbytes)


def _cut(index: int, wire: WireTensor, span: tuple[int, int], slot_nbytes: int) -> Iterator[Segment]:
    """Whole blocks, as many as fit into a segment; a block that does not fit is cut by heads."""
    limit, block = min(slot_nbytes, CHUNK_NBYTES), wire.src_entries
    block_nbytes = _nbytes(wire, block, 1, 1)
    if block_nbytes > slot_nbytes:
        raise CapacityError(
            f"staging: one head of one block of {wire.src} is {block_nbytes} bytes on the wire,"
            f" a window has {slot_nbytes}",
            next_step="give both pools more staging, or smaller blocks",
        )
    heads = wire.heads[1] - wire.heads[0]
    per_segment = max(1, min(heads, limit // block_nbytes))
    entries = block * max(1, limit // (block_nbytes * per_segment))
    for first in range(span[0] // entries * entries, span[1], entries):
        start, stop = max(first, span[0]), min(first + entries, span[1])
        for head in range(*wire.heads, per_segment):
            stop_head = min(head + per_segment, wire.heads[1])
            blocks = -(-stop // block) - start // block
            yield Segment(
                index,
                start,
                stop,
                head,
                stop_head,
                blocks if wire.conversion.scaled else 0,
                _nbytes(wire, stop - start, stop_head - head, blocks),
            )


def _nbytes(wire: WireTensor, entries: int, heads: int, blocks: int) -> int:
    how = wire.conversion
    values = entries * wire.src.head_dim * ITEMSIZE[how.wire]
    return heads * (values + (blocks * SCALE_NBYTES if how.scaled else 0))


def wire_nbytes(windows: Sequence[Window]) -> int:
    """Bytes on the wire of a part."""
    return sum(window.nbytes for window in windows)
