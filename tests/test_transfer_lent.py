"""Blocks that are lent: to one request at a time, never those of a held prefix, for as long as was agreed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest

from conftest import fill_random, unique_address, wait_until
from kvferry.errors import InputError, KVFerryError, LocalError, PeerError
from kvferry.layout import BlockTable
from kvferry.protocol.prefix import HASH_NBYTES, HeldPrefix
from kvferry.protocol.ticket import Mode
from kvferry.state import Exactness
from kvferry.transfer import Ended, Endpoint, payload
from reference_kit import GREEDY, limits
from test_handoff import make_workers
from test_handoff import prefill as prefill_request
from test_transfer import TOKENS, is_idle, layout, live, move, table

Opened = Callable[..., Endpoint]

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("second", [(0, 1, 2), (3, 4, 5), (5, 2, 7), (1, 6, 8)])
@pytest.mark.parametrize("together", [b"", b"a group"])
def test_a_block_is_lent_to_one_transfer(opened: Opened, second: tuple[int, ...], together: bytes) -> None:
    """A second reservation of a block is refused, of the same request too, unless ranks share it."""
    endpoint = opened(layout(8), unique_address("inproc"), name="lender")
    first, other = BlockTable(0, np.array([0, 1, 2])), BlockTable(0, np.array(second))
    held = endpoint.reserve("a", 24, first, together=together)
    if not together and (shared := {0, 1, 2} & set(second)):
        with pytest.raises(LocalError, match=f"block {min(shared)} .* request a already"):
            endpoint.reserve("a", 24, other)
    else:
        endpoint.withdraw(endpoint.reserve("a", 24, other, together=together))
        with pytest.raises(LocalError, match="request a already"):  # what came and went took nothing away
            endpoint.reserve("c", 24, first)
    endpoint.withdraw(held)
    endpoint.withdraw(endpoint.reserve("b", 24, other))  # and they are free again
    assert is_idle(endpoint)


def test_a_held_prefix_is_written_by_nobody_else(opened: Opened) -> None:
    """Blocks that a live transfer relies on are lent to no other, nor relied on while another writes them."""
    endpoint = opened(layout(8), unique_address("inproc"), name="lender")
    have = HeldPrefix(8, bytes(2 * HASH_NBYTES))
    held = endpoint.reserve("a", 24, BlockTable(0, np.array([3, 4, 5])), have=have)
    with pytest.raises(LocalError, match=r"block 4 .* request a already"):
        endpoint.reserve("b", 16, BlockTable(0, np.array([9, 4])))
    with pytest.raises(LocalError, match=r"block 5 .* request a already"):
        endpoint.reserve("b", 24, BlockTable(0, np.array([5, 6, 7])), have=have)
    shared = endpoint.reserve("b", 24, BlockTable(0, np.array([3, 4, 8])), have=have)  # held by both: fine
    for ticket in (held, shared):
        endpoint.withdraw(ticket)
    endpoint.withdraw(endpoint.reserve("c", 24, BlockTable(0, np.array([3, 4, 5]))))


@pytest.fixture
def a_worker(opened: Opened) -> Callable[..., Any]:
    return make_workers(opened)


def test_a_state_of_other_blocks_is_refused(a_worker: Callable[..., Any]) -> None:
    """The block tables given and those in the state are not of one request: told at the call."""
    source, target = a_worker("shm"), a_worker("shm")
    for name in ("r", "other"):
        prefill_request(source, name, 40, GREEDY, limits(5))
    state, tables = source.engine.export_state("r", Exactness.BITS), source.engine.tables("other")
    with pytest.raises(InputError, match="lies in other blocks than its state says"):
        source.endpoint.offer(state, tables)
    ticket = target.endpoint.reserve("r", 40, target.engine.allocate(41))
    with pytest.raises(InputError, match="other blocks"):
        source.endpoint.push(ticket, tables, state=state)
    push = source.endpoint.push(ticket, tables, tokens=40)
    push.layers(0, 4)
    with pytest.raises(InputError, match="other blocks"):
        push.commit(state)
    push.abort("of another request")
    wait_until(lambda: is_idle(source.endpoint) and is_idle(target.endpoint))


def test_blocks_are_the_requests_once_it_is_visible(opened: Opened) -> None:
    """From the arrival on decode's engine does with them what it likes, whatever prefill still has to say."""
    prefill = opened(layout(8), unique_address("shm"), name="prefill")
    decode = opened(layout(8), unique_address("shm"), name="decode")
    ticket = prefill.offer(None, table(8, 2), tokens=TOKENS, request_id="r")
    arrived = decode.pull(ticket, table(8, 3))
    arrived.result()
    decode.withdraw(decode.reserve("next", TOKENS, table(8, 3)))
    arrived.started()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_held_prefix_is_never_written(opened: Opened, scheme: str, mode: Mode) -> None:
    """Prefill cannot confirm the prefix: refused; the held blocks, maybe another's, are as they were."""
    prefill = opened(layout(8), unique_address(scheme), name="prefill")
    decode = opened(layout(8), unique_address(scheme), name="decode")
    for seed, endpoint in enumerate((prefill, decode)):
        fill_random(endpoint.pool, seed)
    src, dst = table(8, 2), table(8, 3)
    have = HeldPrefix(8, bytes(2 * HASH_NBYTES))
    before = live(decode, dst)
    if mode is Mode.PULL:
        ticket = prefill.offer(None, src, tokens=TOKENS, request_id="r")
        arrived = decode.pull(ticket, dst, have=have)
    else:
        ticket = decode.reserve("r", TOKENS, dst, have=have)
        arrived = decode.arrival(ticket)
        push = prefill.push(ticket, src, tokens=TOKENS)
        with pytest.raises(PeerError, match="holds 16 tokens, of which 0 are known here"):
            push.layers(0, 3)
    with pytest.raises(PeerError, match="holds 16 tokens, of which 0 are known here"):
        arrived.result()
    assert live(decode, dst) == before
    if mode is Mode.PULL:  # the claim was refused, the offer was not touched
        again = decode.pull(ticket, dst)
        again.result()
        again.started()
        prefill.outcome(ticket).result(5)
    wait_until(lambda: is_idle(prefill) and is_idle(decode))


@pytest.mark.parametrize("at_prefill", [True, False])
@pytest.mark.parametrize("scheme", ["shm", "tcp"])
def test_a_lease_may_be_renewed_while_bytes_move(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, scheme: str, at_prefill: bool
) -> None:
    """A copy that began under a short lease goes on under the renewed one, whichever side asked for it."""
    prefill = opened(layout(8), unique_address(scheme), name="prefill")
    decode = opened(layout(8), unique_address(scheme), name="decode")
    begun, renewed = threading.Event(), threading.Event()
    make = payload.Copy

    def make_and_wait(*given: Any) -> Any:
        copy = make(*given)
        begun.set()
        assert renewed.wait(20)
        return copy

    monkeypatch.setattr(payload, "Copy", make_and_wait)
    fill_random(prefill.pool, 1)
    src, dst = table(8, 2), table(8, 3)
    lease_seconds = 1.0
    ticket = prefill.offer(None, src, tokens=TOKENS, request_id="r", lease_seconds=lease_seconds)
    ends = time.monotonic() + lease_seconds
    arrived = decode.pull(ticket, dst, timeout_seconds=20)
    assert begun.wait(20)
    (prefill if at_prefill else decode).renew(ticket, 20)
    wait_until(lambda: time.monotonic() > ends + 0.05)
    renewed.set()
    arrived.result()
    arrived.started()
    prefill.outcome(ticket).result(10)
    assert live(decode, dst) == live(prefill, src)


def test_a_cancelled_future_ends_nothing(opened: Opened) -> None:
    """Whoever gives up waiting takes nothing back: the endpoint and every other call go on."""
    prefill = opened(layout(8), unique_address("shm"), name="prefill", process=True)
    decode = opened(layout(8), unique_address("shm"), name="decode", process=True)
    ticket = decode.reserve("r", TOKENS, table(8, 3))
    assert not decode.arrival(ticket).arrival.cancel()
    assert not decode.outcome(ticket).cancel()
    assert not decode.cancel(ticket, "not wanted").cancel()
    wait_until(lambda: is_idle(decode))
    move(prefill, decode, table(8, 2), table(8, 3), Mode.PULL)


def test_a_callback_may_not_wait_for_its_own_endpoint(opened: Opened) -> None:
    """It would wait for the thread that it runs in; it is told so at once."""
    endpoint = opened(layout(8), unique_address("inproc"), name="lender")
    told: list[KVFerryError] = []

    def ask(_: object) -> None:
        try:
            endpoint.stats()
        except KVFerryError as error:
            told.append(error)

    ticket = endpoint.reserve("r", TOKENS, table(8, 3))
    endpoint.arrival(ticket).arrival.add_done_callback(ask)
    endpoint.withdraw(ticket)
    wait_until(lambda: bool(told))
    assert "another thread" in told[0].next_step
    assert is_idle(endpoint)


def test_observers_may_ask_close_and_fail(opened: Opened) -> None:
    """They have a thread of their own: a call of theirs is answered, and no fault of theirs ends a call."""
    seen: list[int] = []

    def asks(_: Ended) -> None:
        seen.append(endpoint.stats().pid)

    def exits(_: Ended) -> None:
        raise SystemExit(3)

    endpoint = opened(layout(8), unique_address("inproc"), observers=[exits, asks])
    for _ in range(2):
        endpoint.withdraw(endpoint.reserve("r", TOKENS, table(8, 3)))
    wait_until(lambda: len(seen) == 2)
    closing = opened(layout(8), unique_address("inproc"), observers=[lambda _: closing.close()])
    closing.withdraw(closing.reserve("r", TOKENS, table(8, 3)))
    wait_until(lambda: closing._client._closed)


def test_an_interrupted_close_is_a_close(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a frozen process is closed: it is killed all the same, and nothing is left."""
    endpoint = opened(layout(8), unique_address("shm"), process=True)
    pid = endpoint.stats().pid

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(endpoint._client, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        endpoint.close()
    assert not psutil.pid_exists(pid)
    endpoint.close()


@pytest.mark.parametrize(
    "wrong",
    [{"copy_threads": 0}, {"max_transfers": "x"}, {"name": None}, {"timeouts": 3}, {"observers": [3]}],
    ids=str,
)
def test_wrong_options_are_told_at_the_call(opened: Opened, wrong: dict[str, Any]) -> None:
    """No endpoint comes of them, and no process."""
    with pytest.raises(InputError):
        opened(layout(8), **wrong)
    with pytest.raises(InputError, match="needs one to listen at"):
        Endpoint.listen([], pool=opened(layout(8)).pool, process=False)


FORKS = """
import os, sys
from kvferry.errors import KVFerryError
from kvferry.layout import BlockTable, PoolLayout
from kvferry.transfer import Endpoint, Pool

layout = PoolLayout.paged(range(1), kv_heads=1, head_dim=16, dtype="float32", block_size=8, num_blocks=8)
gone = [Endpoint.open(pool=Pool.allocate(layout), process=False) for _ in range(3)]
endpoint = Endpoint.listen(f"shm://fork-{os.getpid()}", pool=Pool.allocate(layout), process=True)
for one in gone:  # closed, and still referenced
    one.close()
waiting = endpoint.arrival(endpoint.reserve("never", 8, BlockTable(0, [1])))
"""
IN_A_CHILD = """
with endpoint._client._lock:  # as another thread, which the child has not, may hold it at this moment
    child = os.fork()
if child == 0:
    for call in (endpoint.stats, waiting.result, endpoint.close):
        try:
            print(call.__name__, call())
        except KVFerryError as error:
            print(call.__name__, type(error).__name__)
    sys.stdout.flush()
    os._exit(0)
os.wait()
print("parent", endpoint.stats().holds)
endpoint.close()
endpoint.pool.close()
"""
OUTLIVED = """
read, write = os.pipe()
if os.fork() == 0:
    os.close(write)
    sys.stdin.readline()
    os._exit(0)
print(endpoint.stats().pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_lets_go_of_the_node() -> None:
    """A child of the engine can neither use nor end what is its parent's, and does not wait for it."""
    run = subprocess.run(
        [sys.executable, "-c", FORKS + IN_A_CHILD], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.splitlines() == ["stats LocalError", "result LocalError", "close None", "parent 1"]
    assert not run.stderr


def test_a_transfer_process_ends_with_its_engine_whatever_the_engine_forked() -> None:
    """The engine dies and its forked child lives on: the transfer process ends all the same."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS + OUTLIVED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        engine.wait(20)
        wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
        print(file=engine.stdin, flush=True)  # the child may go now
