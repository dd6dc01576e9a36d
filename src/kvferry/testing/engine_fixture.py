"""What the parts of the engine suite share: the engines, their requests, and the recorded results."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from kvferry.engines.local import LocalEngine
from kvferry.layout import Role
from kvferry.state import Limits, SamplingParameters
from kvferry.testing.engine_host import EngineHost, Steps, load_factory
from kvferry.testing.engine_peer import PeerProcess
from kvferry.testing.engine_results import RESULTS, Result

__all__ = ["EngineFixture"]

_peers: dict[str, PeerProcess] = {}


@atexit.register
def _close_peers() -> None:
    for peer in _peers.values():
        peer.close()


class EngineFixture:
    """Subclass hooks. ``factory``: ``module:function`` that makes an engine, in this process and in others.

    ``arguments`` are given to it; ``stranger`` are those of an engine with other weights of the same
    shape. ``model`` and ``dtype`` only name it in the results. ``silent``: tensors whose loss need not
    show in a short run, because they only choose among others (parts of a sparse indexer).
    """

    factory: ClassVar[str]
    arguments: ClassVar[tuple[str, ...]] = ()
    stranger: ClassVar[tuple[str, ...]] = ()
    model: ClassVar[str] = ""
    dtype: ClassVar[str] = ""
    silent: ClassVar[frozenset[tuple[Role, int]]] = frozenset()
    prompt_tokens: ClassVar[int] = 37
    max_tokens: ClassVar[int] = 24
    borders: ClassVar[tuple[int, ...]] = (0, 1, 9)
    samplings: ClassVar[dict[str, SamplingParameters]] = {
        "greedy": SamplingParameters(temperature=0.0, repetition_penalty=1.3),
        "sampled": SamplingParameters(
            temperature=0.9, top_k=60, top_p=0.95, repetition_penalty=1.1, seed=1234
        ),
    }

    def prompt(self, engine: LocalEngine) -> list[int]:
        """Ids of no pattern, low and high ones left out: those are often special."""
        low, high = engine.vocab_size // 16, engine.vocab_size
        ids: list[int] = np.random.default_rng(7).integers(low, high, self.prompt_tokens).tolist()
        return ids

    def inputs(self) -> dict[str, Any]:
        """More for ``submit``: what the encoder gets."""
        return {}

    def submit(
        self, engine: LocalEngine, request_id: str, sampling: SamplingParameters, **limits: Any
    ) -> None:
        """Submit and prefill the suite's request."""
        given = Limits(max_tokens_left=self.max_tokens, **{"ignore_eos": True, **limits})
        engine.submit(request_id, self.prompt(engine), sampling, given, **self.inputs())
        while not engine.prefill(request_id):
            pass

    def alone(self, host: EngineHost, sampling: SamplingParameters) -> Steps:
        """The run that is never handed over."""
        self.submit(host.engine, "alone", sampling)
        steps = host.steps("alone")
        host.engine.release("alone")
        return steps

    @pytest.fixture(scope="class")
    @classmethod
    def host(cls) -> Iterator[EngineHost]:
        """The prefill worker."""
        with EngineHost(load_factory(cls.factory)(*cls.arguments), "prefill") as host:
            yield host

    @pytest.fixture(scope="class")
    @classmethod
    def other(cls) -> Iterator[EngineHost]:
        """A decode worker in this process, whose free blocks are in no order."""
        engine = load_factory(cls.factory)(*cls.arguments)
        given = [engine.allocate(tokens) for tokens in (40, 5, 20)]
        for tables in (given[1], given[0], given[2]):
            engine.free(tables)
        with EngineHost(engine, "decode") as host:
            yield host

    @pytest.fixture
    def peer(self) -> PeerProcess:
        """A decode worker in another process, one for all suites with this factory."""
        if self.factory not in _peers:
            _peers[self.factory] = PeerProcess(self.factory)
        return _peers[self.factory]

    def record(self, sampling: str, moves: str, nbytes: int, engine: str) -> None:
        """Append a result, where someone wants them."""
        if path := os.environ.get(RESULTS):
            result = Result(engine, self.model, self.dtype, sampling, list(self.borders), moves, nbytes)
            with Path(path).open("ab") as file:
                file.write(msgspec.json.encode(result) + b"\n")
