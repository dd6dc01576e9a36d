"""Check 8: the request's own state is whole, and this engine can load every part of it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from kvferry.state.check import Case, Refusal
from kvferry.state.check_complete import layer_refusals, tensor_refusals
from kvferry.state.digest import grammar_digest
from kvferry.state.expectation import Expectation
from kvferry.state.fit import describe_lora
from kvferry.state.record import ExecutionState
from kvferry.state.request import Draft, Rng, SamplingParameters
from kvferry.state.requirements import DraftNeed, Requirements
from kvferry.state.values import Exactness, RngKind, unpack_ids

__all__ = ["check_request"]

TORCH_MT19937_NBYTES = 5056
"""torch.Generator().get_state() on the CPU, torch 2."""


def check_request(case: Case) -> Iterator[Refusal]:
    """Check 8: next token, sampling, random state, drafts, grammar, adapters, inputs, limits."""
    state, local, expect = case.state, case.local, case.expect
    for part in expect.parts:
        if getattr(state, part, None) in (None, ()):
            yield Refusal(part, "missing", "there: the request asks for it")
    yield from _next_token(state, local)
    yield from _sampling(state.sampling, local.fingerprint.vocab_size)
    yield from _rng(state, local)
    yield from _draft(state, local)
    yield from _grammar(state, local, expect)
    yield from _inputs(state, local, expect)
    yield from _limits(state)


def _next_token(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    pending, logits = state.tokens.pending, state.tokens.last_logits
    if (pending is None) == (logits is None):
        found = "neither is there" if pending is None else "both are there"
        why = "the last token would be run twice, or never"
        yield Refusal("tokens.pending and tokens.last_logits", found, "exactly one", why)
    vocab_size = local.fingerprint.vocab_size
    if logits is not None and (logits.dtype, logits.shape) != ("float32", (vocab_size,)):
        yield Refusal("tokens.last_logits", f"{logits.dtype}{list(logits.shape)}", f"float32[{vocab_size}]")


def _sampling(sampling: SamplingParameters, vocab_size: int) -> Iterator[Refusal]:
    for field, value, fits, expected in (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("min_p", sampling.min_p, 0 <= sampling.min_p <= 1, "0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0, "above 0"),
        ("presence_penalty", sampling.presence_penalty, True, "finite"),
        ("frequency_penalty", sampling.frequency_penalty, True, "finite"),
    ):
        if not fits or not math.isfinite(value):
            yield Refusal(f"sampling.{field}", value, expected)
    if sampling.n != 1:
        yield Refusal("sampling.n", sampling.n, 1, "a beam or several samples are not one sequence")
    for name, raw in (
        ("allowed_tokens", sampling.allowed_tokens),
        *(("bad_tokens", b) for b in sampling.bad_tokens),
    ):
        if raw is not None and not _in_vocabulary(raw, vocab_size):
            yield Refusal(f"sampling.{name}", "an id outside", f"ids below {vocab_size}")
    for entry in sampling.logit_bias:
        if entry.token >= vocab_size or math.isnan(entry.bias):
            yield Refusal(
                "sampling.logit_bias", f"{entry.bias} for token {entry.token}", "a number for a known token"
            )


def _rng(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    if not state.sampling.temperature > 0:
        return
    rng = state.rng
    if rng is None:
        why = "seeding anew draws other tokens"
        yield Refusal("rng", "missing", f"there, as temperature is {state.sampling.temperature:g}", why)
        return
    if rng.kind not in local.rng_kinds:
        kinds = ", ".join(kind.value for kind in local.rng_kinds)
        yield Refusal("rng.kind", rng.kind.value, f"one that this engine loads: {kinds or 'none'}")
    if lacks := _rng_lacks(rng):
        yield Refusal("rng", f"{rng.kind.value} without {lacks}", "whole")
    seeds = {rng.seed, state.sampling.seed} - {None}
    if len(seeds) > 1:
        yield Refusal("rng.seed", rng.seed, f"{state.sampling.seed} (sampling.seed)")


def _rng_lacks(rng: Rng) -> str:
    if rng.kind is RngKind.TORCH_MT19937_CPU:
        return "" if len(rng.state) == TORCH_MT19937_NBYTES else f"a state of {TORCH_MT19937_NBYTES} bytes"
    if rng.kind is RngKind.PCG64:
        return "" if rng.state else "a state"
    return "" if rng.seed is not None else "a seed"


def _draft(state: ExecutionState, local: Requirements) -> Iterator[Refusal]:
    draft, need = state.draft, local.draft
    if draft is None:
        if need is not None and need.must_ship:
            yield Refusal("draft", "missing", f"there: {need.method} here cannot start without")
        return
    if need is None:
        if state.exactness is not Exactness.BEST_EFFORT or not draft.between_rounds:
            yield Refusal("draft", draft.method, "none: this engine does not draft")
        return
    if draft.method != need.method:
        yield Refusal("draft.method", draft.method, need.method)
    if draft.fingerprint != need.fingerprint:
        yield Refusal("draft.fingerprint", _identity(draft), _identity(need), "must be equal")
    yield from _round(draft, sampled=state.sampling.temperature > 0, vocab_size=local.fingerprint.vocab_size)
    if need.hidden and draft.hidden is None:
        yield Refusal("draft.hidden", "missing", f"there: {need.method} continues from it")
    yield from layer_refusals("draft.layers", draft.layers, need.layers, draft.kv_tokens)
    specs = tuple(tensor.spec(draft.kv_tokens, 0) for tensor in need.tensors)
    yield from tensor_refusals("draft.tensors", draft.tensors, specs)


def _round(draft: Draft, *, sampled: bool, vocab_size: int) -> Iterator[Refusal]:
    """Drafts pending with what verifies them, or none at all."""
    num_drafts = len(draft.tokens) // 4
    if draft.between_rounds:
        if num_drafts or draft.probs is not None:
            yield Refusal("draft.tokens", f"{num_drafts} pending", "none, between rounds")
        return
    if num_drafts == 0:
        yield Refusal("draft.tokens", "empty", "the pending drafts, or between_rounds")
    if not _in_vocabulary(draft.tokens, vocab_size):
        yield Refusal("draft.tokens", "an id outside", f"ids below {vocab_size}")
    if draft.probs is None:
        if sampled:
            why = "drafting again draws other random numbers"
            yield Refusal("draft.probs", "missing", "a row for each pending draft", why)
    elif draft.probs.shape[:1] != (num_drafts,):
        yield Refusal("draft.probs", f"shape {list(draft.probs.shape)}", f"{num_drafts} rows")


def _identity(of: Draft | DraftNeed) -> str:
    return (
        "missing" if of.fingerprint is None else f"{of.fingerprint.weights[:12]}/{of.fingerprint.config[:12]}"
    )


def _grammar(state: ExecutionState, local: Requirements, expect: Expectation) -> Iterator[Refusal]:
    grammar = state.grammar
    if grammar is None:
        return
    if grammar.kind not in local.grammar_kinds:
        yield Refusal("grammar.kind", grammar.kind, f"one of: {', '.join(local.grammar_kinds) or 'none'}")
    if (digest := grammar_digest(grammar.kind, grammar.text)) != grammar.digest:
        yield Refusal("grammar.digest", grammar.digest[:12], f"{digest[:12]}, that of its text")
    if expect.compiled_grammars is not None and grammar.digest not in expect.compiled_grammars:
        step = "compile the grammar in the state first, then check again; if it does not compile, abort"
        yield Refusal("grammar", "not compiled here", "compiled", next_step=step)


def _inputs(state: ExecutionState, local: Requirements, expect: Expectation) -> Iterator[Refusal]:
    loaded = {adapter.name: adapter for adapter in local.fingerprint.lora}
    for adapter in state.fingerprint.lora:
        if loaded.get(adapter.name) != adapter:
            step = "load the adapter on the decode worker, or route the request to one that has it"
            found = describe_lora(adapter)
            yield Refusal(f"fingerprint.lora {adapter.name!r}", found, "one loaded here", next_step=step)
    if state.multimodal is not None:
        for name in state.multimodal.hashes:
            if name not in expect.known_multimodal:
                yield Refusal("multimodal.hashes", name, "an input known here")


def _limits(state: ExecutionState) -> Iterator[Refusal]:
    if state.limits.max_tokens_left < 1:
        why = "the request is finished"
        yield Refusal("limits.max_tokens_left", state.limits.max_tokens_left, "at least 1", why)
    if state.limits.stop_strings and state.text is None:
        why = "a stop string may be half matched"
        yield Refusal("text", "missing", "there, as there are stop strings", why)


def _in_vocabulary(raw: bytes, vocab_size: int) -> bool:
    ids = unpack_ids(raw)
    return not bool(np.any((ids < 0) | (ids >= vocab_size)))
