"""The words for what a cache holds: one list of roles, layer kinds and dtypes for the whole project."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["ITEMSIZE", "LayerKind", "Role"]


class Role(StrEnum):
    """What one tensor of one layer is. Closed: a peer names a role, never an attribute."""

    KEY = "key"
    VALUE = "value"
    LATENT = "latent"
    ROPE = "rope"
    INDEX = "index"
    CONV = "conv"
    SSM = "ssm"
    BUFFER = "buffer"
    GATE = "gate"
    COMPRESSED = "compressed"
    OVERLAP = "overlap"
    CROSS_KEY = "cross_key"
    CROSS_VALUE = "cross_value"


class LayerKind(StrEnum):
    """How the cache of a layer grows: with the tokens, up to a window, or not at all."""

    FULL = "full"
    SLIDING = "sliding"
    MLA = "mla"
    INDEXED = "indexed"
    COMPRESSED = "compressed"
    LINEAR = "linear"
    CONV = "conv"
    DUMMY = "dummy"
    CROSS = "cross"


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
