"""Real vLLM, offline: two or three engines in processes of their own hand prompts to each other.

Needs vLLM (``make test-vllm`` makes a venv for it); skipped with the reason where it is missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm runs these")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]

HERE = Path(__file__).parent
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
LENGTHS = (2, 5, 32, 33, 37, 64, 65, 100, 250, 900)
NBYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4
TOKENS = 24


class Engine:
    """A child process with one vLLM."""

    def __init__(self, model: Path, log: Path, **config: Any) -> None:
        self.log = log
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "vllm_child.py"), str(model), json.dumps(config)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"vLLM ended: {self.log.read_text()[-4000:]}")
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def alone(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        """What this engine makes of the prompts by itself, without the cache of other calls."""
        sampling = {"max_tokens": TOKENS} | sampling
        outputs = self.ask(
            "generate", prompts=prompts, kv=[None] * len(prompts), salt=f"alone{time.monotonic()}", **sampling
        )
        return [output["tokens"] for output in outputs]

    def prefill(self, prompts: list[list[int]], salt: str = "") -> list[Any]:
        """The ``kv_transfer_params`` of the responses."""
        outputs = self.ask(
            "generate", prompts=prompts, kv=[PREFILL] * len(prompts), salt=salt or _salt(), max_tokens=1
        )
        return [output["kv"] for output in outputs]

    def decode(self, prompts: list[list[int]], kv: list[Any], salt: str = "", **sampling: Any) -> list[Any]:
        sampling = {"max_tokens": TOKENS} | sampling
        return list(self.ask("generate", prompts=prompts, kv=kv, salt=salt or _salt(), **sampling))

    def until(self, condition: Any, seconds: float = 30.0) -> dict[str, Any]:
        """Ask for statistics until they are so."""
        deadline = time.monotonic() + seconds
        while not condition(stats := self.ask("stats")):
            assert time.monotonic() < deadline, stats
            time.sleep(0.05)
        return dict(stats)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _salt() -> str:
    return f"salt{time.monotonic()}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, str(HERE / "vllm_model.py"), str(folder)], check=True, timeout=400)
    return folder


@pytest.fixture(scope="module")
def engines(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """``short`` holds for a second. ``wide`` has blocks of 64, prefills in chunks, and recomputes what fails.

    (vLLM's CPU sampler cannot draw with a seed after a chunk, so no seeded prompt is prefilled there.)
    """
    logs = tmp_path_factory.mktemp("logs")
    made = {
        "p": Engine(model, logs / "p"),
        "short": Engine(model, logs / "short", lease_seconds=1.0),
        "wide": Engine(model, logs / "wide", block_size=64, policy="recompute", batched_tokens=256),
    }
    for engine in made.values():
        assert engine.answer() == {"ready": True}
    yield made
    for engine in made.values():
        engine.close()


def prompt(number: int, tokens: int) -> list[int]:
    return [(7 * at + 13 * number + at * at % 11) % 250 + 5 for at in range(tokens)]


PROMPTS = [prompt(number, tokens) for number, tokens in enumerate(LENGTHS)]


@pytest.mark.parametrize(("src", "dst"), [("p", "short"), ("p", "wide"), ("wide", "p")])
def test_greedy_tokens_are_those_of_one_engine(engines: dict[str, Engine], src: str, dst: str) -> None:
    """Also across blocks of 32 and 64 tokens, and out of a prefill in chunks of 256."""
    before = engines[dst].ask("stats")
    kv = engines[src].prefill(PROMPTS)
    outputs = engines[dst].decode(PROMPTS, kv)
    assert [output["tokens"] for output in outputs] == engines[src].alone(PROMPTS)
    stats = engines[dst].ask("stats")
    moved = stats["nbytes"][len(before["nbytes"]) :]
    assert sorted(moved) == sorted((tokens - 1) * NBYTES_PER_TOKEN for tokens in LENGTHS)
    assert stats["failed"] == before["failed"]
    engines[src].until(lambda stats: stats["requests"] == 0)


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.9, "seed": 42},
        {"temperature": 0.7, "seed": 7, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.6},
        {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ],
    ids=["seed", "seed-top-p-penalty", "penalties"],
)
def test_sampled_tokens_are_those_of_one_engine(engines: dict[str, Engine], sampling: dict[str, Any]) -> None:
    outputs = engines["wide"].decode(PROMPTS, engines["p"].prefill(PROMPTS), **sampling)
    assert [output["tokens"] for output in outputs] == engines["p"].alone(PROMPTS, **sampling)


def test_a_damaged_payload_never_becomes_a_token(engines: dict[str, Engine]) -> None:
    """By policy the request fails (short), or is computed again (wide)."""
    for dst, reason in (("short", "error"), ("wide", "length")):
        before = len(engines[dst].ask("stats")["failed"])
        engines["p"].ask("corrupt")
        outputs = engines[dst].decode([PROMPTS[7]], engines["p"].prefill([PROMPTS[7]]))
        assert outputs[0]["reason"] == reason
        if reason == "length":
            assert outputs[0]["tokens"] == engines[dst].alone([PROMPTS[7]])[0]
        stats = engines[dst].until(lambda stats, before=before: len(stats["failed"]) > before)
        assert stats["failed"][before:] == ["corrupt"]
    engines["p"].until(lambda stats: stats["requests"] == 0)


def test_only_what_the_prefix_cache_lacks_moves(engines: dict[str, Engine]) -> None:
    """A second prompt with the same first 96 tokens: three blocks are there, 103 tokens move."""
    short, first = engines["short"], prompt(50, 128)
    second = first[:96] + prompt(51, 104)
    salt = _salt()
    short.decode([first], engines["p"].prefill([first], salt), salt)
    outputs = short.decode([second], engines["p"].prefill([second], salt), salt)
    assert outputs[0]["tokens"] == engines["p"].alone([second])[0]
    assert short.ask("stats")["nbytes"][-1] == (200 - 1 - 96) * NBYTES_PER_TOKEN


def test_a_whole_prefix_hit_frees_prefill_at_once(engines: dict[str, Engine]) -> None:
    short, given, salt = engines["short"], prompt(60, 97), _salt()
    short.decode([given], engines["p"].prefill([given], salt), salt)
    count = len(short.ask("stats")["nbytes"])
    outputs = short.decode([given], engines["p"].prefill([given], salt), salt)
    assert outputs[0]["tokens"] == engines["p"].alone([given])[0]
    assert len(short.ask("stats")["nbytes"]) == count
    engines["p"].until(lambda stats: stats["requests"] == 0, 10.0)


def test_blocks_come_free_when_decode_never_comes(engines: dict[str, Engine]) -> None:
    """And a ticket that comes too late is refused, whatever lies in those blocks now."""
    kv = engines["short"].prefill(PROMPTS[5:8])
    held = engines["short"].ask("stats")
    assert held["requests"] == 3
    stats = engines["short"].until(lambda stats: stats["requests"] == 0)
    assert stats["usage"] == 0.0
    assert len(stats["expired"]) - len(held["expired"]) == 3
    late = engines["p"].decode(PROMPTS[5:8], kv)
    assert [output["reason"] for output in late] == ["error"] * 3


def test_a_ticket_for_another_prompt_is_refused(engines: dict[str, Engine]) -> None:
    kv = engines["p"].prefill(PROMPTS[7:8])
    other = [[*PROMPTS[7][:50], 9, *PROMPTS[7][51:]]]
    assert engines["short"].decode(other, kv)[0]["reason"] == "error"
    assert (
        engines["wide"].decode(other, engines["p"].prefill(PROMPTS[7:8]))[0]["tokens"]
        == (engines["wide"].alone(other)[0])
    )


def test_a_pool_that_is_too_small_for_all_serves_them_in_turn(engines: dict[str, Engine]) -> None:
    """Nine prompts of 900 tokens need 261 blocks of 128: decode preempts or waits, and nothing hangs."""
    prompts = [prompt(number, 900) for number in range(70, 79)]
    engine = engines["wide"]
    kv: list[Any] = []
    for given in prompts:
        kv += engines["p"].prefill([given])
        if len(kv) % 3 == 0:
            outputs = engine.decode(prompts[len(kv) - 3 : len(kv)], kv[-3:])
            assert [output["reason"] for output in outputs] == ["length"] * 3
    engines["p"].until(lambda stats: stats["requests"] == 0)


def test_layers_with_windows_are_handed_over(
    tmp_path_factory: pytest.TempPathFactory, engines: dict[str, Engine]
) -> None:
    """Gemma 3: three groups of layers in one memory; of a window only its tail moves."""
    folder, logs = tmp_path_factory.mktemp("gemma"), tmp_path_factory.mktemp("logs")
    script = [sys.executable, str(HERE / "vllm_model.py"), str(folder), "gemma"]
    subprocess.run(script, check=True, timeout=400)
    pair = [Engine(folder, logs / name, num_blocks=512) for name in ("p", "d")]
    try:
        for engine in pair:
            assert engine.answer() == {"ready": True}
        salt, moved = _salt(), []
        for _ in range(2):  # the second time out of a prefix cache that holds a part or all
            kv = pair[0].prefill(PROMPTS, salt)
            outputs = pair[1].decode(PROMPTS, kv, salt)
            assert [output["tokens"] for output in outputs] == pair[0].alone(PROMPTS)
            stats = pair[1].ask("stats")
            assert not stats["failed"]
            moved.append(stats["nbytes"])
        full = [(tokens - 1) * NBYTES_PER_TOKEN // 2 for tokens in LENGTHS]
        tails = [min(tokens - 1, 63) * NBYTES_PER_TOKEN for tokens in LENGTHS]
        assert sorted(moved[0]) == sorted(a + b for a, b in zip(full, tails, strict=True))
        # And another model's ticket is refused by name.
        refused = engines["wide"].decode(PROMPTS[7:8], pair[0].prefill(PROMPTS[7:8]))
        assert refused[0]["tokens"] == engines["wide"].alone(PROMPTS[7:8])[0]
        assert "incompatible" in engines["wide"].ask("stats")["failed"]
    finally:
        for engine in pair:
            engine.close()


def test_ranks_of_tensor_parallelism_take_from_their_peers(
    engines: dict[str, Engine], model: Path, tmp_path: Path
) -> None:
    """Two ranks at each side, each a process with half of the heads, in blocks of 32 and 64. A ticket of two
    ranks is of no use to one, nor the reverse: it is named, and decode computes the prompt itself."""
    alone = engines["p"].alone(PROMPTS)
    pair = [Engine(model, tmp_path / f"two{size}", ranks=2, block_size=size) for size in (32, 64)]
    try:
        for engine in pair:
            assert engine.answer() == {"ready": True}
        src, dst = pair
        kv = src.prefill(PROMPTS)
        assert [output["tokens"] for output in dst.decode(PROMPTS, kv)] == alone
        stats = dst.until(lambda stats: len(stats["nbytes"]) == 2 * len(PROMPTS))
        assert sorted(stats["nbytes"]) == sorted(
            [(tokens - 1) * NBYTES_PER_TOKEN // 2 for tokens in LENGTHS] * 2
        )
        assert not stats["failed"]
        for giver, taker, named in (
            (src, engines["p"], "the ticket is of 2, there are 1 here"),
            (engines["p"], src, "the ticket is of 1, there are 2 here"),
        ):
            outputs = taker.decode(PROMPTS[4:6], giver.prefill(PROMPTS[4:6]))
            assert [output["tokens"] for output in outputs] == alone[4:6]
            assert named in taker.log.read_text()
    finally:
        for engine in pair:
            engine.close()
