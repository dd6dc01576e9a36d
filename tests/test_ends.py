"""The end of a transfer: late copies of a peer that is in, words that cross, devices that fail."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from conftest import fill_random, wait_until
from device_kit import FakeDevice
from kvferry.errors import InputError, KVFerryError, LocalError, PeerError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, Move, Pool
from kvferry.transfer.lease import Grants
from kvferry.transport import registry, tcp_data
from kvferry.transport.base import Arrived, CancelToken, Copy, Direction
from kvferry.transport.channel import Channel, make_marks
from kvferry.transport.frames import Frames
from kvferry.transport.patience import Patience
from kvferry.transport.table import Part, split_copy
from kvferry.transport.tcp import TcpConnection
from kvferry.transport.wire import Kind, Operation
from test_transfer import TOKENS, is_idle, layout, live, table

Opened = Callable[..., Endpoint]
SRC, DST = table(8, 2), table(8, 3)
ADDRESS = {"tcp": "tcp://127.0.0.1:0", "memmove": "memmove://127.0.0.1:0"}

pytestmark = pytest.mark.usefixtures("nothing_left")


@dataclasses.dataclass
class Second:
    """A copy beside the honest one, under the same grant, that its asker does not end."""

    channel: Channel
    part: Part
    patience: Patience

    def finish(self, array: np.ndarray) -> None:
        """Send what a write was asked for after all. Raises what the holder has said to that."""
        frames = Frames(array, self.part.here, self.part.nbytes)
        self.channel.write(self.patience, make_marks(Kind.DATA, frames.frame_nbytes)[:1])
        self.channel.write(self.patience, np.full(self.part.total_nbytes, 0xEE, np.uint8))
        self.channel.write_mark(Kind.DONE, self.patience, self.part.total_nbytes)
        self.channel.read_mark(Kind.DONE, self.patience, self.part.total_nbytes)


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Second]]:
    """Every copy over tcp is preceded by a second one that is begun and left open: a day long."""
    opened: list[Second] = []
    enter, entered = Grants.enter, []

    def noted(grants: Grants, *asked: Any) -> CancelToken:
        token = enter(grants, *asked)
        entered.append(token)
        return token

    monkeypatch.setattr(Grants, "enter", noted)
    with contextlib.ExitStack() as stack:

        def preceded(
            honest: Callable[[TcpConnection, Copy], Arrived], operation: Operation, direction: Direction
        ) -> Callable[[TcpConnection, Copy], Arrived]:
            def copy_twice(connection: TcpConnection, copy: Copy) -> Arrived:
                patience = Patience(time.monotonic() + 60, (), "holder")
                (part,) = split_copy(copy, direction, connection.memory.nbytes, "holder")
                channel = stack.enter_context(connection._asking.channel(patience))
                longer = dataclasses.replace(copy, deadline=time.monotonic() + 80_000)
                tcp_data._ask(channel, operation, longer, part, patience)
                wait_until(lambda: len(entered) == 1)  # the holder has let it in
                opened.append(Second(channel, part, patience))
                return honest(connection, copy)

            return copy_twice

        monkeypatch.setattr(
            TcpConnection, "write", preceded(TcpConnection.write, Operation.WRITE, Direction.WRITE)
        )
        monkeypatch.setattr(
            TcpConnection, "read", preceded(TcpConnection.read, Operation.READ, Direction.READ)
        )
        yield opened


def pair(opened: Opened, **changes: int) -> tuple[Endpoint, Endpoint]:
    names = ("prefill", "decode")
    prefill, decode = (opened(layout(**changes), ADDRESS["tcp"], name=name) for name in names)
    fill_random(prefill.pool, 1)
    return prefill, decode


def test_nothing_is_visible_while_a_peer_may_still_write(opened: Opened, seconds: list[Second]) -> None:
    """A write that is left open across the commit: decode waits for it, and then gives the transfer up.
    What is written after that lands nowhere."""
    prefill, decode = pair(opened)
    ticket = decode.reserve("r", TOKENS, DST, lease_seconds=20.0)
    move = decode.arrival(ticket)
    push = prefill.push(ticket, SRC, tokens=TOKENS, timeout_seconds=2.0)
    push.layers(0, 3)
    push.commit(None)
    with pytest.raises(KVFerryError):
        move.result()
    wait_until(lambda: is_idle(decode))
    before, (late,) = live(decode, DST), seconds
    with pytest.raises(KVFerryError):
        late.finish(prefill.pool.array)
    assert live(decode, DST) == before


def test_a_peer_that_reads_on_does_not_keep_prefills_blocks(opened: Opened, seconds: list[Second]) -> None:
    """Decode has started; a read that it left open is ended within the time that an abort has."""
    prefill, decode = pair(opened, kv_heads=8, head_dim=256)  # more than the kernel takes in unread
    blocks, tokens = table(8, 2, 500), 500
    ticket = prefill.offer(None, blocks, tokens=tokens, request_id="r", lease_seconds=300.0)
    outcome = prefill.outcome(ticket)
    move = decode.pull(ticket, blocks)
    move.result()
    move.started()
    assert outcome.result(10.0).nbytes > 0
    assert len(seconds) == 1
    wait_until(lambda: is_idle(prefill))


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_decodes_word_counts_also_after_prefill_called_it_off(opened: Opened, mode: Mode) -> None:
    """Once decode has everything, prefill's withdrawal changes nothing, so it is not why it failed."""
    prefill, decode = pair(opened)
    if mode == "pull":
        ticket = prefill.offer(None, SRC, tokens=TOKENS, request_id="r")
        move = decode.pull(ticket, DST)
    else:
        ticket = decode.reserve("r", TOKENS, DST)
        move = decode.arrival(ticket)
        push = prefill.push(ticket, SRC, tokens=TOKENS)
        push.layers(0, 3)
        push.commit(None)
    outcome = prefill.outcome(ticket)
    move.result()
    wait_until(lambda: [found.phase for found in prefill.transfers()] == ["committed"])
    prefill.cancel(ticket, "the engine shuts down")
    move.abort("no slot")
    with pytest.raises(PeerError, match=r"decode at .* gave up: no slot") as told:
        outcome.result(30.0)
    assert not told.value.in_doubt


class Failing(FakeDevice):
    """Raises what a device's library might, while ``is_broken``."""

    is_broken = False

    def gather(self, *table: np.ndarray) -> None:
        if self.is_broken:
            raise RuntimeError("out of memory")
        super().gather(*table)


@pytest.fixture
def devices(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> tuple[Endpoint, Failing, Endpoint]:
    """A prefill worker, its device, and a decode worker, by the staged transport of the tests."""
    entry = EntryPoint("memmove", "device_kit:MemmoveTransport", registry.GROUP)
    known = registry.entry_points(group=registry.GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda **_: [*known, entry])
    contents = np.random.default_rng(1).integers(0, 256, (2, layout().nbytes), np.uint8)
    device = Failing(contents[0])
    prefill, decode = (
        opened(layout(), ADDRESS["memmove"], pool=Pool(there, layout()))
        for there in (device, FakeDevice(contents[1]))
    )
    return prefill, device, decode


def test_a_device_that_fails_is_named_to_both_sides(devices: tuple[Endpoint, Failing, Endpoint]) -> None:
    """More often than there are windows: none of them is lost, and the next request is served."""
    prefill, device, decode = devices

    def pulled(number: int) -> Move:
        ticket = prefill.offer(None, SRC, tokens=TOKENS, request_id=f"r{number}")
        device.is_broken = number < 40
        move = decode.pull(ticket, DST)
        if device.is_broken:
            with pytest.raises(
                PeerError, match=r"fake:3 failed to read the pool: RuntimeError.*out of memory"
            ):
                move.result()
        device.is_broken = False
        return move

    for number in range(40):
        pulled(number)
    last = pulled(40)
    last.result()
    last.started()
    wait_until(lambda: is_idle(prefill))


def test_an_offer_that_fails_holds_nothing(devices: tuple[Endpoint, Failing, Endpoint]) -> None:
    """No ticket went out, so nobody could take it back."""
    prefill, device, _ = devices
    device.is_broken = True
    with pytest.raises(LocalError, match="out of memory"):
        prefill.offer(None, SRC, tokens=TOKENS, request_id="r", lease_seconds=300.0)
    assert is_idle(prefill)


def in_one_memory(window: int | None = None) -> PoolLayout:
    """Groups "full" and "late", the second with a window, in blocks of 4 tokens."""
    full, late = (
        PoolLayout.paged(
            layers,
            kv_heads=1,
            head_dim=8,
            dtype="float32",
            block_size=4,
            num_blocks=32,
            name=name,
            window=size,
        )
        for name, layers, size in (("full", range(2), None), ("late", range(2, 4), window))
    )
    return PoolLayout(full.groups + late.groups, full.nbytes, groups_share_blocks=True)


def blocks(*ids: int) -> BlockTable:
    return BlockTable(0, np.array(ids))


def test_what_stands_before_a_window_is_no_block_that_is_lent(opened: Opened) -> None:
    """Placeholders (block 0 here) of requests side by side, where groups share blocks: it is not written.

    A push of fewer tokens than were reserved has its window earlier: those blocks are lent then.
    """
    prefill, decode = (opened(in_one_memory(window=4), ADDRESS["tcp"]) for _ in range(2))
    fill_random(prefill.pool, 1)
    src, dst = (blocks(1, 2, 3), blocks(0, 0, 4)), (blocks(9, 8, 7), blocks(0, 0, 6))
    first = decode.reserve("first", 12, dst)
    decode.reserve("second", 12, (blocks(10, 11, 12), blocks(0, 0, 13)))
    push = prefill.push(first, src, tokens=12)
    push.layers(0, 4)
    push.commit(None)
    move = decode.arrival(first)
    move.result()
    move.started()
    for group, (here, there) in enumerate(((3, 7), (4, 6))):
        for tensor in decode.pool.layout.groups[group].tensors:
            from_, to = (tensor.offset + block * tensor.block_stride for block in (here, there))
            size = 4 * tensor.row_nbytes
            assert bytes(prefill.pool.array[from_ : from_ + size]) == bytes(decode.pool.array[to : to + size])
            assert not decode.pool.array[tensor.offset :][:size].any()
    shorter = decode.reserve("shorter", 12, (blocks(20, 21, 22), blocks(0, 13, 15)))
    refused = decode.arrival(shorter)
    prefill.push(shorter, src, tokens=8)
    with pytest.raises(LocalError, match="block 13 is lent for request second"):
        refused.result()
    wait_until(lambda: decode.stats().holds == 1)


def test_groups_in_the_same_memory_are_not_lent_a_block_twice(opened: Opened) -> None:
    """Neither within a request nor between two: a block id is of one group at a time."""
    endpoint = opened(in_one_memory(), ADDRESS["tcp"])
    with pytest.raises(InputError, match="block 5 is in the tables of groups 'full' and 'late', whose"):
        endpoint.reserve("x", 12, (blocks(4, 5, 6), blocks(5, 7, 8)))
    endpoint.reserve("y", 12, (blocks(4, 5, 6), blocks(7, 8, 9)))
    with pytest.raises(LocalError, match="block 4 is lent for request y"):
        endpoint.reserve("z", 12, (blocks(10, 11, 12), blocks(4, 13, 14)))
    endpoint.reserve("z", 12, (blocks(10, 11, 12), blocks(13, 14, 15)))
