"""Output text, token by token: whole characters only, and stop strings found across token borders."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Hashable, Iterable
from typing import Protocol

__all__ = ["NoTokenizer", "OutputText", "Tokenizer"]


class Tokenizer(Hashable, Protocol):
    """What an engine needs of a tokenizer: its identity, and each id as the bytes that it stands for."""

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over everything that decides ids and text: vocabulary, merges, specials."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a reply."""

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to the text; none for a special token."""


class NoTokenizer:
    """Ids in, ids out: for a worker whose text is made elsewhere."""

    digest = hashlib.sha256(b"no tokenizer").hexdigest()

    def __init__(self, stop_token_ids: tuple[int, ...] = ()) -> None:
        self.stop_token_ids = stop_token_ids

    def token_bytes(self, token: int) -> bytes:  # noqa: ARG002 - the protocol's
        """None, for any."""
        return b""


class OutputText:
    """The text of one request's output, always equal to one rebuilt by pushing the same tokens.

    ``text`` holds whole characters: the bytes of an unfinished one wait in the decoder. Of it,
    ``emitted_chars`` have been given to the client; the last ``longest stop string - 1`` characters
    are held back until it is known that no stop string begins in them.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: tuple[str, ...]) -> None:
        self.text = ""
        self.emitted_chars = 0
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self._held = max(map(len, stop_strings), default=1) - 1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def tail(self) -> str:
        """The end of the text in which a stop string may half match."""
        return self.text[len(self.text) - self._held :] if self._held else ""

    def push(self, token: int, *, can_stop: bool = True) -> bool:
        """Add a token. True when a stop string appeared: ``text`` then ends before it, and is final."""
        before = len(self.text)
        self.text += self._decoder.decode(self._tokenizer.token_bytes(token))
        if not can_stop or len(self.text) == before:
            return False
        # Only matches that end in the new text: those that ended before were allowed to.
        found = [
            at
            for stop in self._stop_strings
            if (at := self.text.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        if found:
            self.text = self.text[: min(found)]
            self._decoder.reset()
        return bool(found)

    def replay(self, tokens: Iterable[int]) -> None:
        """Push tokens that were looked at and given out before; ``emitted_chars`` then counts what was."""
        for token in tokens:
            self.push(token, can_stop=False)
        self.take(is_last=False)

    def take(self, *, is_last: bool) -> str:
        """Characters that may go to the client now; at the end an unfinished one comes as U+FFFD."""
        if is_last:
            self.text += self._decoder.decode(b"", final=True)
        safe = len(self.text) if is_last else max(self.emitted_chars, len(self.text) - self._held)
        fresh = self.text[self.emitted_chars : safe]
        self.emitted_chars = max(self.emitted_chars, safe)
        return fresh
