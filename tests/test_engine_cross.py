"""A request moves between unlike engines that run one model; what is not portable is refused by name.

Needs the extra ``transformers``; ``make test-engines`` runs it in a venv of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

pytest.importorskip("torch", reason="extra [transformers] is not installed: no torch")
pytest.importorskip("transformers", reason="extra [transformers] is not installed: no transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from engine_cross import reference_engine, transformers_engine  # noqa: E402 - after the skip
from kvferry.engines.local import LocalEngine  # noqa: E402
from kvferry.engines.reference import load_smollm2, tiny_model  # noqa: E402
from kvferry.engines.request import StepOutput  # noqa: E402
from kvferry.errors import IncompatibleError  # noqa: E402
from kvferry.state import Exactness, Limits, SamplingParameters  # noqa: E402
from kvferry.testing.engine_host import EngineHost  # noqa: E402

GREEDY = SamplingParameters(temperature=0.0)
MAKERS: dict[str, Callable[..., LocalEngine]] = {
    "reference": reference_engine,
    "transformers": transformers_engine,
}
WAYS = [("reference", "transformers"), ("transformers", "reference")]
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def tiny() -> Iterator[dict[str, EngineHost]]:
    """Both engines over one random model."""
    yield from opened(tiny_model())


@pytest.fixture(scope="module")
def smollm2() -> Iterator[dict[str, EngineHost]]:
    """Both engines over SmolLM2-135M-Instruct in float32, dequantised from one GGUF file."""
    yield from opened(load_smollm2())


def opened(model: object) -> Iterator[dict[str, EngineHost]]:
    hosts = {name: EngineHost(make(model), name) for name, make in MAKERS.items()}
    yield hosts
    for host in hosts.values():
        host.close()


def run(host: EngineHost, request_id: str, steps: int = 999) -> list[StepOutput]:
    """At most so many steps of a request that is here."""
    made: list[StepOutput] = []
    while len(made) < steps and host.engine.request(request_id).finish is None:
        made += host.engine.step([request_id])
    return made


def start(host: EngineHost, sampling: SamplingParameters, tokens: int, **limits: object) -> None:
    """A request with its prompt in."""
    prompt = np.random.default_rng(3).integers(0, 256, 41).tolist()
    given = Limits(max_tokens_left=tokens, **{"ignore_eos": True, **limits})
    host.engine.submit("r", prompt, sampling, given)
    while not host.engine.prefill("r"):
        pass


def handed_over(
    hosts: dict[str, EngineHost], way: tuple[str, str], border: int, tokens: int
) -> tuple[list[StepOutput], list[StepOutput]]:
    """The run that stays in the first engine, and the one that changes engines after ``border`` tokens."""
    source, target = hosts[way[0]], hosts[way[1]]
    start(source, GREEDY, tokens)
    stays = run(source, "r")
    source.engine.release("r")
    start(source, GREEDY, tokens)
    moves = run(source, "r", border)
    handed = source.offer("r", Exactness.TOKENS)
    target.take_over(handed)
    source.let_go(handed)
    moves += run(target, "r")
    target.engine.release("r")
    return stays, moves


def same(stays: list[StepOutput], moves: list[StepOutput]) -> None:
    """The same tokens and text, logits within the tolerance."""
    assert [out.token for out in moves] == [out.token for out in stays]
    assert "".join(out.text for out in moves) == "".join(out.text for out in stays)
    worst = max(np.abs(a.logits - b.logits).max() for a, b in zip(stays, moves, strict=True))
    assert worst < TOLERANCE, worst


@pytest.mark.parametrize("border", [0, 1, 9])
@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_a_random_model_changes_engines(
    tiny: dict[str, EngineHost], way: tuple[str, str], border: int
) -> None:
    """Other block sizes, other axis order, another order of the elements of keys."""
    same(*handed_over(tiny, way, border, 32))


@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
def test_smollm2_changes_engines(smollm2: dict[str, EngineHost], way: tuple[str, str]) -> None:
    """The real model: 64 greedy tokens, 3 of them before the handoff."""
    same(*handed_over(smollm2, way, 3, 64))


def test_the_order_of_keys_matters(tiny: dict[str, EngineHost]) -> None:
    """Without it every length fits, and the logits are others: so the configuration names it."""
    engine = tiny["transformers"].engine
    places = engine._own._places
    order = places[0].order
    assert order is not None
    try:
        for place in places:
            object.__setattr__(place, "order", None)
        stays, moves = handed_over(tiny, WAYS[1], 1, 6)
    finally:
        for place in places:
            object.__setattr__(place, "order", order if place.form.held.role.value == "key" else None)
    assert max(np.abs(a.logits - b.logits).max() for a, b in zip(stays, moves, strict=True)) > TOLERANCE


@pytest.mark.parametrize("way", WAYS, ids=" to ".join)
@pytest.mark.parametrize(
    ("sampling", "exactness", "names"),
    [
        (SamplingParameters(temperature=1.0, seed=3), Exactness.TOKENS, "rng.kind"),
        (GREEDY, Exactness.BITS, "engine"),
    ],
    ids=["sampled", "bits"],
)
def test_what_is_not_portable_is_refused_by_name(
    tiny: dict[str, EngineHost],
    way: tuple[str, str],
    sampling: SamplingParameters,
    exactness: Exactness,
    names: str,
) -> None:
    """Random state of another engine, and bits of another engine's arithmetic: before a byte moves."""
    source, target = tiny[way[0]], tiny[way[1]]
    start(source, sampling, 9)
    handed = source.offer("r", exactness)
    tables = target.room(handed)
    with pytest.raises(IncompatibleError, match=names):
        target.pull(handed, tables)
    target.engine.free(tables)
    source.withdraw(handed)


def test_penalties_that_only_one_has_are_refused_by_name(tiny: dict[str, EngineHost]) -> None:
    """The reference engine has presence penalties, transformers has not: nothing is dropped in silence."""
    source, target = tiny["reference"], tiny["transformers"]
    start(source, SamplingParameters(temperature=0.0, presence_penalty=0.5), 9)
    handed = source.offer("r", Exactness.TOKENS)
    with pytest.raises(IncompatibleError, match="presence_penalty"):
        target.take_over(handed)
    source.withdraw(handed)
