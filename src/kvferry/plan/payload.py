"""The bytes and pieces that a handoff moves, as often as a planner asks: sizes, remembered."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from kvferry.model import ModelShape
from kvferry.size import KVSize, kv_size

__all__ = ["Payload", "PayloadTable", "PoolFormat"]

_MAX_REMEMBERED = 1 << 18
Key = TypeVar("Key")


class PoolFormat(msgspec.Struct, frozen=True):
    """How the pools hold KV: what a size depends on beside the model and the tokens."""

    kv_dtype: str | None = None
    block_size: int | None = 16
    tp: int = 1
    pp: int = 1
    encoder_tokens: int | None = None

    def size(self, shape: ModelShape, tokens: int, cached_tokens: int = 0) -> KVSize:
        """The size of one request's state in these pools."""
        return kv_size(
            shape,
            tokens,
            cached_tokens=cached_tokens,
            kv_dtype=self.kv_dtype,
            tp=self.tp,
            pp=self.pp,
            block_size=self.block_size,
            encoder_tokens=self.encoder_tokens,
        )


class Payload(msgspec.Struct, frozen=True):
    """What crosses the wire, in bytes and in contiguous pieces."""

    nbytes: int
    descriptors: int


class PayloadTable:
    """``payload(tokens, cached)`` at the price of two dictionary look-ups.

    In paged pools what a prefix hit saves does not depend on the length of the prompt: hits count in
    whole blocks of the groups that grow with every token. So a size is kept for each length and a
    saving for each hit.
    """

    def __init__(self, shape: ModelShape, pool: PoolFormat) -> None:
        self.shape = shape
        self.pool = pool
        self._whole: dict[int, tuple[int, int]] = {}
        self._saved: dict[int, tuple[int, int]] = {}
        self._exact: dict[tuple[int, int], tuple[int, int]] = {}

    def at(self, tokens: int, cached_tokens: int = 0) -> Payload:
        """The same as ``kv_size``, for ``cached_tokens`` up to ``tokens``."""
        nbytes, descriptors = self.pair(tokens, cached_tokens)
        return Payload(nbytes, descriptors)

    def pair(self, tokens: int, cached_tokens: int = 0) -> tuple[int, int]:
        """The same as a bare pair, for the inner loop of the simulator."""
        block = self.pool.block_size
        if block is None:
            found = self._exact.get((tokens, cached_tokens))
            return found or _remember(self._exact, (tokens, cached_tokens), self._size(tokens, cached_tokens))
        whole = self._whole.get(tokens) or _remember(self._whole, tokens, self._size(tokens, 0))
        held = cached_tokens // block * block
        if not held:
            return whole
        saved = self._saved.get(held)
        if saved is None:
            full, rest = self._size(held, 0), self._size(held, held)
            saved = _remember(self._saved, held, (full[0] - rest[0], full[1] - rest[1]))
        return whole[0] - saved[0], whole[1] - saved[1]

    def _size(self, tokens: int, cached_tokens: int) -> tuple[int, int]:
        size = self.pool.size(self.shape, tokens, cached_tokens)
        return size.wire_bytes, size.descriptors


def _remember(table: dict[Key, tuple[int, int]], key: Key, value: tuple[int, int]) -> tuple[int, int]:
    if len(table) >= _MAX_REMEMBERED:
        table.clear()
    table[key] = value
    return value
