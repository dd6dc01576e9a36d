"""Digests of weights, configuration, ids and grammars, and the numerics probe."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import state as s
from kvferry.errors import LocalError

A = ("a", "float32", (2, 3), np.arange(6, dtype="<f4").reshape(2, 3))
B = ("b", "uint8", (4,), bytes([1, 2, 3, 4]))


def changed(tensor: Any, at: int, value: Any) -> Any:
    return (*tensor[:at], value, *tensor[at + 1 :])


def test_weights_digest_does_not_depend_on_order_or_container() -> None:
    """The same tensors in another order, lazily, or in another buffer type are the same weights."""
    want = s.weights_digest([A, B])
    assert s.weights_digest(iter([B, A])) == want
    assert s.weights_digest([changed(A, 3, A[3].tobytes()), changed(B, 3, memoryview(B[3]))]) == want
    assert s.weights_digest([changed(A, 3, np.asfortranarray(A[3])), B]) == want
    assert s.weights_digest([changed(A, 2, [2, 3]), B]) == want
    assert len(want) == 64


@pytest.mark.parametrize(
    "other",
    [
        [A],
        [changed(A, 0, "c"), B],
        [changed(A, 1, "float16"), B],
        [changed(A, 2, (3, 2)), B],
        [changed(A, 3, np.nextafter(A[3], 9, dtype="<f4")), B],
        [changed(A, 0, "b"), changed(B, 0, "a")],
        [changed(A, 3, B[3]), changed(B, 3, A[3].tobytes())],
        [A, B, ("c", "uint8", (0,), b"")],
    ],
)
def test_weights_digest_tells_other_weights_apart(other: list[Any]) -> None:
    """Any other name, dtype, shape, last bit, pairing or number of tensors is other weights."""
    assert s.weights_digest(other) != s.weights_digest([A, B])


@pytest.mark.parametrize("bad", [[], [A, A]])
def test_weights_that_are_no_model_are_refused(bad: list[Any]) -> None:
    """No tensor at all, or a name twice, has no identity."""
    with pytest.raises(LocalError):
        s.weights_digest(bad)


def test_config_digest_is_that_of_canonical_json() -> None:
    """Keys sorted, no spaces; written out by hand here."""
    config = {
        "rope": {"theta": 10000.0, "type": "default"},
        "layers": 2,
        "tie": True,
        "window": None,
        "k": (1, 2),
    }
    text = '{"k":[1,2],"layers":2,"rope":{"theta":10000,"type":"default"},"tie":true,"window":null}'
    assert s.config_digest(config) == hashlib.sha256(text.encode()).hexdigest()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_config_digest_survives_json_and_key_order(config: dict[str, Any]) -> None:
    """A config that went through a JSON file, or whose keys come in another order, is the same config."""
    want = s.config_digest(config)
    assert s.config_digest(json.loads(json.dumps(config))) == want
    assert s.config_digest(dict(reversed(config.items()))) == want
    assert s.config_digest({**config, "one more": 1}) != want


@pytest.mark.parametrize(
    "bad", [{"x": float("nan")}, {"x": float("inf")}, {"x": b""}, {"x": {1: 2}}, {"x": object()}]
)
def test_config_that_json_cannot_say_is_refused(bad: dict[str, Any]) -> None:
    """What has no canonical form has no digest."""
    with pytest.raises(LocalError, match="config"):
        s.config_digest(bad)


def test_true_is_not_one() -> None:
    """A flag and a number are different settings."""
    assert s.config_digest({"x": True}) != s.config_digest({"x": 1})


def test_ids_and_grammar_digests() -> None:
    """Ids by their raw bytes; a grammar by kind and text, which cannot run into each other."""
    assert s.ids_digest(b"\1\0\0\0") == hashlib.sha256(b"\1\0\0\0").hexdigest()
    assert s.grammar_digest("regex", "a") != s.grammar_digest("regexa", "")
    assert s.grammar_digest("regex", "a") != s.grammar_digest("json", "a")


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 320, 49_152, 262_144, 2**31 - 1])
def test_probe_ids_are_fixed_and_in_the_vocabulary(vocab_size: int) -> None:
    """24 ids and one more, in the vocabulary, the same each time; computed here with plain integers."""
    tokens = s.probe_token_ids(vocab_size)
    expected = [vocab_size // 4 + i * 2_654_435_761 % max(1, vocab_size // 2) for i in range(1, 26)]
    assert [*tokens.prefill.tolist(), tokens.step] == expected
    assert tokens.prefill.dtype == np.int32
    assert tokens.prefill.shape == (s.PROBE_PREFILL_TOKENS,) == (24,)
    assert all(0 <= token < vocab_size for token in expected)
    if vocab_size > 1000:
        assert len(set(expected)) == 25
        assert min(expected) >= vocab_size // 4
        assert max(expected) < vocab_size - vocab_size // 4


def test_probe_needs_a_vocabulary() -> None:
    """No vocabulary, no probe."""
    with pytest.raises(LocalError):
        s.probe_token_ids(0)


def logits() -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal((24, 50), np.float32), rng.standard_normal(50, np.float32)]


def test_probe_digest_is_of_values_not_of_memory() -> None:
    """The same logits in another memory order or byte order give the same digest."""
    prefill, step = logits()
    want = s.probe_digest([prefill, step])
    assert s.probe_digest(iter([np.asfortranarray(prefill), step])) == want
    assert s.probe_digest([prefill.astype(">f4"), step]) == want
    # msgpack by hand: an array of dtype and shape, (24, 50) and (50,).
    by_hand = b"\x92\xa7float32\x92\x18\x32" + prefill.tobytes() + b"\x92\xa7float32\x91\x32" + step.tobytes()
    assert want == hashlib.sha256(by_hand).hexdigest()


@pytest.mark.parametrize(
    "change",
    [
        lambda p, q: [np.nextafter(p, 9, dtype=np.float32), q],
        lambda p, q: [p, np.nextafter(q, 9, dtype=np.float32)],
        lambda p, q: [q, p],
        lambda *both: both[:1],
        lambda p, q: [p.astype(np.float64), q],
        lambda p, q: [p.reshape(50, 24), q],
        lambda p, q: [np.concatenate([p.ravel(), q])],
        lambda p, q: [-p * np.float32(-1) + np.float32(1e-7), q],
    ],
)
def test_probe_digest_tells_other_numerics_apart(change: Any) -> None:
    """The last bit of one logit, the order, dtype, shape or number of arrays: each changes the digest."""
    assert s.probe_digest(change(*logits())) != s.probe_digest(logits())


@pytest.mark.parametrize(
    "bad", [[], [np.zeros((0, 5), np.float32)], [np.array([np.nan], np.float32)], [np.array([np.inf])]]
)
def test_probe_of_a_broken_worker_is_refused(bad: list[Any]) -> None:
    """No logits, or logits that are not finite, are no fingerprint."""
    with pytest.raises(LocalError):
        s.probe_digest(bad)
