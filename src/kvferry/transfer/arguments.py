"""What an engine gives to an endpoint's calls, checked where it is given. Each raises InputError."""

from __future__ import annotations

from typing import Any

from kvferry.errors import InputError

__all__ = ["given", "name_of", "positive"]

_MAX_REQUEST_ID = 256
_MAX_SECONDS = 7 * 24 * 3600


def given(value: Any, from_state: Any, field: str) -> Any:
    """The argument, or what the state says; a request id has at most 256 characters."""
    chosen = from_state if value is None else value
    if chosen is None or chosen == "":
        raise InputError(f"{field}: needed where there is no state to take it from")
    if isinstance(chosen, str) and len(chosen) > _MAX_REQUEST_ID:
        raise InputError(f"{field}: {len(chosen)} characters, more than {_MAX_REQUEST_ID}")
    return chosen


def positive(field: str, seconds: float) -> float:
    """A time span; NaN, nothing and a week or more are none."""
    known = isinstance(seconds, (int, float)) and 0 < seconds < _MAX_SECONDS
    if not known:
        raise InputError(f"{field}: {seconds!r} is not a number of seconds from 0 to {_MAX_SECONDS}")
    return float(seconds)


def name_of(peer: str) -> str:
    """The name that a peer's certificate must carry, or empty."""
    if not isinstance(peer, str) or len(peer) > _MAX_REQUEST_ID:
        raise InputError(f"peer: {peer!r:.80} is no name of at most {_MAX_REQUEST_ID} characters")
    return peer
