"""Payload over a stream: frames of about 4 MiB, each behind a mark, straight from and into the pools.

The sender gives marks and pieces to ``writev`` as one vector. The receiver knows the table, so it
asks ``readv`` for the pieces of a frame and the mark after them; nothing that the peer sends can
choose where bytes land. With integrity, with small pieces, or over a sealed channel, bytes go
through a cache-hot staging buffer: received, opened, summed in one call, then scattered. Up to 32 KiB
go out with their two marks by one system call, and come in by one: the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from kvferry.transport.channel import SAID_NBYTES, Channel, make_marks, mark_of
from kvferry.transport.digest import ChunkDigests
from kvferry.transport.memory import address_of
from kvferry.transport.patience import Patience
from kvferry.transport.staging import STEP_NBYTES, Pieces, step_starts, thread_staging
from kvferry.transport.table import split_pieces, sum_of
from kvferry.transport.vectored import IOVecs, iovecs
from kvferry.transport.wire import MARK_NBYTES, Kind

__all__ = ["SMALL_NBYTES", "Frames", "receive_frames", "send_frames"]

Int64 = NDArray[np.int64]

# Four steps: a frame fills the socket buffers that autotuning reaches, and a cancel or a reason
# waits for at most one frame.
FRAME_NBYTES = 4 * STEP_NBYTES
# Below this mean size the system calls' cost for each piece exceeds that of one more copy in cache.
SMALL_NBYTES = 2048


class Frames:
    """A table of one side's memory, cut into frames; both sides cut the same way."""

    def __init__(self, array: NDArray[np.uint8], offset: Int64, nbytes: Int64) -> None:
        self.array = array
        self.nbytes, (self.offset,) = split_pieces(nbytes, offset)
        self.total_nbytes = sum_of(self.nbytes)
        self.is_small = self.total_nbytes < SMALL_NBYTES * len(self.nbytes)
        #: One frame that is said as one word with its marks, where the channel can.
        self.is_word = self.total_nbytes <= SAID_NBYTES - 2 * MARK_NBYTES

    def __len__(self) -> int:
        return len(self.frame_nbytes)

    @cached_property
    def starts(self) -> Int64:
        """The first piece of each frame, and the number of pieces."""
        return step_starts(self.nbytes, FRAME_NBYTES)

    @cached_property
    def frame_nbytes(self) -> Int64:
        """Bytes of each frame."""
        frame_ends = np.concatenate(([0], self.nbytes.cumsum()))[self.starts]
        return frame_ends[1:] - frame_ends[:-1]

    @cached_property
    def pieces(self) -> Pieces:
        """For going through staging."""
        return Pieces(self.array, self.offset, self.nbytes)

    def woven(self, marks: NDArray[np.uint64]) -> tuple[IOVecs, list[int]]:
        """Mark, pieces, mark, pieces, ..., mark as one vector; and where each mark is in it."""
        pieces = iovecs(address_of(self.array), self.offset, self.nbytes)
        vector = np.empty((len(pieces) + len(marks), 2), np.uint64)
        at = self.starts + np.arange(len(marks))
        is_piece = np.ones(len(vector), np.bool_)
        is_piece[at] = False
        vector[is_piece] = pieces
        vector[at, 0] = address_of(marks) + np.arange(len(marks), dtype=np.uint64) * np.uint64(MARK_NBYTES)
        vector[at, 1] = MARK_NBYTES
        return vector, at.tolist()

    def steps(self, frame: int) -> list[tuple[int, int]]:
        """First and last + 1 piece of each staging step of one frame."""
        first, last = self.starts[frame : frame + 2].tolist()
        return list(pairwise((first + step_starts(self.nbytes[first:last])).tolist()))


def send_frames(
    channel: Channel, frames: Frames, patience: Patience, on_input: Callable[[], NoReturn] | None = None
) -> None:
    """Send every frame and the closing mark; in step again at the end.

    The limits' tokens are looked at between frames: a token that is set there leaves the channel
    in step, so the peer can be told why, in place of the next mark.
    Raises TransportError, DeadlineError or a token's error.
    """
    if frames.is_word and not channel.is_sealed:
        _send_word(channel, frames, patience, on_input)
        return
    marks = np.concatenate(
        (make_marks(Kind.DATA, frames.frame_nbytes), make_marks(Kind.DONE, frames.total_nbytes))
    )
    send = _staged_sender if frames.is_small or channel.is_sealed else _direct_sender
    send_frame = send(channel, frames, marks, patience, on_input)
    for frame in range(len(frames)):
        channel.is_in_step = True
        patience.check()
        channel.is_in_step = False
        send_frame(frame)
    channel.write(patience, marks[-1:], on_input=on_input)
    channel.is_in_step = True


def _send_word(
    channel: Channel, frames: Frames, patience: Patience, on_input: Callable[[], NoReturn] | None
) -> None:
    """Send a small table and its two marks by one call: the same bytes as in frames."""
    channel.is_in_step = True
    patience.check()
    channel.is_in_step = False
    nbytes = frames.total_nbytes
    staged = thread_staging(frames.array)[:nbytes]
    Pieces(frames.array, frames.offset, frames.nbytes).gather(0, len(frames.nbytes), staged)
    first, last = mark_of(Kind.DATA, nbytes), mark_of(Kind.DONE, nbytes)
    channel.write(patience, first, staged, last, on_input=on_input)
    channel.is_in_step = True


def _direct_sender(
    channel: Channel,
    frames: Frames,
    marks: NDArray[np.uint64],
    patience: Patience,
    on_input: Callable[[], NoReturn] | None,
) -> Callable[[int], None]:
    """Sends the mark and the pieces of a frame from where they are."""
    vector, at = frames.woven(marks)

    def send(frame: int) -> None:
        channel.write_vector(vector[at[frame] : at[frame + 1]], patience, on_input)

    return send


def _staged_sender(
    channel: Channel,
    frames: Frames,
    marks: NDArray[np.uint64],
    patience: Patience,
    on_input: Callable[[], NoReturn] | None,
) -> Callable[[int], None]:
    """Sends the mark of a frame, then its pieces gathered step by step."""
    staging = thread_staging(frames.array)

    def send(frame: int) -> None:
        mark = marks[frame : frame + 1]
        for first, last in frames.steps(frame):
            staged = staging[: int(frames.nbytes[first:last].sum())]
            frames.pieces.gather(first, last, staged)
            channel.write(patience, mark, staged, on_input=on_input)
            mark = marks[:0]

    return send


def receive_frames(
    channel: Channel,
    frames: Frames,
    patience: Patience,
    sums: ChunkDigests | None,
    *,
    is_there: bool = False,
) -> None:
    """Receive every frame into its pieces and check the marks; feed the bytes to ``sums`` if given.

    ``is_there``: they came behind a request, as far as is known, so that no wait is begun for a few bytes.
    Raises PeerError for a mark out of place or with the reason that the sender gave, else as
    ``send_frames``; then the pieces are filled up to somewhere.
    """
    if frames.is_word and not channel.is_sealed:
        _receive_word(channel, frames, patience, sums, is_there=is_there)
        return
    marks = np.zeros((len(frames) + 1, 2), np.uint64)
    channel.read_into(patience, marks[:1])
    if sums is not None or frames.is_small or channel.is_sealed:
        receive = _staged_receiver(channel, frames, marks, patience, sums)
    else:
        receive = _direct_receiver(channel, frames, marks, patience)
    for frame, nbytes in enumerate(frames.frame_nbytes.tolist()):
        channel.check_mark(marks[frame].tobytes(), Kind.DATA, patience, nbytes)
        receive(frame)
    channel.check_mark(marks[-1].tobytes(), Kind.DONE, patience, frames.total_nbytes)


def _receive_word(
    channel: Channel, frames: Frames, patience: Patience, sums: ChunkDigests | None, *, is_there: bool
) -> None:
    """Receive a small table with its two marks, or the first mark and the reason that came in its place."""
    nbytes = frames.total_nbytes
    heard = channel.read_start(MARK_NBYTES, 2 * MARK_NBYTES + nbytes, patience, is_there=is_there)
    channel.check_mark(heard[:MARK_NBYTES], Kind.DATA, patience, nbytes, heard[MARK_NBYTES:])
    data = channel.read(nbytes + MARK_NBYTES, patience, heard[MARK_NBYTES:])
    if sums is not None:
        sums.feed(data[:nbytes])
    Pieces(frames.array, frames.offset, frames.nbytes).scatter(0, len(frames.nbytes), data[:nbytes])
    channel.check_mark(data[nbytes:].tobytes(), Kind.DONE, patience, nbytes)


def _direct_receiver(
    channel: Channel, frames: Frames, marks: NDArray[np.uint64], patience: Patience
) -> Callable[[int], None]:
    """Receives the pieces of a frame in place, and the mark behind it."""
    vector, at = frames.woven(marks)

    def receive(frame: int) -> None:
        channel.read_vector(vector[at[frame] + 1 : at[frame + 1] + 1], patience)

    return receive


def _staged_receiver(
    channel: Channel, frames: Frames, marks: NDArray[np.uint64], patience: Patience, sums: ChunkDigests | None
) -> Callable[[int], None]:
    """Receives a frame step by step into staging, and the mark behind it; sums, then scatters."""
    staging = thread_staging(frames.array)

    def receive(frame: int) -> None:
        steps = frames.steps(frame)
        for first, last in steps:
            staged = staging[: int(frames.nbytes[first:last].sum())]
            mark = marks[frame + 1 : frame + 2] if last == steps[-1][1] else marks[:0]
            channel.read_into(patience, staged, mark)
            if sums is not None:
                sums.feed(staged)
            frames.pieces.scatter(first, last, staged)

    return receive
