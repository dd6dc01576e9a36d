"""Going on after prefill's token where the caller puts it behind the prompt (``kvferry_continue``). Pure.

Such a decode worker knows nothing of it: it is asked with a prompt that is one token longer, for one token
less, and says so in its usage, which is put right here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.proxy.body import DEFAULT_COMPLETION_TOKENS, Body
from kvferry.proxy.rewrite import finish_of, text_of

__all__ = ["CONTINUE_KEY", "MODEL_KEY", "PLAIN_KEY", "Follow", "MisreadError", "read_follow"]

CONTINUE_KEY = "kvferry_continue"
PLAIN_KEY = "kvferry_plain"
MODEL_KEY = "kvferry_model"


class MisreadError(Exception):
    """Decode did not go on where it was asked to: its prompt had another length, or its model is another."""


class _Offered(msgspec.Struct, frozen=True):
    """What prefill said: the ids to go on after, and the limits of an answer from the prompt on."""

    ids: list[int]
    room_tokens: int
    default_tokens: int


class Follow(msgspec.Struct):
    """How decode is asked to go on after ``ids``, for ``max_tokens`` more, if it runs ``model``.

    A worker that runs another one says nothing; this one's whole answers say which it was.
    """

    ids: list[int]
    max_tokens: int
    is_chat: bool
    is_usage_wanted: bool
    model: str = ""
    is_checked: bool = False

    def body(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Decode's body, of the one that it would have got (``kv_transfer_params`` included)."""
        made = {name: value for name, value in fields.items() if name != "max_completion_tokens"}
        made["max_tokens"] = self.max_tokens
        if isinstance(made.get("min_tokens"), int):
            made["min_tokens"] = max(0, made["min_tokens"] - 1)
        params = made["kv_transfer_params"] | {MODEL_KEY: self.model}
        made["kv_transfer_params"] = params
        if self.is_chat:
            params["prompt_token_ids"] = self.ids
        else:
            made["prompt"] = self.ids
        if made.get("stream") is True:
            # Every event then says how long the prompt was, the first one before any text is given out.
            made["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return made

    def whole(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Decode's whole answer, with the usage of the client's request. Raises MisreadError."""
        self._correct(answer)
        told = answer.pop("kv_transfer_params", None)
        model = told.get(MODEL_KEY) if isinstance(told, dict) else None
        if model != self.model:
            raise MisreadError(f"went on with model {model}, where prefill's is {self.model}")
        return answer

    def event(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """The same of an event; None for one that the client did not ask for. Raises MisreadError."""
        if self.is_checked and event.get("usage") is None:
            return event
        self._correct(event)
        if event.get("choices"):
            del event["usage"]
            return event
        return event if self.is_usage_wanted else None

    def _correct(self, answer: dict[str, Any]) -> None:
        usage = answer.get("usage")
        found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(usage, dict) or found != len(self.ids):
            raise MisreadError(
                f"read a prompt of {found} tokens, where it was to go on after {len(self.ids)}"
            )
        self.is_checked = True
        usage["prompt_tokens"] -= 1
        usage["completion_tokens"] = usage.get("completion_tokens", 0) + 1


def read_follow(offered: Any, body: Body, answer: dict[str, Any]) -> Follow | str:
    """How to go on, or why that cannot be told to be exact. ``answer``: prefill's."""
    try:
        given = msgspec.convert(offered, _Offered)
    except msgspec.ValidationError as error:
        return f"prefill's {CONTINUE_KEY} is not understood: {error}"
    if reason := _why_not_asked(body) or _why_not_answered(answer):
        return reason
    limit = body.max_tokens
    if limit is None:
        least = given.room_tokens if body.is_chat else DEFAULT_COMPLETION_TOKENS
        limit = min(given.default_tokens, given.room_tokens, least)
    min_tokens = body.fields.get("min_tokens") or 0
    if limit > given.room_tokens or min_tokens > limit:
        return "its length is decode's to judge"
    if limit < 2:
        return "one token fits"
    options = body.fields.get("stream_options")
    return Follow(
        given.ids,
        limit - 1,
        body.is_chat,
        isinstance(options, dict) and options.get("include_usage") is True,
    )


def _why_not_asked(body: Body) -> str:
    if body.fields.get("truncate_prompt_tokens") is not None:
        return "truncate_prompt_tokens"
    for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
        if type(body.fields.get(name)) not in {int, type(None)}:
            return f"{name} is no whole number"  # a server may well read "5" or 5.0 as one
    options = body.fields.get("stream_options")
    if options is not None and (not isinstance(options, dict) or not set(options) <= {"include_usage"}):
        return "stream_options besides include_usage"
    if body.is_chat and not _is_all_text(body.fields.get("messages")):
        return "messages that are not all text"
    return ""


def _why_not_answered(answer: dict[str, Any]) -> str:
    """The token has to be text that stands for itself: no half of a character, nothing that is left out."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or finish_of(answer) != "length":
        return "prefill did not end after one token"
    message = choices[0].get("message")
    others = message.items() if isinstance(message, dict) else ()
    for name, value in others:
        if value and name not in {"role", "content"}:
            return f"prefill's message has {name}"
    text = text_of(choices[0])
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return "prefill's token is no whole text"
    return ""


def _is_all_text(messages: Any) -> bool:
    """Decode renders messages with anything else itself, whatever ids it is given."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else 0
        parts = content if isinstance(content, list) else [{"type": "text"}]
        if not isinstance(content, list | str | None):
            return False
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in parts):
            return False
    return True
