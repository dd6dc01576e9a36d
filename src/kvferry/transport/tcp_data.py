"""The two copies of ``tcp``, each from both ends: what is asked, what is served, who sends frames."""

from __future__ import annotations

import time
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.base import Arrived, Copy, Guard
from kvferry.transport.channel import Channel
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.frames import Frames, receive_frames, send_frames
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part, sizes_between
from kvferry.transport.wire import Kind, Operation, Request, malformed

__all__ = ["ask_read", "ask_write", "serve_read", "serve_write"]

Bytes = NDArray[np.uint8]


def ask_read(
    channel: Channel, array: Bytes, copy: Copy, part: Part, patience: Patience
) -> NDArray[np.uint64] | None:
    """Pull one part into ``array``. A refusal leaves the channel usable, any other failure does not."""
    _ask(channel, Operation.READ, copy, part, patience)
    sums = ChunkDigests(part.chunk_end) if copy.integrity else None
    receive_frames(channel, Frames(array, part.here, part.nbytes), patience, sums)
    channel.is_in_step = True
    return sums.digests() if sums else None


def ask_write(channel: Channel, array: Bytes, copy: Copy, part: Part, patience: Patience) -> None:
    """Push one part out of ``array``, right behind its request; returns once it has landed."""
    frames = Frames(array, part.here, part.nbytes)
    _ask(channel, Operation.WRITE, copy, part, patience, with_next=frames.is_word)

    def stopped() -> NoReturn:
        channel.read_mark(Kind.DONE, patience, part.total_nbytes)
        raise malformed("that all has landed before it was sent", patience.peer)

    try:
        send_frames(channel, frames, patience, stopped)
        channel.read_mark(Kind.DONE, patience, part.total_nbytes)
        channel.is_in_step = True
    except BaseException:
        channel.is_in_step = False  # frames may be on their way that the peer throws away
        raise


def serve_read(channel: Channel, array: Bytes, request: Request, patience: Patience) -> None:
    """Send what an admitted peer reads; where the grant ends meanwhile, stop at a mark."""
    send_frames(channel, Frames(array, request.offset, request.nbytes), patience.politely())


def serve_write(
    channel: Channel, array: Bytes, request: Request, patience: Patience, *, guard: Guard, path: str
) -> None:
    """Receive what an admitted peer writes, and tell the guard that it landed."""
    started = time.monotonic()
    frames = Frames(array, request.offset, request.nbytes)
    sums = ChunkDigests(request.chunk_end) if request.integrity else None
    receive_frames(channel, frames, patience, sums, is_there=True)
    guard.landed(
        request.transfer_id,
        Arrived(
            path=path,
            seconds=time.monotonic() - started,
            piece_offset=request.offset,
            piece_nbytes=request.nbytes,
            chunk_id=request.chunk_id,
            chunk_nbytes=sizes_between(request.chunk_end),
            digests=sums.digests() if sums else None,
        ),
    )


def _ask(
    channel: Channel,
    operation: Operation,
    copy: Copy,
    part: Part,
    patience: Patience,
    *,
    with_next: bool = False,
) -> None:
    """Send a request, at once or with the words that follow it."""
    writes = operation is Operation.WRITE
    chunks = (part.chunk_end, part.chunk_id) if writes else ()
    request = Request.of(operation, copy, part, *chunks)
    channel.is_in_step = False
    say = channel.hold if with_next else channel.write
    say(patience, *request.encode())
