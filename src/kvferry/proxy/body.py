"""What the proxy has to know of a request's body, and the bodies that it makes of it. Pure.

The client's body stays as it is: what the proxy does not know goes through to both workers.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvferry.errors import InputError
from kvferry.serve.limit import asked_tokens

__all__ = ["DEFAULT_COMPLETION_TOKENS", "Body", "read_body"]

DEFAULT_COMPLETION_TOKENS = 16
"""Of /v1/completions, where no limit is given; a chat may fill the room that there is."""


class Body(msgspec.Struct, frozen=True):
    """One request.

    Args:
        fields: the client's JSON object.
        is_chat: of /v1/chat/completions.
    """

    fields: dict[str, Any]
    is_chat: bool

    @property
    def stream(self) -> bool:
        """Whether the client wants events."""
        return self.fields.get("stream") is True

    @property
    def max_tokens(self) -> int | None:
        """The limit that the client gave."""
        get = self.fields.get
        given = asked_tokens(get("max_tokens"), get("max_completion_tokens"), is_chat=self.is_chat)
        return given if isinstance(given, int) else None

    @property
    def is_deterministic(self) -> bool:
        """Whether the same request gives the same text once more."""
        return self.fields.get("temperature") == 0 or isinstance(self.fields.get("seed"), int)

    def tokens(self, bytes_per_token: float) -> int:
        """Prompt tokens: counted where ids were given, else estimated from the text's bytes."""
        prompt = self.fields.get("messages" if self.is_chat else "prompt")
        if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
            return len(prompt)
        text = prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()
        return max(1, round(len(text.encode("utf-8", "replace")) / bytes_per_token))

    @property
    def text_nbytes(self) -> int:
        """Bytes of the prompt where it is text, else 0."""
        prompt = self.fields.get("prompt")
        return len(prompt.encode("utf-8", "replace")) if isinstance(prompt, str) and not self.is_chat else 0

    def why_alone(self) -> str | None:
        """Why one worker has to do all of this request, or None."""
        for field in ("n", "best_of"):
            if self.fields.get(field) not in (None, 1):
                return f"{field} above 1"
        if self.fields.get("use_beam_search"):
            return "beam search"
        if self.fields.get("echo"):
            return "echo"
        if self.fields.get("prompt_logprobs") is not None:
            return "prompt_logprobs"
        prompt = self.fields.get("prompt")
        if isinstance(prompt, list) and any(not isinstance(token, int) for token in prompt):
            return "a list of prompts"
        return None

    def why_plain(self) -> str | None:
        """Why prefill's token cannot be given to the client as it is, or None."""
        for field in (
            *("logprobs", "top_logprobs", "tools", "return_token_ids", "return_tokens_as_token_ids"),
            *("return_token_offsets", "return_prompt_text"),
        ):
            if self.fields.get(field) not in (None, False, []):
                return field
        return None

    def for_prefill(self, params: dict[str, Any]) -> dict[str, Any]:
        """The body for prefill: one token, not streamed."""
        fields = {
            name: value
            for name, value in self.fields.items()
            if name not in {"stream", "stream_options", "max_completion_tokens"}
        }
        if isinstance(fields.get("min_tokens"), int) and fields["min_tokens"] > 1:
            fields["min_tokens"] = 1  # more than max_tokens would be refused; it means the same for one token
        return fields | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}

    def for_decode(self, params: dict[str, Any] | None) -> dict[str, Any]:
        """The body for decode: the client's, with what prefill answered."""
        fields = {name: value for name, value in self.fields.items() if name != "kv_transfer_params"}
        return fields if params is None else fields | {"kv_transfer_params": params}

    def for_reservation(self) -> dict[str, Any]:
        """The body that asks decode to hold blocks."""
        fields = self.for_decode({"kvferry_reserve": True})
        fields.pop("stream_options", None)
        return fields | {"stream": False}


def read_body(data: bytes, *, is_chat: bool) -> Body:
    """Raises InputError for what is no JSON object, or has no prompt."""
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"body: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InputError("body: is not a JSON object")
    needed = "messages" if is_chat else "prompt"
    if not fields.get(needed):
        raise InputError(f"{needed}: needed")
    return Body(fields, is_chat)
