"""An engine with its pool and endpoint, as the engine suite drives it in both of its processes."""

from __future__ import annotations

import base64
import hashlib
import importlib
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import msgspec

from kvferry.engines.base import BlockTables
from kvferry.engines.local import LocalEngine
from kvferry.engines.request import StepOutput
from kvferry.errors import KVFerryError
from kvferry.state import Exactness, ExecutionState
from kvferry.transfer import Endpoint, Move, Pool, Timeouts

__all__ = ["Continued", "EngineHost", "Handed", "Steps", "load_factory", "steps_of"]

SECONDS = 300.0
# An engine that computes in the same process keeps the interpreter from the endpoint's threads.
PATIENT = Timeouts(handshake=60.0, heartbeat=1.0, lost=60.0, abort=5.0, start=60.0)


class Steps(msgspec.Struct, frozen=True):
    """What a run produced: tokens, text, and the sha256 of each step's logits."""

    tokens: list[int]
    text: str
    logits: list[str]

    def __add__(self, more: Steps) -> Steps:
        return Steps(self.tokens + more.tokens, self.text + more.text, self.logits + more.logits)


class Handed(msgspec.Struct, frozen=True):
    """What decode is told of a request: the ticket, and the room that it needs."""

    ticket: str
    request_id: str
    tokens: int
    encoder_tokens: int = 0


class Continued(msgspec.Struct, frozen=True):
    """What the peer process answers: the steps, or the error in words."""

    steps: Steps | None = None
    nbytes: int = 0
    error: str = ""


def load_factory(name: str) -> Callable[..., LocalEngine]:
    """The function behind ``module:function``."""
    module, _, function = name.partition(":")
    factory: Callable[..., LocalEngine] = getattr(importlib.import_module(module), function)
    return factory


def steps_of(outputs: list[StepOutput]) -> Steps:
    """Outputs as data."""
    return Steps(
        [output.token for output in outputs],
        "".join(output.text for output in outputs),
        [hashlib.sha256(output.logits.tobytes()).hexdigest()[:16] for output in outputs],
    )


class EngineHost:
    """One worker. Owns the endpoint until ``close``; the engine is the caller's."""

    def __init__(self, engine: LocalEngine, name: str) -> None:
        self.engine = engine
        self.endpoint = Endpoint.listen(
            "tcp://127.0.0.1:0",
            pool=Pool(engine.memory, engine.layout),
            name=name,
            requirements=engine.requirements(),
            process=False,
            timeouts=PATIENT,
        )

    def offer(self, request_id: str, exactness: Exactness = Exactness.BITS) -> Handed:
        """Export a request as it is now, and hold it for decode."""
        state = self.engine.export_state(request_id, exactness)
        ticket = self.endpoint.offer(state, self.engine.tables(request_id), lease_seconds=SECONDS)
        return Handed(
            base64.b64encode(ticket).decode(),
            request_id,
            len(state.tokens.ids) // 4 + 1,
            0 if state.encoder is None else state.encoder.cross_tokens,
        )

    def room(self, handed: Handed) -> BlockTables:
        """Blocks for what is handed over."""
        more: Mapping[str, int] = {"encoder_tokens": handed.encoder_tokens} if handed.encoder_tokens else {}
        return self.engine.allocate(handed.tokens, **more)

    def pull(self, handed: Handed, tables: BlockTables) -> tuple[Move, ExecutionState]:
        """Fetch it; checks 1 to 12 and 17 have passed when this returns."""
        move = self.endpoint.pull(base64.b64decode(handed.ticket), tables, timeout_seconds=SECONDS)
        state = move.result()
        assert state is not None
        return move, state

    def take_over(self, handed: Handed) -> int:
        """Pull, import and say started. Returns the payload bytes that moved.

        An import that is refused gives the transfer up: prefill need not wait for its lease.
        """
        tables = self.room(handed)
        try:
            move, state = self.pull(handed, tables)
            try:
                self.engine.import_state(state, tables)
            except KVFerryError as error:
                move.abort(error)
                raise
        except BaseException:
            self.engine.free(tables)
            raise
        move.started()
        return move.record.nbytes

    def let_go(self, handed: Handed) -> None:
        """Wait until decode has started, and forget the request."""
        self.endpoint.outcome(base64.b64decode(handed.ticket)).result(SECONDS)
        self.engine.release(handed.request_id)

    def withdraw(self, handed: Handed) -> None:
        """Take an offer back, whatever became of it, and forget the request."""
        outcome = self.endpoint.outcome(base64.b64decode(handed.ticket))
        if not outcome.done():
            self.endpoint.withdraw(base64.b64decode(handed.ticket))
        outcome.exception(SECONDS)
        self.engine.release(handed.request_id)

    def steps(self, request_id: str, most: int = 1 << 30) -> Steps:
        """Steps until the request is finished, at most so many tokens."""
        outputs: list[StepOutput] = []
        while len(outputs) < most and self.engine.request(request_id).finish is None:
            outputs += self.engine.step([request_id])
        return steps_of(outputs)

    def close(self) -> None:
        """End the endpoint."""
        self.endpoint.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
