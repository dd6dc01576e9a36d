"""Chained block hashes: how decode names the prefix that it holds, and how prefill agrees. Pure.

The hash of a block covers its token ids and the hash before it, so one equal hash means an equal
prefix. It is SHA-256, not a fast hash: a user who can choose prompts must not be able to make two
prefixes collide and read another's cache. The salt is the model's fingerprint and whatever else
changes the KV of equal tokens (adapters, images).
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.state import Fingerprint, LoraAdapter

__all__ = ["HASH_NBYTES", "HeldPrefix", "agreed_tokens", "hold_prefix", "prefix_salt"]

HASH_NBYTES = 16


class HeldPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What decode holds of a request: whole blocks of ``block_tokens`` tokens, one 16-byte hash each."""

    block_tokens: Annotated[int, Meta(ge=1, le=1 << 20)] = 1
    hashes: Annotated[bytes, Meta(max_length=16 << 20)] = b""

    @property
    def tokens(self) -> int:
        """Leading tokens whose KV decode holds."""
        return len(self.hashes) // HASH_NBYTES * self.block_tokens


def hold_prefix(ids: NDArray[np.integer], block_tokens: int, salt: bytes) -> HeldPrefix:
    """Name the whole blocks of ``ids``, token ids of shape (tokens,), as a prefix that is held."""
    if block_tokens < 1:
        raise InputError(f"block_tokens: {block_tokens} is less than 1")
    raw = np.ascontiguousarray(ids, "<i4").tobytes()
    step = 4 * block_tokens
    link, hashes = hashlib.sha256(salt).digest(), []
    # A chain is sequential by nature; about half a microsecond a block.
    for at in range(0, len(raw) - step + 1, step):
        link = hashlib.sha256(link + raw[at : at + step]).digest()
        hashes.append(link[:HASH_NBYTES])
    return HeldPrefix(block_tokens, b"".join(hashes))


def agreed_tokens(held: HeldPrefix, ids: NDArray[np.integer], salt: bytes) -> int:
    """How many leading tokens of ``ids`` decode really holds, by its own hashes; whole blocks of its."""
    ours = hold_prefix(ids, held.block_tokens, salt).hashes
    most = min(len(ours), len(held.hashes)) // HASH_NBYTES
    pairs = np.frombuffer(ours, np.uint8)[: most * HASH_NBYTES], np.frombuffer(held.hashes, np.uint8)
    equal = (pairs[0] == pairs[1][: most * HASH_NBYTES]).reshape(most, HASH_NBYTES).all(axis=1)
    first_unlike = int(np.argmin(equal)) if not equal.all() else most
    return first_unlike * held.block_tokens


def prefix_salt(
    fingerprint: Fingerprint, *, adapters: tuple[LoraAdapter, ...] = (), media: tuple[str, ...] = ()
) -> bytes:
    """What besides token ids decides a request's KV: weights, config, the adapters and media it uses."""
    used = tuple((adapter.weights, adapter.scale) for adapter in adapters)
    return msgspec.msgpack.encode((fingerprint.weights, fingerprint.config, used, media))
