"""Synthetic payloads shaped like a request's KV, and the pool of one node that holds all of them.

A payload is blocks of one size, the same block ids in every layer, in no order and no two touching,
as a worker that has served for a while gives them. All payloads of a probe lie in one pool, so one
endpoint a node serves the whole probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kvferry.errors import InputError
from kvferry.layout import BlockTable, LayerKind, PoolLayout

__all__ = ["MAX_PAYLOAD_NBYTES", "TOKENS", "Family", "Payload", "Room", "sizes_up_to"]

MAX_PAYLOAD_NBYTES = 64 << 30
MAX_SLOTS = 64
SMALLEST_NBYTES = 64 << 10
#: Every payload is one token of its request; how many blocks move is its tables' to say.
TOKENS = 1
# K and V of 32 layers, as in an 8B model.
_LAYERS = 32
# Small blocks, so that a byte and a descriptor can be told apart: an eighth of the size, and
# payloads of at most a quarter, which have twice as many descriptors as the largest payload.
_SMALL_BLOCK, _SMALL_PAYLOAD = 8, 4


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group of the pool: ``blocks`` blocks in each of 2 x ``layers`` regions, for one payload."""

    block_bytes: Annotated[int, Meta(ge=64, le=1 << 30)]
    layers: Annotated[int, Meta(ge=1, le=4096)]
    blocks: Annotated[int, Meta(ge=1, le=1 << 30)]


class Payload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``nbytes`` of payload in blocks of ``block_bytes`` over ``full_layers`` layers of K and V.

    One that has not a block for each region lies in one layer. Raises InputError naming the field.
    """

    nbytes: int
    block_bytes: int
    full_layers: int = _LAYERS

    def __post_init__(self) -> None:
        if not 64 <= self.block_bytes <= 1 << 30 or self.block_bytes % 4:
            raise InputError(f"block_bytes: {self.block_bytes} is not a multiple of 4, from 64 to 1 GiB")
        if not 1 <= self.full_layers <= 4096:
            raise InputError(f"layers: {self.full_layers} is not from 1 to 4096")
        if not 2 * self.block_bytes <= self.nbytes <= MAX_PAYLOAD_NBYTES:
            least = 2 * self.block_bytes
            raise InputError(f"bytes: {self.nbytes} is not from two blocks ({least}) to {MAX_PAYLOAD_NBYTES}")

    @property
    def layers(self) -> int:
        """Layers that it lies in: all, or one."""
        return self.full_layers if self.nbytes >= 2 * self.full_layers * self.block_bytes else 1

    @property
    def blocks(self) -> int:
        """Blocks in each region."""
        return self.nbytes // (2 * self.layers * self.block_bytes)

    @property
    def descriptors(self) -> int:
        """Pieces that it moves in."""
        return 2 * self.layers * self.blocks

    @property
    def moved_nbytes(self) -> int:
        """What really moves: whole blocks in every region, at most ``nbytes``."""
        return self.descriptors * self.block_bytes


class Room(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the pool of a node has room for: a source payload of each family, and ``slots`` arriving ones."""

    families: Annotated[tuple[Family, ...], Meta(min_length=1, max_length=16)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1

    @staticmethod
    def of(payloads: Sequence[Payload], slots: int = 1) -> Room:
        """Room for each of these, one at a time."""
        most: dict[tuple[int, int], int] = {}
        for payload in payloads:
            key = (payload.block_bytes, payload.layers)
            most[key] = max(most.get(key, 0), payload.blocks)
        return Room(tuple(Family(*key, blocks) for key, blocks in most.items()), slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, less what alignment adds."""
        return sum(
            2 * family.layers * self._num_blocks(family) * family.block_bytes for family in self.families
        )

    def layout(self) -> PoolLayout:
        """One group a family, each with a length of its own, as in cross attention: one moves, none else."""
        pools, first = [], 0
        for number, family in enumerate(self.families):
            pool = PoolLayout.paged(
                range(first, first + family.layers),
                kv_heads=1,
                head_dim=family.block_bytes // 4,
                dtype="float32",
                block_size=1,
                num_blocks=self._num_blocks(family),
                name=f"probe-{number}",
            )
            group = msgspec.structs.replace(pool.groups[0], kind=LayerKind.CROSS)
            pools.append(PoolLayout((group,), pool.nbytes))
            first += family.layers
        return PoolLayout.beside(*pools)

    def layers(self, payload: Payload) -> tuple[int, int]:
        """The layers of a payload, first and one past the last."""
        index = self.index(payload)
        first = sum(family.layers for family in self.families[:index])
        return first, first + self.families[index].layers

    def tables(self, payload: Payload, slot: int | None = None) -> tuple[BlockTable, ...]:
        """Blocks of the source (``slot`` None), or of an arriving payload. No two of one side touch.

        Sources are the even blocks, arrivals the odd ones: what arrives never lies over what is sent.
        """
        chosen = self.index(payload)
        nothing = BlockTable(0, np.empty(0, np.int32), 0)
        tables = [nothing] * len(self.families)
        shuffled = np.random.default_rng(0 if slot is None else slot + 1).permutation(payload.blocks)
        first = 0 if slot is None else 2 * self.families[chosen].blocks * slot + 1
        tables[chosen] = BlockTable(0, (first + 2 * shuffled).astype(np.int32), payload.blocks)
        return tuple(tables)

    def index(self, payload: Payload) -> int:
        """The payload's family. Raises InputError where this pool has no room for it."""
        for index, family in enumerate(self.families):
            if (family.block_bytes, family.layers) == (payload.block_bytes, payload.layers):
                if payload.blocks <= family.blocks:
                    return index
                break
        raise InputError(
            f"payload: {payload.nbytes} bytes in {payload.block_bytes} have no room in this pool"
        )

    def _num_blocks(self, family: Family) -> int:
        return 2 * family.blocks * self.slots


def sizes_up_to(largest: Payload) -> list[Payload]:
    """Payloads from 64 KiB up to the largest by factors of four, in blocks of two sizes; smallest first.

    Before them, two small blocks, and two of a quarter: on a slow link the bytes of 64 KiB take longer than
    its start, and the start of a copy is seen only where its bytes take next to nothing. A token bucket lets
    its first few thousand bytes pass at once, so that start has a bend between the two.
    """
    small, tiny = (max(64, largest.block_bytes // _SMALL_BLOCK // part // 4 * 4) for part in (1, 4))
    payloads = []
    for block, top in ((largest.block_bytes, largest.nbytes), (small, largest.nbytes // _SMALL_PAYLOAD)):
        least = max(2 * block, min(SMALLEST_NBYTES, largest.nbytes))
        sizes = [max(top, least)]
        while sizes[-1] // 4 >= 2 * least:
            sizes.append(sizes[-1] // 4)
        payloads += [Payload(size, block, largest.full_layers) for size in (*sizes, least)]
    if largest.nbytes > SMALLEST_NBYTES:
        payloads += [Payload(2 * block, block, largest.full_layers) for block in (tiny, small)]
    by_size = sorted(payloads, key=lambda payload: (payload.nbytes, payload.descriptors))
    return list(dict.fromkeys(by_size))
