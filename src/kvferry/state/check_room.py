"""Checks 9 and 10: room for the request now, and time enough to bring it over."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvferry.errors import CapacityError, DeadlineError, LocalError
from kvferry.state.check import Case, Refusal
from kvferry.state.check_blocks import tokens_in
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import GroupNeed, Requirements, TokenSource

__all__ = ["check_room", "check_time"]


def check_room(case: Case) -> Iterator[Refusal]:
    """Check 9: the context is long enough; blocks, slots and a place in the batch are reserved."""
    state, local, expect = case.state, case.local, case.expect
    num_tokens = len(state.tokens.ids) // 4
    if num_tokens + 1 > local.fingerprint.max_context:
        found, most = f"{num_tokens} + 1", f"at most {local.fingerprint.max_context}"
        yield Refusal(
            "tokens", found, most, "the decode worker's max_context", next_step="route to a longer one"
        )
    if expect.batch_slots < 1:
        yield Refusal("batch slots", expect.batch_slots, "at least 1", error=CapacityError)
    reserved = {room.group: room.num_blocks for room in expect.room}
    for need in local.groups:
        wanted = blocks_wanted(state, local, need)
        if (found_blocks := reserved.get(need.group, 0)) < wanted:
            why = f"for {num_tokens} tokens, the next one and its drafts"
            field = f"blocks reserved in {need.group!r}"
            yield Refusal(field, found_blocks, f"at least {wanted}", why, CapacityError)


def blocks_wanted(state: ExecutionState, local: Requirements, need: GroupNeed) -> int:
    """Blocks of one group that the request needs to be imported and to run one round."""
    covered = tokens_in(state, need)
    if need.covers is TokenSource.ENCODER:
        return need.blocks_for(covered, covered)
    pending_drafts = 0 if state.draft is None else len(state.draft.tokens) // 4
    per_round = 0 if local.draft is None else local.draft.tokens_per_round
    tokens = len(state.tokens.ids) // 4 + 1 + max(pending_drafts, per_round)
    return need.blocks_for(tokens, covered)


def check_time(case: Case) -> Iterator[Refusal]:
    """Check 10: more of the lease is left than the rest is estimated to take."""
    left, estimated = case.expect.lease_seconds_left, case.expect.estimated_seconds
    if not (math.isfinite(left) and math.isfinite(estimated)):
        yield Refusal("lease and estimate", f"{left} s and {estimated} s", "finite", error=LocalError)
    elif left <= estimated:
        yield Refusal("lease left", f"{left:.3g} s", f"more than {estimated:.3g} s", error=DeadlineError)
