"""How many tokens a body asks for: the same for the server and for the proxy before it. Pure."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["asked_tokens"]

T = TypeVar("T")


def asked_tokens(max_tokens: T, max_completion_tokens: T, *, is_chat: bool) -> T:
    """Of a chat ``max_completion_tokens`` counts, where it is given: it replaces the older ``max_tokens``."""
    return max_completion_tokens if is_chat and max_completion_tokens is not None else max_tokens
