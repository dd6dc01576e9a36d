"""What a client gets: one JSON object, or events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.proxy.upstream import RefusedError, WorkerFailedError

__all__ = ["Answer", "Events", "failure"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer, and headers that say how it came about."""

    body: dict[str, Any]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Events:
    """A stream. ``stack`` is closed when nobody reads it any more, even if nobody ever did."""

    events: AsyncGenerator[dict[str, Any], None]
    headers: dict[str, str]
    stack: contextlib.AsyncExitStack | None = None


def failure(error: Exception) -> dict[str, Any]:
    """OpenAI's error object: the last event of a stream that failed, or the body of a failed request."""
    status = error.status if isinstance(error, WorkerFailedError | RefusedError) else 502
    message = str(error)
    if isinstance(error, RefusedError):
        with contextlib.suppress(msgspec.DecodeError, RecursionError, KeyError, TypeError):
            message = str(msgspec.json.decode(error.body)["error"]["message"])
    return {"error": {"message": message, "type": "worker", "code": status, "param": None}}
