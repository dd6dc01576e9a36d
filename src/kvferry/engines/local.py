"""An engine that runs in this process and is driven call by call: submit, prefill, step, release.

What the reference engine, transformers and llama.cpp have in common: the requests, their checks,
and the order in which an import builds, verifies and only then shows a request.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.base import BlockTables, EngineAdapter
from kvferry.engines.grammar import GrammarText, OutputGrammar, replayed_grammar
from kvferry.engines.record import Cache, replay_of, request_of, state_of
from kvferry.engines.request import Request, StepOutput, resolve_limits, resolve_sampling
from kvferry.engines.sampler import TokenSampler
from kvferry.engines.text import NoTokenizer, OutputText, Tokenizer
from kvferry.errors import IncompatibleError, InputError, KVFerryError, LocalError
from kvferry.state import (
    Exactness,
    ExecutionState,
    ImportReport,
    InlineTensor,
    Limits,
    Rng,
    SamplingParameters,
    TensorKey,
    unpack_ids,
    verify_finite,
    verify_import,
    verify_replay,
)

__all__ = ["Built", "LocalEngine"]


@dataclass(frozen=True, slots=True)
class Built:
    """An engine's own part of a request that was imported and that nobody sees yet.

    ``report``: the import's return value and a read-back. ``recurrent``: every recurrent tensor that
    came through the pool, as read back. ``own``: the engine's objects, for ``show`` or ``discard``.
    """

    report: ImportReport
    recurrent: Mapping[TensorKey, InlineTensor | NDArray[np.generic]] = field(default_factory=dict)
    own: Any = None


class LocalEngine(EngineAdapter):
    """An ``EngineAdapter`` that also computes. Phases of a request: ``submit``, then ``prefill`` until it
    says that the prompt is in, then ``step`` until it is finished, then ``release``. Between any two
    calls it can be exported.
    """

    def __init__(self, vocab_size: int, max_context: int, tokenizer: Tokenizer) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.tokenizer = tokenizer
        self._requests: dict[str, Request] = {}

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParameters,
        limits: Limits,
        grammar: GrammarText | None = None,
    ) -> Request:
        """Take a request; a seed that is needed and not given is drawn here, once.

        Raises InputError naming the field, LocalError where a grammar's library is not installed, or
        CapacityError; then nothing is held.
        """
        self._check_free(request_id)
        if not 0 < len(prompt_ids) < self.max_context:
            raise InputError(f"prompt: {len(prompt_ids)} tokens, not from 1 to {self.max_context - 1}")
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            raise InputError(
                f"prompt: ids from {min(prompt_ids)} to {max(prompt_ids)}, not within the vocabulary"
            )
        sampling = resolve_sampling(sampling, self.vocab_size)
        limits = resolve_limits(limits, self.tokenizer.stop_token_ids)
        if limits.stop_strings and isinstance(self.tokenizer, NoTokenizer):
            raise InputError("stop_strings: this engine was given no tokenizer")
        prompt = np.array(prompt_ids, np.int32)
        request = Request(
            request_id=request_id,
            ids=prompt.tolist(),
            prompt_tokens=len(prompt),
            limits=limits,
            limits_from=0,
            sampler=self._make_sampler(sampling, prompt, prompt[:0], None),
            text=OutputText(self.tokenizer, limits.stop_strings),
            grammar=None if grammar is None else self._compiled(grammar),
        )
        self._admit(request)
        self._requests[request_id] = request
        return request

    @property
    @abstractmethod
    def num_free_blocks(self) -> tuple[int, ...]:
        """Blocks that ``allocate`` could give now, in each group."""

    @abstractmethod
    def prefill(self, request_id: str) -> bool:
        """Compute the prompt, or a chunk of it. True when all of it is in and ``step`` may follow."""

    def step(self, request_ids: Sequence[str] | None = None) -> list[StepOutput]:
        """New tokens for each request, in order; without ids, for all that are prefilled and not finished.

        Raises LocalError for a request that is not in that phase, CapacityError where there is no
        room for what the step needs; then nothing has changed.
        """
        return self._advance(self._chosen(request_ids))

    def request(self, request_id: str) -> Request:
        """The request of that id. Raises LocalError when there is none."""
        if request_id not in self._requests:
            raise LocalError("no such request here", request_id=request_id)
        return self._requests[request_id]

    def export_state(self, request_id: str, exactness: Exactness) -> ExecutionState:
        """Everything besides the KV bytes, as of now; the request may go on here."""
        request = self._running(request_id)
        return state_of(request, self._cache_of(request), self.requirements().fingerprint, exactness)

    def import_state(self, state: ExecutionState, tables: BlockTables) -> str:
        """Make a request of a state whose KV lies in ``tables``; see ``EngineAdapter``."""
        self._check_free(state.request_id)
        self._check_callers(tables)
        ids, border = unpack_ids(state.tokens.ids), state.tokens.prompt_tokens
        try:
            sampler = self._make_sampler(state.sampling, ids[:border], ids[border:], state.rng)
        except InputError as error:  # nobody gave it here
            raise IncompatibleError(f"sampling: {error.message}", request_id=state.request_id) from error
        kinds = self.requirements().grammar_kinds
        grammar = replayed_grammar(state, kinds, self.tokenizer, self.vocab_size)
        request = request_of(state, sampler, self.tokenizer, grammar=grammar)
        built = self._build(state, tables)
        try:
            verify_finite(state, built.recurrent)
            verify_import(state, self.requirements(), built.report)
            verify_replay(state, replay_of(request))
        except BaseException:
            self._discard(built)
            raise
        self._show(request, built, tables)
        self._requests[request.request_id] = request
        return request.request_id

    def release(self, request_id: str) -> None:
        """Forget a request and free what it holds."""
        self._forget(self.request(request_id))
        del self._requests[request_id]

    # What an engine supplies.

    @abstractmethod
    def _make_sampler(
        self,
        sampling: SamplingParameters,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
        rng: Rng | None,
    ) -> TokenSampler:
        """A sampler; ``rng`` None for a new request. Raises InputError for a parameter that it lacks."""

    @abstractmethod
    def _admit(self, request: Request) -> None:
        """Take what a new request needs. Raises CapacityError; then nothing is held."""

    @abstractmethod
    def _run_pending(self, requests: list[Request]) -> None:
        """Compute KV and logits of each request's pending token."""

    @abstractmethod
    def _cache_of(self, request: Request) -> Cache:
        """Describe the request's cache, with its bytes in the pool."""

    @abstractmethod
    def _check_callers(self, tables: BlockTables) -> None:
        """Raise LocalError unless ``allocate`` gave these blocks, and nobody has taken them over."""

    @abstractmethod
    def _build(self, state: ExecutionState, tables: BlockTables) -> Built:
        """Set the cache up aside and read it back. After an error nothing is left behind."""

    def _discard(self, built: Built) -> None:
        """Drop what ``_build`` made."""

    @abstractmethod
    def _show(self, request: Request, built: Built, tables: BlockTables) -> None:
        """Give the request what was built, and the blocks. Must not fail."""

    @abstractmethod
    def _forget(self, request: Request) -> None:
        """Free what the request holds."""

    def _advance(self, requests: list[Request]) -> list[StepOutput]:
        self._run_pending([request for request in requests if request.pending is not None])
        return self._in_turn(requests, lambda request: [request.advance(self.max_context)])

    def _in_turn(
        self, requests: list[Request], advance: Callable[[Request], list[StepOutput]]
    ) -> list[StepOutput]:
        """The outputs of each. One that has no token to choose stays as it is; no other loses its token.

        Its error is raised by the step in which nothing else goes on.
        """
        outputs: list[StepOutput] = []
        failed: KVFerryError | None = None
        for request in requests:
            try:
                outputs += advance(request)
            except LocalError as error:
                failed = failed or error.with_context(request_id=request.request_id)
        if failed is not None and not outputs:
            raise failed
        return outputs

    def _compiled(self, given: GrammarText) -> OutputGrammar:
        grammar = OutputGrammar(given, self.tokenizer, self.vocab_size)
        if grammar.name not in self.requirements().grammar_kinds:
            raise InputError(f"grammar: this engine takes no {grammar.name}")
        return grammar

    def _check_free(self, request_id: str) -> None:
        if request_id in self._requests:
            raise InputError(f"request_id: {request_id!r} is in use here")

    def _chosen(self, request_ids: Sequence[str] | None) -> list[Request]:
        if request_ids is None:
            return [r for r in self._requests.values() if r.is_prefilled and r.finish is None]
        return [self._running(request_id) for request_id in dict.fromkeys(request_ids)]

    def _running(self, request_id: str) -> Request:
        request = self.request(request_id)
        if not request.is_prefilled or request.finish is not None:
            phase = "still prefilling" if not request.is_prefilled else f"finished ({request.finish})"
            raise LocalError(f"the request is {phase}", request_id=request_id)
        return request
