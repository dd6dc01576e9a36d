"""What is known of a pair of nodes (LinkProfile), and the file that holds many pairs (LinkFile).

Everything in them is plain data from the outside: dates, versions and host facts are arguments.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvferry.errors import InputError, NoPlanError
from kvferry.link.records import LinkFit, Sample
from kvferry.link.words import Conditions, Count, Mode, Name, Record, Seconds

__all__ = [
    "ANY_NODE",
    "FORMAT",
    "VERSION",
    "ConditionFit",
    "LinkFile",
    "LinkProfile",
    "Node",
    "Registration",
]

FORMAT: Literal["kvferry-links"] = "kvferry-links"
VERSION: Literal[1] = 1
ANY_NODE = "any"
"""Name of both ends of a preset: it is about no node in particular."""

Text = Annotated[str, Meta(max_length=1024)]
Facts = Annotated[dict[Name, Text], Meta(max_length=64)]
Date = Annotated[datetime, Meta(tz=True)]


class Node(Record, frozen=True, kw_only=True):
    """An endpoint that was measured: its name in this file, where it listened, and what it runs on.

    Args:
        host: the machine; two nodes of one host share its links.
        software: name to version (kvferry, python, the transport's library).
        facts: name to value (kernel, cpu, nic, mtu).
    """

    name: Name
    address: Text = ""
    host: Text = ""
    software: Facts = msgspec.field(default_factory=dict)
    facts: Facts = msgspec.field(default_factory=dict)


class Registration(Record, frozen=True, kw_only=True):
    """Making memory known to the transport: once, at start-up, never a part of a copy's time."""

    nbytes: Count
    seconds: Seconds


class ConditionFit(Conditions, frozen=True, kw_only=True):
    """The fit under one set of conditions.

    Args:
        date: when, where it is not the profile's date (a file merged from several runs).
    """

    fit: LinkFit
    date: Date | None = None


class LinkProfile(
    Record, frozen=True, kw_only=True, rename={"from_node": "from", "to_node": "to", "link_class": "class"}
):
    """One direction of one pair of nodes over one transport.

    Args:
        from_node, to_node: who has the bytes, and who gets them (``from``, ``to`` in the file).
        transport: the transport that was used.
        path: what it used underneath (``shm: memfd``, ``tcp: 2 streams``), or "".
        via: the proxy or mesh in between, or "".
        link_class: pairs of one class should be alike (``same host``, ``same rack``); "" is a class too.
        line_rate: brochure bytes a second of the link, where one was given.
        measured: False for brochure rates; a plan made from one is marked.
        date: when; None only where nothing was measured.
        fits: by conditions, each once; they may be of older dates, never of newer ones.
        registration: what the memory's registration took, or None.
        first_contact_seconds: what the first copy over a new connection took more than a warm one.
        samples: the copies themselves, or none where only the fits are kept.
        note: a line for the reader.
    """

    from_node: Name
    to_node: Name
    transport: Name
    path: Text = ""
    via: Text = ""
    link_class: Text = ""
    line_rate: Annotated[float, Meta(gt=0, le=1e15)] | None = None
    measured: bool
    date: Date | None = None
    fits: Annotated[tuple[ConditionFit, ...], Meta(min_length=1, max_length=256)]
    registration: Registration | None = None
    first_contact_seconds: Annotated[float, Meta(ge=0, le=1e6)] | None = None
    samples: tuple[Sample, ...] = ()
    note: Text = ""

    def __post_init__(self) -> None:
        if len({entry.conditions for entry in self.fits}) < len(self.fits):
            raise ValueError("fits: the same conditions come twice")
        if self.measured and self.date is None:
            raise ValueError("date: missing, and measured is true")
        if self.measured and not all(entry.fit.samples for entry in self.fits):
            raise ValueError("samples: a fit has none, and measured is true")
        if self.date and any(entry.date and entry.date > self.date for entry in self.fits):
            raise ValueError("date: a fit is newer than its profile")

    @property
    def label(self) -> str:
        """``measured 2026-03-01`` or ``unmeasured``."""
        return _label(self.date if self.measured else None)

    def label_of(self, entry: ConditionFit) -> str:
        """The same of one fit, which may be older than its profile."""
        return _label(self.date_of(entry) if self.measured else None)

    @property
    def pair(self) -> str:
        """``a -> b over tcp``, with what is in between."""
        via = f" via {self.via}" if self.via else ""
        return f"{self.from_node} -> {self.to_node} over {self.transport}{via}"

    def date_of(self, entry: ConditionFit) -> datetime | None:
        """When that fit was measured."""
        return entry.date or self.date

    def fit(
        self, mode: Mode | str = Mode.PULL, *, tls: bool = False, incast: int = 1, under_load: bool = False
    ) -> LinkFit:
        """The fit under these conditions. A preset answers for every condition.

        Raises NoPlanError that lists the conditions that were measured.
        """
        wanted = Conditions(mode=Mode(mode), tls=tls, incast=incast, under_load=under_load)
        for entry in self.fits:
            if not self.measured or entry.conditions == wanted:
                return entry.fit
        known = "; ".join(str(entry.conditions) for entry in self.fits)
        raise NoPlanError(
            f"{self.pair}: not measured under {wanted}; measured: {known}", next_step="probe it so"
        )


def _label(date: datetime | None) -> str:
    return f"measured {date:%Y-%m-%d}" if date else "unmeasured"


class LinkFile(Record, frozen=True, kw_only=True, omit_defaults=False):
    """Many pairs, and the nodes they are between."""

    format: Literal["kvferry-links"] = FORMAT
    version: Literal[1] = VERSION
    nodes: tuple[Node, ...] = ()
    pairs: tuple[LinkProfile, ...]

    def between(self, from_node: str, to_node: str) -> tuple[LinkProfile, ...]:
        """All profiles of that direction, one a transport (and proxy); a preset is between any two."""
        ends = {(from_node, to_node), (ANY_NODE, ANY_NODE)}
        return tuple(pair for pair in self.pairs if (pair.from_node, pair.to_node) in ends)

    def select(
        self, from_node: str | None = None, to_node: str | None = None, transport: str | None = None
    ) -> LinkProfile:
        """The only profile that fits what is given. Raises InputError that lists the candidates."""
        found = [
            pair
            for pair in self.pairs
            if (from_node is None or pair.from_node in (from_node, ANY_NODE))
            and (to_node is None or pair.to_node in (to_node, ANY_NODE))
            and transport in (None, pair.transport)
        ]
        if len(found) == 1:
            return found[0]
        shown = "; ".join(pair.pair for pair in (found or self.pairs)[:8])
        raise InputError(
            f"link: {len(found)} pairs fit what was asked; of: {shown or 'none'}",
            next_step="choose one by from_node, to_node and transport",
        )
