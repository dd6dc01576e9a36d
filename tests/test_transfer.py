"""Endpoints: payloads arrive whole or not at all, by every transport and both modes; nothing stays held."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from conftest import fill_random, unique_address, wait_until
from kvferry.errors import (
    CapacityError,
    CorruptError,
    DeadlineError,
    IncompatibleError,
    InputError,
    LocalError,
    PeerError,
    TransportError,
)
from kvferry.layout import BlockTable, PoolLayout, source_pieces
from kvferry.protocol.ticket import Mode
from kvferry.transfer import Endpoint, Timeouts

Opened = Callable[..., Endpoint]
SCHEMES = ("inproc", "shm", "tcp")
TOKENS = 37

pytestmark = pytest.mark.usefixtures("nothing_left")


def layout(block_size: int = 8, **changes: object) -> PoolLayout:
    options: dict[str, object] = {
        "kv_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "block_size": block_size,
        "num_blocks": 64,
    }
    return PoolLayout.paged(range(3), **(options | changes))  # type: ignore[arg-type]


def table(block_size: int, seed: int, tokens: int = TOKENS, num_blocks: int = 64) -> BlockTable:
    ids = np.random.default_rng(seed).permutation(num_blocks)[: -(-tokens // block_size)]
    return BlockTable(0, ids)


def live(endpoint: Endpoint, blocks: BlockTable, tokens: int = TOKENS) -> bytes:
    """The bytes of a request in token order of one and the same layout: an oracle without the copy plan."""
    pool = endpoint.pool
    (group,) = pool.layout.groups
    rows = []
    for tensor in sorted(group.tensors, key=lambda t: (t.layer, t.role)):
        for token in range(tokens):
            block = int(blocks.ids[token // group.block_size])
            for head in range(tensor.heads):
                at = tensor.offset + block * tensor.block_stride + head * tensor.head_stride
                at += token % group.block_size * tensor.token_stride
                rows.append(pool.array[at : at + tensor.row_nbytes].tobytes())
    return b"".join(rows)


def is_idle(endpoint: Endpoint) -> bool:
    stats = endpoint.stats()
    return (stats.transfers, stats.holds, stats.grants, stats.copies) == (0, 0, 0, 0)


def move(prefill: Endpoint, decode: Endpoint, src: BlockTable, dst: BlockTable, mode: Mode) -> None:
    """One whole handoff of a payload without a state."""
    if mode is Mode.PULL:
        ticket = prefill.offer(None, src, tokens=TOKENS, request_id="r")
        outcome = prefill.outcome(ticket)
        arrived = decode.pull(ticket, dst)
    else:
        ticket = decode.reserve("r", TOKENS, dst)
        arrived = decode.arrival(ticket)
        push = prefill.push(ticket, src, tokens=TOKENS)
        outcome = prefill.outcome(ticket)
        for layer in range(3):
            push.layer(layer)
        push.commit(None)
    assert arrived.result() is None
    arrived.started()
    assert outcome.result(5).nbytes == arrived.record.nbytes
    assert arrived.record.mode == mode


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_arrive_and_nothing_is_held(opened: Opened, scheme: str, mode: Mode) -> None:
    """Every live byte arrives, no other byte changes, the record says what moved, both sides are idle."""
    prefill = opened(layout(8), unique_address(scheme), name="prefill")
    decode = opened(layout(4, axis_order="HND", joined_kv=True), unique_address(scheme), name="decode")
    fill_random(prefill.pool, 1)
    src, dst = table(8, 2), table(4, 3)
    move(prefill, decode, src, dst, mode)
    assert live(decode, dst) == live(prefill, src)
    untouched = np.ones(decode.pool.array.nbytes, bool)
    pieces = source_pieces(decode.pool.layout, (dst,), TOKENS)
    for offset, nbytes in zip(pieces.offset, pieces.nbytes, strict=True):
        untouched[offset : offset + nbytes] = False
    assert not decode.pool.array[untouched].any()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_transfer_processes(opened: Opened, scheme: str, mode: Mode) -> None:
    """The same with each node in a transfer process of its own, which ends with its endpoint."""
    prefill = opened(layout(8), unique_address(scheme), name="prefill", process=True)
    decode = opened(layout(8), unique_address(scheme), name="decode", process=True)
    pids = {prefill.stats().pid, decode.stats().pid}
    assert len(pids) == 2
    assert {os.getpgid(pid) for pid in pids} == pids, "Ctrl-C goes to the engine, which ends them"
    fill_random(prefill.pool, 1)
    src, dst = table(8, 2), table(8, 3)
    move(prefill, decode, src, dst, mode)
    assert live(decode, dst) == live(prefill, src)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_many_at_once(opened: Opened, scheme: str, mode: Mode) -> None:
    """Requests in flight together, between the same two endpoints, each get their own bytes."""
    prefill = opened(layout(8), unique_address(scheme))
    decode = opened(layout(8), unique_address(scheme))
    fill_random(prefill.pool, 4)
    ids = np.random.default_rng(5).permutation(64)[:60].reshape(12, 5)
    tables = [BlockTable(0, row) for row in ids]
    others = [BlockTable(0, row) for row in ids[::-1]]
    moves = []
    for number, (src, dst) in enumerate(zip(tables, others, strict=True)):
        if mode is Mode.PULL:
            ticket = prefill.offer(None, src, tokens=TOKENS, request_id=f"r{number}")
            moves.append(decode.pull(ticket, dst))
        else:
            ticket = decode.reserve(f"r{number}", TOKENS, dst)
            moves.append(decode.arrival(ticket))
            push = prefill.push(ticket, src, tokens=TOKENS)
            push.layers(0, 3)
            push.commit(None)
    for arrived, src, dst in zip(moves, tables, others, strict=True):
        arrived.result()
        arrived.started()
        assert live(decode, dst) == live(prefill, src)
    assert len({arrived.record.request_id for arrived in moves}) == 12
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_blocks_zeroed_after_export_are_refused(opened: Opened, scheme: str) -> None:
    """Prefill's blocks change between offer and pull: the digests of the export refuse what arrives."""
    prefill = opened(layout(), unique_address(scheme))
    decode = opened(layout())
    fill_random(prefill.pool, 6)
    src = table(8, 2)
    ticket = prefill.offer(None, src, tokens=TOKENS, request_id="r")
    prefill.pool.array[:] = 0
    with pytest.raises(CorruptError, match="digest") as caught:
        decode.pull(ticket, table(8, 3)).result()
    assert caught.value.request_id == "r"
    assert "nothing became visible" in str(caught.value)
    with pytest.raises(CorruptError, match="gave up"):
        prefill.outcome(ticket).result(5)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_pushed_too_early_is_refused(opened: Opened, scheme: str) -> None:
    """A layer that prefill still wrote after it was pushed does not pass the commit."""
    prefill = opened(layout(), unique_address(scheme))
    decode = opened(layout(), unique_address(scheme))
    fill_random(prefill.pool, 6)
    ticket = decode.reserve("r", TOKENS, table(8, 3))
    arrived = decode.arrival(ticket)
    push = prefill.push(ticket, table(8, 2), tokens=TOKENS)
    push.layers(0, 3)
    wait_until(lambda: prefill.stats().copies == 0 and decode.stats().copies == 0)
    prefill.pool.array[:] ^= 255
    push.commit(None)
    with pytest.raises(CorruptError, match="digest"):
        arrived.result()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_a_part_never_pushed_is_refused(opened: Opened) -> None:
    """A push that commits without one of its layers is refused for the missing chunks."""
    prefill = opened(layout(), unique_address("tcp"))
    decode = opened(layout(), unique_address("tcp"))
    ticket = decode.reserve("r", TOKENS, table(8, 3))
    arrived = decode.arrival(ticket)
    push = prefill.push(ticket, table(8, 2), tokens=TOKENS)
    push.layers(0, 2)
    push.commit(None)
    with pytest.raises(CorruptError, match="are needed"):
        arrived.result()


def test_integrity_off_is_agreed_and_recorded(opened: Opened) -> None:
    """Without integrity the bytes still arrive whole, and the record says that nothing compared them."""
    prefill = opened(layout(), unique_address("tcp"), integrity=False)
    decode = opened(layout(), integrity=False)
    fill_random(prefill.pool, 8)
    src, dst = table(8, 2), table(8, 3)
    arrived = decode.pull(prefill.offer(None, src, tokens=TOKENS, request_id="r"), dst)
    arrived.result()
    arrived.started()
    assert arrived.record.integrity is False
    assert live(decode, dst) == live(prefill, src)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_unfit_pairs_are_refused_by_name(opened: Opened, scheme: str) -> None:
    """Another dtype: refused at the handshake, with the field, and nothing is held for it at decode."""
    prefill = opened(layout(), unique_address(scheme))
    decode = opened(layout(dtype="float16"))
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    with pytest.raises(IncompatibleError, match="dtype"):
        decode.pull(ticket, table(8, 3)).result()
    assert is_idle(decode)
    prefill.withdraw(ticket)
    wait_until(lambda: is_idle(prefill))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("change", [{"kv_heads": 1}, {"kv_heads": 1, "head_start": 1}, {"layers": 2}])
def test_a_peer_that_holds_a_part_only_is_refused(opened: Opened, mode: Mode, change: dict[str, int]) -> None:
    """Prefill's rank has some of the heads or layers that decode has: refused by name before a byte moves."""
    options = {"kv_heads": 2, "head_dim": 16, "dtype": "float32", "block_size": 8, "num_blocks": 64}
    options |= {name: value for name, value in change.items() if name != "layers"}
    part = PoolLayout.paged(range(change.get("layers", 3)), **options)  # type: ignore[arg-type]
    prefill, decode = opened(part, unique_address("tcp")), opened(layout(), unique_address("tcp"))
    if mode is Mode.PULL:
        ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
        arrived = decode.pull(ticket, table(8, 3))
    else:
        ticket = decode.reserve("r", TOKENS, table(8, 3))
        arrived = decode.arrival(ticket)
        prefill.push(ticket, table(8, 2), tokens=TOKENS)
    with pytest.raises(IncompatibleError, match=r"head|layer"):
        arrived.result()
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_expired_ticket(opened: Opened, scheme: str) -> None:
    """A ticket whose lease has ended is refused with the reason, and prefill's blocks are free."""
    prefill = opened(layout(), unique_address(scheme))
    decode = opened(layout())
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r", lease_seconds=0.05)
    with pytest.raises(DeadlineError, match="lease ended while held"):
        prefill.outcome(ticket).result(5)
    with pytest.raises(DeadlineError, match="no longer good"):
        decode.pull(ticket, table(8, 3)).result()
    assert is_idle(prefill)
    assert is_idle(decode)


def test_ticket_is_single_use(opened: Opened) -> None:
    """A ticket that was used, or is in use, cannot be claimed again, by anyone."""
    prefill = opened(layout(), unique_address("tcp"))
    decode, other = opened(layout()), opened(layout())
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    arrived = decode.pull(ticket, table(8, 3))
    arrived.result()
    with pytest.raises(PeerError, match="claimed once"):
        other.pull(ticket, table(8, 3)).result()
    arrived.started()
    wait_until(lambda: is_idle(prefill))
    with pytest.raises(DeadlineError, match="it is done"):
        other.pull(ticket, table(8, 3)).result()
    assert is_idle(other)


def test_restarted_prefill_refuses_old_tickets(opened: Opened) -> None:
    """A ticket from an earlier life of the endpoint at the same address fails closed."""
    first = opened(layout(), unique_address("tcp"))
    where = first.addresses[0]
    ticket = first.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    first.close()
    second = opened(layout(), where)
    decode = opened(layout())
    with pytest.raises(PeerError, match="earlier life"):
        decode.pull(ticket, table(8, 3)).result()
    assert is_idle(second)
    assert is_idle(decode)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_peer_gone(opened: Opened, scheme: str) -> None:
    """Nobody listens any more at the ticket's address: one clear error, nothing held."""
    prefill = opened(layout(), unique_address(scheme))
    decode = opened(layout())
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    prefill.close()
    with pytest.raises(TransportError) as caught:
        decode.pull(ticket, table(8, 3)).result()
    assert caught.value.request_id == "r"
    assert caught.value.next_step
    assert is_idle(decode)


def test_closing_prefill_ends_a_claimed_transfer(opened: Opened) -> None:
    """Prefill closes while decode holds a committed request: decode keeps all it has."""
    prefill = opened(layout(), unique_address("tcp"))
    decode = opened(layout())
    fill_random(prefill.pool, 1)
    src, dst = table(8, 2), table(8, 3)
    arrived = decode.pull(prefill.offer(None, src, tokens=TOKENS, request_id="r"), dst)
    arrived.result()
    want = live(prefill, src)
    prefill.close()
    arrived.started()
    assert live(decode, dst) == want
    wait_until(lambda: is_idle(decode))


def test_decode_gives_up_after_commit(opened: Opened) -> None:
    """An import that fails at decode's engine is told to prefill, whose blocks come back."""
    prefill = opened(layout(), unique_address("tcp"))
    decode = opened(layout())
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    outcome = prefill.outcome(ticket)
    arrived = decode.pull(ticket, table(8, 3))
    arrived.result()
    arrived.abort(IncompatibleError("check 14: the read-back differs"))
    with pytest.raises(IncompatibleError, match="read-back differs"):
        outcome.result(5)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_withdrawn_offer(opened: Opened) -> None:
    """Prefill takes an offer back before anyone claimed it."""
    prefill = opened(layout(), unique_address("tcp"))
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    prefill.withdraw(ticket, "the client went away")
    with pytest.raises(LocalError, match="went away"):
        prefill.outcome(ticket).result(5)
    assert is_idle(prefill)


def test_no_renewal_holds_on_for_more_than_an_hour(opened: Opened) -> None:
    """A lease that is renewed again and again ends all the same; each renewal says how long it lasts."""
    prefill = opened(layout(), unique_address("tcp"))
    ticket = prefill.offer(None, table(8, 1), tokens=TOKENS, request_id="r", lease_seconds=600)
    assert 3000 < prefill.renew(ticket, 4000) <= 3600
    assert 3000 < prefill.renew(ticket, 600) <= 3600, "never shorter than it was"


def test_renewed_lease_outlives_its_first_end(opened: Opened) -> None:
    """A renewed offer can be claimed after the lease that it was made with has ended."""
    prefill = opened(layout(), unique_address("tcp"))
    decode = opened(layout())
    short = prefill.offer(None, table(8, 1), tokens=TOKENS, request_id="short", lease_seconds=0.3)
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r", lease_seconds=0.3)
    assert 20 < prefill.renew(ticket, 30) <= 30
    with pytest.raises(DeadlineError):
        prefill.outcome(short).result(5)
    arrived = decode.pull(ticket, table(8, 3))
    arrived.result()
    arrived.started()


def test_no_room_for_more_transfers(opened: Opened) -> None:
    """A node at its limit says so; the one more holds nothing."""
    prefill = opened(layout(), unique_address("tcp"), max_transfers=1)
    prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    with pytest.raises(CapacityError, match="max_transfers"):
        prefill.offer(None, table(8, 3), tokens=TOKENS, request_id="s")
    assert prefill.stats().holds == 1


def test_push_of_more_tokens_than_reserved(opened: Opened) -> None:
    """A push larger than the reservation is refused before a byte moves."""
    prefill = opened(layout(), unique_address("tcp"))
    decode = opened(layout(), unique_address("tcp"))
    ticket = decode.reserve("r", 16, table(8, 3, 16))
    push = prefill.push(ticket, table(8, 2), tokens=TOKENS)
    with pytest.raises(PeerError, match="reserved"):
        push.layers(0, 3)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


def test_frozen_peer_is_found(opened: Opened) -> None:
    """A prefill whose process is stopped is found by its silence, within the time that was given."""
    import signal

    import psutil

    prefill = opened(layout(), unique_address("tcp"), process=True)
    decode = opened(layout(), timeouts=Timeouts(heartbeat=0.1, lost=0.6, abort=0.2, handshake=1.0))
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    frozen = psutil.Process(prefill.stats().pid)
    frozen.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError):
            decode.pull(ticket, table(8, 3), timeout_seconds=2).result()
        assert is_idle(decode)
    finally:
        frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: is_idle(prefill) or prefill.stats().holds == 1)


def test_killed_transfer_process_is_an_error_not_a_hang(opened: Opened) -> None:
    """The engine's own transfer process dies: its calls raise, saying so."""
    import psutil

    prefill = opened(layout(), unique_address("tcp"), process=True)
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    outcome = prefill.outcome(ticket)
    psutil.Process(prefill.stats().pid).kill()
    with pytest.raises(LocalError, match="transfer process"):
        outcome.result(5)
    with pytest.raises(LocalError):
        prefill.stats()


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda e: e.pull(b"junk", table(8, 3)).result(), "ticket"),
        (lambda e: e.offer(None, table(8, 2), request_id="r"), "tokens"),
        (lambda e: e.offer(None, table(8, 2), tokens=5), "request_id"),
        (lambda e: e.offer(None, table(8, 2), tokens=5, request_id="r", lease_seconds=-1), "lease_seconds"),
        (lambda e: e.offer(None, table(8, 2), tokens=500, request_id="r"), "5 blocks"),
        (lambda e: e.offer(None, BlockTable(0, [99]), tokens=5, request_id="r"), "99"),
        (lambda e: e.offer(None, (), tokens=5, request_id="r"), "tables"),
        (lambda e: e.reserve("", 5, table(8, 2)), "request_id"),
    ],
)
def test_bad_arguments_are_named(opened: Opened, call: Callable[[Endpoint], object], what: str) -> None:
    """A wrong argument is one InputError that names it, and nothing is held after it."""
    endpoint = opened(layout(), unique_address("tcp"))
    with pytest.raises(InputError, match=what):
        call(endpoint)
    assert is_idle(endpoint)


def test_addresses_that_nobody_can_listen_at(opened: Opened) -> None:
    """An unknown scheme, a malformed address, one that is taken: an error, and no process or socket stays."""
    taken = opened(layout(), unique_address("tcp")).addresses[0]
    for bad, error in (
        ("carrier-pigeon://x", InputError),
        ("tcp://nowhere", InputError),
        (taken, TransportError),
    ):
        with pytest.raises(error):
            opened(layout(), bad)
