"""Block tables: each block once, no hole, and as many as the tokens need. For checks 6, 9 and 12."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvferry.state.cache import GroupBlocks
from kvferry.state.check import Refusal
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import GroupNeed, TokenSource
from kvferry.state.values import unpack_ids

__all__ = ["block_refusals", "tokens_in"]


def tokens_in(state: ExecutionState, need: GroupNeed) -> int:
    """Tokens that a group covers in this state."""
    if need.covers is TokenSource.ENCODER:
        return 0 if state.encoder is None else state.encoder.cross_tokens
    if need.covers is TokenSource.DRAFT:
        return 0 if state.draft is None else state.draft.kv_tokens
    return state.kv_tokens


def block_refusals(where: str, blocks: GroupBlocks, need: GroupNeed, tokens: int) -> Iterator[Refusal]:
    """A table covers ``tokens`` tokens: from the first that is still needed to the last, each block once."""
    ids = unpack_ids(blocks.ids)
    field = f"{where} {blocks.group!r}"
    live = ids
    if blocks.block_tokens is not None:
        # What stands before a window's tail may be any placeholder.
        before = need.first_needed_token(tokens) // blocks.block_tokens - blocks.first_logical_block
        live = ids[max(0, before) :]
    if ids.size and (ids.min() < 0 or np.unique(live).size != live.size):
        yield Refusal(f"{field}.ids", "with a block twice or a negative id", "each block once")
    if blocks.block_tokens is None:
        yield from _slot_refusals(field, blocks, need, ids.size)
        return
    stop = -(-tokens // blocks.block_tokens)
    if blocks.first_logical_block + ids.size != stop:
        found = f"{ids.size} blocks from logical block {blocks.first_logical_block} on"
        expected = f"up to logical block {stop} ({tokens} tokens, {blocks.block_tokens} a block)"
        yield Refusal(f"{field}.ids", found, expected)
    first, needed = blocks.first_logical_block * blocks.block_tokens, need.first_needed_token(tokens)
    if first > needed:
        yield Refusal(f"{field}.first_logical_block", f"token {first}", f"at most token {needed}")


def _slot_refusals(field: str, blocks: GroupBlocks, need: GroupNeed, num_slots: int) -> Iterator[Refusal]:
    if blocks.first_logical_block:
        yield Refusal(f"{field}.first_logical_block", blocks.first_logical_block, "0: slots have no order")
    if num_slots == 0 or need.slots not in (None, num_slots):
        yield Refusal(f"{field}.ids", f"{num_slots} slots", need.slots or "at least one")
