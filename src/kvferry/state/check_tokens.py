"""Checks 5 and 6: the token history, and every length that has to agree with it."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.layout import LayerKind
from kvferry.state.cache import LayerState
from kvferry.state.check import Case, Refusal
from kvferry.state.check_blocks import block_refusals, tokens_in
from kvferry.state.digest import ids_digest
from kvferry.state.record import ExecutionState
from kvferry.state.requirements import LayerNeed, Requirements
from kvferry.state.values import unpack_ids

__all__ = ["check_lengths", "check_tokens"]


def check_tokens(case: Case) -> Iterator[Refusal]:
    """Check 5: some tokens, all in the vocabulary, with a prompt border and their own digest."""
    tokens = case.state.tokens
    ids = unpack_ids(tokens.ids)
    if ids.size == 0:
        yield Refusal("tokens.ids", "empty", "at least one id")
        return
    vocab_size = case.local.fingerprint.vocab_size
    outside = (ids < 0) | (ids >= vocab_size)
    if outside.any():
        at = int(outside.argmax())
        yield Refusal(f"tokens.ids[{at}]", int(ids[at]), f"an id below {vocab_size}")
    if not 0 < tokens.prompt_tokens <= ids.size:
        why = "penalties and limits count from the prompt border"
        yield Refusal("tokens.prompt_tokens", tokens.prompt_tokens, f"1 to {ids.size}", why)
    if (digest := ids_digest(tokens.ids)) != tokens.digest:
        yield Refusal("tokens.digest", tokens.digest[:12], f"{digest[:12]}, that of the ids")
    if tokens.pending is not None and tokens.pending != ids[-1]:
        yield Refusal("tokens.pending", tokens.pending, f"{ids[-1]}, the last id")


def check_lengths(case: Case) -> Iterator[Refusal]:
    """Check 6: the cache, positions, counts, drafts and block tables cover the same tokens."""
    state, local = case.state, case.local
    num_tokens = len(state.tokens.ids) // 4
    pending = state.tokens.pending is not None
    if state.kv_tokens != num_tokens - pending:
        expected = (
            f"{num_tokens - pending}, as {num_tokens} tokens {'less the pending one' if pending else 'ran'}"
        )
        yield Refusal("kv_tokens", state.kv_tokens, expected)
    yield from _scalars("layers", state.layers, local.layers, state.kv_tokens)
    yield from _outputs(state, num_tokens - state.tokens.prompt_tokens)
    if state.positions.next != (expected_next := state.kv_tokens + state.positions.rope_delta):
        yield Refusal("positions.next", state.positions.next, f"{expected_next}, kv_tokens + rope_delta")
    yield from _draft(state, local)
    groups = {need.group: need for need in local.groups}
    for blocks in state.blocks:
        if (need := groups.get(blocks.group)) is not None:  # check 7 refuses the others
            yield from block_refusals("blocks", blocks, need, tokens_in(state, need))


def _scalars(
    where: str, layers: tuple[LayerState, ...], needs: tuple[LayerNeed, ...], kv_tokens: int
) -> Iterator[Refusal]:
    rates = {(need.layer, need.kind): need.tokens_per_entry for need in needs}
    for layer in layers:
        field = f"{where} {layer.layer}"
        if layer.cumulative_length not in (None, kv_tokens) and layer.kind is not LayerKind.CROSS:
            why = "tokens seen, not tokens kept"
            yield Refusal(
                f"{field}.cumulative_length", layer.cumulative_length, f"{kv_tokens} (kv_tokens)", why
            )
        rate = rates.get((layer.layer, layer.kind))
        if layer.entry_count is not None and rate and layer.entry_count != kv_tokens // rate:
            yield Refusal(f"{field}.entry_count", layer.entry_count, f"{kv_tokens} // {rate}")


def _draft(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    if state.draft is None or local.draft is None:
        return
    most = (len(state.tokens.ids) + len(state.draft.tokens)) // 4
    if state.draft.kv_tokens > most:
        yield Refusal("draft.kv_tokens", state.draft.kv_tokens, f"at most {most}, tokens and drafts")
    yield from _scalars("draft.layers", state.draft.layers, local.draft.layers, state.draft.kv_tokens)


def _outputs(state: ExecutionState, outputs: int) -> Iterator[Refusal]:
    """Nothing can have been sent, accepted or reported that was not produced."""
    emitted = state.tokens.emitted_tokens
    if emitted > outputs:
        yield Refusal("tokens.emitted_tokens", emitted, f"at most {outputs}, the outputs so far")
    if state.grammar is not None and state.grammar.accepted_tokens > outputs:
        yield Refusal("grammar.accepted_tokens", state.grammar.accepted_tokens, f"at most {outputs}")
    if state.logprobs is not None and len(state.logprobs.output) != outputs - emitted:
        found = f"{len(state.logprobs.output)} rows"
        yield Refusal("logprobs.output", found, f"{outputs - emitted}, one for each output not yet emitted")
