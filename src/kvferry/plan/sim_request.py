"""A request on its way through the simulator, and the record that is left of it."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvferry.plan.fairshare import Flow

__all__ = ["Outcome", "Request", "RequestRecord"]


class Outcome(StrEnum):
    """How a request ended."""

    DONE = "done"
    FAILED = "failed"  # no live worker could take it


class RequestRecord(NamedTuple):
    """What is kept of a request. Times are seconds; ``arrival_seconds`` and ``end_seconds`` from the start.

    The parts are those of its last attempt: the wait for prefill, prefill, the wait for room at
    decode, the transfer (start cost, bytes at the shared rate, synchronisation), of which what came
    after prefill is exposed. ``tpot_seconds`` is the mean gap after the first token, None for one token.
    """

    number: int
    arrival_seconds: float
    prompt_tokens: int
    output_tokens: int
    prefill_worker: str
    decode_worker: str
    prefill_hit_tokens: int
    decode_hit_tokens: int
    wire_bytes: int
    queue_seconds: float
    prefill_seconds: float
    room_wait_seconds: float
    transfer_seconds: float
    exposed_seconds: float
    ttft_seconds: float | None
    tpot_seconds: float | None
    end_seconds: float
    attempts: int
    outcome: str


class Request:
    """One request; times are those of the simulation.

    After a failure it starts over with the tokens that it has emitted as a part of its prompt
    (``context_tokens``). ``attempts`` also tells an event that its attempt is over.
    """

    __slots__ = (
        "arrival",
        "attempts",
        "chunk_done",
        "context_tokens",
        "decode",
        "decode_hit_tokens",
        "first",
        "flow",
        "handed_over",
        "hashes",
        "joined_step",
        "late",
        "luck",
        "nbytes",
        "needs_tokens",
        "number",
        "output_tokens",
        "pieces",
        "prefill",
        "prefill_end",
        "prefill_hit_tokens",
        "prefill_start",
        "prompt_tokens",
        "room_asked",
        "room_given",
        "tokens_left",
    )

    def __init__(
        self, number: int, arrival: float, prompt_tokens: int, output_tokens: int, hashes: tuple[int, ...]
    ) -> None:
        self.number = number
        self.arrival = arrival
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes
        self.tokens_left = output_tokens
        self.first: float | None = None
        self.luck: float | None = None
        self.attempts = 0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget the attempt that failed."""
        self.attempts += 1
        self.context_tokens = self.prompt_tokens + self.output_tokens - self.tokens_left
        self.prefill: str | None = None
        self.decode: str | None = None
        self.flow: Flow | None = None
        self.prefill_hit_tokens = self.decode_hit_tokens = 0
        self.late = 1.0
        self.nbytes = self.pieces = self.needs_tokens = self.chunk_done = self.joined_step = 0
        self.prefill_start = self.prefill_end = self.arrival
        self.room_asked = self.room_given = self.handed_over = self.arrival

    def record(self, end: float, outcome: Outcome) -> RequestRecord:
        """What is kept, now that it has ended."""
        after_first = self.output_tokens - 1
        tpot = None
        if self.first is not None and after_first > 0 and outcome is Outcome.DONE:
            tpot = (end - self.first) / after_first
        return RequestRecord(
            self.number,
            self.arrival,
            self.prompt_tokens,
            self.output_tokens,
            self.prefill or "",
            self.decode or "",
            self.prefill_hit_tokens,
            self.decode_hit_tokens,
            self.nbytes,
            self.prefill_start - self.arrival,
            self.prefill_end - self.prefill_start,
            self.room_given - self.room_asked,
            self.handed_over - self.room_given,
            max(0.0, self.handed_over - max(self.prefill_end, self.room_given)),
            None if self.first is None else self.first - self.arrival,
            tpot,
            end,
            self.attempts,
            str(outcome),
        )
