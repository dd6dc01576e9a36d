"""Handoffs between engines that store K and V in unlike ways: what a state may ask for, what decode gets."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from conftest import unique_address, wait_until
from kvferry.engines.reference import ReferenceEngine
from kvferry.errors import IncompatibleError, KVFerryError
from kvferry.layout import Conversions, PoolLayout, WireFormat
from kvferry.protocol.prefix import hold_prefix, prefix_salt
from kvferry.state import Exactness, ExecutionState
from kvferry.transfer import Endpoint, Pool
from reference_kit import SAMPLED, limits, prompt, seen, start, take, tiny

pytestmark = pytest.mark.usefixtures("nothing_left")

TOKENS, STEPS = 75, 10
LOSSY = Conversions(lossy=True)
Worker = tuple[ReferenceEngine, Endpoint]
Opened = Callable[..., Worker]


def layout(dtype: str, block_size: int, **more: object) -> PoolLayout:
    config = tiny().config
    return PoolLayout.paged(
        range(config.layers),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        block_size=block_size,
        num_blocks=512 // block_size,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def worker(opened: Callable[..., Endpoint]) -> Opened:
    """Make a worker; all is closed when the test ends."""

    def make(dtype: str, allowed: Conversions, *, block_size: int = 16, **more: object) -> Worker:
        one = layout(dtype, block_size, **more)
        pool = Pool.allocate(one, staging_nbytes=64 << 10)
        engine = ReferenceEngine(tiny(), one, pool.array, chunk_tokens=32)
        address = unique_address("tcp")
        return engine, opened(
            one, address, pool=pool, requirements=engine.requirements(), conversions=allowed
        )

    return make


def is_idle(worker: Worker) -> bool:
    engine, endpoint = worker
    stats = endpoint.stats()
    held = (stats.transfers, stats.holds, stats.grants, stats.copies, stats.packing)
    return not any(held) and engine.pool.num_free_blocks == engine.pool.group.num_blocks


def hand_over(source: Worker, target: Worker, exactness: Exactness) -> ExecutionState:
    """Prefill, offer, pull, import, started; the state that decode's engine was given."""
    start(source[0], "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    state = source[0].export_state("r", exactness)
    ticket = source[1].offer(state, source[0].tables("r"))
    outcome = source[1].outcome(ticket)
    tables = target[0].allocate(TOKENS + STEPS)
    try:
        move = target[1].pull(ticket, tables)
        arrived = move.result()
        assert arrived is not None
        target[0].import_state(arrived, tables)
    except KVFerryError:
        target[0].free(tables)
        with pytest.raises(KVFerryError):
            outcome.result(5)
        source[0].release("r")
        raise
    move.started()
    outcome.result(5)
    source[0].release("r")
    return arrived


def kv(engine: ReferenceEngine) -> list[np.ndarray]:
    return [
        rows
        for layer in range(tiny().config.layers)
        for rows in engine.pool.read(layer, engine.tables("r")[0], TOKENS)
    ]


def test_narrowed_kv_is_prefills_rounded_once(worker: Opened) -> None:
    """float32 to bfloat16 for best effort: decode's K and V, and the state that it gets, are bfloat16's."""
    source, target = worker("float32", LOSSY), worker("bfloat16", LOSSY, block_size=32, axis_order="HND")
    alone = ReferenceEngine(tiny(), layout("float32", 16), chunk_tokens=32)
    start(alone, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    arrived = hand_over(source, target, Exactness.BEST_EFFORT)
    assert {entry.dtype for entry in arrived.tensors} == {"bfloat16"}
    table = target[0].tables("r")[0]
    rounded = ReferenceEngine(tiny(), layout("bfloat16", 32), chunk_tokens=32)
    for layer in range(tiny().config.layers):
        keys, values = alone.pool.read(layer, alone.tables("r")[0], TOKENS)
        rounded.pool.write(layer, table, 0, keys.transpose(1, 0, 2), values.transpose(1, 0, 2))
        for ours, theirs in zip(
            target[0].pool.read(layer, table, TOKENS), rounded.pool.read(layer, table, TOKENS), strict=True
        ):
            np.testing.assert_array_equal(ours, theirs)
    # The first token needs no K or V of decode's: its logits came with the state.
    assert seen(take(target[0], "r", 1)) == seen(take(alone, "r", 1))
    take(target[0], "r", 99)
    target[0].release("r")
    wait_until(lambda: is_idle(source) and is_idle(target))


@pytest.mark.parametrize("exactness", [Exactness.BITS, Exactness.TOKENS])
@pytest.mark.parametrize("pair", ["narrow", "wire"])
def test_rounding_is_not_for_states_that_ask_for_more(
    worker: Opened, pair: str, exactness: Exactness
) -> None:
    """Check 4 refuses before a byte moves, and names the conversion; a wire format is one too."""
    if pair == "narrow":
        source, target = worker("float32", LOSSY), worker("bfloat16", LOSSY)
    else:
        wire = Conversions(wire=WireFormat.INT8)
        source, target = worker("float32", wire), worker("float32", wire)
    with pytest.raises(IncompatibleError, match=r"check 4.*rounded on the way: float32 -> ") as caught:
        hand_over(source, target, exactness)
    assert caught.value.bytes_done == 0
    wait_until(lambda: is_idle(source) and is_idle(target))


def test_widened_kv_is_exact_and_bits_are_not_promised(worker: Opened) -> None:
    """bfloat16 to float32: `tokens` is served with K and V unchanged; `bits` ends at the numerics probe."""
    source, target = worker("bfloat16", Conversions()), worker("float32", Conversions(), block_size=8)
    with pytest.raises(IncompatibleError, match=r"check 4.*fingerprint\.probe"):
        hand_over(source, target, Exactness.BITS)
    alone = ReferenceEngine(tiny(), layout("bfloat16", 16), chunk_tokens=32)
    start(alone, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    arrived = hand_over(source, target, Exactness.TOKENS)
    assert {entry.dtype for entry in arrived.tensors} == {"float32"}
    for ours, theirs in zip(kv(target[0]), kv(alone), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    target[0].release("r")
    wait_until(lambda: is_idle(source) and is_idle(target))


def test_repacked_kv_keeps_the_bits(worker: Opened) -> None:
    """Keys transposed at decode: `bits` is promised and kept to the last token, both ways."""
    alone = ReferenceEngine(tiny(), layout("float32", 16), chunk_tokens=32)
    start(alone, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    wanted = seen(take(alone, "r", 99))
    plain = worker("float32", Conversions())
    transposed = worker("float32", Conversions(), block_size=32, axis_order="HND", transposed_keys=True)
    for source, target in ((plain, transposed), (transposed, plain)):
        hand_over(source, target, Exactness.BITS)
        assert seen(take(target[0], "r", 99)) == wanted
        target[0].release("r")
    wait_until(lambda: is_idle(plain) and is_idle(transposed))


@pytest.mark.parametrize("held", [16, 64])
def test_only_the_rest_crosses_after_a_prefix_hit(worker: Opened, held: int) -> None:
    """What decode holds is neither packed nor written; the rest is converted as ever."""
    source, target = worker("float32", LOSSY), worker("bfloat16", LOSSY)
    start(source[0], "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    wanted = kv(source[0])
    tables = target[0].allocate(TOKENS + STEPS)
    target[1].pool.array[:] = 0x3F  # 0.747 in bfloat16: what is held shows
    salt = prefix_salt(target[0].requirements().fingerprint)
    have = hold_prefix(np.array(prompt(TOKENS)[:held]), 16, salt)
    ticket = source[1].offer(source[0].export_state("r", Exactness.BEST_EFFORT), source[0].tables("r"))
    outcome = source[1].outcome(ticket)
    move = target[1].pull(ticket, tables, have=have)
    target[0].import_state(move.result(), tables)
    move.started()
    outcome.result(5)
    config = tiny().config
    assert move.record.nbytes == (TOKENS - held) * config.layers * 2 * config.kv_heads * config.head_dim * 2
    for ours, theirs in zip(kv(target[0]), wanted, strict=True):
        assert len(np.unique(ours[:, :held])) == 1
        np.testing.assert_allclose(ours[:, held:], theirs[:, held:], rtol=1 / 257, atol=1e-30)
    for engine in (source[0], target[0]):
        engine.release("r")
