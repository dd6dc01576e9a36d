"""What the scheduler side tells the worker side with each step, and the words of ``kv_transfer_params``."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvferry.errors import InputError
from kvferry.layout import BlockTable, GroupLayout

__all__ = [
    "MODEL_KEY",
    "PUSH_URL_KEY",
    "REFUSED_KEY",
    "TICKET_KEY",
    "WITHDRAW_KEY",
    "Load",
    "PushSave",
    "Save",
    "Step",
    "Tickets",
    "block_tables",
    "ticket_text",
    "tickets_from",
]

TICKET_KEY = "kvferry_ticket"
REFUSED_KEY = "kvferry_refused"
PUSH_URL_KEY = "kvferry_prefill_url"
MODEL_KEY = "kvferry_model"
WITHDRAW_KEY = "kvferry_withdraw"
_MAX_TICKET_CHARACTERS = 1 << 20

Tickets = tuple[bytes, ...]
"""The tickets of one request, one of each rank of prefill, in rank order."""

GroupIds = tuple[tuple[int, ...], ...]
"""Block ids of each layer group, in token order."""


@dataclass(frozen=True)
class Save:
    """A prompt whose last part this step computes: offer its KV. ``ids``: the prompt, raw int32."""

    request_id: str
    ids: bytes
    blocks: GroupIds


@dataclass(frozen=True)
class PushSave:
    """A prompt whose last part this step computes, for which decode has reserved blocks: push its KV.

    ``computed_tokens``: leading tokens that are in ``blocks`` before the step; the step's forward adds
    the others, layer by layer.
    """

    request_id: str
    tickets: Tickets
    ids: bytes
    blocks: GroupIds
    computed_tokens: int


@dataclass(frozen=True)
class Load:
    """A request whose KV is to come into ``blocks``: fetched with ``tickets``, or pushed.

    ``held_tokens``: leading tokens that the prefix cache holds already, in blocks that others may
    be reading. ``ids``: the prompt, raw int32. ``prefill_url``: the server that is asked to push, for a
    prefix cache that is shared among requests of one ``cache_salt`` only.
    """

    request_id: str
    tickets: Tickets
    ids: bytes
    held_tokens: int
    blocks: GroupIds
    prefill_url: str = ""
    cache_salt: str = ""


@dataclass
class Step:
    """``preempted``: offers that end before this step, which reuses their blocks. ``withdrawn``: offers
    of finished requests that are not handed over. ``given_up``: tickets of offers that their caller says
    nobody will fetch. ``unwanted``: loads of which nothing is needed.
    """

    saves: list[Save] = field(default_factory=list)
    pushes: list[PushSave] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    given_up: list[Tickets] = field(default_factory=list)
    unwanted: list[Load] = field(default_factory=list)


def ticket_text(tickets: Tickets) -> str:
    """Tickets as they travel in JSON: base64 with the URL alphabet, no padding, ranks parted by dots."""
    return ".".join(base64.urlsafe_b64encode(ticket).decode().rstrip("=") for ticket in tickets)


def tickets_from(params: Mapping[str, Any], key: str = TICKET_KEY) -> Tickets:
    """The tickets in a request's ``kv_transfer_params``. Raises InputError; the values come from outside."""
    text = params.get(key)
    if not isinstance(text, str) or not text or len(text) > _MAX_TICKET_CHARACTERS:
        raise InputError(f"kv_transfer_params.{key}: needed, as prefill's response gave it")
    try:
        return tuple(
            base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
            for part in text.split(".")
        )
    except (binascii.Error, ValueError) as error:
        raise InputError(f"kv_transfer_params.{key}: not base64: {error}") from None


def block_tables(
    blocks: GroupIds, groups: Sequence[GroupLayout], tokens: int, *, spare: int = 0
) -> tuple[BlockTable, ...]:
    """The blocks that hold ``tokens`` tokens, as block tables, one a group.

    vLLM puts its null block, 0, where a window has let go of a block: such a table starts later.
    ``spare`` ids beyond the pool are added, for room that vLLM gives only when the request runs on.
    """
    tables = []
    for ids, group in zip(blocks, groups, strict=True):
        used = np.asarray(ids[: -(-tokens // (group.block_size or 1))], np.int32)
        first = int(np.argmax(used != 0)) if used.any() else len(used)
        room = np.arange(group.num_blocks, group.num_blocks + spare, dtype=np.int32)
        tables.append(BlockTable(first, np.concatenate([used[first:], room])))
    return tuple(tables)
