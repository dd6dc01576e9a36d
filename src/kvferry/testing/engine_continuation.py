"""The part of the engine suite about going on: the same tokens and logits as one process, bit by bit."""

from __future__ import annotations

import pytest

from kvferry.state import Exactness, ExecutionState
from kvferry.testing.engine_fixture import EngineFixture
from kvferry.testing.engine_host import EngineHost, Steps
from kvferry.testing.engine_peer import PeerProcess

__all__ = ["ContinuationTests", "moves_of"]


def moves_of(state: ExecutionState) -> str:
    """What a state's cache consists of, in words: layer kinds, and the roles of each dtype."""
    kinds = dict.fromkeys(layer.kind.value for layer in state.layers)
    roles: dict[str, dict[str, None]] = {}
    for entry in state.tensors:
        roles.setdefault(entry.dtype, {})[entry.role.value] = None
    tensors = "; ".join(f"{dtype} {', '.join(names)}" for dtype, names in roles.items())
    return f"{', '.join(kinds)}: {tensors}"


class ContinuationTests(EngineFixture):
    """Needs ``factory``."""

    @pytest.fixture(params=["greedy", "sampled"])
    def sampling(self, request: pytest.FixtureRequest) -> str:
        """Name of a sampling."""
        return str(request.param)

    def test_goes_on_in_another_process(self, host: EngineHost, peer: PeerProcess, sampling: str) -> None:
        """Exported after each border, moved, imported and run to the end: as if it had stayed.

        The request goes on here too, beside its copy, and its export does not disturb it.
        """
        engine, given = host.engine, self.samplings[sampling]
        expected = self.alone(host, given)
        assert len(expected.tokens) == self.max_tokens
        moved, moves = 0, ""
        for border in self.borders:
            request_id = f"{sampling}-{border}"
            self.submit(engine, request_id, given)
            before = host.steps(request_id, border)
            handed = host.offer(request_id)
            moves = moves_of(engine.export_state(request_id, Exactness.BITS))
            there, moved = peer.continue_there(list(self.arguments), handed)
            stayed = host.steps(request_id)
            host.let_go(handed)
            assert before + there == expected, f"after {border}"
            assert before + stayed == expected, f"after {border}"
        self.record(sampling, moves, moved, engine.requirements().fingerprint.engine)

    def test_there_and_back_again(self, host: EngineHost, other: EngineHost, sampling: str) -> None:
        """Two handovers of one request, the second back to where it came from; no block is lost."""
        given = self.samplings[sampling]
        expected = self.alone(host, given)
        free = host.engine.num_free_blocks, other.engine.num_free_blocks
        self.submit(host.engine, "r", given)
        got = host.steps("r", 3)
        for source, target in ((host, other), (other, host)):
            handed = source.offer("r")
            target.take_over(handed)
            source.let_go(handed)
            got += target.steps("r", 4)
        got += host.steps("r")
        host.engine.release("r")
        assert got == expected
        assert (host.engine.num_free_blocks, other.engine.num_free_blocks) == free

    def test_two_requests_side_by_side(self, host: EngineHost, other: EngineHost) -> None:
        """A request that arrives while another runs disturbs it as little as it is disturbed."""
        expected = {name: self.alone(host, given) for name, given in self.samplings.items()}
        got: dict[str, Steps] = {}
        for name, given in self.samplings.items():
            self.submit(host.engine, name, given)
            got[name] = host.steps(name, 2)
            handed = host.offer(name)
            other.take_over(handed)
            host.let_go(handed)
            for running in got:
                got[running] += other.steps(running, 3)
        for name in got:
            got[name] += other.steps(name)
            other.engine.release(name)
        assert got == expected
