"""Which differences between two workers matter, for which exactness."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry import state as s
from state_cases import FINGERPRINT, LORA, put

BITS, TOKENS, BEST = s.Exactness.BITS, s.Exactness.TOKENS, s.Exactness.BEST_EFFORT
OTHER = "f" * 64

# field, another value, and for which exactness the difference is a reason.
TABLE = [
    ("engine", "toy/2", {BITS}),
    ("build", "numpy-1", {BITS}),
    ("weights", OTHER, {BITS, TOKENS, BEST}),
    ("config", OTHER, {BITS, TOKENS, BEST}),
    ("tokenizer", OTHER, {BITS, TOKENS, BEST}),
    ("vocab_size", 321, {BITS, TOKENS, BEST}),
    ("max_context", 128, set()),
    ("probe", OTHER, {BITS}),
    ("lora", (s.LoraAdapter(name="pirate", weights=OTHER, scale=2.0),), {BITS, TOKENS, BEST}),
    ("parallel", s.Parallel(tp=2), {BITS}),
]


@pytest.mark.parametrize("exactness", list(s.Exactness))
@pytest.mark.parametrize(("field", "value", "matters"), TABLE)
def test_each_field_by_its_class(
    field: str, value: Any, matters: set[s.Exactness], exactness: s.Exactness
) -> None:
    """A difference in a field is a reason exactly where its class says so, whichever side has it."""
    other = put(FINGERPRINT, field, value)
    for local, peer in ((FINGERPRINT, other), (other, FINGERPRINT)):
        reasons = s.compare_fingerprints(local, peer, exactness)
        assert bool(reasons) == (exactness in matters)
        assert all(reason.startswith(field) for reason in reasons)


def test_every_field_has_a_class() -> None:
    """No fingerprint field is left out of the comparison, nor of the table above."""
    assert tuple(s.FINGERPRINT_CLASSES) == s.Fingerprint.__struct_fields__
    assert [field for field, _, _ in TABLE] == list(s.Fingerprint.__struct_fields__)


def test_equal_workers_fit() -> None:
    """The same worker twice fits for bits."""
    assert s.compare_fingerprints(FINGERPRINT, FINGERPRINT, BITS) == ()


@pytest.mark.parametrize("missing", ["local", "peer", "both"])
def test_bits_need_a_probe_on_both_sides(missing: str) -> None:
    """A probe that is missing is no equal probe."""
    none = put(FINGERPRINT, "probe", None)
    local, peer = (FINGERPRINT if missing == "peer" else none), (FINGERPRINT if missing == "local" else none)
    (reason,) = s.compare_fingerprints(local, peer, BITS)
    assert reason.startswith("probe: ")
    assert "missing" in reason
    assert s.compare_fingerprints(local, peer, TOKENS) == ()


def test_reasons_give_both_values_and_the_rule() -> None:
    """A reason reads as a sentence, digests shortened to what tells them apart."""
    other = put(put(FINGERPRINT, "weights", OTHER), "vocab_size", 321)
    assert s.compare_fingerprints(FINGERPRINT, other, BEST) == (
        "weights: 111111111111 here, ffffffffffff at the peer (must be equal)",
        "vocab_size: 320 here, 321 at the peer (must be equal)",
    )


def test_adapters_conflict_only_under_one_name() -> None:
    """Each side may have adapters of its own; one name has to be one adapter at one scale."""
    mine = put(FINGERPRINT, "lora", (LORA,))
    apart = put(FINGERPRINT, "lora", (put(LORA, "name", "other"),))
    assert s.compare_fingerprints(mine, apart, BITS) == ()
    (reason,) = s.compare_fingerprints(mine, put(FINGERPRINT, "lora", (put(LORA, "scale", 1.0),)), BITS)
    assert "lora 'pirate': aaaaaaaaaaaa at scale 2 here, aaaaaaaaaaaa at scale 1 at the peer" in reason


def test_proven_split_keeps_bits() -> None:
    """A split that is proven bit-exact is no reason; proving another conversion does not help."""
    other = put(FINGERPRINT, "parallel", s.Parallel(tp=2))
    assert s.compare_fingerprints(FINGERPRINT, other, BITS, (s.Conversion.PARALLEL,)) == ()
    assert s.compare_fingerprints(FINGERPRINT, other, BITS, (s.Conversion.LAYOUT,))
