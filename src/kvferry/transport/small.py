"""Small copies beside a library that moves large ones: the bytes come with the answer, on kvferry's channel.

Where the peer must be asked anyway, a few bytes are there sooner than the library could begin. Where the
channel is encrypted, so are they.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import Copy, Memory
from kvferry.transport.channel import SAID_NBYTES, Channel
from kvferry.transport.device import pieces_of, pool_bytes
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part
from kvferry.transport.tcp_data import ask_read, serve_read
from kvferry.transport.wire import Request, malformed

__all__ = ["SMALL_NBYTES", "ask_small", "serve_small"]

Int64 = NDArray[np.int64]

# Said in one buffer with their marks; see docs/decisions/0185.
SMALL_NBYTES = SAID_NBYTES


def ask_small(
    channel: Channel, memory: Memory, copy: Copy, part: Part, patience: Patience
) -> NDArray[np.uint64] | None:
    """Pull one part of at most SMALL_NBYTES. A refusal leaves the channel usable, else as ``ask_read``."""
    if memory.device is None:
        return ask_read(channel, memory.array, copy, part, patience)
    landed = np.empty(part.total_nbytes, np.uint8)
    digests = ask_read(channel, landed, copy, replace(part, here=_starts(part.nbytes)), patience)
    pieces_of(pool_bytes(memory), part.here, part.nbytes).scatter(0, len(part.nbytes), landed)
    return digests


def serve_small(channel: Channel, memory: Memory, request: Request, patience: Patience) -> None:
    """Send what an admitted peer reads, by the rules of ``serve_read``. Raises PeerError for more bytes."""
    if request.total_nbytes > SMALL_NBYTES:
        raise malformed(f"a small copy of {request.total_nbytes} bytes", patience.peer)
    if memory.device is None:
        serve_read(channel, memory.array, request, patience)
        return
    gathered = np.empty(request.total_nbytes, np.uint8)
    pieces_of(pool_bytes(memory), request.offset, request.nbytes).gather(0, len(request.nbytes), gathered)
    serve_read(channel, gathered, replace(request, offset=_starts(request.nbytes)), patience)


def _starts(nbytes: Int64) -> Int64:
    """Where each piece begins when they lie side by side."""
    return nbytes.cumsum() - nbytes
