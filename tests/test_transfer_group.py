"""Groups of ranks: any split into any other, each byte once, and all pairs or none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import QUICK, fill_random, unique_address, wait_until
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
from kvferry.layout import BlockTable, GroupLayout, LayerKind, PoolLayout, Role, TensorLayout
from kvferry.protocol.messages import Portion
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, RankGroup, read_bundle, service
from kvferry.transfer.bundle import pack_layouts, seal_bundle
from kvferry.transfer.directory import Directory
from kvferry.transfer.ledger import Ledger
from kvferry.transfer.portions import Coverage, share_out
from layout_oracle import RowKey, rows

pytestmark = pytest.mark.usefixtures("nothing_left")

Opened = Callable[..., Endpoint]
TOKENS, ROW_NBYTES, NUM_BLOCKS = 9, 4, 8
KV_HEADS, FEW_HEADS = 24, 2
FULL, FEW, MLA = range(2), range(2, 3), range(3, 6)
_names = itertools.count()


def rank_layouts(tp: int, pp: int = 1, *, block_size: int = 4, axis_order: str = "NHD") -> list[PoolLayout]:
    """24 KV heads split over tp ranks, 2 KV heads split or replicated, a latent that each rank holds."""
    layouts = []
    for stage in np.array_split([*FULL, *FEW, *MLA], pp):
        for rank in range(tp):
            parts = []
            form = {"head_dim": 2, "dtype": "float16", "block_size": block_size, "num_blocks": NUM_BLOCKS}
            if full := [layer for layer in stage.tolist() if layer in FULL]:
                heads = KV_HEADS // tp
                start = rank * heads
                parts.append(
                    PoolLayout.paged(full, kv_heads=heads, head_start=start, axis_order=axis_order, **form)
                )
            if few := [layer for layer in stage.tolist() if layer in FEW]:
                heads, start = max(1, FEW_HEADS // tp), rank * FEW_HEADS // tp
                parts.append(PoolLayout.paged(few, kv_heads=heads, head_start=start, name="few", **form))
            if latent := [layer for layer in stage.tolist() if layer in MLA]:
                parts.append(mla_layout(latent, block_size))
            layouts.append(PoolLayout.beside(*parts))
    return layouts


def mla_layout(layers: Sequence[int], block_size: int) -> PoolLayout:
    """A latent and its rope of each layer, one "head" each, a region each."""
    region = NUM_BLOCKS * block_size * ROW_NBYTES
    tensors = tuple(
        TensorLayout(layer, role, "float16", (2 * i + j) * region, block_size * 4, 4, 4, 1, 2)
        for i, layer in enumerate(layers)
        for j, role in enumerate((Role.LATENT, Role.ROPE))
    )
    group = GroupLayout("mla", LayerKind.MLA, block_size, NUM_BLOCKS, tensors)
    return PoolLayout((group,), 2 * len(layers) * region)


def truth(key: RowKey) -> bytes:
    """The model's own row of that name: four bytes that no other row has, and that are not zero."""
    layer, role, part, token, head = key
    return bytes((1 + layer, 1 + sorted(Role).index(Role(role)), 1 + token, 1 + head + part))


@dataclass
class Worker:
    """Ranks with their endpoints, and one request's blocks at each, in an order of each rank's own."""

    endpoints: list[Endpoint]
    seed: int

    @cached_property
    def group(self) -> RankGroup:
        return RankGroup(self.endpoints)

    @cached_property
    def tables(self) -> list[list[BlockTable]]:
        random = np.random.default_rng(self.seed)
        return [
            [
                BlockTable(0, random.permutation(NUM_BLOCKS)[: -(-TOKENS // (group.block_size or 1))])
                for group in layout.groups
            ]
            for layout in self.group.layouts
        ]

    @cached_property
    def rows(self) -> list[dict[RowKey, int]]:
        """Where the oracle says that each row lies, by rank."""
        return [
            rows(layout, tables, TOKENS)
            for layout, tables in zip(self.group.layouts, self.tables, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        return sum(len(there) for there in self.rows) * ROW_NBYTES

    def fill(self) -> None:
        """Every row of the request where the oracle says, noise elsewhere."""
        for number, (endpoint, there) in enumerate(zip(self.endpoints, self.rows, strict=True)):
            fill_random(endpoint.pool, number)
            for key, at in there.items():
                endpoint.pool.array[at : at + ROW_NBYTES] = np.frombuffer(truth(key), np.uint8)

    def clear(self) -> None:
        for endpoint in self.endpoints:
            endpoint.pool.array[:] = 0

    def check(self) -> None:
        """Each row of each rank is the model's, and no byte beside them has changed from zero."""
        for endpoint, there in zip(self.endpoints, self.rows, strict=True):
            memory = endpoint.pool.array.copy()
            for key, at in there.items():
                assert memory[at : at + ROW_NBYTES].tobytes() == truth(key), key
                memory[at : at + ROW_NBYTES] = 0
            assert not memory.any()

    @property
    def is_idle(self) -> bool:
        return all(is_idle(endpoint) for endpoint in self.endpoints)


def is_idle(endpoint: Endpoint) -> bool:
    stats = endpoint.stats()
    return not any((stats.transfers, stats.holds, stats.grants, stats.copies, stats.digesting))


def open_worker(opened: Opened, layouts: Sequence[PoolLayout], scheme: str, **options: object) -> Worker:
    endpoints = []
    for layout in layouts:
        address = unique_address(scheme)
        endpoints.append(opened(layout, address, **options))
    return Worker(endpoints, next(_names))


@dataclass
class Handoff:
    """One request between two groups, in steps, so that something can go wrong between them."""

    source: Worker
    target: Worker
    mode: Mode

    def hold(self, **options: object) -> Handoff:
        """The side that issues the bundle does; its digests are taken when this returns."""
        source, target = self.source, self.target
        if self.mode is Mode.PULL:
            claims = len(target.endpoints)
            self.bundle = source.group.offer(
                None, source.tables, claims=claims, tokens=TOKENS, request_id="r", **options
            )
            self.outcome = source.group.outcome(self.bundle)
            wait_until(lambda: not any(endpoint.stats().digesting for endpoint in source.endpoints))
        else:
            claims = len(source.endpoints)
            self.bundle = target.group.reserve("r", TOKENS, target.tables, claims=claims, **options)
            self.move = target.group.arrival(self.bundle)
        return self

    def claim(self) -> Handoff:
        """The other side takes it up."""
        if self.mode is Mode.PULL:
            self.move = self.target.group.pull(self.bundle, self.target.tables)
        else:
            self.push = self.source.group.push(self.bundle, self.source.tables, tokens=TOKENS)
            self.outcome = self.source.group.outcome(self.bundle)
        return self

    def send(self) -> Handoff:
        """A push gives its parts; a pull needs none of that."""
        if self.mode is Mode.PUSH:
            for layer in (*FULL, *FEW, *MLA):
                self.push.layer(layer)
            nodes = (*self.source.endpoints, *self.target.endpoints)
            wait_until(lambda: not any(endpoint.stats().copies for endpoint in nodes))
        return self

    def commit(self) -> Handoff:
        if self.mode is Mode.PUSH:
            self.push.commit(None)
        return self


def hand_over(source: Worker, target: Worker, mode: Mode) -> None:
    """One whole handoff without a state, with what it moved compared with the oracle's count."""
    target.clear()
    handoff = Handoff(source, target, mode).hold().claim().send().commit()
    move = handoff.move
    assert move.result() is None
    target.check()
    freed = target.group.outcome(handoff.bundle)
    move.started()
    assert move.record.nbytes == handoff.outcome.result(5).nbytes == freed.result(5).nbytes == target.nbytes
    assert move.record.descriptors == sum(record.descriptors for record in move.records.values())


def hand_over_all(opened: Opened, scheme: str, splits: Sequence[tuple[int, int]]) -> None:
    """Each split into each other; modes take turns, and where shm pushes, tcp pulls."""
    sources = [open_worker(opened, rank_layouts(*split), scheme) for split in splits]
    targets = [
        open_worker(opened, rank_layouts(*split, block_size=8, axis_order="HND"), scheme) for split in splits
    ]
    for source in sources:
        source.fill()
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        hand_over(source, target, tuple(Mode)[(i + j + (scheme == "tcp")) % 2])
    wait_until(lambda: all(worker.is_idle for worker in [*sources, *targets]))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_heads_split_into_any_other_number(opened: Opened, scheme: str) -> None:
    """TP 1, 2, 3, 4, 8 into each other: every row arrives, no other byte does, and each crosses once."""
    hand_over_all(opened, scheme, [(tp, 1) for tp in (1, 2, 3, 4, 8)])


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_two_ranks_and_three(opened: Opened, scheme: str) -> None:
    """TP 2 to 3 heads apart, and back: one of the pairs of the test above."""
    hand_over_all(opened, scheme, [(2, 1), (3, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_layers_split_into_any_other_number(opened: Opened, scheme: str) -> None:
    """PP 1, 2, 3 into each other, alone and with TP: stages that lack a layer group too."""
    hand_over_all(opened, scheme, [(1, 1), (1, 2), (1, 3), (2, 2)])


def test_ranks_that_hold_the_same_give_alike(opened: Opened) -> None:
    """Of a latent that four source ranks hold, each gives a quarter, and no rank of decode gets it twice."""
    source = open_worker(opened, [mla_layout(range(8), 4)] * 4, "shm")
    target = open_worker(opened, [mla_layout(range(8), 8)] * 2, "shm")
    source.fill()
    move = Handoff(source, target, Mode.PULL).hold().claim().move
    move.result()
    target.check()
    given: Counter[int] = Counter()
    for (rank, _), record in move.records.items():
        given[rank] += record.nbytes
    assert given == dict.fromkeys(range(4), target.nbytes // 4)
    move.started()


def joined(heads: int, head_start: int = 0, value_heads: int | None = None, **form: object) -> PoolLayout:
    """K and V of four heads side by side in each block, or some of them; V maybe fewer than K."""
    form = {"head_dim": 2, "dtype": "float16", "num_blocks": NUM_BLOCKS, "block_size": 4} | form
    layers = (*FULL, *FEW, *MLA)
    pool = PoolLayout.paged(layers, kv_heads=heads, head_start=head_start, joined_kv=True, **form)
    tensors = tuple(
        msgspec.structs.replace(tensor, heads=value_heads or heads) if tensor.role is Role.VALUE else tensor
        for tensor in pool.groups[0].tensors
    )
    return PoolLayout((msgspec.structs.replace(pool.groups[0], tensors=tensors),), pool.nbytes)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(
    ("ranks", "num_portions"),
    [
        ([joined(4), joined(2, head_start=1)], [3, 1]),  # heads 0 and 3, in every other layer
        ([joined(4, value_heads=2), joined(2, head_start=2)], [3, 2]),  # K of four heads, V of two
    ],
    ids=["heads apart", "unlike roles"],
)
def test_a_pair_that_moves_several_portions_of_one_chunk(
    opened: Opened, mode: Mode, ranks: list[PoolLayout], num_portions: list[int]
) -> None:
    """What one pair moves in parts is one session, and its digests still hold."""
    source = open_worker(opened, ranks, "tcp")
    target = open_worker(opened, [joined(4, block_size=8)], "tcp")
    plan = share_out(source.group.layouts, target.group.layouts)
    assert [len(portions) for portions in plan.values()] == num_portions
    source.fill()
    hand_over(source, target, mode)


def test_a_pool_may_be_one_rank_of_a_group_and_alone(opened: Opened) -> None:
    """A group of one rank at each side moves what two endpoints do."""
    source, target = (open_worker(opened, rank_layouts(1, block_size=size), "shm") for size in (4, 8))
    source.fill()
    hand_over(source, target, Mode.PULL)


# Failures.


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("splits", [(3, 1), (1, 3)])
def test_one_rank_that_fails_ends_all(opened: Opened, mode: Mode, splits: tuple[int, int]) -> None:
    """A rank's bytes change before the commit: its pair is named, nothing is visible or held anywhere."""
    source, target = (open_worker(opened, rank_layouts(tp), "shm") for tp in splits)
    source.fill()
    handoff = Handoff(source, target, mode).hold()
    at = next(at for key, at in source.rows[-1].items() if key[0] in FULL)
    if mode is Mode.PULL:
        source.endpoints[-1].pool.array[at] ^= 1
        handoff.claim()
    else:
        handoff.claim().send()
        source.endpoints[-1].pool.array[at] ^= 1
        with contextlib.suppress(CorruptError):  # decode may refuse one pair before the last commits
            handoff.commit()
    pair = rf"source rank {splits[0] - 1} to destination rank \d"
    for _ in range(2):
        with pytest.raises(CorruptError, match=f"{pair}: .*digest") as caught:
            handoff.move.result()
    assert "at any rank; all blocks here are free" in str(caught.value)
    with pytest.raises(LocalError, match="not arrived"):
        handoff.move.started()
    with pytest.raises(CorruptError, match="digest"):
        handoff.outcome.result(5)
    wait_until(lambda: source.is_idle and target.is_idle)
    source.fill()
    hand_over(source, target, mode)  # the next request is served


def test_a_rank_of_prefill_that_is_gone(opened: Opened) -> None:
    """One source rank is closed before decode pulls: an error with its rank, and the others hold nothing."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (3, 1))
    handoff = Handoff(source, target, Mode.PULL).hold()
    source.endpoints[1].close()
    # Nobody listens there; or another rank, which was told so, is asked first and has given up its hold.
    with pytest.raises((TransportError, DeadlineError), match="source rank 1 to destination rank 0"):
        handoff.claim().move.result()
    with pytest.raises(KVFerryError):
        handoff.outcome.result(5)
    wait_until(lambda: all(is_idle(source.endpoints[rank]) for rank in (0, 2)) and target.is_idle)


def test_a_rank_of_decode_that_is_gone(opened: Opened) -> None:
    """One destination rank is closed before prefill pushes: the same, and the push has begun nowhere."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (1, 3))
    handoff = Handoff(source, target, Mode.PUSH).hold()
    target.endpoints[1].close()
    with pytest.raises((TransportError, DeadlineError), match="source rank 0 to destination rank 1"):
        handoff.claim()
    with pytest.raises(KVFerryError, match="destination rank"):
        handoff.move.result()
    wait_until(lambda: all(is_idle(target.endpoints[rank]) for rank in (0, 2)) and source.is_idle)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow
def test_a_rank_whose_transfer_process_is_killed_or_frozen(
    opened: Opened, mode: Mode, signal_number: signal.Signals
) -> None:
    """One of the claimer's peers is gone or silent: the ranks are named in time, the others hold nothing."""
    splits = (2, 1) if mode is Mode.PULL else (1, 2)
    quick = msgspec.structs.replace(QUICK, handshake=1.0)
    source, target = (
        open_worker(opened, rank_layouts(tp), "tcp", process=tp == 2, timeouts=quick) for tp in splits
    )
    claimer, issuer = (target, source) if mode is Mode.PULL else (source, target)
    handoff = Handoff(source, target, mode).hold()
    process = psutil.Process(issuer.endpoints[1].stats().pid)
    process.send_signal(signal_number)
    try:
        with pytest.raises((TransportError, DeadlineError), match=r"source rank . to destination rank ."):
            handoff.claim().send().move.result()
        assert claimer.is_idle
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)
    if mode is Mode.PULL:
        with pytest.raises(KVFerryError, match="rank"):
            handoff.outcome.result(10)
    wait_until(lambda: is_idle(issuer.endpoints[0]))


def test_a_rank_that_is_busy(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has no room now refuses its pair: that is said, with what can be done for all of them."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (2, 1))
    handoff = Handoff(source, target, Mode.PULL).hold()
    monkeypatch.setattr(Ledger, "num_working", 64)
    with pytest.raises(CapacityError, match=r"source rank . to destination rank 0") as caught:
        handoff.claim().move.result()
    assert "new bundle" in caught.value.next_step
    assert target.is_idle
    source.group.withdraw(handoff.bundle)


@pytest.mark.parametrize("mode", Mode)
def test_an_import_that_refuses(opened: Opened, mode: Mode) -> None:
    """Decode gives up after all pairs have committed: prefill is told, and nothing is held at any rank."""
    source, target = (open_worker(opened, rank_layouts(tp), "shm") for tp in (2, 3))
    handoff = Handoff(source, target, mode).hold().claim().send().commit()
    handoff.move.result()
    handoff.move.abort(IncompatibleError("check 14: the read-back differs"))
    assert target.is_idle
    with pytest.raises(IncompatibleError, match="read-back differs"):
        handoff.outcome.result(5)
    with pytest.raises(IncompatibleError, match="read-back differs"):
        handoff.move.result()
    wait_until(lambda: source.is_idle)


def test_a_push_that_is_given_up(opened: Opened) -> None:
    """Prefill gives a push up between two layers: decode's future says why, nothing is held."""
    source, target = (open_worker(opened, rank_layouts(tp), "shm") for tp in (2, 1))
    handoff = Handoff(source, target, Mode.PUSH).hold().claim()
    handoff.push.layer(0)
    handoff.push.abort("the client went away")
    assert source.is_idle
    with pytest.raises(KVFerryError, match="went away"):
        handoff.move.result()
    with pytest.raises(KVFerryError, match="went away"):
        handoff.outcome.result(5)
    with pytest.raises(KVFerryError, match="went away"):
        handoff.push.layer(1)
    wait_until(lambda: target.is_idle)


def test_a_layer_that_one_push_left_out(opened: Opened) -> None:
    """Prefill commits without a layer: refused for the missing bytes, at the ranks that lack them."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (2, 1))
    handoff = Handoff(source, target, Mode.PUSH).hold().claim()
    handoff.push.layers(1, 6)
    with contextlib.suppress(KVFerryError):  # the first pair's refusal may come while the second commits
        handoff.push.commit(None)
    with pytest.raises(CorruptError, match=r"source rank . to destination rank 0: .*are needed"):
        handoff.move.result()
    wait_until(lambda: source.is_idle and target.is_idle)


@pytest.mark.parametrize("mode", Mode)
def test_a_bundle_that_nobody_takes_up(opened: Opened, mode: Mode) -> None:
    """It expires, or is withdrawn, and says so; renewed, it lives on; then all blocks are free."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (2, 3))
    issuer = source if mode is Mode.PULL else target
    with pytest.raises(DeadlineError, match="lease ended"):
        issuer.group.outcome(Handoff(source, target, mode).hold(lease_seconds=0.05).bundle).result(5)
    assert issuer.is_idle
    handoff = Handoff(source, target, mode).hold(lease_seconds=1.0)
    issuer.group.renew(handoff.bundle, 30)
    first_end = time.monotonic() + 1.0
    wait_until(lambda: time.monotonic() > first_end)
    outcome = issuer.group.outcome(handoff.bundle)
    assert not outcome.done()
    issuer.group.withdraw(handoff.bundle, "the client went away")
    assert issuer.is_idle
    with pytest.raises(LocalError, match="went away"):
        outcome.result(5)


def test_no_room_at_one_rank(opened: Opened) -> None:
    """A rank at its limit refuses the whole offer, by its number, and the ranks before it hold nothing."""
    layouts = rank_layouts(2)
    endpoints = [
        opened(layout, "tcp://127.0.0.1:0", max_transfers=most)
        for layout, most in zip(layouts, (8, 2), strict=True)
    ]
    worker = Worker(endpoints, 0)
    with pytest.raises(CapacityError, match="rank 1: 2 transfers"):
        worker.group.offer(None, worker.tables, claims=3, tokens=TOKENS, request_id="r")
    assert worker.is_idle


def test_a_pull_that_is_given_up_while_it_connects(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort before the claim is not lost: nothing is claimed, and prefill's offer is untouched."""
    source, target = (open_worker(opened, rank_layouts(1), "tcp") for _ in range(2))
    handoff = Handoff(source, target, Mode.PULL).hold()
    gate, reach = threading.Event(), Directory.reach

    async def slow(self: Directory, *args: object) -> object:
        await asyncio.to_thread(gate.wait, 10)
        return await reach(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Directory, "reach", slow)
    handoff.claim()
    handoff.move.abort("the client went away")
    gate.set()
    with pytest.raises(LocalError, match="went away"):
        handoff.move.result()
    wait_until(lambda: target.endpoints[0].stats().peers == 1)
    assert target.is_idle
    assert source.endpoints[0].stats().holds == 1
    source.group.withdraw(handoff.bundle)


# What a peer may not do.


def everything_of(layout: PoolLayout) -> tuple[Portion, ...]:
    """All that one rank holds."""
    return next(iter(share_out((layout,), (layout,)).values()))


def test_two_ranks_that_push_the_same(opened: Opened) -> None:
    """Two source ranks each push all of a latent: whichever comes second is refused, not written over."""
    layout = mla_layout(range(6), 4)
    source = open_worker(opened, [layout] * 2, "tcp")
    target = open_worker(opened, [layout], "tcp")
    handoff = Handoff(source, target, Mode.PUSH).hold()
    for rank, ticket in enumerate(read_bundle(handoff.bundle).tickets[0]):
        push = source.endpoints[rank].push(
            ticket, source.tables[rank], tokens=TOKENS, portions=everything_of(layout)
        )
        push.layers(0, 6)
        push.commit(None)
    with pytest.raises(PeerError, match=r"named twice|taken up"):
        handoff.move.result()
    wait_until(lambda: source.is_idle and target.is_idle)


def test_a_rank_that_is_never_pushed(opened: Opened) -> None:
    """One source rank pushes and the other never comes: the lease ends it, and nothing is visible."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (2, 1))
    handoff = Handoff(source, target, Mode.PUSH).hold(lease_seconds=1.5)
    ticket = read_bundle(handoff.bundle).tickets[0][0]
    portions = share_out(source.group.layouts, target.group.layouts)[0, 0]
    push = source.endpoints[0].push(ticket, source.tables[0], tokens=TOKENS, portions=portions)
    push.layers(0, 6)
    push.commit(None)
    with pytest.raises(DeadlineError, match="source rank 1 to destination rank 0"):
        handoff.move.result()
    wait_until(lambda: source.is_idle and target.is_idle)


WRONG = {
    "a layer of another stage": {"layers": (0, 99)},
    "heads of another rank": {"head_range": (0, 13)},
    "no head": {"head_range": (3, 3)},
    "a tensor that is not there": {"parts": ((Role.LATENT, 0),)},
    "a part that is not there": {"parts": ((Role.KEY, 1),)},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_portions_that_are_not_held_are_refused(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object]
) -> None:
    """By the side that claims, and by the side that is asked: by name, with the ticket still good."""
    source, target = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (2, 1))
    source.fill()
    handoff = Handoff(source, target, Mode.PULL).hold()
    ticket, decode = read_bundle(handoff.bundle).tickets[0][0], target.endpoints[0]
    good = share_out(source.group.layouts, target.group.layouts)[0, 0][0]
    for portions in ((msgspec.structs.replace(good, **wrong),), (good, good)):
        with pytest.raises(InputError, match="portions"):
            decode.pull(ticket, target.tables[0], portions=portions).result()
        with monkeypatch.context() as careless:
            careless.setattr(service, "check_portions", lambda *_: None)
            with pytest.raises(PeerError, match="portions"):
                decode.pull(ticket, target.tables[0], portions=portions).result()
    assert target.is_idle
    assert source.endpoints[0].stats().holds == 1
    handoff.claim().move.result()
    target.check()
    handoff.move.started()


def test_an_offer_like_another_is_of_the_same_blocks(opened: Opened) -> None:
    """An offer cannot borrow the digests of other blocks; one of the same blocks does, and arrives."""
    source, target = (open_worker(opened, rank_layouts(1), "tcp").endpoints[0] for _ in range(2))
    fill_random(source.pool, 1)
    first, other = ([BlockTable(0, ids)] * 3 for ids in ([1, 2, 3], [3, 2, 1]))
    into = [BlockTable(0, [4, 5, 6])] * 3
    like = source.offer(None, first, tokens=TOKENS, request_id="r")
    with pytest.raises(InputError, match="other blocks"):
        source.offer(None, other, tokens=TOKENS, request_id="r", like=like)
    again = source.offer(None, first, tokens=TOKENS, request_id="r", like=like)
    source.withdraw(like)
    move = target.pull(again, into)
    move.result()
    move.started()
    assert source.outcome(again).result(5).nbytes == move.record.nbytes > 0


# Words.


def test_ranks_that_do_not_belong_together(opened: Opened) -> None:
    """No rank, tables or tickets for another number of ranks, the other mode, heads that nobody has."""
    one, two = (open_worker(opened, rank_layouts(tp), "tcp") for tp in (1, 2))
    with pytest.raises(InputError, match="endpoints"):
        RankGroup([])
    with pytest.raises(InputError, match="tables_by_rank"):
        two.group.offer(None, one.tables, claims=1, tokens=TOKENS, request_id="r")
    with pytest.raises(InputError, match="claims"):
        two.group.offer(None, two.tables, claims=0, tokens=TOKENS, request_id="r")
    with pytest.raises(InputError, match="rank 0: tables"):
        two.group.offer(None, [[], []], claims=1, tokens=TOKENS, request_id="r")
    bundle = one.group.offer(None, one.tables, claims=1, tokens=TOKENS, request_id="r")
    with pytest.raises(InputError, match="for 1 ranks, this worker has 2"):
        two.group.pull(bundle, two.tables)
    with pytest.raises(InputError, match="for a pull"):
        two.group.push(bundle, two.tables, tokens=TOKENS)
    with pytest.raises(InputError, match="of 1 ranks"):
        two.group.arrival(bundle)
    half = RankGroup(two.endpoints[:1])
    bundle = half.offer(None, two.tables[:1], claims=1, tokens=TOKENS, request_id="r")
    with pytest.raises(IncompatibleError, match="key heads 12 to 23"):
        one.group.pull(bundle, one.tables)
    assert one.endpoints[0].stats().transfers == 0


BUNDLE = seal_bundle(pack_layouts(rank_layouts(2)), [[b"no ticket"]] * 2)


def test_bundles_that_are_none(opened: Opened) -> None:
    """Junk, half a bundle, tickets of unlike requests, a bomb: one InputError that names the bundle."""
    worker = open_worker(opened, rank_layouts(2), "tcp")
    offers = [
        worker.group.offer(None, worker.tables, claims=1, tokens=TOKENS, request_id=name) for name in "ab"
    ]
    rows_of = [read_bundle(offer).tickets for offer in offers]
    packed = pack_layouts(worker.group.layouts)
    bomb = zlib.compress(bytes(64 << 20))
    for bad, word in (
        (b"junk", "base64"),
        (BUNDLE, "ticket"),
        (offers[0][:-1], "damaged"),
        (seal_bundle(packed, [rows_of[0][0], rows_of[1][1]]), "several requests"),
        (seal_bundle(packed, rows_of[0][:1]), "pair of ranks"),
        (seal_bundle(packed, [rows_of[0][0], rows_of[0][1] * 2]), "pair of ranks"),
        (seal_bundle(packed[:-9], rows_of[0]), "damaged"),
        (seal_bundle(bomb, rows_of[0]), "too large"),
        (seal_bundle(packed, [rows_of[0][0] * 65] * 2), "64"),
    ):
        with pytest.raises(InputError, match=f"bundle: .*{word}"):
            read_bundle(bad)
    for offer in offers:
        worker.group.withdraw(offer)


@given(st.data())
@settings(max_examples=150)
def test_no_bit_flip_in_a_bundle_raises_anything_else(data: st.DataObject) -> None:
    """A damaged bundle is an InputError or another bundle, never another exception."""
    flipped = bytearray(BUNDLE)
    at = data.draw(st.integers(0, 8 * len(flipped) - 1))
    flipped[at // 8] ^= 1 << at % 8
    with contextlib.suppress(InputError):
        read_bundle(bytes(flipped))


@given(st.data())
@settings(max_examples=60)
def test_coverage_counts_each_head_once(data: st.DataObject) -> None:
    """Heads named in any pieces and order are complete when all were, and no sooner; none twice."""
    layout = PoolLayout.paged([5, 7], kv_heads=6, head_start=2, head_dim=2, dtype="float16", **BLOCKS)
    cuts = sorted(data.draw(st.sets(st.integers(3, 7))))
    parts = [(layer, (role, 0), heads) for layer in (5, 7) for role in (Role.KEY, Role.VALUE)
             for heads in itertools.pairwise([2, *cuts, 8])]  # fmt: skip
    coverage = Coverage(layout)
    for layer, tensor, heads in data.draw(st.permutations(parts)):
        assert not coverage.is_complete
        coverage.add([Portion((layer,), (tensor,), heads)])
        with pytest.raises(InputError, match="named twice"):
            coverage.add([Portion((layer,), (tensor,), heads)])
    assert coverage.is_complete


BLOCKS = {"block_size": 4, "num_blocks": 4}
