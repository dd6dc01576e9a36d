"""What a conversion makes of each value, one at a time: rounding in exact Python arithmetic.

Shares nothing with kvferry.layout but its records and the byte formula of ``layout_oracle``.
"""

from __future__ import annotations

import math
from collections import defaultdict

import ml_dtypes
import numpy as np

from kvferry.layout import PoolLayout, Role, TensorLayout
from layout_oracle import RowKey, rows
from layout_strategies import Case

DTYPES = {
    "float32": np.dtype("float32"),
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint8": np.dtype("uint8"),
}
# Significand bits, least normal exponent, largest value: IEEE 754, and OCP OFP8 for e4m3.
FLOATS = {
    "float32": (24, -126, (2 - 2**-23) * 2.0**127),
    "float16": (11, -14, 65504.0),
    "bfloat16": (8, -126, (2 - 2**-7) * 2.0**127),
    "float8_e4m3fn": (4, -6, 448.0),
}
SCALED = {Role.KEY.value, Role.VALUE.value, Role.CROSS_KEY.value, Role.CROSS_VALUE.value}


def rounded(value: float, dtype: str) -> float:
    """To the nearest value of a format, ties to even. Python's own round() does that for whole numbers."""
    bits, least, _ = FLOATS[dtype]
    if value == 0 or not math.isfinite(value):
        return value
    step = 2.0 ** (max(math.frexp(value)[1] - 1, least) - bits + 1)
    return math.copysign(round(abs(value) / step) * step, value)


def through(values: list[float], wire: str | None, src: str, dst: str) -> list[float]:
    """The values of one (block, head) after they have crossed."""
    largest = FLOATS[dst][2]
    if wire is None:
        return [rounded(value, dst) for value in values]
    most = max(map(abs, values))
    if wire == "float8_e4m3fn":
        scale = 2.0**-126
        while scale * 448 < most:
            scale *= 2
        kept = [rounded(value / scale, wire) * scale for value in values]
    else:
        scale = np.float32(max(np.float32(most) / np.float32(127), np.float32(2.0**-126)))
        steps = [round(float(np.float32(value) / scale)) for value in values]
        kept = [float(np.float32(step) * scale) for step in steps]
    return [rounded(max(-largest, min(largest, value)), dst) for value in kept]


def expected(case: Case, wire: str | None, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    """What decode's pool holds afterwards, by a loop over every element of every (block, head)."""
    wanted = dst.copy()
    here = rows(case.src, case.src_tables, case.tokens, case.first_token)
    there = rows(case.dst, case.dst_tables, case.tokens, case.first_token)
    blocks: defaultdict[tuple[object, ...], list[RowKey]] = defaultdict(list)
    tensors, others = by_key(case.src), by_key(case.dst)
    for key in here.keys() & there.keys():
        tensor, entries = tensors[key[:3]]
        blocks[(*key[:3], key[3] // entries, key[4])].append(key)
    for block, keys in blocks.items():
        (tensor, _), (other, _) = tensors[block[:3]], others[block[:3]]
        used = wire if tensor.dtype != "uint8" and block[1] in SCALED else None
        values = [
            float(at(src, tensor, here[key], element)[0])
            for key in keys
            for element in range(tensor.head_dim)
        ]
        if tensor.dtype != "uint8":
            values = through(values, used, tensor.dtype, other.dtype)
        kept = iter(values)
        for key in keys:
            for element in range(tensor.head_dim):
                at(wanted, other, there[key], element)[0] = next(kept)
    return wanted


def by_key(layout: PoolLayout) -> dict[tuple[int, str, int], tuple[TensorLayout, int]]:
    return {
        (tensor.layer, tensor.role.value, tensor.part): (tensor, group.entries_per_block)
        for group in layout.groups
        for tensor in group.tensors
    }


def at(memory: np.ndarray, tensor: TensorLayout, row: int, element: int) -> np.ndarray:
    dtype = DTYPES[tensor.dtype]
    return np.ndarray((1,), dtype, memory.data, row + element * (tensor.dim_stride or dtype.itemsize))


def random_values(layout: PoolLayout, seed: int) -> np.ndarray:
    """A pool whose floats are finite, of either sign, and of sizes from below float16's least to 2^13."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, layout.nbytes, dtype=np.uint8)
    for group in layout.groups:
        for tensor in group.tensors:
            dtype = DTYPES[tensor.dtype]
            if dtype == np.uint8:
                continue
            shape = (group.num_blocks, group.entries_per_block, tensor.heads, tensor.head_dim)
            strides = (
                tensor.block_stride,
                tensor.token_stride,
                tensor.head_stride,
                tensor.dim_stride or dtype.itemsize,
            )
            values = rng.standard_normal(shape) * 2.0 ** rng.integers(-26, 13, shape)
            np.ndarray(shape, dtype, memory.data, tensor.offset, strides)[:] = values
    return memory
