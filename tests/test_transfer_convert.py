"""Transfers that convert: values as a loop makes them, staging bounded and given back, refusals by name."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from conftest import unique_address, wait_until
from convert_oracle import at, expected, random_values
from kvferry.errors import (
    CapacityError,
    CorruptError,
    DeadlineError,
    IncompatibleError,
    InputError,
    KVFerryError,
    LocalError,
    PeerError,
    TransportError,
)
from kvferry.layout import BlockTable, Conversions, PoolLayout, WireFormat
from kvferry.protocol import messages as m
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, Pool, Timeouts, windows
from kvferry.transfer.staging import Staging
from kvferry.transfer.windows import Packing, Unpacking
from kvferry.transport.base import CancelToken
from layout_strategies import Case

Opened = Callable[..., Endpoint]
SCHEMES = ("inproc", "shm", "tcp")
TOKENS, LAYERS = 37, 3
STAGING = 64 << 10  # windows of 16 KiB

pytestmark = pytest.mark.usefixtures("nothing_left")


def layout(block_size: int = 8, **changes: object) -> PoolLayout:
    options: dict[str, object] = {
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "block_size": block_size,
        "num_blocks": 32,
    }
    return PoolLayout.paged(range(LAYERS), **(options | changes))  # type: ignore[arg-type]


def table(block_size: int, seed: int, tokens: int = TOKENS) -> BlockTable:
    return BlockTable(0, np.random.default_rng(seed).permutation(32)[: -(-tokens // block_size)])


LOSSY = Conversions(lossy=True)
INT8 = Conversions(wire=WireFormat.INT8)
PAIRS = {
    "narrow": (layout(8), layout(4, dtype="bfloat16", axis_order="HND"), LOSSY),
    "widen": (layout(8, dtype="bfloat16"), layout(8, joined_kv=True), Conversions()),
    "repack": (layout(8), layout(8, axis_order="HND", transposed_keys=True), Conversions()),
    "int8": (layout(8), layout(8), INT8),
    "fp8": (layout(8, dtype="float16"), layout(16, dtype="bfloat16"), Conversions(wire=WireFormat.FP8)),
}


@pytest.fixture
def sides(opened: Opened) -> Callable[..., tuple[Endpoint, Endpoint, Case, np.ndarray]]:
    """Make two endpoints that convert, their request, and what decode's pool has to hold in the end."""

    def make(
        pair: str,
        scheme: str,
        *,
        staging_nbytes: int = STAGING,
        allowed: Conversions | None = None,
        **options: Any,
    ) -> tuple[Endpoint, Endpoint, Case, np.ndarray]:
        src, dst, conversions = PAIRS[pair]
        allowed = allowed or conversions
        ends = []
        for name, one in (("prefill", src), ("decode", dst)):
            pool = Pool.allocate(one, staging_nbytes=staging_nbytes)
            pool.array[:] = random_values(one, len(name))
            ends.append(
                opened(one, unique_address(scheme), pool=pool, name=name, conversions=allowed, **options)
            )
        sizes = [one.groups[0].block_size for one in (src, dst)]
        case = Case(src, dst, *((table(size, 2 + size),) for size in sizes), TOKENS, 0)
        wire = None if allowed.wire is None else allowed.wire.value
        return *ends, case, expected(case, wire, *(end.pool.array for end in ends))

    return make


def is_idle(endpoint: Endpoint) -> bool:
    stats = endpoint.stats()
    return not any((stats.transfers, stats.holds, stats.grants, stats.copies, stats.packing))


def begin(prefill: Endpoint, decode: Endpoint, case: Case, mode: Mode, request_id: str = "r") -> Any:
    """(ticket, decode's move, prefill's push or None)."""
    if mode is Mode.PULL:
        ticket = prefill.offer(None, case.src_tables, tokens=TOKENS, request_id=request_id)
        return ticket, decode.pull(ticket, case.dst_tables), None
    ticket = decode.reserve(request_id, TOKENS, case.dst_tables)
    moving = decode.arrival(ticket)
    return ticket, moving, prefill.push(ticket, case.src_tables, tokens=TOKENS)


def finish(prefill: Endpoint, ticket: bytes, move: Any, push: Any) -> Any:
    outcome = prefill.outcome(ticket)
    if push is not None:
        for layer in range(LAYERS):
            push.layer(layer)
        push.commit(None)
    assert move.result() is None
    move.started()
    assert outcome.result(5).nbytes == move.record.nbytes
    return move.record


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("scheme", "mode"), [("inproc", Mode.PULL), ("shm", Mode.PULL), ("tcp", Mode.PUSH)])
def test_values_arrive_as_a_loop_makes_them(sides: Any, pair: str, scheme: str, mode: Mode) -> None:
    """Every value of every pair is right, no other byte changes, the record says what was done to them."""
    prefill, decode, case, wanted = sides(pair, scheme)
    record = finish(prefill, *begin(prefill, decode, case, mode))
    np.testing.assert_array_equal(decode.pool.array, wanted)
    blocks = -(-TOKENS // 8)
    itemsize, scales = {"narrow": (2, 0), "widen": (2, 0), "repack": (4, 0)}.get(pair, (1, 4 * blocks))
    assert record.nbytes == LAYERS * 2 * 2 * (TOKENS * 16 * itemsize + scales)
    words = {
        "narrow": "float32 -> bfloat16: at most 0.00389 x |value|",
        "widen": "bfloat16 -> float32: exact",
        "repack": "float32, repacked: exact",
        "int8": "float32 -> int8 per (block, head) -> float32: at most",
        "fp8": "float16 -> float8_e4m3fn per (block, head) -> bfloat16: at most 0.0588 x |value|",
    }
    assert record.conversions[0].startswith(words[pair])
    assert len(record.conversions) == 1
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize(("scheme", "mode"), [("shm", Mode.PUSH), ("tcp", Mode.PULL)])
@pytest.mark.slow
def test_by_transfer_processes(sides: Any, scheme: str, mode: Mode) -> None:
    """The same with each node in a process of its own, which maps the staging too."""
    prefill, decode, case, wanted = sides("narrow", scheme, process=True)
    finish(prefill, *begin(prefill, decode, case, mode))
    np.testing.assert_array_equal(decode.pool.array, wanted)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_requests_through_one_pair_of_windows(sides: Any, scheme: str, mode: Mode) -> None:
    """More bytes than staging, more requests than windows: each waits its turn and is right."""
    prefill, decode, case, _ = sides("narrow", scheme, staging_nbytes=16 << 10)  # windows of 4 KiB: one pair
    assert case.tokens * 2 * 2 * LAYERS * 16 * 2 > 3 * (4 << 10)
    blocks = np.random.default_rng(3).permutation(32)
    before = decode.pool.array.copy()
    wanted = before
    moves = []
    for number in range(3):
        own = Case(
            case.src,
            case.dst,
            case.src_tables,
            (BlockTable(0, blocks[10 * number : 10 * number + 10]),),
            TOKENS,
            0,
        )
        wanted = expected(own, None, prefill.pool.array, wanted)
        moves.append(begin(prefill, decode, own, mode, f"r{number}"))
    for _, _, push in moves if mode is Mode.PUSH else ():
        push.layers(0, LAYERS)
        push.commit(None)
    for _, move, _ in moves:
        move.result()
        move.started()
    np.testing.assert_array_equal(decode.pool.array, wanted)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_pushed_by_layer_and_by_tokens(sides: Any, scheme: str) -> None:
    """Parts that follow each other, cut inside a block, arrive as one move would bring them."""
    prefill, decode, case, wanted = sides("narrow", scheme)
    ticket, move, push = begin(prefill, decode, case, Mode.PUSH)
    outcome = prefill.outcome(ticket)
    for (first, stop), layer in itertools.product(((0, 13), (13, 30), (30, TOKENS)), range(LAYERS)):
        push.layers(layer, layer + 1, first_token=first, stop_token=stop)
    push.commit(None)
    move.result()
    move.started()
    outcome.result(5)
    np.testing.assert_array_equal(decode.pool.array, wanted)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_without_integrity(sides: Any) -> None:
    """No digests, the same values."""
    for mode in Mode:
        prefill, decode, case, wanted = sides("int8", "tcp", integrity=False)
        record = finish(prefill, *begin(prefill, decode, case, mode))
        np.testing.assert_array_equal(decode.pool.array, wanted)
        assert not record.integrity


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("which", ["scale", "value"])
def test_a_bit_that_flips_between_packing_and_landing_is_refused(sides: Any, mode: Mode, which: str) -> None:
    """One bit of a scale, or of a value, after its digest was taken: nothing becomes visible."""
    prefill, decode, case, _ = sides("int8", "tcp")
    real = Packing._pack_in_thread

    def flipping(self: Packing, window: Any, offset: int) -> Any:
        digests = real(self, window, offset)
        segment = window.segments[0]
        at_byte = offset + (2 if which == "scale" else segment.scales_nbytes + 5)
        self._session.node.memory.array[at_byte] ^= 1
        return digests

    with mock.patch.object(Packing, "_pack_in_thread", flipping):
        ticket, move, push = begin(prefill, decode, case, mode)
        if push is not None:
            push.layers(0, LAYERS)
            push.commit(None)
        with pytest.raises(CorruptError, match="digest"):
            move.result()
        with pytest.raises(CorruptError):
            prefill.outcome(ticket).result(5)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("mode", Mode)
def test_blocks_that_change_after_export_are_refused(sides: Any, mode: Mode) -> None:
    """What was packed is held against what was exported: reused or unfinished blocks do not pass."""
    prefill, decode, case, _ = sides("narrow", "tcp")
    if mode is Mode.PULL:
        ticket = prefill.offer(None, case.src_tables, tokens=TOKENS, request_id="r")
        prefill.pool.array[:] = 0
        move = decode.pull(ticket, case.dst_tables)
    else:
        ticket, move, push = begin(prefill, decode, case, mode)
        push.layers(0, LAYERS)
        prefill.pool.array[:] = 0
        push.commit(None)
    with pytest.raises(CorruptError, match="digest"):
        move.result()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("parts", [[(0, 2)], [(0, 3), (1, 2)]], ids=["one layer missing", "one layer twice"])
def test_parts_that_are_not_the_request_are_refused(sides: Any, parts: list[tuple[int, int]]) -> None:
    """A push that left a layer out, or brought one twice, does not pass the commit."""
    prefill, decode, case, _ = sides("narrow", "tcp")
    _, move, push = begin(prefill, decode, case, Mode.PUSH)
    for first, stop in parts:
        push.layers(first, stop)
    push.commit(None)
    with pytest.raises(CorruptError, match="missing, or came twice"):
        move.result()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_a_part_that_was_pushed_before_is_refused_at_the_call(sides: Any) -> None:
    """Pushing the same layers and tokens again is the engine's mistake; the transfer goes on without it."""
    prefill, decode, case, wanted = sides("narrow", "tcp")
    ticket, move, push = begin(prefill, decode, case, Mode.PUSH)
    push.layer(1)
    with pytest.raises(LocalError, match="pushed already"):
        push.layer(1)
    outcome = prefill.outcome(ticket)
    push.layer(0)
    push.layer(2)
    push.commit(None)
    move.result()
    move.started()
    outcome.result(5)
    np.testing.assert_array_equal(decode.pool.array, wanted)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (None, None, "dtype: float32 against bfloat16, conversion is not allowed"),
        (LOSSY, None, "dtype: .* conversion is not allowed"),
        (LOSSY, INT8, "refuses: wire: none here, int8 at the peer; set both alike"),
        (INT8, Conversions(wire=WireFormat.FP8), "refuses: wire: int8 here, float8_e4m3fn at the peer"),
    ],
)
def test_pairs_are_refused_at_the_handshake(
    opened: Opened, ours: Conversions | None, theirs: Conversions | None, words: str
) -> None:
    """Both sides have to allow it, and alike; the field that differs is named, and nothing is held."""
    ends = []
    for allowed, one in ((ours, layout()), (theirs, layout(dtype="bfloat16"))):
        pool = Pool.allocate(one, staging_nbytes=STAGING)
        ends.append(opened(one, unique_address("tcp"), pool=pool, conversions=allowed))
    prefill, decode = ends
    ticket = prefill.offer(None, table(8, 1), tokens=TOKENS, request_id="r")
    with pytest.raises(IncompatibleError, match=words) as caught:
        decode.pull(ticket, table(8, 2)).result()
    assert caught.value.phase == "handshake"
    assert is_idle(decode)
    prefill.withdraw(ticket)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    "allowed", [(Conversions(), LOSSY), (LOSSY, Conversions())], ids=["prefill", "decode"]
)
def test_rounding_needs_the_leave_of_both(
    opened: Opened, mode: Mode, allowed: tuple[Conversions, Conversions]
) -> None:
    """Exact widening one way is no leave to round the other way: refused before anything is claimed."""
    ends = []
    for one, dtype in zip(allowed, ("float32", "bfloat16"), strict=True):
        pool = Pool.allocate(layout(dtype=dtype), staging_nbytes=STAGING)
        pool.array[:] = random_values(pool.layout, 1)
        ends.append(opened(pool.layout, unique_address("tcp"), pool=pool, conversions=one))
    wide, narrow = ends
    forth = Case(wide.pool.layout, narrow.pool.layout, (table(8, 1),), (table(8, 2),), TOKENS, 0)

    def attempt() -> None:
        _, move, _ = begin(wide, narrow, forth, mode)
        move.result()

    with pytest.raises(IncompatibleError, match="lossy conversion is not allowed") as caught:
        attempt()
    assert "nothing moved" in str(caught.value)
    back = Case(forth.dst, forth.src, (table(8, 3),), (table(8, 4),), TOKENS, 0)
    record = finish(narrow, *begin(narrow, wide, back, mode, "back"))
    assert record.conversions == ("bfloat16 -> float32: exact",)


@pytest.mark.parametrize("mode", Mode)
def test_a_value_without_a_place_ends_the_transfer(opened: Opened, mode: Mode) -> None:
    """70000 does not become an infinity of float16: both sides are told which layer has it."""
    ends = []
    for dtype in ("float32", "float16"):
        pool = Pool.allocate(layout(dtype=dtype), staging_nbytes=STAGING)
        ends.append(opened(pool.layout, unique_address("tcp"), pool=pool, conversions=LOSSY))
    prefill, decode = ends
    case = Case(prefill.pool.layout, decode.pool.layout, (table(8, 1),), (table(8, 2),), TOKENS, 0)
    value = next(t for t in case.src.groups[0].tensors if t.layer == 1 and t.role == "value")
    at(prefill.pool.array, value, value.offset + int(case.src_tables[0].ids[2]) * value.block_stride, 3)[
        :
    ] = 7e4
    ticket, move, push = begin(prefill, decode, case, mode)
    outcome = prefill.outcome(ticket)
    if push is not None:
        try:
            push.layers(0, LAYERS)
            push.commit(None)
        except IncompatibleError:
            pass  # it ended before these were called
    for told in (move.result, lambda: outcome.result(5)):
        with pytest.raises(IncompatibleError, match="layer 1 value: 70000 is beyond what float16 holds"):
            told()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("end", ["close prefill", "close decode", "abort", "deadline"])
def test_whatever_ends_it_while_a_window_is_packed(sides: Any, mode: Mode, end: str) -> None:
    """Packing hangs: each way to an end gives a typed error within its time, and the windows back."""
    prefill, decode, case, _ = sides("narrow", "tcp")
    packing, go_on = threading.Event(), threading.Event()
    real = Packing._pack_in_thread

    def hanging(self: Packing, window: Any, offset: int) -> Any:
        packing.set()
        assert go_on.wait(20)
        return real(self, window, offset)

    with mock.patch.object(Packing, "_pack_in_thread", hanging):
        if mode is Mode.PULL:
            ticket = prefill.offer(None, case.src_tables, tokens=TOKENS, request_id="r")
            move = decode.pull(ticket, case.dst_tables, timeout_seconds=0.5 if end == "deadline" else 5)
        else:
            ticket = decode.reserve("r", TOKENS, case.dst_tables)
            move = decode.arrival(ticket)
            limit = 0.5 if end == "deadline" else 5.0
            push = prefill.push(ticket, case.src_tables, tokens=TOKENS, timeout_seconds=limit)
            push.layers(0, LAYERS)
        outcome = prefill.outcome(ticket)
        assert packing.wait(10)
        closing = None
        if end.startswith("close"):
            closing = threading.Thread(target=(prefill if end == "close prefill" else decode).close)
            closing.start()
        elif end == "abort":
            move.abort("enough")
        with pytest.raises((PeerError, DeadlineError, KVFerryError)) as caught:
            move.result()
        assert caught.value.now_true
        go_on.set()
        with pytest.raises(KVFerryError):
            outcome.result(10)
        if closing is not None:
            closing.join(10)
            assert not closing.is_alive()
    for side, is_closed in ((prefill, end == "close prefill"), (decode, end == "close decode")):
        if not is_closed:
            wait_until(lambda side=side: is_idle(side))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.slow
def test_a_peer_that_dies_or_freezes_between_two_windows(
    opened: Opened, victim: str, mode: Mode, number: signal.Signals
) -> None:
    """The survivor gets a typed error within its time, its windows and blocks back, and serves the next."""
    timeouts = Timeouts(heartbeat=0.1, lost=0.8, abort=0.2, handshake=5.0)
    src, dst, allowed = PAIRS["narrow"]

    def end(name: str, one: PoolLayout, *, process: bool) -> Endpoint:
        pool = Pool.allocate(one, staging_nbytes=16 << 10)  # windows of 4 KiB: three for the request
        pool.array[:] = random_values(one, 1)
        options = {"conversions": allowed, "process": process, "timeouts": timeouts, "name": name}
        return opened(one, unique_address("tcp"), pool=pool, **options)

    prefill = end("prefill", src, process=victim == "prefill")
    decode = end("decode", dst, process=victim == "decode")
    survivor, dead = (decode, prefill) if victim == "prefill" else (prefill, decode)
    pid = dead.stats().pid
    case = Case(src, dst, (table(8, 2),), (table(4, 3),), TOKENS, 0)
    half = (Unpacking, "_store_in_thread") if victim == "prefill" else (Packing, "_pack_in_thread")
    real, count = getattr(*half), itertools.count()

    def second_is_too_late(self: Any, *args: Any) -> Any:
        if next(count) == 1:
            os.kill(pid, number)
        return real(self, *args)

    with mock.patch.object(*half, second_is_too_late):
        ticket, move, push = begin(prefill, decode, case, mode)
        with contextlib.suppress(KVFerryError):  # it may have ended before these are called
            if push is not None:
                push.layers(0, LAYERS)
                push.commit(None)
        try:
            with pytest.raises((DeadlineError, TransportError)):
                move.result() if survivor is decode else prefill.outcome(ticket).result(10)
            wait_until(lambda: is_idle(survivor))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    again = end("again", src if victim == "prefill" else dst, process=False)
    pair = (again, decode) if victim == "prefill" else (prefill, again)
    wanted = expected(case, None, *(side.pool.array for side in pair))
    finish(pair[0], *begin(*pair, case, mode, "next"))
    np.testing.assert_array_equal(pair[1].pool.array, wanted)


def test_a_request_after_one_that_failed(sides: Any) -> None:
    """The windows that a failed transfer held serve the next one."""
    prefill, decode, case, wanted = sides("narrow", "tcp", staging_nbytes=16 << 10)
    for number in range(3):
        with mock.patch.object(windows, "pack", side_effect=IncompatibleError("no")):
            ticket, move, _ = begin(prefill, decode, case, Mode.PULL, f"bad{number}")
            with pytest.raises(IncompatibleError, match="no"):
                move.result()
            with pytest.raises(KVFerryError):
                prefill.outcome(ticket).result(5)
        wait_until(lambda: is_idle(prefill) and is_idle(decode))
    finish(prefill, *begin(prefill, decode, case, Mode.PULL))
    np.testing.assert_array_equal(decode.pool.array, wanted)


def test_unforeseen_failures_are_told(sides: Any) -> None:
    """A bug in packing ends the transfer with this side's fault, and is not lost in a task."""
    prefill, decode, case, _ = sides("narrow", "tcp")
    with mock.patch.object(windows, "pack", side_effect=ZeroDivisionError("bug")):
        _, move, _ = begin(prefill, decode, case, Mode.PULL)
        with pytest.raises(PeerError, match=r"did not foresee.*bug"):
            move.result()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_staging_too_small_is_said(opened: Opened) -> None:
    """A pool without staging, and one whose windows hold no block: both name staging."""
    with pytest.raises(InputError, match="0 bytes of staging are too few"):
        opened(layout(), conversions=LOSSY)
    with pytest.raises(InputError, match="staging_nbytes"):
        Pool.allocate(layout(), staging_nbytes=-1)
    with pytest.raises(InputError, match="the layout and its staging need"):
        Pool(np.zeros(layout().nbytes, np.uint8), layout(), staging_nbytes=64)
    large = [layout(256, dtype=dtype, num_blocks=2) for dtype in ("float32", "bfloat16")]
    ends = [
        opened(
            one, unique_address("tcp"), pool=Pool.allocate(one, staging_nbytes=16 << 10), conversions=LOSSY
        )
        for one in large
    ]
    ticket = ends[0].offer(None, BlockTable(0, [0]), tokens=TOKENS, request_id="r")
    with pytest.raises(CapacityError, match="8192 bytes on the wire, a window has 4096"):
        ends[1].pull(ticket, BlockTable(0, [1])).result()
    ends[0].withdraw(ticket)


def test_the_engine_does_not_see_staging(opened: Opened) -> None:
    """A pool's array ends with its layout; an engine that fills it touches no window."""
    pool = Pool.allocate(layout(), staging_nbytes=STAGING)
    assert pool.array.nbytes == layout().nbytes
    assert pool.memory.nbytes >= layout().nbytes + STAGING
    pool.close()


class Asked:
    """A session's face towards ``Packing`` and ``Unpacking``; nothing runs."""

    def __init__(self) -> None:
        self.said: list[m.Message] = []
        self.post = self.said.append


@pytest.mark.parametrize("window", [1, 5, 2**40])
def test_only_the_next_window_can_be_asked_for(window: int) -> None:
    """A peer that skips, repeats or invents windows, or parts, is refused."""
    packing = Packing(SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    part = (0, 3, 0, 37)
    with mock.patch.object(windows, "part_windows", return_value=("a", "b")):
        packing.add(part)
    with pytest.raises(PeerError, match="not the next"):
        packing.ask(m.Pack(bytes(16), *part, window))
    with pytest.raises(PeerError, match="not the next"):
        packing.ask(m.Pack(bytes(16), 0, 3, 0, 36, 0))
    for number in range(3):  # two windows, and the word that both were read
        packing.ask(m.Pack(bytes(16), *part, number))
        with pytest.raises(PeerError, match="not the next"):
            packing.ask(m.Pack(bytes(16), *part, number))
    with pytest.raises(PeerError, match="not the next"):
        packing.ask(m.Pack(bytes(16), *part, 3))


def test_a_window_that_nobody_asked_for_is_refused() -> None:
    """Prefill's word about a window counts once, and only when it is waited for."""
    unpacking = Unpacking(Asked(), mock.Mock())  # type: ignore[arg-type]
    with pytest.raises(PeerError, match="not asked for"):
        unpacking.packed(m.Packed(bytes(16), 0, 0))


def test_what_was_ended_before_it_began_asks_for_nothing() -> None:
    """A fetch that is scheduled and stopped in one breath ends at once, and does not wait for an answer."""
    asked, cancel = Asked(), CancelToken()
    asked.peer = object()  # type: ignore[attr-defined]
    unpacking = Unpacking(asked, cancel)  # type: ignore[arg-type]
    cancel.cancel(error := LocalError("enough"))
    unpacking.stop(error)

    async def run() -> None:
        async with asyncio.timeout(5):
            await unpacking.fetch((0, 3, 0, 37))

    with (
        mock.patch.object(windows, "part_windows", return_value=("a", "b")),
        pytest.raises(LocalError, match="enough"),
    ):
        asyncio.run(run())
    assert not asked.said


def test_windows_are_given_in_turn() -> None:
    """First come, first served; a waiter that gives up costs nobody a window."""

    async def run() -> None:
        staging = Staging(1000, 16 << 10, copy_threads=2)
        assert staging.window_nbytes == 4096
        with staging.landing() as one, staging.landing() as two:
            assert {one, two} == {1000, 5096}
        pair = await staging.take()
        assert set(pair) == {9192, 13288}
        order: list[int] = []

        async def use(number: int) -> None:
            taken = await staging.take()
            order.append(number)
            staging.give_back(taken)

        tasks = [asyncio.ensure_future(use(number)) for number in range(4)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        assert (order, staging.num_taken) == ([], 1)
        staging.give_back(pair)
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (order, staging.num_taken) == ([0, 2, 3], 0)

    asyncio.run(run())
