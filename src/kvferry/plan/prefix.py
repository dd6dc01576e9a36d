"""Which instances hold which prefix blocks: one index for all, least recently used blocks go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvferry.plan.trace import PREFIX_BLOCK_TOKENS, TraceRow

__all__ = ["PrefixIndex", "prefix_hits"]


class PrefixIndex:
    """The prefix caches of a pool of instances.

    For each block hash a bit field of the instances that hold it, so that one walk along a prompt's
    hashes finds the hit of every instance.
    """

    def __init__(self, capacity_blocks: list[int]) -> None:
        self._capacity = capacity_blocks
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacity_blocks]
        self._holders: dict[int, int] = {}
        self._everyone = (1 << len(capacity_blocks)) - 1

    def hits(self, hashes: tuple[int, ...]) -> dict[int, int]:
        """Leading blocks that each instance holds; instances that hold none are left out."""
        found: dict[int, int] = {}
        together = self._everyone
        holders = self._holders
        for blocks, block in enumerate(hashes):
            still = holders.get(block, 0) & together
            lost = together ^ still
            if lost and blocks:
                _mark(found, lost, blocks)
            together = still
            if not together:
                return found
        _mark(found, together, len(hashes))
        return found

    def hit(self, instance: int, hashes: tuple[int, ...]) -> int:
        """Leading blocks that one instance holds."""
        held = self._held[instance]
        for blocks, block in enumerate(hashes):
            if block not in held:
                return blocks
        return len(hashes)

    def insert(self, instance: int, hashes: tuple[int, ...]) -> None:
        """The instance has computed or received these blocks."""
        held, capacity, bit = self._held[instance], self._capacity[instance], 1 << instance
        # The end of a prompt goes first when room is needed: a block without its prefix is of no use.
        for block in reversed(hashes):
            if block in held:
                held.move_to_end(block)
                continue
            held[block] = None
            self._holders[block] = self._holders.get(block, 0) | bit
        while len(held) > capacity:
            self._forget(held.popitem(last=False)[0], bit)

    def clear(self, instance: int) -> None:
        """The instance has lost its memory."""
        for block in self._held[instance]:
            self._forget(block, 1 << instance)
        self._held[instance].clear()

    def _forget(self, block: int, bit: int) -> None:
        left = self._holders[block] & ~bit
        if left:
            self._holders[block] = left
        else:
            del self._holders[block]


def _mark(found: dict[int, int], instances: int, blocks: int) -> None:
    while instances:
        low = instances & -instances
        found[low.bit_length() - 1] = blocks
        instances ^= low


def prefix_hits(rows: Iterable[TraceRow]) -> Iterator[int]:
    """Prompt tokens of each row that an endless cache would hold: leading blocks that came before."""
    seen: set[int] = set()
    for row in rows:
        hashes = row.prefix_hashes
        whole = next((at for at, block in enumerate(hashes) if block not in seen), len(hashes))
        yield min(whole * PREFIX_BLOCK_TOKENS, row.prompt_tokens)
        seen.update(hashes)
