"""Structured output: it fits its grammar, and goes on exactly in another engine, which replays it."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from kvferry.engines.grammar import OutputGrammar, grammar_kinds
from kvferry.engines.reference import FinishReason, GrammarKind, GrammarText, ReferenceEngine
from kvferry.engines.text import NoTokenizer
from kvferry.errors import IncompatibleError, InputError, KVFerryError, LocalError
from kvferry.state import Exactness, ExecutionState, SamplingParameters, grammar_digest
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
    take,
    text_of,
    tiny,
)

replace = msgspec.structs.replace
Change = Callable[[ExecutionState], ExecutionState]
MOST = 60
SCHEMA = GrammarText(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 8},
                "n": {"type": "integer", "minimum": 0, "maximum": 99999},
            },
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
)
REGEX = GrammarText(GrammarKind.REGEX, r"(up|down)( (up|down)){3,9}")
LARK = GrammarText(GrammarKind.LARK, 'start: "(" start? ")" | "x"')


def engine(*, drafts: bool = False, unlike: bool = False) -> ReferenceEngine:
    """With or without a draft model, over one pool or another."""
    layout = {"block_size": 32, "axis_order": "HND", "joined_kv": True} if unlike else {}
    return make_engine(Layout(**layout, draft_layers=3 * drafts), num_drafts=4 * drafts)


def begin(at: ReferenceEngine, sampling: SamplingParameters, given: GrammarText = SCHEMA) -> None:
    """Submit and prefill; the end-of-reply token ends it where the grammar may."""
    at.submit("r", prompt(75), sampling, limits(MOST, ignore_eos=False), given)
    while not at.prefill("r"):
        pass


def whole(at: ReferenceEngine, sampling: SamplingParameters, given: GrammarText = SCHEMA) -> list:
    """The run that stays."""
    begin(at, sampling, given)
    return take(at, "r", MOST)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_the_output_fits(sampling: SamplingParameters, drafts: bool) -> None:
    """Noise from random weights is JSON of the schema, text of the pattern, words of the grammar."""
    outputs = whole(engine(drafts=drafts), sampling)
    assert outputs[-1].finish is FinishReason.GRAMMAR
    value = json.loads(text_of(outputs))
    assert value.keys() == {"name", "n"}
    assert len(value["name"]) <= 8
    assert 0 <= value["n"] <= 99999
    assert re.fullmatch(REGEX.text, text_of(whole(engine(drafts=drafts), sampling, REGEX)))
    word = text_of(whole(engine(drafts=drafts), sampling, LARK))
    assert len(word) == MOST or re.fullmatch(r"(\(*)x?(\)*)", word)


def test_drafts_change_no_bit_of_a_greedy_run() -> None:
    """Masks of drafts are those of the tokens one by one."""
    for given in (SCHEMA, REGEX, LARK):
        plain = whole(engine(), GREEDY, given)
        assert seen(whole(engine(drafts=True), GREEDY, given)) == seen(plain)


def test_without_the_grammar_it_is_another_text() -> None:
    """The mask decides here, so the tests of this file can fail."""
    free = engine()
    free.submit("r", prompt(75), GREEDY, limits(MOST, ignore_eos=False))
    while not free.prefill("r"):
        pass
    assert text_of(take(free, "r", MOST)) != text_of(whole(engine(), GREEDY))


def handed_over(
    sampling: SamplingParameters,
    steps: int,
    *,
    drafts: bool = False,
    change: Change = keep,
    given: GrammarText = SCHEMA,
) -> list:
    """The run that changes engines after some steps, with drafts pending where there are any."""
    source, target = engine(drafts=drafts), engine(drafts=drafts, unlike=True)
    begin(source, sampling, given)
    before = [output for _ in range(steps) for output in source.step(["r"])]
    if drafts and steps % 2:
        source.draft(["r"])
    move(source, target, "r", change=change)
    return before + take(target, "r", MOST)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, PENALISED])
def test_it_goes_on_bit_by_bit(sampling: SamplingParameters, drafts: bool) -> None:
    """At the beginning, inside a name, a number, a character: the mask is found again by replay."""
    expected = whole(engine(drafts=drafts), sampling)
    for steps in (0, 1, 5) if drafts else range(0, len(expected) - 1, 7):
        assert seen(handed_over(sampling, steps, drafts=drafts)) == seen(expected)


def with_grammar(**fields: object) -> Change:
    """Another grammar section."""
    return lambda state: replace(state, grammar=replace(state.grammar, **fields))


def other_text(text: str) -> Change:
    """Another grammar, with its own digest."""
    return lambda state: replace(
        state,
        grammar=replace(state.grammar, text=text, digest=grammar_digest(state.grammar.kind, text)),
    )


LOOSER = SCHEMA.text.replace('"maxLength": 8', '"maxLength": 9')  # the name has 8 when it is handed over


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (with_grammar(kind="llguidance 0.1.0 json_schema"), "check 8.*grammar.kind is llguidance 0.1.0"),
        (with_grammar(kind="xgrammar 0.2.8 json_schema"), "check 8.*expected one of: llguidance"),
        (with_grammar(text=LOOSER), "check 8.*grammar.digest"),
        (other_text(LOOSER), "check 15.*grammar mask"),
        (other_text('{"type": "array"}'), "doesn't satisfy the grammar"),
        (other_text("{"), "grammar: .*EOF"),
        (with_grammar(accepted_tokens=0), "grammar: .* after 0 tokens, not after"),
        (with_grammar(mask_digest="0" * 64), "check 15.*grammar mask"),
    ],
)
def test_a_part_that_can_be_checked_is_refused(change: Change, named: str) -> None:
    """Another version, library, text, place: one error that names it, nothing left; the source goes on."""
    source, target = engine(), engine(unlike=True)
    begin(source, GREEDY)
    before = [output for _ in range(21) for output in source.step(["r"])]
    free = target.pool.num_free_blocks
    with pytest.raises(KVFerryError, match=named):
        move(source, target, "r", change=change)
    assert target.pool.num_free_blocks == free
    with pytest.raises(LocalError, match="no such request"):
        target.request("r")
    assert seen(before + take(source, "r", MOST)) == seen(whole(engine(), GREEDY))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_grammar_left_out_is_seen(sampling: SamplingParameters) -> None:
    """A record without it is whole in itself, and the text that follows fits no more."""
    got = handed_over(sampling, 5, change=lambda state: replace(state, grammar=None))
    expected = whole(engine(), sampling)
    assert seen(got)[:5] == seen(expected)[:5]
    assert text_of(got) != text_of(expected)
    with pytest.raises(json.JSONDecodeError):
        json.loads(text_of(got))


def test_the_last_token_alone_is_no_replay() -> None:
    """Accepting only the newest output, as some systems do, is refused, or gives another mask."""
    begin(source := engine(), GREEDY)
    ids = [output.token for output in take(source, "r", 12)]
    made = OutputGrammar(SCHEMA, tiny().tokenizer, 300)
    with pytest.raises(InputError, match="doesn't satisfy"):
        made.accept(ids[-1:])
    fresh, replayed = (OutputGrammar(SCHEMA, tiny().tokenizer, 300) for _ in range(2))
    replayed.accept(ids)
    assert fresh.mask_digest() != replayed.mask_digest()
    assert source.export_state("r", Exactness.BITS).grammar.mask_digest == replayed.mask_digest()


def test_looking_ahead_changes_nothing() -> None:
    """Masks after drafts are those after the same tokens, and the grammar stands where it stood."""
    grammar, other = (OutputGrammar(SCHEMA, tiny().tokenizer, 300) for _ in range(2))
    ids = list(b'{"name": "ab", "n": 12}')
    before = grammar.mask_digest()
    for stop in range(len(ids)):
        assert (grammar.allowed(ids[:stop]) == other.allowed()).all()
        assert not grammar.is_done(ids[:stop])
        other.accept(ids[stop : stop + 1])
    assert grammar.is_done(ids)
    assert other.is_done()
    assert grammar.mask_digest() == before
    bits = np.packbits(grammar.allowed(), bitorder="little")
    assert before == hashlib.sha256(bits.tobytes()).hexdigest()


def test_without_the_extra_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request with a grammar is told what to install; decode loads no kind, and says so before the move."""
    begin(source := engine(), GREEDY)
    state = source.export_state("r", Exactness.BITS)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert grammar_kinds() == ()
    without = engine()
    with pytest.raises(LocalError, match="'llguidance'") as raised:
        begin(without, GREEDY)
    assert raised.value.next_step == "pip install 'kvferry[grammar]'"
    assert without.pool.num_free_blocks == without.pool.group.num_blocks
    with pytest.raises(IncompatibleError, match=r"check 8.*llguidance .*expected one of: none"):
        move(source, without, "r", change=lambda s: replace(s, grammar=state.grammar))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (GrammarText(GrammarKind.JSON_SCHEMA, '{"type"'), "EOF"),
        (GrammarText(GrammarKind.JSON_SCHEMA, '{"type": "blurb"}'), "Invalid type: blurb"),
        (GrammarText(GrammarKind.LARK, "start: ((("), "Expected token"),
        (GrammarText(GrammarKind.REGEX, "(a"), "regex parse error"),
    ],
)
def test_a_text_that_is_no_grammar(given: GrammarText, named: str) -> None:
    """InputError in one line; nothing is held."""
    at = engine()
    with pytest.raises(InputError, match=named) as raised:
        begin(at, GREEDY, given)
    assert "\n" not in str(raised.value)
    assert at.pool.num_free_blocks == at.pool.group.num_blocks


def test_an_engine_without_a_tokenizer_takes_no_grammar() -> None:
    """Ids in, ids out: there is no text to fit."""
    with pytest.raises(InputError, match="no tokenizer"):
        OutputGrammar(SCHEMA, NoTokenizer(), 300)


@pytest.mark.parametrize("drafts", [False, True])
def test_parameters_that_leave_no_token_are_an_error(drafts: bool) -> None:
    """A mask that forbids what the grammar wants: no token is made up, and no other request loses one."""
    at = engine(drafts=drafts)
    at.submit("other", prompt(31), SAMPLED, limits(20))
    only = np.array([ord(character) for character in '{ "nam'], "<i4").tobytes()  # never the e
    begin(at, replace(GREEDY, allowed_tokens=only))
    while not at.prefill("other"):
        pass
    got: dict[str, list] = {"r": [], "other": []}

    def run_all() -> None:
        while True:
            for output in at.step():
                got[output.request_id].append(output)

    with pytest.raises(LocalError, match=r"no token may come next.*request r") as raised:
        run_all()
    assert raised.value.request_id == "r"
    assert text_of(got["r"]).endswith('"nam')
    alone = engine(drafts=drafts)
    alone.submit("other", prompt(31), SAMPLED, limits(20))
    while not alone.prefill("other"):
        pass
    assert seen(got["other"]) == seen(take(alone, "other", 20))
    with pytest.raises(LocalError, match="no token may come next"):
        at.step(["r"])
    for name in got:
        at.release(name)
    assert at.pool.num_free_blocks == at.pool.group.num_blocks
