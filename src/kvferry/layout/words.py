"""The words for what a cache holds: one list of roles, layer kinds and dtypes for the whole project."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ITEMSIZE", "LayerKind", "Role"]


class Role(StrEnum):
    """What one tensor of one layer is. Closed: a peer names a role, never an attribute."""

    key = "key"
    value = "value"
    latent = "latent"
    rope = "rope"
    index = "index"  # type: ignore[assignment]  # hides str.index, which no role needs
    conv = "conv"
    ssm = "ssm"
    buffer = "buffer"
    gate = "gate"
    compressed = "compressed"
    overlap = "overlap"
    cross_key = "cross_key"
    cross_value = "cross_value"


class LayerKind(StrEnum):
    """How the cache of a layer grows: with the tokens, up to a window, or not at all."""

    full = "full"
    sliding = "sliding"
    mla = "mla"
    indexed = "indexed"
    compressed = "compressed"
    linear = "linear"
    conv = "conv"
    dummy = "dummy"
    cross = "cross"


# Bytes of one element. Formats below one byte are described as uint8 of the packed width.
ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
}
