"""The words of the protocol, and their bytes. No sockets, threads or clocks.

A frame is one message in msgpack, tagged by its type, with a closed schema: an unknown type,
an unknown field, a missing or mistyped one is a PeerError that names it. Tables travel as raw
little-endian arrays, because a list of integers costs a hundred times more to parse.
Times are durations ("ms left"), never clock readings: two machines' clocks are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from kvferry.errors import ErrorRecord, InputError, KVFerryError, PeerError
from kvferry.layout import BlockTable, Conversions, PoolLayout, Role
from kvferry.protocol.prefix import HeldPrefix
from kvferry.state import Fingerprint

__all__ = [
    "MAGIC",
    "MAX_PORTIONS",
    "VERSION",
    "Abort",
    "Aborted",
    "Accept",
    "Busy",
    "Claim",
    "Commit",
    "Committed",
    "Granted",
    "Heartbeat",
    "Hello",
    "Message",
    "Mismatch",
    "Moved",
    "Offered",
    "Pack",
    "Packed",
    "Party",
    "Portion",
    "Ready",
    "Refuse",
    "Released",
    "Renew",
    "Started",
    "TransferMessage",
    "WireTable",
    "decode",
    "encode",
    "from_wire",
    "to_wire",
]

MAGIC = "kvferry"
#: (major, minor): majors must be equal; a minor only adds optional fields.
VERSION = (1, 0)

Id = Annotated[bytes, Meta(min_length=16, max_length=16)]
Count = Annotated[int, Meta(ge=0, le=2**48)]
Milliseconds = Annotated[int, Meta(ge=0, le=7 * 24 * 3600 * 1000)]
Name = Annotated[str, Meta(max_length=256)]
_MAX_BLOB_NBYTES = 16 << 20
# What one pair of ranks moves is one portion, or one for each layer kind; a model has few kinds.
MAX_PORTIONS = 256


class WireTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer group's block table: ids as raw ``<i4``, and what else ``BlockTable`` says."""

    ids: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)]
    first_block: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


def to_wire(tables: Iterable[BlockTable]) -> tuple[WireTable, ...]:
    """Block tables as they travel."""
    return tuple(
        WireTable(np.asarray(table.ids, "<i4").tobytes(), table.first_block, table.tokens) for table in tables
    )


def from_wire(tables: tuple[WireTable, ...]) -> tuple[BlockTable, ...]:
    """The peer's block tables; raises PeerError for ids that are not whole, non-negative int32."""
    if any(len(table.ids) % 4 for table in tables):
        raise PeerError("a block table is not a whole number of int32 ids")
    try:
        return tuple(
            BlockTable(table.first_block, np.frombuffer(table.ids, "<i4"), table.tokens) for table in tables
        )
    except InputError as error:
        raise PeerError(f"a block table does not make sense: {error.message}") from error


class Portion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What of a pair of ranks moves: of each of ``layers`` the tensors ``parts``, heads [start, stop).

    ``parts`` are (role, part). Ranks of one worker that hold the same heads each move a portion of
    their own, so that every byte crosses once.
    """

    layers: Annotated[tuple[Annotated[int, Meta(ge=0, le=1 << 20)], ...], Meta(max_length=1 << 13)]
    parts: Annotated[tuple[tuple[Role, Annotated[int, Meta(ge=0, le=255)]], ...], Meta(max_length=64)]
    head_range: tuple[Annotated[int, Meta(ge=0, le=1 << 16)], Annotated[int, Meta(ge=0, le=1 << 17)]]


class Party(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What each side says of itself once a connection.

    ``incarnation`` is random per process life: after a restart, old tickets fail closed.
    It says something each ``heartbeat_ms`` and takes ``lost_ms`` of silence for the peer's end.
    ``integrity`` says whether this side wants digests compared before commit; both must agree.
    ``conversions``: what may be done to what is not alike, and ``window_nbytes`` of it at a time.
    """

    name: Name
    incarnation: Id
    layout: PoolLayout
    fingerprint: Fingerprint | None
    heartbeat_ms: Milliseconds
    lost_ms: Milliseconds
    integrity: bool
    conversions: Conversions | None = None
    window_nbytes: Count = 0


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class Hello(_Message, frozen=True):
    """First words of the side that connected."""

    magic: Name
    major: int
    minor: int
    party: Party


class Accept(_Message, frozen=True):
    """The listening side agrees; transfers may begin."""

    party: Party


class Refuse(_Message, frozen=True):
    """The pair does not fit; each reason names the field and both values. The connection ends."""

    reasons: tuple[str, ...]


class Heartbeat(_Message, frozen=True):
    """Nothing else was said for a while; this side lives."""


class _TransferMessage(_Message, frozen=True):
    transfer: Id


class Claim(_TransferMessage, frozen=True, kw_only=True):
    """The side that got a ticket takes it up: decode for a pull, prefill for a push.

    A push says its own block tables (decode may have to copy by reading) and, where it is
    known already, the state record, so that decode checks it before a byte moves. A pull names
    the prefix that decode holds already. ``portions``: what of the pair moves; none names all
    that both layouts hold.
    """

    ticket: Annotated[bytes, Meta(max_length=1 << 16)]
    timeout_ms: Milliseconds
    tables: tuple[WireTable, ...] = ()
    state: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)] = b""
    tokens: Count = 0
    held: HeldPrefix = HeldPrefix()
    portions: Annotated[tuple[Portion, ...], Meta(max_length=MAX_PORTIONS)] = ()


class Offered(_TransferMessage, frozen=True):
    """Prefill's answer to a pull: what is offered and where it lies. Opens the read grant.

    ``grant`` names that grant. It is random and said on this connection only, so whoever saw the
    ticket on its way can copy nothing. ``held_tokens``: leading tokens that prefill agrees decode
    holds; the rest moves.
    """

    state: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)]
    tables: tuple[WireTable, ...]
    tokens: Count
    held_tokens: Count
    lease_ms: Milliseconds
    grant: Id


class Granted(_TransferMessage, frozen=True):
    """Decode's answer to a push: where the bytes may go, and what it holds. Opens the write grant.

    ``grant``: as in Offered.
    """

    tables: tuple[WireTable, ...]
    tokens: Count
    held: HeldPrefix
    lease_ms: Milliseconds
    grant: Id


class Busy(_TransferMessage, frozen=True):
    """No room now. Nothing is held; the ticket stays good."""

    retry_after_ms: Milliseconds
    reason: Name


class Ready(_TransferMessage, frozen=True):
    """Push by reading: these layers are final at prefill for these tokens; copy them now.

    ``grant``: as in Offered.
    """

    first_layer: Count
    stop_layer: Count
    first_token: Count
    stop_token: Count
    held_tokens: Count
    grant: Id


class Pack(_TransferMessage, frozen=True):
    """Where the pair converts: pack this window of these layers and tokens, for decode to read.

    Windows are asked for in order. One past the last says that decode has read them all.
    """

    first_layer: Count
    stop_layer: Count
    first_token: Count
    stop_token: Count
    window: Count


class Packed(_TransferMessage, frozen=True):
    """That window lies at this offset of prefill's memory, until the next but one is asked for."""

    window: Count
    offset: Count


class Moved(_TransferMessage, frozen=True):
    """Pull: every byte has landed at decode; prefill may commit."""


class Commit(_TransferMessage, frozen=True):
    """Prefill vouches: the lease held until now, these are the digests, this is the state.

    ``chunk_ids`` raw ``<i8`` and ``digests`` raw ``<u8`` have one entry a chunk, taken when the
    state was exported. Both are empty when integrity is off. ``state`` is empty for a pull.
    ``held_tokens``: what prefill left out because decode holds it.
    """

    state: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)]
    chunk_ids: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)]
    digests: Annotated[bytes, Meta(max_length=_MAX_BLOB_NBYTES)]
    held_tokens: Count

    def digest_table(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The two arrays; raises PeerError when they do not belong together."""
        if len(self.chunk_ids) % 8 or len(self.chunk_ids) != len(self.digests):
            raise PeerError("commit: chunk ids and digests differ in number")
        return np.frombuffer(self.chunk_ids, "<i8"), np.frombuffer(self.digests, "<u8")


class Committed(_TransferMessage, frozen=True):
    """Decode has everything, checked and visible, exactly once. Prefill still keeps its copy.

    The counts are of what arrived, so that both sides record the same.
    """

    nbytes: Count
    descriptors: Count
    chunks: Count


class Mismatch(_TransferMessage, frozen=True):
    """Decode refuses what arrived; nothing became visible."""

    error: ErrorRecord


class Started(_TransferMessage, frozen=True):
    """Decode's engine runs on from the imported state; prefill may forget its copy."""


class Released(_TransferMessage, frozen=True):
    """This side holds nothing for the transfer any more."""


class Abort(_TransferMessage, frozen=True):
    """This side gives up; the error says why and whose fault it is."""

    error: ErrorRecord


class Aborted(_TransferMessage, frozen=True):
    """The abort was heard: this side touches nothing of the transfer and holds nothing for it."""


class Renew(_TransferMessage, frozen=True):
    """Hold the lease for this long from now (asked by the claiming side while it still needs it)."""

    lease_ms: Milliseconds


TransferMessage = (
    Claim
    | Offered
    | Granted
    | Busy
    | Ready
    | Pack
    | Packed
    | Moved
    | Commit
    | Committed
    | Mismatch
    | Started
    | Released
    | Abort
    | Aborted
    | Renew
)
Message = Hello | Accept | Refuse | Heartbeat | TransferMessage

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode(frame: bytes) -> Message:
    """The message in a frame; raises PeerError naming what is wrong with it.

    The transport has bounded the frame's length; blobs and counts are bounded by the schema.
    """
    try:
        return _decoder.decode(frame)
    except (
        msgspec.MsgspecError,
        KVFerryError,
        ValueError,
        TypeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise PeerError(
            f"a frame that is not a message of this protocol: {error}",
            phase="decode",
            next_step="check that both sides run compatible versions of kvferry",
        ) from error
