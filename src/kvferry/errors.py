"""Every error that kvferry raises on purpose, one tree; the type says whose fault it is.

KVFerryError
├── LocalError            this side did something wrong, or was given something wrong
│   └── InputError        a value that a person gave: one line, names the field, exit status 2
├── PeerError             the other side did something that the protocol does not allow
├── IncompatibleError     both sides are well, but this pair (or this state) does not fit
│   └── CorruptError      bytes arrived that are not the bytes that were exported
├── TransportError        the way between the two sides broke or was refused
├── DeadlineError         time ran out: a timeout, an expired lease or ticket
├── CapacityError         there is no room now (blocks, slots, bytes in flight); later there may be
└── NoPlanError           the question has no answer that could be given honestly

Each carries what a person who reads a log at night needs: the request, the phase, the peer,
how many bytes had moved, what is true now, and what to do next. The foreign exception, where
there is one, stays as ``__cause__``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec

__all__ = [
    "ERROR_KINDS",
    "CapacityError",
    "CorruptError",
    "DeadlineError",
    "ErrorRecord",
    "IncompatibleError",
    "InputError",
    "KVFerryError",
    "LocalError",
    "NoPlanError",
    "PeerError",
    "TransportError",
    "did_you_mean",
]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a word that is not known: the nearest one that is, or nothing."""
    near = difflib.get_close_matches(word[:100], list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


class ErrorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An error as data, so that it can cross a process or a wire. ``kind`` is a key of ERROR_KINDS."""

    kind: str
    message: str
    request_id: str = ""
    phase: str = ""
    peer: str = ""
    bytes_done: int = 0
    now_true: str = ""
    next_step: str = ""
    retry_after_seconds: float = 0.0
    in_doubt: bool = False


class KVFerryError(Exception):
    """Root of the tree; never raised itself.

    Args:
        message: what happened, one line.
        request_id: the request it happened to, or "".
        phase: the phase of the handoff (``handshake``, ``move``, ...), or "".
        peer: the other side's name or address, or "".
        bytes_done: payload bytes moved before it happened.
        now_true: what is true now: what is held, what is visible, what was freed.
        next_step: what the reader can do about it.
        retry_after_seconds: when the peer that had no room wants to be asked again; 0 if nobody said so.
        in_doubt: prefill cannot know whether decode has the request: ask decode before it is
            started anywhere else.
    """

    kind: ClassVar[str] = "error"

    def __init__(
        self,
        message: str,
        *,
        request_id: str = "",
        phase: str = "",
        peer: str = "",
        bytes_done: int = 0,
        now_true: str = "",
        next_step: str = "",
        retry_after_seconds: float = 0.0,
        in_doubt: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.phase = phase
        self.peer = peer
        self.bytes_done = bytes_done
        self.now_true = now_true
        self.next_step = next_step
        self.retry_after_seconds = retry_after_seconds
        self.in_doubt = in_doubt

    def __str__(self) -> str:
        where = ", ".join(
            f"{name} {value}"
            for name, value in (("request", self.request_id), ("phase", self.phase), ("peer", self.peer))
            if value
        )
        parts = [self.message + (f" [{where}]" if where else "")]
        if self.bytes_done:
            parts.append(f"{self.bytes_done} bytes had moved")
        parts += [part for part in (self.now_true, self.next_step) if part]
        return "; ".join(parts)

    def to_record(self) -> ErrorRecord:
        """The same error as data, for another process or the peer."""
        return ErrorRecord(
            kind=self.kind,
            message=self.message,
            request_id=self.request_id,
            phase=self.phase,
            peer=self.peer,
            bytes_done=self.bytes_done,
            now_true=self.now_true,
            next_step=self.next_step,
            retry_after_seconds=self.retry_after_seconds,
            in_doubt=self.in_doubt,
        )

    @staticmethod
    def from_record(record: ErrorRecord) -> KVFerryError:
        """Rebuild an error from data; a kind that this version does not know becomes a PeerError."""
        fields: dict[str, Any] = msgspec.structs.asdict(record)
        kind = ERROR_KINDS.get(fields.pop("kind"), PeerError)
        return kind(**fields)

    def retold(self, **fields: Any) -> KVFerryError:
        """A copy with these fields instead of its own: the error as another place knows it."""
        told = KVFerryError.from_record(msgspec.structs.replace(self.to_record(), **fields))
        told.__cause__ = self.__cause__
        return told

    def with_context(self, **fields: Any) -> KVFerryError:
        """Fill fields that are still empty, and return self. Fields already set stay as they are."""
        for name, value in fields.items():
            if not getattr(self, name):
                setattr(self, name, value)
        return self


class LocalError(KVFerryError):
    """This side did something wrong, or was given something wrong."""

    kind = "local"


class InputError(LocalError):
    """A value that a person gave is not usable; the message names the field. CLI: exit status 2."""

    kind = "input"


class PeerError(KVFerryError):
    """The other side did something that the protocol does not allow, or failed by its own word."""

    kind = "peer"


class IncompatibleError(KVFerryError):
    """Both sides are well, but this pair, or this state on this engine, does not fit."""

    kind = "incompatible"


class CorruptError(IncompatibleError):
    """The bytes that arrived are not the bytes that were exported."""

    kind = "corrupt"


class TransportError(KVFerryError):
    """The way between the two sides broke, was refused, or could not be opened."""

    kind = "transport"


class DeadlineError(KVFerryError):
    """Time ran out: a wait, a lease, a ticket."""

    kind = "deadline"


class CapacityError(KVFerryError):
    """No room now; the same call may succeed later."""

    kind = "capacity"


class NoPlanError(KVFerryError):
    """The question has no answer that could be given honestly."""

    kind = "no_plan"


ERROR_KINDS: dict[str, type[KVFerryError]] = {
    cls.kind: cls
    for cls in (
        LocalError,
        InputError,
        PeerError,
        IncompatibleError,
        CorruptError,
        TransportError,
        DeadlineError,
        CapacityError,
        NoPlanError,
    )
}
