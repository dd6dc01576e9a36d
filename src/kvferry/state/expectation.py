"""What the decode side expects of one request, and what it has for it. All of it is local knowledge."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.state.values import Count, Digest, Name, Record

__all__ = ["Expectation", "GroupRoom"]

TransferId = Annotated[bytes, Meta(min_length=16, max_length=16)]


class GroupRoom(Record, frozen=True, kw_only=True):
    """Blocks (or slots) reserved now for this request in one group, prefix hits included."""

    group: Name
    num_blocks: Count


class Expectation(Record, frozen=True, kw_only=True):
    """What must hold for this request, apart from what the engine needs for any request.

    ``known_transfer_ids``: every one that was seen here. ``newest_attempt``: the highest that was
    announced for this request. ``lease_seconds_left`` was counted by this side's clock since the
    state arrived, ``estimated_seconds`` is the planned time of the rest: move and load.
    ``known_multimodal`` and ``compiled_grammars`` (digests) are what this side has ready for the
    request; the latter None where the engine compiles a grammar as it imports (check 15 then compares
    the masks). ``parts``: optional fields of the record that the request is known to need here (a
    grammar, log-probabilities), so that a peer which forgot one is found out. ``bytes_moved``: KV
    bytes that have arrived already (a push layer by layer). ``lossy``: conversions on the way that
    round values, in words.
    """

    request_id: Name
    known_transfer_ids: tuple[TransferId, ...] = ()
    newest_attempt: Count = 0
    room: tuple[GroupRoom, ...] = ()
    batch_slots: Count = 0
    lease_seconds_left: float
    estimated_seconds: float
    known_multimodal: tuple[Name, ...] = ()
    compiled_grammars: tuple[Digest, ...] | None = ()
    parts: tuple[Name, ...] = ()
    bytes_moved: Count = 0
    lossy: tuple[Name, ...] = ()
