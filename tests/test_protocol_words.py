"""Messages and tickets: what is sent is what is read, and nothing else is accepted."""

from __future__ import annotations

import contextlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import ErrorRecord, InputError, KVFerryError, PeerError
from kvferry.layout import BlockTable, PoolLayout, Role
from kvferry.protocol import messages as m
from kvferry.protocol.compat import hello_reasons, pair_reasons
from kvferry.protocol.prefix import HeldPrefix
from kvferry.protocol.ticket import Mode, Ticket, open_ticket, read_ticket, seal_ticket
from kvferry.state import Fingerprint

ID = bytes(range(16))
KEY = b"k" * 32
LAYOUT = PoolLayout.paged(range(2), kv_heads=2, head_dim=4, dtype="float32", block_size=4, num_blocks=8)


def party(**changes: object) -> m.Party:
    base = m.Party("prefill-0", ID, LAYOUT, None, heartbeat_ms=500, lost_ms=2000, integrity=True)
    return msgspec.structs.replace(base, **changes)


def ticket(**changes: object) -> Ticket:
    base = Ticket(Mode.PULL, ID, "r-1", ID, "prefill-0", ("tcp://127.0.0.1:1",), 10, (3,), 30_000)
    return msgspec.structs.replace(base, **changes)


ERROR = ErrorRecord("peer", "no")
MESSAGES: list[m.Message] = [
    m.Hello(m.MAGIC, 1, 0, party()),
    m.Accept(party()),
    m.Refuse(("dtype: float32 here, float16 there",)),
    m.Heartbeat(),
    m.Claim(
        ID,
        ticket=b"t",
        timeout_ms=5,
        tables=(m.WireTable(b"\0" * 8, 1),),
        state=b"s",
        tokens=3,
        portions=(m.Portion((0, 2), ((Role.KEY, 0), (Role.VALUE, 1)), (1, 4)),),
    ),
    m.Offered(ID, b"state", (m.WireTable(b"\1\0\0\0"),), 7, 4, 1000, ID),
    m.Granted(ID, (m.WireTable(b""),), 7, HeldPrefix(4, b"h" * 16), 1000, ID),
    m.Busy(ID, 50, "full"),
    m.Ready(ID, 0, 3, 0, 16, 4, ID),
    m.Pack(ID, 0, 3, 0, 16, 4),
    m.Packed(ID, 4, 1 << 20),
    m.Moved(ID),
    m.Commit(ID, b"", b"\0" * 8, b"\1" * 8, 4),
    m.Committed(ID, 1 << 40, 9, 3),
    m.Mismatch(ID, ERROR),
    m.Started(ID),
    m.Released(ID),
    m.Abort(ID, ERROR),
    m.Aborted(ID),
    m.Renew(ID, 1000),
]


def test_the_list_above_is_every_message() -> None:
    """A message added to the protocol has to be added to these tests."""
    assert {type(message) for message in MESSAGES} == set(m.Message.__args__)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message: m.Message) -> None:
    """What was encoded is what is decoded."""
    assert m.decode(m.encode(message)) == message


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_cut_and_every_unknown_field_is_refused(message: m.Message) -> None:
    """A frame that is cut anywhere, or that says more than the schema, is a PeerError."""
    frame = m.encode(message)
    for end in range(len(frame)):
        with pytest.raises(PeerError):
            m.decode(frame[:end])
    extra = msgspec.msgpack.decode(frame) | {"surprise": 1}
    with pytest.raises(PeerError, match="surprise"):
        m.decode(msgspec.msgpack.encode(extra))


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=400)
def test_no_bit_flip_raises_anything_but_a_peer_error(message: m.Message, data: st.DataObject) -> None:
    """A damaged frame is refused by name or is another valid message; it is never another exception."""
    frame = bytearray(m.encode(message))
    at = data.draw(st.integers(0, 8 * len(frame) - 1))
    frame[at // 8] ^= 1 << at % 8
    with contextlib.suppress(PeerError):
        m.decode(bytes(frame))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    """Bytes that nobody encoded are a PeerError."""
    with pytest.raises(PeerError):
        m.decode(data)


def test_numbers_beyond_their_bounds_are_refused() -> None:
    """Counts and durations have bounds, so that none drives an allocation or an endless wait."""
    for field, value in (
        ("timeout_ms", 10**12),
        ("timeout_ms", -1),
        ("tokens", 2**60),
        ("transfer", b"short"),
        ("portions", [msgspec.to_builtins(MESSAGES[4].portions[0])] * (m.MAX_PORTIONS + 1)),
    ):
        claim = msgspec.msgpack.decode(m.encode(MESSAGES[4])) | {field: value}
        with pytest.raises(PeerError, match=field):
            m.decode(msgspec.msgpack.encode(claim))


def test_block_tables_travel() -> None:
    """Tables keep ids, first block and token count; half an id and a negative one are refused."""
    tables = (BlockTable(3, np.array([7, 5, 9])), BlockTable(0, np.array([], int), tokens=40))
    back = m.from_wire(m.to_wire(tables))
    assert [(t.first_block, t.ids.tolist(), t.tokens) for t in back] == [(3, [7, 5, 9], None), (0, [], 40)]
    for ids in (b"\0\0\0", b"\xff\xff\xff\xff"):
        with pytest.raises(PeerError):
            m.from_wire((m.WireTable(ids),))


def test_digests_of_a_commit_belong_together() -> None:
    """Chunk ids and digests of unequal number are refused."""
    with pytest.raises(PeerError, match="number"):
        m.Commit(ID, b"", b"\0" * 8, b"\0" * 16, 0).digest_table()


def test_ticket_opens_only_with_its_key_and_incarnation() -> None:
    """A ticket verifies at its issuer; another key, another life, any altered byte: refused."""
    sealed = seal_ticket(ticket(), KEY)
    assert open_ticket(sealed, KEY, ID) == read_ticket(sealed) == ticket()
    with pytest.raises(PeerError, match="not signed"):
        open_ticket(sealed, b"x" * 32, ID)
    with pytest.raises(PeerError, match="earlier life"):
        open_ticket(sealed, KEY, b"y" * 16)
    for at in range(len(sealed)):
        altered = sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :]
        with pytest.raises(PeerError):
            open_ticket(altered, KEY, ID)


@given(st.binary(max_size=120))
def test_what_is_no_ticket_is_bad_input(data: bytes) -> None:
    """A string that is not a ticket is the caller's mistake, named as such."""
    for prefix in (b"", b"KVT1", b"KVT1" + b"\0" * 32):
        with pytest.raises(InputError, match="ticket"):
            read_ticket(prefix + data)


def test_a_pair_that_fits_has_no_reasons() -> None:
    """Equal parties fit; block size, order and joining may differ."""
    other = PoolLayout.paged(
        range(2), kv_heads=2, head_dim=4, dtype="float32", block_size=8, num_blocks=3, axis_order="HND",
        joined_kv=True,
    )  # fmt: skip
    assert pair_reasons(party(), party()) == ()
    assert pair_reasons(party(), party(layout=other)) == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"integrity": False}, "integrity"),
        ({"heartbeat_ms": 1500}, "heartbeat"),
        (
            {
                "layout": PoolLayout.paged(
                    range(2), kv_heads=2, head_dim=4, dtype="float16", block_size=4, num_blocks=8
                )
            },
            "dtype",
        ),
    ],
)
def test_each_misfit_is_named(change: dict[str, object], field: str) -> None:
    """A pair that does not fit gets a reason that names the field."""
    assert any(field in reason for reason in pair_reasons(party(), party(**change)))


def test_other_protocols_are_refused_first() -> None:
    """Another magic or another major is the only reason given: nothing else can be trusted then."""
    assert hello_reasons(m.Hello("http", 1, 0, party(integrity=False)), party())[0].startswith("magic")
    assert hello_reasons(m.Hello(m.MAGIC, 2, 0, party()), party())[0].startswith("protocol version")
    assert hello_reasons(m.Hello(m.MAGIC, 1, 9, party()), party()) == ()


def test_errors_cross_the_wire_whole() -> None:
    """An error's type and every field survive being sent; an unknown kind becomes the peer's."""
    error = PeerError("m", request_id="r", phase="p", peer="q", bytes_done=3, now_true="n", next_step="s")
    back = KVFerryError.from_record(error.to_record())
    assert type(back) is PeerError
    assert back.to_record() == error.to_record()
    assert type(KVFerryError.from_record(ErrorRecord("from the future", "m"))) is PeerError


def test_an_engine_does_not_fit_a_side_without_one() -> None:
    """A worker with an engine refuses a peer that has none, and the reverse."""
    digest = "0" * 64
    engine = Fingerprint(
        engine="e", build="b", weights=digest, config=digest, tokenizer=digest, vocab_size=10, max_context=10
    )
    for one, other in ((engine, None), (None, engine)):
        reasons = pair_reasons(party(fingerprint=one), party(fingerprint=other))
        assert any("fingerprint" in reason for reason in reasons)
