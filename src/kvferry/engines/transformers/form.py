"""The form of a model's cache, read off a cache that the model itself filled once.

Layers, tensors, dtypes and shapes come from the local model alone, so half a state, or that of
another model, is found out before it is loaded. Nothing here depends on the architecture's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec.structs import replace as replace_field

from kvferry.engines.transformers.roles import Growth, Held, attention_kind, held_by, read
from kvferry.errors import LocalError
from kvferry.layout import GroupLayout, LayerKind, PoolLayout, Role, TensorLayout
from kvferry.state import (
    Axis,
    LayerNeed,
    LayerState,
    RowRule,
    TensorEntry,
    TensorKey,
    TensorNeed,
)

__all__ = ["LAYOUT", "CacheForm", "TensorForm", "dtype_name"]

LAYOUT = "HND"
_STATE_GROUP = "state"
_ALIGNMENT = 64
_RECURRENT = (Role.CONV, Role.SSM)
_SLOT_AXES = {1: (Axis.DIM,), 2: (Axis.CHANNEL, Axis.STATE), 3: (Axis.HEAD, Axis.DIM, Axis.STATE)}


@dataclass(frozen=True, slots=True)
class TensorForm:
    """One tensor. ``layer``: its number in the record; ``at``: its layer's place in the local cache.

    ``heads`` and ``width``: of a row, where it has a token axis; ``shape``: all axes but the batch,
    where it has none (a remainder is padded to a whole entry).
    """

    layer: int
    at: int
    held: Held
    dtype: torch.dtype
    group: str
    heads: int
    width: int
    shape: tuple[int, ...]

    @property
    def is_slot(self) -> bool:
        """One size, whatever the number of tokens."""
        return self.group.endswith(_STATE_GROUP)

    @property
    def key(self) -> TensorKey:
        """As records name it."""
        return TensorKey(layer=self.layer, role=self.held.role, part=self.held.part)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def need(self) -> TensorNeed:
        """What decode asks of a state for it."""
        held = self.held
        if self.is_slot:
            axes, shape, rows = _SLOT_AXES[len(self.shape)], self.shape, RowRule()
        else:
            axes, shape = (Axis.TOKEN, Axis.HEAD, Axis.DIM), (0, self.heads, self.width)
            rows = RowRule(most=held.window, tokens_per_row=held.rate, of_encoder=_is_cross(held.role))
        return TensorNeed(
            layer=self.layer,
            role=held.role,
            part=held.part,
            dtype=dtype_name(self.dtype),
            axes=axes,
            shape=shape,
            rows=rows,
            group=self.group,
        )


@dataclass(frozen=True, slots=True)
class CacheForm:
    """All of a cache. ``template``: the layers that it was read off, to copy their plain values from."""

    layers: tuple[LayerNeed, ...]
    tensors: tuple[TensorForm, ...]
    template: tuple[Any, ...]

    @classmethod
    def of(
        cls,
        template: tuple[Any, ...],
        tokens: int,
        *,
        latent_dim: int | None = None,
        is_cross: bool = False,
    ) -> CacheForm:
        """Read the form off layers that have seen ``tokens`` tokens.

        Raises LocalError naming the layer for one that does not hold what its class should hold.
        """
        layers: list[LayerNeed] = []
        tensors: list[TensorForm] = []
        for at, layer in enumerate(template):
            where = f"layer {at}"
            held = held_by(layer, where, latent_dim, is_cross=is_cross)
            kind = LayerKind.CROSS if is_cross else None
            needs = [*_layer_needs(layer, at, held, latent_dim, kind)]
            layers += needs
            for one in held:
                group = _group_name(one, needs[0].kind)
                tensors.append(_tensor_form(layer, at, one, group))
                _check_rows(where, one, read(layer, one.path), tokens)
        return cls(tuple(layers), tuple(tensors), template)

    def renumbered(self, first_layer: int, prefix: str) -> CacheForm:
        """The same cache as a second one in a pool: layers from ``first_layer`` on, group names prefixed."""
        return CacheForm(
            tuple(replace_field(need, layer=need.layer + first_layer) for need in self.layers),
            tuple(
                replace(form, layer=form.layer + first_layer, group=prefix + form.group)
                for form in self.tensors
            ),
            self.template,
        )

    def beside(self, other: CacheForm) -> CacheForm:
        """Both, one after the other."""
        return CacheForm(self.layers + other.layers, self.tensors + other.tensors, self.template)

    def layer_states(self, tokens: int, encoder_tokens: int) -> tuple[LayerState, ...]:
        """The layers of a request that has seen ``tokens`` tokens."""
        return tuple(_layer_state(need, tokens, encoder_tokens) for need in self.layers)

    def entries(self, tokens: int, encoder_tokens: int) -> tuple[TensorEntry, ...]:
        """The tensors of such a request, all in the pool."""
        specs = [form.need().spec(tokens, encoder_tokens) for form in self.tensors]
        return tuple(
            TensorEntry(
                layer=spec.key.layer,
                role=spec.key.role,
                part=spec.key.part,
                dtype=spec.dtype,
                axes=spec.axes,
                shape=spec.shape,
                group=spec.group,
            )
            for spec in specs
        )

    def layout(self, *, tokens: int, requests: int, block_size: int, encoder_tokens: int = 0) -> PoolLayout:
        """A pool for ``tokens`` tokens of all requests together, and slots for ``requests`` of them.

        ``encoder_tokens``: of all requests together, for cross attention.
        """
        groups: list[GroupLayout] = []
        offset = 0
        for name in dict.fromkeys(form.group for form in self.tensors):
            members = [form for form in self.tensors if form.group == name]
            block, num_blocks = None, requests
            if not members[0].is_slot:
                block = self.block_size(name, block_size)
                of_encoder = _is_cross(members[0].held.role)
                num_blocks = max(1, -(-(encoder_tokens if of_encoder else tokens) // block))
            layouts = []
            for form in members:
                rows = 1 if block is None else block // form.held.rate
                layouts.append(_tensor_layout(form, offset, rows))
                offset += -(-num_blocks * layouts[-1].block_stride // _ALIGNMENT) * _ALIGNMENT
            groups.append(_group(name, members[0], block, num_blocks, tuple(layouts)))
        return PoolLayout(tuple(groups), offset)

    def block_size(self, group: str, block_size: int) -> int:
        """``block_size``, or the next whole number of entries."""
        rate = next(form.held.rate for form in self.tensors if form.group == group)
        return -(-block_size // rate) * rate


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def _layer_needs(
    layer: Any, number: int, held: tuple[Held, ...], latent_dim: int | None, kind: LayerKind | None
) -> Iterator[LayerNeed]:
    growths = {one.growth for one in held}
    roles = {one.role for one in held}
    if getattr(layer, "keys", None) is not None:
        kind = kind or attention_kind(layer, latent_dim)
        is_sliding = kind is LayerKind.SLIDING
        yield LayerNeed(
            layer=number,
            kind=kind,
            window=layer.sliding_window if is_sliding else None,
            record_past=False if is_sliding else None,
        )
    if Growth.ENTRIES in growths:
        yield LayerNeed(layer=number, kind=LayerKind.COMPRESSED, tokens_per_entry=layer.compress_rate)
    if roles & set(_RECURRENT):
        recurrent = LayerKind.LINEAR if Role.SSM in roles else LayerKind.CONV
        yield LayerNeed(layer=number, kind=recurrent, record_past=False)
    if not held:
        yield LayerNeed(layer=number, kind=LayerKind.DUMMY)


def _tensor_form(layer: Any, at: int, held: Held, group: str) -> TensorForm:
    tensor = read(layer, held.path)
    assert tensor is not None
    if tensor.shape[0] != 1:
        raise LocalError(f"layer {at}: a cache of {tensor.shape[0]} sequences, not of one")
    shape = tuple(tensor.shape[1:])
    heads, width = (shape[0] if held.token_axis == 2 else 1), shape[-1]
    if held.growth is Growth.REMAINDER:
        shape = (held.rate, *shape[1:])  # padded
    return TensorForm(at, at, held, tensor.dtype, group, heads, width, shape)


def _group_name(held: Held, kind: LayerKind) -> str:
    if held.growth in (Growth.CONSTANT, Growth.AFTER_ENTRY, Growth.REMAINDER):
        return _STATE_GROUP
    if held.growth is Growth.ENTRIES:
        return f"compressed{held.rate}"
    return kind.value + (str(held.window) if held.window is not None else "")


def _check_rows(where: str, held: Held, tensor: torch.Tensor | None, tokens: int) -> None:
    if held.token_axis is None or _is_cross(held.role):
        return
    found = None if tensor is None else tensor.shape[held.token_axis]
    if found != held.rows(tokens):
        raise LocalError(
            f"{where}: {held.path} has {found} rows after {tokens} tokens, {held.rows(tokens)} were expected",
            next_step="file the model's name and the versions of transformers and kvferry as an issue",
        )


def _layer_state(need: LayerNeed, tokens: int, encoder_tokens: int) -> LayerState:
    kind = need.kind
    seen = {LayerKind.SLIDING: tokens, LayerKind.CROSS: encoder_tokens}
    return LayerState(
        layer=need.layer,
        kind=kind,
        window=need.window,
        cumulative_length=seen.get(kind),
        has_previous_state=True if kind in (LayerKind.LINEAR, LayerKind.CONV) else None,
        entry_count=None if need.tokens_per_entry is None else tokens // need.tokens_per_entry,
        record_past=need.record_past,
    )


def _tensor_layout(form: TensorForm, offset: int, rows: int) -> TensorLayout:
    row = form.width * form.itemsize
    if form.is_slot:
        row = math.prod(form.shape) * form.itemsize
    return TensorLayout(
        layer=form.layer,
        role=form.held.role,
        dtype=dtype_name(form.dtype),
        offset=offset,
        block_stride=form.heads * rows * row,
        token_stride=0 if form.is_slot else row,
        head_stride=rows * row,
        heads=form.heads,
        head_dim=row // form.itemsize,
        part=form.held.part,
    )


def _group(
    name: str, form: TensorForm, block: int | None, num_blocks: int, tensors: tuple[TensorLayout, ...]
) -> GroupLayout:
    held = form.held
    if form.is_slot:
        return GroupLayout(name, LayerKind.LINEAR, None, num_blocks, tensors)
    if held.growth is Growth.ENTRIES:
        return GroupLayout(name, LayerKind.COMPRESSED, block, num_blocks, tensors, tokens_per_entry=held.rate)
    kinds = {Role.CROSS_KEY: LayerKind.CROSS, Role.LATENT: LayerKind.MLA, Role.KEY: LayerKind.FULL}
    kind = LayerKind.SLIDING if held.window is not None else kinds[held.role]
    if any(tensor.role is Role.INDEX for tensor in tensors):
        kind = LayerKind.INDEXED
    return GroupLayout(name, kind, block, num_blocks, tensors, window=held.window)


def _is_cross(role: Role) -> bool:
    return role in (Role.CROSS_KEY, Role.CROSS_VALUE)
