"""A board: where a guard posts which bytes may be read now, for readers that move the bytes themselves.

Such a reader would ask for leave by a message and say by another that it is done; both wake a process of
the peer. It reads the same off the board, by the way it reads the bytes:

    before the copy   the grant's slot must name the grant, and hold every piece: in one of its few ranges,
                      or as one of the very pieces of the grant, all of which are asked for, in their order
    after the copy    the slot must be as it was, byte for byte

A posting goes before anything else of its memory changes, and no two postings are alike. So a slot that
is as it was says that the grant stood all the while. What is not on the board is asked for; so is the
reason when a posting is gone. docs/decisions/0185-leave-is-read.md.

    slot, 128 bytes, little-endian: blake2b-128 of the grant's id, number of the posting, xxh3-64 of all
    the rest, xxh3-128 of the grant's offsets and sizes as int64, then 5 times the first byte and the end
    of a range; unused ones are zero
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable

import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.errors import CapacityError
from kvferry.transport.base import Memory
from kvferry.transport.memory import create_shared
from kvferry.transport.patience import Patience

__all__ = ["BOARD_NBYTES", "MAX_RANGES", "SLOT_NBYTES", "Board", "PeerBoard"]

Int64 = NDArray[np.int64]

MAX_RANGES = 5
SLOT_NBYTES = 128
# With 32 small grants at once one in 32 finds its slot taken, and is asked for.
NUM_SLOTS = 1024
BOARD_NBYTES = NUM_SLOTS * SLOT_NBYTES

MEMFD_NAME = "kvferry-board"
_NAME_NBYTES = 16
_HEAD = struct.Struct(f"<{_NAME_NBYTES}sQQ")
_TABLE_NBYTES = 16
_RANGES = struct.Struct(f"<{2 * MAX_RANGES}Q")
_NO_RANGES = bytes(_RANGES.size)
_NUMBER = struct.Struct("<Q")
_EMPTY = bytes(_HEAD.size)

_log = logging.getLogger(__name__)


class Board:
    """This side's board. Not for two threads at once: the guard's own lock covers it."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._view = memory.array.data
        # By place: the name that is posted there.
        self._names: dict[int, bytes] = {}
        self._number = 0

    @classmethod
    def create(cls) -> Board | None:
        """An empty board in shared memory; None where the system gives none, and every reader asks."""
        try:
            return cls(create_shared(BOARD_NBYTES, MEMFD_NAME))
        except CapacityError as error:
            _log.info("no board: %s", error)
            return None

    def post(
        self, transfer_id: bytes, offset: Int64, nbytes: Int64, ranges: tuple[Int64, Int64] | None
    ) -> bool:
        """Post a grant to read these pieces; False where another has its slot.

        ``ranges``: first bytes and ends of what the pieces cover, where that is known; only few are posted.
        Everything that readers may find there is there already.
        """
        name = _name_of(transfer_id)
        place = _place_of(name)
        if place in self._names:
            return False
        self._number += 1
        terms = _table_of(offset, nbytes) + _packed(ranges)
        head = _HEAD.pack(name, self._number, _sum_of(name, self._number, terms))
        # Whoever sees a part of this sees a wrong sum.
        self._view[place : place + SLOT_NBYTES] = head + terms
        self._names[place] = name
        return True

    def withdraw(self, transfer_id: bytes) -> None:
        """Take a grant's posting off, if there is one. Nothing in its ranges may have changed before."""
        name = _name_of(transfer_id)
        place = _place_of(name)
        if self._names.get(place) == name:
            del self._names[place]
            # With its number and sum: else the name alone, of the next posting, would make it whole again.
            self._view[place : place + _HEAD.size] = _EMPTY

    def close(self) -> None:
        """Take everything off, and let go of the memory; maps of it stay as they are. Safe to call twice."""
        if self._names:
            self.memory.array[:] = 0
        self._names.clear()
        self._view = memoryview(bytearray(BOARD_NBYTES))
        self.memory.close()


class PeerBoard:
    """The peer's board, by ``read``: the bytes of the slot at an offset, within the limits.

    ``read`` sees no older bytes than copies that were over before it was called; it raises KVFerryError.
    """

    def __init__(self, read: Callable[[int, Patience], bytes]) -> None:
        self._read = read

    def look(self, transfer_id: bytes, offset: Int64, nbytes: Int64, patience: Patience) -> Posting | None:
        """The posting that lets this side read all these pieces; None where the peer must be asked.

        ``offset`` and ``nbytes``: int64, in the peer's memory, one entry a piece.
        """
        name = _name_of(transfer_id)
        place = _place_of(name)
        slot = self._read(place, patience)
        found, number, checksum = _HEAD.unpack_from(slot)
        terms = slot[_HEAD.size :]
        if found != name or checksum != _sum_of(name, number, terms):
            return None
        ranges = terms[_TABLE_NBYTES:]
        is_in = ranges != _NO_RANGES and _holds(_RANGES.unpack(ranges), offset, nbytes)
        if not is_in and terms[:_TABLE_NBYTES] != _table_of(offset, nbytes):
            return None
        return Posting(self._read, place, slot)


class Posting:
    """What stood on the peer's board when it was looked at."""

    def __init__(self, read: Callable[[int, Patience], bytes], place: int, slot: bytes) -> None:
        self._read = read
        self._place = place
        self._slot = slot

    def stands(self, patience: Patience) -> bool:
        """It has stood until now."""
        return self._read(self._place, patience) == self._slot


def _table_of(offset: Int64, nbytes: Int64) -> bytes:
    """What two sides compare who have the same pieces in the same order. It finds errors, not forgery."""
    table = xxhash.xxh3_128(np.ascontiguousarray(offset, "<i8").data)
    table.update(np.ascontiguousarray(nbytes, "<i8").data)
    return table.digest()


def _packed(ranges: tuple[Int64, Int64] | None) -> bytes:
    if ranges is None or len(ranges[0]) > MAX_RANGES:
        return _NO_RANGES
    borders = np.stack(ranges, axis=1).reshape(-1).tolist()
    return _RANGES.pack(*borders, *[0] * (2 * MAX_RANGES - len(borders)))


def _holds(borders: tuple[int, ...], offset: Int64, nbytes: Int64) -> bool:
    """Each piece lies in one of the ranges."""
    starts, stops = borders[::2], borders[1::2]
    if len(offset) == 1:
        first, size = int(offset[0]), int(nbytes[0])
        return size >= 0 and any(
            start <= first and first + size <= stop for start, stop in zip(starts, stops, strict=True)
        )
    # Sizes and offsets were checked against the peer's memory, so that sums do not wrap.
    end = offset + nbytes
    is_in = np.zeros(len(offset), bool)
    for start, stop in zip(starts, stops, strict=True):
        is_in |= (offset >= start) & (end <= stop)
    return bool(is_in.all()) and int(nbytes.min()) >= 0


def _name_of(transfer_id: bytes) -> bytes:
    """What the board says instead of the id, which is nobody's business who reads the board."""
    return hashlib.blake2b(transfer_id, digest_size=_NAME_NBYTES).digest()


def _place_of(name: bytes) -> int:
    return int.from_bytes(name[:4], "little") % NUM_SLOTS * SLOT_NBYTES


def _sum_of(name: bytes, number: int, terms: bytes) -> int:
    return xxhash.xxh3_64_intdigest(name + _NUMBER.pack(number) + terms)
