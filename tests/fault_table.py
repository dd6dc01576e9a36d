"""Every case of the fault matrix: what happens to a worker at which point, and how its peer must end."""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

from kvferry.protocol.table import Role
from kvferry.protocol.ticket import Mode

__all__ = ["CASES", "OK", "SCHEMES", "WIRES", "Case", "Fault"]

SCHEMES = tuple(os.environ.get("KVFERRY_FAULT_SCHEMES", "tcp,shm").split(","))
# Tcp between two hosts, as TransferRecord.path names it: these are the links that are cut.
WIRES = ("tcp-plain", "tcp-sealed")
# How a transfer may end for a worker: kinds of error, and the phase it was in.
Endings = frozenset[tuple[str, str]]
OK = ("ok", "")


class Fault(enum.StrEnum):
    """What happens to which process of the victim, or to its cable."""

    KILL_TRANSFER = "kill transfer"
    STOP_TRANSFER = "stop transfer"
    KILL_ENGINE = "kill engine"
    STOP_ENGINE = "stop engine"
    CUT_LINK = "cut link"


_STRUCK = tuple(fault for fault in Fault if fault is not Fault.CUT_LINK)
# One line a point: where the victim is (its trap, see fault_worker; tcp and shm where they differ;
# nothing where it idles), in which phases the survivor's transfer may then fail, and how it ends
# for each Fault: a kind of error, or "ok" for a handoff that goes through. Two kinds stand where
# the order of two processes' last steps is not ours to choose.
_TEXT = """
# victim | mode | point      | trap                 | survivor fails while                    | kill transfer | stop transfer | kill engine             | stop engine
prefill  | pull | handshake  | receive Hello        | handshake claiming                      | transport     | deadline      | transport peer deadline | ok
prefill  | pull | held       |                      | handshake connect claiming claim        | transport     | deadline      | transport peer deadline | ok
prefill  | pull | moving     | enter moving         | claiming checking moving settling       | transport     | deadline      | transport peer          | ok
prefill  | pull | copying    | serve                | moving settling                         | transport     | deadline      | transport peer          | ok
prefill  | pull | vouching   | enter vouching       | settling                                | transport     | deadline      | transport peer ok       | ok
prefill  | pull | committing | enter committing     | settling                                | transport     | deadline      | transport peer ok       | ok
prefill  | pull | committed  | enter committed      |                                         | ok            | ok            | ok                      | ok
prefill  | pull | aborting   | serve                | moving                                  | local         | local         | local                   | local

prefill  | push | handshake  | send Hello           | held checking moving                    | deadline      | deadline      | deadline transport peer | deadline
prefill  | push | claiming   | send Claim           | held checking moving                    | deadline      | deadline      | deadline transport peer | deadline
prefill  | push | moving     | enter moving         | moving                                  | transport     | deadline      | transport peer          | deadline
prefill  | push | copying    | write, serve         | moving settling                         | transport     | deadline      | transport peer          | deadline ok
prefill  | push | vouching   | enter vouching       | moving settling                         | transport     | deadline      | transport peer ok       | ok
prefill  | push | committing | enter committing     | moving settling                         | transport     | deadline      | transport peer ok       | ok
prefill  | push | committed  | enter committed      |                                         | ok            | ok            | ok                      | ok
prefill  | push | aborting   | write, serve         | moving settling                         | local         | local         | local                   | local

decode   | pull | handshake  | send Hello           | held moving vouching committing committed | deadline    | deadline      | deadline transport peer | deadline
decode   | pull | claiming   | send Claim           | held moving vouching committing committed | deadline    | deadline      | deadline transport peer | deadline
decode   | pull | checking   | enter checking       | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | moving     | enter moving         | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | copying    | read                 | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | settling   | enter settling       | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | pull | verifying  | enter verifying      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | pull | committed  | enter committed      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | pull | published  |                      | committing committed                         | transport     | deadline      | transport peer          | deadline
decode   | pull | starting   | enter starting       | committed                               | transport     | deadline      | transport peer ok       | ok
decode   | pull | aborting   | read                 | moving                                  | local         | local         | local                   | local

decode   | push | handshake  | receive Hello        | handshake claiming committed            | transport     | deadline      | transport peer deadline | deadline
decode   | push | held       |                      | handshake connect claiming claim committed | transport  | deadline      | transport peer deadline | deadline
decode   | push | checking   | enter checking       | claiming moving vouching committing committed | transport | deadline    | transport peer          | deadline
decode   | push | moving     | enter moving         | claiming moving vouching committing committed | transport | deadline    | transport peer          | deadline
decode   | push | copying    | serve, read          | moving vouching committing committed    | transport     | deadline      | transport peer          | deadline
decode   | push | settling   | enter settling       | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | verifying  | enter verifying      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | committed  | enter committed      | committing committed                    | transport     | deadline      | transport peer          | deadline
decode   | push | published  |                      | committing committed                         | transport     | deadline      | transport peer          | deadline
decode   | push | starting   | enter starting       | committed                               | transport     | deadline      | transport peer ok       | ok
decode   | push | aborting   | serve, read          | moving vouching committing              | local         | local         | local                   | local
"""  # noqa: E501 - a table reads by its columns

# When the victim's cable is pulled at that point nobody dies: how it ends for either, "kinds: phases".
_CUTS = """
# victim | mode | point      | survivor                              | victim
prefill  | pull | handshake  | deadline: handshake                   | deadline: held
prefill  | pull | held       | deadline: connect handshake claiming  | deadline: held
prefill  | pull | moving     | deadline: claiming                    | deadline: moving
prefill  | pull | copying    | deadline: moving                      | deadline: moving
prefill  | pull | vouching   | deadline: settling                    | deadline: committing
prefill  | pull | committing | deadline: settling                    | deadline: committing
prefill  | pull | committed  | ok                                    | ok, deadline: committed
prefill  | pull | aborting   | local: moving                         | peer deadline: moving

prefill  | push | handshake  | deadline: held                        | deadline: handshake
prefill  | push | claiming   | deadline: held                        | deadline: claiming
prefill  | push | moving     | deadline: moving                      | deadline: vouching committing
prefill  | push | copying    | deadline: moving                      | deadline: vouching committing
prefill  | push | vouching   | deadline: moving                      | deadline: vouching committing
prefill  | push | committing | deadline: moving                      | deadline: committing
prefill  | push | committed  | ok                                    | ok, deadline: committed
prefill  | push | aborting   | local: moving                         | peer deadline: moving vouching

decode   | pull | handshake  | deadline: held                        | deadline: handshake
decode   | pull | claiming   | deadline: held                        | deadline: claiming
decode   | pull | checking   | deadline: moving                      | deadline: moving
decode   | pull | moving     | deadline: moving                      | deadline: moving
decode   | pull | copying    | deadline: moving                      | deadline: moving
decode   | pull | settling   | deadline: moving                      | deadline: settling
decode   | pull | verifying  | deadline: committing                  | ok
decode   | pull | committed  | deadline: committing                  | ok
decode   | pull | published  | deadline: committed                   | ok
decode   | pull | starting   | deadline: committed                   | ok
decode   | pull | aborting   | local: moving                         | peer deadline: moving

decode   | push | handshake  | deadline: handshake                   | deadline: held
decode   | push | held       | deadline: connect handshake claiming  | deadline: held
decode   | push | checking   | deadline: claiming                    | deadline: moving
decode   | push | moving     | deadline: claiming                    | deadline: moving
decode   | push | copying    | deadline: moving vouching committing  | deadline: moving
decode   | push | settling   | deadline: committing                  | ok
decode   | push | verifying  | deadline: committing                  | ok
decode   | push | committed  | deadline: committing                  | ok
decode   | push | published  | deadline: committed                   | ok
decode   | push | starting   | deadline: committed                   | ok
decode   | push | aborting   | local: moving vouching committing     | peer deadline: moving
"""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault at one point, and how the survivor's transfer must end."""

    victim: Role
    mode: Mode
    point: str
    fault: Fault
    scheme: str
    trap: str
    endings: Endings
    victims_endings: Endings = frozenset()

    @property
    def transport(self) -> str:
        """What carries it; a wire is tcp too."""
        return "tcp" if self.scheme in WIRES else self.scheme

    def __str__(self) -> str:
        return f"{self.victim}-{self.mode}-{self.point}-{self.fault}-{self.scheme}".replace(" ", "-")


def _cells(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line and not line.startswith("#"):
            yield [cell.strip() for cell in line.split("|")]


def _parse(text: str) -> Iterator[Case]:
    for victim, mode, point, trap, phases, *endings in _cells(text):
        traps = [one.strip() for one in trap.split(",")]
        for (fault, kinds), (scheme, where) in itertools.product(
            # Only tcp writes; by the others decode reads, also what is pushed.
            zip(_STRUCK, endings, strict=True),
            ((scheme, traps[0 if scheme == "tcp" else -1]) for scheme in SCHEMES),
        ):
            allowed = itertools.product(kinds.split(), phases.split())
            ends = frozenset({*allowed, *([OK] if "ok" in kinds.split() else [])})
            yield Case(Role(victim), Mode(mode), point, fault, scheme, where, ends)


def _parse_cuts(text: str) -> Iterator[Case]:
    traps = {(*where,): trap.split(",")[0] for *where, trap, _ in (row[:5] for row in _cells(_TEXT))}
    for victim, mode, point, *both in _cells(text):
        for scheme in WIRES:
            trap = traps[victim, mode, point]
            yield Case(Role(victim), Mode(mode), point, Fault.CUT_LINK, scheme, trap, *map(_endings, both))


def _endings(cell: str) -> Endings:
    """``ok, peer deadline: held moving`` as pairs."""
    found = [part.partition(":") for part in cell.split(",")]
    pairs = [itertools.product(kinds.split(), phases.split() or [""]) for kinds, _, phases in found]
    return frozenset(itertools.chain(*pairs))


CASES = (*_parse(_TEXT), *(_parse_cuts(_CUTS) if "tcp" in SCHEMES else ()))
