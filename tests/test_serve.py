"""``kvferry serve``: real server processes, alone and as prefill and decode workers of each other."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from conftest import wait_until
from kvferry.cli import run
from kvferry.proxy.body import read_body
from kvferry.serve import ServeOptions
from kvferry.serve.ask import read_chat, read_completion
from kvferry.serve.batcher import Batcher
from kvferry.serve.job import Event, Handed, Job, Token
from kvferry.serve.roles import Roles
from kvferry.serve.run import choose_model, make_engine
from kvferry.transfer import Endpoint
from serve_kit import COMMAND, GREEDY, PROMPT, SEEDED, Server, asked, text_of, text_of_stream

REMOTE = {"do_remote_decode": True, "do_remote_prefill": False}
EMIT = {"kvferry_first_token": "emit"}


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode worker."""
    options = ("--kv", "tcp://127.0.0.1:0", "--lease-seconds", "20", "--chunk-tokens", "64")
    prefill, decode = Server(*options, "--name", "p"), Server(*options, "--name", "d", "--block-size", "32")
    with prefill, decode:
        yield prefill, decode


def give(prefill: Server, body: dict[str, Any], **params: Any) -> dict[str, Any]:
    """Ask prefill for one token and a ticket."""
    return prefill.complete(body | {"max_tokens": 1, "kv_transfer_params": REMOTE | params})


def hand_over(prefill: Server, decode: Server, body: dict[str, Any], *, push: bool, emit: bool) -> str:
    """One request over both; the text that its client would read."""
    params: dict[str, Any] = EMIT if emit else {}
    if push:
        held = decode.complete(body | {"kv_transfer_params": {"kvferry_reserve": True}})
        params = held["kv_transfer_params"] | params
    first = give(prefill, body, **params)
    then = decode.complete(body | {"kv_transfer_params": first["kv_transfer_params"]})
    assert first["kv_transfer_params"]["kvferry_emitted_tokens"] == int(emit)
    assert then["usage"]["completion_tokens"] == body["max_tokens"]
    return (text_of(first) if emit else "") + text_of(then)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.slow
def test_two_workers_write_what_one_does(pair: tuple[Server, Server], sampling: dict[str, Any]) -> None:
    """Pulled and pushed, the first token from either, between unlike blocks: the text is one server's."""
    prefill, decode = pair
    body = asked(**sampling, stop=["\x00never"])
    alone = text_of(decode.complete(body))
    for push in (False, True):
        for emit in (False, True):
            assert hand_over(prefill, decode, body, push=push, emit=emit) == alone, (push, emit)
    prefill.wait_empty()
    decode.wait_empty()


@pytest.mark.slow
def test_streams_say_what_answers_say_and_batches_change_nothing(pair: tuple[Server, Server]) -> None:
    """Twelve requests at once, completions and chat, streamed: each is what it is alone; usage adds up."""
    _, server = pair
    bodies = [asked(10, f"{number} {PROMPT[number:]}", **SEEDED) for number in range(6)]
    alone = [server.complete(body | {"return_token_ids": True}) for body in bodies]
    chats = [
        {"messages": [{"role": "user", "content": f"Say {number}"}], "max_tokens": 6, **GREEDY}
        for number in range(6)
    ]
    chats_alone = [server.complete(chat, "/v1/chat/completions") for chat in chats]
    with ThreadPoolExecutor(12) as pool:
        more = {"return_token_ids": True, "stream_options": {"include_usage": True}}
        streams = [pool.submit(server.stream, body | more) for body in bodies]
        chat_streams = [pool.submit(server.stream, chat, "/v1/chat/completions") for chat in chats]
        for whole, stream in zip(alone, streams, strict=True):
            *events, usage = stream.result()
            assert text_of_stream(events) == text_of(whole)
            ids = [token for event in events for token in event["choices"][0]["token_ids"]]
            assert ids == whole["choices"][0]["token_ids"]
            assert usage["usage"] == whole["usage"]
            assert len({event["id"] for event in events}) == 1
        for whole, stream in zip(chats_alone, chat_streams, strict=True):
            assert text_of_stream(stream.result()) == text_of(whole)
            assert stream.result()[0]["choices"][0]["delta"]["role"] == "assistant"
    server.wait_empty()


@pytest.mark.slow
def test_a_client_that_leaves_frees_everything(pair: tuple[Server, Server]) -> None:
    """In the middle of a stream, and while a whole answer is computed."""
    _, server = pair
    with server.client.stream("POST", "/v1/completions", json=asked(8000, stream=True)) as answer:
        lines = answer.iter_lines()  # held: when it goes, the connection closes
        next(lines)
        assert server.health()["running"] == 1
    server.wait_empty()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json=asked(8000), timeout=0.5)
    server.wait_empty()


@pytest.mark.slow
def test_tickets_that_do_not_fit_are_refused(pair: tuple[Server, Server]) -> None:
    """Of another prompt, other sampling, no ticket at all, used twice: an error, and nothing is held."""
    prefill, decode = pair
    body = asked(**SEEDED)
    for change, status in (({"prompt": PROMPT[1:] + "x"}, 409), ({"temperature": 0.7}, 409)):
        params = give(prefill, body)["kv_transfer_params"]
        answer = decode.post(body | change | {"kv_transfer_params": params})
        assert answer.status_code == status, answer.text
    params = give(prefill, body)["kv_transfer_params"]
    decode.complete(body | {"kv_transfer_params": params})
    used = decode.post(body | {"kv_transfer_params": params})
    assert used.status_code in {409, 502, 504}, used.text
    for ticket in ("", "!", "AAAA", params["kvferry_ticket"][:-8]):
        answer = decode.post(body | {"kv_transfer_params": params | {"kvferry_ticket": ticket}})
        assert answer.status_code == 400, answer.text
    prefill.wait_empty()
    decode.wait_empty()


@pytest.mark.slow
def test_a_request_that_ends_with_its_first_token_is_not_handed_over(pair: tuple[Server, Server]) -> None:
    """Prefill says stop, gives no ticket, holds nothing."""
    prefill, _ = pair
    first = prefill.complete(asked(1, **GREEDY, return_token_ids=True))["choices"][0]["token_ids"]
    body = asked(4, **GREEDY, stop_token_ids=first)
    for params in ({}, EMIT):
        answer = give(prefill, body, **params)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert "kv_transfer_params" not in answer
    prefill.wait_empty()


@pytest.mark.slow
def test_what_waits_is_bounded_and_comes_back() -> None:
    """One place: the second waits, the third is told 429; offers and reservations end with their lease."""
    options = ("--kv", "tcp://127.0.0.1:0", "--max-running", "1", "--max-waiting", "1")
    bounds = (
        "--queue-seconds",
        "2",
        "--pool-tokens",
        "12000",
        "--lease-seconds",
        "1",
        "--timeout-seconds",
        "2",
    )
    with Server(*options, *bounds) as server, ThreadPoolExecutor(4) as pool:
        with server.client.stream("POST", "/v1/completions", json=asked(8000, stream=True)) as answer:
            lines = answer.iter_lines()  # held: when it goes, the connection closes
            next(lines)
            second = pool.submit(server.post, asked())
            wait_until(lambda: server.health()["waiting"] == 1)
            third, fourth = server.post(asked()), second.result()
            assert third.status_code == 429, third.text
            assert int(third.headers["Retry-After"]) >= 1
            assert fourth.status_code == 503, fourth.text
            assert int(fourth.headers["Retry-After"]) >= 1
        server.wait_empty()
        too_large = server.post(asked(13000))
        assert too_large.status_code == 400
        assert "the whole pool has" in too_large.text
        give(server, asked())
        server.complete(asked() | {"kv_transfer_params": {"kvferry_reserve": True}})
        assert not server.is_empty()
        server.wait_empty()


@pytest.mark.slow
def test_a_dead_prefill_worker_is_an_error_at_decode_and_nothing_more(pair: tuple[Server, Server]) -> None:
    """Killed with its offer: decode says so in its own time and serves on."""
    _, decode = pair
    with Server("--kv", "tcp://127.0.0.1:0") as prefill:
        params = give(prefill, asked())["kv_transfer_params"]
        prefill.kill()
        answer = decode.post(asked() | {"kv_transfer_params": params})
        assert answer.status_code in {502, 504}, answer.text
        assert answer.json()["error"]["type"] in {"transport", "peer", "deadline"}
    decode.wait_empty()
    decode.complete(asked())


@pytest.mark.slow
def test_an_offer_whose_answer_nobody_read_is_taken_back() -> None:
    """The client left as prefill answered: its blocks do not wait for the end of the lease."""
    options = ServeOptions(kv="tcp://127.0.0.1:0", model="tiny", pool_tokens=1024, lease_seconds=600.0)
    engine, pool = make_engine(choose_model("tiny"), options)
    assert pool is not None
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    with Endpoint.listen(options.kv, pool=pool, requirements=engine.requirements()) as endpoint:
        roles = Roles(engine, endpoint, options)
        batcher = Batcher(engine, roles, options)
        batcher.start()
        try:
            body = json.dumps(asked(1) | {"kv_transfer_params": REMOTE}).encode()
            job = Job(read_completion(body, engine.model), events.put, time.monotonic() + 60, 20)
            batcher.submit(job)
            assert isinstance(events.get(timeout=30), Handed)
            assert isinstance(events.get(timeout=30), Token)
            assert batcher.stats()["free_blocks"] < batcher.stats()["num_blocks"]
            batcher.cancel(job)
            wait_until(lambda: batcher.stats()["free_blocks"] == batcher.stats()["num_blocks"])
        finally:
            batcher.close()
            roles.close()
    pool.close()


@pytest.mark.slow
def test_a_ticket_that_its_caller_gives_up_frees_what_it_holds() -> None:
    """An offer, a reservation, and one into which prefill has pushed, at both workers; what a request has
    taken up goes on. Each by a completion's parameters, and nothing waits for a lease of 10 minutes.
    """
    options = ("--kv", "tcp://127.0.0.1:0", "--lease-seconds", "600", "--chunk-tokens", "64")
    with Server(*options, "--name", "p") as prefill, Server(*options, "--name", "d") as decode:
        body = asked(3, **GREEDY)
        reserve = body | {"kv_transfer_params": {"kvferry_reserve": True}}

        def give_up(server: Server, params: dict[str, Any]) -> None:
            says = {"kvferry_withdraw": params["kvferry_ticket"]}
            answer = server.complete({"prompt": [0], "max_tokens": 1, "kv_transfer_params": says})
            assert answer["choices"] == []
            server.wait_empty()

        offered = give(prefill, body)["kv_transfer_params"]
        assert not prefill.is_empty()
        give_up(prefill, offered)
        late = decode.post(body | {"kv_transfer_params": offered})
        assert late.status_code in {409, 502, 504}, late.text
        reserved = decode.complete(reserve)["kv_transfer_params"]
        assert not decode.is_empty()
        give_up(decode, reserved)
        pushed = give(prefill, body, **decode.complete(reserve)["kv_transfer_params"])["kv_transfer_params"]
        give_up(decode, pushed)
        prefill.wait_empty()
        offered = give(prefill, asked(3000))["kv_transfer_params"]
        running = asked(3000, stream=True) | {"kv_transfer_params": offered}
        with decode.client.stream("POST", "/v1/completions", json=running) as answer:
            lines = answer.iter_lines()
            next(lines)
            give_up(prefill, offered)
            assert decode.health()["running"] == 1
        decode.wait_empty()
        for wrong in ({"kvferry_withdraw": 7}, {"kvferry_withdraw": offered["kvferry_ticket"]} | REMOTE):
            assert prefill.post(asked() | {"kv_transfer_params": wrong}).status_code == 400


@pytest.mark.parametrize("older", [None, 3, 9])
@pytest.mark.slow
def test_max_completion_tokens_counts_before_max_tokens(older: int | None) -> None:
    """At the server and at the proxy, for a chat; a completion knows max_tokens only."""
    body = {"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5, "max_tokens": older}
    raw = json.dumps(body).encode()
    assert read_chat(raw, choose_model("tiny")).limits.max_tokens_left == 5
    assert read_body(raw, is_chat=True).max_tokens == 5
    plain = json.dumps({"prompt": "a", "max_completion_tokens": 5, "max_tokens": older}).encode()
    assert read_body(plain, is_chat=False).max_tokens == older


BAD = [
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": "a", "n": 2}, "n"),
    ({"prompt": "a", "echo": True}, "echo"),
    ({"prompt": "a", "logprobs": 1}, "logprobs"),
    ({"prompt": "a", "colour": 1}, "colour"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "stop": ""}, "stop"),
    ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    ({"prompt": "a", "model": "other"}, "model"),
    ({"prompt": "a", "kv_transfer_params": {"do_remote_prefill": True}}, "kvferry_ticket"),
    ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": 1}}, "do_remote_decode"),
    ({"prompt": "a", "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": True}}, "both"),
    ({"prompt": "a", "stream": True, "kv_transfer_params": {"kvferry_reserve": True}}, "stream"),
]


@pytest.mark.slow
def test_a_bad_body_is_refused_by_the_name_of_its_field(pair: tuple[Server, Server]) -> None:
    """400, OpenAI's error object, nothing held."""
    _, server = pair
    for body, field in BAD:
        answer = server.post(body)
        assert answer.status_code == 400, (body, answer.text)
        assert field in answer.json()["error"]["message"], (body, answer.text)
    for raw in (b"", b"{", b"[]", b"\xff", b'{"prompt":"' + b"a" * (17 << 20) + b'"}'):
        assert server.client.post("/v1/completions", content=raw).status_code == 400
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "tiny-7"
    assert server.is_empty()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "nowhere"),
        ("--listen", "127.0.0.1:99999"),
        ("--block-size", "0"),
        ("--pool-tokens", "-5"),
        ("--queue-seconds", "nan"),
        ("--kv", "carrier-pigeon://x", "--model", "tiny", "--listen", "127.0.0.1:0"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("verb", ["serve", "proxy", "interference", "agent"])
@pytest.mark.slow
def test_without_the_extra_one_line_says_what_to_install(verb: str) -> None:
    arguments = {
        "serve": ["--listen", "127.0.0.1:0", "--model", "tiny"],
        "proxy": ["--prefill", "http://a:1", "--decode", "http://b:1"],
        "interference": ["http://h:1", "--prompt-tokens", "100"],
        "agent": ["--listen", "tcp://127.0.0.1:0", "--web", "127.0.0.1:0"],
    }
    code = (
        "import sys\n"
        "for name in ('starlette', 'httpx', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "from kvferry.cli import run\n"
        f"sys.exit(run({[verb, *arguments[verb]]!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'kvferry[serve]'" in done.stderr


@pytest.mark.parametrize("verb", ["serve --model tiny", "proxy --prefill http://a:1 --decode http://b:1"])
@pytest.mark.slow
def test_a_stdout_that_takes_nothing_ends_it_in_one_line(verb: str) -> None:
    command = f"exec {sys.executable} -m kvferry {verb} --listen 127.0.0.1:0 >/dev/full"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvferry: stdout: No space left on device\n"


@pytest.mark.slow
def test_an_address_in_use_is_exit_1_and_ctrl_c_exit_0() -> None:
    with Server() as server:
        port = server.url.rsplit(":", 1)[1]
        command = [*COMMAND, "serve", "--model", "tiny", "--listen", f"127.0.0.1:{port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("\n") == 1
        assert server.interrupt() == 0
        assert server.said == ""
