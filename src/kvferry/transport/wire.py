"""What is said on a data channel: a request with its tables, then marks between payload.

    request   REQUEST, offset[pieces], nbytes[pieces], chunk_end[chunks], chunk_id[chunks]
    mark      MARK: a kind and a number of bytes, 16 bytes

read     asker: request                        server: DATA frame DATA frame ... DONE, or ENDED
write    asker: request DATA frame ... DONE    server: DONE, or ENDED at any time
look     asker: request ... RELEASE            server: ADMITTED ... DONE, or ENDED at any time
push     as read, through windows that a library writes into: staged.py

``look`` admits the asker to read the server's memory itself; what is on the server's board (board.py)
needs none. ENDED is followed by a reason of as
many bytes as its mark says. All integers are little-endian; tables are int64. Every number is
bounded before anything is allocated by it.
"""

from __future__ import annotations

import enum
import math
import struct
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ErrorRecord, KVFerryError, PeerError
from kvferry.transport.base import TRANSFER_ID_NBYTES, Copy, CopyEndedError
from kvferry.transport.staging import FEW
from kvferry.transport.table import MAX_PIECES, Part, first_outside, sum_of

__all__ = [
    "MARK_NBYTES",
    "MAX_REASON_NBYTES",
    "REQUEST",
    "Kind",
    "Operation",
    "Request",
    "encode_reason",
    "refusal",
]

Int64 = NDArray[np.int64]

REQUEST = struct.Struct(f"<4sBBH{TRANSFER_ID_NBYTES}sdQQ")
ONE_PIECE_NBYTES = 16
MARK_NBYTES = 16
MARK_MAGIC = int.from_bytes(b"KVFM", "little")
MAX_REASON_NBYTES = 64 << 10
MAX_SECONDS = 24 * 3600.0
# Of one asker, for a copy that is pushed to it: one is filled while another is emptied.
MIN_WINDOWS, MAX_WINDOWS = 2, 16

NO_CHUNKS = np.empty(0, np.int64)
_REQUEST_MAGIC = b"KVFQ"


class Operation(enum.IntEnum):
    """What a request asks for."""

    READ = 1
    WRITE = 2
    LOOK = 3
    PUSH = 4


_OPERATIONS = {operation.value: operation for operation in Operation}


class Kind(enum.IntEnum):
    """What a mark says."""

    DATA = 1
    DONE = 2
    ADMITTED = 3
    RELEASE = 4
    ENDED = 5
    FREE = 6
    STOP = 7


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request as both sides know it. Offsets are in the server's memory.

    For PUSH ``chunk_end`` holds the addresses of the asker's windows.
    """

    operation: Operation
    transfer_id: bytes
    seconds: float
    integrity: bool
    offset: Int64
    nbytes: Int64
    chunk_end: Int64
    chunk_id: Int64

    @classmethod
    def of(
        cls,
        operation: Operation,
        copy: Copy,
        part: Part,
        chunk_end: Int64 = NO_CHUNKS,
        chunk_id: Int64 = NO_CHUNKS,
    ) -> Request:
        """To ask for one part of a copy, within the time that the copy has left."""
        return cls(
            operation,
            copy.transfer_id,
            copy.deadline - time.monotonic(),
            copy.integrity,
            part.there,
            part.nbytes,
            chunk_end,
            chunk_id,
        )

    @property
    def total_nbytes(self) -> int:
        """Bytes of all pieces."""
        return sum_of(self.nbytes)

    def encode(self) -> list[bytes | Int64]:
        """The request as buffers to send one after the other."""
        head = REQUEST.pack(
            _REQUEST_MAGIC,
            self.operation,
            self.integrity,
            0,
            self.transfer_id,
            max(0.0, min(self.seconds, MAX_SECONDS)),
            len(self.offset),
            len(self.chunk_id),
        )
        tables = (self.offset, self.nbytes, self.chunk_end, self.chunk_id)
        if len(self.offset) <= FEW >= len(self.chunk_id):
            return [head, b"".join(table.tobytes() for table in tables)]
        return [head, np.concatenate(tables)]


class Head(NamedTuple):
    """What the head of a request says, once it is known to be within bounds."""

    operation: Operation
    integrity: bool
    transfer_id: bytes
    seconds: float
    pieces: int
    chunks: int

    @property
    def tables_nbytes(self) -> int:
        """How many bytes of tables follow."""
        return 16 * (self.pieces + self.chunks)


def decode_head(head: bytes, peer: str) -> Head:
    """The head of a request: REQUEST.size bytes. Raises PeerError when it is not within bounds."""
    magic, number, integrity, zero, transfer_id, seconds, pieces, chunks = REQUEST.unpack(head)
    operation = _OPERATIONS.get(number)
    if (
        magic != _REQUEST_MAGIC
        or operation is None
        or integrity > 1
        or zero
        or not math.isfinite(seconds)
        or not 0 <= seconds <= MAX_SECONDS
        or not 0 < pieces <= MAX_PIECES
        or chunks > MAX_PIECES
        or (chunks > 0) != (operation is Operation.WRITE or operation is Operation.PUSH)
        or (operation is Operation.PUSH and not MIN_WINDOWS <= chunks <= MAX_WINDOWS)
    ):
        raise malformed("a request head with values that are not allowed", peer)
    return Head(operation, bool(integrity), transfer_id, seconds, pieces, chunks)


def decode(head: Head, tables: NDArray[np.uint8], memory_nbytes: int, peer: str) -> Request:
    """The request of a head and its tables. Raises PeerError for a table that cannot be served."""
    pieces, chunks = head.pieces, head.chunks
    numbers = tables.view("<i8").astype(np.int64, copy=False)
    offset, nbytes = numbers[:pieces], numbers[pieces : 2 * pieces]
    chunk_end, chunk_id = numbers[2 * pieces : 2 * pieces + chunks], numbers[2 * pieces + chunks :]
    bad = first_outside(offset, nbytes, memory_nbytes)
    if bad is not None:
        piece = f"piece {bad}, {nbytes[bad]} bytes at {offset[bad]}"
        raise malformed(f"{piece}, outside of the memory of {memory_nbytes} bytes", peer)
    total = sum_of(nbytes)
    if total >= 2**62:
        raise malformed("a table of more bytes than any memory has", peer)
    if head.operation is Operation.WRITE and not _covers(chunk_end, total):
        raise malformed("chunks that do not cover the pieces", peer)
    return Request(
        head.operation, head.transfer_id, head.seconds, head.integrity, offset, nbytes, chunk_end, chunk_id
    )


def _covers(chunk_end: Int64, total_nbytes: int) -> bool:
    """Chunks that end in ascending order, the last of them with the pieces."""
    if len(chunk_end) <= FEW:
        ends = [0, *chunk_end.tolist()]
        return ends[-1] == total_nbytes and all(one <= other for one, other in pairwise(ends))
    return (
        int(chunk_end[-1]) == total_nbytes
        and int(chunk_end[0]) >= 0
        and bool((chunk_end[:-1] <= chunk_end[1:]).all())
    )


def malformed(what: str, peer: str) -> PeerError:
    """The error for bytes that no kvferry of this version sends."""
    return PeerError(
        f"the peer sent {what}",
        phase="move",
        peer=peer,
        next_step="run the same kvferry on both sides",
    )


def encode_reason(error: KVFerryError) -> bytes:
    """An error as the reason after ENDED."""
    encoded = msgspec.msgpack.encode(error.to_record())
    if len(encoded) > MAX_REASON_NBYTES:
        short = msgspec.structs.replace(
            error.to_record(), message=error.message[:1000], now_true="", next_step=""
        )
        encoded = msgspec.msgpack.encode(short)
    return encoded


def decode_reason(encoded: bytes, peer: str) -> PeerError:
    """The error that ended a copy at the other side, as this side reports it."""
    try:
        record = msgspec.msgpack.decode(encoded, type=ErrorRecord)
    except msgspec.DecodeError:
        return malformed("a reason that cannot be read", peer)
    return refusal(record, peer)


def refusal(record: ErrorRecord, peer: str) -> CopyEndedError:
    """An error that carries the words of the peer's guard."""
    return CopyEndedError(
        f"the peer refused or ended the copy: {record.message} ({record.kind})",
        request_id=record.request_id,
        phase="move",
        peer=peer,
        bytes_done=record.bytes_done,
        now_true="some of the destination bytes may have changed; nothing was committed",
        next_step=record.next_step or "see the peer's log",
    )
