"""Rows of a sequence's state into the blocks of the pool, and a state made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.llamacpp.blob import Attention, Part, Recurrent, Rows
from kvferry.engines.llamacpp.form import SequenceForm, TensorForm, attention_positions
from kvferry.errors import IncompatibleError, LocalError
from kvferry.layout import BlockTable, GroupLayout, PoolLayout, TensorLayout

__all__ = ["Placements", "Staging"]

Bytes = NDArray[np.uint8]
Placements = dict[str, NDArray[np.intp]]
"""Group -> for each token that it keeps, which of the sequence's cells it is in. For attention groups."""


class Staging:
    """The pool's views: (blocks, rows, bytes) for each tensor, (slots, bytes) for a recurrent one.

    Raises LocalError where the layout is not one that was made for this form.
    """

    def __init__(self, form: SequenceForm, layout: PoolLayout, memory: Bytes) -> None:
        self.form = form
        self.layout = layout
        there = {
            (tensor.layer, tensor.role): (at, group, tensor)
            for at, group in enumerate(layout.groups)
            for tensor in group.tensors
        }
        self._places: list[tuple[TensorForm, int, GroupLayout, Bytes]] = []
        for one in form.tensors:
            place = there.get((one.layer, one.role))
            if place is None or (place[2].row_nbytes, place[2].dtype) != (one.row_nbytes, one.dtype):
                raise LocalError(f"layout: {one.key} of the model has no place in it")
            at, group, tensor = place
            self._places.append((one, at, group, _view(group, tensor, memory)))

    def store(self, parts: Sequence[Part], tables: BlockTables, tokens: int) -> Placements:
        """Copy a sequence of ``tokens`` tokens into the blocks of ``tables``, in the order of its tokens."""
        placements = self.placements(parts, tokens)
        for form, at, group, view in self._places:
            rows = _rows_of(parts, form).data
            if group.is_state:
                view[tables[at].ids[0]] = rows[0]
                continue
            order = placements[group.name]
            blocks, places = _slots(group, tables[at], tokens, len(order))
            view[blocks, places] = rows[order]
        return placements

    def load(self, tables: BlockTables, tokens: int, placements: Placements) -> tuple[Part, ...]:
        """The parts of a sequence, from the blocks of ``tables`` and the local template; rows are copies."""
        rows: dict[tuple[int, str, int], Bytes] = {}
        for form, at, group, view in self._places:
            if group.is_state:
                rows[form.at] = view[tables[at].ids[:1]].copy()
                continue
            order = placements[group.name]
            blocks, places = _slots(group, tables[at], tokens, len(order))
            by_cell = np.empty((len(order), form.row_nbytes), np.uint8)
            by_cell[order] = view[blocks, places]
            rows[form.at] = by_cell
        return tuple(
            self._recurrent(number, part, rows, tokens)
            if isinstance(part, Recurrent)
            else self._attention(number, part, rows, placements, tokens)
            for number, part in enumerate(self.form.template)
        )

    def placements(self, parts: Sequence[Part], tokens: int) -> Placements:
        """Where each attention group's tokens are."""
        found: Placements = {}
        for form in self.form.tensors:
            part = parts[form.at[0]]
            if isinstance(part, Attention) and form.group not in found:
                found[form.group] = attention_positions(part, tokens, self._window(form.group))
        return found

    def check_placements(self, placements: Placements, tokens: int) -> None:
        """Raise IncompatibleError unless each is an order of exactly the tokens that its group keeps."""
        for group in self.layout.groups:
            if group.is_state:
                continue
            kept = tokens if group.window is None else min(tokens, group.window)
            if not np.array_equal(np.sort(placements[group.name]), np.arange(kept)):
                raise IncompatibleError(f"blocks {group.name!r}.placement is not an order of {kept} tokens")

    def nbytes(self, tokens: int) -> int:
        """Bytes of a request's rows as they travel."""
        total = 0
        for form, _, group, _ in self._places:
            kept = 1 if group.is_state else tokens if group.window is None else min(tokens, group.window)
            total += kept * form.row_nbytes
        return total

    def _window(self, name: str) -> int | None:
        return next(group.window for group in self.layout.groups if group.name == name)

    def _recurrent(
        self, number: int, part: Recurrent, rows: dict[tuple[int, str, int], Bytes], tokens: int
    ) -> Recurrent:
        made = tuple(_own(rows, (number, "rows", at), one) for at, one in enumerate(part.rows))
        return replace(part, position=tokens - 1, rows=made)

    def _attention(
        self,
        number: int,
        part: Attention,
        rows: dict[tuple[int, str, int], Bytes],
        placements: Placements,
        tokens: int,
    ) -> Attention:
        group = next((form.group for form in self.form.tensors if form.at[0] == number), None)
        # A memory without a layer has a cell for every token all the same.
        order = np.arange(tokens) if group is None else placements[group]
        positions = np.empty(len(order), np.int32)
        positions[order] = np.arange(tokens - len(order), tokens)
        return replace(
            part,
            positions=positions,
            keys=tuple(_own(rows, (number, "keys", at), one) for at, one in enumerate(part.keys)),
            values=tuple(_own(rows, (number, "values", at), one) for at, one in enumerate(part.values)),
        )


def _own(rows: dict[tuple[int, str, int], Bytes], at: tuple[int, str, int], template: Rows) -> Rows:
    """What was loaded, with the local type; rows of no byte do not travel."""
    given = rows.get(at)
    return Rows(template.type, np.zeros((1, 0), np.uint8) if given is None else given)


def _rows_of(parts: Sequence[Part], form: TensorForm) -> Rows:
    part, field, index = form.at
    rows: tuple[Rows, ...] = getattr(parts[part], field)
    return rows[index]


def _slots(
    group: GroupLayout, table: BlockTable, tokens: int, kept: int
) -> tuple[NDArray[np.int32], NDArray[np.intp]]:
    """Block and place of each of the last ``kept`` tokens."""
    assert group.block_size is not None
    numbers = np.arange(tokens - kept, tokens)
    return table.ids[numbers // group.block_size - table.first_block], numbers % group.block_size


def _view(group: GroupLayout, tensor: TensorLayout, memory: Bytes) -> Bytes:
    shape: tuple[int, ...] = (group.num_blocks, group.entries_per_block, tensor.row_nbytes)
    strides: tuple[int, ...] = (tensor.block_stride, tensor.token_stride, 1)
    if group.is_state:
        shape, strides = (shape[0], shape[2]), (strides[0], 1)
    return np.ndarray(shape, np.uint8, buffer=memory.data, offset=tensor.offset, strides=strides)
