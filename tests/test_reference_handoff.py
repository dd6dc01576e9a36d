"""A request goes on in another engine as if it had stayed; without any one part of its state it does not."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.reference import FinishReason, ReferenceEngine
from kvferry.errors import CorruptError, IncompatibleError, KVFerryError, LocalError
from kvferry.state import (
    Exactness,
    ExecutionState,
    InlineTensor,
    Limits,
    LogitBias,
    Positions,
    SamplingParameters,
    compare_fingerprints,
    ids_digest,
    pack_ids,
    unpack_ids,
)
from reference_kit import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Layout,
    copy_kv,
    keep,
    limits,
    make_engine,
    move,
    prompt,
    seen,
    start,
    take,
    text_of,
)

STEPS, BORDER, TOKENS = 24, 9, 75
UNLIKE = [
    Layout(32, "HND", joined_kv=True),
    Layout(16, "HND"),
    Layout(32, "NHD", joined_kv=True, cross_layer=True),
    Layout(1, "NHD"),
]
replace = msgspec.structs.replace
Change = Callable[[ExecutionState], ExecutionState]


def whole(sampling: SamplingParameters, given: Limits, tokens: int = TOKENS) -> list:
    """The run that stays in one engine."""
    engine = make_engine()
    start(engine, "r", prompt(tokens), sampling, given)
    return take(engine, "r", STEPS)


def handed_over(
    sampling: SamplingParameters, given: Limits, border: int, target: ReferenceEngine, tokens: int = TOKENS
) -> list:
    """The run that changes engines after ``border`` tokens, with another request busy at the target."""
    source = make_engine()
    start(source, "r", prompt(tokens), sampling, given)
    before = take(source, "r", border)
    start(target, "busy", prompt(31, 9), SAMPLED, limits(99))
    target.step()
    move(source, target, "r")
    after = []
    while target.request("r").finish is None:
        after += [out for out in target.step() if out.request_id == "r"]
    assert source.pool.num_free_blocks == source.pool.group.num_blocks
    return before + after


@pytest.mark.parametrize("layout", UNLIKE)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_tokens_text_and_logits_go_on_bit_by_bit(sampling: SamplingParameters, layout: Layout) -> None:
    """After 0, 1 and some tokens, into other block sizes, orders and places, beside another request."""
    expected = seen(whole(sampling, limits(STEPS)))
    for border in (0, 1, BORDER):
        assert seen(handed_over(sampling, limits(STEPS), border, make_engine(layout))) == expected


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_storage_goes_on_bit_by_bit(dtype: str) -> None:
    """What moves is what was stored, so the narrow formats are as exact."""
    source, target = make_engine(Layout(dtype=dtype)), make_engine(Layout(32, "HND", dtype=dtype))
    for name in ("stays", "moves"):
        start(source, name, prompt(TOKENS), SAMPLED, limits(STEPS))
    expected = seen(take(source, "stays", STEPS))
    before = take(source, "moves", BORDER)
    move(source, target, "moves")
    assert seen(before + take(target, "moves", STEPS)) == expected


@settings(deadline=None, max_examples=12)
@given(
    st.lists(
        st.tuples(st.integers(1, 60), st.sampled_from([GREEDY, SAMPLED, PENALISED]), st.integers(0, 6)),
        min_size=2,
        max_size=4,
    )
)
def test_several_requests_at_once(requests: list[tuple[int, SamplingParameters, int]]) -> None:
    """Each is handed over at its own time while all run, back again too, and none notices."""
    engines = [make_engine(), make_engine(UNLIKE[0])]
    where = dict.fromkeys(map(str, range(len(requests))), 0)
    got: dict[str, list] = {name: [] for name in where}
    for name, (tokens, sampling, _) in zip(where, requests, strict=True):
        start(engines[0], name, prompt(tokens, int(name)), sampling, limits(12))
    for step in range(12):
        for name, (_, _, border) in zip(where, requests, strict=True):
            if step in (border, border + 4):
                move(engines[where[name]], engines[1 - where[name]], name)
                where[name] = 1 - where[name]
        for out in engines[0].step() + engines[1].step():
            got[out.request_id] += seen([out])
    for name, (tokens, sampling, _) in zip(where, requests, strict=True):
        alone = make_engine()
        start(alone, name, prompt(tokens, int(name)), sampling, limits(12))
        assert got[name] == seen(take(alone, name, 12))


def test_a_stop_string_half_matched_across_the_handoff() -> None:
    """Its first characters come from one engine and its last from the other; the client sees none of it."""
    text = text_of(whole(SAMPLED, limits(STEPS)))
    found = 0
    for begin in range(len(text) - 4):
        given = limits(STEPS, stop_strings=(text[begin : begin + 4], "no such text"))
        expected = whole(SAMPLED, given)
        assert expected[-1].finish is FinishReason.STOP_STRING
        assert text_of(expected) == text[: text.index(text[begin : begin + 4])]
        border = len(expected) - 2
        if border > 0:
            outputs = handed_over(SAMPLED, given, border, make_engine(UNLIKE[begin % 4]))
            assert seen(outputs) == seen(expected)
            found += 1
    assert found > 5


def test_text_goes_on_inside_a_character() -> None:
    """A character of several tokens may be cut by the handoff; it appears once, whole."""
    text = "日é🙂"
    for border in range(1, len(text.encode())):
        source, target = make_engine(), make_engine(UNLIKE[0])
        start(source, "r", prompt(20), GREEDY, limits(STEPS))
        pieces = []
        for count, byte in enumerate(text.encode()):
            engine = source if count < border else target
            if count == border:
                move(source, target, "r")
            request = engine.request("r")
            forced = replace(GREEDY, allowed_tokens=pack_ids([byte]))
            request.sampler = type(request.sampler)(
                forced, 300, np.array(prompt(20), np.int32), np.array(request.output_ids, np.int32)
            )
            pieces += take(engine, "r", 1)
        assert text_of(pieces) == text


def changed(**fields: object) -> Change:
    """Other fields of the record."""
    return lambda state: replace(state, **fields)


def without_draws(state: ExecutionState) -> ExecutionState:
    """The generator seeded anew."""
    return replace(state, rng=replace(state.rng, draws=0))


def without_prompt_border(state: ExecutionState) -> ExecutionState:
    """All tokens taken for the prompt: penalties forget what was said, limits and text their start."""
    tokens = replace(state.tokens, prompt_tokens=len(state.tokens.ids) // 4, emitted_tokens=0)
    return replace(state, tokens=tokens)


def without_prompt(state: ExecutionState) -> ExecutionState:
    """Other ids in the prompt, the output kept: the repetition penalty counts others."""
    ids = unpack_ids(state.tokens.ids).copy()
    ids[: state.tokens.prompt_tokens] = 299
    packed = pack_ids(ids)
    return replace(state, tokens=replace(state.tokens, ids=packed, digest=ids_digest(packed)))


def with_another_pending(state: ExecutionState) -> ExecutionState:
    """Another last token, in the history too, so that the record agrees with itself."""
    ids = unpack_ids(state.tokens.ids).copy()
    ids[-1] ^= 1
    packed = pack_ids(ids)
    tokens = replace(state.tokens, ids=packed, digest=ids_digest(packed), pending=int(ids[-1]))
    return replace(state, tokens=tokens)


def run_again(state: ExecutionState) -> ExecutionState:
    """The last token forgotten as pending and taken for computed: it would be run on top of its own KV."""
    return replace(state, tokens=replace(state.tokens, pending=None), kv_tokens=state.kv_tokens + 1)


def one_token_short(state: ExecutionState) -> ExecutionState:
    """The position moved back by one."""
    return replace(state, kv_tokens=state.kv_tokens - 1, positions=Positions(next=state.kv_tokens - 1))


def with_limits(**fields: object) -> Change:
    """Limits as the request began, not as they stand."""
    return lambda state: replace(state, limits=replace(state.limits, **fields))


def with_text(**fields: object) -> Change:
    """Another text position."""
    return lambda state: replace(state, text=replace(state.text, **fields))


def continuation(change: Change, sampling: SamplingParameters, given: Limits) -> list:
    """The run with a handoff whose record was damaged on the way."""
    source, target = make_engine(), make_engine(UNLIKE[0])
    start(source, "r", prompt(TOKENS), sampling, given)
    before = take(source, "r", BORDER)
    move(source, target, "r", change=change)
    return before + take(target, "r", 2 * STEPS)


FEW = replace(GREEDY, allowed_tokens=pack_ids(range(40, 48)), frequency_penalty=1.5, presence_penalty=1.0)
WANTS_STOP = replace(GREEDY, logit_bias=(LogitBias(token=256, bias=1e6),))
WRONG = {
    "random draws": (without_draws, SAMPLED, {}),
    "prompt ids under a repetition penalty": (without_prompt, replace(GREEDY, repetition_penalty=1.8), {}),
    "penalties": (
        lambda s: replace(s, sampling=replace(s.sampling, presence_penalty=0.0, frequency_penalty=0.0)),
        FEW,
        {},
    ),
    "pending token": (with_another_pending, GREEDY, {}),
    "tokens left": (with_limits(max_tokens_left=STEPS), GREEDY, {}),
    "least tokens left": (
        with_limits(min_tokens_left=0),
        WANTS_STOP,
        {"min_tokens_left": STEPS - 3, "ignore_eos": False},
    ),
    "stop tokens": (
        with_limits(stop_token_ids=()),
        WANTS_STOP,
        {"min_tokens_left": STEPS - 3, "ignore_eos": False},
    ),
    "bias": (
        lambda s: replace(s, sampling=replace(s.sampling, logit_bias=())),
        replace(GREEDY, logit_bias=tuple(LogitBias(token=token, bias=9.0) for token in range(0, 300, 7))),
        {},
    ),
}
REFUSED = {
    "generator": (changed(rng=None), SAMPLED, {}, "check 8"),
    "prompt border": (without_prompt_border, PENALISED, {}, "check 15"),
    "pending flag": (run_again, GREEDY, {}, "check 6"),
    "both pending and logits": (
        lambda s: replace(
            s, tokens=replace(s.tokens, last_logits=InlineTensor.of(np.zeros(300, np.float32)))
        ),
        GREEDY,
        {},
        "check 8",
    ),
    "position": (one_token_short, GREEDY, {}, "check 6"),
    "next position alone": (changed(positions=Positions(next=0)), GREEDY, {}, "check 6"),
    "text": (changed(text=None), GREEDY, {"stop_strings": ("xyz",)}, "check 8"),
    "text, though nothing stops at it": (changed(text=None), GREEDY, {}, "needs the text position"),
    "text tail": (with_text(tail=""), GREEDY, {"stop_strings": ("xyz",)}, "check 15"),
    "characters sent": (with_text(emitted_chars=0), GREEDY, {}, "check 15"),
    "limits used up": (with_limits(max_tokens_left=0), GREEDY, {}, "check 8"),
    "a layer": (lambda s: replace(s, layers=s.layers[1:]), GREEDY, {}, "check 7"),
    "a tensor": (lambda s: replace(s, tensors=s.tensors[:-1]), GREEDY, {}, "check 7"),
    "a block": (
        lambda s: replace(s, blocks=(replace(s.blocks[0], ids=s.blocks[0].ids[:-4]),)),
        GREEDY,
        {},
        "check 6",
    ),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_part_that_decode_cannot_check_is_seen_in_the_continuation(part: str) -> None:
    """Where the damage is consistent, it is accepted and the continuation is another: equality can fail."""
    change, sampling, fields = WRONG[part]
    given = limits(STEPS, **fields)
    expected = seen(whole(sampling, given))
    assert seen(continuation(keep, sampling, given)) == expected
    got = continuation(change, sampling, given)
    assert seen(got) != expected
    assert [(out.token, out.finish) for out in got] != [(token, finish) for token, _, finish, _ in expected]


@pytest.mark.parametrize("part", REFUSED)
def test_a_part_that_decode_can_check_is_refused(part: str) -> None:
    """One error that names the check; the target holds no block and no request, the source still has it."""
    change, sampling, fields, named = REFUSED[part]
    source, target = make_engine(), make_engine(UNLIKE[0])
    given = limits(STEPS, **fields)
    start(source, "r", prompt(TOKENS), sampling, given)
    before = take(source, "r", BORDER)
    free = target.pool.num_free_blocks
    with pytest.raises(KVFerryError, match=named):
        move(source, target, "r", change=change)
    assert target.pool.num_free_blocks == free
    with pytest.raises(LocalError, match="no such request"):
        target.request("r")
    assert seen(before + take(source, "r", STEPS)) == seen(whole(sampling, given))


@pytest.mark.parametrize("block", range(5))
def test_one_block_of_zeros_is_another_continuation(block: int) -> None:
    """Every block of KV counts: without its bytes other tokens follow, with no error from the engine."""
    source, target = make_engine(), make_engine()
    start(source, "r", prompt(TOKENS), GREEDY, limits(STEPS))
    before = take(source, "r", BORDER)
    move(source, target, "r")
    lost = target.request("r").blocks[block]
    for tensor in target.layout.groups[0].tensors:
        at = tensor.offset + lost * tensor.block_stride
        target.memory[at : at + tensor.block_stride] = 0
    tokens = [out.token for out in before + take(target, "r", STEPS)]
    assert tokens != [out.token for out in whole(GREEDY, limits(STEPS))]


def test_logits_that_are_not_finite_are_refused() -> None:
    """A handoff before the first token carries logits; a NaN in them never starts."""
    source, target = make_engine(), make_engine()
    start(source, "r", prompt(TOKENS), GREEDY, limits(STEPS))
    bad = np.zeros(300, np.float32)
    bad[17] = np.nan
    with pytest.raises(CorruptError, match="check 13"):
        move(
            source,
            target,
            "r",
            change=lambda s: replace(s, tokens=replace(s.tokens, last_logits=InlineTensor.of(bad))),
        )


def test_a_table_too_short_is_refused_at_read_back() -> None:
    """Check 14 finds fewer tokens in the blocks than the state covers; the blocks stay the caller's."""
    source, target = make_engine(), make_engine()
    start(source, "r", prompt(TOKENS), GREEDY, limits(STEPS))
    take(source, "r", 1)
    state = source.export_state("r", Exactness.BITS)
    short = target.allocate(TOKENS - 16)
    with pytest.raises(IncompatibleError, match="check 14"):
        target.import_state(state, short)
    target.free(short)


def test_only_own_free_blocks_take_a_request() -> None:
    """A table that was never given, is another request's, an id in use: refused, nothing changes."""
    source, target = make_engine(), make_engine()
    start(source, "r", prompt(TOKENS), GREEDY, limits(STEPS))
    start(target, "other", prompt(TOKENS), GREEDY, limits(STEPS))
    state = source.export_state("r", Exactness.BITS)
    for tables in (target.tables("other"), source.tables("r")):
        with pytest.raises(LocalError, match="not one that allocate gave"):
            target.import_state(state, tables)
    tables = target.allocate(TOKENS + 1)
    copy_kv(source, target, "r", tables)
    target.import_state(state, tables)
    with pytest.raises(LocalError, match="in use"):
        target.import_state(state, target.allocate(TOKENS + 1))
    with pytest.raises(LocalError, match="not one that allocate gave"):
        target.free(tables)


def test_requests_in_the_wrong_phase_are_not_exported() -> None:
    """Still prefilling, finished, unknown: each is said."""
    engine = make_engine()
    engine.submit("r", prompt(TOKENS), GREEDY, limits(1))
    with pytest.raises(LocalError, match="still prefilling"):
        engine.export_state("r", Exactness.BITS)
    while not engine.prefill("r"):
        pass
    engine.step()
    with pytest.raises(LocalError, match="finished"):
        engine.export_state("r", Exactness.BITS)
    with pytest.raises(LocalError, match="no such request"):
        engine.export_state("x", Exactness.BITS)


def test_export_changes_nothing_and_repeats() -> None:
    """Two exports differ in transfer id and time alone, and the request goes on."""
    engine = make_engine()
    start(engine, "r", prompt(TOKENS), PENALISED, limits(STEPS))
    before = take(engine, "r", BORDER)
    one, two = engine.export_state("r", Exactness.BITS), engine.export_state("r", Exactness.BITS)
    assert one.transfer_id != two.transfer_id
    assert replace(one, transfer_id=two.transfer_id, created_unix_ns=two.created_unix_ns) == two
    assert seen(before + take(engine, "r", STEPS)) == seen(whole(PENALISED, limits(STEPS)))


def test_fingerprints_fit_where_bits_are_the_same_and_only_there() -> None:
    """Layouts make no difference, weights and storage do; what differs is named."""
    first = make_engine().requirements().fingerprint
    assert first == make_engine(UNLIKE[0]).requirements().fingerprint
    other = make_engine(seed=1).requirements().fingerprint
    narrow = make_engine(Layout(dtype="bfloat16")).requirements().fingerprint
    assert [r.split(":")[0] for r in compare_fingerprints(first, other, Exactness.BITS)] == [
        "weights",
        "probe",
    ]
    assert [r.split(":")[0] for r in compare_fingerprints(first, narrow, Exactness.BITS)] == ["probe"]
    for engine, named in (
        (make_engine(seed=1), "fingerprint.weights"),
        (make_engine(Layout(dtype="bfloat16")), "probe"),
    ):
        source = make_engine()
        start(source, "r", prompt(5), GREEDY, limits(STEPS))
        with pytest.raises(IncompatibleError, match=named):
            move(source, engine, "r")
