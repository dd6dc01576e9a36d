"""One client's answer, put together from what two workers say. Pure."""

from __future__ import annotations

from typing import Any

__all__ = ["DivergedError", "Writer", "finish_of", "joined", "text_of"]


class DivergedError(Exception):
    """A worker that started over wrote another text than the client has."""


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice: whole or a chunk's, completion or chat."""
    holder = choice.get("message") or choice.get("delta")
    text = holder.get("content") if isinstance(holder, dict) else choice.get("text")
    return text if isinstance(text, str) else ""


def _set_text(choice: dict[str, Any], text: str) -> None:
    holder = choice.get("message") or choice.get("delta")
    if isinstance(holder, dict):
        holder["content"] = text
    else:
        choice["text"] = text


def _choice(answer: dict[str, Any]) -> dict[str, Any] | None:
    choices = answer.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, dict) else None


def finish_of(answer: dict[str, Any]) -> str | None:
    """Why the only choice of a whole answer ended."""
    choice = _choice(answer)
    finish = None if choice is None else choice.get("finish_reason")
    return finish if isinstance(finish, str) else None


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """A whole answer: prefill's token before what decode wrote; all else is decode's."""
    before, after = _choice(first), _choice(then)
    if before is not None and after is not None:
        _set_text(after, text_of(before) + text_of(after))
    return then


class Writer:
    """The events that a client gets, under one id, each piece of text once."""

    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._head: dict[str, Any] = {}
        self._role_sent = False
        self._expected = ""
        self.sent = ""
        self.has_begun = False
        self.is_text_only = True

    def first(self, answer: dict[str, Any], *, is_end: bool = False) -> dict[str, Any]:
        """Prefill's whole answer as the first event; it ends the stream where prefill ended the request."""
        choice = _choice(answer) or {}
        self._keep_head(answer)
        self.has_begun = True
        text = text_of(choice)
        self.sent += text
        made: dict[str, Any] = {"index": 0, "logprobs": None}
        made["finish_reason"] = choice.get("finish_reason") if is_end else None
        if self._is_chat:
            made["delta"] = {"role": "assistant", "content": text}
            self._role_sent = True
        else:
            made["text"] = text
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": [made]}

    def usage(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The usage of a whole answer as an event."""
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": [], "usage": answer.get("usage")}

    def start_over(self) -> None:
        """The next events are of the same request from its beginning: what was sent is expected again."""
        self._expected = self.sent

    def next(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """A worker's event as the client gets it; None where it has it already.

        Raises DivergedError when a start over does not repeat what was sent.
        """
        self._keep_head(event)
        event.update(self._head)
        choice = _choice(event)
        if choice is None:
            return event
        text = text_of(choice)
        if self._expected:
            known = min(len(self._expected), len(text))
            if text[:known] != self._expected[:known]:
                raise DivergedError
            self._expected, text = self._expected[known:], text[known:]
            if self._expected and choice.get("finish_reason"):
                raise DivergedError
            if not text and not choice.get("finish_reason"):
                return None
            _set_text(choice, text)
        self.has_begun = True
        delta = choice.get("delta")
        if isinstance(delta, dict) and any(delta[name] for name in delta if name not in {"role", "content"}):
            self.is_text_only = False
        if isinstance(delta, dict) and "role" in delta:
            if self._role_sent:
                del delta["role"]
            self._role_sent = True
        self.sent += text
        return event

    def _keep_head(self, answer: dict[str, Any]) -> None:
        if not self._head:
            self._head = {name: answer[name] for name in ("id", "created", "model") if name in answer}
