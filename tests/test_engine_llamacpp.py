"""The llama.cpp engine: sequences go on in another process bit by bit, or are refused.

Needs the extra ``llamacpp``; ``make test-engines`` runs it in a venv of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.testing.engine_suite import ContinuationTests, EngineSuite

pytest.importorskip("llama_cpp", reason="extra [llamacpp] is not installed: no llama_cpp")
pytest.importorskip("gguf", reason="extra [llamacpp] is not installed: no gguf")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from engine_gguf import LAYERS  # noqa: E402 - after the skip


def suite(family: str, **more: Any) -> type:
    """A test class for one family."""
    fields = {
        "factory": "engine_gguf:make",
        "model": family,
        "dtype": "float32 weights",
        "arguments": (family, "7"),
        "stranger": (family, "8"),
        "__doc__": f"{family}, a tiny random model.",
    }
    return type(f"Test_{family}", (EngineSuite,), fields | more)


for _family in LAYERS:
    globals()[f"Test_{_family}".replace("-", "_")] = suite(_family)


class TestSmolLM2(ContinuationTests):
    """The real model, with its text."""

    factory = "engine_gguf:make"
    model, dtype = "SmolLM2-135M", "Q4_1 weights"
    arguments = ("smollm2", "0")
    max_tokens, borders = 16, (0, 9)
