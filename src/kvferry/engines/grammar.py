"""Structured output: which token may come next, by llguidance (an extra).

The mask depends on the grammar's text and the output ids alone, so that is what travels: decode
compiles the text, replays the ids and compares the mask (check 15).
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import metadata, util
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.text import Tokenizer
from kvferry.errors import IncompatibleError, InputError, LocalError
from kvferry.state import ExecutionState, unpack_ids

if TYPE_CHECKING:
    from llguidance import LLTokenizer

__all__ = ["GrammarKind", "GrammarText", "OutputGrammar", "grammar_kinds", "replayed_grammar"]

_PACKAGE = "llguidance"


class GrammarKind(enum.StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    LARK = "lark"
    REGEX = "regex"


@runtime_checkable
class EncodingTokenizer(Tokenizer, Protocol):
    """One that also spells a text in ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``."""


@dataclass(frozen=True, slots=True)
class GrammarText:
    """A grammar as its user gives it."""

    kind: GrammarKind
    text: str


def grammar_kinds() -> tuple[str, ...]:
    """The kinds that a state may name here, none without the extra.

    With the library's version: two versions need not give the same masks.
    """
    return tuple(_name(kind) for kind in GrammarKind) if util.find_spec(_PACKAGE) else ()


class OutputGrammar:
    """Where one request's output stands in its grammar, always equal to one that replayed the same ids.

    Raises InputError for a text that is not a grammar, LocalError where llguidance is not installed.
    """

    def __init__(self, given: GrammarText, tokenizer: Tokenizer, vocab_size: int) -> None:
        try:
            from llguidance import LLMatcher  # noqa: PLC0415
        except ImportError as error:
            raise LocalError(
                "structured output needs the package 'llguidance'",
                next_step="pip install 'kvferry[grammar]'",
            ) from error
        if not isinstance(tokenizer, EncodingTokenizer) or not tokenizer.stop_token_ids:
            raise InputError("grammar: this engine was given no tokenizer that encodes and ends a reply")
        self.text = given.text
        self.name = _name(given.kind)
        self._vocab_size = vocab_size
        read: dict[GrammarKind, Callable[[str], str]] = {
            # At most one space where JSON allows any: a model could go on with blanks for ever.
            GrammarKind.JSON_SCHEMA: partial(
                LLMatcher.grammar_from_json_schema, defaults={"whitespace_pattern": " ?"}
            ),
            GrammarKind.LARK: LLMatcher.grammar_from_lark,
            GrammarKind.REGEX: LLMatcher.grammar_from_regex,
        }
        try:
            self._matcher = LLMatcher(
                _llguidance_tokenizer(tokenizer, vocab_size), read[given.kind](given.text), log_level=0
            )
        except ValueError as error:
            raise InputError(f"grammar: {error}") from error
        if self._matcher.is_error():
            raise InputError(f"grammar: {_first_line(self._matcher.get_error())}")

    def is_done(self, ahead: Sequence[int] = ()) -> bool:
        """Nothing can follow; after drafts ``ahead``, which had to be allowed."""
        self.accept(ahead)
        is_done = bool(self._matcher.is_stopped())
        self._matcher.rollback(len(ahead))
        return is_done

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens of the output. Raises InputError for one that may not follow."""
        if not self._matcher.consume_tokens(list(tokens)):
            raise InputError(f"grammar: {_first_line(self._matcher.get_error())}")

    def allowed(self, ahead: Sequence[int] = ()) -> NDArray[np.bool_]:
        """Which tokens may come next, (vocab_size,); after drafts ``ahead``, which had to be allowed.

        Raises LocalError for a grammar that is beyond the library's limits.
        """
        self.accept(ahead)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():  # it would allow the end, and the output would not fit
            raise LocalError(f"grammar: {_first_line(self._matcher.get_error())}")
        self._matcher.rollback(len(ahead))
        mask: NDArray[np.bool_] = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        return mask

    def mask_digest(self) -> str:
        """SHA-256 (hex) of the mask for the next token: a bit a token, in their order."""
        return hashlib.sha256(np.packbits(self.allowed(), bitorder="little").tobytes()).hexdigest()


def replayed_grammar(
    state: ExecutionState, kinds: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> OutputGrammar | None:
    """The state's grammar, compiled here and led through all outputs; check 15 compares the mask after them.

    Raises IncompatibleError for a kind that is none of ``kinds``, and for one that the outputs do not fit.
    """
    given = state.grammar
    if given is None:
        return None
    outputs = unpack_ids(state.tokens.ids)[state.tokens.prompt_tokens :].tolist()
    if given.kind not in kinds or given.accepted_tokens != len(outputs):
        raise IncompatibleError(
            f"grammar: {given.kind} after {given.accepted_tokens} tokens, not after {len(outputs)} and one of"
            f" {', '.join(kinds) or 'none'}",
            request_id=state.request_id,
        )
    try:
        text = GrammarText(GrammarKind(given.kind.rpartition(" ")[2]), given.text)
        grammar = OutputGrammar(text, tokenizer, vocab_size)
        grammar.accept(outputs)
    except InputError as error:
        raise IncompatibleError(error.message, request_id=state.request_id) from error
    return grammar


def _name(kind: GrammarKind) -> str:
    return f"{_PACKAGE} {metadata.version(_PACKAGE)} {kind.value}"


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


@lru_cache(maxsize=2)  # half a second for 49,000 tokens; one model is the rule
def _llguidance_tokenizer(tokenizer: EncodingTokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415

    class Tokens:
        """The face that llguidance asks for."""

        eos_token_id = tokenizer.stop_token_ids[0]
        bos_token_id = None
        special_token_ids = [t for t in range(vocab_size) if not tokenizer.token_bytes(t)]  # noqa: RUF012
        # A special token stands for no bytes, and no two tokens may be alike.
        tokens = [tokenizer.token_bytes(t) or b"<special %d>" % t for t in range(vocab_size)]  # noqa: RUF012

        def __call__(self, text: str) -> list[int]:
            """For what a grammar forces: of its spellings in tokens only this one is allowed."""
            return tokenizer.encode(text)

    return LLTokenizer(
        TokenizerWrapper(Tokens()), n_vocab=vocab_size, eos_token=list(tokenizer.stop_token_ids)
    )
