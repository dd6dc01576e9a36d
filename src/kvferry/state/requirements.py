"""What a decode engine needs to start a request, derived from its own configuration alone.

The state is compared with this list both ways, so that half a state (a recurrent layer lost, a
window layer without its count) is refused instead of decoded. The list is data: the engine
derives it once and may send it to another process.
"""

from __future__ import annotations

import enum
from typing import Annotated

from msgspec import Meta

from kvferry.layout import GroupLayout, LayerKind, Role
from kvferry.state.cache import TensorKey
from kvferry.state.fingerprint import Fingerprint
from kvferry.state.fit import Conversion
from kvferry.state.request import DraftFingerprint
from kvferry.state.values import Axis, Count, Name, Record, RngKind, Shape

__all__ = [
    "DraftNeed",
    "GroupNeed",
    "LayerNeed",
    "Placement",
    "Requirements",
    "RowRule",
    "TensorNeed",
    "TensorSpec",
    "TokenSource",
]


class Placement(enum.StrEnum):
    """Whether the physical order of the slots changes this engine's bits."""

    IRRELEVANT = "irrelevant"
    RESTORABLE = "restorable"  # it does, and an import can put the tokens where they were
    UNCONTROLLED = "uncontrolled"  # it does, and an import packs them anew


class TokenSource(enum.StrEnum):
    """Whose tokens a group holds."""

    REQUEST = "request"
    ENCODER = "encoder"
    DRAFT = "draft"


class RowRule(Record, frozen=True, kw_only=True):
    """How many rows the token axis has for n tokens: ``min(most, n // tokens_per_row)``.

    ``of_encoder``: n counts the encoder's tokens (cross attention).
    """

    most: Count | None = None
    tokens_per_row: Annotated[int, Meta(ge=1)] = 1
    of_encoder: bool = False

    def rows(self, tokens: int, encoder_tokens: int) -> int:
        """Rows for a request of so many tokens."""
        rows = (encoder_tokens if self.of_encoder else tokens) // self.tokens_per_row
        return rows if self.most is None else min(rows, self.most)


class LayerNeed(Record, frozen=True, kw_only=True):
    """One layer's kind, window in tokens, rollback flag, and tokens per entry of a compressed cache."""

    layer: Count
    kind: LayerKind
    window: Count | None = None
    record_past: bool | None = None
    tokens_per_entry: Annotated[int, Meta(ge=1)] | None = None


class TensorSpec(Record, frozen=True, kw_only=True):
    """A tensor that a request of known length must have."""

    key: TensorKey
    dtype: Name
    axes: tuple[Axis, ...]
    shape: Shape
    group: Name | None
    alias_of: TensorKey | None
    scheme: Name | None


class TensorNeed(Record, frozen=True, kw_only=True):
    """A tensor as a function of the token count: ``shape`` with ``rows`` in place of the token axis.

    ``axes`` in the engine's canonical order. ``group``: the pool group that holds it, or None
    when it travels in a section. ``scheme``: how it is quantised, or None.
    """

    layer: Count
    role: Role
    part: Annotated[int, Meta(ge=0, le=255)] = 0
    dtype: Name
    axes: tuple[Axis, ...]
    shape: Shape
    rows: RowRule = RowRule()
    group: Name | None = None
    alias_of: TensorKey | None = None
    scheme: Name | None = None

    def spec(self, tokens: int, encoder_tokens: int) -> TensorSpec:
        """This tensor for a request of so many tokens."""
        rows = self.rows.rows(tokens, encoder_tokens)
        return TensorSpec(
            key=TensorKey(layer=self.layer, role=self.role, part=self.part),
            dtype=self.dtype,
            axes=self.axes,
            shape=tuple(
                rows if axis is Axis.TOKEN else extent
                for axis, extent in zip(self.axes, self.shape, strict=True)
            ),
            group=self.group,
            alias_of=self.alias_of,
            scheme=self.scheme,
        )


class GroupNeed(Record, frozen=True, kw_only=True):
    """One layer group of the local pool.

    ``block_tokens`` None: slots of constant size, ``slots`` of them a request (None: any number,
    for an engine's opaque bytes). ``window``: tokens kept, None for all.
    """

    group: Name
    block_tokens: Annotated[int, Meta(ge=1)] | None
    layout: Name
    window: Count | None = None
    slots: Count | None = 1
    covers: TokenSource = TokenSource.REQUEST

    @classmethod
    def of(cls, group: GroupLayout, *, layout: str, covers: TokenSource = TokenSource.REQUEST) -> GroupNeed:
        """A group of the local pool; ``layout`` is its name in records, the same for like pools."""
        return cls(
            group=group.name,
            block_tokens=group.block_size,
            layout=layout,
            window=group.window,
            covers=covers,
        )

    def first_needed_token(self, kv_tokens: int) -> int:
        """The earliest of ``kv_tokens`` tokens that this group must still hold."""
        return 0 if self.window is None else max(0, kv_tokens - self.window)

    def blocks_for(self, tokens: int, kv_tokens: int) -> int:
        """Blocks (or slots) that hold up to ``tokens`` tokens when ``kv_tokens`` are imported."""
        if self.block_tokens is None:
            return 1 if self.slots is None else self.slots
        return -(-tokens // self.block_tokens) - self.first_needed_token(kv_tokens) // self.block_tokens


class DraftNeed(Record, frozen=True, kw_only=True):
    """What the local drafter continues from. ``must_ship``: it cannot start without the peer's draft state.

    ``hidden``: it continues from a hidden row. ``tokens_per_round``: drafts that it makes a round.
    """

    method: Name
    fingerprint: DraftFingerprint | None = None
    layers: tuple[LayerNeed, ...] = ()
    tensors: tuple[TensorNeed, ...] = ()
    hidden: bool = False
    must_ship: bool = True
    tokens_per_round: Count = 0


class Requirements(Record, frozen=True, kw_only=True):
    """Everything that this engine needs. ``fingerprint.lora``: the adapters loaded here.

    ``sections``: names of the opaque sections that must be there. ``extensions``: names of
    extensions that this side understands. ``proven``: conversions shown to keep the bits here.
    """

    fingerprint: Fingerprint
    layers: tuple[LayerNeed, ...]
    cache: tuple[TensorNeed, ...]
    groups: tuple[GroupNeed, ...]
    rng_kinds: tuple[RngKind, ...]
    grammar_kinds: tuple[Name, ...] = ()
    draft: DraftNeed | None = None
    sections: tuple[Name, ...] = ()
    extensions: tuple[Name, ...] = ()
    placement: Placement = Placement.IRRELEVANT
    proven: tuple[Conversion, ...] = ()

    def tensors(self, tokens: int, encoder_tokens: int = 0) -> tuple[TensorSpec, ...]:
        """The cache tensors of a request whose KV covers ``tokens`` tokens, from the local config alone."""
        return tuple(need.spec(tokens, encoder_tokens) for need in self.cache)
