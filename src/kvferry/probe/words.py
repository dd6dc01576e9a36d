"""What a coordinator and an agent say to each other: calls and answers, closed msgpack records.

They travel as frames of kvferry's own transports, so their framing, limits and encryption are the
same as a handoff's. Every call is answered once; ``id`` joins call and answer. Times are durations.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.errors import ErrorRecord, PeerError
from kvferry.link import Mode, Registration
from kvferry.probe.node import Copied
from kvferry.probe.payload import Payload, Room
from kvferry.probe.snapshot import AgentSnapshot
from kvferry.transport.security import Plain

__all__ = [
    "VERSION",
    "About",
    "AboutCall",
    "Answer",
    "Call",
    "CloseCall",
    "CollectCall",
    "CompareCall",
    "Copies",
    "Done",
    "Held",
    "HoldCall",
    "MoveCall",
    "OpenCall",
    "Opened",
    "PingCall",
    "Seen",
    "SnapshotCall",
    "TransportFact",
    "decode_answer",
    "decode_call",
]

#: Coordinator and agents must be equal in it.
VERSION = 1
MAX_COPIES = 256

_Seconds = Annotated[float, Meta(gt=0, le=24 * 3600)]
_Name = Annotated[str, Meta(min_length=1, max_length=128)]
_Address = Annotated[str, Meta(max_length=512)]
_Slot = Annotated[int, Meta(ge=0, le=63)]
_Tickets = Annotated[tuple[Annotated[bytes, Meta(max_length=1 << 16)], ...], Meta(max_length=MAX_COPIES)]
_Facts = Annotated[dict[_Name, Annotated[str, Meta(max_length=1024)]], Meta(max_length=64)]


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    id: int


class AboutCall(_Call, frozen=True):
    """Who are you? ``version``: the coordinator's; an agent of another one refuses."""

    version: int


class PingCall(_Call, frozen=True):
    """Are you there? Answered at once, whatever else is under way."""


class SnapshotCall(_Call, frozen=True):
    """What do you do now? Reads only."""


class OpenCall(_Call, frozen=True, kw_only=True):
    """Make a pool and an endpoint for one probe; they are gone after ``seconds``, or with the connection.

    ``tls``: data over tcp is encrypted by kvferry. ``via``: what peers connect to instead of the
    endpoint itself: a proxy beside them, or "".
    """

    coordinator: _Name
    room: Room
    transports: Annotated[tuple[_Name, ...], Meta(min_length=1, max_length=8)]
    integrity: bool
    seconds: _Seconds
    tls: bool = False
    via: _Address = ""


class HoldCall(_Call, frozen=True):
    """Hold blocks for ``count`` copies: an offer each for pulls, a reservation each for pushes."""

    mode: Mode
    payload: Payload
    slot: _Slot
    count: Annotated[int, Meta(ge=1, le=MAX_COPIES)]
    seconds: _Seconds


class MoveCall(_Call, frozen=True):
    """Claim these tickets one after the other; ``seconds`` is the limit of all of them."""

    mode: Mode
    tickets: _Tickets
    payload: Payload
    slot: _Slot
    transport: _Name
    seconds: _Seconds


class CollectCall(_Call, frozen=True):
    """The holder's part of the same copies, until its blocks are its own again."""

    mode: Mode
    tickets: _Tickets
    seconds: _Seconds


class CompareCall(_Call, frozen=True):
    """Are the bytes in ``slot`` those of the node with ``seed``?"""

    payload: Payload
    slot: _Slot
    seed: Annotated[int, Meta(ge=0, lt=2**32)]


class CloseCall(_Call, frozen=True):
    """Give the pool and the endpoint back."""


Call = (
    AboutCall
    | PingCall
    | SnapshotCall
    | OpenCall
    | HoldCall
    | MoveCall
    | CollectCall
    | CompareCall
    | CloseCall
)


class TransportFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transport at one node: ``unavailable`` says why it does not work there, or is ""."""

    scheme: _Name
    unavailable: Annotated[str, Meta(max_length=1024)] = ""


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class About(_Value, frozen=True, kw_only=True):
    """An agent. ``host_id`` is equal for all processes of one kernel; ``zone`` is its owner's word.

    ``can_encrypt``: it has an identity; ``plain``: where it sends in plain, a word of ``Plain``.
    """

    version: int
    name: _Name
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    host: Annotated[str, Meta(max_length=256)]
    host_id: Annotated[str, Meta(max_length=64)]
    zone: Annotated[str, Meta(max_length=64)] = ""
    software: _Facts = {}
    facts: _Facts = {}
    transports: Annotated[tuple[TransportFact, ...], Meta(max_length=64)] = ()
    max_bytes: Annotated[int, Meta(ge=0)] = 0
    can_encrypt: bool = False
    plain: Plain = Plain.LOOPBACK
    busy: Annotated[str, Meta(max_length=256)] = ""


class Opened(_Value, frozen=True):
    """The endpoint listens; ``seed`` tells which words its pool is filled with."""

    addresses: Annotated[tuple[_Address, ...], Meta(max_length=16)]
    registration: Registration
    seed: Annotated[int, Meta(ge=0, lt=2**32)]


class Held(_Value, frozen=True):
    """One ticket a copy."""

    tickets: _Tickets


class Copies(_Value, frozen=True):
    """What decode saw of each copy (nothing from the side that gave), and how long the claimant connected."""

    copies: Annotated[tuple[Copied, ...], Meta(max_length=MAX_COPIES)] = ()
    handshake_seconds: Annotated[tuple[float, ...], Meta(max_length=MAX_COPIES)] = ()


class Seen(_Value, frozen=True):
    """What the agent does now."""

    snapshot: AgentSnapshot


class Done(_Value, frozen=True):
    """Nothing to say."""


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to call ``id``: a value, or an error."""

    id: int
    value: About | Opened | Held | Copies | Seen | Done | None = None
    error: ErrorRecord | None = None


T = TypeVar("T")
_calls: msgspec.msgpack.Decoder[Call] = msgspec.msgpack.Decoder(Call)
_answers = msgspec.msgpack.Decoder(Answer)


def decode_call(frame: bytes, peer: str) -> Call:
    """A coordinator's words. Raises PeerError for anything else, InputError for a payload without sense."""
    return _decode(_calls, frame, peer)


def decode_answer(frame: bytes, peer: str) -> Answer:
    """An agent's words. Raises PeerError for anything else."""
    return _decode(_answers, frame, peer)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes, peer: str) -> T:
    try:
        return decoder.decode(frame)
    except msgspec.MsgspecError as error:
        raise PeerError(
            f"the peer sent what no probe of this version says: {error}",
            phase="probe",
            peer=peer,
            now_true="nothing was done",
            next_step="is it a kvferry agent of this version? run the same kvferry on all nodes",
        ) from error
