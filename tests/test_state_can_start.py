"""Checks 1 to 10: the good state passes, and each damage is refused by the check that is meant for it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry import state as s
from kvferry.errors import (
    IncompatibleError,
    KVFerryError,
)
from state_cases import (
    LORA,
    VOCAB_SIZE,
    drop,
    get,
    good_arrival,
    good_expectation,
    good_import,
    good_replay,
    good_requirements,
    good_state,
    put,
    with_last_logits,
)
from state_damages import DAMAGES, GREEDY, OTHER, Damage, both, change


@pytest.mark.parametrize("state", [good_state(), with_last_logits(good_state())], ids=["pending", "logits"])
def test_good_state_passes(state: s.ExecutionState) -> None:
    """The whole state, with a pending token or with last logits, passes all ten checks."""
    s.check_before_move(state, good_requirements(), good_expectation())


def test_a_grammar_may_be_left_to_the_import() -> None:
    """A side that compiles as it imports says so, and the text's own digest is checked all the same."""
    expect = msgspec.structs.replace(good_expectation(), compiled_grammars=None)
    s.check_before_move(good_state(), good_requirements(), expect)
    other = change("grammar.text", "other")(good_state())
    with pytest.raises(IncompatibleError, match=r"check 8.*grammar.digest"):
        s.check_before_move(other, good_requirements(), expect)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: f"{damage.check}-{damage.what}")
def test_each_damage_is_refused_by_its_check(damage: Damage) -> None:
    """One thing wrong is refused by the check meant for it, with the field named and the right fault."""
    state = damage.state(good_state())
    local, expect = damage.local(good_requirements()), damage.expect(good_expectation())
    with pytest.raises(KVFerryError) as caught:
        s.check_before_move(state, local, expect)
    assert type(caught.value) is damage.error
    name = s.CHECKS[damage.check - 1].name
    assert caught.value.message.startswith(f"check {damage.check} ({name}): "), caught.value.message
    assert damage.names in caught.value.message


def test_every_early_check_has_damages() -> None:
    """No check of the first ten is without a case in the table above."""
    assert {damage.check for damage in DAMAGES} == set(range(1, 11))


HARMLESS = {
    "positions.mrope": "only its own engine can tell that it needs it",
    "sampling.top_k": "off is a value",
    "sampling.allowed_tokens": "off is a value",
    "sampling.seed": "the random state has it",
    "usage": "for the bill",
    "layers.5.cumulative_length": "its entry_count says the same",
}


def optional_paths(record: Any, prefix: str = "") -> list[str]:
    """Every field that is set here and may be None, to any depth."""
    paths = []
    items: Any
    if isinstance(record, tuple):
        items = [(str(i), value, False) for i, value in enumerate(record)]
    elif isinstance(record, msgspec.Struct):
        optional = {
            field.name
            for field in msgspec.inspect.type_info(type(record)).fields
            if isinstance(field.type, msgspec.inspect.UnionType)
            and any(isinstance(kind, msgspec.inspect.NoneType) for kind in field.type.types)
        }
        items = [(name, getattr(record, name), name in optional) for name in record.__struct_fields__]
    else:
        return []
    for name, value, may_be_none in items:
        path = f"{prefix}{name}"
        if may_be_none and value is not None:
            paths.append(path)
        paths += optional_paths(value, f"{path}.")
    return paths


@pytest.mark.parametrize("path", optional_paths(good_state()))
def test_leaving_out_any_optional_part_is_refused(path: str) -> None:
    """Each optional field that this state has, left out, is refused; the few exceptions have a reason."""
    if path in HARMLESS:
        s.check_before_move(put(good_state(), path, None), good_requirements(), good_expectation())
        return
    with pytest.raises(KVFerryError, match=r"check \d+ \("):
        s.check_before_move(put(good_state(), path, None), good_requirements(), good_expectation())


def test_lower_exactness_asks_for_less() -> None:
    """Probe, engine, build, split, layout, block size and placement may differ for tokens, not for bits."""
    state = put(good_state(), "exactness", s.Exactness.TOKENS)
    for path, value in (
        ("fingerprint.probe", None),
        ("fingerprint.engine", "other"),
        ("fingerprint.build", "other"),
        ("fingerprint.parallel", s.Parallel(tp=4)),
        ("blocks.0.layout", "HND"),
        ("blocks.0.placement", None),
    ):
        state = put(state, path, value)
    state = put(put(state, "blocks.0.block_tokens", 8), "blocks.0.ids", s.pack_ids(range(5)))
    local = put(good_requirements(), "placement", s.Placement.UNCONTROLLED)
    s.check_before_move(state, local, good_expectation())
    with pytest.raises(IncompatibleError, match=r"check 3 \(fingerprint\): fingerprint\.weights"):
        s.check_before_move(put(state, "fingerprint.weights", OTHER), local, good_expectation())


@pytest.mark.parametrize(
    ("proven", "path", "value"),
    [
        (s.Conversion.LAYOUT, "blocks.0.layout", "HND"),
        (s.Conversion.BLOCK_TOKENS, "blocks.0.block_tokens", 8),
        (s.Conversion.PARALLEL, "fingerprint.parallel", s.Parallel(tp=2)),
    ],
)
def test_proven_conversion_keeps_bits(proven: s.Conversion, path: str, value: Any) -> None:
    """A conversion that is proven for the pair passes for bits; another one being proven does not help."""
    state = put(good_state(), path, value)
    if path.endswith("block_tokens"):
        state = put(state, "blocks.0.ids", s.pack_ids(range(5)))
    s.check_before_move(state, put(good_requirements(), "proven", (proven,)), good_expectation())
    others = tuple(set(s.Conversion) - {proven})
    with pytest.raises(IncompatibleError):
        s.check_before_move(state, put(good_requirements(), "proven", others), good_expectation())


def test_what_may_be_absent_passes() -> None:
    """A plain greedy request needs no random state, drafts, grammar, text, adapters or images."""
    state = good_state()
    for path in ("rng", "draft", "grammar", "text", "multimodal", "logprobs", "usage"):
        state = put(state, path, None)
    state = drop(GREEDY(state), "blocks.5")
    state = put(put(state, "limits.stop_strings", ()), "fingerprint.lora", ())
    for draft in (put(good_requirements().draft, "must_ship", False), None):
        local = put(good_requirements(), "draft", draft)
        s.check_before_move(state, local, put(good_expectation(), "parts", ()))


def test_between_rounds_needs_no_pending_drafts() -> None:
    """Handed over between rounds, with the draft cache, passes; so do greedy drafts without probabilities."""
    rest = both(
        change("draft.between_rounds", True), change("draft.tokens", b""), change("draft.probs", None)
    )
    s.check_before_move(rest(good_state()), good_requirements(), good_expectation())
    greedy = both(GREEDY, change("draft.probs", None))
    s.check_before_move(greedy(good_state()), good_requirements(), good_expectation())
    best = put(rest(good_state()), "exactness", s.Exactness.BEST_EFFORT)
    best = put(drop(best, "blocks.5"), "draft.tensors", ())
    local = put(put(good_requirements(), "draft", None), "groups", good_requirements().groups[:5])
    s.check_before_move(best, local, good_expectation())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 1.0),
        ("min_p", 0.0),
        ("min_p", 1.0),
        ("temperature", 1e-9),
        ("presence_penalty", -2.0),
        ("allowed_tokens", s.pack_ids([VOCAB_SIZE - 1])),
        ("logit_bias", (s.LogitBias(token=VOCAB_SIZE - 1, bias=float("-inf")),)),
    ],
)
def test_sampling_may_reach_its_limits(field: str, value: Any) -> None:
    """Values that mean off, or the most there is, are values."""
    s.check_before_move(
        put(good_state(), f"sampling.{field}", value), good_requirements(), good_expectation()
    )


def test_counts_may_reach_their_limit() -> None:
    """Everything emitted, a draft cache up to the last draft, a last token left, the context just full."""
    state = put(put(good_state(), "tokens.emitted_tokens", 3), "logprobs.output", ())
    state = put(state, "draft.kv_tokens", 43)
    for i in range(2):
        state = put(state, f"draft.tensors.{i}.shape", (43, 1, 8))
    state = put(state, "limits.max_tokens_left", 1)
    local = put(good_requirements(), "fingerprint.max_context", 41)
    s.check_before_move(state, local, good_expectation())


def test_opaque_group_may_have_any_number_of_slots() -> None:
    """An engine's opaque bytes take as many slots as they need, but not none."""
    need = s.GroupNeed(group="native:toy", block_tokens=None, layout="native:toy", slots=None)
    local = put(good_requirements(), "groups", (*good_requirements().groups, need))
    expect = put(
        good_expectation(), "room", (*good_expectation().room, s.GroupRoom(group="native:toy", num_blocks=3))
    )

    def state(ids: tuple[int, ...]) -> s.ExecutionState:
        blocks = s.GroupBlocks(
            group="native:toy", block_tokens=None, layout="native:toy", ids=s.pack_ids(ids)
        )
        return put(good_state(), "blocks", (*good_state().blocks, blocks))

    s.check_before_move(state((1, 2, 3)), local, expect)
    with pytest.raises(IncompatibleError, match="0 slots, expected at least one"):
        s.check_before_move(state(()), local, expect)


def test_table_form_must_fit_its_group() -> None:
    """Slots where blocks are due, or the reverse, are refused."""
    blocks = put(put(good_state(), "blocks.2.block_tokens", 64), "exactness", s.Exactness.TOKENS)
    with pytest.raises(IncompatibleError, match=r"check 7 .*'state'\.block_tokens is 64"):
        s.check_before_move(blocks, good_requirements(), good_expectation())


def test_error_says_what_a_reader_of_a_log_needs() -> None:
    """The error names check, field, both values, the request, what is true now and the next step."""
    with pytest.raises(IncompatibleError) as caught:
        s.check_before_move(put(good_state(), "kv_tokens", 38), good_requirements(), good_expectation())
    error = caught.value
    assert (
        error.message == "check 6 (lengths): kv_tokens is 38, expected 39, as 40 tokens less the pending one"
    )
    assert (error.request_id, error.phase, error.bytes_done) == ("req-1", "can_start", 0)
    assert error.now_true == "nothing was moved; prefill keeps its copy"
    assert error.next_step


def test_error_after_an_early_push_does_not_claim_that_nothing_moved() -> None:
    """Where layers were pushed ahead of the record, the error counts them and says that none is visible."""
    expect = put(good_expectation(), "bytes_moved", 4096)
    with pytest.raises(IncompatibleError) as caught:
        s.check_before_move(put(good_state(), "kv_tokens", 38), good_requirements(), expect)
    assert caught.value.bytes_done == 4096
    assert caught.value.now_true == "nothing is visible to the decode engine; prefill keeps its copy"


def test_checks_are_numbered_named_and_staged() -> None:
    """17 checks in order, ten of them before the move, each with its own name, question and next step."""
    assert [check.number for check in s.CHECKS] == list(range(1, 18))
    assert len({check.name for check in s.CHECKS}) == 17
    assert all(check.question.endswith("?") and check.next_step for check in s.CHECKS)
    assert [check.stage for check in s.CHECKS] == (
        [s.Stage.BEFORE_MOVE] * 10 + [s.Stage.AFTER_MOVE] * 2 + [s.Stage.AFTER_IMPORT] * 4 + [s.Stage.COMMIT]
    )


def test_first_refusal_is_that_of_the_earliest_check() -> None:
    """With several things wrong, the check with the lowest number speaks."""
    state = put(put(good_state(), "kv_tokens", 1), "request_id", "req-9")
    with pytest.raises(IncompatibleError, match=r"check 2 \(identity\)"):
        s.check_before_move(state, good_requirements(), put(good_expectation(), "batch_slots", 0))


def test_what_checks_are_given_survives_another_process() -> None:
    """Requirements, expectation and reports are data: they round trip through msgpack and are equal."""
    reports = (good_arrival(), good_import(), good_replay())
    for record in (good_requirements(), good_expectation(), *reports):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record)) == record


def test_adapter_loaded_beside_others_passes() -> None:
    """Other adapters loaded here do not matter to a request that uses none of them."""
    other = s.LoraAdapter(name="other", weights="0" * 64, scale=1.0)
    local = put(good_requirements(), "fingerprint.lora", (other, LORA))
    s.check_before_move(good_state(), local, good_expectation())
    assert get(local, "fingerprint.lora.1.name") == "pirate"
