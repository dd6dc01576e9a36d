"""Digests that name what a worker loaded and what a record holds. All are sha256 in hex."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LocalError

__all__ = ["Buffer", "config_digest", "grammar_digest", "ids_digest", "weights_digest"]

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[np.generic]


def weights_digest(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """Identity of a model's weights: (name, dtype, shape, bytes as stored) of every tensor.

    The order does not matter, and tensors may be produced one by one: only their digests are
    kept. A quantised tensor is hashed as stored, not as dequantised. Raises LocalError for a
    name that comes twice or no tensor at all.
    """
    rows: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name, dtype, shape, data in tensors:
        if name in rows:
            raise LocalError(f"weights: tensor {name!r} comes twice")
        raw = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data
        rows[name] = (dtype, tuple(int(extent) for extent in shape), hashlib.sha256(raw).digest())
    if not rows:
        raise LocalError("weights: no tensors to digest")
    # msgpack marks where each item ends, so no two different lists give the same bytes.
    return hashlib.sha256(msgspec.msgpack.encode(sorted(rows.items()))).hexdigest()


def config_digest(config: Mapping[str, object]) -> str:
    """Identity of a model's hyper-parameters: sha256 of canonical JSON (sorted keys, no spaces).

    Leave out what does not change the model (paths, library versions). ``10000`` and
    ``10000.0`` are the same value. Raises LocalError for what JSON cannot say, NaN included.
    """
    try:
        text = json.dumps(_canonical(config), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise LocalError(f"config: cannot be written as canonical JSON: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()


def ids_digest(ids: bytes) -> str:
    """Identity of a token history, from its raw little-endian int32 bytes."""
    return hashlib.sha256(ids).hexdigest()


def grammar_digest(kind: str, text: str) -> str:
    """Identity of a grammar: its kind and its text."""
    return hashlib.sha256(msgspec.msgpack.encode((kind, text))).hexdigest()


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError("a key is not a string")
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
