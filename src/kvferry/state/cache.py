"""What lies in the cache: layers, tensors and block tables, by role and never by attribute name."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.layout import BlockTable, LayerKind, Role
from kvferry.state.values import (
    Axis,
    Count,
    Int32Bytes,
    Name,
    Record,
    Shape,
    pack_ids,
    require_whole_ids,
    unpack_ids,
)

__all__ = ["GroupBlocks", "LayerState", "Quantisation", "Section", "TensorEntry", "TensorKey"]


class LayerState(Record, frozen=True, kw_only=True):
    """One layer's kind of cache, and the scalars without which its tensors are misread.

    Every layer has an entry, those without a cache too (kind ``dummy``); a layer that keeps two
    kinds (attention beside a recurrent state) has two. ``window`` in tokens. A scalar is None
    where the kind has none. ``cumulative_length``: tokens seen, though a window keeps fewer;
    ``has_previous_state``: false makes a recurrent layer start anew; ``entry_count``: rows of a
    compressed cache; ``record_past``: window and conv tensors are kept longer, for rollback.
    """

    layer: Count
    kind: LayerKind
    window: Count | None = None
    cumulative_length: Count | None = None
    has_previous_state: bool | None = None
    entry_count: Count | None = None
    record_past: bool | None = None


class TensorKey(Record, frozen=True, kw_only=True):
    """Names a cache tensor by what it is. ``part`` tells several of one role in a layer apart."""

    layer: Count
    role: Role
    part: Annotated[int, Meta(ge=0, le=255)] = 0


class Quantisation(Record, frozen=True, kw_only=True):
    """How a quantised tensor is stored, and the section that holds its scales, if they lie apart."""

    scheme: Name
    scales: Name | None = None


class TensorEntry(Record, frozen=True, kw_only=True):
    """One cache tensor: its element type and logical axes (all ranks together), and where its bytes are.

    Exactly one of ``group`` (a block table's group), ``section`` (a section of this record) and
    ``alias_of`` (the same bytes as another tensor) is set. ``shape`` has one extent per axis.
    """

    layer: Count
    role: Role
    part: Annotated[int, Meta(ge=0, le=255)] = 0
    dtype: Name
    axes: Annotated[tuple[Axis, ...], Meta(max_length=8)]
    shape: Shape
    group: Name | None = None
    section: Name | None = None
    alias_of: TensorKey | None = None
    quantisation: Quantisation | None = None

    @property
    def key(self) -> TensorKey:
        """Layer, role and part."""
        return TensorKey(layer=self.layer, role=self.role, part=self.part)


class GroupBlocks(Record, frozen=True, kw_only=True):
    """The prefill side's block table of one layer group.

    ``block_tokens``: tokens a block, None for a slot of constant size (a recurrent state).
    ``layout``: the pool's axis order and packing, or ``native:<backend>``. ``ids``: blocks in
    logical order from ``first_logical_block`` on (a window group starts after 0).
    ``placement``: physical slot of each kept token, for engines whose bits depend on it.
    """

    group: Name
    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] | None
    layout: Name
    first_logical_block: Count = 0
    ids: Int32Bytes
    placement: Int32Bytes | None = None

    def __post_init__(self) -> None:
        require_whole_ids(self.ids, "block ids")
        require_whole_ids(self.placement, "placement")

    @classmethod
    def of(cls, group: str, table: BlockTable, *, block_tokens: int | None, layout: str) -> GroupBlocks:
        """An engine's block table as it travels."""
        return cls(
            group=group,
            block_tokens=block_tokens,
            layout=layout,
            first_logical_block=table.first_block,
            ids=pack_ids(table.ids),
        )

    def table(self, tokens: int | None = None) -> BlockTable:
        """The block table for a copy plan; ``tokens`` only for cross attention."""
        return BlockTable(self.first_logical_block, unpack_ids(self.ids), tokens)


class Section(Record, frozen=True, kw_only=True):
    """Bytes under a name: a tensor that lies in no pool, or an engine's own opaque form (``native:...``)."""

    name: Name
    data: bytes
