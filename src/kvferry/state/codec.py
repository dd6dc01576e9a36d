"""ExecutionState <-> bytes: ``KVF1``, u32 version, u64 body length, sha256 of the body, msgpack body.

Integers are little-endian. The size is bounded before anything is read, and the digest is
checked before anything is parsed: of single-bit changes to a record without a digest one in
ten was accepted by a prototype, and one in ten more raised somewhere in the parser. The digest
guards against damage; against a hostile peer the schema and its bounds do, inside an
authenticated channel.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NoReturn

import msgspec

from kvferry.errors import CorruptError, IncompatibleError, KVFerryError, LocalError, PeerError
from kvferry.state.record import MAJOR_VERSION, ExecutionState

__all__ = ["HEADER_NBYTES", "MAX_STATE_NBYTES", "decode_state", "encode_state"]

MAX_STATE_NBYTES = 16 << 20
"""A million tokens take 4 MB and float32 logits of 256k entries 1 MB; KV bytes are not in the record."""

_MAGIC = b"KVF1"
_HEADER = struct.Struct("<4sIQ32s")
HEADER_NBYTES = _HEADER.size

_encoder = msgspec.msgpack.Encoder(order="deterministic")
_decoder = msgspec.msgpack.Decoder(ExecutionState)
# RecursionError and MemoryError do not come from this schema, whose depth and lengths are
# bounded; they are listed so that a record can never end a worker.
_PARSE_ERRORS = (
    msgspec.MsgspecError,
    LocalError,
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    MemoryError,
)


def encode_state(state: ExecutionState, *, max_nbytes: int = MAX_STATE_NBYTES) -> bytes:
    """The record as bytes; the same state gives the same bytes.

    Raises LocalError when a field breaks the schema or its bounds, or the whole is larger than
    ``max_nbytes``: the exporter's mistake is found at the exporter.
    """
    try:
        body = _encoder.encode(state)
        _decoder.decode(body)
    except _PARSE_ERRORS as error:
        raise LocalError(
            f"the execution state does not fit its own schema: {error}",
            request_id=state.request_id,
            phase="export",
            next_step="correct the field in the engine adapter that exported it",
        ) from error
    if (nbytes := HEADER_NBYTES + len(body)) > max_nbytes:
        raise LocalError(
            f"the execution state is {nbytes} bytes, more than {max_nbytes}",
            request_id=state.request_id,
            phase="export",
            next_step="move large tensors and engine bytes through a pool group, not in a section",
        )
    return _HEADER.pack(_MAGIC, state.version.major, len(body), hashlib.sha256(body).digest()) + body


def decode_state(
    data: bytes | bytearray | memoryview, *, max_nbytes: int = MAX_STATE_NBYTES
) -> ExecutionState:
    """The record in ``data``: the first half of check 1 (magic, version, length, digest, schema).

    Raises CorruptError for bytes that are not those that were exported, IncompatibleError for
    another major version, PeerError for what is no record or breaks the schema or the bound.
    No other exception, whatever the bytes are; nothing is kept after one.
    """
    nbytes = memoryview(data).nbytes
    if nbytes > max_nbytes:
        _refuse(PeerError, f"{nbytes} bytes, more than the {max_nbytes} agreed")
    if nbytes < HEADER_NBYTES:
        _refuse(CorruptError, f"{nbytes} bytes, less than the {HEADER_NBYTES} of its header: it was cut")
    magic, major, body_nbytes, digest = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        _refuse(PeerError, f"magic is {magic!r}, not {_MAGIC!r}: not an execution state")
    if major != MAJOR_VERSION:
        _refuse(IncompatibleError, f"major version is {major}, this side reads {MAJOR_VERSION}")
    if body_nbytes != nbytes - HEADER_NBYTES:
        _refuse(CorruptError, f"{nbytes - HEADER_NBYTES} bytes of body where the header says {body_nbytes}")
    body = memoryview(data)[HEADER_NBYTES:]
    if hashlib.sha256(body).digest() != digest:
        _refuse(CorruptError, "its sha256 is not the one in its header: the bytes changed on the way")
    return _parse(body, major)


def _parse(body: memoryview, major: int) -> ExecutionState:
    try:
        state = _decoder.decode(body)
    except _PARSE_ERRORS as error:
        _refuse(PeerError, f"the body breaks the schema: {error}", error)
    # Defaults are for whoever makes a record; on the wire a field left out (or written twice, or an
    # int for a float) is refused, or a lost top_p would silently become 1.
    if _encoder.encode(state) != body:
        _refuse(PeerError, "the body is not canonical: a field is left out, comes twice or in another form")
    if state.version.major != major:
        _refuse(PeerError, f"the header says version {major}, the body {state.version.major}")
    return state


def _refuse(kind: type[KVFerryError], found: str, cause: BaseException | None = None) -> NoReturn:
    raise kind(
        f"check 1 (envelope): execution state: {found}",
        phase="can_start",
        now_true="nothing was taken over; prefill keeps its copy",
        next_step="export again; if it repeats, compare the kvferry versions of both sides",
    ) from cause
