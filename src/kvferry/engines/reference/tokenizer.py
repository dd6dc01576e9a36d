"""Two tokenizers with one face: SmolLM2's byte-level BPE, and one token a byte for the tiny model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvferry.engines import text as engine_text
from kvferry.errors import LocalError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HFTokenizer

__all__ = ["BPETokenizer", "ByteTokenizer", "Tokenizer", "chat_prompt", "chat_text"]


class Tokenizer(engine_text.Tokenizer, Protocol):
    """Text to ids too."""

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; the names of special tokens inside it become those tokens."""


class BPETokenizer:
    """GPT-2 style byte-level BPE with the pre-tokenizer that GGUF calls ``smollm``: digits stand alone.

    Args:
        tokens: the vocabulary, in GPT-2's printable spelling of bytes, by id.
        merges: pairs ``"left right"``, best first.
        special: ids that are control tokens; they add nothing to the text.
        stop_token_ids: ids that end a reply.

    Raises LocalError where ``tokenizers`` is not installed.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        merges: Sequence[str],
        special: frozenset[int],
        stop_token_ids: tuple[int, ...],
    ) -> None:
        self.stop_token_ids = stop_token_ids
        self.digest = _digest("byte-level-bpe smollm", list(tokens), list(merges), sorted(special))
        self._backend = _backend(tokens, merges, special)
        spelling = {printable: byte for byte, printable in enumerate(_byte_spelling())}
        self._bytes = tuple(
            b"" if token in special else bytes(spelling[printable] for printable in text)
            for token, text in enumerate(tokens)
        )

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; the names of special tokens inside it become those tokens."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that ``token`` adds to the text; none for a special token."""
        return self._bytes[token]


class ByteTokenizer:
    """Id = byte value; the ids from 256 up are special, the first of them ends a reply."""

    def __init__(self, vocab_size: int) -> None:
        self.stop_token_ids = (256,)
        self.digest = _digest("bytes", [str(vocab_size)], [], [])

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode())

    def token_bytes(self, token: int) -> bytes:
        """The byte itself; none for a special token."""
        return bytes((token,)) if token < 256 else b""


_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def chat_prompt(user: str, system: str = _SYSTEM) -> str:
    """One user turn in SmolLM2's chat template, reply opened."""
    return chat_text([("system", system), ("user", user)])


def chat_text(turns: Sequence[tuple[str, str]]) -> str:
    """(role, text) turns in SmolLM2's chat template (``tokenizer.chat_template`` of its GGUF), reply opened.

    As the template has it, a conversation that does not begin with a system turn gets the model's own.
    """
    if turns and turns[0][0] != "system":
        turns = [("system", _SYSTEM), *turns]
    return (
        "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    )


def _digest(kind: str, tokens: list[str], merges: list[str], special: list[int]) -> str:
    return hashlib.sha256(msgspec.json.encode((kind, tokens, merges, special))).hexdigest()


def _backend(tokens: Sequence[str], merges: Sequence[str], special: frozenset[int]) -> HFTokenizer:
    try:
        from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers  # noqa: PLC0415
    except ImportError as error:
        raise LocalError(
            "SmolLM2's tokenizer needs the package 'tokenizers'", next_step="pip install 'kvferry[demo]'"
        ) from error
    vocab = {text: token for token, text in enumerate(tokens)}
    left_right = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    backend = Tokenizer(models.BPE(vocab, left_right))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.add_special_tokens([AddedToken(tokens[token], special=True) for token in sorted(special)])
    return backend


def _byte_spelling() -> list[str]:
    """GPT-2 spells printable bytes as themselves and the n-th other one as ``chr(256 + n)``."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
