"""The whole protocol of one transfer, as a table. Everything that affects transitions lives here.

Four seats: prefill and decode, each for push and pull. One side holds (an offer at prefill, a
reservation at decode) and waits for a claim; the other claims. From there both modes are the
same: bytes move, prefill vouches and commits, decode verifies and answers committed, its engine
starts, prefill frees. Before COMMITTED nothing is visible to decode's engine; after it
everything is, exactly once.

Rules of reading:
- A message or local call without a row is refused: the peer's fault for a message (the transfer
  is aborted), the caller's for a local call (nothing changes).
- Time and loss always have a row in every phase that is not final: no wait is without an end.
- Actions run in order. FREE gives blocks back only when no copy touches them any more.
- In the text, ``a, b`` in a cell stands for both, ``=`` for the same phase, ``*`` for each event
  that no earlier line of that phase names.
"""

from __future__ import annotations

import enum
import itertools
from dataclasses import dataclass

from kvferry.protocol.ticket import Mode

__all__ = [
    "FINAL",
    "IN_DOUBT",
    "MESSAGES",
    "ROWS",
    "START_PHASE",
    "TRUTH",
    "TRUTH_BY_DECODES_WORD",
    "Action",
    "Event",
    "Phase",
    "Role",
    "Row",
    "Wait",
    "phases_of",
]


class Role(enum.StrEnum):
    """Which worker this side is for the transfer."""

    PREFILL = "prefill"
    DECODE = "decode"


class Phase(enum.StrEnum):
    """Where one transfer stands, at one side."""

    HELD = "held"
    CLAIMING = "claiming"
    CHECKING = "checking"
    MOVING = "moving"
    SETTLING = "settling"
    VOUCHING = "vouching"
    COMMITTING = "committing"
    VERIFYING = "verifying"
    COMMITTED = "committed"
    ALONE = "alone"
    STARTING = "starting"
    ABORTING = "aborting"
    DONE = "done"
    FAILED = "failed"


class Event(enum.StrEnum):
    """What can happen to a transfer: a message from the peer, a local call, time, loss."""

    GOT_CLAIM = "got claim"
    GOT_OFFERED = "got offered"
    GOT_GRANTED = "got granted"
    GOT_BUSY = "got busy"
    GOT_READY = "got ready"
    GOT_PACK = "got pack"
    GOT_PACKED = "got packed"
    GOT_MOVED = "got moved"
    GOT_COMMIT = "got commit"
    GOT_COMMITTED = "got committed"
    GOT_MISMATCH = "got mismatch"
    GOT_STARTED = "got started"
    GOT_RELEASED = "got released"
    GOT_RENEW = "got renew"
    GOT_ABORT = "got abort"
    GOT_ABORTED = "got aborted"
    CHECKED = "checked"
    REFUSED = "refused"
    LAYERS = "layers ready"
    LANDED = "landed"
    COPIED = "copied"
    COPY_FAILED = "copy failed"
    FINISH = "finish"
    VOUCHED = "vouched"
    VERIFIED = "verified"
    START = "start"
    CANCEL = "cancel"
    LEASE_END = "lease end"
    DEADLINE = "deadline"
    PEER_LOST = "peer lost"


MESSAGES = frozenset(event for event in Event if event.value.startswith("got "))


class Action(enum.StrEnum):
    """What a side does on a transition; the session knows how."""

    SEND_CLAIM = "send claim"
    SEND_OFFERED = "send offered"
    SEND_GRANTED = "send granted"
    SEND_MOVED = "send moved"
    SEND_COMMIT = "send commit"
    SEND_COMMITTED = "send committed"
    SEND_MISMATCH = "send mismatch"
    SEND_STARTED = "send started"
    SEND_RELEASED = "send released"
    SEND_ABORT = "send abort"
    SEND_ABORTED = "send aborted"
    CHECK = "check"
    OPEN_GRANT = "open grant"
    CLOSE_GRANT = "close grant"
    COPY = "copy"
    PACK = "pack"
    SETTLE = "settle"
    STOP_COPY = "stop copy"
    VOUCH = "vouch"
    VERIFY = "verify"
    PUBLISH = "publish"
    RENEW = "renew"
    FREE = "free"
    FAIL = "fail"
    SUCCEED = "succeed"


class Wait(enum.StrEnum):
    """Whose clock ends a phase."""

    LEASE = "lease"
    TIMEOUT = "timeout"
    ABORT = "abort"


FINAL = frozenset({Phase.DONE, Phase.FAILED})
WAITS: dict[Phase, Wait] = {
    Phase.HELD: Wait.LEASE,
    Phase.CLAIMING: Wait.TIMEOUT,
    Phase.CHECKING: Wait.TIMEOUT,
    Phase.MOVING: Wait.TIMEOUT,
    Phase.SETTLING: Wait.TIMEOUT,
    Phase.VOUCHING: Wait.TIMEOUT,
    Phase.COMMITTING: Wait.TIMEOUT,
    Phase.VERIFYING: Wait.TIMEOUT,
    Phase.COMMITTED: Wait.LEASE,
    Phase.ALONE: Wait.LEASE,
    Phase.STARTING: Wait.TIMEOUT,
    Phase.ABORTING: Wait.ABORT,
}
START_PHASE: dict[tuple[Role, Mode], Phase] = {
    (Role.PREFILL, Mode.PULL): Phase.HELD,
    (Role.DECODE, Mode.PULL): Phase.CLAIMING,
    (Role.PREFILL, Mode.PUSH): Phase.CLAIMING,
    (Role.DECODE, Mode.PUSH): Phase.HELD,
}

# What is true at a side when a transfer ends in failure out of a phase.
_NOT_VISIBLE = "nothing became visible to decode's engine; the blocks of this side are free"
TRUTH: dict[tuple[Role, Phase], str] = {
    (Role.PREFILL, Phase.HELD): "nothing moved; prefill's blocks are free",
    (Role.PREFILL, Phase.CLAIMING): "nothing moved; prefill's blocks are free",
    (Role.PREFILL, Phase.MOVING): f"some blocks may have moved; {_NOT_VISIBLE}",
    (Role.PREFILL, Phase.VOUCHING): f"some or all blocks have moved; {_NOT_VISIBLE}",
    (
        Role.PREFILL,
        Phase.COMMITTING,
    ): "all blocks moved; whether decode committed is not known here, ask decode; prefill's blocks are free",
    (
        Role.PREFILL,
        Phase.COMMITTED,
    ): "decode has committed; whether it started is not known here, ask decode; prefill's blocks are free",
    (Role.DECODE, Phase.HELD): "nothing moved; decode's blocks are free",
    (
        Role.DECODE,
        Phase.CLAIMING,
    ): "nothing moved; decode's blocks are free; prefill keeps its copy until its lease ends",
    (Role.DECODE, Phase.CHECKING): "nothing moved; decode's blocks are free; prefill keeps its copy",
    (Role.DECODE, Phase.MOVING): f"some blocks may have moved; {_NOT_VISIBLE}",
    (Role.DECODE, Phase.SETTLING): f"some or all blocks have moved; {_NOT_VISIBLE}",
    (Role.DECODE, Phase.VERIFYING): f"all blocks have moved; {_NOT_VISIBLE}",
    (
        Role.DECODE,
        Phase.COMMITTED,
    ): "everything had arrived and was visible; decode gave it up; decode's blocks are free",
    (
        Role.DECODE,
        Phase.ALONE,
    ): "everything had arrived and was visible; decode gave it up; decode's blocks are free",
    (Role.DECODE, Phase.STARTING): "decode has started",
}

# Out of these phases prefill cannot know what decode has, unless decode's own word ended it.
IN_DOUBT = frozenset({(Role.PREFILL, Phase.COMMITTING), (Role.PREFILL, Phase.COMMITTED)})
TRUTH_BY_DECODES_WORD = (
    "all blocks moved; decode gave the request up and will not start it; prefill's blocks are free"
)


@dataclass(frozen=True, slots=True)
class Row:
    """In ``phase``, on ``event``: go to ``then`` and do ``actions``."""

    role: Role
    mode: Mode
    phase: Phase
    event: Event
    then: Phase
    actions: tuple[Action, ...] = ()


_TEXT = """
# role    | mode       | phases                                 | event           | then       | actions
prefill   | pull       | held                                   | got claim       | moving     | open grant, send offered
prefill   | pull       | moving                                 | got moved       | vouching   | close grant, vouch
prefill   | pull       | moving                                 | got pack        | =          | pack
prefill   | pull       | moving                                 | copied          | =          |
prefill   | push       | moving, vouching, committing           | got pack        | =          | pack
prefill   | push       | claiming                               | got granted     | moving     | open grant
prefill   | push       | claiming                               | got busy        | failed     | free, fail
prefill   | push       | moving                                 | layers ready    | =          | copy
prefill   | push       | moving                                 | copied          | =          |
prefill   | push       | moving                                 | finish          | vouching   | settle
prefill   | push       | vouching                               | copied          | =          | vouch
prefill   | push, pull | vouching                               | vouched         | committing | send commit
prefill   | push, pull | committing                             | got committed   | committed  | close grant
prefill   | push, pull | committing                             | got mismatch    | failed     | stop copy, close grant, free, fail
prefill   | push, pull | committed                              | got started     | done       | free, send released, succeed
prefill   | push, pull | committed                              | got abort       | failed     | send aborted, free, fail
prefill   | push, pull | committed                              | got renew       | =          | renew
prefill   | push, pull | committed                              | cancel          | =          |
prefill   | push, pull | committed                              | lease end       | failed     | free, fail
prefill   | push, pull | committed                              | deadline        | failed     | free, fail
prefill   | push, pull | committed                              | peer lost       | failed     | free, fail

decode    | pull       | claiming                               | got offered     | checking   | check
decode    | pull       | claiming                               | got busy        | failed     | free, fail
decode    | push       | held                                   | got claim       | checking   | check
decode    | pull       | checking                               | checked         | moving     | copy
decode    | push       | checking                               | checked         | moving     | open grant, send granted
decode    | push, pull | checking                               | refused         | aborting   | send abort
decode    | pull       | moving                                 | copied          | settling   | send moved
decode    | pull       | settling                               | got commit      | verifying  | verify
decode    | push, pull | moving                                 | got packed      | =          |
decode    | push       | moving                                 | got ready       | =          | copy
decode    | push       | moving                                 | copied, landed  | =          |
decode    | push       | moving                                 | got commit      | settling   | close grant, settle
decode    | push       | settling                               | copied          | verifying  | verify
decode    | push, pull | verifying                              | verified        | committed  | publish, send committed
decode    | push, pull | verifying                              | refused         | failed     | send mismatch, free, fail
decode    | push, pull | committed                              | start           | starting   | send started
decode    | push, pull | committed                              | cancel          | aborting   | send abort
decode    | push, pull | committed                              | got abort       | alone      | send aborted
decode    | push, pull | committed                              | peer lost       | alone      |
decode    | push, pull | committed                              | got renew       | =          | renew
decode    | push, pull | committed                              | lease end       | alone      |
decode    | push, pull | committed                              | deadline        | alone      |
decode    | push, pull | alone                                  | start           | done       | succeed
decode    | push, pull | alone                                  | cancel          | failed     | free, fail
decode    | push, pull | alone                                  | lease end       | done       | succeed
decode    | push, pull | alone                                  | deadline        | done       | succeed
decode    | push, pull | alone                                  | peer lost       | =          |
decode    | push, pull | alone                                  | got abort       | =          | send aborted
decode    | push, pull | alone                                  | got renew       | =          |
decode    | push, pull | starting                               | got released    | done       | succeed
decode    | push, pull | starting                               | got abort       | done       | send aborted, succeed
decode    | push, pull | starting                               | peer lost       | done       | succeed
decode    | push, pull | starting                               | lease end       | done       | succeed
decode    | push, pull | starting                               | deadline        | done       | succeed
decode    | push, pull | starting                               | got renew, cancel | =        |

# A hold that nobody has claimed.
prefill, decode | pull, push | held                             | got renew       | =          | renew
prefill, decode | pull, push | held                             | lease end, deadline, cancel, peer lost | failed | free, fail

# Under way: giving up is announced and acknowledged; a lost peer needs neither.
prefill, decode | pull, push | claiming, checking, moving, settling, vouching, committing, verifying | cancel, deadline, lease end, copy failed | aborting | stop copy, close grant, send abort
prefill, decode | pull, push | claiming, checking, moving, settling, vouching, committing, verifying | got abort   | failed | stop copy, close grant, send aborted, free, fail
prefill, decode | pull, push | claiming, checking, moving, settling, vouching, committing, verifying | peer lost   | failed | stop copy, close grant, free, fail
prefill, decode | pull, push | claiming, checking, moving, settling, vouching, committing, verifying | got renew   | =      | renew

# Aborting: what crosses our Abort on the way means nothing any more.
prefill, decode | pull, push | aborting                         | got aborted, got mismatch, got released, deadline, peer lost | failed | free, fail
prefill, decode | pull, push | aborting                         | got abort       | failed     | send aborted, free, fail
prefill, decode | pull, push | aborting                         | *               | =          |

prefill, decode | pull, push | done, failed                     | got abort       | =          | send aborted
prefill, decode | pull, push | done, failed                     | *               | =          |
"""  # noqa: E501 - a table reads by its columns


# Seats have only these phases; a shared line applies where the seat has the phase.
_PHASES: dict[tuple[Role, Mode], str] = {
    (Role.PREFILL, Mode.PULL): "held moving vouching committing committed aborting done failed",
    (Role.PREFILL, Mode.PUSH): "claiming moving vouching committing committed aborting done failed",
    (Role.DECODE, Mode.PULL): "claiming checking moving settling verifying committed alone starting aborting "
    "done failed",
    (Role.DECODE, Mode.PUSH): "held checking moving settling verifying committed alone starting aborting "
    "done failed",
}


def phases_of(role: Role, mode: Mode) -> frozenset[Phase]:
    """The phases that a seat can be in."""
    return frozenset(Phase(name) for name in _PHASES[role, mode].split())


def _cells(line: str) -> list[list[str]]:
    return [[item.strip() for item in cell.split(",") if item.strip()] for cell in line.split("|")]


def _parse(text: str) -> tuple[Row, ...]:
    rows: dict[tuple[Role, Mode, Phase, Event], Row] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        roles, modes, phases, events, (then,), actions = _cells(line)
        keys = itertools.product(
            map(Role, roles),
            map(Mode, modes),
            map(Phase, phases),
            Event if events == ["*"] else map(Event, events),
        )
        for role, mode, phase, event in keys:
            if phase not in phases_of(role, mode) or (events == ["*"] and (role, mode, phase, event) in rows):
                continue
            if (role, mode, phase, event) in rows:
                raise AssertionError(f"two lines for {role}, {mode}, {phase}, {event}")
            after = phase if then == "=" else Phase(then)
            rows[role, mode, phase, event] = Row(role, mode, phase, event, after, tuple(map(Action, actions)))
    return tuple(rows.values())


ROWS: tuple[Row, ...] = _parse(_TEXT)
