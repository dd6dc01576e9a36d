"""Packs the rows of a segment into its wire form, and stores them from it: all arithmetic of a conversion.

Rounding is to nearest, ties to even (NumPy's and ml_dtypes' own). No loop goes over blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import IncompatibleError, LocalError
from kvferry.layout.conversion import LARGEST, LEAST_SCALE, WireFormat
from kvferry.layout.records import GroupLayout, TensorLayout
from kvferry.layout.segments import held_blocks
from kvferry.layout.wire import Segment, Side, WireTensor

__all__ = ["numpy_dtype", "pack", "unpack"]

Bytes = NDArray[np.uint8]
Rows = NDArray[Any]
# A float of two bytes without its sign, and the bits of infinity.
_SIGNLESS = np.uint16(0x7FFF)
_INFINITY = {"float16": np.uint16(0x7C00), "bfloat16": np.uint16(0x7F80)}
_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@lru_cache(maxsize=32)
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of a cache dtype. Raises LocalError where it needs ml-dtypes and that is missing."""
    if name not in _ML_DTYPES:
        return np.dtype(name)
    try:
        import ml_dtypes  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            f"converting {name} needs the package 'ml-dtypes'", next_step="pip install 'kvferry[convert]'"
        ) from error
    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def pack(wire: WireTensor, segment: Segment, side: Side, memory: Bytes, into: Bytes) -> None:
    """Write a segment's scales and values, ``segment.nbytes`` bytes, into ``into``.

    ``side`` and ``memory`` are prefill's. Raises IncompatibleError where a value has no place in the
    other dtype; ``into`` may then hold anything.
    """
    group, table = side[0].groups[wire.src_group], side[1][wire.src_group]
    ids = held_blocks("source", group, table, (segment.first, segment.stop)).ids
    heads = slice(segment.first_head - wire.src.head_start, segment.stop_head - wire.src.head_start)
    view = _view(wire.src, group, memory)[:, :, heads]
    first = segment.first % group.entries_per_block
    rows = view[ids].reshape(-1, *view.shape[2:])[first : first + segment.stop - segment.first]
    scales, values = into[: segment.scales_nbytes], into[segment.scales_nbytes : segment.nbytes]
    target = values.view(numpy_dtype(wire.conversion.wire)).reshape(rows.shape)
    if not wire.conversion.scaled:
        target[:] = _narrowed(rows, target.dtype, wire)
        return
    steps = rows.astype(np.float32)
    largest = np.abs(steps).max(axis=2)
    _check_scalable(largest, wire)
    starts = np.maximum(np.arange(segment.scales) * group.entries_per_block - first, 0)
    scale = _scales(np.maximum.reduceat(largest, starts, axis=0), wire)
    scales.view(np.float32).reshape(scale.shape)[:] = scale
    steps /= np.repeat(scale, np.diff(starts, append=len(rows)), axis=0)[..., None]
    if target.dtype == np.int8:
        target[:] = np.clip(np.rint(steps), -127, 127)
    else:
        target.view(np.uint8)[:] = _as_fp8(steps, is_short=rows.dtype == numpy_dtype("bfloat16"))


def unpack(wire: WireTensor, segment: Segment, side: Side, memory: Bytes, data: Bytes) -> None:
    """Store a segment's rows where decode has them, in its own dtype; ``side`` and ``memory`` are its."""
    group, table = side[0].groups[wire.dst_group], side[1][wire.dst_group]
    heads = segment.stop_head - segment.first_head
    shape = (segment.stop - segment.first, heads, wire.src.head_dim)
    values = data[segment.scales_nbytes : segment.nbytes].view(numpy_dtype(wire.conversion.wire))
    rows = values.reshape(shape)
    dtype = numpy_dtype(wire.dst.dtype)
    if wire.conversion.scaled:
        rows = _unscaled(wire, segment, rows, data[: segment.scales_nbytes])
    ids = held_blocks("destination", group, table, (segment.first, segment.stop)).ids
    first_head = segment.first_head - wire.dst.head_start
    view = _view(wire.dst, group, memory)[:, :, first_head : first_head + heads]
    _store(view, ids, segment.first % group.entries_per_block, rows.astype(dtype, copy=False))


def _unscaled(wire: WireTensor, segment: Segment, rows: Rows, scales: Bytes) -> Rows:
    block = wire.src_entries
    starts = np.arange(segment.first // block, segment.first // block + segment.scales) * block
    counts = np.diff(np.maximum(starts, segment.first), append=segment.stop)
    scale = np.repeat(scales.view(np.float32).reshape(segment.scales, -1), counts, axis=0)[..., None]
    largest = _largest(wire.dst.dtype)
    if wire.conversion.wire == WireFormat.FP8:
        unscaled = _fp8_values().take(rows.view(np.uint8))
    else:
        unscaled = rows.astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged scale is found by its digest
        unscaled *= scale
    # Rounding up may lead beyond the dtype's end, where no value was: bringing it back makes it better.
    return np.clip(unscaled, -largest, largest, out=unscaled)


def _as_fp8(steps: NDArray[np.float32], *, is_short: bool) -> NDArray[np.uint8]:
    """The bits of float8 e4m3 nearest to each value, looked up: several times as fast as ml_dtypes' cast.

    By the upper half of its bits, 7 of the mantissa; float8 keeps 3, so of the lower half only whether
    it is zero can matter, and that goes into the last bit. ``is_short``: all lower halves are zero.
    """
    bits = steps.view(np.uint32)
    upper = (bits >> np.uint32(16)).astype(np.uint16)
    if not is_short:
        upper |= (bits & np.uint32(0xFFFF)) != 0
    return _fp8_bits().take(upper)


@lru_cache(maxsize=1)
def _fp8_bits() -> NDArray[np.uint8]:
    """Float8 e4m3 of each upper half of a float32."""
    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        bits: NDArray[np.uint8] = values.astype(numpy_dtype(WireFormat.FP8)).view(np.uint8)
    return bits


@lru_cache(maxsize=1)
def _fp8_values() -> NDArray[np.float32]:
    """Each of the 256 values of float8 e4m3: looking them up is three times as fast as casting."""
    values: NDArray[np.float32] = (
        np.arange(256, dtype=np.uint8).view(numpy_dtype(WireFormat.FP8)).astype(np.float32)
    )
    return values


def _view(tensor: TensorLayout, group: GroupLayout, memory: Bytes) -> Rows:
    """(blocks, entries, heads, elements) of one tensor, with the pool's own strides."""
    dtype = numpy_dtype(tensor.dtype)
    dim_stride = tensor.dim_stride if tensor.is_split else dtype.itemsize
    return np.ndarray(
        (group.num_blocks, group.entries_per_block, tensor.heads, tensor.head_dim),
        dtype,
        memory.data,
        tensor.offset,
        (tensor.block_stride, tensor.token_stride, tensor.head_stride, dim_stride),
    )


def _store(view: Rows, ids: NDArray[np.int64], first: int, rows: Rows) -> None:
    """Rows into blocks: the rest of the first block, whole blocks at once, the beginning of the last."""
    entries = view.shape[1]
    lead = min(-first % entries, len(rows))
    if lead:
        view[ids[0], first : first + lead] = rows[:lead]
        ids, rows = ids[1:], rows[lead:]
    whole = len(rows) // entries
    if whole:
        view[ids[:whole]] = rows[: whole * entries].reshape(whole, entries, *rows.shape[1:])
    tail = len(rows) - whole * entries
    if tail:
        view[ids[whole], :tail] = rows[whole * entries :]


def _scales(largest: NDArray[np.float32], wire: WireTensor) -> NDArray[np.float32]:
    """The scale of each (block, head) with that largest magnitude, float32."""
    wanted: NDArray[np.float32] = np.maximum(
        largest / np.float32(LARGEST[WireFormat(wire.conversion.wire)]), np.float32(LEAST_SCALE)
    )
    if wire.conversion.wire != WireFormat.FP8:
        return wanted
    # A power of two: dividing by it and multiplying by it round nothing.
    mantissa, exponent = np.frexp(wanted)
    power: NDArray[np.float32] = np.ldexp(
        np.float32(1.0), np.where(mantissa == 0.5, exponent - 1, exponent), dtype=np.float32
    )
    return power


def _narrowed(rows: Rows, dtype: np.dtype[Any], wire: WireTensor) -> Rows:
    if rows.dtype == dtype:
        return rows
    with np.errstate(over="ignore"):
        narrow: Rows = rows.astype(dtype)
    infinite = (narrow.view(np.uint16) & _SIGNLESS) == _INFINITY[dtype.name]  # isinf takes six times as long
    if infinite.any():
        before = rows[infinite].astype(np.float32)
        if (finite := before[np.isfinite(before)]).size:
            raise _beyond(np.abs(finite).max(), wire)
    return narrow


def _check_scalable(largest: NDArray[np.float32], wire: WireTensor) -> None:
    """Raise IncompatibleError for magnitudes that have no scale, or that decode cannot store."""
    if not np.isfinite(largest).all():
        raise _no_place(f"a value that is not finite has no place in {wire.conversion.wire}", wire)
    if largest.max() > _largest(wire.dst.dtype):
        raise _beyond(largest.max(), wire)


def _beyond(value: np.floating[Any], wire: WireTensor) -> IncompatibleError:
    return _no_place(f"{float(value):.6g} is beyond what {wire.dst.dtype} holds", wire)


@lru_cache(maxsize=8)
def _largest(name: str) -> np.float32:
    """The largest finite value of a float dtype."""
    bits = {
        "float32": (np.uint32, 0x7F7FFFFF),
        "float16": (np.uint16, 0x7BFF),
        "bfloat16": (np.uint16, 0x7F7F),
    }
    kind, pattern = bits[name]
    return np.float32(np.array(pattern, kind).view(numpy_dtype(name)))


def _no_place(what: str, wire: WireTensor) -> IncompatibleError:
    return IncompatibleError(
        f"{wire.src}: {what}",
        phase="move",
        now_true="nothing became visible to decode's engine; prefill keeps its copy",
        next_step="hand over between pools of one dtype, without a wire format",
    )
