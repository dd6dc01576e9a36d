"""Sealed records: the construction of docs/encryption.md, property by property, and attacked on the wire."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes, hmac
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvferry.errors import CorruptError, KVFerryError
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import TransportPair
from kvferry.transport import seal
from kvferry.transport.base import Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.seal import ChannelSeals, ConnectionKeys
from tls_kit import SealedTcpTransport, TamperingProxy

OPENER, ACCEPTOR = b"o" * 32, b"a" * 32
Bytes = NDArray[np.uint8]


def keys() -> ConnectionKeys:
    return ConnectionKeys(OPENER, ACCEPTOR)


def ends(number: int = 0, role: int = 2) -> tuple[ChannelSeals, ChannelSeals]:
    """Both ends of a channel, each from keys of its own."""
    return (
        keys().seals(number, role, "peer", is_opener=True),
        keys().seals(number, role, "peer", is_opener=False),
    )


def sealed(seals: ChannelSeals, *arrays: bytes) -> list[bytes]:
    """Each record of these messages."""
    batches = seals.sealed([np.frombuffer(array, np.uint8) for array in arrays])
    return [record.tobytes() for batch in batches for record in batch]


def opened(seals: ChannelSeals, wire: bytes, *sizes: int) -> list[bytes]:
    """Read messages of these sizes off the wire. Raises CorruptError."""
    arrays, at = [np.zeros(size, np.uint8) for size in sizes], 0

    def receive(records: list[Bytes]) -> None:
        nonlocal at
        for record in records:
            record[:] = np.frombuffer(wire[at : at + record.nbytes].ljust(record.nbytes, b"\0"), np.uint8)
            at += record.nbytes

    seals.open_into(arrays, receive)
    return [array.tobytes() for array in arrays]


@given(st.lists(st.binary(min_size=1, max_size=300), min_size=1, max_size=8))
def test_what_is_sealed_opens_as_it_was(messages: list[bytes]) -> None:
    """Any messages, in both directions of one channel, each as a whole."""
    for ours, theirs in (ends(), ends()[::-1]):
        wire = b"".join(sealed(ours, *messages))
        assert len(wire) == sum(map(len, messages)) + 24 * len(messages)
        assert opened(theirs, wire, *map(len, messages)) == messages


def test_a_message_beyond_a_record_is_several() -> None:
    """Messages of any size around the borders of a record and of a batch travel."""
    limit = seal.RECORD_NBYTES
    ours, theirs = ends()
    for sizes in ((limit - 1, 1), (limit,), (limit + 1, 16), (2 * limit + 5, 7, limit), (16, limit, 16)):
        messages = [os.urandom(size) for size in sizes]
        assert opened(theirs, b"".join(sealed(ours, *messages)), *sizes) == messages


def expand(key: bytes, info: bytes, nbytes: int) -> bytes:
    return HKDFExpand(hashes.SHA256(), nbytes, b"kvferry seal 1 " + info).derive(key)


def test_the_construction_is_the_one_in_the_docs() -> None:
    """Keys, nonces, head and tag, computed from the page alone with the library's own HKDF."""
    extract = hmac.HMAC(b"kvferry", hashes.SHA256())
    extract.update(OPENER + ACCEPTOR)
    root = extract.finalize()
    number, role = 5, 3
    made = keys()
    assert made.id == expand(root, b"connection", 16)
    assert made.proof(number, role) == expand(root, b"join" + struct.pack("<QB", number, role), 16)
    for side, seals in enumerate(ends(number, role)):
        chain = expand(root, b"channel" + struct.pack("<QBB", number, role, side), 32)
        key = AESGCM(expand(chain, b"key", 16))
        for count, record in enumerate(sealed(seals, b"first", b"second"), 1):
            head = b"KVFS" + struct.pack("<I", len(record) - 24)
            assert record[:8] == head
            nonce = bytes(4) + count.to_bytes(8, "big")
            assert key.decrypt(nonce, record[8:], head) in (b"first", b"second")


def test_every_bit_of_a_record_is_authenticated() -> None:
    """One flipped bit anywhere, in the head, the ciphertext or the tag, and it does not open."""
    record = sealed(ends()[0], b"0123456789abcdef")[0]
    for bit in range(8 * len(record)):
        wire = bytearray(record)
        wire[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match="does not open"):
            opened(ends()[1], bytes(wire), 16)


def test_a_record_opens_only_in_its_place() -> None:
    """Repeated, left out, moved, taken back, or from another channel, direction, role or connection."""
    ours, theirs = ends()
    one, two, three = sealed(ours, b"1111", b"2222", b"3333")
    other = sealed(ends(number=1)[0], b"1111")[0]
    other_role = sealed(ends(role=3)[0], b"1111")[0]
    back = sealed(ends()[1], b"1111")[0]
    another = ConnectionKeys(OPENER, b"b" * 32).seals(0, 2, "peer", is_opener=True)
    stranger = sealed(another, b"1111")[0]
    for wire in (one + one, two, one + three, two + one, other, other_role, back, stranger, bytes(len(one))):
        with pytest.raises(CorruptError):
            opened(ends()[1], wire, *[4] * (len(wire) // len(one)))
    assert opened(theirs, one + two + three, 4, 4, 4) == [b"1111", b"2222", b"3333"]


def test_after_a_record_that_does_not_open_nothing_does() -> None:
    """A channel that was tampered with is of no more use: the next record is not taken for this one."""
    ours, theirs = ends()
    one, _ = sealed(ours, b"1111", b"2222")
    with pytest.raises(CorruptError):
        opened(theirs, bytes(len(one)), 4)
    with pytest.raises(CorruptError):
        opened(theirs, one, 4)
    assert opened(theirs, b"", 0) == [b""]


def test_either_secret_changes_every_key() -> None:
    """A side with a bad random source is saved by the other's."""
    found = {ConnectionKeys(o, a)._root for o in (OPENER, b"p" * 32) for a in (ACCEPTOR, b"b" * 32)}
    assert len(found) == 4
    assert ConnectionKeys(ACCEPTOR, OPENER)._root not in found


def test_keys_are_replaced_before_their_limit_and_no_nonce_meets_a_key_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under one key never more than the limit; both ends change at the same record; old keys are gone."""
    used: list[tuple[bytes, bytes, int]] = []

    class Watched:
        def __init__(self, key: bytes) -> None:
            self._key, self._cipher = key, AESGCM(key)

        def encrypt_into(self, nonce: bytes, data: memoryview, head: bytes, out: memoryview) -> int:
            used.append((self._key, nonce, len(data) + 24))
            return self._cipher.encrypt_into(nonce, data, head, out)

    limit = 1000
    monkeypatch.setattr(seal, "REKEY_NBYTES", limit)
    ours, theirs = ends()
    messages = [os.urandom(size) for size in [300, 300, 300, 1, 2, 900, 3, 976, 100] * 5]
    wire = sealed(ours, *messages)
    assert opened(theirs, b"".join(wire), *map(len, messages)) == messages
    monkeypatch.setattr(seal, "AESGCM", Watched)
    sealed(ends()[0], *messages)
    totals = {key: sum(size for other, _, size in used if other == key) for key, _, _ in used}
    assert max(totals.values()) <= limit
    assert len(totals) > len(messages) // 4
    assert len({nonce for _, nonce, _ in used}) == len(messages)


def test_ten_thousand_single_faults_are_all_caught() -> None:
    """Random messages, one random fault each, seeded: a flip, a cut, a repetition, a swap, a loss."""
    rng = np.random.default_rng(2026)
    for case in range(10_000):
        messages = [rng.bytes(int(rng.integers(1, 200))) for _ in range(3)]
        ours, theirs = ends(number=case)
        records = sealed(ours, *messages)
        fault = case % 5
        at = int(rng.integers(0, 3))
        wire = list(records)
        if fault == 0:
            damaged = bytearray(wire[at])
            bit = int(rng.integers(0, 8 * len(damaged)))
            damaged[bit // 8] ^= 1 << bit % 8
            wire[at] = bytes(damaged)
        elif fault == 1:
            wire[at] = wire[at][: int(rng.integers(0, len(wire[at])))]
        elif fault == 2:
            wire.insert(at, wire[at])
        elif fault == 3:
            other = (at + 1 + int(rng.integers(0, 2))) % 3
            wire[at], wire[other] = wire[other], wire[at]
        else:
            del wire[at]
        sizes = [*map(len, messages)]
        if fault == 2 and at == 2:  # the repetition comes behind all that is read now: read once more
            sizes.append(sizes[-1])
        with pytest.raises(CorruptError):
            opened(theirs, b"".join(wire), *sizes)


# On the wire.


@pytest.fixture
def proxied() -> Iterator[tuple[TransportPair, TamperingProxy]]:
    """An encrypted pair whose every byte passes somebody else."""
    proxies: list[TamperingProxy] = []

    def through(address: str) -> str:
        proxies.append(TamperingProxy(address))
        return proxies[0].address

    pools = create_shared(4 << 20), create_shared(4 << 20)
    pair = TransportPair(SealedTcpTransport, "tcp://127.0.0.1:0", *pools, through=through)
    yield pair, proxies[0]
    pair.close()
    proxies[0].close()


PLAN = make_plan([0], [0], [3 << 20])


def test_nobody_on_the_way_sees_the_bytes(proxied: tuple[TransportPair, TamperingProxy]) -> None:
    """Neither payload, nor frames, nor a grant's name, nor a request's or a mark's magic cross in clear."""
    pair, proxy = proxied
    secret = os.urandom(64)
    pair.listening.memory.array[: len(secret)] = np.frombuffer(secret, np.uint8)
    for direction in Direction:
        pair.connecting.copy(direction, PLAN)
    pair.loop.run(pair.connecting.connection.send(secret))
    assert pair.loop.run(pair.listening.connection.receive()) == secret
    seen = proxy.seen()
    assert len(seen) > 6 << 20
    for needle in (secret[:16], secret[-16:], b"0123456789abcdef", b"KVFQ", b"KVFM"):
        assert needle not in seen


@pytest.mark.parametrize(
    "tamper", ["flip", *(pytest.param(each, marks=pytest.mark.slow) for each in ("drop", "repeat", "swap"))]
)
@pytest.mark.parametrize("direction", Direction)
def test_what_is_changed_on_the_way_never_reaches_the_pool(
    proxied: tuple[TransportPair, TamperingProxy], tamper: str, direction: Direction
) -> None:
    """The copy fails, the record's bytes do not land, the connection lives and the next copy is right."""
    pair, proxy = proxied
    reads = direction is Direction.READ
    source, destination = pair.sides if reads else pair.sides[::-1]
    source.memory.array[:] = 0x5A
    destination.memory.array[:] = 0
    proxy.tamper(tamper, after_nbytes=(1 << 20) + 4321, downstream=reads)
    with pytest.raises(KVFerryError) as caught:
        pair.connecting.copy(direction, PLAN, seconds=10.0)
    assert proxy.tampered.is_set()
    if reads:
        assert isinstance(caught.value, CorruptError)
    pair.listening.guard.wait_until_idle()
    landed = destination.memory.array
    assert set(np.unique(landed).tolist()) <= {0, 0x5A}
    assert not landed[2 << 20 :].any(), "what came behind the fault was not opened either"
    assert pair.listening.guard.landed_copies == []
    pair.connecting.copy(direction, PLAN)
    assert (landed[: 3 << 20] == 0x5A).all()
