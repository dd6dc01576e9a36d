"""Copies of each shape, in turns, until their medians settle or the time is over.

One flow is measured alone. Several flows of a group are measured at the same time: a copy counts only
if every flow was copying from before it began until after it ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from kvferry.errors import KVFerryError, PeerError
from kvferry.link import ConditionFit, Conditions, Mode, Sample
from kvferry.probe import words as w
from kvferry.probe.node import Copied
from kvferry.probe.payload import Payload
from kvferry.probe.settle import is_settled
from kvferry.probe.site import Site

__all__ = ["Flow", "Limits", "sweep"]

# One exchange of words for this many seconds of copies, so that the words are not what is measured. Not for
# many copies: those of one exchange are alike (which processors have which threads), the next are not.
_BATCH_SECONDS, _MOST_COPIES, _FIRST_COPIES = 0.25, 5, 3
# A batch may take this many times what it is expected to, and never less than a few seconds.
_PATIENCE, _LEAST_SECONDS = 10.0, 5.0
_GRACE_SECONDS = 5.0
# Small copies scatter most and cost least: their p95 takes more of them than their median does.
_SMALL_NBYTES, _SMALL_SECONDS, _SMALL_TIMES = 256 << 10, 1.0, 5


@dataclass(frozen=True, slots=True)
class Limits:
    """``repeats``: copies of each shape at most; ``deadline``: of ``time.monotonic()``.

    Of up to 256 KiB five times as many are made, as far as they take a second.
    """

    repeats: int
    deadline: float


@dataclass(eq=False, slots=True)
class Flow:
    """Copies from one node to another by one mode and transport, and what came of them."""

    source: Site
    target: Site
    mode: Mode
    transport: str
    conditions: Conditions
    slot: int = 0
    is_new: bool = False
    samples: list[Sample] = field(default_factory=list)
    seconds: dict[Payload, list[float]] = field(default_factory=dict)
    skipped: list[Payload] = field(default_factory=list)
    fit: ConditionFit | None = None
    path: str = ""
    first_contact_seconds: float | None = None
    error: KVFerryError | None = None
    expected: float = 0.0

    @property
    def holder(self) -> Site:
        """The side whose ticket it is."""
        return self.source if self.mode is Mode.PULL else self.target

    @property
    def claimant(self) -> Site:
        """The side that connects."""
        return self.target if self.mode is Mode.PULL else self.source

    async def copy(self, payload: Payload, count: int) -> w.Copies:
        """So many copies, one after the other; as decode saw them. Raises what ended one of them."""
        # The first copy connects, perhaps to a node that is busy starting.
        least = _LEAST_SECONDS if self.expected else 2 * _LEAST_SECONDS
        limit = max(least, _PATIENCE * count * self.expected)
        held: w.Held = await self.holder.call(
            w.HoldCall,
            limit + _GRACE_SECONDS,
            mode=self.mode,
            payload=payload,
            slot=self.slot,
            count=count,
            seconds=limit + _GRACE_SECONDS,
        )
        calls = [
            asyncio.ensure_future(
                self.claimant.call(
                    w.MoveCall,
                    limit + _GRACE_SECONDS,
                    mode=self.mode,
                    tickets=held.tickets,
                    payload=payload,
                    slot=self.slot,
                    transport=self.transport,
                    seconds=limit,
                )
            ),
            asyncio.ensure_future(
                self.holder.call(
                    w.CollectCall,
                    limit + 2 * _GRACE_SECONDS,
                    mode=self.mode,
                    tickets=held.tickets,
                    seconds=limit + _GRACE_SECONDS,
                )
            ),
        ]
        moved, collected = await _both(calls)
        copies = moved.copies or collected.copies
        if len(copies) != count or len(moved.handshake_seconds) != count:
            raise PeerError(f"{count} copies were asked for, {len(copies)} were told", phase="probe")
        return w.Copies(copies, moved.handshake_seconds)

    def foreseen(self, payload: Payload) -> float:
        """Seconds of a copy, at most, from those of smaller ones; 0 where there are none.

        Time grows no faster than bytes or pieces do, and beyond its start about as it did before.
        """
        if not self.seconds:
            return 0.0
        known = [(each.nbytes, each.descriptors, median(times)) for each, times in self.seconds.items()]
        nbytes, descriptors, seconds = known[-1]
        most = seconds * max(payload.nbytes / nbytes, payload.descriptors / descriptors, 1.0)
        if nbytes == known[0][0]:
            return most
        slope = max(0.0, seconds - known[0][2]) / (nbytes - known[0][0])
        return min(most, 1.5 * (seconds + slope * (payload.nbytes - nbytes)))

    def note_contact(self, first: w.Copies, payload: Payload) -> None:
        """What the first copy over a new connection took more than a warm one."""
        took = first.copies[0].seconds + first.handshake_seconds[0]
        self.first_contact_seconds = max(0.0, took - median(self.seconds[payload]))

    def keep(self, payload: Payload, copies: Sequence[Copied], *, is_cold: bool = False) -> None:
        """Samples of these copies."""
        self.path = copies[-1].path
        if not is_cold:
            self.seconds.setdefault(payload, []).extend(copied.seconds for copied in copies)
        for copied in copies:
            self.samples.append(
                Sample(
                    mode=self.mode,
                    tls=self.conditions.tls,
                    incast=self.conditions.incast,
                    under_load=self.conditions.under_load,
                    nbytes=copied.nbytes,
                    descriptors=copied.descriptors,
                    seconds=copied.seconds,
                    is_cold=is_cold,
                )
            )

    async def compare(self, payload: Payload) -> None:
        """The bytes at the target against the source's words. Raises CorruptError."""
        limit = _LEAST_SECONDS + payload.nbytes / 50e6
        seed = self.source.opened.seed
        await self.target.call(w.CompareCall, limit, payload=payload, slot=self.slot, seed=seed)


async def sweep(
    flows: Sequence[Flow],
    payloads: Sequence[Payload],
    limits: Limits,
    on_visit: Callable[[float], None],
    *,
    all_or_none: bool = False,
) -> None:
    """Measure every payload over every flow, in turns: a few copies each, then more of what has not settled.

    In turns, so that a drift of the machine is in all shapes alike, and so that when the time is over
    every shape has copies. What fails is each flow's ``error``; raises nothing of theirs.

    Args:
        on_visit: told the share of the time, or of the first turn, that is over.
        all_or_none: one flow's failure ends all (an incast of fewer is another measurement).
    """
    begun = time.monotonic()
    turn = 0
    while True:
        visits = 0
        for index, payload in enumerate(payloads):
            alive = [flow for flow in flows if flow.error is None]
            if not alive or (all_or_none and len(alive) < len(flows)):
                return
            if turn == 0 and _skips(alive, payload, limits):
                continue
            if turn and (_is_done(alive, payload, limits) or time.monotonic() >= limits.deadline):
                continue
            visits += 1
            await _visit(alive, payload, limits, is_first=turn == 0, is_cold=turn == 0 and index == 0)
            passed = (time.monotonic() - begun) / max(limits.deadline - begun, 1e-3)
            on_visit(min(1.0, max(passed, 0.0 if turn else index / len(payloads) / 2)))
        if not visits:
            return
        turn += 1


def _is_done(flows: Sequence[Flow], payload: Payload, limits: Limits) -> bool:
    """Every flow knows its median, of small copies their tail too, or has as many as are wanted."""
    for flow in flows:
        seconds = flow.seconds.get(payload)
        if seconds is None or len(seconds) >= _most(seconds, payload, limits):
            continue
        if payload.nbytes <= _SMALL_NBYTES or not is_settled(seconds):
            return False
    return True


def _most(seconds: Sequence[float], payload: Payload, limits: Limits) -> int:
    """Copies of a shape at most, after these."""
    if not seconds or payload.nbytes > _SMALL_NBYTES:
        return limits.repeats
    in_time = int(_SMALL_SECONDS / max(median(seconds), 1e-6))
    return max(limits.repeats, min(in_time, _SMALL_TIMES * limits.repeats))


def _skips(flows: Sequence[Flow], payload: Payload, limits: Limits) -> bool:
    """Whether two copies (one to warm, one to count) would take longer than is left; notes what to expect."""
    left = limits.deadline - time.monotonic()
    foreseen = {flow: flow.foreseen(payload) for flow in flows}
    if max(foreseen.values()) and 2.0 * max(foreseen.values()) > left:
        for flow in flows:
            flow.skipped.append(payload)
        return True
    for flow, seconds in foreseen.items():
        flow.expected = seconds
    return False


async def _visit(
    flows: Sequence[Flow], payload: Payload, limits: Limits, *, is_first: bool, is_cold: bool
) -> None:
    crowd = _Crowd(len(flows))
    await asyncio.gather(
        *(_run(flow, payload, limits, crowd, is_first=is_first, is_cold=is_cold) for flow in flows)
    )


class _Crowd:
    """Flows that must all run while any of them is measured."""

    def __init__(self, count: int) -> None:
        self.count = self._starting = self._measuring = count
        self._all_warm = asyncio.Event()
        self.is_over = False

    async def warm(self) -> None:
        """This flow has made its first copy; wait until all have."""
        self._starting -= 1
        if self._starting == 0:
            self._all_warm.set()
        await self._all_warm.wait()

    def enough(self) -> None:
        """This flow needs no more copies; it goes on as a load until nobody does."""
        self._measuring -= 1
        self.is_over = self._measuring == 0

    def leave(self, *, was_warm: bool, had_enough: bool) -> None:
        """This flow failed."""
        if not was_warm:
            self._starting -= 1
            if self._starting == 0:
                self._all_warm.set()
        if not had_enough:
            self.enough()


async def _run(
    flow: Flow, payload: Payload, limits: Limits, crowd: _Crowd, *, is_first: bool, is_cold: bool
) -> None:
    was_warm = had_enough = False
    try:
        first = None
        if is_first or crowd.count > 1:
            first = await flow.copy(payload, 1)
            flow.expected = first.copies[0].seconds
            if is_cold:
                flow.keep(payload, first.copies, is_cold=True)
        was_warm = True
        await crowd.warm()
        while not crowd.is_over:
            copies = await flow.copy(payload, _batch(flow, payload, limits, is_first=is_first))
            flow.expected = median(copied.seconds for copied in copies.copies)
            # What another flow did meanwhile is known only while nobody has stopped.
            if not crowd.is_over and not had_enough:
                flow.keep(payload, copies.copies)
                had_enough = True
                crowd.enough()
        if is_first:
            await flow.compare(payload)
        if is_cold and flow.is_new and first is not None:
            flow.note_contact(first, payload)
    except KVFerryError as error:
        flow.error = error
        crowd.leave(was_warm=was_warm, had_enough=had_enough)


def _batch(flow: Flow, payload: Payload, limits: Limits, *, is_first: bool) -> int:
    """Copies of the next exchange: at first a few, then as many as fit in its time."""
    seconds = flow.seconds.get(payload, ())
    left = limits.deadline - time.monotonic()
    by_time = int(min(_BATCH_SECONDS, left) / max(flow.expected, 1e-6))
    least = _FIRST_COPIES if is_first and _FIRST_COPIES * flow.expected < left else 1
    return max(1, min(max(least, min(by_time, _MOST_COPIES)), _most(seconds, payload, limits) - len(seconds)))


async def _both(calls: Sequence[asyncio.Future[w.Copies]]) -> tuple[w.Copies, w.Copies]:
    """Both answers, or the error that says most; the other call is given up, and ended by its lease."""
    try:
        await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
        failed = [call for call in calls if call.done() and call.exception() is not None]
        if failed:
            # The peer of whoever failed hears of it at once: a moment later both errors are there.
            await asyncio.wait(calls, timeout=1.0)
            errors = [call.exception() for call in calls if call.done()]
            told = [error for error in errors if isinstance(error, KVFerryError)]
            raise min(told, key=lambda error: isinstance(error, PeerError))
        moved, collected = calls
        return moved.result(), collected.result()
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
