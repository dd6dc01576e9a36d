"""Answers in OpenAI's shapes: whole, as chunks of a stream, and errors. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvferry.errors import (
    CapacityError,
    DeadlineError,
    IncompatibleError,
    InputError,
    KVFerryError,
    PeerError,
    TransportError,
)
from kvferry.serve.ask import Ask
from kvferry.serve.job import Token

__all__ = ["Shape", "error_body", "http_status"]

_STATUS: tuple[tuple[type[KVFerryError], int], ...] = (
    (InputError, 400),
    (CapacityError, 503),
    (DeadlineError, 504),
    (IncompatibleError, 409),
    (PeerError, 502),
    (TransportError, 502),
)


def http_status(error: KVFerryError) -> int:
    """By whose fault it is: the client's 400, no room 503, the other worker's 502, a misfit 409, ours 500."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: KVFerryError, status: int) -> dict[str, Any]:
    """OpenAI's error object; ``type`` is the kind of our error."""
    return {"error": {"message": str(error), "type": error.kind, "code": status, "param": None}}


class Shape:
    """The answers to one request."""

    def __init__(self, ask: Ask, model: str, request_id: str) -> None:
        self._ask = ask
        self._head = {
            "id": ("chatcmpl-" if ask.is_chat else "cmpl-") + request_id,
            "object": "",
            "created": int(time.time()),
            "model": model,
        }
        self._is_first = True

    def whole(self, tokens: Sequence[Token], params: dict[str, Any] | None) -> dict[str, Any]:
        """The answer that is not streamed."""
        text = "".join(token.text for token in tokens)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": tokens[-1].finish}
        if self._ask.is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        answer = self._head | {
            "object": "chat.completion" if self._ask.is_chat else "text_completion",
            "choices": [choice],
            "usage": self._usage(tokens[-1].completion_tokens),
        }
        if self._ask.return_token_ids:
            choice["token_ids"] = [token.token for token in tokens]
            (answer if self._ask.is_chat else choice)["prompt_token_ids"] = self._ask.prompt_ids
        if params is not None:
            answer["kv_transfer_params"] = params
        return answer

    def chunk(self, token: Token, params: dict[str, Any] | None) -> dict[str, Any]:
        """One event of a stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": token.finish}
        if self._ask.is_chat:
            role = {"role": "assistant"} if self._is_first else {}
            choice["delta"] = role | {"content": token.text}
        else:
            choice["text"] = token.text
        answer = self._head | {
            "object": "chat.completion.chunk" if self._ask.is_chat else "text_completion",
            "choices": [choice],
        }
        if self._ask.return_token_ids:
            choice["token_ids"] = [token.token]
            if self._is_first:
                (answer if self._ask.is_chat else choice)["prompt_token_ids"] = self._ask.prompt_ids
        if params is not None:
            answer["kv_transfer_params"] = params
        self._is_first = False
        return answer

    def usage_chunk(self, completion_tokens: int) -> dict[str, Any]:
        """The last event, where the client asked for it."""
        kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
        return self._head | {"object": kind, "choices": [], "usage": self._usage(completion_tokens)}

    def reservation(self, params: dict[str, Any]) -> dict[str, Any]:
        """The answer to ``kvferry_reserve``."""
        return self._head | {"object": "kvferry.reservation", "choices": [], "kv_transfer_params": params}

    def withdrawal(self) -> dict[str, Any]:
        """The answer to ``kvferry_withdraw``."""
        return self._head | {"object": "kvferry.withdrawal", "choices": []}

    def _usage(self, completion_tokens: int) -> dict[str, Any]:
        prompt = len(self._ask.prompt_ids)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt + completion_tokens,
        }
