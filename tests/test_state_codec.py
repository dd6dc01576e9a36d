"""The bytes of a record: every damage is a named refusal, and nothing is parsed before its digest holds."""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry import state as s
from kvferry.errors import CorruptError, IncompatibleError, KVFerryError, LocalError, PeerError
from kvferry.state import codec
from state_cases import good_expectation, good_requirements, good_state, put, with_last_logits

GOLDEN = Path(__file__).parent / "golden" / "execution_state_v1.bin"
REFUSED = (CorruptError, IncompatibleError, PeerError)


def sealed(body: bytes, *, magic: bytes = b"KVF1", major: int = 1, length: int | None = None) -> bytes:
    """A record made by hand, with the digest right."""
    length = len(body) if length is None else length
    return magic + struct.pack("<IQ", major, length) + hashlib.sha256(body).digest() + body


def plain(state: s.ExecutionState) -> dict[str, Any]:
    """The record as maps, read by a decoder that knows no schema."""
    decoded: dict[str, Any] = msgspec.msgpack.decode(s.encode_state(state)[48:])
    return decoded


def repacked(fields: Any) -> bytes:
    return sealed(msgspec.msgpack.encode(fields))


def test_layout_of_the_bytes() -> None:
    """Magic, u32 version, u64 length, sha256 and body stand where the format says, read without the codec."""
    data = s.encode_state(good_state())
    assert data[:4] == b"KVF1"
    assert struct.unpack("<IQ", data[4:16]) == (1, len(data) - 48)
    assert data[16:48] == hashlib.sha256(data[48:]).digest()
    fields = msgspec.msgpack.decode(data[48:])
    assert list(fields) == list(s.ExecutionState.__struct_fields__)
    assert fields["tokens"]["ids"][:8] == bytes([0, 0, 0, 0, 7, 0, 0, 0])
    assert fields["rng"] == {"kind": "philox", "state": b"", "seed": 1234, "draws": 3}


def test_bytes_of_version_1_do_not_change() -> None:
    """A record written by the first release still reads, and writes, the same."""
    golden = GOLDEN.read_bytes()
    assert s.decode_state(golden) == good_state()
    assert s.encode_state(good_state()) == golden


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("state", [good_state(), with_last_logits(good_state())], ids=["pending", "logits"])
def test_round_trip(state: s.ExecutionState, kind: Any) -> None:
    """What was encoded comes back equal, from any kind of buffer, and encodes to the same bytes."""
    data = s.encode_state(state)
    assert s.decode_state(kind(data)) == state
    assert s.encode_state(s.decode_state(data)) == data


def test_no_single_bit_flip_is_accepted() -> None:
    """3000 single-bit changes anywhere in the record: none accepted, none with a foreign exception."""
    good, chance, kinds = s.encode_state(good_state()), random.Random(5), Counter[str]()
    flips = [(i, 1 << bit) for i in range(48) for bit in range(8)]  # the header whole, the rest by chance
    flips += [(chance.randrange(48, len(good)), 1 << chance.randrange(8)) for _ in range(3000 - len(flips))]
    for at, bit in flips:
        damaged = bytearray(good)
        damaged[at] ^= bit
        with pytest.raises(REFUSED) as caught:
            s.decode_state(damaged)
        kinds[type(caught.value).__name__] += 1
    assert kinds.total() == 3000
    assert kinds["PeerError"] == 32  # the magic
    assert kinds["IncompatibleError"] == 32  # the version


def test_bit_flips_under_a_right_digest_never_end_a_worker() -> None:
    """A hostile peer can make the digest right: then schema and checks answer, never another exception."""
    body, chance, answers = s.encode_state(good_state())[48:], random.Random(7), Counter[str]()
    for _ in range(3000):
        damaged = bytearray(body)
        damaged[chance.randrange(len(body))] ^= 1 << chance.randrange(8)
        try:
            state = s.decode_state(sealed(bytes(damaged)))
            s.check_before_move(state, good_requirements(), good_expectation())
        except KVFerryError as error:
            answers[type(error).__name__] += 1
        else:
            answers["accepted"] += 1
            # What passes is well formed: it can be written again.
            s.encode_state(state)
    assert answers["PeerError"] > 300
    assert answers["IncompatibleError"] > 300


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    """No random bytes are a record, with a right header or without."""
    for given_bytes in (data, sealed(data), b"KVF1" + data):
        with pytest.raises(REFUSED):
            s.decode_state(given_bytes)


def test_every_truncation_is_refused() -> None:
    """A record cut anywhere, or with bytes behind it, is corrupt; a body cut under a right digest too."""
    data = s.encode_state(put(good_state(), "tokens.ids", bytes(8)))
    for stop in range(0, len(data), 7):
        with pytest.raises(CorruptError):
            s.decode_state(data[:stop])
        if stop < len(data) - 48:
            with pytest.raises(PeerError):
                s.decode_state(sealed(data[48 : 48 + stop]))
    with pytest.raises(CorruptError, match="5 bytes of body where the header says 6"):
        s.decode_state(sealed(b"\0" * 5, length=6))
    for extra in (b"\0", data):
        with pytest.raises(CorruptError):
            s.decode_state(data + extra)
        with pytest.raises(PeerError):
            s.decode_state(sealed(data[48:] + extra))


def test_size_is_bounded_before_anything_is_read() -> None:
    """One byte over the bound is refused without looking, at the bound it is read."""
    data = s.encode_state(good_state())
    assert s.decode_state(data, max_nbytes=len(data)) == good_state()
    assert s.encode_state(good_state(), max_nbytes=len(data)) == data
    with pytest.raises(PeerError, match=f"{len(data)} bytes, more than the {len(data) - 1} agreed"):
        s.decode_state(data, max_nbytes=len(data) - 1)
    with pytest.raises(PeerError, match="more than"):
        s.decode_state(memoryview(bytearray(s.MAX_STATE_NBYTES + 1)))


def test_nothing_is_parsed_before_the_digest_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a wrong digest the parser is never called."""

    class NeverCalled:
        def decode(self, _: object) -> None:
            raise AssertionError("parsed before the digest was checked")

    data = bytearray(s.encode_state(good_state()))
    data[100] ^= 1
    monkeypatch.setattr(codec, "_decoder", NeverCalled())
    with pytest.raises(CorruptError, match="sha256"):
        s.decode_state(data)


def test_other_versions_are_refused_by_name() -> None:
    """Another major version is incompatible; a header and a body that disagree are the peer's mistake."""
    body = s.encode_state(good_state())[48:]
    with pytest.raises(IncompatibleError, match="major version is 2, this side reads 1"):
        s.decode_state(sealed(body, major=2))
    newer = s.encode_state(put(good_state(), "version", s.Version(major=2, minor=0)))
    with pytest.raises(PeerError, match="the header says version 1, the body 2"):
        s.decode_state(sealed(newer[48:]))
    with pytest.raises(PeerError, match="magic"):
        s.decode_state(sealed(body, magic=b"KVF2"))


def test_minor_version_may_differ() -> None:
    """A minor version only adds what can be ignored."""
    state = put(good_state(), "version", s.Version(major=1, minor=9))
    assert s.decode_state(s.encode_state(state)).version.minor == 9


def key_paths(fields: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each map key is, to any depth."""
    if isinstance(fields, dict):
        inner = [path for key, value in fields.items() for path in key_paths(value, (*prefix, key))]
        return [(*prefix, key) for key in fields] + inner
    if isinstance(fields, list):
        return [path for i, value in enumerate(fields) for path in key_paths(value, (*prefix, i))]
    return []


def owner_of(fields: Any, path: tuple[Any, ...]) -> Any:
    for key in path[:-1]:
        fields = fields[key]
    return fields


def test_any_field_left_out_is_refused() -> None:
    """Each of the fields, at any depth, left out of the bytes is refused, whether or not it has a default."""
    paths = key_paths(plain(good_state()))
    assert len(paths) > 400
    for path in paths:
        fields = plain(good_state())
        del owner_of(fields, path)[path[-1]]
        with pytest.raises(PeerError, match=r"breaks the schema|not canonical"):
            s.decode_state(repacked(fields))


def test_any_field_of_another_type_is_refused() -> None:
    """Each of the fields, at any depth, given as a list of a map, is refused with its path."""
    for path in key_paths(plain(good_state())):
        fields = plain(good_state())
        owner_of(fields, path)[path[-1]] = [{"x": 1}]
        with pytest.raises(PeerError, match="breaks the schema"):
            s.decode_state(repacked(fields))


@pytest.mark.parametrize("raw", [b"\x01", b"\xcd\x00\x25", b"\xd0\x25"])
def test_other_spellings_of_a_value_are_refused(raw: bytes) -> None:
    """One state has one spelling: an int for a float, or a wide int for a small one, is refused."""
    fields = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in plain(good_state()).items()}
    if raw == b"\x01":
        sampling = {**plain(good_state())["sampling"], "top_p": msgspec.Raw(raw)}
        fields["sampling"] = msgspec.Raw(msgspec.msgpack.encode(sampling))
    else:
        fields["attempt"] = msgspec.Raw(raw)
    with pytest.raises(PeerError, match="not canonical"):
        s.decode_state(repacked(fields))


@pytest.mark.parametrize(
    "path", ["", "tokens", "fingerprint", "fingerprint.lora.0", "layers.0", "rng", "draft"]
)
def test_unknown_field_is_refused_at_any_depth(path: str) -> None:
    """The schema is closed: an unknown key is refused, not ignored."""
    fields = inner = plain(good_state())
    for part in path.split(".") if path else ():
        inner = inner[int(part) if part.isdigit() else part]  # type: ignore[index]
    inner["surprise"] = 1
    with pytest.raises(PeerError, match="unknown field `surprise`"):
        s.decode_state(repacked(fields))


HOSTILE = {
    "a list that says it has 2^31 entries": ("layers", b"\xdd\x7f\xff\xff\xff"),
    "a list over its bound": ("layers", b"\xdd\x00\x10\x00\x00"),
    "a map of 2^32 entries": ("tokens", b"\xdf\xff\xff\xff\xff"),
    "a deep nest": ("sections", b"\x91" * 100_000),
    "a negative count": ("kv_tokens", b"\xff"),
    "a count of 2^64": ("kv_tokens", b"\xcf" + b"\xff" * 8),
    "an id that is not 16 bytes": ("transfer_id", b"\xc4\x0f" + bytes(15)),
    "a word outside the list": ("exactness", b"\xa5exact"),
    "text that is not UTF-8": ("request_id", b"\xa2\xff\xfe"),
    "an extension type": ("rng", b"\xc7\x01\x05a"),
    "a part of an id": ("draft", msgspec.msgpack.encode(
        {"method": "x", "between_rounds": True, "tokens": b"abc"})),
    "a digest that is not hex": ("grammar", msgspec.msgpack.encode(
        {"kind": "x", "text": "", "digest": "G" * 64, "accepted_tokens": 0, "mask_digest": "0" * 64})),
    "a tensor shorter than its shape": ("positions", msgspec.msgpack.encode(
        {"next": 0, "mrope": {"dtype": "int32", "shape": [2**31 - 1] * 8, "data": b""}})),
    "a tensor of an unknown dtype": ("positions", msgspec.msgpack.encode(
        {"next": 0, "mrope": {"dtype": "object", "shape": [0], "data": b""}})),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_values_are_refused_without_allocating(what: str) -> None:
    """Lengths and values that would drive an allocation are refused by their bounds."""
    field, raw = HOSTILE[what]
    fields = {name: msgspec.Raw(msgspec.msgpack.encode(value)) for name, value in plain(good_state()).items()}
    fields[field] = msgspec.Raw(raw)
    with pytest.raises(PeerError, match="breaks the schema"):
        s.decode_state(repacked(fields))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("transfer_id", b"short"),
        ("kv_tokens", -1),
        ("kv_tokens", 2**70),
        ("kv_tokens", 2**48 + 1),
        ("tokens.pending", 2**31),
        ("tensors.0.shape", (2**31, 2, 16)),
        ("layers.0.layer", 2**48 + 1),
        ("sampling.top_k", 0),
        ("sampling.top_k", 2**31),
        ("positions.rope_delta", 2**31),
        ("fingerprint.vocab_size", 0),
        ("fingerprint.weights", "not hex"),
        ("request_id", ""),
        ("request_id", "lone \ud800 surrogate"),
        ("exactness", "bits?"),
    ],
)
def test_exporters_mistake_is_found_at_the_exporter(path: str, value: Any) -> None:
    """A state that breaks its own schema is a LocalError where it is written, not a PeerError elsewhere."""
    with pytest.raises(LocalError, match="does not fit its own schema"):
        s.encode_state(put(good_state(), path, value))


def test_largest_numbers_of_the_schema_travel() -> None:
    """The most that a bound allows is allowed: ids and extents of 2^31 - 1, seeds of 2^64 - 1."""
    state = put(put(good_state(), "tokens.pending", 2**31 - 1), "tensors.0.shape", (2**31 - 1, 2, 16))
    state = put(put(state, "kv_tokens", 2**48), "sampling.seed", 2**64 - 1)
    state = put(put(state, "sampling.top_k", 2**31 - 1), "positions.rope_delta", 2**31 - 1)
    assert s.decode_state(s.encode_state(state)) == state


def test_state_over_the_bound_is_not_written() -> None:
    """A record that the peer would refuse for its size is refused where it is made."""
    state = put(good_state(), "sections.3.data", bytes(s.MAX_STATE_NBYTES))
    with pytest.raises(LocalError, match="more than"):
        s.encode_state(state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: s.InlineTensor(dtype="float32", shape=(2,), data=bytes(7)),
        lambda: s.InlineTensor(dtype="object", shape=(1,), data=b""),
        lambda: put(good_state(), "blocks.0.ids", b"abc"),
        lambda: put(good_state(), "blocks.0.placement", b"abc"),
        lambda: put(good_state(), "tokens.ids", b"abc"),
        lambda: put(good_state(), "draft.tokens", b"abc"),
        lambda: put(good_state(), "sampling.allowed_tokens", b"abc"),
        lambda: put(good_state(), "sampling.bad_tokens", (b"", b"abc")),
        lambda: put(good_state(), "logprobs.output.0.top_ids", b"abc"),
        lambda: put(good_state(), "logprobs.output.0.top_ids", bytes(4)),
        lambda: s.LogprobRow(token=0, logprob=0.0, top_ids=b"abc", top_logprobs=b"abc"),
        lambda: s.pack_ids([-1]),
        lambda: s.pack_ids([2**31]),
        lambda: s.unpack_ids(b"abc"),
    ],
)
def test_ill_formed_parts_cannot_be_made(make: Any) -> None:
    """Bytes that are no whole ids, and tensors whose bytes do not fit their shape, are refused at once."""
    with pytest.raises(LocalError):
        make()
