"""The part of an execution state that every engine writes and reads alike: the request outside the model."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

import msgspec
import numpy as np

from kvferry.engines.grammar import OutputGrammar
from kvferry.engines.request import Request
from kvferry.engines.sampler import TokenSampler
from kvferry.engines.text import OutputText, Tokenizer
from kvferry.errors import IncompatibleError
from kvferry.state import (
    Draft,
    Encoder,
    Exactness,
    ExecutionState,
    Fingerprint,
    Grammar,
    GroupBlocks,
    InlineTensor,
    LayerState,
    Positions,
    Replay,
    Section,
    TensorEntry,
    TextPosition,
    Tokens,
    Usage,
    grammar_digest,
    ids_digest,
    pack_ids,
    unpack_ids,
)

__all__ = ["Cache", "replay_of", "request_of", "state_of"]

_LEASE_MS = 30_000


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine itself adds to the record: the model's cache, and where it lies."""

    layers: tuple[LayerState, ...]
    tensors: tuple[TensorEntry, ...]
    blocks: tuple[GroupBlocks, ...]
    sections: tuple[Section, ...] = ()
    draft: Draft | None = None
    encoder: Encoder | None = None


def state_of(
    request: Request, cache: Cache, fingerprint: Fingerprint, exactness: Exactness
) -> ExecutionState:
    """All of a prefilled, unfinished request but its KV bytes. Attempt 0, a fresh id, 30 s of lease."""
    return ExecutionState(
        transfer_id=secrets.token_bytes(16),
        request_id=request.request_id,
        attempt=0,
        created_unix_ns=time.time_ns(),
        lease_ms=_LEASE_MS,
        exactness=exactness,
        fingerprint=fingerprint,
        layers=cache.layers,
        tensors=cache.tensors,
        blocks=cache.blocks,
        kv_tokens=request.kv_tokens,
        tokens=_tokens(request),
        positions=Positions(next=request.kv_tokens),
        sampling=request.sampler.parameters,
        limits=request.limits_left(),
        rng=request.sampler.rng(),
        draft=cache.draft,
        grammar=_grammar(request),
        text=_text(request),
        encoder=cache.encoder,
        usage=Usage(prompt_tokens=request.prompt_tokens),
        sections=cache.sections,
    )


def request_of(
    state: ExecutionState,
    sampler: TokenSampler,
    tokenizer: Tokenizer,
    blocks: Sequence[int] = (),
    grammar: OutputGrammar | None = None,
) -> Request:
    """A request made of a state that passed the checks before the move, visible to nobody yet.

    ``sampler`` and ``grammar``: rebuilt from the state by the engine; ``blocks``: those that hold its
    KV, for an engine that works in them. Raises IncompatibleError for what no engine here continues, though
    the record may hold it.
    """
    if state.logprobs is not None:
        raise IncompatibleError(
            "logprobs: this engine cannot continue a request with them", request_id=state.request_id
        )
    if state.text is None or state.positions != Positions(next=state.kv_tokens):
        raise IncompatibleError(
            "text and positions: this engine needs the text position, and positions that count the tokens",
            request_id=state.request_id,
        )
    ids, border = unpack_ids(state.tokens.ids), state.tokens.prompt_tokens
    text = OutputText(tokenizer, state.limits.stop_strings)
    text.replay(ids[border:].tolist())
    logits = state.tokens.last_logits
    return Request(
        request_id=state.request_id,
        ids=ids.tolist(),
        prompt_tokens=border,
        limits=state.limits,
        limits_from=len(ids) - border,
        sampler=sampler,
        text=text,
        grammar=grammar,
        blocks=list(blocks),
        kv_tokens=state.kv_tokens,
        pending=state.tokens.pending,
        last_logits=None if logits is None else np.array(logits.array(), np.float32),
    )


def replay_of(request: Request) -> Replay:
    """For check 15: what sampler and text of the rebuilt request say of themselves."""
    tokens = _tokens(request)
    return Replay(
        tokens_digest=tokens.digest,
        prompt_tokens=tokens.prompt_tokens,
        rng=request.sampler.rng(),
        text=_text(request),
        grammar_mask_digest=None if request.grammar is None else request.grammar.mask_digest(),
    )


def _tokens(request: Request) -> Tokens:
    ids, logits = pack_ids(request.ids), request.last_logits
    return Tokens(
        ids=ids,
        prompt_tokens=request.prompt_tokens,
        digest=ids_digest(ids),
        emitted_tokens=len(request.ids) - request.prompt_tokens,
        pending=request.pending,
        last_logits=None if logits is None else InlineTensor.of(logits),
    )


def _grammar(request: Request) -> Grammar | None:
    grammar = request.grammar
    if grammar is None:
        return None
    return Grammar(
        kind=grammar.name,
        text=grammar.text,
        digest=grammar_digest(grammar.name, grammar.text),
        accepted_tokens=len(request.output_ids),
        mask_digest=grammar.mask_digest(),
    )


def _text(request: Request) -> TextPosition:
    return TextPosition(emitted_chars=request.text.emitted_chars, tail=request.text.tail)
