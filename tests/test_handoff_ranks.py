"""Workers of several ranks: a request goes from any split of the model to any other, bit by bit the same."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from conftest import fill_random, unique_address, wait_until
from kvferry.engines.reference import Model, ReferenceEngine, StepOutput, tiny_model
from kvferry.errors import CorruptError, IncompatibleError, InputError, LocalError, PeerError
from kvferry.layout import PoolLayout
from kvferry.protocol.prefix import hold_prefix, prefix_salt
from kvferry.state import Conversion, Exactness, ExecutionState, GroupBlocks, Requirements, SamplingParameters
from kvferry.transfer import Endpoint, GroupMove, Pool, RankGroup, group, read_bundle
from reference_kit import GREEDY, SAMPLED, limits, prompt, seen, take

pytestmark = pytest.mark.usefixtures("nothing_left")

TOKENS, STEPS, CHUNK = 75, 12, 32
Split = tuple[int, int]
_names = itertools.count()


@functools.cache
def model() -> Model:
    """Three KV heads, as SmolLM2 has, and four layers."""
    return tiny_model(0, kv_heads=3)


def layouts_of(tp: int, pp: int, block_size: int) -> list[PoolLayout]:
    """Ranks of a tensor and pipeline parallel worker; with more ranks than heads several hold each."""
    config = model().config
    heads, copies = max(1, config.kv_heads // tp), max(1, tp // config.kv_heads)
    return [
        PoolLayout.paged(
            stage.tolist(),
            kv_heads=heads,
            head_start=rank // copies * heads,
            head_dim=config.head_dim,
            dtype="float32",
            block_size=block_size,
            num_blocks=512 // block_size,
        )
        for stage in np.array_split(range(config.layers), pp)
        for rank in range(tp)
    ]


@functools.cache
def requirements(split: Split, block_size: int) -> Requirements:
    """The numerics probe once for each form of worker."""
    return ReferenceEngine(model(), layouts_of(*split, block_size)).requirements()


@dataclass
class Worker:
    """One engine over the pools of its ranks, each with an endpoint."""

    engine: ReferenceEngine
    endpoints: list[Endpoint]

    @functools.cached_property
    def group(self) -> RankGroup:
        return RankGroup(self.endpoints)

    def by_rank(self, tables: tuple) -> list[tuple]:
        """A block is the same number at every rank of this engine."""
        return [tables] * len(self.endpoints)

    @property
    def is_idle(self) -> bool:
        held = [(s.transfers, s.holds, s.grants, s.copies) for s in (e.stats() for e in self.endpoints)]
        pool = self.engine.pool
        return not np.any(held) and pool.num_free_blocks == pool.group.num_blocks


Opened = Callable[..., Worker]


@pytest.fixture
def worker(opened: Callable[..., Endpoint]) -> Opened:
    """Make workers of the one model; all is closed when the test ends."""

    def make(split: Split, scheme: str = "shm", *, block_size: int = 16, **change: object) -> Worker:
        pools = [Pool.allocate(layout) for layout in layouts_of(*split, block_size)]
        engine = ReferenceEngine(
            model(), [pool.layout for pool in pools], [pool.array for pool in pools], chunk_tokens=CHUNK
        )
        shuffled = np.random.default_rng(next(_names)).permutation(
            engine.pool.allocate(engine.pool.num_free_blocks)
        )
        engine.pool.free(shuffled)
        needs = msgspec.structs.replace(requirements(split, block_size), **change)
        endpoints = [
            opened(
                pool.layout,
                unique_address(scheme),
                pool=pool,
                requirements=needs,
            )
            for pool in pools
        ]
        return Worker(engine, endpoints)

    return make


@functools.cache
def alone(temperature: float) -> tuple[tuple[object, ...], ...]:
    """The same request in one engine of one rank, from a pool that has never heard of a handoff."""
    engine = ReferenceEngine(model(), layouts_of(1, 1, 16)[0], chunk_tokens=CHUNK)
    engine.submit("alone", prompt(TOKENS), sampling_of(temperature), limits(STEPS))
    while not engine.prefill("alone"):
        pass
    return tuple(seen(take(engine, "alone", 999)))


def sampling_of(temperature: float) -> SamplingParameters:
    return SAMPLED if temperature else GREEDY


def prefill(source: Worker, temperature: float, *, steps: int = 0) -> list[StepOutput]:
    source.engine.submit("r", prompt(TOKENS), sampling_of(temperature), limits(STEPS))
    while not source.engine.prefill("r"):
        pass
    return take(source.engine, "r", steps)


def offer(source: Worker, claims: int, state: ExecutionState | None = None) -> bytes:
    state = state or source.engine.export_state("r", Exactness.BITS)
    return source.group.offer(state, source.by_rank(source.engine.tables("r")), claims=claims)


def finish(source: Worker, target: Worker, move: GroupMove, tables: tuple, bundle: bytes) -> list[StepOutput]:
    """Import, say started, let prefill forget, decode to the end."""
    outcome = source.group.outcome(bundle)
    state = move.result()
    assert state is not None
    target.engine.import_state(state, tables)
    move.started()
    assert outcome.result(5).nbytes == move.record.nbytes
    source.engine.release("r")
    after = take(target.engine, "r", 999)
    target.engine.release("r")
    return after


SPLITS: list[tuple[Split, Split]] = [
    ((3, 1), (1, 1)),
    ((1, 1), (3, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (1, 2)),
    ((3, 2), (1, 1)),
    ((3, 1), (1, 3)),
    ((6, 1), (3, 1)),
]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_pulled_it_is_the_same(worker: Opened, splits: tuple[Split, Split]) -> None:
    """TP 3 -> 1, 1 -> 3, PP, both, replicated heads: one process's tokens and bits, and each byte once."""
    source, target = worker(splits[0]), worker(splits[1], block_size=32)
    for temperature, steps in ((0.0, 0), (1.2, 3)):
        before = prefill(source, temperature, steps=steps)
        bundle = offer(source, len(target.endpoints))
        tables = target.engine.allocate(read_bundle(bundle).tokens + 2)
        move = target.group.pull(bundle, target.by_rank(tables))
        after = finish(source, target, move, tables, bundle)
        assert tuple(seen(before + after)) == alone(temperature)
        config, tokens = model().config, read_bundle(bundle).tokens
        assert move.record.nbytes == tokens * config.layers * 2 * config.kv_heads * config.head_dim * 4
    wait_until(lambda: source.is_idle and target.is_idle)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_pushed_while_prefill_computes_it_is_the_same(worker: Opened, splits: tuple[Split, Split]) -> None:
    """Each layer of each chunk leaves every rank out of prefill's own callback; one commit closes it."""
    source, target = worker(splits[0], "tcp"), worker(splits[1], "tcp", block_size=32)
    tables = target.engine.allocate(TOKENS + 1)
    bundle = target.group.reserve("r", TOKENS, target.by_rank(tables), claims=len(source.endpoints))
    move = target.group.arrival(bundle)
    source.engine.submit("r", prompt(TOKENS), SAMPLED, limits(STEPS))
    push = source.group.push(bundle, source.by_rank(source.engine.tables("r")), tokens=TOKENS)
    done = False
    while not done:
        first = source.engine.request("r").kv_tokens
        tokens = {"first_token": first, "stop_token": min(first + CHUNK, TOKENS)}

        def layer_is_final(layer: int, tokens: dict[str, int] = tokens) -> None:
            push.layers(layer, layer + 1, **tokens)

        done = source.engine.prefill("r", layer_is_final)
    push.commit(source.engine.export_state("r", Exactness.BITS))
    assert tuple(seen(finish(source, target, move, tables, bundle))) == alone(1.2)
    wait_until(lambda: source.is_idle and target.is_idle)


@pytest.mark.parametrize("split", [(3, 1), (1, 4), (6, 2)], ids=str)
def test_the_split_changes_no_bit(split: Split) -> None:
    """An engine over several ranks says what one over a single rank says, without any handoff."""
    engine = ReferenceEngine(model(), layouts_of(*split, 16), chunk_tokens=CHUNK)
    engine.submit("r", prompt(TOKENS), SAMPLED, limits(STEPS))
    while not engine.prefill("r"):
        pass
    assert tuple(seen(take(engine, "r", 999))) == alone(1.2)
    parallel = engine.requirements().fingerprint.parallel
    assert (parallel.tp, parallel.pp, len(parallel.ranks)) == (*split, split[0] * split[1])


@pytest.mark.parametrize("splits", [((3, 1), (1, 1)), ((1, 1), (3, 1))], ids=str)
def test_one_rank_that_fails_leaves_the_request_at_prefill(
    worker: Opened, splits: tuple[Split, Split]
) -> None:
    """A rank's blocks are zeroed after the export: refused, nothing held at decode; prefill decodes on."""
    source, target = worker(splits[0]), worker(splits[1])
    prefill(source, 1.2)
    bundle = offer(source, len(target.endpoints))
    wait_until(lambda: not any(endpoint.stats().digesting for endpoint in source.endpoints))
    memory = source.engine.memories[-1]
    saved = memory.copy()
    memory[:] = 0
    tables = target.engine.allocate(TOKENS + 1)
    with pytest.raises(CorruptError, match=r"source rank \d to destination rank \d: .*digest"):
        target.group.pull(bundle, target.by_rank(tables)).result()
    target.engine.free(tables)
    wait_until(lambda: target.is_idle)
    memory[:] = saved
    assert tuple(seen(take(source.engine, "r", 999))) == alone(1.2)
    source.group.withdraw(bundle)  # a rank that had not claimed yet when another failed never does
    source.engine.release("r")
    wait_until(lambda: source.is_idle)


@pytest.mark.parametrize("held", [16, 64, TOKENS])
def test_only_the_rest_moves_after_a_prefix_hit(worker: Opened, held: int) -> None:
    """Decode names the prefix that all its ranks hold: the rest of each rank moves, or the state alone."""
    source, target = worker((3, 1)), worker((1, 2), block_size=32)
    before = prefill(source, 1.2)
    tables = target.engine.allocate(TOKENS + 1)
    salt = prefix_salt(target.engine.requirements().fingerprint)
    for hold in (0, held):  # what the first one brought is there for the second
        bundle = offer(source, 2)
        have = hold_prefix(np.array(prompt(TOKENS))[:hold], 1, salt)
        move = target.group.pull(bundle, target.by_rank(tables), have=have)
        state = move.result()
        config = model().config
        row_nbytes = config.layers * 2 * config.kv_heads * config.head_dim * 4
        assert move.record.nbytes == (TOKENS - hold) * row_nbytes
        move.started()
    assert state is not None
    target.engine.import_state(state, tables)
    assert tuple(seen(before + take(target.engine, "r", 999))) == alone(1.2)


def test_a_second_handoff_of_one_export_is_refused(worker: Opened) -> None:
    """A state that became visible once does not do so again, at any rank."""
    source, target = worker((3, 1)), worker((1, 1))
    prefill(source, 0.0)
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(TOKENS + 1)
    move = target.group.pull(bundle := offer(source, 1, state), target.by_rank(tables))
    move.result()
    move.started()
    source.group.outcome(bundle).result(5)
    with pytest.raises(PeerError, match=r"destination rank 0: .*transfer_id"):
        target.group.pull(offer(source, 1, state), target.by_rank(tables)).result()


def test_ranks_that_bring_unlike_states_are_refused(worker: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """One source rank shows the state of another moment: each passes by itself, together they do not."""
    source, target = worker((3, 1)), worker((1, 1))
    prefill(source, 0.0)
    for_pair = group._for_pair

    def other(state: ExecutionState, src_rank: int, dst_rank: int) -> ExecutionState | None:
        shifted = msgspec.structs.replace(state, created_unix_ns=state.created_unix_ns + (src_rank == 2))
        return for_pair(shifted, src_rank, dst_rank)

    monkeypatch.setattr(group, "_for_pair", other)
    tables = target.engine.allocate(TOKENS + 1)
    with pytest.raises(PeerError, match="another state"):
        target.group.pull(offer(source, 1), target.by_rank(tables)).result()
    source.engine.release("r")
    target.engine.free(tables)
    wait_until(lambda: source.is_idle and target.is_idle)


def test_bits_need_a_split_that_is_proven(worker: Opened) -> None:
    """An engine that has not shown that a split keeps its bits refuses another, before a byte moves."""
    source = worker((3, 1))
    target = worker((1, 1), proven=(Conversion.LAYOUT, Conversion.BLOCK_TOKENS))
    prefill(source, 0.0)
    tables = target.engine.allocate(TOKENS + 1)
    with pytest.raises(IncompatibleError, match="parallel"):
        target.group.pull(offer(source, 1), target.by_rank(tables)).result()
    assert not target.engine.memory.any()


def in_two_groups(records: Sequence[object]) -> tuple[object, ...]:
    """Tensors or tensor needs: layers 0 and 1 in a group "front", 2 and 3 in a group "back"."""
    return tuple(msgspec.structs.replace(r, group="front" if r.layer < 2 else "back") for r in records)


def both(record: object) -> tuple[object, ...]:
    """A block table or a group need, once for each of the two groups."""
    return tuple(msgspec.structs.replace(record, group=name) for name in ("front", "back"))


def test_stages_that_hold_other_layer_groups(opened: Callable[..., Endpoint]) -> None:
    """A group of layers that lies at one stage only: asked for there, and nowhere else; missing, refused."""
    engine = ReferenceEngine(model(), layouts_of(1, 1, 16), chunk_tokens=CHUNK)
    engine.submit("r", prompt(TOKENS), GREEDY, limits(STEPS))
    while not engine.prefill("r"):
        pass
    state, needs = engine.export_state("r", Exactness.BITS), engine.requirements()
    state = msgspec.structs.replace(state, tensors=in_two_groups(state.tensors), blocks=both(state.blocks[0]))
    needs = msgspec.structs.replace(needs, cache=in_two_groups(needs.cache), groups=both(needs.groups[0]))
    stages = [
        PoolLayout((msgspec.structs.replace(layout.groups[0], name=name),), layout.nbytes)
        for layout, name in zip(layouts_of(1, 2, 16), ("front", "back"), strict=True)
    ]
    endpoints = [
        opened(layout, "tcp://127.0.0.1:0", requirements=needs)
        for layout in (PoolLayout.beside(*stages), *stages)
    ]
    whole, split = RankGroup(endpoints[:1]), RankGroup(endpoints[1:])
    (table,) = engine.tables("r")
    (room,) = engine.allocate(TOKENS + 6)
    fill_random(endpoints[0].pool, 1)

    def pull(source: RankGroup, target: RankGroup, theirs: list[Any], ours: object) -> int:
        front = theirs[0][0] if isinstance(theirs[0], list) else theirs[0]
        front = type(front)(0, front.ids[: -(-TOKENS // 16)])
        blocks = [
            GroupBlocks.of(blocks.group, front, block_tokens=blocks.block_tokens, layout=blocks.layout)
            for blocks in state.blocks
        ]
        fresh = msgspec.structs.replace(state, transfer_id=secrets.token_bytes(16), blocks=tuple(blocks))
        bundle = source.offer(fresh, theirs, claims=len(target.layouts))
        move = target.pull(bundle, ours)
        move.result()
        move.started()
        source.outcome(bundle).result(5)
        return move.record.nbytes

    config = model().config
    nbytes = TOKENS * config.layers * 2 * config.kv_heads * config.head_dim * 4
    assert pull(whole, split, [[table, table]], [room, room]) == nbytes
    assert pull(split, whole, [room, room], [[table, table]]) == nbytes
    short = type(room)(0, room.ids[: TOKENS // 16])
    with pytest.raises(InputError, match=r"destination rank 1: .*needs blocks"):
        pull(whole, split, [[table, table]], [room, short])
    with pytest.raises(InputError, match="no rank holds the layer group 'back'"):
        RankGroup(endpoints[1:2])


def test_ranks_of_unlike_engines_are_no_group(worker: Opened) -> None:
    """Endpoints whose engines need unlike things are refused as one worker."""
    one, other = worker((1, 1)), worker((1, 1), sections=("native:other",))
    with pytest.raises(InputError, match="same requirements"):
        RankGroup([one.endpoints[0], other.endpoints[0]])


def test_layouts_that_are_not_the_models_ranks() -> None:
    """Heads or layers that no rank holds, unlike block sizes, too few memories: LocalError."""
    three = layouts_of(3, 1, 16)
    for bad in (three[:2], layouts_of(1, 2, 16)[1:], [*three[:2], layouts_of(3, 1, 32)[2]]):
        with pytest.raises(LocalError, match=r"not that of tiny|all ranks need one"):
            ReferenceEngine(model(), bad)
    with pytest.raises(LocalError, match="2 arrays for 3"):
        ReferenceEngine(model(), three, [np.zeros(layout.nbytes, np.uint8) for layout in three[:2]])
    engine = ReferenceEngine(model(), three)
    assert [memory.nbytes for memory in engine.memories] == [layout.nbytes for layout in engine.layouts]
    for one in ("layout", "memory"):
        with pytest.raises(LocalError, match="3 ranks"):
            getattr(engine, one)
