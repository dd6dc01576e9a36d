"""The whole state through endpoints: drafts, grammar, parts that leave early, what follows a failure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from conftest import QUICK, unique_address, wait_until
from kvferry.engines.reference import FinishReason, GrammarKind, GrammarText, ReferenceEngine, StepOutput
from kvferry.errors import CapacityError, IncompatibleError, LocalError
from kvferry.protocol.prefix import HeldPrefix, hold_prefix, prefix_salt
from kvferry.protocol.ticket import Mode
from kvferry.state import Exactness, SamplingParameters
from kvferry.transfer import Endpoint, Move, Pool, ledger
from kvferry.transfer.retry import NextTry, advice
from reference_kit import (
    GREEDY,
    SAMPLED,
    Layout,
    copy_kv,
    limits,
    make_engine,
    pool_layout,
    prompt,
    seen,
    take,
    text_of,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

SCHEMES = ("shm", "tcp")
TOKENS, STEPS, CHUNK = 75, 60, 32
SCHEMA = GrammarText(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 9},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
)
HERE, UNLIKE = Layout(draft_layers=3), Layout(32, "HND", joined_kv=True, draft_layers=3)
_names = itertools.count()


@dataclass
class Worker:
    """An engine that drafts, with its pool and endpoint."""

    engine: ReferenceEngine
    endpoint: Endpoint

    @property
    def is_idle(self) -> bool:
        stats = self.endpoint.stats()
        free = self.engine.pool.num_free_blocks == self.engine.pool.group.num_blocks
        return free and (stats.transfers, stats.holds, stats.grants, stats.copies) == (0, 0, 0, 0)


@pytest.fixture
def worker(opened: Callable[..., Endpoint]) -> Callable[..., Worker]:
    """Make workers; all is closed when the test ends."""

    def make(scheme: str, layout: Layout = HERE, *, process: bool = False) -> Worker:
        pool = Pool.allocate(pool_layout(layout))
        engine = make_engine(layout, chunk_tokens=CHUNK, num_drafts=4, memory=pool.array)
        needs = engine.requirements()
        endpoint = opened(
            pool.layout,
            unique_address(scheme),
            pool=pool,
            requirements=needs,
            process=process,
            timeouts=QUICK,
            name=f"worker-{next(_names)}",
        )
        return Worker(engine, endpoint)

    return make


def submit(engine: ReferenceEngine, sampling: SamplingParameters) -> None:
    """A request with a grammar."""
    engine.submit("r", prompt(TOKENS), sampling, limits(STEPS, ignore_eos=False), SCHEMA)


def alone(sampling: SamplingParameters) -> list[StepOutput]:
    """The same request in one engine, from a pool that has never heard of a handoff."""
    engine = make_engine(HERE, chunk_tokens=CHUNK, num_drafts=4)
    submit(engine, sampling)
    while not engine.prefill("r"):
        pass
    return take(engine, "r", STEPS)


def begin(source: Worker, target: Worker, mode: Mode, have: HeldPrefix | None = None) -> tuple[Move, tuple]:
    """Start the move of what the source has prefilled; returns decode's future and its blocks."""
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(state.kv_tokens + 2)
    if mode is Mode.PULL:
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
        return target.endpoint.pull(ticket, tables, have=have), tables
    ticket = target.endpoint.reserve("r", state.kv_tokens, tables, have=have)
    move = target.endpoint.arrival(ticket)
    push = source.endpoint.push(ticket, source.engine.tables("r"), state=state)
    push.layers(0, 4 + 3)
    push.commit(state)
    return move, tables


def finish(source: Worker, target: Worker, begun: tuple[Move, tuple]) -> list[StepOutput]:
    """Import, go on to the end; both sides hold nothing then."""
    move, tables = begun
    state = move.result()
    assert state is not None
    target.engine.import_state(state, tables)
    move.started()
    after = take(target.engine, "r", STEPS)
    for side in (source, target):
        side.engine.release("r")
        wait_until(lambda side=side: side.is_idle)
    return after


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("scheme", SCHEMES)
def test_drafts_and_grammar_go_on_bit_by_bit(
    worker: Callable[..., Worker], scheme: str, mode: Mode, pending: bool
) -> None:
    """Between rounds and with drafts pending, inside a JSON string, into an unlike pool."""
    source, target = worker(scheme), worker(scheme, UNLIKE)
    submit(source.engine, SAMPLED)
    while not source.engine.prefill("r"):
        pass
    before = [output for _ in range(6) for output in source.engine.step(["r"])]
    if pending:
        source.engine.draft(["r"])
    outputs = before + finish(source, target, begin(source, target, mode))
    assert outputs[-1].finish is FinishReason.GRAMMAR
    assert json.loads(text_of(outputs)).keys() == {"name", "n"}
    assert seen(outputs) == seen(alone(SAMPLED))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parts_arrive_while_prefill_computes_and_nothing_is_visible(
    worker: Callable[..., Worker], scheme: str
) -> None:
    """By chunk and layer: its bytes lie at decode before prefill goes on; one commit shows all of it."""
    source, target = worker(scheme), worker(scheme, UNLIKE)
    tables = target.engine.allocate(TOKENS + 1)
    ticket = target.endpoint.reserve("r", TOKENS, tables)
    move = target.endpoint.arrival(ticket)
    submit(source.engine, GREEDY)
    request = source.engine.request("r")
    push = source.endpoint.push(ticket, source.engine.tables("r"), tokens=TOKENS)

    def has_arrived(layers: int, tokens: int) -> bool:
        """K and V of these layers and tokens are in decode's pool."""
        return all(
            ours.tobytes() == theirs.tobytes()
            for layer in range(layers)
            for ours, theirs in zip(
                source.engine.pool.read(layer, request.table, tokens),
                target.engine.pool.read(layer, tables[0], tokens),
                strict=True,
            )
        )

    calls = []
    while not request.is_prefilled:
        first, stop = request.kv_tokens, min(request.kv_tokens + CHUNK, TOKENS)

        def is_final(layer: int, first: int = first, stop: int = stop) -> None:
            push.layers(layer, layer + 1, first_token=first, stop_token=stop)
            wait_until(lambda: has_arrived(layer + 1, stop))
            calls.append((layer, stop))
            assert not move.arrival.done()
            assert "r" not in target.engine._requests

        source.engine.prefill("r", is_final)
    assert calls == [(layer, stop) for stop in (32, 64, TOKENS) for layer in range(4 + 3)]
    push.commit(source.engine.export_state("r", Exactness.BITS))
    assert seen(finish(source, target, (move, tables))) == seen(alone(GREEDY))


@pytest.mark.parametrize("mode", list(Mode))
def test_a_prefix_hit_is_of_the_draft_cache_too(worker: Callable[..., Worker], mode: Mode) -> None:
    """What decode holds of both groups stays; the rest moves; drafts go on exactly."""
    held, bs1 = 48, Layout(1, draft_layers=3)
    source, target = worker("shm"), worker("shm", bs1)
    submit(source.engine, SAMPLED)
    while not source.engine.prefill("r"):
        pass
    before = source.engine.step(["r"])
    tables = target.engine.allocate(TOKENS + 2)
    copy_kv(source.engine, target.engine, "r", tables)
    for layer in range(4 + 3):  # the rest is as good as empty
        keys, _ = target.engine.pool.read(layer, tables[0], TOKENS)
        zeros = keys.transpose(1, 0, 2)[held:] * 0
        target.engine.pool.write(layer, tables[0], held, zeros, zeros)
    target.engine.free(tables)
    have = hold_prefix(prompt(TOKENS)[:held], 1, prefix_salt(target.engine.requirements().fingerprint))
    begun = begin(source, target, mode, have)
    assert sorted(begun[1][0].ids) == sorted(tables[0].ids)
    begun[0].result()
    assert begun[0].record.nbytes == (TOKENS - held) * (4 + 3) * 2 * 2 * 16 * 4
    assert seen(before + finish(source, target, begun)) == seen(alone(SAMPLED))


def test_a_decode_that_does_not_draft_is_refused_before_a_byte_moves(
    worker: Callable[..., Worker], opened: Callable[..., Endpoint]
) -> None:
    """It names what differs; the source still has the request, and another worker takes it."""
    source, other = worker("tcp"), worker("tcp", UNLIKE)
    pool = Pool.allocate(pool_layout(Layout()))
    plain = make_engine(Layout(), memory=pool.array)
    endpoint = opened(
        pool.layout, unique_address("tcp"), pool=pool, requirements=plain.requirements(), name="plain"
    )
    submit(source.engine, SAMPLED)
    while not source.engine.prefill("r"):
        pass
    before = source.engine.step(["r"])
    source.engine.draft(["r"])
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = source.endpoint.offer(state, source.engine.tables("r"))
    tables = plain.allocate(TOKENS + 2)
    with pytest.raises(IncompatibleError, match="draft"):
        endpoint.pull(ticket, tables).result()
    assert not pool.array.any()
    plain.free(tables)
    wait_until(lambda: source.endpoint.stats().transfers == 0)
    assert seen(before + finish(source, other, begin(source, other, Mode.PULL))) == seen(alone(SAMPLED))


def test_a_busy_decode_says_when_and_the_reservation_stays_good(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push is told to come back, with the seconds; the same ticket then works."""
    source, target = worker("tcp"), worker("tcp", UNLIKE)
    submit(source.engine, GREEDY)
    while not source.engine.prefill("r"):
        pass
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(TOKENS + 1)
    ticket = target.endpoint.reserve("r", TOKENS, tables)
    move = target.endpoint.arrival(ticket)
    with monkeypatch.context() as patch:
        patch.setattr(ledger.Ledger, "num_working", property(lambda _: 64))
        push = source.endpoint.push(ticket, source.engine.tables("r"), state=state)
        outcome = source.endpoint.outcome(ticket)
        with pytest.raises(CapacityError, match="no room now") as caught:
            outcome.result(10)
    assert caught.value.retry_after_seconds == 0.05
    assert advice(caught.value, 1, 1.0).next_try is NextTry.RETRY_SAME
    push = source.endpoint.push(ticket, source.engine.tables("r"), state=state)
    push.layers(0, 4 + 3)
    push.commit(state)
    assert seen(finish(source, target, (move, tables))) == seen(alone(GREEDY))


def test_recomputed_where_no_peer_can_help(worker: Callable[..., Worker]) -> None:
    """Decode's own transfer process is gone: the advice is to recompute, and the output is the same."""
    source, target = worker("tcp", process=True), worker("tcp", UNLIKE, process=True)
    submit(source.engine, SAMPLED)
    while not source.engine.prefill("r"):
        pass
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = source.endpoint.offer(state, source.engine.tables("r"))
    tables = target.engine.allocate(TOKENS + 1)
    target.endpoint.close()
    with pytest.raises(LocalError) as caught:
        target.endpoint.pull(ticket, tables).result()
    assert advice(caught.value, 1, 10.0).next_try is NextTry.RECOMPUTE
    target.engine.free(tables)
    source.endpoint.withdraw(ticket)
    source.engine.release("r")
    wait_until(lambda: source.is_idle)
    submit(target.engine, SAMPLED)
    while not target.engine.prefill("r"):
        pass
    assert seen(take(target.engine, "r", STEPS)) == seen(alone(SAMPLED))
