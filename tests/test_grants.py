"""A peer that is in (its certificate is good, its handshake done) and wants what it was not granted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Self

import msgspec
import numpy as np
import pytest

from conftest import QUICK, fill_random, wait_until
from kvferry.errors import KVFerryError, PeerError
from kvferry.layout import BlockTable, CopyPlan, PoolLayout, copy_plan
from kvferry.protocol import messages as m
from kvferry.protocol.ticket import Ticket, read_ticket, seal_ticket
from kvferry.testing.guards import ScriptedGuard
from kvferry.testing.plans import make_plan
from kvferry.testing.transport_pair import WAIT_SECONDS, LoopThread, Side
from kvferry.transfer import Endpoint
from kvferry.transfer.peer import greet
from kvferry.transport.base import Direction
from kvferry.transport.memory import create_shared
from kvferry.transport.security import Identity
from tls_kit import NODE, odd_identity, transport_of

LAYOUT = PoolLayout.paged(range(2), kv_heads=2, head_dim=16, dtype="float32", block_size=8, num_blocks=16)
TOKENS = 20
OURS, THEIRS = BlockTable(0, np.array([1, 5, 9])), BlockTable(0, np.array([2, 3, 4]))

Opened = Callable[..., Endpoint]
pytestmark = pytest.mark.usefixtures("nothing_left")


class Intruder:
    """Speaks the protocol by hand over an encrypted connection of its own."""

    def __init__(self, address: str, identity: Identity = NODE, *, integrity: bool = True) -> None:
        self._loop = LoopThread()
        memory, guard = create_shared(LAYOUT.nbytes), ScriptedGuard()
        transport = transport_of(identity)(memory, guard)
        connection = self._loop.run(transport.connect(address, WAIT_SECONDS))
        self.side = Side(memory, guard, transport, connection)
        party = m.Party("intruder", secrets.token_bytes(16), LAYOUT, None, 200, 60_000, integrity)
        self._loop.run(greet(connection, party, QUICK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self.side.connection.close())
        self.side.memory.close()
        self._loop.close()

    def say(self, message: m.Message) -> None:
        self._loop.run(self.side.connection.send(m.encode(message)))

    def hear(self) -> m.Message:
        """The next message that is not a heartbeat."""
        while isinstance(message := m.decode(self._loop.run(self.side.connection.receive())), m.Heartbeat):
            pass
        return message

    def claim(self, ticket: bytes, transfer: bytes | None = None) -> m.Message:
        """Take up a ticket; the answer."""
        self.say(
            m.Claim(
                read_ticket(ticket).transfer if transfer is None else transfer,
                ticket=ticket,
                timeout_ms=20_000,
                tables=m.to_wire((THEIRS,)),
                tokens=TOKENS,
            )
        )
        return self.hear()

    def copy(self, direction: Direction, name: bytes, plan: CopyPlan) -> None:
        """Copy under the grant of that name. Raises what the other side says."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kvferry.testing.transport_pair.TRANSFER_ID", name)
            self.side.copy(direction, plan)


@pytest.fixture
def holder(opened: Opened) -> Endpoint:
    """An endpoint with something to take."""
    endpoint = opened(LAYOUT, "tcp://127.0.0.1:0", name="holder", tls=NODE, plain="never")
    fill_random(endpoint.pool, 1)
    return endpoint


@pytest.fixture
def intruder(holder: Endpoint) -> Iterator[Intruder]:
    with Intruder(holder.addresses[0]) as intruder:
        yield intruder


def offer(holder: Endpoint, request_id: str = "r", **options: object) -> bytes:
    return holder.offer(None, OURS, tokens=TOKENS, request_id=request_id, **options)  # type: ignore[arg-type]


def refused(answer: m.Message, word: str) -> None:
    """The answer is an abort that says so."""
    assert isinstance(answer, m.Abort)
    assert word in answer.error.message
    assert answer.error.next_step


def pull_plan() -> CopyPlan:
    """What a claim of ``offer`` entitles to."""
    return copy_plan(LAYOUT, LAYOUT, [OURS], [THEIRS], TOKENS)


def still_good(intruder: Intruder, ticket: bytes) -> None:
    """What was refused changed nothing: the true ticket is claimed and its bytes come."""
    answer = intruder.claim(ticket)
    assert isinstance(answer, m.Offered)
    intruder.copy(Direction.READ, answer.grant, pull_plan())


def forged(ticket: bytes) -> bytes:
    """The same ticket, signed by a key of the forger's."""
    return seal_ticket(read_ticket(ticket), secrets.token_bytes(32))


def with_content(ticket: bytes, **changes: object) -> bytes:
    """The ticket with other content under its own signature."""
    return ticket[:36] + msgspec.msgpack.encode(msgspec.structs.replace(read_ticket(ticket), **changes))


@pytest.mark.parametrize(
    "forge",
    [
        forged,
        lambda ticket: ticket[:4] + bytes(32) + ticket[36:],
        lambda ticket: ticket[:-1] + bytes([ticket[-1] ^ 1]),
        lambda ticket: with_content(ticket, tokens=1),
        lambda ticket: with_content(ticket, request_id="another"),
        lambda ticket: with_content(ticket, peer="*"),
        lambda ticket: with_content(ticket, incarnation=bytes(16)),
        lambda ticket: with_content(ticket, lease_ms=10**9),
    ],
    ids=["other key", "unsigned", "last bit", "tokens", "request", "peer", "incarnation", "lease"],
)
def test_a_forged_or_altered_ticket_is_refused(
    holder: Endpoint, intruder: Intruder, forge: Callable[[bytes], bytes]
) -> None:
    """By its signature, whatever was changed; the hold does not notice."""
    ticket = offer(holder)
    refused(intruder.claim(forge(ticket), read_ticket(ticket).transfer), "not signed")
    assert holder.stats().holds == 1
    still_good(intruder, ticket)


def test_a_ticket_of_another_request_is_refused(holder: Endpoint, intruder: Intruder) -> None:
    """A good ticket does not serve for a transfer that it does not name."""
    one, other = offer(holder, "one"), offer(holder, "other")
    refused(intruder.claim(one, read_ticket(other).transfer), "of another transfer")
    still_good(intruder, other)


def test_a_ticket_for_another_peer_is_refused(holder: Endpoint, tmp_path: object) -> None:
    """Whose certificate does not carry the ticket's name gets nothing; whose does, gets it."""
    ticket = offer(holder, peer="decode-*")
    with Intruder(holder.addresses[0]) as intruder:
        refused(
            intruder.claim(ticket), "the ticket is for decode-*, and its claimant has a certificate for node"
        )
    right = odd_identity(tmp_path, "decode-7")  # type: ignore[arg-type]
    with Intruder(holder.addresses[0], right) as decode:
        still_good(decode, ticket)


def test_a_ticket_for_a_peer_is_refused_where_nobody_has_a_certificate(opened: Opened) -> None:
    """Over shm and plain tcp there are no names to prove."""
    prefill = opened(LAYOUT, "tcp://127.0.0.1:0", name="prefill")
    decode = opened(LAYOUT, name="decode")
    move = decode.pull(offer(prefill, peer="decode"), THEIRS)
    with pytest.raises(PeerError, match="no certificate on this connection"):
        move.result()


def test_an_expired_or_used_ticket_is_refused(holder: Endpoint, intruder: Intruder) -> None:
    """After its lease, while it is in use, and after it was used: each with its own words."""
    ticket = offer(holder, lease_seconds=0.05)
    wait_until(lambda: holder.stats().holds == 0)
    refused(intruder.claim(ticket), "no longer good")
    ticket = offer(holder)
    assert isinstance(intruder.claim(ticket), m.Offered)
    refused(intruder.claim(ticket), "can be claimed once")
    with Intruder(holder.addresses[0]) as second:
        refused(second.claim(ticket), "can be claimed once")
    transfer = read_ticket(ticket).transfer
    intruder.say(m.Abort(transfer, PeerError("enough").to_record()))
    assert isinstance(intruder.hear(), m.Aborted)
    refused(intruder.claim(ticket), "no longer good")


def test_a_ticket_of_an_earlier_life_is_refused(opened: Opened, holder: Endpoint, intruder: Intruder) -> None:
    """An endpoint that was restarted has another key and another incarnation: both refuse."""
    earlier = opened(LAYOUT, "tcp://127.0.0.1:0", name="holder", tls=NODE, plain="never")
    refused(intruder.claim(offer(earlier)), "not signed by this endpoint")


def test_bytes_move_only_under_the_grant_that_the_claimant_was_told(
    holder: Endpoint, intruder: Intruder
) -> None:
    """Who saw the ticket knows the transfer, and copies nothing with it; a claim's answer names the grant."""
    ticket = offer(holder)
    transfer = read_ticket(ticket).transfer
    with pytest.raises(PeerError, match="no live grant"):
        intruder.copy(Direction.READ, transfer, pull_plan())
    answer = intruder.claim(ticket)
    assert isinstance(answer, m.Offered)
    assert answer.grant != transfer
    with Intruder(holder.addresses[0]) as onlooker:
        for name in (transfer, holder.incarnation, bytes(16)):
            with pytest.raises(PeerError, match="no live grant"):
                onlooker.copy(Direction.READ, name, pull_plan())
    intruder.copy(Direction.READ, answer.grant, pull_plan())


def test_descriptors_outside_the_grant_are_refused(holder: Endpoint, intruder: Intruder) -> None:
    """One byte beyond, another block, the other direction: nothing moves, and the grant stays."""
    answer = intruder.claim(offer(holder))
    assert isinstance(answer, m.Offered)
    good = pull_plan()
    last = int(np.argmax(good.src_offset))
    at, nbytes = int(good.src_offset[last]), int(good.nbytes[last])
    before = holder.pool.array.copy()
    for plan in (
        make_plan([at], [0], [nbytes + 1]),
        make_plan([0], [0], [1]),
        make_plan([*good.src_offset, 0], [*good.dst_offset, 0], [*good.nbytes, 1]),
    ):
        with pytest.raises(PeerError, match="outside the grant"):
            intruder.copy(Direction.READ, answer.grant, plan)
    with pytest.raises(PeerError, match="the grant is to read, not to write"):
        intruder.copy(Direction.WRITE, answer.grant, make_plan([0], [at], [1]))
    assert np.array_equal(holder.pool.array, before)
    assert not intruder.side.memory.array.any()
    intruder.copy(Direction.READ, answer.grant, good)


def test_nothing_is_served_after_the_release(holder: Endpoint, intruder: Intruder) -> None:
    """The grant ends with the transfer: at its abort, its withdrawal, and when it is started."""
    for end in ("abort", "withdraw", "started"):
        ticket = offer(holder)
        answer = intruder.claim(ticket)
        assert isinstance(answer, m.Offered)
        intruder.copy(Direction.READ, answer.grant, pull_plan())
        transfer = read_ticket(ticket).transfer
        if end == "abort":
            intruder.say(m.Abort(transfer, PeerError("enough").to_record()))
        elif end == "withdraw":
            holder.withdraw(ticket)
        else:
            intruder.say(m.Moved(transfer))
            assert isinstance(intruder.hear(), m.Commit)
            intruder.say(m.Committed(transfer, 1, 1, 1))
            intruder.say(m.Started(transfer))
        wait_until(lambda: holder.stats().grants == 0)
        with pytest.raises(PeerError, match="no live grant"):
            intruder.copy(Direction.READ, answer.grant, pull_plan())
        while isinstance(intruder.hear(), m.Renew):
            pass


def test_a_second_commit_changes_nothing(opened: Opened) -> None:
    """Decode's request is visible once, with the first commit's bytes; the second ends nothing of it."""
    decode = opened(LAYOUT, "tcp://127.0.0.1:0", name="decode", tls=NODE, plain="never", integrity=False)
    ticket = decode.reserve("r", TOKENS, OURS)
    transfer, move = read_ticket(ticket).transfer, decode.arrival(ticket)
    plan = copy_plan(LAYOUT, LAYOUT, [THEIRS], [OURS], TOKENS)
    with Intruder(decode.addresses[0], integrity=False) as intruder:
        intruder.side.memory.array[:] = 7
        answer = intruder.claim(ticket)
        assert isinstance(answer, m.Granted)
        with pytest.raises(PeerError, match="the grant is to write, not to read"):
            intruder.copy(Direction.READ, answer.grant, make_plan([int(plan.dst_offset[0])], [0], [1]))
        intruder.copy(Direction.WRITE, answer.grant, plan)
        commit = m.Commit(transfer, b"", b"", b"", 0)
        intruder.say(commit)
        assert isinstance(intruder.hear(), m.Committed)
        move.result()
        arrived = decode.pool.array.copy()
        with pytest.raises(PeerError, match="no live grant"):
            intruder.copy(Direction.WRITE, answer.grant, plan)
        intruder.say(commit)
        intruder.say(m.Claim(transfer, ticket=ticket, timeout_ms=1000))
        refused(intruder.hear(), "")
        move.started()
        assert np.array_equal(decode.pool.array, arrived)
        with pytest.raises(KVFerryError):
            intruder.copy(Direction.WRITE, answer.grant, plan)
    assert move.record.path == "tcp-sealed"


def test_only_the_keys_of_the_issuer_make_tickets() -> None:
    """The signature covers every field of a ticket: each field, changed, makes another."""
    key = secrets.token_bytes(32)
    ticket = Ticket(
        mode="pull",
        transfer=b"t" * 16,
        request_id="r",
        incarnation=b"i" * 16,
        issuer="a",  # type: ignore[arg-type]
        addresses=("x",),
        tokens=1,
        num_blocks=(1,),
        lease_ms=1,
    )
    sealed = {seal_ticket(ticket, key)[4:36]}
    for change in (
        {"mode": "push"},
        {"transfer": b"u" * 16},
        {"request_id": "s"},
        {"incarnation": b"j" * 16},
        {"issuer": "b"},
        {"addresses": ("y",)},
        {"tokens": 2},
        {"num_blocks": (2,)},
        {"lease_ms": 2},
        {"peer": "p"},
    ):
        sealed.add(seal_ticket(msgspec.structs.replace(ticket, **change), key)[4:36])
    assert len(sealed) == 1 + len(Ticket.__struct_fields__)
