"""Which blocks of a pool hold a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout.bounds import check_int

__all__ = ["BlockTable"]

_MAX_INDEX = (1 << 31) - 1


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The blocks of one request in one group, in token order.

    Args:
        first_block: logical index of ``ids[0]``; above 0 where a sliding group has freed blocks.
        ids: block ids, int32, shape (entries,); any sequence of whole numbers is taken and
            copied. For recurrent state the slot ids, usually one.
        tokens: only for cross attention, whose length is the encoder's and not the request's.

    Raises InputError for ids that are not whole numbers in [0, 2**31).
    """

    first_block: int
    ids: NDArray[np.int32]
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_int("first_block", self.first_block, 0, _MAX_INDEX)
        if self.tokens is not None:
            check_int("tokens", self.tokens, 0, _MAX_INDEX)
        ids = _int32(self.ids)
        ids.flags.writeable = False
        object.__setattr__(self, "ids", ids)


def _int32(ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """A private int32 copy, so that an engine may go on using its own array."""
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InputError(
            f"block ids: a flat list of whole numbers is needed, not {given.dtype} {given.shape}"
        )
    if given.size and (given.min() < 0 or given.max() > _MAX_INDEX):
        raise InputError(f"block ids: {int(given.min())}..{int(given.max())} is not within 0..{_MAX_INDEX}")
    return np.array(given, dtype=np.int32)
