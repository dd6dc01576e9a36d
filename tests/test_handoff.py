"""The main job: a request prefilled here decodes on there, by every transport and mode, as in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest

from conftest import QUICK, unique_address, wait_until
from kvferry.engines.reference import FinishReason, ReferenceEngine, StepOutput, tiny_model
from kvferry.errors import (
    CapacityError,
    CorruptError,
    DeadlineError,
    IncompatibleError,
    KVFerryError,
    PeerError,
    TransportError,
)
from kvferry.layout import PoolLayout, source_pieces
from kvferry.protocol.messages import Abort, Aborted, Message
from kvferry.protocol.prefix import hold_prefix, prefix_salt
from kvferry.state import Exactness, Limits, SamplingParameters
from kvferry.transfer import Endpoint, Move, Pool
from kvferry.transfer.peer import Peer
from kvferry.transport.base import Arrived, Copy
from kvferry.transport.shm import ShmConnection
from reference_kit import GREEDY, PENALISED, SAMPLED, copy_kv, limits, prompt, seen, take, text_of, tiny

pytestmark = pytest.mark.usefixtures("nothing_left")

SCHEMES, MODES = ("shm", "tcp"), ("push", "pull")
STEPS = 20
_names = itertools.count()
Opened = Callable[..., "Worker"]


@dataclass
class Worker:
    """One engine with its pool and endpoint."""

    engine: ReferenceEngine
    endpoint: Endpoint

    @property
    def is_idle(self) -> bool:
        stats = self.endpoint.stats()
        free = self.engine.pool.num_free_blocks == self.engine.pool.group.num_blocks
        return free and (stats.transfers, stats.holds, stats.grants, stats.copies) == (0, 0, 0, 0)


@pytest.fixture
def worker(opened: Callable[..., Endpoint]) -> Opened:
    """Make workers of one tiny model; all is closed when the test ends."""
    return make_workers(opened)


def make_workers(opened: Callable[..., Endpoint]) -> Opened:
    """What the fixture gives, for other modules' fixtures."""

    def make(
        scheme: str, *, block_size: int = 16, seed: int = 0, num_tokens: int = 2048, process: bool = False
    ) -> Worker:
        model = tiny(seed)
        layout = PoolLayout.paged(
            range(model.config.layers),
            kv_heads=model.config.kv_heads,
            head_dim=model.config.head_dim,
            dtype="float32",
            block_size=block_size,
            num_blocks=num_tokens // block_size,
        )
        pool = Pool.allocate(layout)
        engine = ReferenceEngine(model, layout, pool.array, chunk_tokens=32)
        shuffled = np.random.default_rng(next(_names)).permutation(
            engine.pool.allocate(engine.pool.num_free_blocks)
        )
        engine.pool.free(shuffled)
        address = unique_address(scheme)
        endpoint = opened(
            layout, address, pool=pool, requirements=engine.requirements(), process=process, timeouts=QUICK
        )
        return Worker(engine, endpoint)

    return make


def prefill(
    worker: Worker, name: str, tokens: int, sampling: SamplingParameters, given: Limits, *, steps: int = 0
) -> list[StepOutput]:
    """Prefill a request, and decode some tokens of it at the prefill worker already."""
    worker.engine.submit(name, prompt(tokens), sampling, given)
    while not worker.engine.prefill(name):
        pass
    return take(worker.engine, name, steps)


def begin(source: Worker, target: Worker, name: str, mode: str) -> tuple[Move, tuple, object]:
    """Start the move of a prefilled request; returns decode's future, its blocks, and prefill's outcome."""
    tokens = source.engine.request(name).kv_tokens
    state = source.engine.export_state(name, Exactness.BITS)
    tables = target.engine.allocate(len(state.tokens.ids) // 4 + 1)
    if mode == "pull":
        ticket = source.endpoint.offer(state, source.engine.tables(name))
        return target.endpoint.pull(ticket, tables), tables, source.endpoint.outcome(ticket)
    ticket = target.endpoint.reserve(name, tokens, tables)
    move = target.endpoint.arrival(ticket)
    push = source.endpoint.push(ticket, source.engine.tables(name), tokens=tokens, state=state)
    outcome = source.endpoint.outcome(ticket)
    for layer in range(source.engine.model.config.layers):
        push.layer(layer)
    push.commit(state)
    return move, tables, outcome


def finish(source: Worker, target: Worker, name: str, begun: tuple[Move, tuple, object]) -> None:
    """Import what arrived, say started, and let prefill forget it."""
    move, tables, outcome = begun
    state = move.result()
    assert state is not None
    target.engine.import_state(state, tables)
    move.started()
    outcome.result(5)  # type: ignore[attr-defined]
    source.engine.release(name)


def alone(tokens: int, sampling: SamplingParameters, given: Limits) -> list[StepOutput]:
    """The same request in one engine, from a pool that has never heard of a handoff."""
    model = tiny()
    layout = PoolLayout.paged(
        range(model.config.layers),
        kv_heads=model.config.kv_heads,
        head_dim=model.config.head_dim,
        dtype="float32",
        block_size=16,
        num_blocks=64,
    )
    engine = ReferenceEngine(model, layout, chunk_tokens=32)
    engine.submit("alone", prompt(tokens), sampling, given)
    while not engine.prefill("alone"):
        pass
    return take(engine, "alone", 999)


@pytest.mark.parametrize("block_sizes", [(16, 16), (32, 32), (16, 32), (32, 16)])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_tokens_and_bits_as_one_process(
    worker: Opened, scheme: str, mode: str, block_sizes: tuple[int, int]
) -> None:
    """Greedy, sampled and penalised requests continue with the tokens and logits bits of one process."""
    source = worker(scheme, block_size=block_sizes[0])
    target = worker(scheme, block_size=block_sizes[1])
    for name, sampling, steps in (("a", GREEDY, 0), ("b", SAMPLED, 1), ("c", PENALISED, 9)):
        before = prefill(source, name, 75, sampling, limits(STEPS), steps=steps)
        finish(source, target, name, begin(source, target, name, mode))
        after = take(target.engine, name, 999)
        assert seen(before + after) == seen(alone(75, sampling, limits(STEPS))), name
        target.engine.release(name)
    assert source.is_idle
    wait_until(lambda: target.is_idle)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_with_transfer_processes(worker: Opened, scheme: str, mode: str) -> None:
    """The same with each endpoint's node in a process of its own."""
    source, target = worker(scheme, process=True), worker(scheme, process=True)
    before = prefill(source, "r", 75, SAMPLED, limits(STEPS), steps=2)
    finish(source, target, "r", begin(source, target, "r", mode))
    assert seen(before + take(target.engine, "r", 999)) == seen(alone(75, SAMPLED, limits(STEPS)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_several_requests_in_flight(worker: Opened, scheme: str, mode: str) -> None:
    """Five requests move at once, are imported in another order, decode as one batch, and none notices."""
    source, target = worker(scheme), worker(scheme)
    requests = {f"r{n}": (40 + 9 * n, (GREEDY, SAMPLED, PENALISED)[n % 3], n) for n in range(5)}
    got = {}
    for name, (tokens, sampling, steps) in requests.items():
        got[name] = prefill(source, name, tokens, sampling, limits(STEPS), steps=steps)
    begun = {name: begin(source, target, name, mode) for name in requests}
    for name in reversed(begun):
        finish(source, target, name, begun[name])
    while outputs := target.engine.step():
        for output in outputs:
            got[output.request_id].append(output)
    for name, (tokens, sampling, _) in requests.items():
        assert seen(got[name]) == seen(alone(tokens, sampling, limits(STEPS)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stop_string_half_matched_when_it_moves(worker: Opened, scheme: str, mode: str) -> None:
    """The first half of a stop string comes from prefill, the second from decode: it still stops."""
    text = text_of(alone(75, SAMPLED, limits(STEPS)))
    given = limits(STEPS, stop_strings=(text[5:9],))
    expected = alone(75, SAMPLED, given)
    assert expected[-1].finish is FinishReason.STOP_STRING
    source, target = worker(scheme), worker(scheme)
    before = prefill(source, "r", 75, SAMPLED, given, steps=len(expected) - 2)
    finish(source, target, "r", begin(source, target, "r", mode))
    assert seen(before + take(target.engine, "r", 999)) == seen(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_other_weights_are_refused_before_a_byte_moves(worker: Opened, scheme: str, mode: str) -> None:
    """A decode worker with other weights: refused by name at the handshake; nothing is held after it."""
    source, target = worker(scheme), worker(scheme, seed=1)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    with pytest.raises(IncompatibleError, match="weights") as caught:
        begin(source, target, "r", mode)[0].result()
    assert caught.value.bytes_done == 0
    assert not target.endpoint.pool.array.any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_zeroed_payload_is_refused(worker: Opened, scheme: str, mode: str) -> None:
    """Prefill's blocks are zeroed between export and move: refused by the digest, and nothing stays held."""
    source, target = worker(scheme), worker(scheme)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(76)
    if mode == "pull":
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
        source.engine.memory[:] = 0
        move = target.endpoint.pull(ticket, tables)
    else:
        ticket = target.endpoint.reserve("r", 75, tables)
        move = target.endpoint.arrival(ticket)
        push = source.endpoint.push(ticket, source.engine.tables("r"), tokens=75, state=state)
        push.layers(0, 4)
        source.engine.memory[:] = 0
        push.commit(state)
    with pytest.raises(CorruptError, match="digest"):
        move.result()
    source.engine.release("r")
    target.engine.free(tables)
    wait_until(lambda: source.is_idle and target.is_idle)


def test_the_reason_is_told_also_when_the_data_path_was_faster(
    worker: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill gives up; decode's copy is refused before prefill's Abort is read: decode still says why."""
    source, target = worker("shm"), worker("shm")
    read, post, held = ShmConnection.read, Peer.post, []

    def read_too_late(connection: ShmConnection, copy: Copy) -> Arrived:
        wait_until(lambda: source.endpoint.stats().grants == 0)
        return read(connection, copy)

    def post_abort_late(peer: Peer, message: Message) -> None:
        if isinstance(message, Abort) and message.error.kind == "corrupt":
            held.append(message)
            return
        if held and isinstance(message, Aborted):  # decode has given up by now, and waits for this
            post(peer, held.pop())
        post(peer, message)

    monkeypatch.setattr(ShmConnection, "read", read_too_late)
    monkeypatch.setattr(Peer, "post", post_abort_late)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = target.endpoint.reserve("r", 75, target.engine.allocate(76))
    move = target.endpoint.arrival(ticket)
    push = source.endpoint.push(ticket, source.engine.tables("r"), tokens=75, state=state)
    push.layers(0, 4)
    source.engine.memory[:] = 0
    push.commit(state)
    with pytest.raises(CorruptError, match=r"gave up.*digest") as told:
        move.result()
    assert told.value.phase == "moving"
    assert not held


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decode_without_room(worker: Opened, scheme: str, mode: str) -> None:
    """No block for the next token: one CapacityError naming the group, nothing held on either side."""
    source, target = worker(scheme), worker(scheme)
    prefill(source, "r", 64, GREEDY, limits(STEPS))  # exactly four blocks: the next token needs a fifth
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(64)
    if mode == "pull":
        move = target.endpoint.pull(source.endpoint.offer(state, source.engine.tables("r")), tables)
    else:
        ticket = target.endpoint.reserve("r", 64, tables)
        move = target.endpoint.arrival(ticket)
        source.endpoint.push(ticket, source.engine.tables("r"), tokens=64, state=state)
    with pytest.raises(CapacityError, match="full"):
        move.result()
    source.engine.release("r")
    target.engine.free(tables)
    wait_until(lambda: source.is_idle and target.is_idle)
    with pytest.raises(CapacityError):
        target.engine.allocate(10**6)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_expired_ticket_is_refused(worker: Opened, scheme: str) -> None:
    """The lease ended before decode came: refused with the reason, nothing held on either side."""
    source, target = worker(scheme), worker(scheme)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = source.endpoint.offer(state, source.engine.tables("r"), lease_seconds=0.05)
    with pytest.raises(DeadlineError):
        source.endpoint.outcome(ticket).result(5)
    source.engine.release("r")
    tables = target.engine.allocate(76)
    with pytest.raises(DeadlineError, match="no longer good"):
        target.endpoint.pull(ticket, tables).result()
    target.engine.free(tables)
    assert source.is_idle
    assert target.is_idle


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peer_gone(worker: Opened, scheme: str) -> None:
    """Prefill is gone when decode pulls, and decode when prefill pushes: one error, nothing held."""
    source, target = worker(scheme), worker(scheme)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = source.endpoint.offer(state, source.engine.tables("r"))
    tables = target.engine.allocate(76)
    into = target.endpoint.reserve("r", 75, tables)
    source.endpoint.close()
    with pytest.raises(TransportError):
        target.endpoint.pull(ticket, tables).result()
    target.endpoint.withdraw(into)
    target.engine.free(tables)
    assert target.is_idle
    third = worker(scheme)
    prefill(third, "r", 75, GREEDY, limits(STEPS))
    target.endpoint.close()
    with pytest.raises(TransportError):
        third.endpoint.push(into, third.engine.tables("r"), tokens=75)
    third.engine.release("r")
    assert third.is_idle


@pytest.mark.parametrize("mode", MODES)
def test_an_import_that_refuses_frees_both_sides(worker: Opened, mode: str) -> None:
    """Decode's engine refuses after the commit (the id is in use there): both sides get their blocks back."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    prefill(target, "r", 40, GREEDY, limits(STEPS))
    move, tables, outcome = begin(source, target, "r", mode)
    state = move.result()
    assert state is not None
    with pytest.raises(KVFerryError) as caught:
        target.engine.import_state(state, tables)
    move.abort(caught.value)
    with pytest.raises(KVFerryError, match="gave up"):
        outcome.result(5)  # type: ignore[attr-defined]
    target.engine.free(tables)
    for side in (source, target):
        side.engine.release("r")
    wait_until(lambda: source.is_idle and target.is_idle)


def test_a_state_of_another_transfer_is_refused(worker: Opened) -> None:
    """A second handoff under an id that was visible already is refused: visible exactly once."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    for expected in (None, PeerError):
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
        tables = target.engine.allocate(76)
        move = target.endpoint.pull(ticket, tables)
        if expected is None:
            move.result()
            move.started()
            source.endpoint.outcome(ticket).result(5)
        else:
            with pytest.raises(expected, match="transfer_id"):
                move.result()


def test_the_tiny_model_is_not_the_only_one_that_was_thought_of() -> None:
    """Three KV heads, as SmolLM2 has, are a tiny model too."""
    assert tiny_model(0, kv_heads=3).config.kv_heads == 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("held", [0, 16, 48, 75])
def test_only_the_rest_moves_after_a_prefix_hit(worker: Opened, scheme: str, mode: str, held: int) -> None:
    """Decode names the prefix that it holds; the rest moves; the continuation is the same."""
    source, target = worker(scheme), worker(scheme, block_size=32 if held == 0 else 1)
    before = prefill(source, "r", 75, SAMPLED, limits(STEPS), steps=1)
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(77)
    copy_kv(source.engine, target.engine, "r", tables)
    if held < 75:  # the rest of the blocks is as good as empty
        for piece in zip(*_rest(target, tables, held), strict=True):
            target.engine.memory[piece[0] : piece[0] + piece[1]] = 0
    salt = prefix_salt(target.engine.requirements().fingerprint)
    have = hold_prefix(np.array(prompt(75))[:held], 1, salt)
    if mode == "pull":
        move = target.endpoint.pull(
            source.endpoint.offer(state, source.engine.tables("r")), tables, have=have
        )
    else:
        ticket = target.endpoint.reserve("r", 75, tables, have=have)
        move = target.endpoint.arrival(ticket)
        push = source.endpoint.push(ticket, source.engine.tables("r"), state=state)
        push.layers(0, 4)
        push.commit(state)
    assert move.result() is not None
    config = tiny().config
    assert move.record.nbytes == (75 - held) * config.layers * 2 * config.kv_heads * config.head_dim * 4
    target.engine.import_state(state, tables)
    move.started()
    assert seen(before + take(target.engine, "r", 999)) == seen(alone(75, SAMPLED, limits(STEPS)))


def _rest(target: Worker, tables: tuple, held: int) -> tuple[np.ndarray, np.ndarray]:
    pieces = source_pieces(target.engine.layout, tables, 75, first_token=held)
    return pieces.offset, pieces.nbytes


@pytest.mark.parametrize("pushed", [False, True])
def test_a_prefix_that_is_another_is_not_believed(worker: Opened, pushed: bool) -> None:
    """Decode names a prefix of other tokens: refused before a byte moves; the next try starts right."""
    source, target = worker("shm"), worker("shm")
    before = prefill(source, "r", 75, GREEDY, limits(STEPS), steps=1)
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(77)
    have = hold_prefix(np.arange(64), 16, prefix_salt(target.engine.requirements().fingerprint))
    if pushed:
        ticket = target.endpoint.reserve("r", 75, tables, have=have)
        move = target.endpoint.arrival(ticket)
        source.endpoint.push(ticket, source.engine.tables("r"), state=state)
    else:
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
        move = target.endpoint.pull(ticket, tables, have=have)
    with pytest.raises(PeerError, match="holds 64 tokens, of which 0 are known here"):
        move.result()
    assert not target.endpoint.pool.array.any()
    wait_until(lambda: target.endpoint.stats().transfers + source.endpoint.stats().transfers == 0)
    if pushed:
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
    move = target.endpoint.pull(ticket, tables)
    move.result()
    target.engine.import_state(state, tables)
    move.started()
    assert seen(before + take(target.engine, "r", 999)) == seen(alone(75, GREEDY, limits(STEPS)))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_each_chunk_leave_while_prefill_computes(worker: Opened, scheme: str) -> None:
    """A push by chunk and layer, out of prefill's own callback, is the same as one at the end."""
    source, target = worker(scheme), worker(scheme, block_size=32)
    tables = target.engine.allocate(76)
    ticket = target.endpoint.reserve("r", 75, tables)
    move = target.endpoint.arrival(ticket)
    source.engine.submit("r", prompt(75), SAMPLED, limits(STEPS))
    push = source.endpoint.push(ticket, source.engine.tables("r"), tokens=75)
    pushed = []
    done = False
    while not done:
        first = source.engine.request("r").kv_tokens
        stop = min(first + 32, 75)

        def layer_is_final(layer: int, first: int = first, stop: int = stop) -> None:
            push.layers(layer, layer + 1, first_token=first, stop_token=stop)
            pushed.append((layer, first, stop))

        done = source.engine.prefill("r", layer_is_final)
    push.commit(source.engine.export_state("r", Exactness.BITS))
    assert len(pushed) == 3 * tiny().config.layers
    state = move.result()
    assert state is not None
    target.engine.import_state(state, tables)
    move.started()
    assert seen(take(target.engine, "r", 999)) == seen(alone(75, SAMPLED, limits(STEPS)))


def test_a_state_of_another_length_is_refused_before_a_byte_moves(worker: Opened) -> None:
    """The record covers other tokens than were announced: refused, and nothing was written."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    ticket = source.endpoint.offer(state, source.engine.tables("r"), tokens=64)
    with pytest.raises(KVFerryError, match="64 were announced, the state covers 75"):
        target.endpoint.pull(ticket, target.engine.allocate(76)).result()
    assert not target.endpoint.pool.array.any()


def test_an_older_attempt_is_refused(worker: Opened) -> None:
    """After a newer attempt of a request was shown, an older one is refused."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    for attempt, refused in ((3, False), (2, True)):
        state = source.engine.export_state("r", Exactness.BITS)
        state = msgspec.structs.replace(state, attempt=attempt)
        ticket = source.endpoint.offer(state, source.engine.tables("r"))
        move = target.endpoint.pull(ticket, target.engine.allocate(76))
        if refused:
            with pytest.raises(KVFerryError, match="attempt is 2, expected at least 3"):
                move.result()
        else:
            move.result()
            move.started()


def test_a_chunk_that_moves_in_part_is_held_against_its_export(worker: Opened) -> None:
    """Decode holds a prefix, so chunks move in part; a block changed since export is refused still."""
    source, target = worker("tcp"), worker("tcp", block_size=1)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    tables = target.engine.allocate(77)
    have = hold_prefix(np.array(prompt(75))[:16], 1, prefix_salt(target.engine.requirements().fingerprint))
    ticket = source.endpoint.offer(state, source.engine.tables("r"))
    pieces = source_pieces(source.engine.layout, source.engine.tables("r"), 75, first_token=48)
    source.engine.memory[int(pieces.offset[0])] ^= 1
    with pytest.raises(CorruptError, match="digest"):
        target.endpoint.pull(ticket, tables, have=have).result()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_prefix_of_other_ids_than_the_states_is_not_left_out(worker: Opened, scheme: str) -> None:
    """Prefill pushed by other ids than its state has, which decode happens to hold: refused, not decoded."""
    source, target = worker(scheme), worker(scheme)
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    others = np.arange(100, 164)
    have = hold_prefix(others, 16, prefix_salt(target.engine.requirements().fingerprint))
    ticket = target.endpoint.reserve("r", 75, target.engine.allocate(77), have=have)
    move = target.endpoint.arrival(ticket)
    push = source.endpoint.push(ticket, source.engine.tables("r"), tokens=75, prompt_ids=list(others))
    push.layers(0, 4)
    push.commit(state)
    with pytest.raises(PeerError, match="the state's own ids agree with 0"):
        move.result()
    wait_until(lambda: target.endpoint.stats().transfers == 0)


def test_the_outcome_is_of_the_attempt_that_lives(worker: Opened) -> None:
    """A transfer id that failed is offered again: its outcome waits for the new attempt's end."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    first = source.endpoint.offer(state, source.engine.tables("r"))
    source.endpoint.withdraw(first)
    with pytest.raises(KVFerryError, match="withdrawn"):
        source.endpoint.outcome(first).result(5)
    second = source.endpoint.offer(state, source.engine.tables("r"))
    outcome = source.endpoint.outcome(second)
    move = target.endpoint.pull(second, target.engine.allocate(76))
    move.result()
    move.started()
    assert outcome.result(5).request_id == "r"


def test_a_renewal_never_shortens_a_lease(worker: Opened) -> None:
    """Renewing for less than is left changes nothing."""
    source, target = worker("shm"), worker("shm")
    prefill(source, "r", 75, GREEDY, limits(STEPS))
    state = source.engine.export_state("r", Exactness.BITS)
    blocks = source.engine.tables("r")
    other = source.endpoint.offer(None, blocks, tokens=8, request_id="s", lease_seconds=0.2)
    ticket = source.endpoint.offer(state, source.engine.tables("r"), lease_seconds=30)
    source.endpoint.renew(ticket, 0.01)
    with pytest.raises(DeadlineError):
        source.endpoint.outcome(other).result(5)  # so long has passed
    move = target.endpoint.pull(ticket, target.engine.allocate(76))
    assert move.result() is not None
    move.started()
