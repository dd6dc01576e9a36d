"""Transports: control frames both ways, and payload copies by table. Choose one by its scheme."""

from kvferry.transport.base import (
    MAX_FRAME_NBYTES,
    TRANSFER_ID_NBYTES,
    Arrived,
    CancelToken,
    Connection,
    Copy,
    Direction,
    Guard,
    Listener,
    Memory,
    Transport,
)
from kvferry.transport.digest import digest_chunks
from kvferry.transport.memory import attach_shared, create_shared, map_shared, private
from kvferry.transport.registry import known_schemes, transport_for
from kvferry.transport.security import Identity, Plain, Security

__all__ = [
    "MAX_FRAME_NBYTES",
    "TRANSFER_ID_NBYTES",
    "Arrived",
    "CancelToken",
    "Connection",
    "Copy",
    "Direction",
    "Guard",
    "Identity",
    "Listener",
    "Memory",
    "Plain",
    "Security",
    "Transport",
    "attach_shared",
    "create_shared",
    "digest_chunks",
    "known_schemes",
    "map_shared",
    "private",
    "transport_for",
]
