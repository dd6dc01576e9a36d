"""Checks 11 to 17: what arrived, what the engine says that it has, and the time left."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvferry import state as s
from kvferry.errors import (
    CorruptError,
    DeadlineError,
    IncompatibleError,
    KVFerryError,
    LocalError,
    PeerError,
)
from kvferry.layout import Role
from state_cases import (
    TRANSFER_ID,
    drop,
    good_arrival,
    good_import,
    good_replay,
    good_requirements,
    good_state,
    inline,
    put,
    with_last_logits,
)

CONV, SSM = s.TensorKey(layer=2, role=Role.CONV), s.TensorKey(layer=2, role=Role.SSM)


def change(path: str, value: Any) -> Callable[[Any], Any]:
    return lambda record: put(record, path, value)


def assert_refused(error: KVFerryError, number: int, names: str) -> None:
    name = s.CHECKS[number - 1].name
    assert error.message.startswith(f"check {number} ({name}): "), error.message
    assert names in error.message
    assert error.now_true == "nothing is visible to the decode engine; prefill keeps its copy"
    assert error.request_id == "req-1"


def test_good_arrival_import_and_replay_pass() -> None:
    """What came whole, was imported and replayed passes checks 11 to 17."""
    state, local = good_state(), good_requirements()
    s.check_after_move(state, local, good_arrival())
    s.verify_finite(state, good_recurrent())
    s.verify_import(state, local, good_import())
    s.verify_replay(state, good_replay())
    s.verify_audit(state, {"a": "1", "b": "2"}, {"b": "2"})
    s.verify_lease(state, 0.001)


@dataclass(frozen=True)
class Bad:
    """One thing wrong with what arrived."""

    check: int
    what: str
    damage: Callable[[Any], Any]
    names: str
    error: type[KVFerryError] = CorruptError


ALL_NAN = inline(np.full(320, np.nan, np.float32))
OTHER_ID = b"another-transfer"
FULL = "landed.0.blocks"
ARRIVALS = [
    Bad(11, "another transfer's commit", change("transfer_id", OTHER_ID), "commit.transfer_id", PeerError),
    Bad(11, "group not come", lambda a: drop(a, "groups.2"), "bytes of 'state' is there 0 times"),
    Bad(11, "group twice", lambda a: put(a, "groups", (*a.groups, a.groups[0])), "'full' is there 2 times"),
    Bad(11, "group unknown", change("groups.0.group", "x"), "bytes of 'full' is there 0 times"),
    Bad(11, "short", change("groups.1.nbytes", 63), "'window' is 63 bytes, expected 64"),
    Bad(11, "long", change("groups.1.nbytes", 65), "'window' is 65 bytes, expected 64"),
    Bad(11, "payload zeroed", change("groups.4.local_digest", "0"), "'cross' is 0, expected d"),
    Bad(11, "digest missing here", change("groups.4.local_digest", None), "is no digest"),
    Bad(11, "digest missing there", change("groups.4.peer_digest", None), "expected no digest"),
    Bad(12, "table not there", lambda a: drop(a, "landed.5"), "landed 'draft' is there 0 times", LocalError),
    Bad(12, "another's blocks", change("landed.0.owner", OTHER_ID), "'full'.owner", LocalError),
    Bad(12, "other block size", change(f"{FULL}.block_tokens", 8), "'full'.block_tokens is 8", LocalError),
    Bad(12, "block twice", change(f"{FULL}.ids", s.pack_ids([0, 1, 0])), "each block once", LocalError),
    Bad(12, "hole at the end", change(f"{FULL}.ids", s.pack_ids([0, 1])), "is 2 blocks", LocalError),
    Bad(12, "block too many", change(f"{FULL}.ids", s.pack_ids([0, 1, 2, 3])), "is 4 blocks", LocalError),
    Bad(12, "window misplaced", change("landed.1.blocks.first_logical_block", 6), "'window'.ids", LocalError),
    Bad(
        12, "two slots", change("landed.2.blocks.ids", s.pack_ids([1, 2])), "2 slots, expected 1", LocalError
    ),
    Bad(17, "lease over", change("lease_seconds_left", 0.0), "lease left is 0 s", DeadlineError),
    Bad(17, "lease unknown", change("lease_seconds_left", math.nan), "lease left is nan", DeadlineError),
    Bad(17, "lease endless", change("lease_seconds_left", math.inf), "lease left is inf", DeadlineError),
]


@pytest.mark.parametrize("bad", ARRIVALS, ids=lambda bad: f"{bad.check}-{bad.what}")
def test_bad_arrival_is_refused(bad: Bad) -> None:
    """Each thing wrong with what arrived is refused by its check, with the side at fault in the type."""
    with pytest.raises(KVFerryError) as caught:
        s.check_after_move(good_state(), good_requirements(), bad.damage(good_arrival()))
    assert type(caught.value) is bad.error
    assert_refused(caught.value, bad.check, bad.names)


@pytest.mark.parametrize("change_length", [-1, 1, -96])
def test_section_of_another_length_is_refused(change_length: int) -> None:
    """A tensor in a section is as long as its shape says, neither short nor long."""
    state = put(good_state(), "sections.1.data", bytes(96 + change_length))
    with pytest.raises(CorruptError) as caught:
        s.check_after_move(state, good_requirements(), good_arrival())
    assert_refused(caught.value, 11, f"section 'layer5.buffer' is {96 + change_length} bytes, expected 96")


def test_draft_tensors_in_sections_are_measured_too() -> None:
    """A drafter's tensor in a section is as long as its shape says; a state without drafts has none."""
    state = put(put(good_state(), "draft.tensors.0.group", None), "draft.tensors.0.section", "draft")
    for nbytes in (39 * 8 * 2, 39 * 8 * 2 - 1):
        sections = (*state.sections, s.Section(name="draft", data=bytes(nbytes)))
        if nbytes % 2 == 0:
            s.check_after_move(put(state, "sections", sections), good_requirements(), good_arrival())
        else:
            with pytest.raises(CorruptError, match="section 'draft' is 623 bytes, expected 624 bytes"):
                s.check_after_move(put(state, "sections", sections), good_requirements(), good_arrival())
    without = drop(put(good_state(), "draft", None), "blocks.5")
    arrival = drop(drop(good_arrival(), "groups.5"), "landed.5")
    s.check_after_move(without, good_requirements(), arrival)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tensors.11.quantisation", s.Quantisation(scheme="q4")),
        ("tensors.11.dtype", "q4_1"),
    ],
)
def test_packed_tensor_in_a_section_has_no_known_length(path: str, value: Any) -> None:
    """A quantised tensor, or one of an engine's own dtype, has its own packing."""
    state = put(put(good_state(), path, value), "sections.1.data", bytes(17))
    s.check_after_move(state, good_requirements(), good_arrival())


def test_refusal_after_the_move_counts_the_bytes() -> None:
    """The error says how many bytes had moved: six groups of 64."""
    with pytest.raises(DeadlineError) as caught:
        s.check_after_move(good_state(), good_requirements(), put(good_arrival(), "lease_seconds_left", -1.0))
    assert caught.value.bytes_done == 6 * 64


def test_agreeing_to_compare_no_digests_is_possible() -> None:
    """Where both sides agreed to none, there is nothing to compare, and lengths still are."""
    arrival = good_arrival()
    for i in range(6):
        arrival = put(put(arrival, f"groups.{i}.local_digest", None), f"groups.{i}.peer_digest", None)
    s.check_after_move(good_state(), good_requirements(), arrival)


def good_recurrent() -> dict[s.TensorKey, Any]:
    bits = np.full((24, 4), 0x3F80, np.uint16)  # 1.0 in bfloat16
    conv = s.InlineTensor(dtype="bfloat16", shape=(24, 4), data=bits.astype("<u2").tobytes())
    return {CONV: conv, SSM: np.zeros((4, 16, 8), np.float32)}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_recurrent_state_that_is_not_finite_is_refused(value: float) -> None:
    """A NaN or infinity in recurrent state is refused with its place."""
    shown = good_recurrent()
    shown[SSM][1, 2, 3] = value
    with pytest.raises(CorruptError) as caught:
        s.verify_finite(good_state(), shown)
    assert_refused(caught.value, 13, f"layer 2 ssm, flat index {1 * 128 + 2 * 8 + 3}")


@pytest.mark.parametrize("key", [CONV, SSM])
def test_recurrent_state_not_shown_is_refused(key: s.TensorKey) -> None:
    """An adapter that forgets to show a recurrent tensor does not pass by that."""
    shown = good_recurrent()
    del shown[key]
    with pytest.raises(IncompatibleError) as caught:
        s.verify_finite(good_state(), shown)
    assert_refused(caught.value, 13, f"layer 2 {key.role.value} is not shown")


def test_recurrent_state_in_a_section_is_looked_at() -> None:
    """Recurrent state that travels inside the record needs no showing, and is checked all the same."""
    raw = np.zeros((4, 16, 8), np.float32)
    raw[3, 15, 7] = np.nan
    for data, is_good in ((np.zeros_like(raw), True), (raw, False)):
        state = put(put(good_state(), "tensors.5.group", None), "tensors.5.section", "ssm")
        state = put(state, "sections", (*state.sections, s.Section(name="ssm", data=data.tobytes())))
        shown = {CONV: good_recurrent()[CONV]}
        if is_good:
            s.verify_finite(state, shown)
        else:
            with pytest.raises(CorruptError, match="layer 2 ssm, flat index 511"):
                s.verify_finite(state, shown)


@pytest.mark.parametrize(
    ("state", "name"),
    [
        (
            put(
                with_last_logits(good_state()), "tokens.last_logits", inline(np.full(320, np.nan, np.float32))
            ),
            "tokens.last_logits",
        ),
        (put(good_state(), "draft.probs", inline(np.full((3, 320), np.inf, np.float32))), "draft.probs"),
        (put(good_state(), "draft.hidden", inline(np.full(16, np.inf, np.float16))), "draft.hidden"),
    ],
)
def test_inline_tensors_that_are_not_finite_are_refused(state: s.ExecutionState, name: str) -> None:
    """Logits, draft probabilities and hidden rows are looked at too."""
    with pytest.raises(CorruptError) as caught:
        s.verify_finite(state, good_recurrent())
    assert_refused(caught.value, 13, f"{name}, flat index 0")


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_small_floats_are_told_apart_by_their_bits(dtype: str) -> None:
    """For each pattern of a dtype that NumPy lacks, NaN and infinity are found as its definition says."""
    exponent_bits, mantissa_bits, has_infinity = {
        "bfloat16": (8, 7, True),
        "float8_e5m2": (5, 2, True),
        "float8_e4m3fn": (4, 3, False),
    }[dtype]
    width = 1 + exponent_bits + mantissa_bits
    patterns = np.arange(2**width, dtype=np.uint32)
    exponent = (patterns >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = patterns & (2**mantissa_bits - 1)
    top = exponent == 2**exponent_bits - 1
    not_finite = top if has_infinity else top & (mantissa == 2**mantissa_bits - 1)
    raw = patterns.astype("<u2" if width == 16 else "u1")
    step = 1 if width == 8 else 127  # odd, so that every exponent comes by
    for at in range(0, raw.size, step):
        tensor = s.InlineTensor(dtype=dtype, shape=(1,), data=raw[at : at + 1].tobytes())
        shown = {CONV: tensor, SSM: good_recurrent()[SSM]}
        if not_finite[at]:
            with pytest.raises(CorruptError, match="check 13"):
                s.verify_finite(good_state(), shown)
        else:
            s.verify_finite(good_state(), shown)


IMPORTS = [
    (change("accepted_nbytes", 0), "import is 0 bytes, expected 4096 bytes"),
    (change("accepted_nbytes", 4095), "import is 4095 bytes"),
    (change("accepted_nbytes", 4097), "import is 4097 bytes"),
    (
        lambda r: put(put(r, "accepted_nbytes", 0), "given_nbytes", 0),
        "import is 0 bytes, expected some bytes",
    ),
    (lambda r: drop(r, "positions.2"), "read-back of 'state' is missing"),
    (change("positions.2.num_tokens", None), "read-back of 'state' is empty, expected 39 tokens"),
    (change("positions.0.num_tokens", 38), "read-back of 'full' is 38 tokens, expected 39 tokens"),
    (change("positions.4.num_tokens", 39), "read-back of 'cross' is 39 tokens, expected 29 tokens"),
    (change("positions.5.num_tokens", 0), "read-back of 'draft' is 0 tokens, expected 39 tokens"),
    (change("positions.0.first_token", 1), "'full', first token is token 1, expected at most token 0"),
    (change("positions.0.first_token", None), "'full', first token is empty"),
    (change("positions.1.first_token", 32), "'window', first token is token 32, expected at most token 31"),
]


@pytest.mark.parametrize(("damage", "names"), IMPORTS)
def test_import_that_does_not_agree_with_its_read_back_is_refused(damage: Any, names: str) -> None:
    """A return value of 0 with good positions, and good bytes with a wrong position, are both refused."""
    with pytest.raises(IncompatibleError) as caught:
        s.verify_import(good_state(), good_requirements(), damage(good_import()))
    assert_refused(caught.value, 14, names)


def test_import_without_drafts_needs_no_draft_position() -> None:
    """A request without drafts is not asked where its draft cache stands."""
    state = put(good_state(), "draft", None)
    s.verify_import(state, good_requirements(), drop(good_import(), "positions.5"))


REPLAYS = [
    (change("tokens_digest", "0" * 64), "sampler history is 000000000000"),
    (change("prompt_tokens", 0), "sampler prompt border is 0, expected 37"),
    (change("rng", None), "rng read back is missing"),
    (change("rng.draws", 0), "rng read back is philox at draw 0"),
    (change("rng.seed", 1), "rng read back is philox at draw 3"),
    (change("text", None), "text replayed is None"),
    (change("text.emitted_chars", 11), "text replayed"),
    (change("text.tail", ""), "text replayed"),
    (change("grammar_mask_digest", None), "grammar mask replayed is missing"),
    (change("grammar_mask_digest", "9" * 64), "grammar mask replayed is 999999999999, expected 888888888888"),
]


@pytest.mark.parametrize(("damage", "names"), REPLAYS)
def test_replay_that_stands_elsewhere_is_refused(damage: Any, names: str) -> None:
    """A sampler, text or grammar that does not stand where it stood at prefill is refused."""
    with pytest.raises(IncompatibleError) as caught:
        s.verify_replay(good_state(), damage(good_replay()))
    assert_refused(caught.value, 15, names)


def test_replay_of_what_the_state_does_not_have_is_not_asked_for() -> None:
    """Greedy, without text and grammar: only the history counts."""
    state = put(put(put(good_state(), "text", None), "grammar", None), "sampling.temperature", 0.0)
    replay = s.Replay(tokens_digest=good_replay().tokens_digest, prompt_tokens=37)
    s.verify_replay(state, replay)


@pytest.mark.parametrize(
    ("exported", "reexported", "error", "names"),
    [
        ({"a": "1"}, {"a": "2"}, CorruptError, "audit 'a' is 2, expected 1"),
        ({"a": "1"}, {"b": "1"}, CorruptError, "audit 'b' is 1, expected missing"),
        ({"a": "1"}, {}, LocalError, "audit is empty"),
    ],
)
def test_audit_finds_what_was_exported_differently(
    exported: dict[str, str], reexported: dict[str, str], error: type[KVFerryError], names: str
) -> None:
    """A re-export that differs, or compares nothing, is refused."""
    with pytest.raises(KVFerryError) as caught:
        s.verify_audit(good_state(), exported, reexported)
    assert type(caught.value) is error
    assert_refused(caught.value, 16, names)


@pytest.mark.parametrize("seconds_left", [0.0, -5.0, math.nan, math.inf])
def test_lease_over_at_the_swap_is_refused(seconds_left: float) -> None:
    """No lease, no swap; a time that is no time is no lease."""
    with pytest.raises(DeadlineError) as caught:
        s.verify_lease(good_state(), seconds_left)
    assert_refused(caught.value, 17, "lease left")
    assert good_state().transfer_id == TRANSFER_ID
