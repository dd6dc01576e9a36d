"""What an engine can do about a transfer that failed: a table from the error to the next try.

Both sides can ask. For decode another worker is another prefill worker, and to recompute is to
prefill the prompt itself. For prefill it is another decode worker, and to recompute is to decode
on here. A transfer that failed has freed its blocks and nothing of it is visible, so any next try
starts from nothing; the one exception is an error ``in_doubt``, after which decode may have it all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvferry.errors import CapacityError, DeadlineError, InputError, KVFerryError, LocalError, NoPlanError

__all__ = ["RULES", "Advice", "NextTry", "Rule", "advice"]

# A pool of this side frees blocks about as often as a request ends.
_ROOM_SECONDS = 0.1


class NextTry(enum.StrEnum):
    """What to do with the request."""

    RETRY_SAME = "retry same"
    RETRY_OTHER = "retry other"
    RECOMPUTE = "recompute"
    GIVE_UP = "give up"


_RETRIES = frozenset({NextTry.RETRY_SAME, NextTry.RETRY_OTHER})


@dataclass(frozen=True, slots=True)
class Advice:
    """``next_try``, not before ``after_seconds`` from now."""

    next_try: NextTry
    after_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Rule:
    """For the errors of ``applies``: ``first``, and ``last`` when there is no attempt or time left for it."""

    errors: str
    applies: Callable[[KVFerryError], bool]
    first: NextTry
    last: NextTry
    why: str


#: The first rule that applies is the one.
RULES = (
    Rule(
        "any, in doubt",
        lambda error: error.in_doubt,
        NextTry.GIVE_UP,
        NextTry.GIVE_UP,
        "decode may have it; started a second time it would be answered twice: ask decode first",
    ),
    Rule(
        "InputError, NoPlanError",
        lambda error: isinstance(error, InputError | NoPlanError),
        NextTry.GIVE_UP,
        NextTry.GIVE_UP,
        "the same call fails the same way everywhere",
    ),
    Rule(
        "CapacityError of a peer that said when to come back",
        lambda error: isinstance(error, CapacityError) and error.retry_after_seconds > 0,
        NextTry.RETRY_SAME,
        NextTry.RECOMPUTE,
        "the ticket stays good and the KV is there",
    ),
    Rule(
        "any other CapacityError",
        lambda error: isinstance(error, CapacityError),
        NextTry.RETRY_SAME,
        NextTry.GIVE_UP,
        "there is no room, and recomputing needs as much",
    ),
    Rule(
        "LocalError, or a DeadlineError without a phase",
        lambda error: isinstance(error, LocalError) or (isinstance(error, DeadlineError) and not error.phase),
        NextTry.RECOMPUTE,
        NextTry.RECOMPUTE,
        "the fault is on this side (its transfer process is gone or silent): no peer can help",
    ),
    Rule(
        "IncompatibleError after the handshake",
        lambda error: error.kind == "incompatible" and error.phase != "handshake",
        NextTry.RECOMPUTE,
        NextTry.RECOMPUTE,
        "the state does not fit this engine, whoever sends it",
    ),
    Rule(
        "TransportError, DeadlineError, PeerError, CorruptError, IncompatibleError at the handshake",
        lambda _: True,
        NextTry.RETRY_OTHER,
        NextTry.RECOMPUTE,
        "the peer or the way to it is dead, frozen, wrong or another: a ticket can be claimed once",
    ),
)


def advice(error: KVFerryError, attempts_left: int, seconds_left: float) -> Advice:
    """The next try after ``error``.

    Args:
        error: what the transfer raised.
        attempts_left: transfers that may still be tried for this request.
        seconds_left: until the request is of no more use to whoever waits for it.
    """
    rule = next(rule for rule in RULES if rule.applies(error))
    if seconds_left <= 0:
        return Advice(NextTry.GIVE_UP)
    wait = error.retry_after_seconds or (_ROOM_SECONDS if rule.first is NextTry.RETRY_SAME else 0.0)
    if rule.first in _RETRIES and (attempts_left <= 0 or wait >= seconds_left):
        return Advice(rule.last)
    return Advice(rule.first, wait if rule.first is NextTry.RETRY_SAME else 0.0)
