"""The reference engine alone: its bits depend on a request's own ids, and on nothing else."""

from __future__ import annotations

import ml_dtypes
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.reference import FinishReason, ReferenceEngine, StepOutput, tiny_model
from kvferry.engines.reference.pool import PagedPool
from kvferry.errors import CapacityError, InputError, LocalError
from kvferry.layout import BlockTable, LayerKind, PoolLayout
from kvferry.state import LogitBias, SamplingParameters, pack_ids
from reference_kit import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Layout,
    limits,
    make_engine,
    prompt,
    seen,
    start,
    take,
    text_of,
    tiny,
)

STEPS = 12


def alone(ids: list[int], sampling: SamplingParameters, steps: int = STEPS, **options: object) -> list:
    """What one request gives in an engine of its own."""
    engine = make_engine(**options)
    start(engine, "r", ids, sampling, limits(steps))
    return seen(take(engine, "r", steps))


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.sampled_from([GREEDY, SAMPLED, PENALISED])), min_size=2, max_size=5
    ),
    st.data(),
)
def test_no_batch_changes_a_bit(requests: list[tuple[int, SamplingParameters]], data: st.DataObject) -> None:
    """Any mix of requests, at any positions, in any order, gives each the logits that it has alone."""
    engine = make_engine()
    for index, (tokens, sampling) in enumerate(requests):
        start(engine, str(index), prompt(tokens, index), sampling, limits(6))
    got: dict[str, list] = {str(index): [] for index in range(len(requests))}
    while running := [name for name in got if engine.request(name).finish is None]:
        batch = data.draw(st.lists(st.sampled_from(running), min_size=1, unique=True))
        for out in engine.step(batch):
            got[out.request_id] += seen([out])
    for index, (tokens, sampling) in enumerate(requests):
        assert got[str(index)] == alone(prompt(tokens, index), sampling, 6)


@pytest.mark.parametrize("joined_kv", [False, True])
@pytest.mark.parametrize("axis_order", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_no_layout_changes_a_bit(block_size: int, axis_order: str, joined_kv: bool) -> None:
    """Block size, axis order, K and V joined or apart, and where the blocks lie make no difference."""
    layout = Layout(block_size, axis_order, joined_kv, cross_layer=joined_kv)
    ids = prompt(75)
    assert alone(ids, SAMPLED, layout=layout) == alone(ids, SAMPLED)


def test_a_prefill_is_the_same_while_others_decode() -> None:
    """Chunks of a prompt computed between steps of other requests leave both as they are alone."""
    engine = make_engine(chunk_tokens=8)
    start(engine, "old", prompt(30, 1), SAMPLED, limits(STEPS))
    engine.submit("new", prompt(50, 2), GREEDY, limits(STEPS))
    old = []
    while not engine.prefill("new"):
        old += engine.step(["old"])
    new = take(engine, "new", STEPS)
    old += take(engine, "old", STEPS)
    assert seen(old) == alone(prompt(30, 1), SAMPLED, chunk_tokens=8)
    assert seen(new) == alone(prompt(50, 2), GREEDY, chunk_tokens=8)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 200])
def test_chunks_compute_the_same_function(chunk_tokens: int) -> None:
    """Chunk sizes may change the last bits of a sum, not the result; the same size gives the same bits."""
    ids = prompt(100)
    engine, whole = make_engine(chunk_tokens=chunk_tokens), make_engine(chunk_tokens=100)
    for one in (engine, whole):
        start(one, "r", ids, GREEDY, limits(4))
    outputs, expected = take(engine, "r", 4), take(whole, "r", 4)
    assert [out.token for out in outputs] == [out.token for out in expected]
    for out, want in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out.logits, want.logits, atol=2e-4)
    assert seen(outputs) == alone(ids, GREEDY, 4, chunk_tokens=chunk_tokens)


def test_each_chunk_reports_its_layers_when_their_kv_is_in_the_pool() -> None:
    """A caller that copies a layer at its callback has that layer's final bytes."""
    engine = make_engine(chunk_tokens=20)
    engine.submit("r", prompt(50), GREEDY, limits(1))
    calls: list[int] = []
    copies: dict[int, bytes] = {}

    def on_layer(layer: int) -> None:
        calls.append(layer)
        keys, values = engine.pool.read(layer, engine.tables("r")[0], engine.request("r").kv_tokens + 1)
        copies[layer] = keys.tobytes() + values.tobytes()

    while not engine.prefill("r", on_layer):
        for layer, data in copies.items():
            keys, values = engine.pool.read(layer, engine.tables("r")[0], engine.request("r").kv_tokens - 19)
            assert data == keys.tobytes() + values.tobytes()
    assert calls == [0, 1, 2, 3] * 3


def test_a_failed_layer_callback_leaves_the_chunk_to_be_done_again() -> None:
    """After the error the request has moved on by nothing, and ends as if it had not happened."""
    engine = make_engine()
    engine.submit("r", prompt(20), GREEDY, limits(3))

    def fail(layer: int) -> None:
        raise RuntimeError(layer)

    with pytest.raises(RuntimeError):
        engine.prefill("r", fail)
    assert engine.request("r").kv_tokens == 0
    assert engine.prefill("r")
    assert seen(take(engine, "r", 3)) == alone(prompt(20), GREEDY, 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_attention_reads_what_was_stored(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Narrow storage has the bits of a float32 pool that is given rounded K and V, in prefill too."""
    narrow = alone(prompt(40), SAMPLED, layout=Layout(dtype=dtype))
    assert narrow == alone(prompt(40), SAMPLED, layout=Layout(32, "HND", joined_kv=True, dtype=dtype))
    assert narrow != alone(prompt(40), SAMPLED)
    write, rounded = PagedPool.write, np.dtype(dtype if dtype == "float16" else ml_dtypes.bfloat16)

    def write_rounded(pool: PagedPool, layer: int, table: BlockTable, at: int, *kv: np.ndarray) -> None:
        write(pool, layer, table, at, *(x.astype(rounded).astype(np.float32) for x in kv))

    monkeypatch.setattr(PagedPool, "write", write_rounded)
    assert narrow == alone(prompt(40), SAMPLED)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.one_of(st.integers(1, 60), st.just("release"), st.just("step")), max_size=14))
def test_blocks_are_held_by_one_request_each_and_all_come_back(actions: list[int | str]) -> None:
    """Whatever is submitted, stepped and released, and when there is no room, the books stay right."""
    engine = make_engine(Layout(tokens=192))
    total = engine.pool.num_free_blocks
    live: list[str] = []
    for number, action in enumerate(actions):
        try:
            if action == "release" and live:
                engine.release(live.pop(0))
            elif action == "step":
                engine.step()
            elif isinstance(action, int):
                start(engine, str(number), prompt(action), GREEDY, limits(99))
                live.append(str(number))
        except CapacityError:
            assert engine.pool.num_free_blocks < 12
        blocks = [block for name in live for block in engine.request(name).blocks]
        assert len(set(blocks)) == len(blocks) == total - engine.pool.num_free_blocks
    for name in live:
        engine.release(name)
    assert engine.pool.num_free_blocks == total


def test_the_last_block_is_given_and_not_one_more() -> None:
    """A refused allocation takes none, so that the same blocks can be had afterwards."""
    engine = make_engine(Layout(tokens=64))
    with pytest.raises(CapacityError, match="5 blocks wanted, 4 of 4 free"):
        engine.allocate(65)
    (table,) = engine.allocate(64)
    assert sorted(table.ids) == [0, 1, 2, 3]
    with pytest.raises(CapacityError, match="1 blocks wanted, 0 of 4 free"):
        engine.allocate(1)


def test_a_step_without_room_changes_nothing() -> None:
    """CapacityError comes before anything is computed; after a release the step gives what it would have."""
    engine = make_engine(Layout(tokens=64))
    start(engine, "a", prompt(16, 1), GREEDY, limits(9))
    start(engine, "b", prompt(48, 2), GREEDY, limits(9))
    first = engine.step()
    before = [(r.kv_tokens, list(r.ids), list(r.blocks)) for r in (engine.request("a"), engine.request("b"))]
    with pytest.raises(CapacityError, match="2 blocks wanted, 0 of 4 free"):
        engine.step()
    assert before == [
        (r.kv_tokens, list(r.ids), list(r.blocks)) for r in (engine.request("a"), engine.request("b"))
    ]
    engine.release("b")
    assert seen([first[0], *engine.step()]) == alone(prompt(16, 1), GREEDY)[:2]


def test_max_tokens_and_the_context_end_a_request() -> None:
    """LENGTH comes at the last token allowed, whichever limit is nearer."""
    engine = make_engine(Layout(tokens=4096))
    start(engine, "short", prompt(10), GREEDY, limits(3))
    assert [out.finish for out in take(engine, "short", 99)] == [None, None, FinishReason.LENGTH]
    start(engine, "long", prompt(1021), GREEDY, limits(99))
    assert [out.finish for out in take(engine, "long", 99)] == [None, None, FinishReason.LENGTH]


def test_stop_tokens_wait_for_the_minimum_and_add_no_text() -> None:
    """The model's own stop token, wanted at each step, comes first when min_tokens are made."""
    eager = msgspec.structs.replace(GREEDY, logit_bias=(LogitBias(token=256, bias=1e6),))
    engine = make_engine()
    start(engine, "r", prompt(10), eager, limits(20, min_tokens_left=5, ignore_eos=False))
    outputs = take(engine, "r", 99)
    assert [out.token == 256 for out in outputs] == [False] * 5 + [True]
    assert outputs[-1].finish is FinishReason.STOP_TOKEN
    plain = bytes(out.token for out in outputs[:-1] if out.token < 256).decode("utf-8", "replace")
    assert text_of(outputs) == plain
    start(engine, "ignored", prompt(10), eager, limits(8))
    assert [out.token for out in take(engine, "ignored", 99)] == [256] * 8


def test_a_stop_string_is_cut_off() -> None:
    """It may begin in one token and end in another; the text that was given out ends before it."""
    engine = make_engine()
    start(engine, "free", prompt(10), SAMPLED, limits(30))
    text = text_of(take(engine, "free", 99))
    start(engine, "r", prompt(10), SAMPLED, limits(30, stop_strings=(text[9:12],)))
    outputs = take(engine, "r", 99)
    assert outputs[-1].finish is FinishReason.STOP_STRING
    assert text_of(outputs) == text[: text.index(text[9:12])]


def test_bad_sequences_are_not_completed() -> None:
    """The last token of a forbidden sequence is not chosen after its beginning, and is elsewhere."""
    engine = make_engine()
    start(engine, "free", prompt(10), GREEDY, limits(4))
    a, b, c, _ = (out.token for out in take(engine, "free", 4))
    bad = msgspec.structs.replace(GREEDY, bad_tokens=(pack_ids([a, b, c]), pack_ids([c, b])))
    start(engine, "r", prompt(10), bad, limits(3))
    outputs = [out.token for out in take(engine, "r", 3)]
    assert outputs[:2] == [a, b]
    assert outputs[2] != c


def test_a_seed_is_drawn_once_and_recorded() -> None:
    """Two requests without a seed get two; a request with the drawn seed repeats the first."""
    engine = make_engine()
    unseeded = SamplingParameters(temperature=1.5)
    for name in ("a", "b"):
        start(engine, name, prompt(10), unseeded, limits(STEPS))
    drawn = [engine.request(name).sampler.parameters.seed for name in ("a", "b")]
    assert None not in drawn
    assert drawn[0] != drawn[1]
    seeded = msgspec.structs.replace(unseeded, seed=drawn[0])
    assert seen(take(engine, "a", STEPS)) == alone(prompt(10), seeded)


def test_logprobs_are_of_the_chosen_token() -> None:
    """exp of the logprobs of every token of a row sums to 1."""
    engine = make_engine()
    start(engine, "r", prompt(10), GREEDY, limits(1))
    (out,) = take(engine, "r", 1)
    each = [StepOutput("r", token, "", out.logits, None).logprob() for token in range(300)]
    assert np.exp(each).sum() == pytest.approx(1)
    assert out.logprob() == max(each)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence"),
        ({"n": 2}, "n:"),
        ({"seed": 2**63}, "seed"),
        ({"logit_bias": (LogitBias(token=300, bias=1.0),)}, "token ids"),
        ({"logit_bias": (LogitBias(token=3, bias=float("nan")),)}, "logit_bias"),
        ({"allowed_tokens": b""}, "allowed_tokens"),
        ({"bad_tokens": (b"",)}, "bad_tokens"),
    ],
)
def test_a_parameter_without_meaning_is_named(fields: dict, named: str) -> None:
    """InputError says which, and neither a request nor a block is held."""
    engine = make_engine()
    free = engine.pool.num_free_blocks
    with pytest.raises(InputError, match=named):
        engine.submit("r", prompt(5), SamplingParameters(**{"temperature": 1.0, **fields}), limits(5))
    assert engine.pool.num_free_blocks == free
    with pytest.raises(LocalError, match="no such request"):
        engine.request("r")


def test_prompts_and_limits_are_checked() -> None:
    """Empty, too long, outside the vocabulary, no tokens wanted, an empty stop string, an id twice."""
    engine = make_engine()
    for ids, given_limits, named in (
        ([], limits(5), "prompt: 0 tokens"),
        (prompt(1024), limits(5), "prompt: 1024 tokens"),
        ([300], limits(5), "vocabulary"),
        ([-1], limits(5), "vocabulary"),
        ([1], limits(0), "max_tokens"),
        ([1], limits(5, stop_strings=("a", "")), "stop_strings"),
    ):
        with pytest.raises(InputError, match=named):
            engine.submit("r", ids, GREEDY, given_limits)
    start(engine, "r", [1], GREEDY, limits(1))
    with pytest.raises(InputError, match="in use"):
        engine.submit("r", [1], GREEDY, limits(1))
    with pytest.raises(LocalError, match="in already"):
        engine.prefill("r")
    take(engine, "r", 1)
    with pytest.raises(LocalError, match="finished"):
        engine.step(["r"])


def test_a_pool_that_does_not_fit_is_refused() -> None:
    """Other heads, too little memory, a window or an unknown dtype: one error each."""
    config = tiny().config

    def layout(**fields: object) -> PoolLayout:
        given = {
            "kv_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "dtype": "float32",
            "block_size": 16,
        }
        return PoolLayout.paged(range(config.layers), **{**given, "num_blocks": 4, **fields})

    for pool, memory, named in (
        (layout(kv_heads=3), None, "not that of tiny-0"),
        (layout(), np.zeros(5, np.uint8), "bytes as a flat uint8 array"),
        (layout(window=8), None, f"kind {LayerKind.FULL}"),
        (layout(dtype="float64"), None, "not float64"),
    ):
        with pytest.raises(LocalError, match=named):
            ReferenceEngine(tiny(), pool, memory)


def test_blocks_that_are_not_the_callers_cannot_be_freed() -> None:
    """Not those of a request, not twice, not any that were never given; nothing changes."""
    engine = make_engine()
    start(engine, "r", prompt(40), GREEDY, limits(1))
    tables = engine.allocate(20)
    free = engine.pool.num_free_blocks
    with pytest.raises(LocalError, match="still the caller's"):
        engine.free(engine.tables("r"))
    engine.free(tables)
    with pytest.raises(LocalError, match="still the caller's"):
        engine.free(tables)
    assert engine.pool.num_free_blocks == free + 2


def test_models_of_one_seed_are_one_model() -> None:
    """Equal seeds give equal digests; another seed or head count gives another."""
    assert tiny_model(3).weights_digest == tiny_model(3).weights_digest
    assert (
        len(
            {
                tiny_model(3).weights_digest,
                tiny_model(4).weights_digest,
                tiny_model(3, kv_heads=3).weights_digest,
            }
        )
        == 3
    )
