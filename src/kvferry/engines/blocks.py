"""Which blocks of a pool are free, and which someone holds."""

from __future__ import annotations

from collections.abc import Iterable

from kvferry.errors import CapacityError, LocalError

__all__ = ["Blocks"]


class Blocks:
    """The blocks 0 to ``num_blocks`` - 1 of one layer group. Not for two threads at once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` could give now."""
        return len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take free blocks. Raises CapacityError, and takes none, where there are fewer."""
        if num_blocks > len(self._free):
            raise CapacityError(
                f"{num_blocks} blocks wanted, {len(self._free)} of {self.num_blocks} free",
                now_true="none was taken",
                next_step="release a finished request, or give the engine a larger pool",
            )
        taken = self._free[len(self._free) - num_blocks :]
        del self._free[len(self._free) - num_blocks :]
        self._held.update(taken)
        return taken

    def free(self, ids: Iterable[int]) -> None:
        """Give blocks back. Raises LocalError, and frees none, unless each is held and comes once."""
        given = [int(block) for block in ids]
        if not self.is_held(given):
            raise LocalError(f"blocks {given} are not all held, once each", now_true="none was freed")
        self._held.difference_update(given)
        self._free.extend(given)

    def is_held(self, ids: Iterable[int]) -> bool:
        """Whether all these blocks are allocated, and none comes twice."""
        given = [int(block) for block in ids]
        return len(set(given)) == len(given) and self._held.issuperset(given)
