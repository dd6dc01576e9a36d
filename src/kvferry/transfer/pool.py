"""A pool: the memory that holds a worker's blocks, and the layout that says where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout import PoolLayout
from kvferry.transfer.staging import ALIGNMENT
from kvferry.transport.base import Memory
from kvferry.transport.memory import create_shared, private

__all__ = ["Pool", "memory_nbytes", "staging_offset"]


def staging_offset(layout: PoolLayout) -> int:
    """Where staging begins in a pool's memory."""
    return -(-layout.nbytes // ALIGNMENT) * ALIGNMENT


def memory_nbytes(layout: PoolLayout, staging_nbytes: int) -> int:
    """What a pool's memory holds in all. Raises InputError for less than none."""
    if staging_nbytes < 0:
        raise InputError(f"staging_nbytes: {staging_nbytes} is less than 0")
    return staging_offset(layout) + staging_nbytes if staging_nbytes else layout.nbytes


class Pool:
    """Memory and layout, registered together.

    Args:
        memory: any writable, contiguous buffer of at least ``layout.nbytes`` bytes: a NumPy
            array, a bytearray, a torch tensor, or ``Memory`` from ``create_shared``. The pool does not
            copy it; it must outlive the endpoint. A tensor on a GPU stays there: ``nixl`` and
            ``mooncake`` move it through windows in host memory, the other transports refuse it.
        layout: where each block's bytes lie.
        staging_nbytes: how much of the memory, behind the layout's, is the endpoint's own to convert
            in; see ``allocate``.

    Memory that the engine allocated itself serves peers on this host by ``process_vm_readv`` and
    runs its transfers in threads of the engine; ``Pool.allocate`` makes memory that a transfer
    process can map, which is faster. Raises InputError when the buffer is unfit or too small.
    """

    def __init__(self, memory: Any, layout: PoolLayout, *, staging_nbytes: int = 0) -> None:
        self.memory = memory if isinstance(memory, Memory) else private(memory)
        self.layout = layout
        self.staging_nbytes = staging_nbytes
        needed = memory_nbytes(layout, staging_nbytes)
        if self.memory.nbytes < needed:
            what = "the layout needs" if not staging_nbytes else "the layout and its staging need"
            raise InputError(f"memory: {self.memory.nbytes} bytes, but {what} {needed}")

    @classmethod
    def allocate(cls, layout: PoolLayout, *, staging_nbytes: int = 0) -> Pool:
        """A pool in shared memory, touched, in huge pages where the kernel gives them.

        ``staging_nbytes``: room to convert in, for an endpoint that allows conversions
        (``DEFAULT_STAGING_NBYTES`` is enough for any layout of blocks below 4 MiB a head). Raises
        CapacityError when there is no room.
        """
        memory = create_shared(memory_nbytes(layout, staging_nbytes))
        return cls(memory, layout, staging_nbytes=staging_nbytes)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, uint8, one dimension; what the engine builds its views from."""
        if self.memory.device is not None:
            raise InputError(
                f"array: this pool lies on {self.memory.device.name}, and no array can show it",
                next_step="use the engine's own tensors",
            )
        return self.memory.array[: self.layout.nbytes] if self.staging_nbytes else self.memory.array

    def close(self) -> None:
        """Give shared memory back; arrays over it stay valid until they go. Safe to call twice."""
        self.memory.close()
