"""The vLLM adapter without vLLM: its two sides, with fake requests and packed pools of fake workers."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from conftest import unique_address, wait_until
from kvferry.engines.vllm.first_token import FirstToken
from kvferry.engines.vllm.identity import files_digest, fingerprint, model_digest
from kvferry.engines.vllm.options import read_options
from kvferry.engines.vllm.pool_layout import Group, LayerTensor, pool_layout
from kvferry.engines.vllm.push import ask_prefill
from kvferry.engines.vllm.results import Outbox, Results
from kvferry.engines.vllm.scheduler import TOKENS_KEY, SchedulerSide
from kvferry.engines.vllm.step import (
    PUSH_URL_KEY,
    REFUSED_KEY,
    TICKET_KEY,
    Load,
    PushSave,
    Save,
    Step,
    block_tables,
    ticket_text,
    tickets_from,
)
from kvferry.engines.vllm.tickets import TicketClient, TicketServer
from kvferry.errors import DeadlineError, IncompatibleError, InputError, KVFerryError, LocalError
from kvferry.state import pack_ids
from vllm_kit import FakeRequest, FakeWorker, PrefillInterface, packed_layout, random_kv, scheduled

pytestmark = pytest.mark.usefixtures("nothing_left")
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
IDS = list(range(7, 107))


@pytest.fixture
def worker() -> Iterator[Callable[..., FakeWorker]]:
    """Make fake workers that are closed when the test ends."""
    made: list[FakeWorker] = []

    def make(**options: Any) -> FakeWorker:
        made.append(FakeWorker(**options))
        return made[-1]

    yield make
    for each in made:
        each.side.close()


def offer(prefill: FakeWorker, request_id: str, ids: list[int], blocks: list[int]) -> bytes:
    prefill.step(Step(saves=[Save(request_id, pack_ids(ids), (tuple(blocks),))]))
    return prefill.side.ticket(request_id, 5.0)


def until_loaded(decode: FakeWorker, request_id: str, finished: set[str] = frozenset()) -> Results:  # type: ignore[assignment]
    """All that ended at ``decode`` since it was made, this request's load too."""

    def there() -> bool:
        decode.step(Step(), finished)
        return request_id in decode.ended.loaded

    wait_until(there, 15.0)
    return decode.ended


# Layout.


@pytest.mark.parametrize(("theirs", "ours"), [(32, 32), (32, 64), (64, 32)])
@pytest.mark.parametrize("prompt_tokens", [2, 33, 65, 100])
def test_every_element_arrives_whatever_the_block_sizes(
    worker: Callable[..., FakeWorker], theirs: int, ours: int, prompt_tokens: int
) -> None:
    """K is transposed inside a block on both sides; nothing but the request's own bytes is written."""
    prefill, decode = worker(block_size=theirs), worker(block_size=ours)
    blocks, into = [5, 3, 9, 1][: -(-prompt_tokens // theirs)], [8, 2, 11, 4][: -(-prompt_tokens // ours)]
    keys, values = random_kv(prompt_tokens, 1)
    prefill.write(blocks, keys, values)
    before = decode.memory.copy()
    ids = IDS[:prompt_tokens]
    ticket = offer(prefill, "r", ids, blocks)
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(ids), 0, (tuple(into),))]))
    results = until_loaded(decode, "r")
    assert not results.failed, decode.log
    got_keys, got_values = decode.read(into, prompt_tokens - 1)
    np.testing.assert_array_equal(got_keys, keys[:, :-1])
    np.testing.assert_array_equal(got_values, values[:, :-1])
    expected = FakeWorker.__new__(FakeWorker)
    expected.memory, expected.block_size, expected.num_blocks = before, ours, decode.num_blocks
    expected.write(into, keys[:, :-1], values[:, :-1])
    np.testing.assert_array_equal(decode.memory, before)
    assert results.moves[0].path == "cma"


def test_a_prefix_hit_moves_the_rest_and_leaves_shared_blocks_alone(
    worker: Callable[..., FakeWorker],
) -> None:
    prefill, decode = worker(), worker()
    keys, values = random_kv(100, 2)
    prefill.write([1, 2, 3, 4], keys, values)
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(IDS), 64, ((9, 8, 7, 6),))]))
    results = until_loaded(decode, "r")
    assert not results.failed, decode.log
    assert not decode.regions[:, [9, 8]].any()
    assert results.moves[0].nbytes == (99 - 64) * 2 * 2 * 2 * 4 * 4
    np.testing.assert_array_equal(decode.read([9, 8, 7, 6], 99)[0][:, 64:], keys[:, 64:99])


def test_another_prompt_with_a_prefix_hit_writes_nothing(worker: Callable[..., FakeWorker]) -> None:
    """A router that mixes up tickets must not be able to spoil blocks that other requests read."""
    prefill, decode = worker(), worker()
    prefill.write([1, 2, 3, 4], *random_kv(100, 3))
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    other = [1, *IDS[1:]]
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(other), 64, ((9, 8, 7, 6),))]))
    assert until_loaded(decode, "r").failed == {"r"}
    assert not decode.memory.any()


def test_another_prompt_is_refused_after_the_move(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker()
    prefill.write([1, 2, 3, 4], *random_kv(100, 3))
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids([*IDS[:50], 1, *IDS[51:]]), 0, ((9, 8, 7, 6),))]))
    results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert "other token ids" in str(results.errors[0])


def test_a_pool_with_a_sliding_group_and_a_layer_without_a_number() -> None:
    layout = pool_layout(
        [Group(("a.0.x",), 32, 1, 8), Group(("a.1.x",), 32, 1, 8, window=17)],
        dict.fromkeys(("a.0.x", "a.1.x"), LayerTensor(0, 2048, 2048)),  # one memory, as in vLLM
        dtype="float32",
        num_blocks=4,
        nbytes=8192,
    )
    assert [group.window for group in layout.groups] == [None, 16]
    with pytest.raises(IncompatibleError, match="number"):
        pool_layout(
            [Group(("attention",), 32, 1, 8)],
            {"attention": LayerTensor(0, 2048, 2048)},
            dtype="float32",
            num_blocks=1,
            nbytes=2048,
        )


def test_ranks_of_one_worker_hold_their_own_heads(worker: Callable[..., FakeWorker]) -> None:
    """Rank r of decode takes from rank r of prefill; another rank's ticket is refused by name."""
    prefills, decodes = [worker(rank=rank) for rank in (0, 1)], [worker(rank=rank) for rank in (0, 1)]
    made = [random_kv(40, rank) for rank in (0, 1)]
    for prefill, kv in zip(prefills, made, strict=True):
        prefill.write([1, 2], *kv)
    tickets = tuple(offer(prefill, "r", IDS[:40], [1, 2]) for prefill in prefills)
    assert tickets_from({TICKET_KEY: ticket_text(tickets)}) == tickets
    for decode, (keys, _) in zip(decodes, made, strict=True):
        decode.step(Step(loads=[Load("r", tickets, pack_ids(IDS[:40]), 0, ((5, 6),))]))
        assert not until_loaded(decode, "r").failed, decode.log
        np.testing.assert_array_equal(decode.read([5, 6], 39)[0], keys[:, :39])
    again = tuple(offer(prefill, "s", IDS[:40], [1, 2]) for prefill in prefills)
    decodes[0].step(Step(loads=[Load("s", again[::-1], pack_ids(IDS[:40]), 0, ((7, 8),))]))
    failed = until_loaded(decodes[0], "s")
    assert failed.failed == {"s"}
    assert "heads" in str(failed.errors[0])


# Worker side.


def test_blocks_come_free_once_and_only_after_vllm_asked(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
    until_loaded(decode, "r")
    wait_until(lambda: prefill.side.endpoint.stats().holds == 0)
    assert not prefill.step(Step()).saved  # its request has not ended yet
    saved: list[str] = []
    finished = [{"r"}, set()]

    def ended() -> bool:
        saved.extend(prefill.step(Step(), finished[min(len(saved), 1)]).saved)
        return bool(saved)

    wait_until(ended)
    assert saved == ["r"]
    assert not prefill.step(Step(), {"r"}).saved


def test_a_lease_that_ends_frees_the_blocks(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(lease_seconds=0.3), worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    saved: set[str] = set()
    wait_until(lambda: bool(saved.update(prefill.step(Step(), {"r"}).saved) or saved))
    assert saved == {"r"}
    assert any("lease" in line for line in prefill.log)
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
    late = until_loaded(decode, "r")
    assert late.failed == {"r"}
    assert isinstance(late.errors[0], DeadlineError)


def test_a_preempted_offer_has_ended_before_its_blocks_are_reused(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    prefill.step(Step(preempted=["r"]))
    assert prefill.side.endpoint.stats().holds == 0
    again = offer(prefill, "r", IDS, [5, 6, 7, 8])
    for name, given in (("old", ticket), ("new", again)):
        decode.step(Step(loads=[Load(name, (given,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
        assert until_loaded(decode, name).failed == {"old"}


def test_an_offer_that_is_withdrawn_is_reported_when_the_request_has_ended(
    worker: Callable[..., FakeWorker],
) -> None:
    prefill = worker()
    offer(prefill, "r", IDS, [1, 2, 3, 4])
    saved = set(prefill.step(Step(withdrawn=["r"]), {"r"}).saved)
    wait_until(lambda: bool(saved.update(prefill.step(Step()).saved) or saved))
    assert saved == {"r"}


def test_an_offer_that_its_caller_gives_up_comes_free_unless_decode_has_it(
    worker: Callable[..., FakeWorker],
) -> None:
    """The scheduler hears it in a request's parameters; a ticket that decode has claimed goes on."""
    prefill, decode = worker(), worker()
    given_up, taken = offer(prefill, "a", IDS, [1, 2, 3, 4]), offer(prefill, "b", IDS, [5, 6, 7, 8])
    decode.step(Step(loads=[Load("b", (taken,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
    assert not until_loaded(decode, "b").failed
    scheduler, log = side()
    for ticket in (given_up, taken, real_ticket(worker)):
        params = {"kvferry_withdraw": ticket_text((ticket,))}
        scheduler.added(FakeRequest("x", [0], params))
    scheduler.added(FakeRequest("y", [0], {"kvferry_withdraw": "?"}))
    step = scheduler.end_step(scheduled({}))
    assert (len(step.given_up), len(log)) == (3, 1)
    saved = set(prefill.step(step, {"a", "b"}).saved)
    wait_until(lambda: bool(saved.update(prefill.step(Step()).saved) or len(saved) == 2))
    assert prefill.side.endpoint.stats().holds == 0
    assert sum("gave it up" in line for line in prefill.log) == 1


def test_a_request_that_ends_at_decode_ends_its_load(worker: Callable[..., FakeWorker]) -> None:
    """The load is reported though nobody waits for it: only then are its blocks vLLM's again."""
    prefill, decode = worker(), worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    step = Step(loads=[Load("r", (ticket,), pack_ids(IDS), 0, ((9, 8, 7, 6),))])
    decode.step(step, {"r"})
    until_loaded(decode, "r")
    wait_until(lambda: decode.side.endpoint.stats().transfers == 0)


def test_what_decode_does_not_need_comes_free_at_prefill(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(unwanted=[Load("r", (ticket,), pack_ids(IDS), 99, ())]))
    wait_until(lambda: prefill.side.endpoint.stats().holds == 0)
    assert not decode.memory.any()


def test_a_busy_prefill_is_asked_again(worker: Callable[..., FakeWorker]) -> None:
    """More loads at once than prefill lets one peer move: all arrive, none is told that it failed."""
    prefill, decode = worker(num_blocks=128), worker(num_blocks=128, max_pulls=70, pull_timeout_seconds=90.0)
    ids = [[number, *IDS[:9]] for number in range(70)]
    tickets = [offer(prefill, f"r{number}", given, [number + 1]) for number, given in enumerate(ids)]
    decode.step(
        Step(
            loads=[
                Load(f"r{number}", (ticket,), pack_ids(given), 0, ((number + 1,),))
                for number, (ticket, given) in enumerate(zip(tickets, ids, strict=True))
            ]
        )
    )
    wait_until(lambda: bool(decode.step(Step())) and len(decode.ended.loaded) == 70, 90.0)
    assert not decode.ended.failed, decode.log


def test_another_model_is_refused_by_name(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker(weights="ef" * 32)
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
    results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert "weights" in str(results.errors[0])


def test_another_dtype_is_refused_by_name_and_nothing_is_written(worker: Callable[..., FakeWorker]) -> None:
    """vLLM's pool has no room to convert in. At decode's claim, and at the start where peers are named."""
    address = unique_address("shm")
    prefill, decode = worker(listen=(address,)), worker(dtype="float16")
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    decode.step(Step(loads=[Load("r", (ticket,), pack_ids(IDS), 0, ((9, 8, 7, 6),))]))
    results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert "key dtype: float32 against float16, conversion is not allowed" in str(results.errors[0])
    assert not decode.memory.any()
    with pytest.raises(IncompatibleError, match="key dtype: float"):
        worker(dtype="float16", peers=(address,))


def test_a_peer_that_does_not_fit_is_named_at_the_start(worker: Callable[..., FakeWorker]) -> None:
    """And one that does, or is not there yet, is none of its business."""
    address, nobody = unique_address("shm"), f"{unique_address('shm')}-nobody"
    worker(listen=(address,))
    with pytest.raises(IncompatibleError, match="weights"):
        worker(weights="ef" * 32, peers=(address,))
    second = worker(peers=(address, nobody), block_size=64)
    assert second.side.endpoint.stats().peers == 1
    assert ["nobody" in line for line in second.log] == [True]


def test_a_rank_listens_at_its_own_port(worker: Callable[..., FakeWorker]) -> None:
    first = worker(listen=("tcp://127.0.0.1:0",)).side.endpoint.addresses[0]
    port = int(first.rsplit(":", 1)[1])
    second = worker(listen=(f"tcp://127.0.0.1:{port}",), rank=1).side.endpoint.addresses[0]
    assert second == f"tcp://127.0.0.1:{port + 1}"


# Push.


@pytest.fixture
def interface() -> Iterator[Callable[..., PrefillInterface]]:
    """Make prefill workers with the HTTP interface that decode asks."""
    made: list[PrefillInterface] = []

    def make(worker: FakeWorker, computed_tokens: int = 0) -> PrefillInterface:
        made.append(PrefillInterface(worker, computed_tokens))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize(("computed_tokens", "ours"), [(0, 32), (40, 64), (99, 32)])
def test_a_pushed_prompt_arrives_layer_by_layer(
    worker: Callable[..., FakeWorker],
    interface: Callable[..., PrefillInterface],
    computed_tokens: int,
    ours: int,
) -> None:
    """Also where a prefix hit or earlier chunks of the prompt were there before the last step."""
    prefill, decode = worker(), worker(block_size=ours)
    http = interface(prefill, computed_tokens)
    decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 0, ((9, 8, 7, 6),), http.url)]))
    results = until_loaded(decode, "r")
    assert not results.failed, decode.log + prefill.log
    keys, values = random_kv(100, 100)
    np.testing.assert_array_equal(decode.read([9, 8, 7, 6], 99), (keys[:, :99], values[:, :99]))
    saved: set[str] = set()
    wait_until(lambda: bool(saved.update(prefill.step(Step(), {"push-0"}).saved) or saved))
    assert saved == {"push-0"}


def test_a_push_leaves_out_the_prefix_that_decode_holds(
    worker: Callable[..., FakeWorker], interface: Callable[..., PrefillInterface]
) -> None:
    prefill, decode = worker(), worker()
    http = interface(prefill)
    decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 64, ((9, 8, 7, 6),), http.url)]))
    results = until_loaded(decode, "r")
    assert not results.failed, decode.log + prefill.log
    assert not decode.regions[:, [9, 8]].any()
    assert results.moves[0].nbytes == (99 - 64) * 2 * 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("status", "refuse", "named"), [(503, "", "503"), (200, "it has multimodal input", "multimodal")]
)
def test_a_push_that_prefill_does_not_make_fails_at_once(
    worker: Callable[..., FakeWorker],
    interface: Callable[..., PrefillInterface],
    status: int,
    refuse: str,
    named: str,
) -> None:
    decode = worker()
    http = interface(worker())
    http.status, http.refuse = status, refuse
    decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 0, ((9, 8, 7, 6),), http.url)]))
    results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert named in str(results.errors[0])
    assert decode.side.endpoint.stats().holds == 0


def test_a_push_by_a_prefill_that_does_not_fit_ends_soon_after_its_answer(
    worker: Callable[..., FakeWorker], interface: Callable[..., PrefillInterface]
) -> None:
    """Its server knows nothing of it; the reservation that nobody took up does not wait for its end."""
    prefill, decode = worker(weights="ef" * 32), worker(push_timeout_seconds=600.0, lost_seconds=1.0)
    http = interface(prefill)
    decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 0, ((9, 8, 7, 6),), http.url)]))
    results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert "does not push it" in str(results.errors[0])
    assert any("weights" in line for line in prefill.log)
    assert decode.side.endpoint.stats().holds == 0


def test_a_push_that_nobody_answers_ends(worker: Callable[..., FakeWorker]) -> None:
    decode = worker(push_timeout_seconds=0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 0, ((9, 8, 7, 6),), url)]))
        results = until_loaded(decode, "r")
    assert results.failed == {"r"}
    assert isinstance(results.errors[0], DeadlineError)


@pytest.mark.parametrize(
    ("says", "named"),
    [
        (b"SSH-2.0-x\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{", "not understood"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 9\r\n\r\nx", "answered 500"),
        (None, "gave no answer in 0.3 s"),
    ],
    ids=["no HTTP", "cut", "cut error", "byte by byte"],
)
def test_prefills_broken_answer_has_an_end_and_a_name(says: bytes | None, named: str) -> None:
    """Without a declared length it may come byte by byte, each in time."""

    def answer(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError):
            sock.recv(65536)
            if says is not None:
                sock.sendall(says)
                return
            sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            while not sock.sendall(b" "):
                ended.wait(0.05)

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(KVFerryError, match=named) as caught:
            ask_prefill(url, np.arange(9, dtype=np.int32), b"t", 0.3)
        ended.set()
        thread.join()
    assert caught.value.peer.startswith(url)
    assert caught.value.phase == "prefill"


def test_decode_asks_prefill_by_no_proxy_of_the_environment(
    worker: Callable[..., FakeWorker],
    interface: Callable[..., PrefillInterface],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    urllib.request.install_opener(None)  # type: ignore[arg-type]  # one that has read the environment before
    decode, http = worker(), interface(worker())
    decode.step(Step(loads=[Load("r", (), pack_ids(IDS), 0, ((9, 8, 7, 6),), http.url)]))
    assert not until_loaded(decode, "r").failed, decode.log


def test_a_push_whose_reservation_is_gone_frees_prefill(worker: Callable[..., FakeWorker]) -> None:
    prefill, decode = worker(), worker()
    ticket = reserve(decode)
    decode.side.endpoint.withdraw(ticket)
    prefill.step(Step(pushes=[PushSave("p", (ticket,), pack_ids(IDS), ((1, 2, 3, 4),), 0)]))
    saved: set[str] = set()
    wait_until(lambda: bool(saved.update(prefill.step(Step(), {"p"}).saved) or saved))
    assert saved == {"p"}
    assert prefill.side.endpoint.stats().transfers == 0


def reserve(decode: FakeWorker) -> bytes:
    tables = block_tables(((9, 8, 7, 6),), decode.side.endpoint.pool.layout.groups, 99, spare=2)
    return decode.side.endpoint.reserve("d", 99, tables)


# Tickets.


def test_a_ticket_crosses_the_processes_or_its_error_does(worker: Callable[..., FakeWorker]) -> None:
    prefill = worker()
    ticket = offer(prefill, "r", IDS, [1, 2, 3, 4])
    server = TicketServer(prefill.side.ticket)
    client = TicketClient(server.address)
    assert client.fetch("r", 1.0) == ticket
    with pytest.raises(LocalError, match="not offered"):
        client.fetch("unknown", 1.0)
    assert client.fetch("r", 1.0) == ticket
    server.close()
    with pytest.raises(LocalError, match="gave no ticket"):
        client.fetch("r", 1.0)
    client.close()


@pytest.mark.parametrize("text", ["", "*", 7, None, "a" * (1 << 21), "é"])
def test_a_ticket_from_outside_is_refused_by_name(text: Any) -> None:
    with pytest.raises(InputError, match=TICKET_KEY):
        tickets_from({TICKET_KEY: text})


# Scheduler side.


class Neutral(msgspec.Struct):
    """Sampling parameters of which none is set."""


def side(
    ticket: bytes | KVFerryError = b"t", ranks: int = 1, window: int = 0
) -> tuple[SchedulerSide, list[str]]:
    log: list[str] = []

    def fetch(request_id: str) -> tuple[bytes, ...]:
        if isinstance(ticket, KVFerryError):
            raise ticket
        return (ticket,) * ranks

    urls = ("http://p",)
    first = FirstToken(128, None, "")
    return SchedulerSide(
        fetch, log.append, ranks=ranks, window=window, prefill_urls=urls, first_token=first
    ), log


def test_a_prompt_is_offered_by_the_step_that_ends_it() -> None:
    scheduler, _ = side()
    request = FakeRequest("r", IDS, PREFILL)
    scheduler.added(request)
    assert not scheduler.end_step(scheduled({"r": [1, 2]}, r=60)).saves
    request.num_computed_tokens = 60
    (save,) = scheduler.end_step(scheduled({"r": [1, 2, 3, 4]}, r=40)).saves
    assert save == Save("r", pack_ids(IDS), ((1, 2, 3, 4),))
    assert not scheduler.end_step(scheduled({"r": [1, 2, 3, 4]}, r=1)).saves
    hold, params = scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED"))
    assert hold
    assert params == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        TICKET_KEY: "dA",
        TOKENS_KEY: 99,
    }


def test_how_to_go_on_after_the_first_token_is_told_where_it_is_asked() -> None:
    """With the ticket as ever; a first token that ends the request is all of it, and nothing is held."""
    params = []
    for asked, status in (
        ({}, "FINISHED_LENGTH_CAPPED"),
        ({"kvferry_first_token": "emit"}, "FINISHED_LENGTH_CAPPED"),
        ({"kvferry_first_token": "emit"}, "FINISHED_STOPPED"),
    ):
        scheduler, _ = side()
        scheduler.model = "ab"
        request = FakeRequest("r", IDS, PREFILL | asked, output_token_ids=[7], sampling_params=Neutral())
        scheduler.added(request)
        scheduler.end_step(scheduled({"r": [1]}, r=100))
        hold, answer = scheduler.finished(request.set_status(status))
        assert hold
        params.append(answer)
        assert scheduler.end_step(scheduled({})).withdrawn == ["r"] * (status == "FINISHED_STOPPED")
    plain, emitted, ended = params
    assert emitted == plain | {
        "kvferry_continue": {"ids": [*IDS, 7], "room_tokens": 28, "default_tokens": 28},
        "kvferry_model": "ab",
    }
    assert ended["kvferry_refused"] == "it ended with its first token"


def test_a_server_says_which_model_it_runs_where_it_is_asked() -> None:
    """By a digest of what has to be equal at both sides, and nothing else: the build may differ."""
    scheduler, _ = side()
    scheduler.model = "ab"
    for params, answer in (({"kvferry_model": "?"}, {"kvferry_model": "ab"}), (None, None), ({}, None)):
        request = FakeRequest("r", [0], params)
        scheduler.added(request)
        assert scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED")) == (False, answer)
    fields: dict[str, Any] = {"build": "a", "weights": "ab" * 32, "config": {"layers": 2}, "cache": {}}
    fields |= {"tokenizer": "cd" * 32, "vocab_size": 512, "max_context": 4096}
    digest = model_digest(fingerprint(**fields))
    for change, is_same in (
        ({"build": "b"}, True),
        ({"max_context": 2048}, True),
        ({"weights": "ac" * 32}, False),
        ({"config": {"layers": 3}}, False),
        ({"cache": {"dtype": "float16"}}, False),
        ({"tokenizer": "ce" * 32}, False),
        ({"vocab_size": 511}, False),
    ):
        assert (model_digest(fingerprint(**fields | change)) == digest) is is_same


def test_nothing_is_written_behind_a_token_of_another_model(worker: Callable[..., FakeWorker]) -> None:
    """What the caller believes of this server may be an earlier one's: the request names the model itself.
    It is never scheduled, not where the prefix cache has all of its prompt either, and fetches nothing.
    """
    ticket = {"do_remote_prefill": True, TICKET_KEY: ticket_text((real_ticket(worker),))}
    for named, is_ours in (("ab", True), ("cd", False), ("", False), (7, False)):
        scheduler, log = side()
        scheduler.model = "ab"
        request = FakeRequest("r", IDS, ticket | {"kvferry_model": named})
        scheduler.added(request)
        for local, more in ((0, 99), (96, 3), (99, 0)):
            assert scheduler.loadable_tokens(request, local) == (more if is_ours else None)
        answer = scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED"))
        assert answer == (False, {"kvferry_model": "ab"})
        step = scheduler.end_step(scheduled({}))
        assert not step.loads
        assert bool(step.unwanted) is is_ours
        assert [line for line in log if "token of another model" in line] == log
        assert len(log) == (not is_ours)


def test_a_preempted_prompt_is_withdrawn_and_offered_again() -> None:
    scheduler, _ = side()
    request = FakeRequest("r", IDS, PREFILL)
    scheduler.added(request)
    assert scheduler.end_step(scheduled({"r": [1]}, r=100)).saves
    request.set_status("PREEMPTED")
    assert scheduler.end_step(scheduled({})).preempted == ["r"]
    assert not scheduler.end_step(scheduled({})).preempted
    request.set_status("RUNNING")
    assert scheduler.end_step(scheduled({"r": [4]}, r=100)).saves[0].blocks == ((4,),)


def test_an_aborted_prompt_is_held_until_its_offer_has_ended() -> None:
    scheduler, _ = side()
    early, late = FakeRequest("early", IDS, PREFILL), FakeRequest("late", IDS, PREFILL)
    scheduler.added(early)
    scheduler.added(late)
    scheduler.end_step(scheduled({"late": [1]}, late=100))
    assert scheduler.finished(early.set_status("FINISHED_ABORTED"))[0] is False
    assert scheduler.finished(late.set_status("FINISHED_ABORTED")) == (True, None)
    assert scheduler.end_step(scheduled({})).withdrawn == ["late"]


def test_without_a_ticket_decode_is_told_why() -> None:
    scheduler, log = side(LocalError("no worker"))
    request = FakeRequest("r", IDS, PREFILL)
    scheduler.added(request)
    scheduler.end_step(scheduled({"r": [1]}, r=100))
    hold, params = scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED"))
    assert hold
    assert params is not None
    assert params["do_remote_prefill"] is False
    assert "no worker" in params[REFUSED_KEY]
    assert scheduler.end_step(scheduled({})).withdrawn == ["r"]
    assert len(log) == 1


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("lora_request", FakeRequest, "LoRA"),
        ("mm_features", (1,), "multimodal"),
        ("prompt_token_ids", None, "embeddings"),
        ("prompt_token_ids", [4], "one token"),
    ],
)
def test_what_cannot_be_handed_over_is_refused_by_name(field: str, value: Any, named: str) -> None:
    for params in (PREFILL, {"do_remote_prefill": True, TICKET_KEY: "dA"}):
        scheduler, log = side()
        request = FakeRequest("r", IDS, dict(params))
        if value is FakeRequest:
            value = type("Lora", (), {"lora_name": "x"})()
        setattr(request, field, value)
        scheduler.added(request)
        assert scheduler.loadable_tokens(request, 0) == 0
        assert not scheduler.end_step(scheduled({"r": [1]}, r=100)).saves
        hold, answer = scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED"))
        assert not hold
        if params is PREFILL:
            assert answer is not None
            assert named in answer[REFUSED_KEY]
        else:
            assert len(log) == 1


def test_what_vllms_server_has_refused_is_logged_as_that(worker: Callable[..., FakeWorker]) -> None:
    """vLLM then sends the engine a request of one made-up token, aborted at once."""
    scheduler, log = side()
    ticket = ticket_text((real_ticket(worker),))
    for asked in ({TICKET_KEY: ticket}, {PUSH_URL_KEY: "http://p"}):
        params = {"do_remote_prefill": True} | asked
        stand_in = FakeRequest("r", [0], params, abort_immediately=True)
        scheduler.added(stand_in)
        assert scheduler.finished(stand_in.set_status("FINISHED_ABORTED")) == (False, None)
        again = FakeRequest("again", IDS, params)  # its ticket was not taken up
        scheduler.added(again)
        assert scheduler.loadable_tokens(again, 0) == 99
    (line,) = log
    assert "server's answer to it was an error" in line
    assert "lease ends" in line
    assert "gives the ticket up" in line


def real_ticket(worker: Callable[..., FakeWorker], request_id: str = "r") -> bytes:
    return offer(worker(), request_id, IDS, [1, 2, 3, 4])


def test_decode_loads_all_but_the_last_token_beyond_its_prefix(worker: Callable[..., FakeWorker]) -> None:
    ticket = real_ticket(worker)
    scheduler, _ = side()
    request = FakeRequest("d", IDS, {"do_remote_prefill": True, TICKET_KEY: ticket_text((ticket,))})
    scheduler.added(request)
    assert scheduler.loadable_tokens(request, 0) == 99
    assert scheduler.loadable_tokens(request, 32) == 67
    scheduler.allocated(request, ([4, 5, 6, 7],), 67)
    (load,) = scheduler.end_step(scheduled({})).loads
    assert load == Load("d", (ticket,), pack_ids(IDS), 32, ((4, 5, 6, 7),))
    assert scheduler.loadable_tokens(request, 32) == 0
    scheduler.allocated(request, ([4, 5, 6, 7],), 0)
    step = scheduler.end_step(scheduled({}))
    assert not step.loads
    assert not step.unwanted


@pytest.mark.parametrize(("local", "loaded"), [(0, 99), (32, 67), (64, 0), (96, 0)])
def test_a_window_that_begins_in_shared_blocks_is_computed(
    worker: Callable[..., FakeWorker], local: int, loaded: int
) -> None:
    """Of 99 tokens the last 40 move whole: a prefix hit of 64 reaches into them."""
    ticket = real_ticket(worker)
    scheduler, _ = side(window=40)
    request = FakeRequest("d", IDS, {"do_remote_prefill": True, TICKET_KEY: ticket_text((ticket,))})
    scheduler.added(request)
    assert scheduler.loadable_tokens(request, local) == loaded


@pytest.mark.parametrize("how", ["full hit", "ended early"])
def test_a_ticket_that_is_not_needed_is_given_back(worker: Callable[..., FakeWorker], how: str) -> None:
    ticket = real_ticket(worker)
    scheduler, _ = side()
    request = FakeRequest("d", IDS, {"do_remote_prefill": True, TICKET_KEY: ticket_text((ticket,))})
    scheduler.added(request)
    if how == "full hit":
        assert scheduler.loadable_tokens(request, 99) == 0
        scheduler.allocated(request, ([4, 5, 6, 7],), 0)
    else:
        assert scheduler.finished(request.set_status("FINISHED_ABORTED")) == (False, None)
    assert scheduler.end_step(scheduled({})).unwanted == [Load("d", (ticket,), pack_ids(IDS), 99, ())]


def test_tickets_that_do_not_fit_are_told_and_decode_computes_alone(
    worker: Callable[..., FakeWorker],
) -> None:
    ticket = real_ticket(worker)
    scheduler, log = side(ranks=1)
    for tickets in ((ticket, ticket), (b"no ticket",)):
        request = FakeRequest("d", IDS, {"do_remote_prefill": True, TICKET_KEY: ticket_text(tickets)})
        scheduler.added(request)
        assert scheduler.loadable_tokens(request, 0) == 0
    params = {"do_remote_prefill": True, TICKET_KEY: ticket_text((ticket,))}
    first, second = FakeRequest("a", IDS, params), FakeRequest("b", IDS, params)
    scheduler.added(first)
    scheduler.added(second)
    assert scheduler.loadable_tokens(first, 0) == 99
    assert scheduler.loadable_tokens(second, 0) == 0
    assert "ranks" in log[0]
    assert "n > 1" in log[2]


def test_a_prompt_with_decodes_reservation_is_pushed_by_its_last_step(
    worker: Callable[..., FakeWorker],
) -> None:
    ticket = reserve(worker())
    scheduler, _ = side(LocalError("never asked"))
    request = FakeRequest("p", IDS, PREFILL | {TICKET_KEY: ticket_text((ticket,))}, num_computed_tokens=64)
    scheduler.added(request)
    step = scheduler.end_step(scheduled({"p": [1, 2, 3, 4]}, p=36))
    assert step.pushes == [PushSave("p", (ticket,), pack_ids(IDS), ((1, 2, 3, 4),), 64)]
    hold, params = scheduler.finished(request.set_status("FINISHED_LENGTH_CAPPED"))
    assert hold
    assert params is not None
    assert (params["do_remote_prefill"], params[TICKET_KEY]) == (True, ticket_text((ticket,)))
    short = FakeRequest("s", IDS[:50], PREFILL | {TICKET_KEY: ticket_text((ticket,))})
    scheduler.added(short)
    assert "99" in (scheduler.finished(short)[1] or {})[REFUSED_KEY]


def test_decode_asks_only_servers_that_were_allowed() -> None:
    for url, tokens in (("http://p", 99), ("http://evil", 0), (7, 0)):
        scheduler, log = side()
        request = FakeRequest("d", IDS, {"do_remote_prefill": True, PUSH_URL_KEY: url}, cache_salt="s")
        scheduler.added(request)
        assert scheduler.loadable_tokens(request, 0) == tokens
        assert len(log) == (tokens == 0)
        scheduler.allocated(request, ([4, 5, 6, 7],), tokens)
        loads = scheduler.end_step(scheduled({})).loads
        assert [(load.prefill_url, load.cache_salt) for load in loads] == [("http://p", "s")] * (tokens > 0)
    scheduler, log = side(ranks=2)
    scheduler.added(FakeRequest("d", IDS, {"do_remote_prefill": True, PUSH_URL_KEY: "http://p"}))
    assert "one rank" in log[0]


# Start.


def test_a_load_that_fails_and_its_error_are_of_one_step() -> None:
    """Whatever step comes between: the one that ends the request counts its failure too."""
    taken: list[Results] = []
    box = Outbox(lambda _: taken.append(box.take()))
    box.loaded("r", LocalError("a disk is gone"))
    assert [(each.failed, [error.message for error in each.errors]) for each in taken] == [
        ({"r"}, ["a disk is gone"])
    ]


def test_options_are_checked_by_name() -> None:
    assert read_options({"lease_seconds": 5, "listen": ["tcp://127.0.0.1:0"]}).lease_seconds == 5.0
    for wrong in ({"lease": 5}, {"lease_seconds": -1}, {"integrity": "perhaps"}, {"max_pulls": 0}):
        with pytest.raises(InputError, match="kv_connector_extra_config"):
            read_options(wrong)


def test_checkpoints_are_told_apart(tmp_path: Any) -> None:
    small, large = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    small.write_bytes(b"x" * 5000)
    large.write_bytes(bytes(40 << 20))
    before = files_digest([small, large])
    assert before == files_digest([large, small])
    small.write_bytes(b"x" * 4999 + b"y")
    assert files_digest([small, large]) != before
    with pytest.raises(LocalError, match="no checkpoint"):
        files_digest([])


def test_the_layout_says_what_is_transposed() -> None:
    """K's elements lie a block apart, V's beside each other; heads lie K and V together."""
    key, value = packed_layout(32, 4, rank=1).groups[0].tensors[:2]
    assert (key.token_stride, key.dim_stride, key.head_stride) == (4, 128, 1024)
    assert (value.token_stride, value.dim_stride, value.head_stride) == (16, 0, 1024)
    assert (value.offset - key.offset, key.head_start) == (512, 2)
