"""Checks 11 to 17: the bytes came whole, the engine really has them, and there is still time.

An engine's import call is never enough by itself: some take a flipped bit, half a model or
another sequence's bytes, and decode on. So its return value, a read-back and a replay must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvferry.errors import CorruptError, DeadlineError, KVFerryError, LocalError, PeerError
from kvferry.layout import ITEMSIZE
from kvferry.state.arrival import Arrival, GroupArrival, ImportReport, LandedBlocks, Replay, SequencePosition
from kvferry.state.cache import TensorEntry
from kvferry.state.check import Refusal
from kvferry.state.check_blocks import block_refusals, tokens_in
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import GroupNeed, Requirements, TokenSource

__all__ = ["check_audit", "check_bytes", "check_import", "check_landed", "check_lease", "check_replay"]


def check_bytes(state: ExecutionState, arrival: Arrival) -> Iterator[Refusal]:
    """Check 11: each group and section at its exact length and digest, closed by this transfer's commit."""
    if arrival.transfer_id != state.transfer_id:
        why = "another transfer's commit"
        found, expected = arrival.transfer_id.hex(), state.transfer_id.hex()
        yield Refusal("commit.transfer_id", found, expected, why, PeerError)
    yield from _both_ways("bytes of", [group.group for group in arrival.groups], state)
    for group in arrival.groups:
        yield from _group_bytes(group)
    lengths = {section.name: len(section.data) for section in state.sections}
    for entry in state.tensors + (() if state.draft is None else state.draft.tensors):
        if entry.section in lengths:
            yield from _section_length(entry, lengths[entry.section])


def check_landed(state: ExecutionState, local: Requirements, arrival: Arrival) -> Iterator[Refusal]:
    """Check 12: the blocks that hold it are this transfer's: each once, no hole, as many as needed."""
    yield from _both_ways("landed", [landed.blocks.group for landed in arrival.landed], state, LocalError)
    needs = {need.group: need for need in local.groups}
    for landed in arrival.landed:
        if (need := needs.get(landed.blocks.group)) is not None:
            for refusal in _landed(state, need, landed):
                # The local side made this table, whatever the peer sent.
                yield Refusal(refusal.field, refusal.found, refusal.expected, refusal.why, LocalError)


def check_import(state: ExecutionState, local: Requirements, report: ImportReport) -> Iterator[Refusal]:
    """Check 14: the import took every byte, and the engine's own word on each group agrees."""
    if report.accepted_nbytes != report.given_nbytes or report.given_nbytes == 0:
        why = "the engine's return value; its state may look right nevertheless"
        yield Refusal(
            "import", f"{report.accepted_nbytes} bytes", f"{report.given_nbytes or 'some'} bytes", why
        )
    positions = {position.group: position for position in report.positions}
    for need in local.groups:
        if need.covers is TokenSource.DRAFT and state.draft is None:
            continue
        if (position := positions.get(need.group)) is None:
            yield Refusal(f"read-back of {need.group!r}", "missing", "the engine's own position")
        else:
            yield from _position(position, need, tokens_in(state, need))


def check_replay(state: ExecutionState, replay: Replay) -> Iterator[Refusal]:
    """Check 15: sampler, grammar and text stand where they stood at prefill."""
    for field, found, expected in (
        ("sampler history", replay.tokens_digest[:12], state.tokens.digest[:12]),
        ("sampler prompt border", replay.prompt_tokens, state.tokens.prompt_tokens),
    ):
        if found != expected:
            yield Refusal(field, found, expected, "penalties and limits count from it")
    if state.sampling.temperature > 0 and replay.rng != state.rng:
        found_rng = "missing" if replay.rng is None else f"{replay.rng.kind.value} at draw {replay.rng.draws}"
        yield Refusal("rng read back", found_rng, "equal to the one in the state")
    if state.text is not None and replay.text != state.text:
        yield Refusal("text replayed", replay.text, state.text)
    if state.grammar is not None and replay.grammar_mask_digest != state.grammar.mask_digest:
        found_mask = (replay.grammar_mask_digest or "missing")[:12]
        yield Refusal("grammar mask replayed", found_mask, state.grammar.mask_digest[:12])


def check_audit(exported: Mapping[str, str], reexported: Mapping[str, str]) -> Iterator[Refusal]:
    """Check 16: digests of what the engine exports again equal those of what it was given.

    ``reexported`` may be a sample, but not none: an audit of nothing finds nothing.
    """
    if not reexported:
        yield Refusal("audit", "empty", "at least one digest", error=LocalError)
    for name, digest in reexported.items():
        if exported.get(name) != digest:
            yield Refusal(
                f"audit {name!r}", digest[:12], exported.get(name, "missing")[:12], error=CorruptError
            )


def check_lease(seconds_left: float) -> Iterator[Refusal]:
    """Check 17: the lease lives, so prefill's copy and this side's blocks are still ours."""
    if not seconds_left > 0 or math.isinf(seconds_left):
        found = f"{seconds_left:.3g} s"
        yield Refusal("lease left", found, "above 0 s", "what was moved may be reused", DeadlineError)


def _both_ways(
    what: str, names: list[str], state: ExecutionState, error: type[KVFerryError] = CorruptError
) -> Iterator[Refusal]:
    groups = [blocks.group for blocks in state.blocks]
    for name in dict.fromkeys(groups + names):
        if (names.count(name), groups.count(name)) != (1, 1):
            found, expected = f"there {names.count(name)} times", f"{groups.count(name)} times"
            yield Refusal(f"{what} {name!r}", found, expected, error=error)


def _group_bytes(group: GroupArrival) -> Iterator[Refusal]:
    field = f"bytes of {group.group!r}"
    if group.nbytes != group.expected_nbytes:
        yield Refusal(field, f"{group.nbytes} bytes", f"{group.expected_nbytes} bytes", error=CorruptError)
    if group.local_digest != group.peer_digest:
        found, expected = group.local_digest or "no digest", group.peer_digest or "no digest"
        yield Refusal(field, found, expected, "the digest prefill took at export", CorruptError)


def _section_length(entry: TensorEntry, nbytes: int) -> Iterator[Refusal]:
    """A quantised or packed tensor has its own packing, so only plain ones have a known length."""
    if entry.quantisation is None and entry.dtype in ITEMSIZE:
        expected = math.prod(entry.shape) * ITEMSIZE[entry.dtype]
        if nbytes != expected:
            yield Refusal(
                f"section {entry.section!r}", f"{nbytes} bytes", f"{expected} bytes", error=CorruptError
            )


def _landed(state: ExecutionState, need: GroupNeed, landed: LandedBlocks) -> Iterator[Refusal]:
    if landed.owner != state.transfer_id:
        field = f"landed {need.group!r}.owner"
        yield Refusal(field, landed.owner.hex(), state.transfer_id.hex(), "reserved for another transfer")
    if landed.blocks.block_tokens != need.block_tokens:
        field = f"landed {need.group!r}.block_tokens"
        yield Refusal(field, landed.blocks.block_tokens, need.block_tokens)
    yield from block_refusals("landed", landed.blocks, need, tokens_in(state, need))


def _position(position: SequencePosition, need: GroupNeed, tokens: int) -> Iterator[Refusal]:
    field = f"read-back of {need.group!r}"
    if position.num_tokens != tokens:
        found = "empty" if position.num_tokens is None else f"{position.num_tokens} tokens"
        yield Refusal(field, found, f"{tokens} tokens")
    needed = need.first_needed_token(tokens)
    if need.block_tokens is not None and (position.first_token is None or position.first_token > needed):
        found = "empty" if position.first_token is None else f"token {position.first_token}"
        yield Refusal(f"{field}, first token", found, f"at most token {needed}")
