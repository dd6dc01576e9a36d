"""Speculative decoding in the reference engine: the same law as without, and it goes on exactly elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engines.reference import FinishReason, ReferenceEngine
from kvferry.engines.reference.speculative import DraftToken, accept_or_draw
from kvferry.engines.sampler import Sampler, distribution
from kvferry.errors import CapacityError, InputError, KVFerryError, LocalError
from kvferry.state import Exactness, ExecutionState, InlineTensor, SamplingParameters, pack_ids
from reference_kit import (
    GREEDY,
    PENALISED,
    SAMPLED,
    Layout,
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

STEPS, TOKENS, DRAFTS = 30, 75, 4
replace = msgspec.structs.replace
Change = Callable[[ExecutionState], ExecutionState]
HERE = Layout(draft_layers=3)
UNLIKE = [
    Layout(32, "HND", joined_kv=True, draft_layers=3),
    Layout(1, "NHD", draft_layers=3),
    Layout(32, "NHD", joined_kv=True, cross_layer=True, draft_layers=3),
]


def drafting(layout: Layout = HERE, num_drafts: int = DRAFTS) -> ReferenceEngine:
    """An engine whose draft model is the first 3 of the tiny model's 4 layers, unless asked."""
    return make_engine(layout, num_drafts=num_drafts)


def whole(engine: ReferenceEngine, sampling: SamplingParameters, **fields: object) -> list:
    """The run that stays in one engine."""
    start(engine, "r", prompt(TOKENS), sampling, limits(STEPS, **fields))
    return take(engine, "r", STEPS)


@pytest.mark.parametrize("draft_layers", [1, 3, 4])
@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        (GREEDY, {}),
        (replace(GREEDY, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4), {}),
        (replace(GREEDY, bad_tokens=(pack_ids([17]), pack_ids([40, 41]))), {}),
        (GREEDY, {"ignore_eos": False, "min_tokens_left": 9}),
    ],
)
def test_greedy_has_the_tokens_and_bits_of_plain_decoding(
    draft_layers: int, sampling: SamplingParameters, fields: dict
) -> None:
    """Whatever the drafts are worth: tokens, text and every step's logits are those without them."""
    expected = seen(whole(make_engine(), sampling, **fields))
    assert seen(whole(drafting(Layout(draft_layers=draft_layers)), sampling, **fields)) == expected


def test_drafts_save_rounds_and_the_round_stops_at_the_first_that_fails() -> None:
    """All layers as draft model are always right: 5 tokens a round; fewer are right at times."""
    for draft_layers, most in ((4, 9), (3, STEPS - 1)):
        engine = drafting(Layout(draft_layers=draft_layers))
        start(engine, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
        rounds = []
        while engine.request("r").finish is None:
            rounds.append(len(engine.step(["r"])))
        assert sum(rounds) == STEPS
        assert len(rounds) <= most
        assert max(rounds) <= DRAFTS + 1
        assert draft_layers == 4 or 1 in rounds[1:]


def test_a_stop_inside_a_round_ends_it_there() -> None:
    """Nothing of a draft after the stop string comes out, also where all drafts were right."""
    text = text_of(whole(make_engine(), GREEDY))
    ends = set()
    for begin in range(2, len(text) - 3, 3):
        stop = (text[begin : begin + 3],)
        expected = whole(make_engine(), GREEDY, stop_strings=stop)
        assert expected[-1].finish is FinishReason.STOP_STRING
        assert seen(whole(drafting(Layout(draft_layers=4)), GREEDY, stop_strings=stop)) == seen(expected)
        ends.add(len(expected) % (DRAFTS + 1))
    assert len(ends) == DRAFTS + 1  # at every place of a round


def test_beside_others_and_near_the_end_of_the_context() -> None:
    """Other requests change no bit; where the context ends, drafts are not made beyond it."""
    alone, together = drafting(), drafting()
    last = alone.model.config.max_context - 4
    for name, tokens in (("a", TOKENS), ("b", 9), ("c", last)):
        start(together, name, prompt(tokens), SAMPLED, limits(STEPS))
    got: dict[str, list] = {"a": [], "b": [], "c": []}
    while outputs := together.step():
        for output in outputs:
            got[output.request_id].append(output)
    for name, tokens in (("a", TOKENS), ("b", 9), ("c", last)):
        start(alone, name, prompt(tokens), SAMPLED, limits(STEPS))
        assert seen(got[name]) == seen(take(alone, name, STEPS))
    assert len(got["c"]) == 4
    assert got["c"][-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("seed", range(5))
def test_the_law_is_that_of_the_model(seed: int) -> None:
    """Draft and refusal together choose each token as often as the model alone would, within 4.5 sigma."""
    random = np.random.default_rng(seed)
    vocab, count = 5, 1500
    logits = random.normal(0, 2, vocab).astype(np.float32)
    given_sampling = SamplingParameters(temperature=1.3, top_k=int(random.integers(2, 6)), seed=seed)
    none = np.array([], np.int32)
    sampler = Sampler(given_sampling, vocab, none, none)
    wanted = distribution(sampler.adjusted(logits), given_sampling)
    drafted = random.dirichlet(np.full(vocab, 0.6))
    chosen, kept = np.zeros(vocab), 0
    for _ in range(count):
        draft = DraftToken(sampler.draw(drafted), drafted)
        token = accept_or_draw(sampler, logits, [], draft)
        chosen[token] += 1
        kept += token == draft.token
    sigma = np.sqrt(count * wanted * (1 - wanted)) + 1e-9
    assert (np.abs(chosen - count * wanted) < 4.5 * sigma + 1).all()
    accepted = np.minimum(wanted, drafted).sum()
    assert abs(kept - count * accepted) < 4.5 * np.sqrt(count * accepted * (1 - accepted)) + 1


def handed_over(
    sampling: SamplingParameters,
    rounds: int,
    target: ReferenceEngine,
    *,
    pending: bool,
    change: Change = keep,
    layout: Layout = HERE,
) -> list:
    """The run that changes engines after some rounds: between two, or with the next one's drafts pending."""
    source = drafting(layout)
    start(source, "r", prompt(TOKENS), sampling, limits(STEPS))
    before = [output for _ in range(rounds) for output in source.step(["r"])]
    if pending:
        source.draft(["r"])
    move(source, target, "r", change=change)
    assert source.pool.num_free_blocks == source.pool.group.num_blocks
    return before + take(target, "r", STEPS)


@pytest.mark.parametrize(("sampling", "layout"), list(zip([GREEDY, SAMPLED, PENALISED], UNLIKE, strict=True)))
def test_it_goes_on_bit_by_bit(sampling: SamplingParameters, layout: Layout) -> None:
    """Between rounds and with drafts pending, after no, one and some rounds, into unlike pools."""
    expected = seen(whole(drafting(), sampling))
    for rounds in (0, 1, 7):
        for pending in (False, True):
            target = drafting(layout)
            start(target, "busy", prompt(31, 9), SAMPLED, limits(99))
            target.step()
            assert seen(handed_over(sampling, rounds, target, pending=pending)) == expected


@settings(max_examples=7)
@given(st.lists(st.sampled_from(["step", "draft", "move"]), min_size=3, max_size=14), st.booleans())
def test_handed_over_at_any_time(calls: list[str], all_right: bool) -> None:
    """Any order of steps, drafts and moves back and forth: the continuation is the one that stayed."""
    layout = Layout(draft_layers=4 if all_right else 3)
    engines = [drafting(layout), drafting(replace_layout(layout))]
    for engine in (engines[0], stays := drafting(layout)):
        start(engine, "r", prompt(TOKENS), PENALISED, limits(STEPS))
    where, got = 0, []
    for call in calls:
        engine = engines[where]
        if engine.request("r").finish is not None:
            break
        if call == "step":
            got += engine.step(["r"])
        elif call == "draft":
            engine.draft(["r"])
        else:
            move(engine, engines[1 - where], "r")
            where = 1 - where
    got += take(engines[where], "r", STEPS)
    assert seen(got) == seen(take(stays, "r", STEPS))


def replace_layout(layout: Layout) -> Layout:
    """Unlike blocks and axes, the same draft model."""
    return Layout(32, "HND", joined_kv=True, draft_layers=layout.draft_layers)


# Leave one out: with sampling each loss shows or is refused.


def drafted_again(state: ExecutionState) -> ExecutionState:
    """Drafts and distributions forgotten: drafted anew, from a generator that has moved on."""
    return replace(state, draft=replace(state.draft, between_rounds=True, tokens=b"", probs=None))


def other_probs(state: ExecutionState) -> ExecutionState:
    """Distributions that the drafts were not drawn from."""
    probs = state.draft.probs.array()
    flat = InlineTensor.of(np.full(probs.shape, 1 / probs.shape[1]))
    return replace(state, draft=replace(state.draft, probs=flat))


def other_drafts(state: ExecutionState) -> ExecutionState:
    """Other tokens, as likely as any."""
    ids = [(token + 1) % 256 for token in np.frombuffer(state.draft.tokens, "<i4").tolist()]
    return replace(state, draft=replace(state.draft, tokens=pack_ids(ids)))


def without_draws(state: ExecutionState) -> ExecutionState:
    """The generator as it was before the drafts were drawn."""
    return replace(state, rng=replace(state.rng, draws=state.rng.draws - len(state.draft.tokens) // 4))


def seeded_anew(state: ExecutionState) -> ExecutionState:
    """The generator as at the beginning."""
    return replace(state, rng=replace(state.rng, draws=0))


def with_draft(**fields: object) -> Change:
    """Another draft section."""
    return lambda state: replace(state, draft=replace(state.draft, **fields))


@pytest.mark.parametrize(
    ("change", "pending"),
    [
        (drafted_again, True),
        (other_probs, True),
        (other_drafts, True),
        (without_draws, True),
        (seeded_anew, True),
        (seeded_anew, False),
    ],
)
def test_a_part_left_out_is_seen_in_a_sampled_continuation(change: Change, pending: bool) -> None:
    """Draft tokens, their distributions, the generator in a round and between rounds: other tokens follow."""
    expected = [output.token for output in whole(drafting(), SAMPLED)]
    for damage, same in ((keep, True), (change, False)):
        got = handed_over(SAMPLED, 7, drafting(UNLIKE[0]), pending=pending, change=damage)
        assert ([output.token for output in got] == expected) is same


@pytest.mark.parametrize("change", [drafted_again, other_drafts])
def test_a_greedy_continuation_needs_no_drafts(change: Change) -> None:
    """Lost or wrong drafts cost rounds and change nothing: the model's own choice decides."""
    expected = seen(whole(drafting(), GREEDY))
    assert seen(handed_over(GREEDY, 4, drafting(UNLIKE[0]), pending=True, change=change)) == expected


@pytest.mark.parametrize("pending", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_lost_draft_cache_is_seen_where_drafts_are_drawn(
    sampling: SamplingParameters, pending: bool
) -> None:
    """Zeros in the draft group: sampled, other tokens; greedy, the same tokens in more rounds."""
    rounds, tokens = [], []
    for lose in (False, True):
        source, target = drafting(Layout(draft_layers=4)), drafting(replace_layout(Layout(draft_layers=4)))
        start(source, "r", prompt(TOKENS), sampling, limits(STEPS))
        got = source.step(["r"])
        if pending:
            source.draft(["r"])
        move(source, target, "r")
        if lose:
            for tensor in target.layout.groups[1].tensors:
                stop = tensor.offset + target.pool.group.num_blocks * tensor.block_stride
                target.memory[tensor.offset : stop] = 0
        rounds.append(0)
        while target.request("r").finish is None:
            got += target.step(["r"])
            rounds[-1] += 1
        tokens.append([output.token for output in got])
    assert rounds[1] > rounds[0]
    assert (tokens[0] == tokens[1]) is (sampling is GREEDY)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: replace(s, draft=None), "draft"),
        (with_draft(tokens=b""), "check 8"),
        (with_draft(probs=None), "check 8.*draft.probs"),
        (lambda s: replace(s, draft=replace(s.draft, probs=cut(s))), "check 8.*rows"),
        (with_draft(between_rounds=True), "check 8"),
        (with_draft(method="first 2 layers, 4 a round"), "draft.method is first 2 layers"),
        (with_draft(fingerprint=None), "draft.fingerprint is missing"),
        (with_draft(layers=()), "check 8.*draft.layers"),
        (lambda s: replace(s, draft=replace(s.draft, tensors=s.draft.tensors[1:])), "check 8.*draft.tensors"),
        (lambda s: replace(s, draft=replace(s.draft, kv_tokens=s.kv_tokens - 17)), "check 6.*'draft'"),
        (lambda s: replace(s, blocks=s.blocks[:1]), "check 7.*'draft'"),
        (lambda s: replace(s, rng=None), "check 8.*rng"),
        (lambda s: replace(s, draft=replace(s.draft, probs=narrow(s))), "draft.probs: not float64"),
        (lambda s: replace(s, draft=replace(s.draft, probs=negative(s))), "draft.probs: not probabilities"),
    ],
)
def test_a_part_that_can_be_checked_is_refused(change: Change, named: str) -> None:
    """One error that names it; the target holds nothing of it, and the source goes on."""
    source, target = drafting(), drafting(UNLIKE[0])
    start(source, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    before = [output for _ in range(4) for output in source.step(["r"])]
    source.draft(["r"])
    free = target.pool.num_free_blocks
    with pytest.raises(KVFerryError, match=named):
        move(source, target, "r", change=change)
    assert target.pool.num_free_blocks == free
    with pytest.raises(LocalError, match="no such request"):
        target.request("r")
    assert seen(before + take(source, "r", STEPS)) == seen(whole(drafting(), SAMPLED))


def cut(state: ExecutionState) -> InlineTensor:
    """One row short."""
    return InlineTensor.of(state.draft.probs.array()[1:])


def narrow(state: ExecutionState) -> InlineTensor:
    """Rounded."""
    return InlineTensor.of(state.draft.probs.array().astype(np.float32))


def negative(state: ExecutionState) -> InlineTensor:
    """Not a distribution."""
    return InlineTensor.of(state.draft.probs.array() - 0.5)


def test_engines_that_draft_otherwise_are_refused() -> None:
    """No drafts there, none here, other layers, another number a round: each is named before a byte moves."""
    for source, target, named in (
        (drafting(), make_engine(), "draft"),
        (make_engine(), drafting(), "draft is missing|'draft'"),
        (drafting(), drafting(Layout(draft_layers=2)), "draft"),
        (drafting(), drafting(num_drafts=3), "expected first 3 layers, 3 a round"),
    ):
        start(source, "r", prompt(TOKENS), GREEDY, limits(STEPS))
        source.step(["r"])
        with pytest.raises(KVFerryError, match=named):
            move(source, target, "r")


def test_what_the_state_says_of_drafts() -> None:
    """Between rounds no draft; pending ones with a row each; tensors of layers of its own."""
    engine = drafting()
    start(engine, "r", prompt(TOKENS), SAMPLED, limits(STEPS))
    engine.step(["r"])
    between = engine.export_state("r", Exactness.BITS)
    assert (between.draft.between_rounds, between.draft.tokens, between.draft.probs) == (True, b"", None)
    engine.draft(["r"])
    pending = engine.export_state("r", Exactness.BITS)
    assert not pending.draft.between_rounds
    assert len(pending.draft.tokens) == 4 * DRAFTS
    assert pending.draft.probs.shape == (DRAFTS, 300)
    assert pending.draft.probs.array().sum(1) == pytest.approx(1)
    assert pending.draft.kv_tokens == pending.kv_tokens == TOKENS
    assert pending.rng.draws == between.rng.draws + DRAFTS
    assert [layer.layer for layer in pending.draft.layers] == [4, 5, 6]
    assert {entry.group for entry in pending.draft.tensors} == {"draft"}
    assert [blocks.group for blocks in pending.blocks] == ["full", "draft"]


def test_without_room_for_a_round_nothing_changes() -> None:
    """CapacityError; drafts, draws and blocks are as before, and it goes on when there is room."""
    engine = drafting(Layout(tokens=128, draft_layers=3))
    start(engine, "r", prompt(80), SAMPLED, limits(STEPS))
    before = engine.step(["r"])
    others = engine.pool.allocate(engine.pool.num_free_blocks)
    state = engine.export_state("r", Exactness.BITS)
    for call in (engine.draft, engine.step):
        with pytest.raises(CapacityError):
            call(["r"])
    same = engine.export_state("r", Exactness.BITS)
    assert replace(same, transfer_id=state.transfer_id, created_unix_ns=state.created_unix_ns) == state
    engine.pool.free(others)
    stays = drafting()
    start(stays, "r", prompt(80), SAMPLED, limits(STEPS))
    assert seen(before + take(engine, "r", STEPS)) == seen(take(stays, "r", STEPS))
    engine.release("r")
    assert engine.pool.num_free_blocks == engine.pool.group.num_blocks


def test_drafts_and_a_group_for_them_belong_together() -> None:
    """Drafts without a draft group, a group without drafts, more layers than the model has: one line."""
    for layout, num_drafts in ((Layout(), 4), (Layout(draft_layers=1), 0), (Layout(draft_layers=1), -1)):
        with pytest.raises(InputError, match="num_drafts"):
            make_engine(layout, num_drafts=num_drafts)
    with pytest.raises(LocalError, match="not that of tiny"):
        make_engine(Layout(draft_layers=5), num_drafts=4)
    with pytest.raises(LocalError, match="no draft model"):
        make_engine().draft()
