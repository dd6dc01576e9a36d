"""The numerics probe: fixed ids through one prefill and one step, all logits hashed.

Workers compare it once per pair of endpoints. It shows what names and versions do not: other
weights, another rope base, another attention kernel, and thread counts where they really change
bits. The engine runs its own forward, in the configuration that it serves with.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import LocalError

__all__ = ["PROBE_PREFILL_TOKENS", "ProbeTokens", "probe_digest", "probe_token_ids"]

PROBE_PREFILL_TOKENS = 24
# Odd and without a small factor in common with usual vocabulary sizes, so the ids spread
# (Knuth's multiplicative hashing: 2^32 over the golden ratio).
_SPREAD = 2_654_435_761


class ProbeTokens(NamedTuple):
    """``prefill``: int32 (24,), run as one prompt; ``step``: one more id, run as one decode step."""

    prefill: NDArray[np.int32]
    step: int


def probe_token_ids(vocab_size: int) -> ProbeTokens:
    """The probe's ids for a vocabulary: a function of its size alone, the same on every worker.

    They come from the middle half of the vocabulary: special tokens, which some engines treat
    apart, stand at its ends. Raises LocalError for an empty vocabulary.
    """
    if vocab_size < 1:
        raise LocalError(f"vocabulary of {vocab_size} tokens")
    order = np.arange(1, PROBE_PREFILL_TOKENS + 2, dtype=np.uint64)
    ids = vocab_size // 4 + (order * np.uint64(_SPREAD)) % np.uint64(max(1, vocab_size // 2))
    return ProbeTokens(ids[:-1].astype(np.int32), int(ids[-1]))


def probe_digest(logits: Iterable[NDArray[np.generic]]) -> str:
    """sha256 over dtype, shape and bytes of each array, in order: every prefill row, then the step's.

    bfloat16 may be given as its uint16 bit patterns. Raises LocalError for no array, an empty
    one, or logits that are not finite: such a worker serves nobody.
    """
    digest = hashlib.sha256()
    count = 0
    for array in logits:
        if array.size == 0 or (np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all()):
            raise LocalError(f"numerics probe: logits {count} of shape {array.shape} are empty or not finite")
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(msgspec.msgpack.encode((array.dtype.name, array.shape)))
        digest.update(little.data)
        count += 1
    if count == 0:
        raise LocalError("numerics probe: no logits")
    return digest.hexdigest()
