"""``kvferry proxy``: real processes of workers and proxy; what it writes is what one server writes."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from conftest import wait_until
from kvferry.cli import run
from serve_kit import GREEDY, SEEDED, Server, asked, text_of, text_of_stream

KV = ("--kv", "tcp://127.0.0.1:0", "--lease-seconds", "20", "--chunk-tokens", "64")
NOBODY = "http://127.0.0.1:9"  # the discard port: nothing listens there


def proxy(*arguments: str) -> Server:
    return Server(*arguments, verb="proxy", model=())


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Server, Server]]:
    """A prefill and a decode worker."""
    prefill, decode = Server(*KV, "--name", "p"), Server(*KV, "--name", "d")
    with prefill, decode:
        yield prefill, decode


@pytest.fixture(scope="module")
def front(workers: tuple[Server, Server]) -> Iterator[Server]:
    """The proxy before both, and a prefill worker that is not there."""
    prefill, decode = workers
    with proxy("--prefill", f"gone={NOBODY}", f"p={prefill.url}/v1", "--decode", f"d={decode.url}") as server:
        yield server


def answered(front: Server) -> dict[str, int]:
    health = front.health()
    return {worker["name"]: worker["answered"] for worker in health["prefill"] + health["decode"]}


def empty(*servers: Server) -> None:
    for server in servers:
        server.wait_empty()


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_text_is_one_servers(
    workers: tuple[Server, Server], front: Server, sampling: dict[str, Any]
) -> None:
    """Completions and chat, whole and streamed: the same text, finish and usage; prefill's token goes out.
    /health counts each of the four answers at both workers.
    """
    _, decode = workers
    before = answered(front)
    chat = {"messages": [{"role": "user", "content": "Where to?"}], "max_tokens": 9, **sampling}
    for path, body in (("/v1/completions", asked(14, **sampling)), ("/v1/chat/completions", chat)):
        alone = decode.complete(body, path)
        answer = front.post(body, path)
        assert answer.status_code == 200, answer.text
        assert text_of(answer.json()) == text_of(alone)
        assert answer.json()["usage"] == alone["usage"]
        assert answer.json()["choices"][0]["finish_reason"] == alone["choices"][0]["finish_reason"]
        assert answer.headers["x-kvferry-way"] == "handoff"
        assert answer.headers["x-kvferry-prefill"] == "p"
        assert answer.headers["x-kvferry-first-token"] == "prefill"
        events = front.stream(body | {"stream_options": {"include_usage": True}}, path)
        assert text_of_stream(events) == text_of(alone)
        assert events[-1]["usage"] == alone["usage"]
        assert len({event["id"] for event in events}) == 1
        if path.endswith("chat/completions"):
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert [("role" in delta) for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    after = answered(front)
    assert {name: after[name] - before[name] for name in after} == {"gone": 0, "p": 4, "d": 4}
    empty(*workers)


def test_unseeded_sampling_is_handed_over_whole(workers: tuple[Server, Server], front: Server) -> None:
    """Decode goes on with the seed that prefill drew: as many tokens, and no state is made up."""
    answer = front.complete(asked(12, temperature=1.3))
    assert answer["usage"]["completion_tokens"] == 12
    empty(*workers)


@pytest.mark.slow
def test_pushes_and_the_plain_way_write_the_same(workers: tuple[Server, Server]) -> None:
    """Decode reserves and prefill pushes; decode samples the first token where prefill may not give it."""
    prefill, decode = workers
    body = asked(10, **SEEDED)
    alone = text_of(decode.complete(body))
    ends = ("--prefill", prefill.url, "--decode", decode.url)
    with proxy(*ends, "--mode", "push", "--min-prompt-tokens", "8") as push:
        assert text_of(push.complete(body)) == alone
        assert text_of_stream(push.stream(body)) == alone
        named = push.post(body | {"return_token_ids": True})
        assert named.headers["x-kvferry-first-token"] == "decode; return_token_ids"
        assert text_of(named.json()) == alone
        for field, change in (
            ("shorter than --min-prompt-tokens", {"prompt": "abcd"}),
            ("one token is asked for", {"max_tokens": 1}),
        ):
            other = push.post(body | change)
            assert field in other.headers["x-kvferry-way"], other.headers
            assert text_of(other.json()) == text_of(decode.complete(body | change))
        first = decode.complete(body | {"return_token_ids": True})["choices"][0]["token_ids"][0]
        ending = push.post(body | {"stop_token_ids": [first]})
        assert ending.headers["x-kvferry-way"] == "ended with its first token"
        assert ending.json()["choices"][0]["finish_reason"] == "stop"
        assert text_of_stream(push.stream(body | {"stop_token_ids": [first]})) == text_of(ending.json())
        refused = push.post(body | {"temperature": -1})
        assert refused.status_code == 400
        assert "temperature" in refused.text  # the worker's own answer
        assert push.client.get("/v1/models").json()["data"][0]["id"] == "tiny-7"
    empty(*workers)


def test_a_client_that_leaves_frees_both_workers(workers: tuple[Server, Server], front: Server) -> None:
    """In the middle of a stream, and of an answer that is not streamed."""
    _, decode = workers
    with front.client.stream("POST", "/v1/completions", json=asked(8000, stream=True)) as answer:
        lines = answer.iter_lines()
        next(lines)
        wait_until(lambda: decode.health()["running"] == 1)
    empty(*workers)
    with pytest.raises(httpx.ReadTimeout):
        front.client.post("/v1/completions", json=asked(8000), timeout=0.7)
    empty(*workers)
    assert all(worker["requests"] == 0 for worker in front.health()["prefill"] + front.health()["decode"])


@pytest.mark.slow
def test_ctrl_c_in_the_middle_of_streams_ends_them_with_an_error(workers: tuple[Server, Server]) -> None:
    """A second one does not wait: client, proxy and server are told, in order; no traceback, exit 0."""
    prefill, _ = workers
    with Server(*KV) as decode, proxy("--prefill", prefill.url, "--decode", decode.url) as front:
        for server in (front, decode):
            with server.client.stream("POST", "/v1/completions", json=asked(9000, stream=True)) as answer:
                lines = (line for line in answer.iter_lines() if line)
                next(lines)
                server.signal()
                server.signal()
                *_, last = lines
            assert '"error"' in last
            if server is front:  # it is its own doing: no worker is named
                assert "the proxy was told to end" in last
                assert decode.url not in last
            assert server.wait() == 0
            assert "Traceback" not in server.said
    prefill.wait_empty()


@contextlib.contextmanager
def answering(answer: Callable[[str, bytes], tuple[int, bytes]]) -> Iterator[str]:
    """A stand-in for a worker: its URL. ``answer`` gives status and JSON for a path and a body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = answer(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # whoever asked has left
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def stub(
    answers: list[dict[str, Any]], delay_seconds: float = 0.0, model: str = ""
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A worker of another engine: its URL, and the bodies that it was sent. It gives the answers in turn.

    With ``model`` it says so where it is asked for that, which is none of those bodies; nor is a ticket that
    is given up, which comes beside all else.
    """
    asked_for: list[dict[str, Any]] = []
    ended = threading.Event()

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        if path not in {"/v1/completions", "/v1/chat/completions"}:
            return 404, b"{}"
        asked = json.loads(body)
        if model and asked.get("kv_transfer_params") == {"kvferry_model": "?"}:
            return 200, json.dumps({"kv_transfer_params": {"kvferry_model": model}}).encode()
        if "kvferry_withdraw" in (asked.get("kv_transfer_params") or {}):
            return 200, b"{}"
        asked_for.append(asked)
        content = json.dumps(answers[len(asked_for) - 1]).encode()
        ended.wait(delay_seconds)
        return 200, content

    with answering(answer) as url:
        try:
            yield url, asked_for
        finally:
            ended.set()


@pytest.mark.slow
def test_ctrl_c_before_a_worker_has_begun_to_answer_is_told() -> None:
    """What the worker has not begun to answer is broken off as well, whole or streamed."""
    ends = ("--prefill", NOBODY, "--min-prompt-tokens", "99")
    with (
        stub([{}] * 2, delay_seconds=60.0) as (url, asked_for),
        proxy(*ends, "--decode", url) as front,
        ThreadPoolExecutor(2) as threads,
    ):
        body = {"prompt": "abc", "max_tokens": 7}
        answers = [threads.submit(front.post, body | {"stream": stream}) for stream in (False, True)]
        wait_until(lambda: len(asked_for) == 2)
        front.signal()
        wait_until(lambda: not accepts(front.url))
        front.signal()
        for answer in answers:
            assert answer.result(30).status_code == 503
            assert "the proxy was told to end" in answer.result().json()["error"]["message"]
        assert front.wait() == 0


def accepts(url: str) -> bool:
    """Whether a new connection is taken: a server that was told to end takes none."""
    try:
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), 5.0):
            return True
    except OSError:
        return False


@pytest.mark.slow
def test_another_engine_is_asked_by_the_contract_and_no_more() -> None:
    """The keys of docs/proxy.md to prefill, prefill's object unchanged to decode, its token not given out;
    a prompt that prefill would not hand over is computed by decode, and the answer says why."""
    given = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvferry_ticket": "abc",
        "own": {"x": [1, None]},
    }
    refused = {"do_remote_prefill": False, "do_remote_decode": False, "kvferry_refused": "it uses a LoRA"}
    first = {"choices": [{"index": 0, "text": "A", "finish_reason": "length"}], "usage": {"prompt_tokens": 3}}
    whole = {"choices": [{"index": 0, "text": "Bcd", "finish_reason": "stop"}], "id": "x"}
    body = {"prompt": "abc", "max_tokens": 7, "min_tokens": 2, "guided_choice": ["a"], "stop": ["z"]}
    with (
        stub([first | {"kv_transfer_params": given}, first | {"kv_transfer_params": refused}, first]) as p,
        stub([whole] * 3) as d,
        proxy("--prefill", p[0], "--decode", d[0]) as front,
    ):
        said = [front.post(body) for _ in range(3)]
    assert [text_of(answer.json()) for answer in said] == ["Bcd"] * 3
    assert said[0].headers["x-kvferry-way"] == "handoff"
    assert (
        said[0].headers["x-kvferry-first-token"] == "decode; prefill does not hand over after its first token"
    )
    assert said[1].headers["x-kvferry-way"] == "alone; it uses a LoRA"
    assert said[2].headers["x-kvferry-way"] == "alone; prefill gave no ticket"
    params = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry_first_token": "emit"}
    assert p[1][0] == body | {"max_tokens": 1, "min_tokens": 1, "stream": False, "kv_transfer_params": params}
    assert d[1] == [body | {"kv_transfer_params": given}, body, body]


GO_ON = {"kvferry_continue": {"ids": [5, 6, 7, 9], "room_tokens": 90, "default_tokens": 90}}


@pytest.mark.parametrize(
    ("told", "model", "why"),
    [
        ({"kvferry_model": "ab"}, "ab", ""),
        ({"kvferry_model": "ab"}, "cd", "decode runs another model than prefill"),
        pytest.param(
            {"kvferry_model": "ab"}, "", "decode does not say which model it runs", marks=pytest.mark.slow
        ),
        pytest.param({}, "ab", "prefill does not say which model it runs", marks=pytest.mark.slow),
    ],
    ids=["the same", "another", "decode is silent", "prefill is silent"],
)
def test_prefills_token_goes_out_only_where_decode_says_that_it_runs_its_model(
    told: dict[str, str], model: str, why: str
) -> None:
    """Asked of decode itself; else decode computes the first token too, and no text is of two models."""
    ticket = {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_ticket": "abc"}
    choice = {"index": 0, "text": "A", "finish_reason": "length"}
    first = {"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": ticket | GO_ON | told}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    rest = {"choices": [choice | {"text": "Bc"}], "usage": usage}
    rest |= {"kv_transfer_params": {"kvferry_model": model}} if model else {}
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0, "model": "m"}
    with (
        stub([first] * 2) as p,
        # Without a word of its model its answer to that question is one of these.
        stub([rest] * (2 if model else 4), model=model) as d,
        proxy("--prefill", p[0], "--decode", d[0], "--retries", "0") as front,
    ):
        said = [front.post(body) for _ in range(2)]
    assert {text_of(answer.json()) for answer in said} == {"Bc" if why else "ABc"}
    first_from = f"decode; {why}" if why else "prefill"
    assert {answer.headers["x-kvferry-first-token"] for answer in said} == {first_from}
    assert why or all("kvferry_model" not in answer.text for answer in said)
    going_on = {"prompt": [5, 6, 7, 9], "max_tokens": 2} if not why else {}
    params = ticket if why else ticket | {"kvferry_model": "ab"}
    assert [asked for asked in d[1] if asked["kv_transfer_params"] == params] == [
        body | going_on | {"kv_transfer_params": params}
    ] * 2


@pytest.mark.slow
def test_decode_goes_on_after_prefills_token_where_prefill_says_how() -> None:
    """``kvferry_continue``: the ids as decode's prompt, one token less; the usage stays the client's. What
    prefill or the token's text forbids goes the plain way by name, with the same ticket."""
    ticket = {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_ticket": "abc"}
    how = GO_ON | {"kvferry_model": "ab"}
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}

    def prefilled(text: str, told: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        return {"choices": [choice], "usage": {"prompt_tokens": 3}, "kv_transfer_params": ticket | told}

    answers = [prefilled("A", how), prefilled("\ufffd", how), prefilled("A", {"kvferry_plain": "seed"})]
    rest = {"choices": [{"index": 0, "text": "Bc", "finish_reason": "length"}], "usage": usage}
    rest |= {"kv_transfer_params": {"kvferry_model": "ab"}}
    another = rest | {"kv_transfer_params": {"kvferry_model": "cd"}}
    body = {"prompt": "abc", "max_tokens": 3, "temperature": 0}
    with (
        stub([*answers, answers[0], answers[0]]) as p,
        stub([rest] * 3 + [rest | {"usage": None}, rest, another, rest], model="ab") as d,
        proxy("--prefill", p[0], "--decode", d[0], "--retries", "0") as front,
    ):
        said = [front.post(body) for _ in range(5)]
    assert [text_of(answer.json()) for answer in said] == ["ABc", "Bc", "Bc", "Bc", "Bc"]
    assert said[0].json()["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert [answer.headers["x-kvferry-first-token"] for answer in said[:3]] == [
        "prefill",
        "decode; prefill's token is no whole text",
        "decode; seed",
    ]
    # Decode that does not say how long its prompt was is not believed: it is asked again, from the prompt on.
    assert "read a prompt of None tokens" in said[3].headers["x-kvferry-way"]
    # Nor one that turns out to have another model than it said before.
    assert "went on with model cd" in said[4].headers["x-kvferry-way"]
    params = ticket | {"kvferry_model": "ab"}
    going_on = body | {"prompt": [5, 6, 7, 9], "max_tokens": 2, "kv_transfer_params": params}
    plain = body | {"kv_transfer_params": ticket}
    assert d[1] == [going_on, plain, plain, going_on, body, going_on, body]


def test_decode_is_asked_to_have_prefill_push() -> None:
    """One request to decode, with the URL of the worker that is to push; prefill is asked nothing."""
    whole = {"choices": [{"index": 0, "text": "Bcd", "finish_reason": "stop"}], "id": "x"}
    body = {"prompt": "abc", "max_tokens": 7}
    with (
        stub([]) as p,
        stub([whole]) as d,
        proxy("--prefill", f"p={p[0]}", "--decode", d[0], "--mode", "push-by-decode") as front,
    ):
        said = front.post(body)
    assert text_of(said.json()) == "Bcd"
    assert said.headers["x-kvferry-way"] == "decode asks prefill to push"
    assert said.headers["x-kvferry-prefill"] == "p"
    assert said.headers["x-kvferry-first-token"] == "decode; push-by-decode"
    params = {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_prefill_url": p[0]}
    assert d[1] == [body | {"kv_transfer_params": params}]
    assert p[1] == []


@pytest.mark.slow
def test_one_token_is_made_by_decode_where_prefill_is_gone() -> None:
    """As longer answers are; not with ``--fallback fail``."""
    whole = {"choices": [{"index": 0, "text": "B", "finish_reason": "length"}], "id": "x"}
    body = {"prompt": "abc", "max_tokens": 1}
    with stub([whole]) as (url, asked_for):
        with proxy("--prefill", NOBODY, "--decode", url) as front:
            said = front.post(body)
        with proxy("--prefill", NOBODY, "--decode", url, "--fallback", "fail") as strict:
            refused = strict.post(body)
    assert text_of(said.json()) == "B"
    assert said.headers["x-kvferry-way"].startswith("alone; one token is asked for; ")
    assert refused.status_code == 502
    assert asked_for == [body]


@pytest.mark.slow
def test_an_answer_that_is_not_streamed_may_be_silent_for_longer() -> None:
    """--silence-seconds is for streams; past --answer-seconds nobody is blamed and nothing asked again."""
    whole = {"choices": [{"index": 0, "text": "Bcd", "finish_reason": "stop"}], "id": "x"}
    body = {"prompt": "abc", "max_tokens": 7}
    ends = ("--prefill", NOBODY, "--min-prompt-tokens", "99", "--silence-seconds", "0.2")
    with stub([whole] * 2, delay_seconds=0.8) as (url, asked_for):
        with proxy(*ends, "--decode", url) as patient:
            assert text_of(patient.complete(body)) == "Bcd"
        with proxy(*ends, "--decode", url, "--answer-seconds", "0.3") as hasty:
            late = hasty.post(body)
            assert hasty.health()["decode"][0]["failed"] == 0
    assert late.status_code == 504
    assert "--answer-seconds" in late.json()["error"]["message"]
    assert len(asked_for) == 2


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.slow
def test_what_decode_refuses_is_a_400_before_a_token_is_out(mode: str) -> None:
    """Fields that prefill does not see, and a length that only decode's smaller pool cannot hold: for whole
    answers and streams decode's own 400 comes back, and prefill holds nothing (the lease has 10 minutes)."""
    long_lease = (*KV[:2], "--lease-seconds", "600", "--chunk-tokens", "64")
    small = Server(*long_lease, "--pool-tokens", "1024", "--name", "d")
    with Server(*long_lease, "--name", "p") as prefill, small as decode, contextlib.ExitStack() as stack:
        ends = ("--prefill", prefill.url, "--decode", decode.url)
        front = stack.enter_context(proxy(*ends, "--mode", mode))
        for change, says in (
            ({"max_tokens": -3}, "max_tokens"),
            ({"max_tokens": 2000}, "blocks of KV"),
            ({"min_tokens": 12}, "min_tokens"),
            ({"stream_options": {"colour": 1}}, "stream_options"),
        ):
            for stream in (False, True):
                answer = front.post(asked(8, stream=stream, **GREEDY) | change)
                assert answer.status_code == 400, (change, stream, answer.text)
                assert says in answer.json()["error"]["message"]
        empty(prefill, decode)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.slow
def test_what_decode_does_not_take_is_given_back(mode: str) -> None:
    """Decode refuses without a look at the ticket: no blocks wait for the lease, at neither worker."""
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(Server(*KV[:2], "--lease-seconds", "600", "--name", name)) for name in "pd"
        )
        url = stack.enter_context(refusing(decode))
        front = stack.enter_context(proxy("--prefill", prefill.url, "--decode", url, "--mode", mode))
        for is_stream in (False, True):
            answer = front.post(asked(8, stream=is_stream, **GREEDY))
            assert "not today" in answer.text
            assert answer.status_code == (200 if is_stream else 422)  # the first token was out
            empty(prefill, decode)


def refusing(target: Server) -> contextlib.AbstractContextManager[str]:
    """A decode worker's address that reserves, but takes no request, and has no check."""

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        params = json.loads(body).get("kv_transfer_params") or {}
        if not {"kvferry_reserve", "kvferry_withdraw"} & params.keys():
            return 404 if path.endswith("/check") else 422, b'{"error": {"message": "not today"}}'
        given = httpx.post(target.url + path, content=body, timeout=60)
        return given.status_code, given.content

    return answering(answer)


def relay(target: Server, before_answer: Callable[[], None]) -> contextlib.AbstractContextManager[str]:
    """A prefill worker's address whose answers come after ``before_answer()``: to let it die in between."""

    def answer(path: str, body: bytes) -> tuple[int, bytes]:
        given = httpx.post(target.url + path, content=body, timeout=60)
        before_answer()
        return given.status_code, given.content

    return answering(answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.slow
def test_a_prefill_worker_that_dies_with_the_ticket(workers: tuple[Server, Server], stream: bool) -> None:
    """Its answer is out, its KV is gone: another prefill worker, or decode alone, writes the same text."""
    prefill, decode = workers
    body = asked(10, **SEEDED)
    alone = text_of(decode.complete(body))
    with Server(*KV, "--name", "dying") as dying, relay(dying, dying.kill) as url:
        ends = ("--prefill", f"dying={url}", f"p={prefill.url}", "--decode", decode.url)
        with proxy(*ends, "--cooldown-seconds", "0") as front:
            text = text_of_stream(front.stream(body)) if stream else text_of(front.complete(body))
            assert text == alone
            counts = front.health()["counts"]
            assert counts["restarts" if stream else "retries"] == 1
    empty(*workers)


@pytest.mark.slow
def test_all_prefill_workers_gone_by_policy(workers: tuple[Server, Server]) -> None:
    """decode: it computes alone, and the answer says so; fail: 502 with the reason, nothing hangs."""
    _, decode = workers
    body = asked(8, **GREEDY)
    ends = ("--prefill", f"a={NOBODY}", "--decode", decode.url)
    with proxy(*ends) as falls, proxy(*ends, "--fallback", "fail") as fails:
        answer = falls.post(body)
        assert text_of(answer.json()) == text_of(decode.complete(body))
        assert answer.headers["x-kvferry-way"].startswith("alone; no handoff came about: a (")
        failed = fails.post(body)
        assert failed.status_code == 502
        assert "cannot be reached" in failed.json()["error"]["message"]
    decode.wait_empty()


@pytest.mark.slow
def test_workers_of_a_file_come_and_go_without_a_restart(
    workers: tuple[Server, Server], tmp_path: Path
) -> None:
    """Written anew, the list counts; one that makes no sense changes nothing, and /health says why."""
    prefill, decode = workers
    listed = tmp_path / "decode"

    def become(content: str) -> None:
        (tmp_path / "new").write_text(content)
        (tmp_path / "new").replace(listed)  # as whoever keeps such a file does: never half a list

    become(f"gone={NOBODY}\n")
    with proxy("--prefill", f"p={prefill.url}", "--decode", f"@{listed}", "--retries", "0") as front:
        assert front.post(asked(5)).status_code == 502
        become(f"# rack 2\nd={decode.url}\n")
        wait_until(lambda: [each["name"] for each in front.health()["decode"]] == ["d"])
        assert front.complete(asked(5, **GREEDY)) | {"id": "", "created": 0} == decode.complete(
            asked(5, **GREEDY)
        ) | {"id": "", "created": 0}
        become("d:80\n")
        wait_until(lambda: "decode: 'd:80'" in front.health()["problem"])
        become("# nobody\n")
        wait_until(lambda: "decode: give one URL or more" in front.health()["problem"])
        assert front.post(asked(5)).status_code == 200
        become(f"d={decode.url}\n")
        wait_until(lambda: front.health()["problem"] == "")
        assert front.said.count("as before, because of") == 2
    empty(*workers)


@pytest.mark.slow
def test_a_decode_worker_that_dies_in_the_middle(workers: tuple[Server, Server]) -> None:
    """A seeded stream goes on at another one, each character once; an unseeded one ends with an error."""
    prefill, decode = workers
    body = asked(600, **SEEDED, stream=True)
    alone = text_of(decode.complete(body | {"stream": False}))
    with Server(*KV, "--name", "dying") as dying, contextlib.ExitStack() as stack:
        # Of two that are alike a proxy takes the first; each stream has a proxy of its own.
        ends = ("--prefill", prefill.url, "--decode", f"dying={dying.url}", f"d={decode.url}")
        fronts = [stack.enter_context(proxy(*ends)) for _ in range(2)]
        streams = []
        for front, asking in zip(fronts, (body, body | {"seed": None}), strict=True):
            answer = stack.enter_context(front.client.stream("POST", "/v1/completions", json=asking))
            lines = (line for line in answer.iter_lines() if line)
            streams.append((lines, [next(lines) for _ in range(3)]))
        assert dying.health()["running"] == 2
        dying.kill()
        seeded, sampled = ([*head, *lines] for lines, head in streams)
        assert seeded[-1] == "data: [DONE]"
        assert text_of_stream([json.loads(line[6:]) for line in seeded[:-1]]) == alone
        assert fronts[0].health()["counts"]["restarts"] == 1
        assert '"error"' in sampled[-1]
        assert "dying" in sampled[-1]
    empty(*workers)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--prefill", "nowhere", "--decode", NOBODY),
        ("--prefill", "=http://a:1", "--decode", NOBODY),
        ("--prefill", NOBODY, NOBODY, "--decode", NOBODY),
        ("--prefill", NOBODY),
        ("--prefill", NOBODY, "--decode", NOBODY, "--links", "eth100"),
        ("--prefill", NOBODY, "--decode", NOBODY, "--links", "no-such", "--model", "shape:4x2x16"),
        ("--prefill", NOBODY, "--decode", NOBODY, "--ttft", "200ms"),
        ("--prefill", NOBODY, "--decode", NOBODY, "--retries", "99"),
        ("--prefill", NOBODY, "--decode", NOBODY, "--silence-seconds", "nan"),
        ("--prefill", NOBODY, "--decode", NOBODY, "--mode", "shout"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["proxy", "--listen", "127.0.0.1:0", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_bodies_that_are_none(front: Server) -> None:
    """400 by name, from the proxy itself."""
    for raw in (b"", b"[]", b"{}", b"\xff", b'{"prompt":"' + b"a" * (17 << 20) + b'"}'):
        assert front.client.post("/v1/completions", content=raw).status_code == 400


@pytest.mark.slow
def test_the_demo_serves_until_ctrl_c_and_leaves_nobody() -> None:
    """Prefill, decode and proxy by one command; the request of its curl line is answered; nobody is left."""
    with Server(
        "--serve", "--transport", "shm", "--tokens", "5", verb="demo", model=("--model", "tiny")
    ) as demo:
        children = psutil.Process(demo.pid).children(recursive=True)
        assert len(children) >= 3
        body = json.loads(shlex.split(demo.line["curl"])[-1])
        assert demo.line["curl"].startswith(f"curl -N {demo.url}/v1/chat/completions ")
        said = text_of_stream(demo.stream(body, "/v1/chat/completions"))
        with httpx.Client(base_url=demo.line["decode"]) as decode:
            alone = decode.post("/v1/chat/completions", json=body | {"stream": False}, timeout=60)
        assert said == text_of(alone.json())
        assert demo.client.get("/health").json()["counts"] == {"streams": 1}
        assert 'kvferry_proxy_events_total{event="streams"} 1.0' in demo.client.get("/metrics").text
        with httpx.Client(base_url=demo.line["prefill"], timeout=60) as prefill:
            text = prefill.get("/metrics").text
        assert 'mode="pull",outcome="ok",path="mapped",role="prefill",transport="shm"} 1.0' in text
        assert 'kvferry_server_requests{state="running"} 0.0' in text
        # A page that is open does not hold the end up.
        with (
            httpx.Client(timeout=60) as client,
            client.stream("GET", f"{demo.line['live'][1]}events") as page,
        ):
            view = json.loads(next(page.iter_lines()).removeprefix("data: "))
            (way,) = view["tallied"]["ways"]
            assert (view["name"], way["transport"], way["path"]) == ("server decode", "shm", "mapped")
            assert demo.interrupt() == 0
        assert demo.said == ""
        wait_until(lambda: not any(child.is_running() for child in children))
