"""What a check is: a numbered, named question about a case, answered by no refusal or by some."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.errors import IncompatibleError, KVFerryError
from kvferry.state.expectation import Expectation
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import Requirements

__all__ = ["Case", "Check", "Refusal", "Stage"]


class Stage(enum.StrEnum):
    """When a check can be answered."""

    BEFORE_MOVE = "before any KV byte moves"
    AFTER_MOVE = "after the bytes, before the engine has them"
    AFTER_IMPORT = "after the engine's import, before the swap"
    COMMIT = "at the swap"


@dataclass(frozen=True, slots=True)
class Case:
    """One state, against one engine, for one request."""

    state: ExecutionState
    local: Requirements
    expect: Expectation


@dataclass(frozen=True, slots=True)
class Refusal:
    """One field that does not hold: what was found in it, what was expected, and why that matters.

    ``error`` is the type that says whose fault it is; ``next_step`` replaces the check's own.
    """

    field: str
    found: object
    expected: object
    why: str = ""
    error: type[KVFerryError] = IncompatibleError
    next_step: str = ""

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return f"{self.field} is {self.found}, expected {self.expected}{why}"


@dataclass(frozen=True, slots=True)
class Check:
    """``run`` is pure and lazy: the first refusal that it yields becomes the error.

    It takes a Case before the move; later, the state and what was reported.
    """

    number: int
    name: str
    stage: Stage
    question: str
    next_step: str
    run: Callable[..., Iterator[Refusal]]
