"""The transformers engine: every family of caches goes on in another process bit by bit, or is refused.

Needs the extra ``transformers``; ``make test-engines`` runs it in a venv of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.layout import Role
from kvferry.testing.engine_suite import ContinuationTests, EngineSuite

pytest.importorskip("torch", reason="extra [transformers] is not installed: no torch")
pytest.importorskip("transformers", reason="extra [transformers] is not installed: no transformers")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

from engine_models import FAMILIES, encoder_input  # noqa: E402 - after the skip


class Family:
    """Hooks of the suite for one family."""

    factory = "engine_models:make"
    model = "llama"

    def prompt(self, engine: Any) -> list[int]:
        """An encoder-decoder model begins with one token; the others have a prompt past the window."""
        if encoder_input(self.model) is not None:
            return [1]
        return super().prompt(engine)  # type: ignore[misc]

    def inputs(self) -> dict[str, Any]:
        """What the encoder gets."""
        given = encoder_input(self.model)
        return {} if given is None else {"encoder_input": given.to(self.torch_dtype(given))}

    def torch_dtype(self, given: Any) -> Any:
        """Features have the model's dtype; ids stay ids."""
        import torch

        return getattr(torch, self.dtype) if given.is_floating_point() else given.dtype  # type: ignore[attr-defined]


def suite(family: str, dtype: str, parts: type) -> type:
    """A test class for one family and dtype."""
    fields = {
        "model": family,
        "dtype": dtype,
        "arguments": (family, dtype, "7"),
        "stranger": (family, dtype, "8"),
        # The gate of an entry's index that is not complete yet: it decides which entry is attended to later.
        "silent": frozenset({(Role.GATE, 1)} if family == "deepseek_v4" else ()),
        "__doc__": f"{family} in {dtype}.",
    }
    if family == "deepseek_v4":  # it keeps an entry for each 128 tokens: long enough for one
        fields["prompt_tokens"] = 141
    return type(f"Test_{family}_{dtype}", (Family, parts), fields)


for _family in FAMILIES:
    globals()[f"Test_{_family}_float32"] = suite(_family, "float32", EngineSuite)
    # What is refused does not depend on the dtype.
    globals()[f"Test_{_family}_bfloat16"] = suite(_family, "bfloat16", ContinuationTests)
