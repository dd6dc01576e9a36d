"""Several link files into one: the newest measurement of each pair and condition, or all samples together."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from kvferry.errors import InputError
from kvferry.link.fit import fit_link
from kvferry.link.profile import ConditionFit, LinkFile, LinkProfile, Node
from kvferry.link.records import Sample
from kvferry.link.words import Conditions

__all__ = ["How", "Merged", "merge_links"]

T = TypeVar("T")

_NEVER = datetime.min.replace(tzinfo=UTC)


class How(enum.StrEnum):
    """What becomes of a pair and condition that several files have."""

    NEWEST = "newest"
    POOL = "pool"


class Merged(msgspec.Struct, frozen=True):
    """The merged file, and in words every choice that was made."""

    links: LinkFile
    notes: tuple[str, ...]


def merge_links(files: Sequence[LinkFile], how: How = How.NEWEST) -> Merged:
    """One file with every pair of all of them.

    NEWEST: under each set of conditions the newest measurement of a pair stays, whole; of equal dates
    that of the later file. POOL: the samples of all are fitted together; raises InputError where one
    of them kept no samples. A measurement always replaces a brochure rate.
    """
    if not files:
        raise InputError("files: give one link file at least")
    groups: dict[str, list[LinkProfile]] = {}
    for links in files:
        for pair in links.pairs:
            groups.setdefault(pair.pair, []).append(pair)
    notes: list[str] = []
    pairs = tuple(_merge_pair(found, how, notes) for found in groups.values())
    return Merged(LinkFile(nodes=_merge_nodes(files, notes), pairs=pairs), tuple(notes))


def _merge_pair(found: list[LinkProfile], how: How, notes: list[str]) -> LinkProfile:
    measured = [pair for pair in found if pair.measured]
    if measured and len(measured) < len(found):
        notes.append(f"{found[0].pair}: measured, so the brochure rate is dropped")
    # A stable sort: of equal dates, the later file comes last and stays.
    ordered = sorted(measured or found, key=lambda pair: pair.date or _NEVER)
    newest = msgspec.structs.replace(
        ordered[-1],
        registration=_last([pair.registration for pair in ordered]),
        first_contact_seconds=_last([pair.first_contact_seconds for pair in ordered]),
    )
    if len(ordered) == 1:
        return newest
    ordered[-1] = newest
    if len({pair.path for pair in ordered}) > 1:
        paths = ", ".join(sorted({pair.path or "not given" for pair in ordered}))
        notes.append(f"{newest.pair}: over several paths ({paths})")
    if how is How.POOL and newest.measured:
        return _pooled(ordered, notes)
    fits = {entry.conditions: (pair, entry) for pair in ordered for entry in pair.fits}
    for conditions, (kept, _) in fits.items():
        dropped = [pair.label for pair in ordered if pair is not kept and _has(pair, conditions)]
        if dropped:
            notes.append(f"{newest.pair}: {conditions}: kept {kept.label}, dropped {', '.join(dropped)}")
    return msgspec.structs.replace(
        newest,
        fits=tuple(
            msgspec.structs.replace(entry, date=None if pair is newest else pair.date_of(entry))
            for pair, entry in fits.values()
        ),
        samples=tuple(
            sample
            for pair in ordered
            for sample in pair.samples
            if sample.conditions not in fits or fits[sample.conditions][0] is pair
        ),
    )


def _last(values: Sequence[T | None]) -> T | None:
    return next((value for value in reversed(values) if value is not None), None)


def _has(pair: LinkProfile, conditions: Conditions) -> bool:
    return any(entry.conditions == conditions for entry in pair.fits)


def _pooled(ordered: list[LinkProfile], notes: list[str]) -> LinkProfile:
    newest = ordered[-1]
    for pair in ordered:
        lacking = {entry.conditions for entry in pair.fits} - {sample.conditions for sample in pair.samples}
        if lacking:
            raise InputError(
                f"pool: {pair.pair}, {pair.label}: {'; '.join(sorted(map(str, lacking)))}: kept no samples"
            )
    samples: dict[Conditions, list[Sample]] = {}
    for pair in ordered:
        for sample in pair.samples:
            samples.setdefault(sample.conditions, []).append(sample)
    wanted = {entry.conditions: None for pair in ordered for entry in pair.fits}
    fits = tuple(
        ConditionFit(**msgspec.structs.asdict(conditions), fit=fit_link(samples[conditions]))
        for conditions in wanted
    )
    notes.append(f"{newest.pair}: pooled the samples of {', '.join(pair.label for pair in ordered)}")
    pooled = tuple(sample for some in samples.values() for sample in some)
    return msgspec.structs.replace(newest, fits=fits, samples=pooled)


def _merge_nodes(files: Sequence[LinkFile], notes: list[str]) -> tuple[Node, ...]:
    def newest(links: LinkFile) -> datetime:
        return max((pair.date for pair in links.pairs if pair.date), default=_NEVER)

    nodes: dict[str, Node] = {}
    for links in sorted(files, key=newest):
        for node in links.nodes:
            if nodes.get(node.name, node) != node:
                notes.append(f"node {node.name}: its facts changed; kept those of the newest file")
            nodes[node.name] = node
    return tuple(nodes.values())
