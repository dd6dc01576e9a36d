"""What kvferry asks of an engine: blocks, a request's state out, a request's state in.

Nine members, so that another engine is one file. The rules that an adapter keeps:

- An engine's own import call is never trusted. The new request is built aside, read back, compared
  (checks 13 to 15 of ``kvferry.state``), and only then made visible, in one step.
- It fills its own objects by role; nothing is ever set by a name that a peer gave.
- Blocks have one owner. ``allocate`` gives them to the caller; a successful ``import_state`` hands
  them to the request; ``release`` and ``free`` give them back. A failure moves no ownership.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvferry.layout import BlockTable, PoolLayout
from kvferry.state import Exactness, ExecutionState, Requirements

__all__ = ["BlockTables", "EngineAdapter"]

BlockTables: TypeAlias = tuple[BlockTable, ...]
"""One table for each group of the pool's layout, in its order."""


class EngineAdapter(ABC):
    """One engine with one pool. Calls are made from the engine's own thread, one at a time."""

    @property
    @abstractmethod
    def layout(self) -> PoolLayout:
        """Where the KV lies in ``memory``."""

    @property
    @abstractmethod
    def memory(self) -> NDArray[np.uint8]:
        """The pool itself: flat, writable, ``layout.nbytes`` long or longer."""

    @abstractmethod
    def requirements(self) -> Requirements:
        """What this engine needs to start a request, from its own configuration; the fingerprint inside.

        The first call may run the numerics probe (a forward of 24 tokens and one step); later calls are free.
        """

    @abstractmethod
    def allocate(self, tokens: int) -> BlockTables:
        """Blocks for ``tokens`` tokens in every group, owned by the caller until imported or freed.

        Raises CapacityError; then none was taken.
        """

    @abstractmethod
    def free(self, tables: BlockTables) -> None:
        """Give back what ``allocate`` gave. Raises LocalError, and frees none, for blocks not so held."""

    @abstractmethod
    def tables(self, request_id: str) -> BlockTables:
        """The blocks that hold this request's KV now. Raises LocalError for an unknown request."""

    @abstractmethod
    def export_state(self, request_id: str, exactness: Exactness) -> ExecutionState:
        """Everything besides the KV bytes, as of now; ``tables`` says where those are.

        Changes nothing: the request may go on here, and its blocks stay until ``release``. Raises
        LocalError for a request that is unknown, still prefilling, or finished.
        """

    @abstractmethod
    def import_state(self, state: ExecutionState, tables: BlockTables) -> str:
        """Make a request of a state whose KV lies in ``tables``. Returns its id.

        The caller has passed checks 1 to 12; this one makes 13 to 15. After an error nothing is
        visible here and the blocks are still the caller's; after success they are the request's.
        Raises IncompatibleError naming the check, LocalError for an id that is in use here.
        """

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Forget a request, whatever its phase, and free its blocks. Raises LocalError when unknown."""
