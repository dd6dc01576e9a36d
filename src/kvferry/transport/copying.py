"""One copy over several channels at once: a thread each, the first failure ends them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError, LocalError
from kvferry.transport.base import CancelToken
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part

__all__ = ["run_lanes", "run_parts"]

T = TypeVar("T")

Digests = NDArray[np.uint64]
_NO_DIGESTS: Digests = np.empty(0, np.uint64)


def run_parts(
    parts: list[Part],
    streams: int,
    patience: Patience,
    move: Callable[[Part, Patience], Digests | None],
) -> Digests:
    """Move every part, over at most ``streams`` threads. Returns the digests in plan order."""
    if len(parts) == 1:
        digests = move(parts[0], patience)
        return _NO_DIGESTS if digests is None else digests
    lanes = max(1, min(streams, len(parts)))

    def work(lane: int, limits: Patience) -> list[Digests | None]:
        return [move(part, limits) for part in parts[lane::lanes]]

    by_lane = run_lanes(lanes, patience, work)
    found = [by_lane[index % lanes][index // lanes] for index in range(len(parts))]
    return np.concatenate([_NO_DIGESTS, *(digests for digests in found if digests is not None)])


def run_lanes(lanes: int, patience: Patience, work: Callable[[int, Patience], T]) -> list[T]:
    """Call ``work`` with each lane number, each in a thread; the calling thread takes the first.

    When it returns or raises, no thread of it is left. Raises the first failure; the limits that
    ``work`` gets end the other lanes then.
    """
    if lanes == 1:
        return [work(0, patience)]
    failure = CancelToken()
    limits = replace(patience, tokens=(*patience.tokens, failure))

    def guarded(lane: int) -> T:
        try:
            return work(lane, limits)
        except KVFerryError as error:
            failure.cancel(error)
            raise
        except BaseException as error:
            failure.cancel(LocalError(f"another thread of this copy failed: {type(error).__name__}"))
            raise

    with ThreadPoolExecutor(lanes - 1, thread_name_prefix="kvferry copies") as pool:
        others = [pool.submit(guarded, lane) for lane in range(1, lanes)]
        with contextlib.suppress(KVFerryError):  # raised below, as the first failure
            first = guarded(0)
    for future in others:
        error = future.exception()
        if error is not None and not isinstance(error, KVFerryError):
            raise error
    failure.raise_if_cancelled()
    return [first, *(future.result() for future in others)]
