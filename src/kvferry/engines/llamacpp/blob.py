"""The bytes that llama.cpp writes for one sequence, taken apart and put together. Pure: no library, no I/O.

llama.cpp's own import accepts other weights, a flipped bit, a half state, and positions that it
cannot decode from (docs/engines.md). So no such bytes cross the wire: prefill takes its own apart
into rows, only rows move, and decode puts them into a form that it made itself.

A sequence is a magic number, the source's sequence id, and one part for each memory of the model,
in order (``llama_kv_cache::state_write``, ``llama_memory_recurrent::state_write`` of llama.cpp):

- attention: streams u32; for each stream cells u32, and where there are cells: position i32,
  sequences u32 = 1 and sequence i32 of each; transposed u32, layers u32; for each layer the keys'
  type i32, row bytes u64 and rows; then the values' likewise, or, where they are transposed, type
  i32, element bytes u32, elements u32, and the rows as columns.
- recurrent: cells u32; position i32 and sequences u32 = 0 of each; transposed u32 = 0, layers u32; for
  each layer that has it type i32, row bytes u64 and a row: all convolution rows, then all states.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import CorruptError

__all__ = ["Attention", "Part", "Recurrent", "Rows", "build", "parse"]

MAGIC = 0xAF143CD8
_MAX_LAYERS = 1 << 12
_MAX_STREAMS = 1 << 12
_MAX_ROW_NBYTES = 1 << 30

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One tensor: its ggml type, and a row of bytes for each cell, (cells, row_nbytes)."""

    type: int
    data: Bytes

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self.data.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One attention memory. ``positions``: int32, of each cell in the order of the cells.

    ``value_nbytes``: bytes of an element where values are stored transposed, else None; the rows here
    are rows either way. ``streams``: of the memory; the sequence lies in one of them.
    """

    streams: int
    positions: NDArray[np.int32]
    value_nbytes: int | None
    keys: tuple[Rows, ...]
    values: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recurrent:
    """The recurrent memory: one cell. ``layers``: of the model; ``rows``: convolution rows, then states."""

    position: int
    layers: int
    rows: tuple[Rows, ...]


Part = Attention | Recurrent


class _Reader:
    """Takes fields off the front. Raises CorruptError where there are too few bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, nbytes: int) -> Bytes:
        if nbytes > self.left:
            raise CorruptError(
                f"sequence state: {nbytes} bytes are due at byte {self._at}, {self.left} are left"
            )
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def number(self, form: str) -> int:
        (value,) = struct.unpack(f"<{form}", self.take(struct.calcsize(form)).tobytes())
        return int(value)

    def bounded(self, form: str, most: int, what: str) -> int:
        value = self.number(form)
        if not 0 <= value <= most:
            raise CorruptError(f"sequence state: {value} {what}, more than {most} or fewer than none")
        return value


def parse(data: Bytes, memories: Sequence[type[Part]]) -> tuple[Part, ...]:
    """Take a sequence apart into the parts that it has by these kinds of memory; rows are views.

    Raises CorruptError saying what is wrong: nothing may be left over, and nothing missing.
    """
    reader = _Reader(data)
    if (magic := reader.number("I")) != MAGIC:
        raise CorruptError(f"sequence state: magic {magic:#x}, not {MAGIC:#x}")
    reader.number("i")  # the source's sequence id: of no meaning here
    parts = tuple(_attention(reader) if kind is Attention else _recurrent(reader) for kind in memories)
    if reader.left:
        raise CorruptError(f"sequence state: {reader.left} bytes too many")
    return parts


def build(parts: Iterable[Part]) -> Bytes:
    """The bytes that llama.cpp reads these parts from. ``parse`` of them gives the parts again."""
    out = [struct.pack("<Ii", MAGIC, 0)]
    for part in parts:
        out += _attention_bytes(part) if isinstance(part, Attention) else _recurrent_bytes(part)
    return np.frombuffer(b"".join(out), np.uint8)


def _attention(reader: _Reader) -> Attention:
    streams = reader.bounded("I", _MAX_STREAMS, "streams")
    found: Attention | None = None
    for _ in range(streams):
        cells = reader.number("I")
        if cells == 0:
            continue
        if found is not None:
            raise CorruptError("sequence state: one sequence in two streams")
        found = _cells(reader, streams, cells)
    if found is None:
        raise CorruptError("sequence state: an attention memory without a cell")
    return found


def _cells(reader: _Reader, streams: int, cells: int) -> Attention:
    meta = reader.take(12 * cells).view("<i4").reshape(cells, 3)
    if (meta[:, 1] != 1).any():
        raise CorruptError("sequence state: a cell of more or less than one sequence")
    transposed, layers = reader.number("I"), reader.bounded("I", _MAX_LAYERS, "layers")
    keys = tuple(_rows(reader, cells) for _ in range(layers))
    if not transposed:
        values = tuple(_rows(reader, cells) for _ in range(layers))
        return Attention(streams, meta[:, 0].astype(np.int32), None, keys, values)
    columns = [_columns(reader, cells) for _ in range(layers)]
    (value_nbytes,) = {nbytes for _, nbytes in columns}
    return Attention(
        streams, meta[:, 0].astype(np.int32), value_nbytes, keys, tuple(rows for rows, _ in columns)
    )


def _rows(reader: _Reader, cells: int) -> Rows:
    kind, row_nbytes = reader.number("i"), reader.bounded("Q", _MAX_ROW_NBYTES, "bytes in a row")
    return Rows(kind, reader.take(cells * row_nbytes).reshape(cells, row_nbytes))


def _columns(reader: _Reader, cells: int) -> tuple[Rows, int]:
    kind, nbytes = reader.number("i"), reader.bounded("I", 8, "bytes in an element")
    elements = reader.bounded("I", _MAX_ROW_NBYTES, "elements in a row")
    columns = reader.take(elements * cells * nbytes).reshape(elements, cells, nbytes)
    rows = np.ascontiguousarray(columns.transpose(1, 0, 2)).reshape(cells, elements * nbytes)
    return Rows(kind, rows), nbytes


def _recurrent(reader: _Reader) -> Recurrent:
    if (cells := reader.number("I")) != 1:
        raise CorruptError(f"sequence state: {cells} recurrent cells, not one")
    position, sequences = reader.number("i"), reader.number("I")
    transposed, layers = reader.number("I"), reader.bounded("I", _MAX_LAYERS, "layers")
    if sequences or transposed:
        raise CorruptError("sequence state: a recurrent cell that names sequences, or transposed states")
    rows = []
    while reader.left:  # it is the last part
        rows.append(_rows(reader, 1))
    if len(rows) % 2 or not rows:
        raise CorruptError(f"sequence state: {len(rows)} rows, where each layer has two")
    return Recurrent(position, layers, tuple(rows))


def _attention_bytes(part: Attention) -> list[bytes]:
    cells = len(part.positions)
    meta = np.zeros((cells, 3), "<i4")
    meta[:, 0], meta[:, 1] = part.positions, 1
    out = [struct.pack("<II", part.streams, cells), meta.tobytes()]
    out.append(struct.pack("<II", part.value_nbytes is not None, len(part.keys)))
    for rows in part.keys:
        out += [struct.pack("<iQ", rows.type, rows.row_nbytes), rows.data.tobytes()]
    for rows in part.values:
        if (nbytes := part.value_nbytes) is None:
            out += [struct.pack("<iQ", rows.type, rows.row_nbytes), rows.data.tobytes()]
        else:
            elements = rows.row_nbytes // nbytes
            columns = rows.data.reshape(cells, elements, nbytes).transpose(1, 0, 2)
            out += [struct.pack("<iII", rows.type, nbytes, elements), columns.tobytes()]
    out.append(bytes(4 * (part.streams - 1)))  # no cell in the other streams
    return out


def _recurrent_bytes(part: Recurrent) -> list[bytes]:
    out = [struct.pack("<IiIII", 1, part.position, 0, 0, part.layers)]
    for rows in part.rows:
        out += [struct.pack("<iQ", rows.type, rows.row_nbytes), rows.data.tobytes()]
    return out
