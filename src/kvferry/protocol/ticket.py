"""Tickets: bytes that name a reservation or an offer to the peer, signed by who issued them.

A ticket travels through hands that kvferry does not control (a router, a JSON field), so its
issuer trusts nothing in it that its own signature does not cover. It comes back to its issuer,
hence the key is the issuer's own; it names one hold, so it can be used once.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import InputError, PeerError

__all__ = ["MAX_TICKET_NBYTES", "Mode", "Ticket", "open_ticket", "read_ticket", "seal_ticket"]

MAX_TICKET_NBYTES = 1 << 16
_MAC_NBYTES = 32
_PREFIX = b"KVT1"


class Mode(enum.StrEnum):
    """Who starts the move: prefill pushes into a reservation, or decode pulls an offer."""

    PUSH = "push"
    PULL = "pull"


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a ticket says. ``transfer`` is random and names the hold at the issuer.

    ``addresses`` are where the issuer can be reached, best first. ``lease_ms`` is how long the
    hold lasted when the ticket was issued; only the issuer's clock decides when it ends. ``peer``
    is a pattern for the names in the certificate of who may claim it; empty for anybody who can.
    """

    mode: Mode
    transfer: Annotated[bytes, Meta(min_length=16, max_length=16)]
    request_id: Annotated[str, Meta(max_length=256)]
    incarnation: Annotated[bytes, Meta(min_length=16, max_length=16)]
    issuer: Annotated[str, Meta(max_length=256)]
    addresses: Annotated[tuple[str, ...], Meta(max_length=16)]
    tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    num_blocks: tuple[int, ...]
    lease_ms: Annotated[int, Meta(ge=0)]
    peer: Annotated[str, Meta(max_length=256)] = ""


_decoder = msgspec.msgpack.Decoder(Ticket)


def seal_ticket(ticket: Ticket, key: bytes) -> bytes:
    """Ticket -> bytes, signed with HMAC-SHA-256 under the issuer's key."""
    body = msgspec.msgpack.encode(ticket)
    return _PREFIX + _mac(body, key) + body


def read_ticket(data: bytes) -> Ticket:
    """What a ticket claims, unverified: enough to know whom to ask and how much room it needs.

    Raises InputError when it is not a ticket: it was handed to this side as an argument.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InputError(f"ticket: it is {type(data).__name__}, not bytes")
    if len(data) > MAX_TICKET_NBYTES or data[:4] != _PREFIX:
        raise InputError(
            "ticket: these bytes are not a kvferry ticket (decode base64 first, if it came through JSON)"
        )
    try:
        return _decoder.decode(data[4 + _MAC_NBYTES :])
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"ticket: damaged or of another version: {error}") from error


def open_ticket(data: bytes, key: bytes, incarnation: bytes) -> Ticket:
    """At the issuer: verify the signature, then the incarnation.

    Raises PeerError: not signed by this endpoint, altered, or issued before its restart.
    """
    if data[:4] != _PREFIX or not hmac.compare_digest(
        _mac(data[4 + _MAC_NBYTES :], key), data[4 : 4 + _MAC_NBYTES]
    ):
        raise PeerError(
            "the ticket is not signed by this endpoint, or was altered, or is from before its restart",
            phase="claim",
            now_true="nothing was granted",
            next_step="ask the endpoint that listens here now for a new ticket",
        )
    ticket = _decoder.decode(data[4 + _MAC_NBYTES :])
    if ticket.incarnation != incarnation:
        raise PeerError(
            "the ticket is from an earlier life of this endpoint",
            phase="claim",
            now_true="nothing was granted",
            next_step="ask for a new ticket",
        )
    return ticket


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, _PREFIX + body, hashlib.sha256).digest()
