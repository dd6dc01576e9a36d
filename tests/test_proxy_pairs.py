"""Which pair the proxy takes, and which prompts it hands over: pure, against measured links."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import InputError
from kvferry.model import load_shape
from kvferry.plan import PrefillLaw
from kvferry.proxy.body import Body, read_body
from kvferry.proxy.options import Place, ProxyOptions, check_options, read_place, shown_name
from kvferry.proxy.pays import Costs
from kvferry.proxy.rewrite import DivergedError, Writer
from kvferry.proxy.workers import Workers
from plan_kit import link, link_file, profile

NEAR, FAR = 10e9, 0.5e9  # bytes a second
LAW = PrefillLaw(2e-3, 1e-4, 0.0)


def options(**changes: object) -> ProxyOptions:
    """Two prefill and two decode workers; the model has 131,072 bytes a token."""
    given = ProxyOptions(
        prefill=(Place("a", "http://a:1"), Place("b", "http://b:1")),
        decode=(Place("x", "http://x:1"), Place("y", "http://y:1")),
        shape=load_shape("shape:32x8x128"),
        links="links.json",
        profile=profile(prefill=LAW),
    )
    return check_options(msgspec.structs.replace(given, **changes))


def costs(given: ProxyOptions) -> Costs:
    """Crossed ways are far: a is near x, b is near y."""
    pairs = [
        link(1e-3, 0.0, FAR if giver + taker in {"ay", "bx"} else NEAR, names=(giver, taker))
        for giver in "ab"
        for taker in "xy"
    ]
    return Costs(given, link_file(*pairs))


def test_the_near_pair_is_taken_and_load_outweighs_it() -> None:
    """With b busy the prompt goes a -> x; with x very busy it crosses; failed workers are left out."""
    given = options()
    workers = Workers(given, costs(given))
    a, b = workers.prefill
    x, y = workers.decode
    with b.busy(1000):
        pair = workers.pair(4096)
        assert pair is not None
        assert (pair.prefill, pair.decode) == (a, x)
        x.requests += 2000
        crossed = workers.pair(4096)
        assert crossed is not None
        assert crossed.decode is y
        x.requests -= 2000
        workers.failed(a)
        other = workers.pair(4096)
        assert other is not None
        assert (other.prefill, other.decode) == (b, y)
    assert workers.pair(4096, [a, b]) is None
    assert (b.requests, b.tokens) == (0, 0)


def test_a_prompt_is_handed_over_only_where_the_move_is_shorter_than_the_prefill() -> None:
    """131,072 bytes a token take 262 us at 0.5 GB/s and 13 us at 10, the prefill 100 us."""
    given = options()
    found = costs(given)
    a, b = given.prefill
    x, _ = given.decode
    assert found.why_not(b, x, 4096) == "the move takes longer than the prefill"
    assert found.threshold(b, x) is None
    assert found.threshold(a, x) is not None
    assert found.why_not(a, x, 4096) is None
    slow_start = options(profile=profile(prefill=PrefillLaw(1e-6, 1e-4, 0.0)))
    border = costs(slow_start).threshold(a, x)
    assert border is not None
    assert border > 1
    assert costs(slow_start).why_not(a, x, border - 1) is not None
    assert costs(options(min_prompt_tokens=100)).threshold(a, x) == 100


def test_a_promise_that_only_the_move_breaks_keeps_the_prompt_at_decode() -> None:
    """As ``check`` says: it holds without the move, and does not with it."""
    prefill_seconds = LAW.seconds(4096)
    tight = options(target_seconds=prefill_seconds + 0.03, first_token="decode")
    a, x = tight.prefill[0], tight.decode[0]
    assert costs(tight).why_not(a, x, 4096) == "the TTFT would hold without the move only"
    assert costs(options(target_seconds=10.0, first_token="decode")).why_not(a, x, 4096) is None
    hopeless = options(target_seconds=prefill_seconds / 2, first_token="decode")
    assert costs(hopeless).why_not(a, x, 4096) is None  # broken either way: then it interferes with nobody


def test_a_pair_that_the_links_do_not_have_is_named() -> None:
    given = options(decode=(Place("x", "http://x:1"), Place("z", "http://z:1")))
    with pytest.raises(InputError, match="link: 0 pairs fit"):
        costs(given)


def test_workers_of_one_name_are_shown_with_their_url() -> None:
    """Two workers of a node share its name, as link files know the node; what is shown tells them apart."""
    places = [read_place(text, "prefill") for text in ("n=http://h:1", "n=http://h:2", "m=http://h:3")]
    assert [shown_name(place, places) for place in places] == ["n (http://h:1)", "n (http://h:2)", "m"]


def test_places() -> None:
    assert read_place("n1=http://h:8000/v1/", "prefill") == Place("n1", "http://h:8000")
    assert read_place("https://h", "prefill") == Place("h", "https://h:443")
    assert read_place("http://[::1]:80", "prefill") == Place("::1", "http://[::1]:80")
    for bad in ("", "h:1", "ftp://h:1", "http://h:1/path", "http://h:x", "=http://h:1"):
        with pytest.raises(InputError, match="prefill"):
            read_place(bad, "prefill")


@given(st.lists(st.text(max_size=4), min_size=1, max_size=8), st.integers(0, 8), st.booleans())
def test_a_stream_that_starts_over_says_each_character_once(
    texts: list[str], cut: int, is_chat: bool
) -> None:
    """Wherever the first stream broke, and however the second is cut into events."""

    def event(text: str, finish: str | None = None) -> dict[str, object]:
        body: dict[str, object] = (
            {"delta": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        )
        return {"id": "other", "choices": [{"index": 0, "finish_reason": finish, **body}]}

    writer = Writer(is_chat=is_chat)
    out = [writer.next(event(text)) for text in texts[:cut]]
    writer.start_over()
    whole = "".join(texts)
    again = [whole[at : at + 3] for at in range(0, len(whole), 3)]
    out += [writer.next(event(text)) for text in again] + [writer.next(event("", "stop"))]
    choices = [kept["choices"][0] for kept in out if kept is not None]
    said = "".join(choice["delta"]["content"] if is_chat else choice["text"] for choice in choices)
    assert said == whole
    assert choices[-1]["finish_reason"] == "stop"
    if is_chat:
        assert sum("role" in choice["delta"] for choice in choices) == 1


def test_another_text_is_noticed() -> None:
    for second, finish in (("b", None), ("", "stop")):
        writer = Writer(is_chat=False)
        writer.next({"choices": [{"text": "a"}]})
        writer.start_over()
        with pytest.raises(DivergedError):
            writer.next({"choices": [{"text": second, "finish_reason": finish}]})


def test_bodies() -> None:
    """What prefill and decode are asked, and what one worker has to do alone."""
    fields = {"prompt": "abc", "min_tokens": 3, "stream": True, "stream_options": {}, "max_tokens": 9, "x": 1}
    body = read_body(msgspec.json.encode(fields), is_chat=False)
    assert body.for_prefill({"a": 1}) == {
        "prompt": "abc", "min_tokens": 1, "stream": False, "max_tokens": 1, "x": 1,
        "kv_transfer_params": {"a": 1},
    }  # fmt: skip
    assert body.for_decode({"b": 2}) == fields | {"kv_transfer_params": {"b": 2}}
    for change in ({"n": 2}, {"best_of": 3}, {"echo": True}, {"prompt": ["a", "b"]}, {"prompt_logprobs": 0}):
        assert Body(fields | change, is_chat=False).why_alone() is not None
    assert body.why_alone() is None
    assert Body({"prompt": [1, 2, 3]}, is_chat=False).tokens(4.0) == 3
    assert Body({"prompt": "12345678"}, is_chat=False).tokens(4.0) == 2
    assert Body({"messages": [], "max_completion_tokens": 1, "max_tokens": 9}, is_chat=True).max_tokens == 1
