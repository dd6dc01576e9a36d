"""First tokens with engines that know nothing of it: when it is exact, and what decode is asked then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvferry.engines.vllm.first_token import CONTINUE_KEY, PLAIN_KEY, FirstToken, first_token_of
from kvferry.engines.vllm.options import read_options
from kvferry.proxy import follow as proxy_side
from kvferry.proxy.body import Body
from kvferry.proxy.follow import Follow, MisreadError, read_follow
from vllm_kit import FakeRequest

IDS = [5, 6, 7]


class Sampling(msgspec.Struct):
    """Some of vLLM's ``SamplingParams``, and one that nobody here knows."""

    temperature: float = 1.0
    seed: int | None = None
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    extra_args: dict[str, Any] | None = None
    of_the_future: int = 3
    _derived: int = 0


def prefilled(sampled: int = 1, ended: str = "FINISHED_LENGTH_CAPPED", **sampling: Any) -> FakeRequest:
    request = FakeRequest("r", IDS).set_status(ended)
    request.output_token_ids, request.sampling_params = [9] * sampled, Sampling(**sampling)
    return request


def test_how_to_go_on_is_told_with_the_limits() -> None:
    told = FirstToken(100, None, "").told(prefilled(max_tokens=1))
    assert told == {CONTINUE_KEY: {"ids": [5, 6, 7, 9], "room_tokens": 97, "default_tokens": 97}}
    assert FirstToken(100, 40, "").told(prefilled())[CONTINUE_KEY]["default_tokens"] == 40
    assert (CONTINUE_KEY, PLAIN_KEY) == (proxy_side.CONTINUE_KEY, proxy_side.PLAIN_KEY)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, None),
        ({"temperature": 0.0, "seed": 3, "repetition_penalty": 1.2, "stop_token_ids": [4]}, None),
        ({"stop": [], "_derived": 9, "extra_args": {"kv_transfer_params": {}}}, None),
        ({"seed": 3}, "seed"),
        ({"seed": 0}, "seed"),
        ({"presence_penalty": -0.5}, "presence_penalty"),
        ({"stop": ["a"]}, "stop"),
        ({"logprobs": 0}, "logprobs"),
        ({"extra_args": {"kv_transfer_params": {}, "mine": 1}}, "extra_args"),
        ({"of_the_future": 4}, "of_the_future"),
        ({"of_the_future": 0}, "of_the_future"),
        ({"sampled": 2}, "prefill sampled 2 tokens"),
    ],
)
def test_only_what_is_known_to_be_exact_goes_on(fields: dict[str, Any], why: str | None) -> None:
    told = FirstToken(100, None, "").told(prefilled(**fields))
    assert told.get(PLAIN_KEY) == why
    assert (CONTINUE_KEY in told) is (why is None)


def test_a_server_whose_sampling_is_more_than_the_request_says_never_does() -> None:
    def config(**fields: Any) -> Any:
        model = {"logits_processors": None, "generation_config": "auto", "override_generation_config": {}}
        model |= {"max_model_len": 64, "get_diff_sampling_param": lambda: {"max_tokens": 20}}
        engine = {key: fields.pop(key) for key in list(fields) if key not in model}
        return SimpleNamespace(model_config=SimpleNamespace(**model | fields), **engine)

    for options in ({"same_model": True}, {"peers": ["shm://decode"]}):
        assert first_token_of(config(), read_options(options)) == FirstToken(64, 20, "")
    # Decode refuses a pair that does not fit when the token would be out already.
    assert "same_model" in first_token_of(config(), read_options({})).told(prefilled())[PLAIN_KEY]
    known = read_options({"same_model": True})
    reasoning = SimpleNamespace(reasoning_parser="r1")
    for fields, why in (
        ({"logits_processors": ["x"]}, "logits processors"),
        ({"generation_config": "/folder"}, "generation config"),
        ({"override_generation_config": {"max_new_tokens": 5}}, "generation config"),
        ({"watermark_config": object()}, "watermarks"),
        ({"structured_outputs_config": reasoning}, "reasoning"),
        ({"reasoning_config": reasoning}, "reasoning"),
    ):
        assert why in first_token_of(config(**fields), known).told(prefilled())[PLAIN_KEY]
    assert PLAIN_KEY in FirstToken().told(prefilled())


def test_a_first_token_that_ends_the_request_leaves_nothing_to_decode() -> None:
    does = FirstToken(100, None, "")
    assert does.is_whole(prefilled(ended="FINISHED_STOPPED"))
    assert not does.is_whole(prefilled())
    assert not does.is_whole(prefilled(ended="FINISHED_STOPPED", stop=["a"]))


OFFERED = {"ids": [5, 6, 7, 9], "room_tokens": 30, "default_tokens": 20}
KV = {"do_remote_prefill": True, "kvferry_ticket": "abc"}
NAMED = KV | {"kvferry_model": "m"}


def completion(**fields: Any) -> Body:
    return Body({"prompt": "abc", **fields}, is_chat=False)


def chat(**fields: Any) -> Body:
    return Body({"messages": [{"role": "user", "content": "abc"}], **fields}, is_chat=True)


def answered(body: Body, text: str = "A", ended: str = "length", **message: Any) -> dict[str, Any]:
    said = {"message": {"content": text, **message}} if body.is_chat else {"text": text}
    return {"choices": [{"index": 0, "finish_reason": ended, **said}]}


def going_on(body: Body) -> Follow:
    how = read_follow(OFFERED, body, answered(body))
    assert isinstance(how, Follow), how
    how.model = "m"
    return how


@pytest.mark.parametrize(
    ("body", "limit"),
    [
        (completion(), 15),
        (completion(max_tokens=8), 7),
        (completion(max_tokens=30), 29),
        (chat(), 19),
        (chat(max_tokens=8, max_completion_tokens=5), 4),
    ],
    ids=["completions-default", "given", "all-the-room", "chat-default", "newer-name"],
)
def test_decode_is_asked_for_one_token_less(body: Body, limit: int) -> None:
    asked = going_on(body).body(body.for_decode(KV))
    assert asked["max_tokens"] == limit
    assert "max_completion_tokens" not in asked
    if body.is_chat:
        assert asked["kv_transfer_params"] == NAMED | {"prompt_token_ids": [5, 6, 7, 9]}
        assert asked["messages"] == body.fields["messages"]
    else:
        assert asked["kv_transfer_params"] == NAMED
        assert asked["prompt"] == [5, 6, 7, 9]
    assert "stream_options" not in asked


def test_min_tokens_and_the_usage_of_streams() -> None:
    body = completion(max_tokens=8, min_tokens=3, stream=True, stream_options={"include_usage": True})
    asked = going_on(body).body(body.for_decode(KV))
    assert asked["min_tokens"] == 2
    assert asked["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert going_on(completion(min_tokens=0)).body(completion(min_tokens=0).for_decode(KV))["min_tokens"] == 0


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("body", "answer", "why"),
    [
        (completion(max_tokens=31), {}, "its length is decode's to judge"),
        (completion(max_tokens=4, min_tokens=5), {}, "its length is decode's to judge"),
        (completion(max_tokens=1), {}, "one token fits"),
        (completion(max_tokens="5"), {}, "max_tokens is no whole number"),
        (chat(max_tokens=9, max_completion_tokens=5.0), {}, "max_completion_tokens is no whole number"),
        (completion(min_tokens="2"), {}, "min_tokens is no whole number"),
        (completion(truncate_prompt_tokens=2), {}, "truncate_prompt_tokens"),
        (completion(stream_options={"continuous_usage_stats": True}), {}, "stream_options besides"),
        (completion(stream_options=3), {}, "stream_options besides"),
        (completion(), {"text": ""}, "no whole text"),
        (completion(), {"text": "\N{REPLACEMENT CHARACTER}"}, "no whole text"),
        (completion(), {"ended": "stop"}, "did not end after one token"),
        (chat(), {"reasoning": "hm"}, "prefill's message has reasoning"),
        (chat(messages=IMAGE), {}, "not all text"),
        (chat(messages="abc"), {}, "not all text"),
    ],
)
def test_what_the_proxy_cannot_go_on_with_is_named(body: Body, answer: dict[str, Any], why: str) -> None:
    how = read_follow(OFFERED, body, answered(body, **answer))
    assert isinstance(how, str)
    assert why in how


@pytest.mark.parametrize("offered", [None, 3, {}, OFFERED | {"ids": ["a"]}, OFFERED | {"room_tokens": "x"}])
def test_an_offer_that_is_not_understood_is_named(offered: Any) -> None:
    assert "is not understood" in str(read_follow(offered, completion(), answered(completion())))


def test_the_usage_is_the_clients() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 7, "total_tokens": 11}
    answer = {"choices": [{"text": "b"}], "kv_transfer_params": {"kvferry_model": "m"}}
    whole = going_on(completion()).whole({**answer, "usage": dict(usage)})
    assert "kv_transfer_params" not in whole
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    for wanted in (True, False):
        how = going_on(completion(stream=True, stream_options={"include_usage": wanted}))
        assert how.event({"choices": [{"text": "b"}], "usage": dict(usage)}) == {"choices": [{"text": "b"}]}
        last = how.event({"choices": [], "usage": dict(usage)})
        assert last == ({"choices": [], "usage": whole["usage"]} if wanted else None)


@pytest.mark.parametrize(
    "told", [{}, {"kv_transfer_params": None}, {"kv_transfer_params": {"kvferry_model": "n"}}]
)
def test_a_whole_answer_of_another_model_gives_no_token(told: dict[str, Any]) -> None:
    """Nor one that does not say of which it is: that server did not look at the request's word."""
    answer = {"choices": [{"text": "b"}], "usage": {"prompt_tokens": 4, "completion_tokens": 1}} | told
    with pytest.raises(MisreadError, match="where prefill's is m"):
        going_on(completion()).whole(answer)


@pytest.mark.parametrize(
    "usage", [{}, {"usage": None}, {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}]
)
def test_a_decode_that_read_another_prompt_gives_no_token(usage: dict[str, Any]) -> None:
    """One that does not know ``prompt_token_ids`` would write the first token once more."""
    event = {"choices": [{"text": "b"}]} | usage
    with pytest.raises(MisreadError, match="to go on after 4"):
        going_on(chat()).event(dict(event))
    with pytest.raises(MisreadError, match="to go on after 4"):
        going_on(chat()).whole(dict(event))
