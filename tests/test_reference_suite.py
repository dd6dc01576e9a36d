"""The reference engine passes the public engine suite."""

from __future__ import annotations

from kvferry.engines.reference import ReferenceEngine
from kvferry.testing.engine_suite import EngineSuite
from reference_kit import Layout, make_engine


def make(seed: str) -> ReferenceEngine:
    """A tiny model over small blocks."""
    return make_engine(Layout(block_size=8, tokens=512), seed=int(seed))


class TestReference(EngineSuite):
    """Two engines of one tiny model, and a process with a third."""

    factory = "test_reference_suite:make"
    arguments = ("0",)
    stranger = ("1",)
    model, dtype = "llama (tiny)", "float32"
