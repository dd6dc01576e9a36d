"""How links drifted between two dates, and whether the spread of the measurements allows to say so."""

from __future__ import annotations

import enum
import math

import msgspec

from kvferry.errors import NoPlanError
from kvferry.link.copies import Shape, common_copies
from kvferry.link.profile import LinkFile, LinkProfile
from kvferry.link.records import LinkFit
from kvferry.link.words import Conditions

__all__ = ["Change", "Drift", "LinkDiff", "Verdict", "diff_links", "uncertainty"]

_BEYOND = 2.0
"""Combined uncertainties from which a change counts: about 95 % of unchanged links stay inside."""
_FLOOR = 0.01
"""No measurement is believed to repeat better than this."""


class Verdict(enum.StrEnum):
    """What became of a pair."""

    SAME = "same"
    SLOWER = "slower"
    FASTER = "faster"
    MIXED = "mixed"
    UNKNOWN = "unknown"


class Change(msgspec.Struct, frozen=True):
    """One copy then and now. ``change`` is new over old less one; ``noise`` is what it must exceed."""

    shape: Shape
    nbytes: int
    descriptors: int
    old_seconds: float
    new_seconds: float
    change: float
    noise: float
    old_p95_seconds: float | None
    new_p95_seconds: float | None

    @property
    def verdict(self) -> Verdict:
        """Slower or faster only beyond the noise."""
        if abs(math.log1p(self.change)) <= self.noise:
            return Verdict.SAME
        return Verdict.SLOWER if self.change > 0 else Verdict.FASTER


class Drift(msgspec.Struct, frozen=True):
    """One pair under one set of conditions, then and now.

    ``reasons`` say what else changed (the path, the date), or why nothing can be said.
    """

    pair: str
    conditions: str
    verdict: Verdict
    changes: tuple[Change, ...] = ()
    reasons: tuple[str, ...] = ()


class LinkDiff(msgspec.Struct, frozen=True):
    """All pairs of both files; those that only one of them has are named."""

    drifts: tuple[Drift, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]


_Measured = tuple[LinkProfile, Conditions, LinkFit]


def diff_links(old: LinkFile, new: LinkFile) -> LinkDiff:
    """Compare every pair and condition that both files have.

    A pair whose transport changed is still compared, where each file has only one for it.
    """
    before, after = _measured(old), _measured(new)
    pairs: list[tuple[_Measured, _Measured]] = []
    for with_transport in (True, False):
        mine, theirs = _by_key(before, with_transport), _by_key(after, with_transport)
        alike = [key for key in mine if len(mine[key]) == 1 == len(theirs.get(key, ()))]
        pairs += [(mine[key][0], theirs[key][0]) for key in alike]
        done = {id(entry) for pair in pairs for entry in pair}
        before, after = ([entry for entry in entries if id(entry) not in done] for entries in (before, after))
    return LinkDiff(
        drifts=tuple(_drift(mine, other) for mine, other in pairs),
        only_old=tuple(f"{pair.pair}: {conditions}" for pair, conditions, _ in before),
        only_new=tuple(f"{pair.pair}: {conditions}" for pair, conditions, _ in after),
    )


def _measured(links: LinkFile) -> list[_Measured]:
    return [(pair, entry.conditions, entry.fit) for pair in links.pairs for entry in pair.fits]


def _by_key(entries: list[_Measured], with_transport: bool) -> dict[tuple[object, ...], list[_Measured]]:
    found: dict[tuple[object, ...], list[_Measured]] = {}
    for entry in entries:
        pair, conditions, _ = entry
        transport = pair.transport if with_transport else ""
        found.setdefault((pair.from_node, pair.to_node, pair.via, transport, conditions), []).append(entry)
    return found


def _drift(old: _Measured, new: _Measured) -> Drift:
    (old_pair, conditions, old_fit), (new_pair, _, new_fit) = old, new
    reasons = [
        f"{what} was {before or 'not given'}, is {after or 'not given'}"
        for what, before, after in (
            ("transport", old_pair.transport, new_pair.transport),
            ("path", old_pair.path, new_pair.path),
            ("label", old_pair.label.split()[0], new_pair.label.split()[0]),
        )
        if before != after
    ]
    changes: list[Change] = []
    for copy in common_copies([old_fit, new_fit]):
        try:
            changes.append(_change(copy.shape, copy.nbytes, copy.descriptors, old_fit, new_fit))
        except NoPlanError as error:
            reasons.append(f"{copy.shape} copies: {error.message}")
    if not changes and not reasons:
        reasons.append("the two have no size of copy in common")
    return Drift(new_pair.pair, str(conditions), _verdict(changes), tuple(changes), tuple(reasons))


def _change(shape: Shape, nbytes: int, descriptors: int, old: LinkFit, new: LinkFit) -> Change:
    before, after = (fit.predict_quantile(0.5, nbytes, descriptors) for fit in (old, new))
    tails = (_tail(fit, nbytes, descriptors) for fit in (old, new))
    noise = _BEYOND * math.hypot(uncertainty(old, nbytes), uncertainty(new, nbytes))
    return Change(shape, nbytes, descriptors, before, after, after / before - 1, noise, *tails)


def _tail(fit: LinkFit, nbytes: int, descriptors: int) -> float | None:
    spread = fit.spread_at(nbytes)
    known = spread is not None and spread.ratio_or_none(0.95) is not None
    return fit.predict_quantile(0.95, nbytes, descriptors) if known else None


def uncertainty(fit: LinkFit, nbytes: int) -> float:
    """Relative standard error of a predicted typical copy: the fit's own error, and that of a median.

    The error of a median of n is 1.2533 of the mean's; the deviation is taken from p50 and p95 where
    both are known, so that a few stalls do not hide a drift.
    """
    spread = fit.spread_at(nbytes)
    if spread is None:
        return math.inf
    deviation = spread.deviation if spread.p95 is None else (spread.p95 - spread.p50) / 1.645
    of_median = 1.2533 * deviation / math.sqrt(spread.samples)
    return max(_FLOOR, math.hypot(fit.median_error or 0.0, of_median))


def _verdict(changes: list[Change]) -> Verdict:
    if not changes:
        return Verdict.UNKNOWN
    verdicts = {change.verdict for change in changes} - {Verdict.SAME}
    if len(verdicts) > 1:
        return Verdict.MIXED
    return verdicts.pop() if verdicts else Verdict.SAME
