"""Which conversions there are between unlike tensors, what each may change, and who allows it.

A copy moves bytes. Where the two sides store a value in other bytes, prefill packs its rows into a
plain form, tokens x heads x elements in the dtype that crosses the wire, and decode stores them in
its own way. Repacking alone (keys stored transposed) and widening are exact; the rest has a bound:

    |after - before|  <=  relative * |before|  +  of_largest * largest  +  absolute

where ``largest`` is the greatest magnitude in the value's (block, head). Bounds are derived here from
the formats' significand bits and exponents (IEEE 754; OCP 8-bit floating point 1.0 for e4m3), and hold
for all finite values; a finite value that the other side's dtype has no room for is an error, never an
infinity.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import msgspec

from kvferry.dtypes import SCALE_NBYTES
from kvferry.errors import InputError
from kvferry.layout.records import TensorLayout
from kvferry.layout.words import ITEMSIZE, Role

__all__ = [
    "EXACT",
    "SCALE_NBYTES",
    "Conversion",
    "Conversions",
    "ErrorBound",
    "WireFormat",
    "conversion",
    "convert_dtype",
]


class WireFormat(StrEnum):
    """A narrower form that keys and values may cross in; one float32 scale for each (block, head)."""

    FP8 = "float8_e4m3fn"
    INT8 = "int8"


# Largest finite value of each format, and of each float its significand bits and least normal exponent.
LARGEST = {WireFormat.FP8: 448.0, WireFormat.INT8: 127.0}
# Scales are never below the least normal float32, so that dividing by one never loses bits.
LEAST_SCALE = 2.0**-126
_FLOATS = {"float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}
_FP8_BITS, _FP8_LEAST = 4, -6
# Keys and values only: a latent is read by every head, and a recurrent state adds its errors up.
_SCALED_ROLES = frozenset({Role.KEY, Role.VALUE, Role.CROSS_KEY, Role.CROSS_VALUE})


@dataclass(frozen=True, slots=True)
class ErrorBound:
    """What one value may change by; the sum of three terms, see the module. All 0 is exact."""

    relative: float = 0.0
    of_largest: float = 0.0
    absolute: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Every finite value comes out as it went in; zeros keep their sign."""
        return self == EXACT

    def then(self, after: ErrorBound) -> ErrorBound:
        """The bound of this step followed by another: the second sees what the first made."""
        kept = 1.0 + after.relative
        largest = 1.0 + self.relative + self.of_largest  # what the second sees, of what the first saw
        return ErrorBound(
            self.relative * kept + after.relative,
            self.of_largest * kept + after.of_largest * largest,
            self.absolute * (kept + after.of_largest) + after.absolute,
        )

    def __str__(self) -> str:
        if self.is_exact:
            return "exact"
        terms = ((self.relative, " x |value|"), (self.of_largest, " x largest"), (self.absolute, ""))
        return "at most " + " + ".join(f"{factor:.3g}{what}" for factor, what in terms if factor)


EXACT = ErrorBound()


class Conversions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one side allows. Both sides say so; repacking and exact widening need no more than that.

    ``lossy``: values may be rounded to a narrower float. ``wire``: keys and values cross in this
    format; it has to be the same on both sides, and is lossy by itself.
    """

    lossy: bool = False
    wire: WireFormat | None = None

    def __post_init__(self) -> None:
        if self.wire is not None and self.wire not in list(WireFormat):
            raise InputError(f"wire: {self.wire!r} is not one of {', '.join(WireFormat)}")
        if self.wire is not None:  # its name will do
            msgspec.structs.force_setattr(self, "wire", WireFormat(self.wire))


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one tensor crosses. ``wire``: the dtype of its values in between; ``scaled``: with scales.

    ``repacks``: its elements lie apart on one side and together on the other.
    """

    src: str
    wire: str
    dst: str
    scaled: bool
    repacks: bool
    bound: ErrorBound

    @property
    def name(self) -> str:
        """As it is recorded with the transfer."""
        steps = [self.src]
        if self.scaled:
            steps.append(f"{self.wire} per (block, head)")
        if self.scaled or self.dst != self.src:
            steps.append(self.dst)
        return " -> ".join(steps) + (", repacked" if self.repacks else "")

    @property
    def changes(self) -> bool:
        """It is more than a copy."""
        return self.scaled or self.repacks or self.src != self.dst


@lru_cache(maxsize=64)
def convert_dtype(src: str, dst: str) -> ErrorBound | None:
    """The bound of rounding to nearest from one dtype to another; None where there is no conversion."""
    if src == dst:
        return EXACT
    if src not in _FLOATS or dst not in _FLOATS:
        return None
    (bits, least), (new_bits, new_least) = _FLOATS[src], _FLOATS[dst]
    # Half a step relative to the least value of its binade: u / (1 + u) with u = 2^-bits.
    relative = 0.0 if new_bits >= bits else 1.0 / (2.0**new_bits + 1.0)
    smallest = 2.0 ** (least - bits + 1)  # the least subnormal of the source
    fits = smallest >= 2.0 ** (new_least if relative else new_least - new_bits + 1)
    return ErrorBound(relative, 0.0, 0.0 if fits else 2.0 ** (new_least - new_bits))


@lru_cache(maxsize=64)
def scaled_bound(wire: WireFormat, dst: str) -> ErrorBound:
    """The bound of a value that crosses in ``wire`` with a scale and is stored as ``dst``.

    e4m3: the scale is a power of two below 2 x largest / 448, so only the rounding to 4 bits counts,
    and half of the least subnormal, 2^-10 of the scale. int8: half a step of largest / 127, and 2^-15
    of one for the float32 arithmetic (four roundings of at most 127 x 2^-24 of a step).
    """
    bits, least = _FLOATS[dst]
    half_subnormal = 2.0 ** (least - bits)
    if wire is WireFormat.FP8:
        half_step = 2.0 ** (_FP8_LEAST - _FP8_BITS)
        bound = ErrorBound(
            1.0 / (2.0**_FP8_BITS + 1.0), half_step * 2.0 / LARGEST[wire], half_step * LEAST_SCALE
        )
        return bound.then(ErrorBound(absolute=half_subnormal))  # 4 bits are exact in every normal float
    step = ErrorBound(0.0, (0.5 + 2.0**-15) / LARGEST[wire], 0.5 * LEAST_SCALE)
    stored = convert_dtype("float32", dst)
    assert stored is not None
    return step.then(stored)


def conversion(src: TensorLayout, dst: TensorLayout, allowed: Conversions) -> Conversion | None:
    """How ``src`` becomes ``dst`` where both sides allow ``allowed``; None where it does not.

    A float crosses in the narrower dtype of the two, so that rounding is prefill's and is paid once.
    """
    exact = convert_dtype(src.dtype, dst.dtype)
    if exact is None or (not exact.is_exact and not (allowed.lossy or _scales(src, dst, allowed))):
        return None
    repacks = src.is_split is not dst.is_split
    if _scales(src, dst, allowed):
        assert allowed.wire is not None
        bound = scaled_bound(allowed.wire, dst.dtype)
        return Conversion(src.dtype, allowed.wire.value, dst.dtype, True, repacks, bound)
    wire = dst.dtype if ITEMSIZE[dst.dtype] <= ITEMSIZE[src.dtype] else src.dtype
    return Conversion(src.dtype, wire, dst.dtype, False, repacks, exact)


def _scales(src: TensorLayout, dst: TensorLayout, allowed: Conversions) -> bool:
    floats = src.dtype in _FLOATS and dst.dtype in _FLOATS
    return allowed.wire is not None and floats and src.role in _SCALED_ROLES


def conversion_refusals(src: TensorLayout, dst: TensorLayout, allowed: Conversions | None) -> Iterator[str]:
    """Why one tensor cannot become the other, naming the field; nothing where a copy or a conversion does."""
    if allowed is not None and conversion(src, dst, allowed) is not None:
        return
    if src.dtype != dst.dtype:
        bound = convert_dtype(src.dtype, dst.dtype)
        if bound is None:
            why = "there is no conversion"
        elif allowed is None:
            why = "conversion is not allowed"
        else:
            why = "lossy conversion is not allowed"
        yield f"dtype: {src.dtype} against {dst.dtype}, {why}"
    elif src.is_split is not dst.is_split:
        names = [
            f"{'apart' if tensor.is_split else 'together'} in a token's row of a block"
            for tensor in (src, dst)
        ]
        yield f"dim_stride: elements {names[0]} against {names[1]}, conversion is not allowed"
