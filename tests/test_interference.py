"""``kvferry interference``: a planted law is found, unfit servers are refused, a real one is measured.

The planted server runs on a clock of its own (``virtual_time``): its figures are exact and no test waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cli import run
from kvferry.errors import CapacityError, DeadlineError, InputError, KVFerryError, NoPlanError, TransportError
from kvferry.interference import InterferenceOptions, Measured, measure, measured_lengths, profile_object
from kvferry.interference.client import UniquePrompts
from kvferry.interference.result import Alone, bunched
from kvferry.plan import DecodeLaw, PrefillLaw, ProfileChoice, parse_profile
from kvferry.plan.interference_fit import GapSummary, MixedFit, Window, chunk_seconds, fit_mixed
from plan_kit import profile
from serve_kit import Server
from virtual_time import PlantedServer, run_virtually

LENGTHS = (200, 800, 1500, 3000)


def measured(server: PlantedServer, **changes: Any) -> Measured:
    """One measurement on the virtual clock; the server is closed with it."""
    fields: dict[str, Any] = {
        "url": "http://planted", "prompt_lengths": LENGTHS, "rates": (2.0,), "chunk_tokens": server.chunk,
        "window_seconds": 15.0, "max_seconds": 300.0,
    }  # fmt: skip
    return run_virtually(measure(InterferenceOptions(**fields | changes), transport=server))


@pytest.mark.parametrize(("share", "chunk"), [(0.0, 512), (0.4, 4096), (1.0, 512)])
def test_a_planted_law_is_found(share: float, chunk: int) -> None:
    """Both laws, the mixed step within 0.05, the foretold gaps near the measured ones."""
    server = PlantedServer(share=share, chunk=chunk)
    found = measured(server)
    law, decode = found.profile.prefill, found.profile.decode
    assert isinstance(law, PrefillLaw)
    for tokens in (200, 1000, 3000):
        chunks = range(0, tokens, chunk)
        truth = sum(server.prefill_seconds(min(start + chunk, tokens), start) for start in chunks)
        assert law.seconds(tokens) == pytest.approx(truth, rel=0.03 if chunk == 512 else 1e-3)
    a, b, c = server.decode
    for batch, context in ((1, 300), (8, 16000)):
        assert decode.seconds(batch, context) == pytest.approx(a + b * context + c * batch, rel=0.01)
    assert found.mixed.mixed_share == pytest.approx(share, abs=0.05)
    assert found.mixed.standard_error is not None
    assert found.mixed.standard_error < 0.25
    (tail,) = found.tails
    assert tail.requests_per_second == pytest.approx(2.0, rel=0.5)  # Poisson, in 15 s
    assert all(abs(error) < 0.2 for error in tail.errors.values()), tail
    assert found.profile.worst_error is not None
    assert found.profile.worst_error < 0.02
    assert found.requests == server.served
    assert server.hung_up == 8  # the streams of the window, and nobody else


def test_the_profile_is_one_that_check_and_plan_read() -> None:
    """The file that is written gives the same profile back, with what was measured beside it."""
    found = measured(PlantedServer())
    text = msgspec.json.encode(profile_object(found)).decode()
    assert parse_profile(text, "engine.json", ProfileChoice()) == found.profile
    said = json.loads(text)
    assert set(said["prefill"]) == set(said["decode"]) == {"a", "b", "c"}
    assert said["tail"]["windows"][0]["errors"].keys() == {"mean", "p95", "p99"}
    assert said["itl_alone"][0]["itl"]["p50"] > 0
    assert said["itl_mixed"][0]["p99"] >= said["itl_mixed"][0]["p50"]


UNFIT: list[tuple[dict[str, Any], type[KVFerryError], str]] = [
    ({"streams": False}, NoPlanError, "does not stream: it answers application/json"),
    ({"buffers": 99}, NoPlanError, "does not stream: 64 tokens came within"),
    ({"burst": 4}, NoPlanError, "64 tokens in 16 events"),
    ({"cached_share": 0.5}, NoPlanError, "in its cache"),
    ({"stops_after": 4}, NoPlanError, "ended after 4 tokens"),
    ({"max_len": 1000}, InputError, "prompt_lengths: up to 3000 tokens"),
    ({"dies_after": 20}, TransportError, "gone"),
]


@pytest.mark.parametrize(("planted", "kind", "says"), UNFIT, ids=[next(iter(row[0])) for row in UNFIT])
def test_a_server_whose_times_would_mean_something_else_is_refused(
    planted: dict[str, Any], kind: type[KVFerryError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        measured(PlantedServer(**planted))


def test_answers_that_a_busy_machine_held_up_are_asked_for_again() -> None:
    """One or two that come all at once do not mean that the server collects them."""
    assert measured(PlantedServer(buffers=2)).profile.worst_error is not None


def test_tokens_that_are_read_several_at_once_are_told() -> None:
    """Of eight streams: the mean is a step, the median is not. A heavy tail alone is no bunching."""
    gaps = [0.04, *[1e-5] * 4] * 20
    assert "with 8 streams half of the tokens" in str(bunched([Alone(8, 300.0, GapSummary.of(gaps))]))
    assert bunched([Alone(8, 300.0, GapSummary.of([0.01] * 95 + [0.3] * 5))]) is None
    assert not measured(PlantedServer()).notes


def test_a_prefix_cache_does_not_touch_new_prompts_and_is_told() -> None:
    """The law is the one without hits; a server without ignore_eos is measured all the same."""
    plain = measured(PlantedServer())
    cached = measured(PlantedServer(has_prefix_cache=True, refuses_ignore_eos=True))
    assert not plain.notes
    assert any("caches prefixes" in note for note in cached.notes)
    times = [found.profile.prefill.seconds(2000) for found in (plain, cached)]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


def test_it_ends_within_its_bounds() -> None:
    """In time and in requests; a rate that prefill alone could not bear is left out by name."""
    server = PlantedServer()
    with pytest.raises(DeadlineError, match="time allowed"):
        measured(server, max_seconds=2.0)
    with pytest.raises(DeadlineError, match="requests allowed"):
        measured(PlantedServer(), max_requests=20)
    found = measured(PlantedServer(), rates=(50.0, 1.0), max_seconds=60.0)
    assert found.seconds <= 61.0
    assert len(found.tails) == 1
    assert "50 a second: prefill alone would take" in found.skipped[0]
    late = measured(PlantedServer(), max_requests=80, rates=(5.0,), window_seconds=100.0)
    assert late.requests <= 80
    assert any("requests allowed" in reason for reason in late.skipped)
    assert late.profile.mixed_share is None  # not measured, and not made up


@given(st.integers(1, 5000), st.integers(1, 4096))
def test_chunks_take_what_the_whole_takes(tokens: int, chunk: int) -> None:
    """However a prompt is cut."""
    known = profile(prefill=PrefillLaw(0.01, 1e-4, 1e-8))
    chunks = chunk_seconds(known, tokens, chunk)
    assert len(chunks) == -(-tokens // chunk)
    assert sum(chunks) == pytest.approx(known.prefill.seconds(tokens))


@given(st.floats(0, 1), st.lists(st.integers(50, 2000), min_size=1, max_size=6), st.integers(1, 8))
def test_the_share_that_made_a_window_is_the_share_that_is_found(
    share: float, prompts: list[int], batch: int
) -> None:
    """Gaps summed by the law, solved for the law."""
    known = profile(prefill=PrefillLaw(0.0, 1e-4, 0.0), decode=DecodeLaw(0.02, 0.0, 0.0))
    steps = [0.02] * 50
    for tokens in prompts:
        p = known.prefill.seconds(tokens)
        steps.append(max(p, 0.02) + share * min(p, 0.02))
    window = Window(sum(steps), 0.02, tuple(steps * batch), tuple(prompts), (1.0,) * len(prompts), batch, 1e3)
    found = fit_mixed(known, [window], 4096)
    assert found.uncut == pytest.approx(share, abs=1e-6)
    empty = msgspec.structs.replace(window, prompts=(), shares=())
    assert fit_mixed(known, [empty], 4096).mixed_share is None


@pytest.mark.parametrize(
    ("uncut", "error", "is_known"),
    [
        (0.4, 0.15, True),
        (0.4, 0.16, False),
        (0.4, None, False),  # one stretch has no spread
        (1.2, 0.11, True),
        (1.3, 0.11, False),
        (-3.0, 0.1, False),
        (1.04, 0.0, True),
        (1.06, 0.0, False),
    ],
)
def test_a_share_that_is_not_identified_is_left_out(
    uncut: float, error: float | None, is_known: bool
) -> None:
    """At most 0.15 of error, and within two errors (or 0.05) of 0 to 1 before it was cut."""
    fit = MixedFit(min(1.0, max(0.0, uncut)), error, uncut)
    assert (fit.identified is not None) == is_known
    assert (fit.why_unknown() is None) == is_known


def test_a_wrong_chunk_size_writes_no_share_and_plans_try_both_ends() -> None:
    """The engine's chunks are of 128 tokens, not of 4,096: the share comes out at -6, and is not written."""
    found = measured(PlantedServer(share=0.4, chunk=128), chunk_tokens=4096)
    assert found.mixed.uncut is not None
    assert found.mixed.uncut < -1
    made = profile_object(found)
    assert made["mixed_share"] is None
    assert any("mixed_share is left out" in note for note in found.notes)
    assert made["tail"]["mixed"]["uncut"] == found.mixed.uncut  # what came out is told all the same


def test_prompts_never_begin_alike_and_lengths_are_three_or_more() -> None:
    prompts = UniquePrompts(0)
    made = [prompts.make(40) for _ in range(500)]
    assert len({tuple(ids[:3]) for ids in made}) == 500
    assert all(len(ids) == 40 and 100 <= min(ids) <= max(ids) < 250 for ids in made)
    assert measured_lengths((500,)) == [125, 250, 500]
    assert measured_lengths(LENGTHS) == [200, 800, 1500, 3000]
    assert len(measured_lengths((40, 41))) >= 3


@pytest.mark.slow
def test_a_real_server_is_measured_and_its_profile_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference engine over HTTP: laws come out, nothing is left running there; times are not judged."""
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("prompt_tokens,output_tokens\n" + "".join(f"{n},8\n" for n in (64, 128, 192)))
    out = tmp_path / "engine.json"
    with Server("--chunk-tokens", "64") as server:
        status = run(
            [
                "interference", server.url, "--prompt-lengths", str(lengths), "--out", str(out), "--json",
                "--concurrency", "3", "--output-tokens", "48", "--repeats", "1", "--window-seconds", "1",
                "--rate", "3", "--chunk-tokens", "64", "--max-seconds", "100",
            ]
        )  # fmt: skip
        said = capsys.readouterr()
        assert status == 0, said.err
        server.wait_empty()
    assert said.out.count("\n") == 1
    assert json.loads(said.out) == json.loads(out.read_text())
    made = json.loads(said.out)
    assert made["model"] == "tiny-7"
    assert made["tail"]["requests"] <= 1000
    known = parse_profile(out.read_text(), str(out), ProfileChoice())
    assert known.prefill.seconds(100) > 0
    check = ["check", "shape:4x2x16", "--link", "eth100", "--profile", str(out), "--ttft", "10s"]
    assert run([*check, "--prompt-tokens", "100"]) == 4  # the link is a brochure's, the profile is read


@pytest.mark.parametrize(
    "arguments",
    [
        ("nowhere", "--prompt-tokens", "100"),
        ("ftp://h:1", "--prompt-tokens", "100"),
        ("http://h:99999", "--prompt-tokens", "100"),
        ("http://h:1",),
        ("http://a\x01b:1", "--prompt-tokens", "100"),
        ("http://h:1", "--prompt-tokens", "5"),
        ("http://h:1", "--prompt-tokens", "x"),
        ("http://h:1", "--prompt-tokens", "100", "--rate", "nan"),
        ("http://h:1", "--prompt-tokens", "100", "--rate", "-1"),
        ("http://h:1", "--prompt-tokens", "100", "--concurrency", "0"),
        ("http://h:1", "--prompt-tokens", "100", "--max-seconds", "0"),
        ("http://h:1", "--prompt-lengths", "/no/such/file"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["interference", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1


def test_nobody_there_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["interference", "http://127.0.0.1:9", "--prompt-tokens", "100"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err


def test_a_busy_server_is_a_matter_of_room() -> None:
    """503 is not a refusal of the body."""

    class Busy(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "m"}]})
            return httpx.Response(503, json={"error": {"message": "full"}})

    with pytest.raises(CapacityError, match="full"):
        run_virtually(measure(InterferenceOptions("http://h", (100,)), transport=Busy()))


@pytest.mark.parametrize("odd", [-1, True, "7", None, 1.5, [3]])
def test_counts_that_are_none_are_not_believed(odd: object) -> None:
    """A server whose counters are absent or odd is measured by what came: the law is the same."""
    usage = {"prompt_tokens": odd, "completion_tokens": odd, "prompt_tokens_details": {"cached_tokens": odd}}
    found = measured(PlantedServer(usage=usage), rates=(), max_seconds=60.0)
    assert found.profile.prefill.seconds(2000) == pytest.approx(
        measured(PlantedServer(), rates=(), max_seconds=60.0).profile.prefill.seconds(2000), rel=1e-6
    )


def test_a_server_that_hangs_is_told_as_one() -> None:
    """No list of models, or one that drips, within the time for it: what was waited for, and how long."""

    class Drips(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                await asyncio.sleep(1.0)
                yield b" "

    class Hung(httpx.AsyncBaseTransport):
        def __init__(self, *, drips: bool) -> None:
            self.drips = drips

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            if not self.drips:
                await asyncio.sleep(1e6)
            return httpx.Response(200, stream=Drips(), request=request)

    for drips in (False, True):
        with pytest.raises(TransportError, match=r"/v1/models: no answer within 10 s"):
            run_virtually(measure(InterferenceOptions("http://h", (100,)), transport=Hung(drips=drips)))
