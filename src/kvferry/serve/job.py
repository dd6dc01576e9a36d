"""A request inside the server, and what the engine's thread tells the HTTP side about it."""

from __future__ import annotations

import asyncio
import base64
import enum
import itertools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvferry.errors import KVFerryError, LocalError
from kvferry.serve.ask import Ask

__all__ = [
    "Event",
    "Failed",
    "Handed",
    "Job",
    "Phase",
    "Token",
    "as_known",
    "new_request_id",
    "transfer_params",
]

_numbers = itertools.count()
_LIFE = secrets.token_hex(6)


def new_request_id() -> str:
    """Unique over all processes and their lives: it is the request's id at both workers."""
    return f"{_LIFE}-{next(_numbers)}"


class Phase(enum.Enum):
    """Where a job is; each moves to later ones only."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    ARRIVING = enum.auto()  # its KV is on the way here
    RUNNING = enum.auto()
    ENDED = enum.auto()  # for the client; blocks may still be lent to a peer


@dataclass(frozen=True, slots=True)
class Token:
    """One token. ``completion_tokens``: of the whole request, also those that were sampled elsewhere."""

    text: str
    token: int
    finish: str | None
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Handed:
    """``kv_transfer_params`` for the answer: what the other worker needs to go on."""

    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The job is over."""

    error: KVFerryError


Event: TypeAlias = Token | Handed | Failed


@dataclass(slots=True, eq=False)
class Job:
    """One request. ``post`` may be called from any thread; the other fields are the engine thread's."""

    ask: Ask
    post: Callable[[Event], None]
    waits_until: float
    num_blocks: int
    request_id: str = field(default_factory=new_request_id)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    phase: Phase = Phase.WAITING


def transfer_params(ticket: bytes, *, to_decode: bool, **more: Any) -> dict[str, Any]:
    """``kv_transfer_params`` that carries a ticket to the other worker; docs/proxy.md is the contract."""
    return {
        "do_remote_prefill": to_decode,
        "do_remote_decode": not to_decode,
        "kvferry_ticket": base64.urlsafe_b64encode(ticket).decode(),
        **more,
    }


def as_known(error: BaseException) -> KVFerryError:
    """An error of ours as it is, any other as a fault of this side."""
    return error if isinstance(error, KVFerryError) else LocalError(f"this server failed: {error!r}")
