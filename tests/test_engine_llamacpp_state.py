"""What llama.cpp's own import would take wrongly is refused before llama.cpp sees it, and read back after.

The list is of states that ``llama_state_seq_set_data`` accepted, or refused while it left something
behind: other weights, another rope base, a flipped bit, a part left out, a cut or a longer state,
damaged positions, another type of keys, transposed values, and a failure into a sequence in use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("llama_cpp", reason="extra [llamacpp] is not installed: no llama_cpp")
pytest.importorskip("gguf", reason="extra [llamacpp] is not installed: no gguf")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from hypothesis import given  # noqa: E402 - after the skip
from hypothesis import strategies as st  # noqa: E402

from engine_gguf import WINDOW, engine  # noqa: E402
from kvferry.engines.llamacpp import LlamaCppEngine  # noqa: E402
from kvferry.engines.llamacpp.blob import (  # noqa: E402
    Attention,
    Part,
    Recurrent,
    Rows,
    build,
    parse,
)
from kvferry.engines.llamacpp.form import attention_positions  # noqa: E402
from kvferry.errors import CapacityError, CorruptError, IncompatibleError, KVFerryError, LocalError  # noqa: E402
from kvferry.state import Exactness, Limits, SamplingParameters, unpack_ids  # noqa: E402
from kvferry.testing.engine_host import EngineHost  # noqa: E402

PROMPT = np.random.default_rng(7).integers(20, 320, 37).tolist()
SAMPLED = SamplingParameters(temperature=0.9, top_k=60, seed=5)


def start(host: EngineHost, request_id: str = "r", steps: int = 3) -> None:
    """A request after some tokens."""
    host.engine.submit(request_id, PROMPT, SAMPLED, Limits(max_tokens_left=20, ignore_eos=True))
    host.engine.prefill(request_id)
    host.steps(request_id, steps)


@pytest.fixture
def hosts() -> Iterator[Callable[..., EngineHost]]:
    """Workers; all end with the test."""
    opened: list[EngineHost] = []

    def open_host(family: str = "llama", seed: int = 7, **options: Any) -> EngineHost:
        opened.append(EngineHost(engine(family, seed, **options), "worker"))
        return opened[-1]

    yield open_host
    for host in opened:
        host.close()
        assert isinstance(host.engine, LlamaCppEngine)
        host.engine.close()


@st.composite
def parts(draw: st.DrawFn) -> tuple[Part, ...]:
    """A sequence's parts: attention with rows or columns of values, with or without a recurrent memory."""
    cells, layers = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    random = np.random.default_rng(draw(st.integers(0, 99)))

    def rows(count: int, nbytes: int) -> Rows:
        return Rows(draw(st.sampled_from([0, 1, 8, 30])), random.integers(0, 256, (count, nbytes), np.uint8))

    attention = Attention(
        streams=draw(st.integers(1, 4)),
        positions=random.permutation(cells).astype(np.int32),
        value_nbytes=draw(st.sampled_from([None, 2, 4])),
        keys=tuple(rows(cells, 8) for _ in range(layers)),
        values=tuple(rows(cells, 16) for _ in range(layers)),
    )
    if draw(st.booleans()):
        return (attention,)
    return (attention, Recurrent(cells - 1, layers, tuple(rows(1, 12) for _ in range(2 * layers))))


def kinds(given_parts: tuple[Part, ...]) -> tuple[type[Part], ...]:
    return tuple(type(part) for part in given_parts)


@given(parts())
def test_a_state_is_taken_apart_and_put_together(made: tuple[Part, ...]) -> None:
    """The same parts, and the same bytes."""
    data = build(made)
    again = parse(data, kinds(made))
    assert np.array_equal(build(again), data)
    for one, other in zip(made, again, strict=True):
        if isinstance(one, Attention):
            assert isinstance(other, Attention)
            assert np.array_equal(one.positions, other.positions)
            for mine, theirs in zip(one.keys + one.values, other.keys + other.values, strict=True):
                assert (mine.type, mine.data.tolist()) == (theirs.type, theirs.data.tolist())


@given(parts(), st.data())
def test_a_cut_or_longer_state_is_refused(made: tuple[Part, ...], data: st.DataObject) -> None:
    """By any number of bytes: llama.cpp accepts 64 too many, and reads on after a cut by 1, 2 or 4.

    But for whole layers of a recurrent memory: it does not say how many it has, the model's form does.
    """
    whole = build(made)
    rows = made[-1].rows if isinstance(made[-1], Recurrent) else ()
    ends = np.cumsum([12 + row.row_nbytes for row in reversed(rows)])
    whole_layers = {len(whole) - int(end) for end in ends[1:-1:2]}
    cut = data.draw(st.integers(0, len(whole) - 1).filter(lambda cut: cut not in whole_layers))
    with pytest.raises(CorruptError):
        parse(whole[:cut], (*kinds(made)[:1], *kinds(made)[1:]))
    if isinstance(made[-1], Attention):
        with pytest.raises(CorruptError, match="too many"):
            parse(np.concatenate([whole, np.zeros(data.draw(st.integers(1, 64)), np.uint8)]), kinds(made))


@given(parts(), st.integers(0, 3))
def test_another_magic_is_refused(made: tuple[Part, ...], at: int) -> None:
    """The first four bytes say what it is."""
    damaged = build(made).copy()
    damaged[at] ^= 1
    with pytest.raises(CorruptError, match="magic"):
        parse(damaged, kinds(made))


def test_a_part_left_out_is_refused() -> None:
    """Only the recurrent half of a hybrid: llama.cpp takes it, and decodes wrong tokens."""
    own = engine("falcon-h1")
    own.submit("r", PROMPT, SAMPLED, Limits(max_tokens_left=3))
    own.prefill("r")
    attention, recurrent = own.model.taken_apart(own._sequences["r"])
    for partial in ((attention,), (recurrent,)):
        with pytest.raises(CorruptError):
            parse(build(partial), own.model.memories)
    own.close()


@pytest.mark.parametrize("damage", ["negative", "twice", "a gap", "too late"])
def test_positions_that_are_not_the_tokens_are_refused(damage: str) -> None:
    """A damaged position is what makes a state arrive that cannot start."""
    positions = np.arange(9, dtype=np.int32)
    positions[4] = {"negative": -5, "twice": 3, "a gap": 40, "too late": 9}[damage]
    part = Attention(1, positions, None, (), ())
    with pytest.raises(LocalError, match="not the last 9 of 9 tokens"):
        attention_positions(part, 9, None)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"seed": 8}, "weights"),
        ({"rope_freq_base": 20000.0}, "config"),
        ({"key_type": "q8_0", "value_type": "q8_0"}, "dtype"),
        ({"flash_attention": False}, "build"),
    ],
    ids=str,
)
def test_another_worker_is_refused_by_name(
    hosts: Callable[..., EngineHost], options: dict[str, Any], names: str
) -> None:
    """Other weights or rope base, another type of cache, another attention: before a byte moves."""
    source, target = hosts(), hosts(**options)
    start(source)
    handed = source.offer("r")
    tables = target.room(handed)
    with pytest.raises(IncompatibleError, match=names):
        target.pull(handed, tables)
    target.engine.free(tables)
    source.withdraw(handed)


def test_transposed_values_go_on_where_bits_are_not_asked_for(hosts: Callable[..., EngineHost]) -> None:
    """Flash attention off stores values as columns. llama.cpp refuses the state and decodes on without."""
    source, target = hosts(), hosts(flash_attention=False)
    start(source)
    handed = source.offer("r", Exactness.TOKENS)
    target.take_over(handed)
    ours = source.engine.step(["r"])[0].logits
    theirs = target.engine.step(["r"])[0].logits
    assert np.allclose(ours, theirs, atol=2e-2)
    source.let_go(handed)


def test_a_flipped_bit_is_refused_and_nothing_stays(hosts: Callable[..., EngineHost]) -> None:
    """In llama.cpp's own memory, after its import said yes: the read-back tells, and the sequence is free."""
    source, target = hosts(), hosts()
    start(source)
    start(target, "live")
    handed = source.offer("r")
    tables = target.room(handed)
    move, state = target.pull(handed, tables)
    context = target.engine.model.context
    read_in = context.read_in

    def flipped(sequence: int, data: np.ndarray) -> int:
        damaged = data.copy()
        damaged[-5] ^= 1
        return read_in(sequence, damaged)

    _refused_by_check_14(target, state, tables, flipped)
    _refused_by_check_14(target, state, tables, lambda _sequence, _data: 0)
    _refused_by_check_14(target, state, tables, lambda sequence, data: read_in(sequence, data) - 4)
    context.read_in = read_in
    target.engine.import_state(state, tables)
    move.started()
    expected = source.steps("r")
    assert target.steps("r") == expected
    start(source, "live")
    assert target.steps("live") == source.steps("live")
    source.let_go(handed)


def _refused_by_check_14(target: EngineHost, state: Any, tables: Any, read_in: Any) -> None:
    own = target.engine
    assert isinstance(own, LlamaCppEngine)
    free = list(own._free_sequences)
    own.model.context.read_in = read_in  # type: ignore[method-assign]
    with pytest.raises(IncompatibleError, match="check 14"):
        own.import_state(state, tables)
    assert sorted(own._free_sequences) == sorted(free)
    assert all(own.model.context.span(sequence) is None for sequence in own._free_sequences)


def test_a_placement_that_is_no_order_is_refused(hosts: Callable[..., EngineHost]) -> None:
    """A peer's order of cells is checked before it is used as one."""
    source, target = hosts(), hosts()
    start(source)
    handed = source.offer("r")
    tables = target.room(handed)
    move, state = target.pull(handed, tables)
    placement = unpack_ids(state.blocks[0].placement or b"").copy()
    placement[0] = placement[1]
    blocks = (msgspec.structs.replace(state.blocks[0], placement=placement.astype("<i4").tobytes()),)
    with pytest.raises(IncompatibleError, match="placement"):
        target.engine.import_state(msgspec.structs.replace(state, blocks=blocks), tables)
    target.engine.free(tables)
    move.abort("refused")
    source.withdraw(handed)


def test_a_window_and_several_threads_refuse_bits(hosts: Callable[..., EngineHost]) -> None:
    """An import packs the window's cells, and threads then share them out otherwise: said beforehand."""
    source, target = hosts("gemma3", threads=2), hosts("gemma3", threads=2)
    start(source)
    assert len(PROMPT) > WINDOW
    handed = source.offer("r", Exactness.BITS)
    tables = target.room(handed)
    with pytest.raises(IncompatibleError, match="order of slots"):
        target.pull(handed, tables)
    target.engine.free(tables)
    source.withdraw(handed)
    start(source)
    handed = source.offer("r", Exactness.TOKENS)
    target.take_over(handed)
    assert len(target.steps("r", 2).tokens) == 2
    source.let_go(handed)


def test_no_free_sequence_is_no_room(hosts: Callable[..., EngineHost]) -> None:
    """A context has so many sequences: the next request is told, and an import leaves nothing behind."""
    source, target = hosts(), hosts(sequences=1)
    start(target, "only")
    with pytest.raises(CapacityError, match="in use"):
        start(target, "second")
    start(source)
    handed = source.offer("r")
    with pytest.raises(CapacityError, match="in use"):
        target.take_over(handed)
    target.engine.release("only")
    source.withdraw(handed)
    start(target, "second")


def test_another_form_of_state_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A llama.cpp that writes something else than was understood does not start."""
    from kvferry.engines.llamacpp import model

    real = model.parse

    def other(data: np.ndarray, memories: Any) -> tuple[Part, ...]:
        (part,) = real(data, memories)
        return (dataclasses.replace(part, streams=part.streams + 1),)

    monkeypatch.setattr(model, "parse", other)
    with pytest.raises(LocalError, match="put together"):
        engine("llama")


def test_a_file_that_is_none_is_said(tmp_path: Any) -> None:
    """One line, with llama.cpp's own words."""
    from kvferry.engines.llamacpp import LlamaCppModel

    path = tmp_path / "no.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(KVFerryError, match="cannot load it"):
        LlamaCppModel(path)
