"""Asking a peer for leave to read its memory, and holding it: the one-sided copy's guard.

The peer does not see the reads, so the channel is the witness. The server says ENDED, or hangs
up, before it lets its guard reuse the memory; the reader looks at the channel during the copy and
once after its last read. Finding nothing there, it knows that no byte it read was of reused memory.
The answer to the release is read when the channel is used next: by then it is known whether
the release or an end came first. docs/decisions/0053-admission-over-shm.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import numpy as np

from kvferry.errors import KVFerryError, TransportError
from kvferry.transport.base import Copy
from kvferry.transport.channel import Channel
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part
from kvferry.transport.wire import Kind, Operation, Request

__all__ = ["looking", "serve_look"]

_TELL_SECONDS = 0.5
_NO_CHUNKS = np.empty(0, np.int64)


@contextlib.contextmanager
def looking(channel: Channel, copy: Copy, part: Part, patience: Patience) -> Iterator[Callable[[], None]]:
    """While the block runs, the peer admits reads of the part; yields the check to call during it.

    Raises PeerError when the peer refuses or ends it, at the latest when the block is left.
    """
    request = Request(
        Operation.LOOK,
        copy.transfer_id,
        copy.deadline - time.monotonic(),
        copy.integrity,
        part.there,
        part.nbytes,
        _NO_CHUNKS,
        _NO_CHUNKS,
    )
    channel.is_in_step = False
    channel.write(patience, *request.encode())
    channel.read_mark(Kind.ADMITTED, patience)

    def check() -> None:
        patience.check()
        if channel.has_input():
            _raise_ended(channel, patience)

    yield check
    if channel.has_input():
        _raise_ended(channel, patience)
    with contextlib.suppress(TransportError):  # gone since then: what was read is none the worse
        channel.write_mark(Kind.RELEASE, patience)
        channel.owed_nbytes = part.total_nbytes
        channel.is_in_step = True


def _raise_ended(channel: Channel, patience: Patience) -> None:
    try:
        channel.read_mark(Kind.RELEASE, patience)  # never sent by a server: ENDED, or a hang-up
    finally:
        channel.is_in_step = False


def serve_look(channel: Channel, patience: Patience) -> None:
    """Admit, then wait for the release; if the admission ends before it, the reader is told first."""
    patience.check()
    channel.is_in_step = False
    try:
        channel.write_mark(Kind.ADMITTED, patience)
        channel.wait_said(patience)
        channel.read_mark(Kind.RELEASE, patience)
    except BaseException as error:
        if isinstance(error, KVFerryError):
            # The connection's own end is no refusal: the reader sees that by the hang-up.
            limits = Patience(time.monotonic() + _TELL_SECONDS, patience.tokens[:1], patience.peer)
            with contextlib.suppress(KVFerryError):  # gone, or not reading: the hang-up tells it too
                channel.write_ended(error, limits)
        channel.shut()
        raise
