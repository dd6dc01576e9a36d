"""A bundle: one request's tickets of all ranks of a worker, one of each for every rank of its peer.

It travels as a ticket does, and nothing in it is trusted: each ticket is signed by the rank that
issued it, and what a rank's layout really is, its own handshake says.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.errors import InputError, KVFerryError
from kvferry.layout import PoolLayout
from kvferry.protocol.ticket import MAX_TICKET_NBYTES, Mode, read_ticket

__all__ = ["MAX_BUNDLE_NBYTES", "MAX_RANKS", "Bundle", "pack_layouts", "read_bundle", "seal_bundle"]

MAX_RANKS = 64
MAX_BUNDLE_NBYTES = 4 << 20
_MAX_LAYOUTS_NBYTES = 16 << 20  # unpacked
_PREFIX = b"KVB1"
_WRONG = (msgspec.MsgspecError, KVFerryError, ValueError, TypeError, OverflowError, zlib.error)

Ticket = Annotated[bytes, Meta(max_length=MAX_TICKET_NBYTES)]
Row = Annotated[tuple[Ticket, ...], Meta(min_length=1, max_length=MAX_RANKS)]


class _Packed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    layouts: bytes
    tickets: Annotated[tuple[Row, ...], Meta(min_length=1, max_length=MAX_RANKS)]


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """What a bundle says. ``tickets[i][j]``: of the issuing worker's rank i, for rank j of its peer."""

    layouts: tuple[PoolLayout, ...]
    tickets: tuple[tuple[bytes, ...], ...]
    mode: Mode
    request_id: str
    tokens: int


_decoder = msgspec.msgpack.Decoder(_Packed)
_layouts_decoder = msgspec.msgpack.Decoder(Annotated[tuple[PoolLayout, ...], Meta(max_length=MAX_RANKS)])


def pack_layouts(layouts: Sequence[PoolLayout]) -> bytes:
    """The layouts of a worker's ranks as a bundle holds them; once a worker, not once a request.

    Compressed, since all ranks' layers are alike: 8 ranks of 80 layers are 155 KB plain and 6 KB so.
    """
    return zlib.compress(msgspec.msgpack.encode(tuple(layouts)))


def seal_bundle(packed_layouts: bytes, tickets: Sequence[Sequence[bytes]]) -> bytes:
    """The bytes to give to the peer."""
    return _PREFIX + msgspec.msgpack.encode(_Packed(packed_layouts, tuple(map(tuple, tickets))))


def read_bundle(data: bytes) -> Bundle:
    """What a bundle claims, unverified. Raises InputError: it was handed to this side as an argument."""
    if len(data) > MAX_BUNDLE_NBYTES or data[:4] != _PREFIX:
        raise InputError(
            "bundle: these bytes are not a kvferry bundle (decode base64 first, if it came through JSON)"
        )
    try:
        packed = _decoder.decode(data[4:])
        layouts = _unpack_layouts(packed.layouts)
        named = {(t.mode, t.request_id, t.tokens) for row in packed.tickets for t in map(read_ticket, row)}
    except _WRONG as error:
        raise InputError(f"bundle: damaged or of another version: {error}") from error
    if len(packed.tickets) != len(layouts) or len({len(row) for row in packed.tickets}) != 1:
        raise InputError("bundle: its tickets are not one for each pair of ranks")
    if len(named) != 1:
        raise InputError("bundle: its tickets are of several requests")
    return Bundle(layouts, packed.tickets, *named.pop())


@lru_cache(maxsize=16)
def _unpack_layouts(packed: bytes) -> tuple[PoolLayout, ...]:
    """A worker's bundles all hold the same bytes here: its layouts are parsed and checked once."""
    unpacking = zlib.decompressobj()
    plain = unpacking.decompress(packed, _MAX_LAYOUTS_NBYTES)
    if not unpacking.eof:
        raise InputError("layouts: cut short or too large")
    return _layouts_decoder.decode(plain)
