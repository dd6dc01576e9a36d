"""A pool: the memory that holds a worker's blocks, and the layout that says where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import InputError
from kvferry.layout import PoolLayout
from kvferry.transport.base import Memory
from kvferry.transport.memory import create_shared, private

__all__ = ["Pool"]


class Pool:
    """Memory and layout, registered together.

    Args:
        memory: any writable, contiguous buffer of at least ``layout.nbytes`` bytes: a NumPy
            array, a bytearray, a CPU torch tensor, or ``Memory`` from ``create_shared``. The
            pool does not copy it; it must outlive the endpoint.
        layout: where each block's bytes lie.

    Memory that the engine allocated itself serves peers on this host by ``process_vm_readv`` and
    runs its transfers in threads of the engine; ``Pool.allocate`` makes memory that a transfer
    process can map, which is faster. Raises InputError when the buffer is unfit or too small.
    """

    def __init__(self, memory: Any, layout: PoolLayout) -> None:
        self.memory = memory if isinstance(memory, Memory) else private(memory)
        self.layout = layout
        if self.memory.nbytes < layout.nbytes:
            raise InputError(f"memory: {self.memory.nbytes} bytes, but the layout needs {layout.nbytes}")

    @classmethod
    def allocate(cls, layout: PoolLayout) -> Pool:
        """A pool in shared memory, touched, in huge pages where the kernel gives them.

        Raises CapacityError when there is no room.
        """
        return cls(create_shared(layout.nbytes), layout)

    @property
    def array(self) -> NDArray[np.uint8]:
        """The bytes, uint8, one dimension; what the engine builds its views from."""
        return self.memory.array

    def close(self) -> None:
        """Give shared memory back; arrays over it stay valid until they go. Safe to call twice."""
        self.memory.close()
