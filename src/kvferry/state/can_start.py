"""The accept check: 17 questions in order, each with a number and a name; the first no is the error.

Checks 1 to 10 need the record alone and run before any KV byte moves. 11 and 12 run when the
bytes have come, 13 to 16 when the engine's import has run on a state set up aside, 17 at the swap.
Nothing becomes visible to the decode engine before all have passed, and prefill keeps its copy
until the first step has run. The checks are pure: time, room and read-back are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import KVFerryError
from kvferry.state.arrival import Arrival, ImportReport, Replay
from kvferry.state.cache import TensorKey
from kvferry.state.check import Case, Check, Refusal, Stage
from kvferry.state.check_arrival import (
    check_audit,
    check_bytes,
    check_import,
    check_landed,
    check_lease,
    check_replay,
)
from kvferry.state.check_finite import check_finite
from kvferry.state.checks import CHECKS
from kvferry.state.expectation import Expectation
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import Requirements
from kvferry.state.values import InlineTensor

__all__ = [
    "check_after_move",
    "check_before_move",
    "verify_audit",
    "verify_finite",
    "verify_import",
    "verify_lease",
    "verify_replay",
]


def check_before_move(state: ExecutionState, local: Requirements, expect: Expectation) -> None:
    """Checks 1 to 10: may this state start here? Needs the record alone.

    Raises IncompatibleError, CapacityError, DeadlineError or PeerError, by whose fault it is,
    naming the check, the field and both values. After a refusal nothing has changed here.
    """
    case = Case(state, local, expect)
    for check in CHECKS:
        if check.stage is Stage.BEFORE_MOVE:
            _ask(check.number, check.run(case), state, bytes_moved=expect.bytes_moved)


def check_after_move(state: ExecutionState, local: Requirements, arrival: Arrival) -> None:
    """Checks 11, 12 and 17: did it all arrive in blocks that are this transfer's, in time?

    Raises CorruptError, PeerError, LocalError (a local block table) or DeadlineError. After a
    refusal the local blocks hold bytes that nothing refers to, to be released.
    """
    moved = sum(group.nbytes for group in arrival.groups)
    _ask(11, check_bytes(state, arrival), state, bytes_moved=moved)
    _ask(12, check_landed(state, local, arrival), state, bytes_moved=moved)
    _ask(17, check_lease(arrival.lease_seconds_left), state, bytes_moved=moved)


def verify_finite(
    state: ExecutionState, recurrent: Mapping[TensorKey, InlineTensor | NDArray[np.generic]]
) -> None:
    """Check 13. ``recurrent``: every tensor of role ssm or conv that lies in the pool, read back.

    Raises CorruptError for a NaN or infinity; IncompatibleError when a tensor is not shown.
    """
    _ask(13, check_finite(state, recurrent), state)


def verify_import(state: ExecutionState, local: Requirements, report: ImportReport) -> None:
    """Check 14. Raises IncompatibleError unless the import's return value and the read-back agree."""
    _ask(14, check_import(state, local, report), state)


def verify_replay(state: ExecutionState, replay: Replay) -> None:
    """Check 15. Raises IncompatibleError unless sampler, text and grammar stand where they stood."""
    _ask(15, check_replay(state, replay), state)


def verify_audit(state: ExecutionState, exported: Mapping[str, str], reexported: Mapping[str, str]) -> None:
    """Check 16, for bits, on a sample of requests: name -> digest, as prefill exported and as read back.

    Raises CorruptError naming the first that differs, LocalError when there is nothing to compare.
    """
    _ask(16, check_audit(exported, reexported), state)


def verify_lease(state: ExecutionState, seconds_left: float) -> None:
    """Check 17, again right before the swap. Raises DeadlineError when the lease is over."""
    _ask(17, check_lease(seconds_left), state)


def _ask(number: int, refusals: Iterator[Refusal], state: ExecutionState, bytes_moved: int = 0) -> None:
    if (refusal := next(refusals, None)) is not None:
        raise _error(CHECKS[number - 1], refusal, state, bytes_moved)


def _error(check: Check, refusal: Refusal, state: ExecutionState, bytes_moved: int) -> KVFerryError:
    moved = check.stage is not Stage.BEFORE_MOVE or bytes_moved
    now = "nothing is visible to the decode engine" if moved else "nothing was moved"
    return refusal.error(
        f"check {check.number} ({check.name}): {refusal}",
        request_id=state.request_id,
        phase="can_start",
        bytes_done=bytes_moved,
        now_true=f"{now}; prefill keeps its copy",
        next_step=refusal.next_step or check.next_step,
    )
