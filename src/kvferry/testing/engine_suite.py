"""The conformance suite of engines. Subclass it in a test file of your own:

    class TestMine(EngineSuite):
        factory = "my_tests.engines:make"  # make("7") -> an engine; called in two processes
        arguments = ("7",)
        stranger = ("8",)  # other weights of the same shape

The engine is a ``kvferry.engines.local.LocalEngine``. Every request goes through an ``Endpoint`` over
TCP, the main test's into another process. What is compared are tokens, text and the bits of each
step's logits, greedy and sampled. Needs pytest.
"""

from __future__ import annotations

import sys

import pytest

PARTS = [f"kvferry.testing.engine_{part}" for part in ("continuation", "fixture", "peer", "refusals")]
pytest.register_assert_rewrite(*(part for part in PARTS if part not in sys.modules))

from kvferry.testing.engine_continuation import ContinuationTests  # noqa: E402 - after its asserts
from kvferry.testing.engine_fixture import EngineFixture  # noqa: E402
from kvferry.testing.engine_refusals import RefusalTests  # noqa: E402

__all__ = ["ContinuationTests", "EngineFixture", "EngineSuite", "RefusalTests"]


class EngineSuite(ContinuationTests, RefusalTests):
    """All parts; a request can be handed over between two such engines, and what could not is refused."""
