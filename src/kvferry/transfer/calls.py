"""What an engine process asks of its transfer process, and the answers: msgpack records.

Every call is answered once, when it is finished: a pull answers when the state is visible, an
outcome when the hold ended. Answers come in any order; ``id`` joins them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import ErrorRecord
from kvferry.layout import Conversions, PoolLayout
from kvferry.protocol.messages import Portion, WireTable
from kvferry.protocol.prefix import HeldPrefix
from kvferry.state import Requirements
from kvferry.transfer.trace import TransferRecord
from kvferry.transport.security import HOST_ONLY, Security

__all__ = [
    "Arrival",
    "ArrivalCall",
    "Call",
    "CancelCall",
    "CloseCall",
    "CommitCall",
    "Held",
    "InFlight",
    "LayersCall",
    "ListenCall",
    "Listening",
    "MeetCall",
    "NodeConfig",
    "Nothing",
    "OfferCall",
    "Outcome",
    "OutcomeCall",
    "PullCall",
    "PushCall",
    "RenewCall",
    "Renewed",
    "Reply",
    "ReserveCall",
    "StartCall",
    "Stats",
    "StatsCall",
    "Timeouts",
    "Transfers",
    "TransfersCall",
]


class Timeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds after which each wait without a caller's own timeout ends.

    ``lost``: silence after which a peer counts as gone; it says something each ``heartbeat``.
    ``abort``: how long an abort waits for its acknowledgement. ``start``: how long decode waits
    for prefill to say Released.
    """

    handshake: float = 5.0
    heartbeat: float = 0.5
    lost: float = 2.0
    abort: float = 0.5
    start: float = 5.0


_Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
_Seconds = Annotated[float, Meta(gt=0, lt=7 * 24 * 3600)]
_Few = Annotated[int, Meta(ge=1, le=1 << 16)]


class NodeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a transfer process is told once, as its first frame."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    layout: PoolLayout
    requirements: Requirements | None
    integrity: bool
    timeouts: Timeouts
    memory_fd: int | None
    owner_pid: int
    owner_address: int
    max_transfers: _Few = 1024
    max_moving: _Few = 64
    max_lease_seconds: float = 3600.0
    copy_threads: _Few = 2
    is_observed: bool = False
    security: Security = HOST_ONLY
    conversions: Conversions | None = None
    staging_nbytes: int = 0
    measured: dict[str, dict[str, float]] = {}


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    id: int


class ListenCall(_Call, frozen=True):
    addresses: tuple[str, ...]


class MeetCall(_Call, frozen=True):
    address: str
    timeout_seconds: _Seconds


class OfferCall(_Call, frozen=True):
    """``like``: another offer of the same blocks, whose digests serve for this one too.

    ``peer``: who may claim it, as in ``Ticket``.
    """

    transfer: bytes
    request_id: str
    state: bytes
    tokens: _Count
    tables: tuple[WireTable, ...]
    lease_seconds: _Seconds
    like: bytes = b""
    peer: str = ""


class ReserveCall(_Call, frozen=True):
    transfer: bytes
    request_id: str
    tokens: _Count
    tables: tuple[WireTable, ...]
    lease_seconds: _Seconds
    held: HeldPrefix
    peer: str = ""
    together: bytes = b""


class PullCall(_Call, frozen=True):
    ticket: bytes
    tables: tuple[WireTable, ...]
    timeout_seconds: _Seconds
    held: HeldPrefix
    transport: str
    portions: tuple[Portion, ...] = ()
    together: bytes = b""


class PushCall(_Call, frozen=True):
    ticket: bytes
    tables: tuple[WireTable, ...]
    tokens: _Count
    timeout_seconds: _Seconds
    state: bytes
    prompt_ids: bytes
    transport: str
    portions: tuple[Portion, ...] = ()


class LayersCall(_Call, frozen=True):
    transfer: bytes
    first_layer: _Count
    stop_layer: _Count
    first_token: _Count
    stop_token: _Count


class CommitCall(_Call, frozen=True):
    transfer: bytes
    state: bytes


class StartCall(_Call, frozen=True):
    transfer: bytes


class CancelCall(_Call, frozen=True):
    """``unclaimed_only``: leave it alone if a peer has taken it up."""

    transfer: bytes
    error: ErrorRecord
    unclaimed_only: bool = False


class RenewCall(_Call, frozen=True):
    transfer: bytes
    lease_seconds: _Seconds


class ArrivalCall(_Call, frozen=True):
    transfer: bytes


class OutcomeCall(_Call, frozen=True):
    transfer: bytes


class StatsCall(_Call, frozen=True):
    pass


class TransfersCall(_Call, frozen=True):
    """What is held or under way, at most ``limit`` of it."""

    limit: _Few


class CloseCall(_Call, frozen=True):
    pass


Call = (
    ListenCall
    | MeetCall
    | OfferCall
    | ReserveCall
    | PullCall
    | PushCall
    | LayersCall
    | CommitCall
    | StartCall
    | CancelCall
    | RenewCall
    | ArrivalCall
    | OutcomeCall
    | StatsCall
    | TransfersCall
    | CloseCall
)


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=str.lower):
    pass


class Nothing(_Value, frozen=True):
    """Done, nothing to say."""


class Listening(_Value, frozen=True):
    addresses: tuple[str, ...]
    incarnation: bytes


class Held(_Value, frozen=True):
    """An offer or a reservation is held; this names it to the peer."""

    ticket: bytes


class Renewed(_Value, frozen=True):
    """How long the lease lasts from now on."""

    lease_seconds: float


class Arrival(_Value, frozen=True):
    """Committed: the state record, checked, with its blocks in the pool; ``portions`` as claimed."""

    state: bytes
    record: TransferRecord
    portions: tuple[Portion, ...] = ()


class Outcome(_Value, frozen=True):
    """A transfer ended and this side's blocks are the engine's again."""

    record: TransferRecord


class Stats(_Value, frozen=True):
    """What a node holds now, all zero when idle; and what registering its pool with transports took.

    ``packing``: pairs of staging windows in use.
    """

    pid: int
    transfers: int
    holds: int
    grants: int
    peers: int
    copies: int
    digesting: int
    packing: int
    threads: int
    fds: int
    registration_seconds: float = 0.0


class InFlight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transfer that has not ended: what moved until now, its phase, its age and what is left of its lease.

    Phase ``held``: an offer or a reservation that nobody has claimed.
    """

    record: TransferRecord
    phase: str
    seconds: float
    lease_seconds: float


class Transfers(_Value, frozen=True):
    """What is held or under way at this side, the oldest first."""

    transfers: tuple[InFlight, ...]


class Ended(_Value, frozen=True):
    """A transfer ended at this side: well, or by ``error``. Told to whoever observes the endpoint."""

    record: TransferRecord
    error: ErrorRecord | None = None


class Reply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answer to call ``id``: a value, or an error. ``id`` 0: told without being asked."""

    id: int
    value: Nothing | Listening | Held | Renewed | Arrival | Outcome | Stats | Transfers | Ended | None = None
    error: ErrorRecord | None = None
