"""A converted payload at both sides: decode asks for one window after the other, prefill packs it.

Decode drives, because it owns where the bytes go, and so the bytes in flight are bounded at both
sides: while it reads and unpacks a window, prefill packs the next. What crosses is digested as it
is packed and as it lands; that the packed blocks are those that were exported is vouched for as
in any transfer (payload.py).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvferry.errors import CapacityError, CorruptError, KVFerryError, LocalError, PeerError
from kvferry.layout import (
    Extent,
    Side,
    Window,
    WireTensor,
    cut_windows,
    least_window_nbytes,
    numpy_dtype,
    pack,
    unpack,
)
from kvferry.protocol import messages as m
from kvferry.protocol.compat import pair_form
from kvferry.protocol.table import Event, Role
from kvferry.transfer.integrity import NO_DIGESTS, DigestTable, join_digests, nothing_arrived
from kvferry.transport.base import Arrived, CancelToken, Copy, Direction
from kvferry.transport.digest import digest_chunks

if TYPE_CHECKING:
    from kvferry.transfer.session import Session

__all__ = [
    "Packing",
    "PartKey",
    "Unpacking",
    "check_form",
    "lossy_conversions",
    "part_windows",
    "used_conversions",
]

PartKey = tuple[int, int, int, int]
"""First and one past the last layer, first and one past the last token."""
_NONE = np.empty(0, np.int64)


def check_form(local: m.Party, peer: m.Party, *, gives: bool, portions: tuple[m.Portion, ...]) -> None:
    """Raise unless a request can cross from (``gives``) or to this side, before anything is claimed.

    IncompatibleError: this direction needs a conversion that is not allowed. CapacityError: a block does
    not fit into staging. LocalError: a package that converts is missing here.
    """
    try:
        form = pair_form(local, peer, gives=gives, portions=portions) or ()
        for wire in form:
            for name in (wire.src.dtype, wire.dst.dtype, wire.conversion.wire):
                numpy_dtype(name)
        window, least = min(local.window_nbytes, peer.window_nbytes), least_window_nbytes(form)
        if window < least:
            raise CapacityError(
                f"staging: one head of one block is {least} bytes on the wire, a window has {window}",
                next_step="give both pools more staging, or smaller blocks",
            )
    except KVFerryError as error:
        raise error.with_context(
            phase="claim",
            peer=peer.name,
            now_true="nothing moved; nothing was claimed",
            next_step=error.next_step or "allow the conversion on both sides, or give both pools one dtype",
        ) from None


def used_conversions(form: tuple[WireTensor, ...] | None) -> tuple[str, ...]:
    """The conversions of a transfer and their bounds, in words, each once."""
    used = (wire.conversion for wire in form or () if wire.conversion.changes)
    return tuple(dict.fromkeys(f"{how.name}: {how.bound}" for how in used))


def lossy_conversions(form: tuple[WireTensor, ...] | None) -> tuple[str, ...]:
    """Those that round."""
    lossy = tuple(wire for wire in form or () if not wire.conversion.bound.is_exact)
    return used_conversions(lossy)


def part_windows(session: Session, part: PartKey) -> tuple[Window, ...]:
    """The windows of one part; the same at both sides. Raises as ``cut_windows``."""
    assert session.peer is not None
    assert session.form is not None
    source, target = _sides(session)
    first_layer, stop_layer, first_token, stop_token = part
    return cut_windows(
        session.form,
        source,
        target,
        Extent(session.tokens, session.held_tokens, (first_token, stop_token)),
        slot_nbytes=min(session.node.staging.window_nbytes, session.peer.party.window_nbytes),
        layers=range(first_layer, stop_layer),
    )


def _sides(session: Session) -> tuple[Side, Side]:
    assert session.peer is not None
    ours = (session.config.layout, session.tables)
    theirs = (session.peer.party.layout, session.peer_tables)
    return (ours, theirs) if session.role is Role.PREFILL else (theirs, ours)


class Packing:
    """Prefill's half: packs the windows that decode asks for, in order. Runs on the loop.

    ``is_busy``: a thread packs. ``on_idle`` is called when none does any more.
    """

    def __init__(self, session: Session, on_idle: Callable[[], None]) -> None:
        self._session = session
        self._on_idle = on_idle
        self._windows: dict[PartKey, tuple[Window, ...]] = {}
        self._next: dict[PartKey, int] = {}
        self._asked: deque[tuple[PartKey, int]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._pair: tuple[int, int] | None = None
        self._digests: list[DigestTable] = []
        self._num_left = 0
        self._is_stopped = False
        self.is_busy = False

    @property
    def is_done(self) -> bool:
        """Every window of every part that was given has been packed."""
        return self._num_left == 0

    def add(self, part: PartKey) -> None:
        """Decode may ask for this part's windows from now on.

        Raises LocalError for a part that was given before, else as ``cut_windows``; then nothing changes.
        """
        if part in self._windows:
            raise LocalError(
                f"layers {part[0]} to {part[1] - 1}, tokens {part[2]} to {part[3] - 1} were pushed already",
                request_id=self._session.request_id,
                now_true="nothing has changed; the transfer goes on",
            )
        windows = part_windows(self._session, part)
        self._windows[part], self._next[part] = windows, 0
        self._num_left += len(windows)

    def ask(self, message: m.Pack) -> None:
        """Keep what decode asks for: the next window, or, one past the last, that it has read them all.

        Raises PeerError for anything else.
        """
        part = (message.first_layer, message.stop_layer, message.first_token, message.stop_token)
        windows = self._windows.get(part, ())
        if not windows or message.window != self._next[part] or message.window > len(windows):
            raise PeerError(f"pack: window {message.window} of {part} is not the next of what was given")
        self._next[part] += 1
        self._asked.append((part, message.window))

    def go(self) -> None:
        """Do what was asked for, unless that is being done."""
        if self._task is None and self._asked:
            self._task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """Begin nothing more; a thread that packs comes to its end by itself."""
        self._is_stopped = True
        self._asked.clear()
        if self._task is not None and not self.is_busy:
            self._task.cancel()

    def digest_table(self) -> DigestTable:
        """The digests of all that was packed."""
        return join_digests(self._digests) if self._digests else NO_DIGESTS

    def release(self) -> None:
        """The transfer has ended and nobody reads any more: give the windows back."""
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._give_back()

    def _give_back(self) -> None:
        if self._pair is not None:
            self._session.node.staging.give_back(self._pair)
            self._pair = None

    async def _run(self) -> None:
        try:
            while self._asked:
                part, number = self._asked.popleft()
                windows = self._windows[part]
                if number == len(windows):
                    await self._all_read()
                else:
                    await self._pack(windows[number], number)
        except KVFerryError as error:
            self._session.fail(error, Event.COPY_FAILED)
        except Exception as error:  # noqa: BLE001 - told as this side's fault, never lost in a task
            unforeseen = LocalError(f"packing failed in a way that kvferry did not foresee: {error!r}")
            self._session.fail(unforeseen, Event.COPY_FAILED)
        finally:
            self._task = None

    async def _pack(self, window: Window, number: int) -> None:
        session = self._session
        if self._pair is None:
            self._pair = await session.node.staging.take()
            starts = np.array(sorted(self._pair), np.int64)
            sizes = np.full(2, session.node.staging.window_nbytes, np.int64)
            session.node.grants.open(session.grant, Direction.READ, starts, sizes, lambda _: None)
        offset = self._pair[number % 2]
        self.is_busy = True
        try:
            self._digests.append(
                await asyncio.get_running_loop().run_in_executor(
                    session.node.copiers, self._pack_in_thread, window, offset
                )
            )
        finally:
            self.is_busy = False
            self._on_idle()
        if self._is_stopped:
            return
        self._num_left -= 1
        session.post(m.Packed(session.transfer, number, offset))
        if self.is_done:
            session.feed(Event.COPIED)

    def _pack_in_thread(self, window: Window, offset: int) -> DigestTable:
        session, plan = self._session, window.plan(offset, offset)
        assert session.form is not None
        array, (source, _) = session.node.memory.array, _sides(session)
        for at, segment in zip(plan.src_offset.tolist(), window.segments, strict=True):
            pack(session.form[segment.tensor], segment, source, array, array[at : at + segment.nbytes])
        if not session.config.integrity:
            return NO_DIGESTS
        return plan.chunk_id, digest_chunks(array, plan.src_offset, plan.nbytes, plan.chunk_start)

    async def _all_read(self) -> None:
        """Decode has all of a part: let others pack, once the last copy has left the windows."""
        session, loop = self._session, asyncio.get_running_loop()
        left: asyncio.Future[None] = loop.create_future()
        session.node.grants.close(session.grant)

        def leave() -> None:
            if not left.done():
                left.set_result(None)

        def leave_from_thread() -> None:
            loop.call_soon_threadsafe(leave)

        if not session.node.grants.when_empty(session.grant, leave_from_thread):
            await left
        self._give_back()


class Unpacking:
    """Decode's half: asks for windows, reads them, stores what they hold. Runs on the loop."""

    def __init__(self, session: Session, cancel: CancelToken) -> None:
        self._session = session
        self._cancel = cancel
        self._packed: dict[int, asyncio.Future[int]] = {}
        self._stored: list[Window] = []

    def packed(self, message: m.Packed) -> None:
        """Prefill has packed a window; raises PeerError for one that was not asked for."""
        waiting = self._packed.get(message.window)
        if waiting is None or waiting.done():
            raise PeerError(f"packed: window {message.window} was not asked for")
        waiting.set_result(message.offset)

    def stop(self, error: KVFerryError) -> None:
        """Wait for nothing more. What runs in a thread ends by the cancel token."""
        for waiting in self._packed.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # whether anybody still waits or not, it counts as told

    async def fetch(self, part: PartKey) -> Arrived:
        """Every window of one part, stored in this side's blocks. Raises what ended it."""
        session, loop = self._session, asyncio.get_running_loop()
        assert session.peer is not None
        self._cancel.raise_if_cancelled()  # ended before this began: nobody would answer
        windows, arrived = part_windows(session, part), []
        if windows:
            self._ask(part, 0)
        for number, window in enumerate(windows):
            try:
                offset = await self._packed[number]
            finally:
                del self._packed[number]
            if number + 1 < len(windows):
                self._ask(part, number + 1)
            try:
                arrived.append(
                    await loop.run_in_executor(session.node.copiers, self._store_in_thread, window, offset)
                )
            except BaseException:
                for waiting in self._packed.values():
                    waiting.cancel()
                self._packed.clear()
                raise
            self._stored.append(window)
        if windows:
            self._say(part, len(windows))
        return _joined(arrived, session.peer.connection.path)

    def check_stored(self) -> None:
        """Raise CorruptError unless every entry and head of the request was stored, each once."""
        session = self._session
        wanted = _areas(part_windows(session, (0, 1 << 20, 0, session.tokens)))
        stored = _areas(self._stored)
        if wanted != stored:
            raise CorruptError(
                "the parts that arrived are not the request: some of it is missing, or came twice",
                phase="verify",
                bytes_done=session.payload.nbytes,
                next_step="a part was never pushed, or was pushed twice: compare calls and versions",
            )

    def _ask(self, part: PartKey, window: int) -> None:
        self._packed[window] = asyncio.get_running_loop().create_future()
        self._say(part, window)

    def _say(self, part: PartKey, window: int) -> None:
        self._session.post(m.Pack(self._session.transfer, *part, window))

    def _store_in_thread(self, window: Window, offset: int) -> Arrived:
        session = self._session
        assert session.peer is not None
        assert session.form is not None
        array, (_, target) = session.node.memory.array, _sides(session)
        self._cancel.raise_if_cancelled()
        with session.node.staging.landing() as here:
            plan = window.plan(offset, here)
            copy = Copy(session.grant, plan, session.timeout_deadline, session.config.integrity, self._cancel)
            arrived = session.peer.connection.read(copy)
            for at, segment in zip(plan.dst_offset.tolist(), window.segments, strict=True):
                self._cancel.raise_if_cancelled()
                unpack(session.form[segment.tensor], segment, target, array, array[at : at + segment.nbytes])
        return arrived


def _areas(windows: tuple[Window, ...] | list[Window]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(tensor, head) -> the runs of entries, joined where they touch; a run that comes twice stays twice."""
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for window in windows:
        for segment in window.segments:
            for head in range(segment.first_head, segment.stop_head):
                runs.setdefault((segment.tensor, head), []).append((segment.first, segment.stop))
    for key, found in runs.items():
        joined: list[tuple[int, int]] = []
        for first, stop in sorted(found):
            if joined and joined[-1][1] == first:
                joined[-1] = (joined[-1][0], stop)
            else:
                joined.append((first, stop))
        runs[key] = joined
    return runs


def _joined(arrived: list[Arrived], path: str) -> Arrived:
    if not arrived:
        return nothing_arrived(path)
    digests = [part.digests for part in arrived if part.digests is not None]
    return Arrived(
        path,
        sum(part.seconds for part in arrived),
        np.concatenate([part.piece_offset for part in arrived]),
        np.concatenate([part.piece_nbytes for part in arrived]),
        np.concatenate([part.chunk_id for part in arrived]),
        np.concatenate([part.chunk_nbytes for part in arrived]),
        np.concatenate(digests) if digests else None,
    )
