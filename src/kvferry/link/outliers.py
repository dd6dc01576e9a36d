"""Pairs that are slow against the median of their class, each with the likely reason."""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Sequence

import msgspec

from kvferry.link.copies import Copy, Shape, common_copies
from kvferry.link.profile import LinkFile, LinkProfile
from kvferry.link.records import LinkFit
from kvferry.link.words import Conditions

__all__ = ["Outlier", "Reason", "find_outliers"]

_SLOW = 1.25
"""Times the median of the class from which a pair is called slow; beyond what a fit is wrong by."""
_MANY = 3
"""A median of fewer pairs says nothing about any of them."""
_MOST = 0.6
"""Share of a node's pairs that must be slow before the node is named and not the pairs."""


class Reason(enum.StrEnum):
    """Why a pair is likely slow, the most telling first."""

    FELL_BACK = "another transport or path than the others of its class"
    NODE_SENDS = "this node sends slowly to all"
    NODE_RECEIVES = "this node receives slowly from all"
    ONE_DIRECTION = "the other direction is not slow"
    DESCRIPTORS = "many small descriptors cost more than on the others"
    START = "the start of a copy costs more than on the others"
    RATE = "the rate is lower than on the others"


class Outlier(msgspec.Struct, frozen=True):
    """A slow pair.

    Args:
        ratio: its seconds over the median of its class, for the copy where that is worst.
        reasons: every one that fits, the most telling first.
        detail: the same in words, with names.
    """

    pair: str
    link_class: str
    conditions: str
    shape: Shape
    nbytes: int
    descriptors: int
    seconds: float
    median_seconds: float
    ratio: float
    reasons: tuple[Reason, ...]
    detail: str


class _Member(msgspec.Struct, frozen=True):
    """A pair of a class: its fastest profile, and its seconds and their ratio to the median, by copy."""

    profile: LinkProfile
    seconds: tuple[float, ...]
    ratios: tuple[float, ...] = ()

    @property
    def is_slow(self) -> bool:
        return max(self.ratios) > _SLOW


class _Class(msgspec.Struct, frozen=True):
    """Pairs that should be alike, the copies they are compared by, and the median seconds of each."""

    name: str
    conditions: Conditions
    copies: tuple[Copy, ...]
    medians: tuple[float, ...]
    members: tuple[_Member, ...]


def find_outliers(links: LinkFile) -> tuple[Outlier, ...]:
    """The slow pairs of every class of three pairs or more, slowest first; only measured ones count.

    A pair that was measured over several transports counts with its fastest. A pair whose fit does not
    cover what the others have in common is left out.
    """
    classes: dict[tuple[str, Conditions], list[tuple[LinkProfile, LinkFit]]] = {}
    for pair in links.pairs:
        for entry in pair.fits:
            if pair.measured and pair.from_node != pair.to_node:
                classes.setdefault((pair.link_class, entry.conditions), []).append((pair, entry.fit))
    found = []
    for (name, conditions), fits in classes.items():
        group = _class(name, conditions, fits)
        if group is not None:
            found += [_outlier(member, group) for member in group.members if member.is_slow]
    return tuple(sorted(found, key=lambda outlier: -outlier.ratio))


def _class(name: str, conditions: Conditions, fits: Sequence[tuple[LinkProfile, LinkFit]]) -> _Class | None:
    copies = common_copies([fit for _, fit in fits])
    members = _fastest(fits, copies)
    if not copies or len(members) < _MANY:
        return None
    medians = tuple(map(statistics.median, zip(*(member.seconds for member in members), strict=True)))
    judged = [
        msgspec.structs.replace(
            member,
            ratios=tuple(mine / median for mine, median in zip(member.seconds, medians, strict=True)),
        )
        for member in members
    ]
    return _Class(name, conditions, copies, medians, tuple(judged))


def _fastest(fits: Sequence[tuple[LinkProfile, LinkFit]], copies: Sequence[Copy]) -> list[_Member]:
    best: dict[tuple[str, str], _Member] = {}
    for profile, fit in fits:
        if any(fit.why_unknown(copy.nbytes, copy.descriptors) is not None for copy in copies):
            continue
        seconds = tuple(fit.predict(copy.nbytes, copy.descriptors) for copy in copies)
        key = (profile.from_node, profile.to_node)
        if key not in best or seconds < best[key].seconds:
            best[key] = _Member(profile, seconds)
    return list(best.values())


def _outlier(member: _Member, group: _Class) -> Outlier:
    worst = max(range(len(group.copies)), key=lambda index: member.ratios[index])
    copy = group.copies[worst]
    reasons = _reasons(member, group.members, copy.shape)
    return Outlier(
        pair=member.profile.pair,
        link_class=group.name,
        conditions=str(group.conditions),
        shape=copy.shape,
        nbytes=copy.nbytes,
        descriptors=copy.descriptors,
        seconds=member.seconds[worst],
        median_seconds=group.medians[worst],
        ratio=member.ratios[worst],
        reasons=tuple(reasons),
        detail="; ".join(_detail(reason, member.profile, group.members) for reason in reasons),
    )


def _reasons(member: _Member, members: Sequence[_Member], shape: Shape) -> list[Reason]:
    mine = member.profile
    reasons = []
    if _way(mine) != _usual_way(members):
        reasons.append(Reason.FELL_BACK)
    if _is_slow_to_all([m for m in members if m.profile.from_node == mine.from_node]):
        reasons.append(Reason.NODE_SENDS)
    if _is_slow_to_all([m for m in members if m.profile.to_node == mine.to_node]):
        reasons.append(Reason.NODE_RECEIVES)
    back = [m for m in members if (m.profile.from_node, m.profile.to_node) == (mine.to_node, mine.from_node)]
    if back and not back[0].is_slow:
        reasons.append(Reason.ONE_DIRECTION)
    by_shape = {
        Shape.LARGE: Reason.RATE,
        Shape.SCATTERED: Reason.DESCRIPTORS,
        Shape.SMALL: Reason.START,
    }
    return [*reasons, by_shape[shape]]


def _is_slow_to_all(members: Sequence[_Member]) -> bool:
    slow = sum(member.is_slow for member in members)
    return slow >= 2 and slow >= _MOST * len(members)


def _way(profile: LinkProfile) -> str:
    return f"{profile.transport}, {profile.path}" if profile.path else profile.transport


def _usual_way(members: Sequence[_Member]) -> str:
    return Counter(_way(member.profile) for member in members).most_common(1)[0][0]


def _detail(reason: Reason, profile: LinkProfile, members: Sequence[_Member]) -> str:
    if reason is Reason.FELL_BACK:
        return f"it used {_way(profile)}; most of its class use {_usual_way(members)}"
    if reason is Reason.NODE_SENDS:
        return f"{profile.from_node} sends slowly to all"
    if reason is Reason.NODE_RECEIVES:
        return f"{profile.to_node} receives slowly from all"
    if reason is Reason.ONE_DIRECTION:
        return f"{profile.to_node} -> {profile.from_node} is not slow"
    return str(reason)
