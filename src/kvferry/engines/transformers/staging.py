"""Cache tensors into the blocks of the pool and out of them: one strided copy a tensor either way."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables
from kvferry.engines.transformers.form import CacheForm, TensorForm, dtype_name
from kvferry.engines.transformers.roles import Growth, read, write
from kvferry.errors import LocalError
from kvferry.layout import BlockTable, GroupLayout, PoolLayout, Role, TensorLayout
from kvferry.state import InlineTensor, TensorKey

__all__ = ["Staging", "inline", "raw_bytes"]

Tensor: TypeAlias = torch.Tensor
_BITS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True, slots=True)
class _Place:
    """One tensor's form, its group and the group's number, and its view of the pool."""

    form: TensorForm
    at: int
    group: GroupLayout
    view: Tensor
    order: Tensor | None

    def blocks(self, table: BlockTable, tokens: int, encoder_tokens: int) -> tuple[Tensor, int, int]:
        """Ids of the blocks that hold the rows, rows there before the first one, and how many they are."""
        form, block = self.form, self.group.entries_per_block
        cross = form.held.role in (Role.CROSS_KEY, Role.CROSS_VALUE)
        rows = encoder_tokens if cross else form.held.rows(tokens)
        first = tokens - rows if form.held.growth is Growth.WINDOW else 0
        skipped = first - table.first_block * block
        return torch.from_numpy(table.ids[: -(-(skipped + rows) // block)].astype(np.int64)), skipped, rows

    def store(self, tensor: Tensor | None, table: BlockTable, tokens: int, encoder_tokens: int) -> None:
        form = self.form
        if form.is_slot:
            self.view[int(table.ids[0])] = _padded(form, tensor)
            return
        assert tensor is not None
        ids, skipped, rows = self.blocks(table, tokens, encoder_tokens)
        by_heads = tensor[0] if form.held.token_axis == 2 else tensor
        shape = (form.heads, len(ids), self.group.entries_per_block, form.width)
        staged = torch.zeros((form.heads, shape[1] * shape[2], form.width), dtype=form.dtype)
        staged[:, skipped : skipped + rows] = by_heads if self.order is None else by_heads[..., self.order]
        self.view[ids] = staged.view(shape).transpose(0, 1)

    def load(self, table: BlockTable, tokens: int, encoder_tokens: int) -> Tensor | None:
        """A private copy, shaped as transformers has it."""
        form = self.form
        if form.is_slot:
            return _unpadded(form, self.view[int(table.ids[0])], tokens)
        ids, skipped, rows = self.blocks(table, tokens, encoder_tokens)
        blocks = self.view[ids].transpose(0, 1)
        flat = blocks.reshape(form.heads, len(ids) * self.group.entries_per_block, form.width)
        kept = flat[:, skipped : skipped + rows]
        if self.order is not None:
            kept = kept[..., self.order.argsort()]
        return (kept[None] if form.held.token_axis == 2 else kept).clone(
            memory_format=torch.contiguous_format
        )


class Staging:
    """One cache's place in the pool. One strided copy a tensor; blocks need not be in order.

    ``key_order``: element of a key in the pool -> element in transformers; None for the same order.
    Raises LocalError where the layout is not one that was made for this form.
    """

    def __init__(
        self,
        form: CacheForm,
        layout: PoolLayout,
        memory: NDArray[np.uint8],
        key_order: Tensor | None = None,
    ) -> None:
        self.form = form
        there = {
            (t.layer, t.role, t.part): (at, g, t) for at, g in enumerate(layout.groups) for t in g.tensors
        }
        self._places: list[_Place] = []
        for one in form.tensors:
            if (place := there.get((one.layer, one.held.role, one.held.part))) is None:
                raise LocalError(f"layout: {one.key} of the model has no place in it")
            at, group, tensor = place
            order = key_order if one.held.role is Role.KEY else None
            self._places.append(_Place(one, at, group, _view(one, group, tensor, memory), order))

    def store(self, layers: Sequence[Any], tables: BlockTables, tokens: int, encoder_tokens: int) -> None:
        """Copy a cache that has seen ``tokens`` tokens into the blocks of ``tables``."""
        for place in self._places:
            tensor = read(layers[place.form.at], place.form.held.path)
            place.store(tensor, tables[place.at], tokens, encoder_tokens)

    def load(self, tables: BlockTables, tokens: int, encoder_tokens: int) -> list[Any]:
        """New cache layers out of the blocks of ``tables``; they share nothing with the pool."""
        layers = [_bare(layer) for layer in self.form.template]
        for place in self._places:
            tensor = place.load(tables[place.at], tokens, encoder_tokens)
            write(layers[place.form.at], place.form.held.path, tensor)
        for layer, template in zip(layers, self.form.template, strict=True):
            _set_lengths(layer, template, tokens)
        return layers

    def read_back(self, layers: Sequence[Any], tables: BlockTables, tokens: int, encoder_tokens: int) -> int:
        """Bytes of ``layers`` that equal, tensor by tensor, what lies in the blocks."""
        nbytes = 0
        for place in self._places:
            tensor = read(layers[place.form.at], place.form.held.path)
            expected = place.load(tables[place.at], tokens, encoder_tokens)
            if tensor is None or expected is None:
                equal = tensor is expected
            else:
                equal = tensor.shape == expected.shape and torch.equal(_bits(tensor), _bits(expected))
            if equal:
                nbytes += _travelling_nbytes(place.form, tokens, encoder_tokens)
        return nbytes

    def nbytes(self, tokens: int, encoder_tokens: int) -> int:
        """Bytes of a request's tensors as they travel."""
        return sum(_travelling_nbytes(form, tokens, encoder_tokens) for form in self.form.tensors)

    def recurrent(self, tables: BlockTables) -> dict[TensorKey, InlineTensor]:
        """Every recurrent tensor, out of the pool, for the check that it is finite."""
        return {
            place.form.key: inline(place.view[int(tables[place.at].ids[0])])
            for place in self._places
            if place.form.held.role in (Role.CONV, Role.SSM)
        }


def inline(tensor: Tensor) -> InlineTensor:
    """A tensor as part of a record, bfloat16 too, which NumPy lacks."""
    return InlineTensor(dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), data=raw_bytes(tensor))


def raw_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor in C order."""
    return _bits(tensor).numpy().tobytes()


def _bits(tensor: Tensor) -> Tensor:
    """As bytes: NaN then equals itself, and -0 is not 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _view(form: TensorForm, group: GroupLayout, tensor: TensorLayout, memory: NDArray[np.uint8]) -> Tensor:
    if tensor.dtype != dtype_name(form.dtype):
        raise LocalError(f"layout: {tensor} is {tensor.dtype}, {dtype_name(form.dtype)} in the model")
    if form.is_slot:
        inner = [math.prod(form.shape[axis + 1 :]) * form.itemsize for axis in range(len(form.shape))]
        shape, strides = (group.num_blocks, *form.shape), (tensor.block_stride, *inner)
    else:
        shape = (group.num_blocks, form.heads, group.entries_per_block, form.width)
        strides = (tensor.block_stride, tensor.head_stride, tensor.token_stride, form.itemsize)
    bits = np.ndarray(shape, _BITS[form.itemsize], buffer=memory.data, offset=tensor.offset, strides=strides)
    return torch.from_numpy(bits).view(form.dtype)


def _padded(form: TensorForm, tensor: Tensor | None) -> Tensor:
    """A slot's content: a remainder is filled up with zeros, what is not there yet is all zeros."""
    slot = torch.zeros(form.shape, dtype=form.dtype)
    if tensor is not None:
        rows = tensor.shape[1] if form.held.growth is Growth.REMAINDER else None
        slot[:rows] = tensor[0]
    return slot


def _unpadded(form: TensorForm, slot: Tensor, tokens: int) -> Tensor | None:
    if form.held.growth is Growth.AFTER_ENTRY and tokens < form.held.rate:
        return None
    kept = slot[: form.held.rows(tokens)] if form.held.growth is Growth.REMAINDER else slot
    return _own(kept[None])


def _own(tensor: Tensor) -> Tensor:
    """A contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _travelling_nbytes(form: TensorForm, tokens: int, encoder_tokens: int) -> int:
    return math.prod(form.need().spec(tokens, encoder_tokens).shape) * form.itemsize


def _bare(layer: Any) -> Any:
    """A layer object with the template's plain values; its dicts are its own."""
    bare = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(bare, name, dict(value))
    return bare


def _set_lengths(layer: Any, template: Any, tokens: int) -> None:
    """The plain values that follow from the number of tokens, and values that are the keys' second name."""
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = tokens
    if hasattr(layer, "entry_count"):
        layer.entry_count = dict.fromkeys(layer.entry_count, tokens // layer.compress_rate)
    if getattr(template, "keys", None) is not None and template.values is template.keys:
        layer.values = layer.keys
