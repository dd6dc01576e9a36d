"""Assisted decoding is handed over between rounds, with the draft model's cache, and goes on bit by bit.

Needs the extra ``transformers``; ``make test-engines`` runs it in a venv of its own.
"""

from __future__ import annotations

import pytest

from kvferry.testing.engine_suite import EngineSuite

pytest.importorskip("torch", reason="extra [transformers] is not installed: no torch")
pytest.importorskip("transformers", reason="extra [transformers] is not installed: no transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from engine_models import make, make_assisted, random_model  # noqa: E402 - after the skip
from kvferry.engines.transformers import Drafter, TransformersModel  # noqa: E402
from kvferry.errors import IncompatibleError, InputError, LocalError  # noqa: E402
from kvferry.state import Limits, SamplingParameters  # noqa: E402
from kvferry.testing.engine_host import EngineHost  # noqa: E402


class TestAssistedLlama(EngineSuite):
    """Llama, drafted for by a disturbed copy of itself."""

    factory = "engine_models:make_assisted"
    model, dtype = "llama, assisted", "float32"
    arguments = ("llama", "float32", "7")
    stranger = ("llama", "float32", "8")


class TestAssistedDeepseek(EngineSuite):
    """The same with latents."""

    factory = "engine_models:make_assisted"
    model, dtype = "deepseek_v3, assisted", "bfloat16"
    arguments = ("deepseek_v3", "bfloat16", "7")
    stranger = ("deepseek_v3", "bfloat16", "8")


PROMPT = list(range(20, 57))


def test_greedy_tokens_are_those_of_the_model_alone() -> None:
    """And some drafts hold, or nothing was tested."""
    tokens = {}
    for name, maker in (("alone", make), ("assisted", make_assisted)):
        engine = maker("llama", "float32", "7")
        engine.submit(
            "r", PROMPT, SamplingParameters(temperature=0.0), Limits(max_tokens_left=40, ignore_eos=True)
        )
        engine.prefill("r")
        rounds = []
        while engine.request("r").finish is None:
            rounds.append([output.token for output in engine.step(["r"])])
        tokens[name] = [token for one in rounds for token in one]
    assert tokens["alone"] == tokens["assisted"]
    assert len(rounds) < 30


def test_a_state_without_the_draft_cache_is_refused() -> None:
    """Decode that drafts does not start from a prefill that does not: random numbers go another way."""
    with (
        EngineHost(make("llama", "float32", "7"), "prefill") as source,
        EngineHost(make_assisted("llama", "float32", "7"), "decode") as target,
    ):
        source.engine.submit("r", PROMPT, SamplingParameters(temperature=0.0), Limits(max_tokens_left=9))
        source.engine.prefill("r")
        handed = source.offer("r")
        tables = target.room(handed)
        with pytest.raises(IncompatibleError, match="layers 4-7"):  # the draft model's
            target.pull(handed, tables)
        target.engine.free(tables)
        source.withdraw(handed)


def test_what_cannot_be_cut_back_is_refused_by_name() -> None:
    """A window has dropped what a rejected draft would need, and a recurrent state cannot be undone."""
    llama = TransformersModel(random_model("llama", 7))
    for family, kind in (("gemma3", "sliding"), ("qwen3_next", "linear")):
        other = TransformersModel(random_model(family, 7))
        with pytest.raises(LocalError, match=kind):
            Drafter(other, llama, 4)
        with pytest.raises(LocalError, match=f"draft model is {kind}"):
            Drafter(llama, other, 4)


def test_one_token_is_too_short() -> None:
    """All but the last token run before the first round."""
    engine = make_assisted("llama", "float32", "7")
    with pytest.raises(InputError, match="two tokens"):
        engine.submit("r", [5], SamplingParameters(temperature=0.0), Limits(max_tokens_left=9))
