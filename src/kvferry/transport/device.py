"""Pool bytes that this process cannot touch, such as a GPU's: copied in steps to host memory and back.

Two calls are all that a device has to offer, each of one step of a table, at most 2 MiB. They are where
a pool in host memory gathers and scatters (staging.py), so digests, windows and commits are the same code
for both. docs/decisions/0180-device-pools.md.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError, KVFerryError, LocalError
from kvferry.transport.staging import STEP_NBYTES, Pieces

if TYPE_CHECKING:
    from kvferry.transport.base import Memory

__all__ = ["DeviceBytes", "PoolBytes", "TorchBytes", "pieces_of", "pool_bytes"]

Bytes = NDArray[np.uint8]
Int64 = NDArray[np.int64]


class DeviceBytes(ABC):
    """A pool's bytes on a device. Any thread may call, several at once.

    ``name``: for errors, such as ``cuda:0``. What the engine wrote before it offered or lent its blocks
    must be complete on the device by then (synchronise the stream that wrote it): nothing here waits
    for work of other streams.
    """

    name: str
    nbytes: int

    @abstractmethod
    def gather(self, offset: Int64, nbytes: Int64, out: Bytes) -> None:
        """Copy the pieces at ``offset``, in order, into ``out``; it holds them when this returns.

        ``offset``, ``nbytes``: int64, one entry a piece, all inside; together as many bytes as ``out``
        has: uint8, contiguous, in host memory.
        """

    @abstractmethod
    def scatter(self, offset: Int64, nbytes: Int64, data: Bytes) -> None:
        """Copy ``data`` to the pieces at ``offset``, in order; the device has it when this returns."""


PoolBytes = Bytes | DeviceBytes
"""Where a pool's bytes are: an array of this process, or a device."""


def pool_bytes(memory: Memory) -> PoolBytes:
    """The array of a pool in host memory, else its device."""
    return memory.array if memory.device is None else memory.device


def pieces_of(pool: PoolBytes, offset: Int64, nbytes: Int64) -> Pieces | _DevicePieces:
    """The pieces of a table, to be gathered and scattered run by run."""
    if isinstance(pool, DeviceBytes):
        return _DevicePieces(pool, offset, nbytes)
    return Pieces(pool, offset, nbytes)


class _DevicePieces:
    """As ``Pieces``, on a device."""

    def __init__(self, device: DeviceBytes, offset: Int64, nbytes: Int64) -> None:
        self._device = device
        self._offset = offset
        self._nbytes = nbytes

    def gather(self, first: int, last: int, out: Bytes) -> None:
        with self._named("read"):
            self._device.gather(self._offset[first:last], self._nbytes[first:last], out)

    def scatter(self, first: int, last: int, data: Bytes) -> None:
        with self._named("write"):
            self._device.scatter(self._offset[first:last], self._nbytes[first:last], data)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Whatever a device's library raises, as this side's fault: then a peer can be told of it."""
        try:
            yield
        except KVFerryError:
            raise
        except Exception as error:
            raise LocalError(
                f"{self._device.name} failed to {what} the pool: {error!r}",
                phase="move",
                next_step="see the device's own log; the blocks are as they were, or partly written",
            ) from error


class TorchBytes(DeviceBytes):
    """A torch tensor: contiguous, on any device. Copies go through pinned host memory, 2 MiB a thread.

    Raises InputError for a tensor that is not contiguous or has no bytes.
    """

    def __init__(self, tensor: Any) -> None:
        import torch  # noqa: PLC0415 - there, or there would be no tensor

        if not tensor.is_contiguous() or not tensor.numel():
            raise InputError("memory: a pool needs a contiguous tensor of at least one byte")
        self._torch = torch
        self._flat = tensor.detach().reshape(-1).view(torch.uint8)
        self._local = threading.local()
        self.name = str(tensor.device)
        self.nbytes = int(self._flat.numel())

    def gather(self, offset: Int64, nbytes: Int64, out: Bytes) -> None:
        table, rows, item = self._rows(offset, nbytes)
        for first, last in _some(len(rows), item):
            host = self._staging((last - first) * item)
            host.copy_(table.index_select(0, rows[first:last]).view(-1), non_blocking=True)
            self._wait()
            out[first * item : last * item] = host.numpy()

    def scatter(self, offset: Int64, nbytes: Int64, data: Bytes) -> None:
        table, rows, item = self._rows(offset, nbytes)
        for first, last in _some(len(rows), item):
            host = self._staging((last - first) * item)
            host.numpy()[:] = data[first * item : last * item]
            landed = host.to(self._flat.device, non_blocking=True)
            table.index_copy_(0, rows[first:last], landed.view(last - first, item))
            self._wait()

    def _rows(self, offset: Int64, nbytes: Int64) -> tuple[Any, Any, int]:
        """The tensor as a table of items of one size, which rows of it the pieces are, and that size."""
        item = int(np.gcd.reduce(np.concatenate((nbytes, offset))))
        counts = nbytes // item
        first = counts.cumsum() - counts
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(first, counts)
        rows = self._torch.from_numpy(np.repeat(offset // item, counts) + within)
        table = self._flat[: self.nbytes // item * item].view(-1, item)
        return table, rows.to(self._flat.device), item

    def _staging(self, nbytes: int) -> Any:
        kept = getattr(self._local, "host", None)
        if kept is None or len(kept) < nbytes:
            size = max(nbytes, 2 * STEP_NBYTES)
            kept = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=self._flat.is_cuda)
            self._local.host = kept
        return kept[:nbytes]

    def _wait(self) -> None:
        if self._flat.is_cuda:
            self._torch.cuda.current_stream(self._flat.device).synchronize()


def _some(count: int, item: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 row of each copy, of at most two steps' bytes."""
    step = max(1, 2 * STEP_NBYTES // item)
    for first in range(0, count, step):
        yield first, min(first + step, count)
