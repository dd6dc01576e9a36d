"""Real vLLM behind HTTP: a prefill and a decode server, and ``kvferry proxy`` before them.

Needs vLLM (``make test-vllm`` makes a venv for it); skipped with the reason where it is missing.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
    extra = {"pull_timeout_seconds": 12, "push_timeout_seconds": 20, "same_model": True}
    prefill = Server(model, logs / "prefill", CONNECTOR | {"kv_connector_extra_config": extra}, 0)
    extra |= {"prefill_urls": [prefill.url]}
    config = CONNECTOR | {"kv_connector_extra_config": extra}
    decode = Server(model, logs / "decode", config, 1, block_size=64)  # prefill has 32
    pair = (prefill, decode)
    try:
        for server in pair:
            server.wait()
        yield pair[0], pair[1]
    finally:
        for server in pair:
            server.kill()


@pytest.fixture(scope="module")
def proxies(
    servers: tuple[Server, Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """The URL of a proxy before the two, by its mode."""
    logs = tmp_path_factory.mktemp("proxy")
    running: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}

    def by_mode(mode: str) -> str:
        if mode not in running:
            address = f"127.0.0.1:{free_port()}"
            with (logs / mode).open("w") as log:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "kvferry", "proxy", "--listen", address, "--mode", mode),
                        *("--prefill", servers[0].url, "--decode", servers[1].url, "--fallback", "fail"),
                    ],
                    stdout=log,
                    stderr=log,
                )
            running[mode] = f"http://{address}", process
            wait_until(lambda: is_up(running[mode][0]), 60.0)
        return running[mode][0]

    try:
        yield by_mode
    finally:
        for _, process in running.values():
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def proxy(proxies: Callable[[str], str]) -> str:
    """The URL of one whose decode pulls."""
    return proxies("pull")


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


READABLE = {
    "allowed_token_ids": list(range(36, 97))
}  # one letter or digit each, so that texts can be compared


def readable(number: int, tokens: int) -> list[int]:
    """A prompt that does not end within a character, so that the first token is a whole one."""
    return [*prompt(number, tokens - 1), 70]


def said(
    url: str, body: dict[str, Any], path: str, *, is_streamed: bool, first: str = ""
) -> tuple[str, str, Any]:
    """Text, finish reason and usage of an answer, whole or streamed; ``first``: what gave the first token."""
    if not is_streamed:
        answer = post(url + path, body)
        assert "choices" in answer, answer
        assert not first or answer["headers"]["x-kvferry-first-token"] == first
        (choice,) = answer["choices"]
        usage, ended = answer["usage"], choice["finish_reason"]
        text = choice["message"]["content"] if "chat" in path else choice["text"]
    else:
        events = list(stream(url + path, body | {"stream_options": {"include_usage": True}}))
        choices = [choice for event in events for choice in event["choices"]]
        text = "".join(
            (choice["delta"].get("content") or "") if "chat" in path else choice["text"] for choice in choices
        )
        usage, ended = events[-1]["usage"], choices[-1]["finish_reason"]
        assert [event.get("usage") for event in events[:-1]] == [None] * (len(events) - 1)
    return text, ended, {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0, "max_tokens": 20},
        {"temperature": 0, "max_tokens": 20, "seed": 5, "repetition_penalty": 1.4, "logit_bias": {"70": 3}},
        {"temperature": 0, "max_tokens": 20, "min_tokens": 7, "stop_token_ids": list(range(40, 80))},
        {"temperature": 0, "max_tokens": 2},
        {"temperature": 0},
    ],
    ids=["greedy", "repetition-penalty", "min-tokens-and-stop-ids", "two-tokens", "no-limit"],
)
def test_prefills_token_goes_out_at_once_and_decode_goes_on_after_it(
    servers: tuple[Server, Server], proxy: str, sampling: dict[str, Any]
) -> None:
    """Completions and chat, whole and streamed: text, finish and usage are one server's."""
    common = {"model": "m", "ignore_eos": True, **READABLE, **sampling}
    chat = [{"role": "user", "content": "The tide goes out, and the ferry waits for it."}]
    cases = [
        ("/v1/completions", {"prompt": readable(number, size)}) for number, size in ((400, 33), (401, 900))
    ]
    cases += [
        ("/v1/completions", {"prompt": "Where does the ferry go when the tide is out?"}),
        ("/v1/chat/completions", {"messages": chat}),
    ]
    before = servers[1].metric("vllm:kvferry_handoff_seconds_count")
    for number, (path, fields) in enumerate(cases):
        body = common | fields
        alone = said(servers[1].url, body | {"cache_salt": "alone"}, path, is_streamed=False)
        for is_streamed in (False, True):
            salted = body | {
                "cache_salt": f"{number} {is_streamed} {list(sampling)} {sampling.get('max_tokens')}"
            }
            assert said(proxy, salted, path, is_streamed=is_streamed, first="prefill") == alone
    wait_until(lambda: servers[1].metric("vllm:kvferry_handoff_seconds_count") == before + 2 * len(cases))
    answer = post(f"{proxy}/v1/completions", common | {"prompt": readable(402, 70)})
    assert "kv_transfer_params" not in {key for key, value in answer.items() if value is not None}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"temperature": 0.9, "seed": 42}, "seed"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"stop": ["zq"]}, "stop"),
        ({"bad_words": ["tide"]}, "bad_words"),
        ({"truncate_prompt_tokens": 40}, "truncate_prompt_tokens"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ({"logprobs": 1}, "logprobs"),
        ({"repetition_detection": {"max_pattern_size": 4, "min_count": 3}}, "repetition_detection"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_counts_the_output_goes_the_plain_way_by_name(
    servers: tuple[Server, Server], proxy: str, change: dict[str, Any], why: str
) -> None:
    body = {"model": "m", "prompt": readable(410, 60), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    body |= READABLE | change
    answer = post(f"{proxy}/v1/completions", body | {"cache_salt": f"plain {why}"})
    assert "choices" in answer, answer
    assert answer["headers"]["x-kvferry-first-token"] == f"decode; {why}"
    alone = post(f"{servers[1].url}/v1/completions", body | {"cache_salt": "alone"})
    assert answer["choices"][0]["text"] == alone["choices"][0]["text"]


def test_unseeded_sampling_and_a_first_token_that_ends_it(servers: tuple[Server, Server], proxy: str) -> None:
    body = {"model": "m", "prompt": readable(420, 60), "max_tokens": 9, "ignore_eos": True, **READABLE}
    answer = post(f"{proxy}/v1/completions", body | {"temperature": 1.0, "cache_salt": "unseeded"})
    assert answer["headers"]["x-kvferry-first-token"] == "prefill"
    assert answer["usage"]["completion_tokens"] == len(answer["choices"][0]["text"]) == 9
    body |= {"temperature": 0, "stop_token_ids": READABLE["allowed_token_ids"]}
    ended = post(f"{proxy}/v1/completions", body | {"cache_salt": "ended"})
    assert ended["headers"]["x-kvferry-way"] == "ended with its first token"
    alone = post(f"{servers[1].url}/v1/completions", body | {"cache_salt": "alone"})
    assert ended["choices"][0]["text"] == alone["choices"][0]["text"]
    # More tokens than the model has room for: decode judges it, as one server does.
    body |= {"max_tokens": 1000, "stop_token_ids": []}
    long = post(f"{proxy}/v1/completions", body | {"cache_salt": "long"})
    alone = post(f"{servers[1].url}/v1/completions", body | {"cache_salt": "alone"})
    assert long["headers"]["x-kvferry-first-token"] == "decode; its length is decode's to judge"
    assert long["usage"]["completion_tokens"] == alone["usage"]["completion_tokens"]
    assert long["choices"][0]["text"] == alone["choices"][0]["text"]


def test_both_say_which_model_they_run(servers: tuple[Server, Server]) -> None:
    """Asked as the proxy asks decode; the two have the same one, in blocks of other sizes."""
    asked = {"model": "m", "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kvferry_model": "?"}}
    told = [post(f"{server.url}/v1/completions", asked)["kv_transfer_params"] for server in servers]
    assert told[0] == told[1]
    assert len(told[0]["kvferry_model"]) == 64


def test_what_decodes_own_server_refuses_is_logged_as_that(servers: tuple[Server, Server]) -> None:
    params = servers[0].prefill(prompt(430, 60))
    refused = servers[1].complete(prompt(430, 60), temperature=-1, kv_transfer_params=params)
    assert refused["status"] == 400
    wait_until(lambda: "this server's answer to it was an error" in servers[1].log.read_text(), 20.0)
    assert "one token" not in servers[1].log.read_text()


def test_nothing_is_written_behind_a_token_of_another_model(servers: tuple[Server, Server]) -> None:
    """A request that names another model than decode's stays until its caller leaves; others go on beside."""
    prefill, decode = servers
    own = {"model": "m", "prompt": [0], "max_tokens": 1, "kv_transfer_params": {"kvferry_model": "?"}}
    model = post(f"{decode.url}/v1/completions", own)["kv_transfer_params"]["kvferry_model"]
    asked = prompt(94, 80)
    for _ in range(2):  # the second time decode has all of the prompt itself
        params = prefill.prefill(asked) | {"kvferry_model": "0" * 64}
        with pytest.raises(TimeoutError):
            post(f"{decode.url}/v1/completions", body_of(asked, kv_transfer_params=params), timeout=2.0)
        answer = decode.complete(asked, kv_transfer_params=params | {"kvferry_model": model})
        assert answer["kv_transfer_params"] == {"kvferry_model": model}
        assert ids(answer) == ids(prefill.complete(asked))
    assert decode.log.read_text().count("a token of another model") == 2


def test_a_ticket_that_its_caller_gives_up_is_freed_at_prefill(
    servers: tuple[Server, Server], proxy: str
) -> None:
    """By a completion's parameters; and by the proxy where decode's own server refuses the request."""
    prefill, _ = servers
    ticket = prefill.prefill(prompt(96, 80))["kvferry_ticket"]
    prefill.complete([0], max_tokens=1, kv_transfer_params={"kvferry_withdraw": ticket})
    wait_until(lambda: prefill.log.read_text().count("its caller gave it up") == 1, 20.0)
    # Prefill has no look at a limit that is decode's.
    refused = post(f"{proxy}/v1/completions", body_of(prompt(95, 80), max_tokens=100_000))
    assert refused["status"] == 400, refused
    wait_until(lambda: prefill.log.read_text().count("its caller gave it up") == 2, 20.0)


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


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_push_through_the_proxy_gives_the_same_text(
    servers: tuple[Server, Server], proxies: Callable[[str], str], is_streamed: bool
) -> None:
    """The proxy asks decode, which has prefill push; the block sizes are 32 and 64."""
    front = proxies("push-by-decode")
    before = servers[1].metric("vllm:kvferry_handoff_seconds_count")
    sizes = (2, 33, 100, 900)
    for number, tokens in enumerate(sizes, 500):
        body = {"model": "m", "prompt": prompt(number, tokens), "max_tokens": 24, "temperature": 0}
        body |= READABLE | {"ignore_eos": True}
        alone = said(servers[1].url, body | {"cache_salt": "alone"}, "/v1/completions", is_streamed=False)
        body["cache_salt"] = f"push{is_streamed}"
        assert said(front, body, "/v1/completions", is_streamed=is_streamed) == alone
    wait_until(lambda: servers[1].metric("vllm:kvferry_handoff_seconds_count") == before + len(sizes))
    answer = post(f"{front}/v1/completions", body_of(prompt(510, 40), cache_salt="push"))
    assert answer["headers"]["x-kvferry-way"] == "decode asks prefill to push"
    assert ids(answer) == ids(servers[1].complete(prompt(510, 40), cache_salt="alone"))


def test_only_allowed_servers_are_asked_to_push(servers: tuple[Server, Server]) -> None:
    """Decode computes alone, and says why in its log; it opens no connection that a client names."""
    given = prompt(300, 50)
    elsewhere = {"do_remote_prefill": True, "kvferry_prefill_url": "http://127.0.0.1:1"}
    answer = servers[1].complete(given, kv_transfer_params=elsewhere, cache_salt="elsewhere")
    assert ids(answer) == ids(servers[1].complete(given, cache_salt="alone"))
    assert "prefill_urls" in servers[1].log.read_text()


def test_vllms_own_router_before_them_is_served_as_well(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    """It speaks the convention of vLLM's NIXL connector, and hands on keys that it does not know."""
    program = Path(sys.executable).parent / "vllm-router"
    if not program.exists():
        pytest.skip("vllm-router is not installed; the extra vllm-test has it")
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
    ends = ("--prefill", servers[0].url, "--decode", servers[1].url)
    with (tmp_path / "log").open("w") as log:
        router = subprocess.Popen(
            [str(program), "--vllm-pd-disaggregation", "--kv-connector", "nixl", *ends, *where],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: is_up(url), 60.0)
        before = servers[1].metric("vllm:kvferry_handoff_seconds_count")
        for number, tokens in enumerate((2, 100, 900), 600):
            given = prompt(number, tokens)
            answer = post(f"{url}/v1/completions", body_of(given, cache_salt="router"))
            assert ids(answer) == ids(servers[1].complete(given, cache_salt="alone"))
        wait_until(lambda: servers[1].metric("vllm:kvferry_handoff_seconds_count") == before + 3)
    finally:
        router.terminate()
        router.wait(20)


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
