"""The small values that the record is made of: bounded numbers, names, digests, arrays as bytes.

Every number and every length has a bound in its type, so that a record which passed the schema
can drive an allocation no larger than these bounds say.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import LocalError
from kvferry.layout import ITEMSIZE

__all__ = [
    "MAX_TOKENS",
    "Axis",
    "Count",
    "Digest",
    "Exactness",
    "InlineTensor",
    "Int32Bytes",
    "Name",
    "Record",
    "RngKind",
    "Shape",
    "TokenId",
    "pack_ids",
    "require_whole_ids",
    "unpack_ids",
]

MAX_TOKENS = 1 << 27
"""Bound on any count of tokens: a hundred times the longest context that is served today."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**48)]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Digest: TypeAlias = Annotated[str, Meta(min_length=64, max_length=64, pattern="^[0-9a-f]{64}$")]
"""A sha256 in hex."""
Int32Bytes: TypeAlias = Annotated[bytes, Meta(max_length=4 * MAX_TOKENS)]
"""Raw little-endian int32, because a list of integers costs a hundred times more to parse."""
Extent: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Shape: TypeAlias = Annotated[tuple[Extent, ...], Meta(max_length=8)]


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of every part of the record: frozen, closed (an unknown field is refused)."""


class Exactness(enum.StrEnum):
    """What the caller asks of the continuation, compared with one process doing it all."""

    BITS = "bits"  # the same logits, bit by bit
    TOKENS = "tokens"  # the same tokens
    BEST_EFFORT = "best_effort"  # a right continuation of the same model, maybe another one


class RngKind(enum.StrEnum):
    """How a random state is carried; decode must be able to load the kind."""

    TORCH_MT19937_CPU = "torch_mt19937_cpu"  # state: torch.Generator.get_state(), 5056 bytes
    PHILOX = "philox"  # seed, draws = offset
    COUNTER = "counter"  # draw = hash(seed, position): seed, draws = next position
    PCG64 = "pcg64"  # state: the generator's words
    REPLAY = "replay"  # seed, draws: seed anew and draw so many times


class Axis(enum.StrEnum):
    """What one axis of a tensor counts. Order in a record is logical; strides are the pool's affair."""

    BATCH = "batch"
    TOKEN = "token"  # noqa: S105 - no password
    HEAD = "head"
    DIM = "dim"
    CHANNEL = "channel"
    STATE = "state"
    KERNEL = "kernel"
    VOCAB = "vocab"


class InlineTensor(Record, frozen=True, kw_only=True):
    """A small tensor carried in the record itself: C order, little-endian, ``nbytes = shape * itemsize``.

    Raises LocalError when dtype, shape and bytes do not belong together.
    """

    dtype: Name
    shape: Shape
    data: bytes

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZE:
            raise LocalError(f"dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE)}")
        if len(self.data) != (want := math.prod(self.shape) * ITEMSIZE[self.dtype]):
            raise LocalError(f"{self.dtype}{list(self.shape)} is {want} bytes, not {len(self.data)}")

    @classmethod
    def of(cls, array: NDArray[np.generic]) -> InlineTensor:
        """A NumPy array as an inline tensor (a copy)."""
        little = np.asarray(array, dtype=array.dtype.newbyteorder("<"))
        return cls(dtype=array.dtype.name, shape=array.shape, data=little.tobytes())

    def array(self) -> NDArray[np.generic]:
        """Read-only view; bfloat16 and float8, which NumPy lacks, come as uint16 and uint8 bit patterns."""
        bits = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8"}
        dtype = np.dtype(bits.get(self.dtype, self.dtype)).newbyteorder("<")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


def pack_ids(ids: NDArray[np.integer] | Sequence[int]) -> bytes:
    """Token or block ids as raw little-endian int32. Raises LocalError when one does not fit."""
    array = np.asarray(ids, dtype=np.int64)
    if array.size and (array.min() < 0 or array.max() > 2**31 - 1):
        raise LocalError(f"ids from {array.min()} to {array.max()} do not fit a non-negative int32")
    return array.astype("<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """The read-only int32 array behind raw ids. Raises LocalError for a part of an id."""
    require_whole_ids(data, "ids")
    return np.frombuffer(data, "<i4")


def require_whole_ids(data: bytes | None, what: str) -> None:
    """Raise LocalError unless ``data`` is absent or a whole number of int32."""
    if data is not None and len(data) % 4:
        raise LocalError(f"{what}: {len(data)} bytes are not a whole number of int32")
