"""The form of a model's sequence state, read off one that llama.cpp wrote here, and its place in a pool.

Layers are numbered as llama.cpp writes them: those of the full attention memory, then those with a
window, then the recurrent ones. A row is opaque: ``heads`` is 1, whatever the model's heads are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.llamacpp.blob import Attention, Part, Recurrent, Rows
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

__all__ = ["LAYOUT", "SequenceForm", "TensorForm", "attention_positions"]

LAYOUT = "rows"
_DTYPES = {0: ("float32", 4), 1: ("float16", 2), 30: ("bfloat16", 2)}
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class TensorForm:
    """One tensor. ``at``: which part, which of its fields (keys, values, rows), and which entry of that."""

    layer: int
    role: Role
    at: tuple[int, str, int]
    dtype: str
    elements: int
    row_nbytes: int
    group: str

    @property
    def key(self) -> TensorKey:
        """As records name it."""
        return TensorKey(layer=self.layer, role=self.role)


class SequenceForm:
    """``template``: the parts of a sequence that this model wrote; ``window``: of those with one, or None."""

    def __init__(self, template: Sequence[Part], window: int | None) -> None:
        self.template = tuple(template)
        self.window = window
        self.tensors: list[TensorForm] = []
        self.layers: list[LayerNeed] = []
        for number, part in enumerate(self.template):
            if isinstance(part, Attention):
                self._add_attention(number, part)
            else:
                self._add_recurrent(number, part)

    def needs(self) -> tuple[TensorNeed, ...]:
        """What decode asks of a state."""
        return tuple(self._need(form) for form in self.tensors)

    def entries(self, tokens: int) -> tuple[TensorEntry, ...]:
        """The tensors of a request that has seen ``tokens`` tokens."""
        specs = [need.spec(tokens, 0) for need in self.needs()]
        return tuple(
            TensorEntry(
                layer=spec.key.layer,
                role=spec.key.role,
                dtype=spec.dtype,
                axes=spec.axes,
                shape=spec.shape,
                group=spec.group,
            )
            for spec in specs
        )

    def layer_states(self, tokens: int) -> tuple[LayerState, ...]:
        """The layers of such a request."""
        return tuple(
            LayerState(
                layer=need.layer,
                kind=need.kind,
                window=need.window,
                cumulative_length=tokens if need.kind is LayerKind.SLIDING else None,
                has_previous_state=True if need.kind in (LayerKind.LINEAR, LayerKind.CONV) else None,
            )
            for need in self.layers
        )

    def layout(self, *, tokens: int, requests: int, block_size: int) -> PoolLayout:
        """A pool for ``tokens`` tokens of all requests together, and slots for ``requests`` of them."""
        groups: list[GroupLayout] = []
        offset = 0
        for name in dict.fromkeys(form.group for form in self.tensors):
            members = [form for form in self.tensors if form.group == name]
            is_state = members[0].role in (Role.CONV, Role.SSM)
            rows, num_blocks = (1, requests) if is_state else (block_size, -(-tokens // block_size))
            layouts = []
            for form in members:
                stride = rows * form.row_nbytes
                token_stride = 0 if is_state else form.row_nbytes
                place = (offset, stride, token_stride, stride, 1, form.elements)
                layouts.append(TensorLayout(form.layer, form.role, form.dtype, *place))
                offset += -(-num_blocks * stride // _ALIGNMENT) * _ALIGNMENT
            window = self.window if name.startswith(LayerKind.SLIDING.value) else None
            kind = LayerKind.LINEAR if is_state else LayerKind.FULL if window is None else LayerKind.SLIDING
            size = None if is_state else block_size
            groups.append(GroupLayout(name, kind, size, num_blocks, tuple(layouts), window=window))
        return PoolLayout(tuple(groups), offset)

    def _add_attention(self, number: int, part: Attention) -> None:
        # With two attention memories the first keeps every token, the second those in the window.
        is_sliding = self.window is not None and (number == 1 or not self._has_second())
        kind = LayerKind.SLIDING if is_sliding else LayerKind.FULL
        group = f"{kind.value}{self.window}" if is_sliding else kind.value
        first = len(self.layers)
        for at, (keys, values) in enumerate(zip(part.keys, part.values, strict=True)):
            self.layers.append(
                LayerNeed(layer=first + at, kind=kind, window=self.window if is_sliding else None)
            )
            self._add(first + at, Role.KEY, (number, "keys", at), keys, group)
            self._add(first + at, Role.VALUE, (number, "values", at), values, group)

    def _has_second(self) -> bool:
        return sum(isinstance(part, Attention) for part in self.template) > 1

    def _add_recurrent(self, number: int, part: Recurrent) -> None:
        first, half = len(self.layers), len(part.rows) // 2
        for at in range(half):
            conv, state = part.rows[at], part.rows[half + at]
            kind = LayerKind.LINEAR if state.row_nbytes else LayerKind.CONV
            self.layers.append(LayerNeed(layer=first + at, kind=kind))
            self._add(first + at, Role.CONV, (number, "rows", at), conv, "state")
            self._add(first + at, Role.SSM, (number, "rows", half + at), state, "state")

    def _add(self, layer: int, role: Role, at: tuple[int, str, int], rows: Rows, group: str) -> None:
        if not rows.row_nbytes:
            return  # a model without recurrent states has them with no byte
        dtype, itemsize = _DTYPES.get(rows.type, ("uint8", 1))  # quantised rows are bytes
        elements = rows.row_nbytes // itemsize
        self.tensors.append(TensorForm(layer, role, at, dtype, elements, rows.row_nbytes, group))

    def _need(self, form: TensorForm) -> TensorNeed:
        is_state = form.role in (Role.CONV, Role.SSM)
        window = self.window if form.group.startswith(LayerKind.SLIDING.value) else None
        return TensorNeed(
            layer=form.layer,
            role=form.role,
            dtype=form.dtype,
            axes=(Axis.STATE,) if is_state else (Axis.TOKEN, Axis.HEAD, Axis.DIM),
            shape=(form.elements,) if is_state else (0, 1, form.elements),
            rows=RowRule(most=window),
            group=form.group,
        )


def attention_positions(part: Attention, tokens: int, window: int | None) -> NDArray[np.intp]:
    """The cell of each kept token, in the order of the tokens.

    Raises LocalError unless the cells hold exactly the last tokens, each once.
    """
    order = np.argsort(part.positions, kind="stable")
    kept = tokens if window is None else min(tokens, window)
    if not np.array_equal(part.positions[order], np.arange(tokens - kept, tokens)):
        raise LocalError(
            f"llama.cpp holds {len(order)} cells that are not the last {kept} of {tokens} tokens, each once"
        )
    return order
