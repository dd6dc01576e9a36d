"""What an engine is told when a transfer process, its own or its peer's, is frozen, killed or slow to end."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conftest import fill_random, unique_address, wait_until
from fault_kit import wait_stopped
from kvferry.errors import DeadlineError, KVFerryError, LocalError, TransportError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.protocol.messages import Mismatch
from kvferry.protocol.table import Phase
from kvferry.protocol.ticket import Mode, read_ticket
from kvferry.transfer import Endpoint, Move, Timeouts, TransferRecord, client
from kvferry.transfer.calls import NodeConfig
from kvferry.transfer.directory import Directory
from kvferry.transfer.node import Node
from kvferry.transfer.peer import Peer
from kvferry.transport.base import Memory

pytestmark = pytest.mark.usefixtures("nothing_left")

Opened = Callable[..., Endpoint]
TCP = "tcp://127.0.0.1:0"
TOKENS = 32
LAYOUT = PoolLayout.paged(range(3), kv_heads=2, head_dim=16, dtype="float32", block_size=8, num_blocks=64)


def blocks(first: int) -> BlockTable:
    return BlockTable(0, range(first, first + 4))


@pytest.fixture
def freeze() -> Iterator[Callable[[Endpoint], None]]:
    """Stop an endpoint's transfer process; it goes on at the end, unless it was killed."""
    frozen: list[int] = []

    def stop(endpoint: Endpoint) -> None:
        pid = endpoint.stats().pid
        frozen.append(pid)
        os.kill(pid, signal.SIGSTOP)
        wait_stopped(pid)

    yield stop
    for pid in frozen:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            continue


def test_each_transfer_of_a_lost_connection_says_its_own_name(
    opened: Opened, freeze: Callable[[Endpoint], None]
) -> None:
    """One connection breaks under four transfers: four errors, each of its own request and place."""
    prefill = opened(LAYOUT, TCP, process=True)
    decode = opened(LAYOUT)
    tickets = [
        prefill.offer(None, blocks(4 * n), tokens=TOKENS, request_id=f"r{n}", lease_seconds=5.0)
        for n in range(4)
    ]
    first = decode.pull(tickets[0], blocks(0))
    first.result()
    freeze(prefill)
    for _ in range(3):
        decode.stats()  # what prefill said until then is taken in
    moves = [decode.pull(ticket, blocks(4 * n)) for n, ticket in enumerate(tickets) if n]
    wait_until(lambda: decode.stats().transfers == 4)
    os.kill(prefill._client.pid, signal.SIGKILL)
    for number, move in enumerate(moves, 1):
        with pytest.raises(TransportError) as caught:
            move.result()
        assert caught.value.request_id == f"r{number}"
        assert caught.value.phase == "claiming"
        assert "silent since before the attempt" in caught.value.next_step
    first.started()  # it has everything and needs nobody


def test_the_engine_of_a_frozen_transfer_process_is_told_and_asks_again(
    opened: Opened, freeze: Callable[[Endpoint], None]
) -> None:
    """The error says that the blocks are still lent; after the thaw the same future tells the end."""
    prefill = opened(LAYOUT, TCP)
    decode = opened(LAYOUT, process=True)
    fill_random(prefill.pool, 1)
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r")
    freeze(decode)
    move = decode.pull(ticket, blocks(8), timeout_seconds=20)  # enough for what comes after the thaw
    move.limit_seconds = 0.1
    with pytest.raises(DeadlineError, match="says nothing") as caught:
        move.result()
    assert "still lent" in caught.value.now_true
    assert caught.value.request_id == "r"
    os.kill(decode._client.pid, signal.SIGCONT)
    assert move.result() is None
    move.started()


@pytest.mark.slow
def test_closing_an_endpoint_ends_its_frozen_transfer_process(
    opened: Opened, freeze: Callable[[Endpoint], None]
) -> None:
    """Close kills it: after that, and only after that, nothing can write into the blocks any more."""
    prefill = opened(LAYOUT, TCP)
    decode = opened(LAYOUT, process=True, timeouts=Timeouts(abort=0.05))
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r", lease_seconds=0.5)
    freeze(decode)
    move = decode.pull(ticket, blocks(8))
    decode.close()
    assert not os.path.exists(f"/proc/{decode._client.pid}")
    with pytest.raises(LocalError, match="closed") as caught:
        move.result()
    assert caught.value.request_id == "r"
    with pytest.raises(LocalError, match="closed"):
        decode.stats()


def test_calls_after_the_transfer_process_died_say_so(opened: Opened) -> None:
    """Also the second call is told that the process is gone, and of what, not that somebody closed it."""
    endpoint = opened(LAYOUT, TCP, process=True)
    os.kill(endpoint.stats().pid, signal.SIGKILL)
    for _ in range(2):
        wait_until(lambda: endpoint._client._closed)
        with pytest.raises(LocalError, match=r"is gone \(status -9\)") as caught:
            endpoint.stats()
        assert caught.value.next_step


@pytest.mark.slow
def test_prefill_without_its_transfer_process_is_in_doubt(opened: Opened) -> None:
    """With the node of an offer dies what it knew of decode; with that of a pull does not."""
    for process_of in ("prefill", "decode"):
        prefill = opened(LAYOUT, TCP, process=process_of == "prefill")
        decode = opened(LAYOUT, TCP, process=process_of == "decode")
        ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r", lease_seconds=2.0)
        move = decode.pull(ticket, blocks(0))
        move.result()
        mine = prefill if process_of == "prefill" else decode
        outcome = mine.outcome(ticket)
        os.kill(mine.stats().pid, signal.SIGKILL)
        with pytest.raises(LocalError, match="is gone") as caught:
            outcome.result(5)
        assert caught.value.in_doubt == (process_of == "prefill")
        assert caught.value.request_id == "r"


def test_a_reservation_is_waited_for_as_long_as_it_was_renewed(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``result`` ends by the node's clock, not by the lease that the ticket was issued with."""
    asked = threading.Event()
    answers = client.NodeClient._answers

    def tell(self: client.NodeClient) -> bool:
        asked.set()
        return answers(self)

    monkeypatch.setattr(client.NodeClient, "_answers", tell)
    decode = opened(LAYOUT, TCP)
    prefill = opened(LAYOUT)
    ticket = decode.reserve("r", TOKENS, blocks(0), lease_seconds=0.2)
    decode.renew(ticket, 30.0)
    result = _in_thread(decode.arrival(ticket))
    assert asked.wait(10)  # the time of the first lease is over
    push = prefill.push(ticket, blocks(0), tokens=TOKENS)
    push.layers(0, 3)
    push.commit(None)
    assert result.result(10) is None


def _in_thread(move: Move) -> Future[object]:
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(move.result())
        except KVFerryError as error:
            future.set_exception(error)

    threading.Thread(target=run, name="kvferry test waits").start()
    return future


def test_a_peer_lost_before_its_transfer_began(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks between handshake and claim: told at once, not by the timeout."""
    connected = Directory._connected

    async def connected_and_lost(self: Directory, address: str) -> Peer:
        peer = await connected(self, address)
        peer.lose(TransportError("cut"))
        return peer

    prefill = opened(LAYOUT, TCP)
    decode = opened(LAYOUT)
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r")
    monkeypatch.setattr(Directory, "_connected", connected_and_lost)
    with pytest.raises(TransportError, match="cut") as caught:
        decode.pull(ticket, blocks(0), timeout_seconds=60).result()
    assert caught.value.phase == "handshake"
    assert caught.value.request_id == "r"


async def turns() -> None:
    """Everything that can go on has gone on."""
    for _ in range(9):
        await asyncio.sleep(0)


@pytest.mark.parametrize("handshake", [0.0, 1000.0])
def test_a_late_call_does_not_share_an_older_attempts_failure(handshake: float) -> None:
    """Who joins an attempt to connect when it is about to end gets one of its own; at once, all share it."""
    begun: list[asyncio.Future[Any]] = []

    class Scripted(Directory):
        async def _connect(self, _address: str) -> Any:
            begun.append(asyncio.get_running_loop().create_future())
            return await begun[-1]

    async def check() -> None:
        made: dict[str, Any] = {"on_message": print, "on_lost": print}
        timeouts, nothing = Timeouts(handshake=handshake), cast("Any", None)
        directory = Scripted(nothing, timeouts, nothing, nothing, nothing, **made)
        calls = []
        for _ in range(3):
            calls.append(asyncio.ensure_future(directory._connected("tcp://x")))
            await turns()
        begun[0].set_exception(no_route := TransportError("no route"))
        await turns()
        ended = [call.exception() if call.done() else None for call in calls]
        if handshake:
            assert ended == [no_route] * 3
            assert len(begun) == 1
            return
        assert ended == [no_route, None, None]
        lost, peer = (SimpleNamespace(error=error) for error in (no_route, None))
        begun[1].set_result(peer)
        assert await asyncio.gather(*calls[1:]) == [peer, peer]
        assert len(begun) == 2
        again = asyncio.ensure_future(directory._connected("tcp://y"))
        await turns()
        begun[2].set_result(lost)  # lost before the call that waits for it goes on
        del directory._by_address["tcp://y"]
        await turns()
        begun[3].set_result(peer)
        assert await again is peer

    asyncio.run(check())


def test_claims_that_wait_for_one_connection_say_their_own_names(opened: Opened) -> None:
    """Nobody listens any more: each of the claims gets an error of its own request."""
    prefill = opened(LAYOUT, TCP)
    decode = opened(LAYOUT)
    tickets = [prefill.offer(None, blocks(4 * n), tokens=TOKENS, request_id=f"r{n}") for n in range(3)]
    prefill.close()
    for number, move in enumerate([decode.pull(ticket, blocks(0)) for ticket in tickets]):
        with pytest.raises(TransportError) as caught:
            move.result()
        assert caught.value.request_id == f"r{number}"


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_one_ticket_pulled_twice_at_once(opened: Opened, scheme: str) -> None:
    """Before the first pull has even reached the peer, a second is refused, and the first notices nothing."""
    prefill = opened(LAYOUT, unique_address(scheme))
    decode = opened(LAYOUT)
    fill_random(prefill.pool, 1)
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r")
    first, second = decode.pull(ticket, blocks(4)), decode.pull(ticket, blocks(8))
    with pytest.raises(LocalError, match=r"already|in use"):
        second.result()
    assert first.result() is None
    first.started()


def test_a_ticket_pulled_again_does_not_unmake_what_arrived(opened: Opened) -> None:
    """The lease of a request that arrived has ended; a late second pull fails; the first still starts."""
    prefill = opened(LAYOUT, TCP)
    decode = opened(LAYOUT)
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r", lease_seconds=0.3)
    move = decode.pull(ticket, blocks(4))
    move.result()
    wait_until(lambda: decode.stats().transfers == 0)
    with pytest.raises(DeadlineError, match="no longer good"):
        decode.pull(ticket, blocks(8)).result()
    move.started()


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("mode", Mode)
def test_a_lease_is_renewed_on_both_sides_whoever_asks(opened: Opened, mode: Mode, who: str) -> None:
    """After the commit, either side's renewal holds prefill's copy beyond the first lease."""
    prefill, decode = opened(LAYOUT, TCP), opened(LAYOUT, TCP)
    ticket, move, outcome = committed(prefill, decode, mode, lease_seconds=0.4)
    lapsed = prefill.offer(None, blocks(12), tokens=TOKENS, request_id="lapsed", lease_seconds=0.4)
    (prefill if who == "prefill" else decode).renew(ticket, 30.0)
    with pytest.raises(DeadlineError):
        prefill.outcome(lapsed).result(5)  # so the first lease is over too
    move.started()
    outcome.result(5)


@pytest.mark.parametrize("mode", Mode)
def test_nothing_that_a_peer_says_takes_back_what_arrived(
    opened: Opened, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the commit prefill says what the protocol does not allow: decode has it all, and starts."""
    nodes: dict[str, tuple[Node, asyncio.AbstractEventLoop]] = {}
    prepare = Node.__init__

    def prepare_seen(self: Node, config: NodeConfig, memory: Memory) -> None:
        prepare(self, config, memory)
        nodes[config.name] = (self, asyncio.get_running_loop())

    monkeypatch.setattr(Node, "__init__", prepare_seen)
    prefill, decode = opened(LAYOUT, TCP, name="prefill"), opened(LAYOUT, TCP, name="decode")
    ticket, move, _ = committed(prefill, decode, mode)
    transfer = read_ticket(ticket).transfer
    node, loop = nodes["prefill"]
    session = node.ledger.find(transfer)
    assert session is not None
    loop.call_soon_threadsafe(session.post, Mismatch(transfer, LocalError("nonsense").to_record()))
    decodes = nodes["decode"][0].ledger.find(transfer)
    assert decodes is not None
    wait_until(lambda: decodes.machine.phase is not Phase.COMMITTED)
    move.started()
    wait_until(lambda: decode.stats().transfers == 0)


def committed(
    prefill: Endpoint, decode: Endpoint, mode: Mode, lease_seconds: float = 30.0
) -> tuple[bytes, Move, Future[TransferRecord]]:
    """A request that decode has and has not started; its ticket, decode's move, and prefill's outcome."""
    if mode is Mode.PULL:
        ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r", lease_seconds=lease_seconds)
        outcome, move = prefill.outcome(ticket), decode.pull(ticket, blocks(4))
    else:
        ticket = decode.reserve("r", TOKENS, blocks(4), lease_seconds=lease_seconds)
        move = decode.arrival(ticket)
        push = prefill.push(ticket, blocks(0), tokens=TOKENS)
        outcome = prefill.outcome(ticket)
        push.layers(0, 3)
        push.commit(None)
    move.result()
    return ticket, move, outcome


def test_an_endpoint_closes_while_it_waits_for_a_handshake(
    opened: Opened, freeze: Callable[[Endpoint], None]
) -> None:
    """A peer that never answers does not hold up a close, whatever its handshake was allowed to take."""
    prefill = opened(LAYOUT, TCP, process=True)
    decode = opened(LAYOUT, timeouts=Timeouts(handshake=600.0, abort=0.1), name="waits")
    ticket = prefill.offer(None, blocks(0), tokens=TOKENS, request_id="r", lease_seconds=5.0)
    freeze(prefill)
    with pytest.raises(DeadlineError, match="no connection"):
        decode.pull(ticket, blocks(0), timeout_seconds=0.2).result()
    decode.close()
    assert "kvferry-node-waits" not in [thread.name for thread in threading.enumerate()]
