"""What happened after the bytes moved, as the transfer and the engine adapter report it to the checks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.state.cache import GroupBlocks
from kvferry.state.request import Rng, TextPosition
from kvferry.state.values import Count, Digest, Name, Record

__all__ = ["Arrival", "GroupArrival", "ImportReport", "LandedBlocks", "Replay", "SequencePosition"]

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]


class GroupArrival(Record, frozen=True, kw_only=True):
    """The bytes of one group: how many were due, how many came, and both digests.

    ``peer_digest`` is prefill's, taken at export; ``local_digest`` is of what lies here now. Both
    are None where the pair agreed to compare none.
    """

    group: Name
    expected_nbytes: Count
    nbytes: Count
    peer_digest: str | None
    local_digest: str | None


class LandedBlocks(Record, frozen=True, kw_only=True):
    """The local blocks that now hold the state's tokens, and the transfer that they are reserved for."""

    blocks: GroupBlocks
    owner: TransferId


class Arrival(Record, frozen=True, kw_only=True):
    """All that arrived. ``transfer_id`` is the one echoed in the commit."""

    transfer_id: TransferId
    groups: tuple[GroupArrival, ...]
    landed: tuple[LandedBlocks, ...]
    lease_seconds_left: float


class SequencePosition(Record, frozen=True, kw_only=True):
    """The engine's own word on one group of the new sequence; None where it says that it is empty."""

    group: Name
    first_token: Count | None
    num_tokens: Count | None


class ImportReport(Record, frozen=True, kw_only=True):
    """The return value of the engine's import call and a read-back, which must agree.

    ``given_nbytes`` went in, ``accepted_nbytes`` is what the call says that it took. An engine
    without such a call reports the bytes that it wrote. ``num_tokens`` of a position counts from
    the start of the request, though a window holds fewer.
    """

    given_nbytes: Count
    accepted_nbytes: Count
    positions: tuple[SequencePosition, ...]


class Replay(Record, frozen=True, kw_only=True):
    """What decode holds after loading and replaying: its sampler's history, and what else the state has."""

    tokens_digest: Digest
    prompt_tokens: Count
    rng: Rng | None = None
    text: TextPosition | None = None
    grammar_mask_digest: Digest | None = None
