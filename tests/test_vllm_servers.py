"""Real vLLM behind HTTP: a prefill and a decode server, and ``kvferry proxy`` before them.

Needs vLLM (``make test-vllm`` makes a venv for it); skipped with the reason where it is missing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from conftest import wait_until
from vllm_server import Server, body_of, free_port, post, stream

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm runs these")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
CONNECTOR = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}  # found as a plugin of vLLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(HERE / "vllm_model.py"), str(folder)], check=True, timeout=400)
    return folder


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    logs = tmp_path_factory.mktemp("logs")
    extra = {"pull_timeout_seconds": 12, "push_timeout_seconds": 20}
    prefill = Server(model, logs / "prefill", CONNECTOR | {"kv_connector_extra_config": extra}, 0)
    extra |= {"prefill_urls": [prefill.url]}
    decode = Server(model, logs / "decode", CONNECTOR | {"kv_connector_extra_config": extra}, 1)
    pair = (prefill, decode)
    try:
        for server in pair:
            server.wait()
        yield pair[0], pair[1]
    finally:
        for server in pair:
            server.kill()


@pytest.fixture(scope="module")
def proxy(servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a proxy before the two."""
    address = f"127.0.0.1:{free_port()}"
    with (tmp_path_factory.mktemp("proxy") / "log").open("w") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "kvferry", "proxy", "--listen", address),
                *("--prefill", servers[0].url, "--decode", servers[1].url, "--fallback", "fail"),
            ],
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: is_up(f"http://{address}"), 60.0)
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(20)


def is_up(url: str) -> bool:
    try:
        return "status" not in post(f"{url}/v1/completions", body_of([5, 6, 7], max_tokens=1))
    except OSError:
        return False


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * at + 13 * number + at * at % 11) % 250 + 5 for at in range(tokens)]


def ids(answer: dict[str, Any]) -> list[int]:
    assert "choices" in answer, answer
    return list(answer["choices"][0]["token_ids"])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.9, "seed": 42},
        {"temperature": 0.8, "seed": 7, "top_p": 0.9, "frequency_penalty": 0.5},
    ],
    ids=["greedy", "seed", "seed-top-p-penalty"],
)
def test_the_proxy_answers_as_one_server_does(
    servers: tuple[Server, Server], proxy: str, sampling: dict[str, Any]
) -> None:
    before = servers[1].metric("vllm:kvferry_handoff_seconds_count")
    for number, tokens in enumerate((2, 33, 100, 900)):
        given = prompt(number, tokens)
        answer = post(f"{proxy}/v1/completions", body_of(given, cache_salt=f"s{sampling}", **sampling))
        alone = servers[1].complete(given, cache_salt="alone", **sampling)
        assert ids(answer) == ids(alone)
        assert answer["headers"]["x-kvferry-way"] == "handoff", answer["headers"]
    wait_until(lambda: servers[1].metric("vllm:kvferry_handoff_seconds_count") == before + 4)


def test_a_streamed_chat_is_the_same(servers: tuple[Server, Server], proxy: str) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "The tide goes out, and the ferry waits for it."}],
        "temperature": 0,
        "max_tokens": 20,
        "ignore_eos": True,
    }
    alone = post(f"{servers[1].url}/v1/chat/completions", body | {"cache_salt": "alone"})
    text = ""
    for event in stream(f"{proxy}/v1/chat/completions", body | {"cache_salt": "pair"}):
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
    assert text == alone["choices"][0]["message"]["content"]


def test_64_requests_at_once_all_have_their_own_answer(servers: tuple[Server, Server], proxy: str) -> None:
    prompts = [prompt(number, 40 + 7 * number) for number in range(64)]
    with ThreadPoolExecutor(64) as pool:
        answers = list(
            pool.map(lambda p: post(f"{proxy}/v1/completions", body_of(p, cache_salt="pair")), prompts)
        )
        alone = list(pool.map(lambda p: servers[0].complete(p, cache_salt="alone"), prompts))
    assert [ids(answer) for answer in answers] == [ids(answer) for answer in alone]
    for server in servers:
        wait_until(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0, 30.0)
        assert server.metric("vllm:kvferry_failed_total") == 0


def pushed(prefill: Server) -> dict[str, Any]:
    """What a client or router sends decode, which asks prefill to push."""
    return {"do_remote_prefill": True, "do_remote_decode": False, "kvferry_prefill_url": prefill.url}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 42}], ids=["greedy", "seed"])
def test_a_push_gives_the_same_tokens(servers: tuple[Server, Server], sampling: dict[str, Any]) -> None:
    prefill, decode = servers
    for number, tokens in enumerate((2, 33, 100, 900), 200):
        given = prompt(number, tokens)
        before = decode.metric("vllm:kvferry_handoff_seconds_count")
        answer = decode.complete(
            given, kv_transfer_params=pushed(prefill), cache_salt=f"push{sampling}", **sampling
        )
        assert ids(answer) == ids(decode.complete(given, cache_salt=f"alone{sampling}", **sampling))
        wait_until(lambda n=before: decode.metric("vllm:kvferry_handoff_seconds_count") == n + 1)
    prompts = [prompt(number, 30 + 9 * number) for number in range(24)]
    with ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(
                lambda p: decode.complete(p, kv_transfer_params=pushed(prefill), cache_salt="many"), prompts
            )
        )
        alone = list(pool.map(lambda p: prefill.complete(p, cache_salt="alone"), prompts))
    assert [ids(answer) for answer in answers] == [ids(answer) for answer in alone]
    for server in servers:
        wait_until(lambda server=server: server.metric("vllm:kv_cache_usage_perc") == 0, 30.0)


def test_only_allowed_servers_are_asked_to_push(servers: tuple[Server, Server]) -> None:
    """Decode computes alone, and says why in its log; it opens no connection that a client names."""
    given = prompt(300, 50)
    elsewhere = {"do_remote_prefill": True, "kvferry_prefill_url": "http://127.0.0.1:1"}
    answer = servers[1].complete(given, kv_transfer_params=elsewhere, cache_salt="elsewhere")
    assert ids(answer) == ids(servers[1].complete(given, cache_salt="alone"))
    assert "prefill_urls" in servers[1].log.read_text()


def test_idle_servers_leave_the_processor_alone(servers: tuple[Server, Server]) -> None:
    """Processor time of all threads but torch's gloo loops, which a plain vLLM keeps turning too.

    The better of two windows: what earlier tests left to be cleaned up is not idling.
    """
    for server in servers:
        used = [busiest(server, 5.0) for _ in range(2)]
        assert min(sum(threads.values()) for threads in used) / 5.0 < 0.02, used


def busiest(server: Server, seconds: float) -> dict[str, float]:
    """Processor seconds that each thread used while nothing was asked of a server."""
    before = server.thread_seconds()
    time.sleep(seconds)
    used = {name: now - before.get(name, now) for name, now in server.thread_seconds().items()}
    return {name: spent for name, spent in used.items() if spent > 0 and "gloo" not in name}


def test_prefill_that_freezes_or_dies_costs_no_wrong_token(servers: tuple[Server, Server]) -> None:
    """Frozen and back; then dead before, during and after a handoff. The last test of these servers."""
    prefill, decode = servers
    prompts = [prompt(number, 200) for number in range(100, 106)]
    alone = [ids(decode.complete(given, cache_salt="alone")) for given in prompts]

    def hand_over(number: int, kv: Any, **fields: Any) -> dict[str, Any]:
        return decode.complete(prompts[number], kv_transfer_params=kv, **fields)

    tickets = [prefill.prefill(given) for given in prompts]
    assert ids(hand_over(0, tickets[0])) == alone[0]
    prefill.signal(signal.SIGSTOP)
    try:
        frozen = hand_over(1, tickets[1])
        assert frozen["status"] == 500
        assert ids(decode.complete(prompts[1], cache_salt="other")) == alone[1]
    finally:
        prefill.signal(signal.SIGCONT)
    wait_until(lambda: ids_or_none(hand_over(2, prefill.prefill(prompts[2]))) == alone[2], 30.0)

    tickets[3:] = [prefill.prefill(given) for given in prompts[3:]]
    events = stream(
        f"{decode.url}/v1/completions", body_of(prompts[3], max_tokens=400, kv_transfer_params=tickets[3])
    )
    tokens = list(next(events)["choices"][0]["token_ids"])  # after: the handoff is over, decode runs
    prefill.signal(signal.SIGSTOP)
    during: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: during.append(hand_over(4, tickets[4])))
    thread.start()
    wait_until(lambda: decode.metric("vllm:num_requests_waiting") >= 1, 10.0)
    prefill.kill()
    for event in events:
        tokens += event["choices"][0]["token_ids"]
    assert tokens[:24] == alone[3]
    assert len(tokens) == 400
    thread.join(30)
    assert during[0]["status"] == 500
    assert hand_over(5, tickets[5])["status"] == 500
    assert hand_over(5, pushed(prefill), cache_salt="push")["status"] == 500
    assert ids(decode.complete(prompts[5], cache_salt="other")) == alone[5]
    wait_until(lambda: decode.metric("vllm:kv_cache_usage_perc") == 0, 30.0)
    assert "Traceback" not in decode.log.read_text()


def ids_or_none(answer: dict[str, Any]) -> list[int] | None:
    return list(answer["choices"][0]["token_ids"]) if "choices" in answer else None
