"""The transformers engine makes the tokens that ``generate`` makes, and refuses by name what it would not.

``generate`` is the independent word on sampling: its processors, their order, its random numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="extra [transformers] is not installed: no torch")
pytest.importorskip("transformers", reason="extra [transformers] is not installed: no transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

import torch  # noqa: E402 - after the skip
from transformers import DynamicCache, GenerationConfig  # noqa: E402

from engine_models import encoder_input, random_model  # noqa: E402
from kvferry.engines.transformers import (  # noqa: E402
    TransformersEngine,
    TransformersModel,
    from_generation_config,
)
from kvferry.errors import InputError, LocalError  # noqa: E402
from kvferry.state import Exactness, Limits, SamplingParameters  # noqa: E402

STEPS = 20
CONFIGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalised": {"repetition_penalty": 1.4, "bad_words_ids": [[7], [11, 12]], "min_new_tokens": 9},
    "sampled": {"do_sample": True},
    "sampled, cut": {
        "do_sample": True,
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "sequence_bias": [[[5], 2.0]],
    },
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next", "falcon_h1"])
def test_the_tokens_of_generate(family: str, name: str) -> None:
    """Token by token, with the same seed."""
    model = random_model(family, 7)
    own = TransformersModel(model)
    engine = TransformersEngine(own, own.layout(tokens=64))
    prompt = torch.randint(3, 320, (1, 37), generator=torch.Generator().manual_seed(1))
    config = GenerationConfig(max_new_tokens=STEPS, eos_token_id=2, pad_token_id=0, **CONFIGS[name])
    torch.manual_seed(99)
    expected = model.generate(prompt, generation_config=config)[0, prompt.shape[1] :].tolist()
    engine.submit("r", prompt[0].tolist(), *from_generation_config(config, seed=99))
    engine.prefill("r")
    got = []
    while engine.request("r").finish is None:
        got += [output.token for output in engine.step(["r"])]
    assert got == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 4),
        ("num_return_sequences", 2),
        ("no_repeat_ngram_size", 3),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 1.5),
        ("prompt_lookup_num_tokens", 3),
        ("sequence_bias", [[[5, 6], 1.0]]),
        ("forced_eos_token_id", 2),
        ("cache_implementation", "static"),
    ],
)
def test_what_is_not_handed_over_is_refused_by_name(field: str, value: Any) -> None:
    """Beam search, several samples, and every field that would be lost."""
    config = GenerationConfig(max_new_tokens=3, do_sample=True, **{field: value})
    with pytest.raises(InputError, match=field):
        from_generation_config(config)


def test_the_length_has_to_be_of_the_output() -> None:
    """max_length counts the prompt."""
    with pytest.raises(InputError, match="max_new_tokens"):
        from_generation_config(GenerationConfig(max_length=50))


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_transformers_lacks_are_refused(field: str) -> None:
    """They would be dropped otherwise."""
    own = TransformersModel(random_model("llama", 7))
    engine = TransformersEngine(own, own.layout(tokens=64))
    with pytest.raises(InputError, match=field):
        engine.submit(
            "r", [5], SamplingParameters(temperature=0.0, **{field: 0.5}), Limits(max_tokens_left=1)
        )
    assert engine._caches == {}


def test_a_cache_with_something_unknown_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that the table of roles does not know would be lost, and nobody would notice."""
    update = DynamicCache.update

    def with_more(self: Any, keys: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.momentum = torch.ones(1)
        return update(self, keys, *args, **kwargs)

    monkeypatch.setattr(DynamicCache, "update", with_more)
    with pytest.raises(LocalError, match="'momentum'"):
        TransformersModel(random_model("llama", 7))


def test_a_model_that_cannot_be_exact_is_refused() -> None:
    """Dropout would change every token."""
    with pytest.raises(LocalError, match="training"):
        TransformersModel(random_model("llama", 7).train())


def test_an_encoder_needs_its_input() -> None:
    """And a model without one does not take any."""
    own = TransformersModel(random_model("t5", 7))
    engine = TransformersEngine(own, own.layout(tokens=64, encoder_tokens=64))
    with pytest.raises(InputError, match="encoder_input: missing"):
        engine.submit("r", [1], SamplingParameters(temperature=0.0), Limits(max_tokens_left=1))
    own = TransformersModel(random_model("llama", 7))
    engine = TransformersEngine(own, own.layout(tokens=64))
    with pytest.raises(InputError, match="encoder_input: given"):
        engine.submit(
            "r",
            [1],
            SamplingParameters(temperature=0.0),
            Limits(max_tokens_left=1),
            encoder_input=encoder_input("t5"),
        )


def test_a_layout_of_another_model_is_refused() -> None:
    """Named by the tensor that has no place."""
    llama, gemma = (TransformersModel(random_model(family, 7)) for family in ("llama", "qwen3_next"))
    with pytest.raises(LocalError, match="layout"):
        TransformersEngine(gemma, llama.layout(tokens=64))


def test_a_damaged_random_state_is_refused() -> None:
    """torch is asked, and its no is told as a state that came damaged."""
    import msgspec

    from kvferry.errors import CorruptError

    own = TransformersModel(random_model("llama", 7))
    engine = TransformersEngine(own, own.layout(tokens=128))
    engine.submit("r", [5, 6, 7], SamplingParameters(temperature=1.0, seed=1), Limits(max_tokens_left=5))
    engine.prefill("r")
    state = engine.export_state("r", Exactness.BITS)
    engine.release("r")
    assert state.rng is not None
    damaged = msgspec.structs.replace(state, rng=msgspec.structs.replace(state.rng, state=b"\xff" * 5056))
    tables = engine.allocate(4)
    with pytest.raises(CorruptError, match=r"rng\.state"):
        engine.import_state(damaged, tables)
    engine.free(tables)
