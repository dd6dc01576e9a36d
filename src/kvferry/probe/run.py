"""A whole probe: every stage of its schedule within the time, failures apart, one link file at the end."""

from __future__ import annotations

import asyncio
import datetime as dt
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.errors import KVFerryError, LocalError, NoPlanError
from kvferry.link import (
    ConditionFit,
    Conditions,
    LinkFile,
    LinkProfile,
    Node,
    Sample,
    fit_link,
)
from kvferry.probe import words as w
from kvferry.probe.payload import Room, sizes_up_to
from kvferry.probe.plan import STAGE_SECONDS, ProbePlan, link_class, names_of, passes_of
from kvferry.probe.schedule import Group, Stage
from kvferry.probe.site import OPEN_SECONDS, Site, close_all
from kvferry.probe.sweep import Flow, Limits, sweep

__all__ = ["FLOWS_WITH_SAMPLES", "Failure", "ProbeResult", "Progress", "probe_sites"]

# A probe outlives its time at the nodes: opening the others, and the last copies, come on top.
GRACE_SECONDS = 120.0
# A pair's copies in one direction and mode take some 30 KB of a link file, their fit 1 KB (docs/scale.md).
FLOWS_WITH_SAMPLES = 1024


class Failure(msgspec.Struct, frozen=True, kw_only=True, rename={"from_node": "from", "to_node": "to"}):
    """A pair that could not be measured under some conditions, and why. ``kind`` is the error's."""

    from_node: str
    to_node: str
    transport: str
    conditions: str
    kind: str
    reason: str


class Progress(msgspec.Struct, frozen=True):
    """How far a probe is: stages begun of all, and how much of this one is done (0 to 1)."""

    stage: int
    stages: int
    share: float
    what: str


@dataclass(slots=True)
class ProbeResult:
    """The links that were measured, the pairs that were not, and what to know about either."""

    links: LinkFile
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


async def probe_sites(
    sites: Sequence[Site], plan: ProbePlan, on_progress: Callable[[Progress], None]
) -> ProbeResult:
    """Probe every pair of ``sites``; they are closed at the end, whatever happens.

    A node that is lost ends its own pairs; the rest goes on. Raises InputError for a plan that these
    sites cannot carry out, and whatever opening the probe at a node raised.
    """
    try:
        return await _Run(sites, plan, on_progress).go()
    finally:
        await close_all(sites)


class _Run:
    def __init__(
        self, sites: Sequence[Site], plan: ProbePlan, on_progress: Callable[[Progress], None]
    ) -> None:
        self._sites = sites
        self._plan = plan
        self._on_progress = on_progress
        self._names = names_of(sites)
        self._payloads = sizes_up_to(plan.largest)
        self._passes = passes_of(sites, plan)
        self._count = sum(len(stages) for _, stages in self._passes)
        flows = sum(len(group.pairs) for _, stages in self._passes for stage in stages for group in stage)
        self._keeps_samples = flows <= FLOWS_WITH_SAMPLES
        self._flows: list[Flow] = []
        self._connected: set[tuple[str, str, str]] = set()

    async def go(self) -> ProbeResult:
        started = time.monotonic()
        seconds = STAGE_SECONDS * self._count if self._plan.seconds is None else self._plan.seconds
        left = self._count
        for tls, stages in self._passes:
            await self._open(seconds, tls=tls)
            for stage in stages:
                now = time.monotonic()
                await self._measure(self._count - left, stage, now + max(0.0, seconds) / left, tls=tls)
                seconds -= time.monotonic() - now
                left -= 1
            await self._shut()
        result = self._result()
        result.seconds = time.monotonic() - started
        return result

    async def _open(self, seconds: float, *, tls: bool) -> None:
        """At every node that is there; one that cannot is left out, as long as a pair is left."""
        by_host: dict[str, list[Site]] = {}
        for site in self._sites:
            if site.error is None:
                by_host.setdefault(site.about.host_id or site.address, []).append(site)
        await asyncio.gather(*(self._open_host(sites, seconds, tls=tls) for sites in by_host.values()))
        alive = [site for site in self._sites if site.error is None]
        if len(alive) < 2:
            lost = next(site.error for site in self._sites if site.error is not None)
            raise lost
        self._connected.clear()  # each pass has endpoints of its own

    async def _open_host(self, sites: Sequence[Site], seconds: float, *, tls: bool) -> None:
        """One after the other, so that registration is not measured beside another one's start."""
        plan = self._plan
        room = Room.of(self._payloads, slots=max(1, plan.incast))
        for site in sites:
            try:
                await site.open(
                    max(0.0, seconds) + GRACE_SECONDS,
                    room=room,
                    transports=plan.transports,
                    integrity=plan.integrity,
                    tls=tls,
                    via=plan.via,
                )
            except KVFerryError as error:
                site.error = site.error or error  # it is of no use to this probe

    async def _shut(self) -> None:
        """The end of a pass."""
        await asyncio.gather(
            *(site.call(w.CloseCall, OPEN_SECONDS) for site in self._sites if site.error is None),
            return_exceptions=True,  # a node that is lost is found out by whoever asks it next
        )

    async def _measure(self, index: int, stage: Stage, deadline: float, *, tls: bool) -> None:
        limits = Limits(self._plan.repeats, deadline)

        def on_visit(share: float) -> None:
            self._on_progress(Progress(index, self._count, share, self._describe(stage)))

        on_visit(0.0)
        await asyncio.gather(*(self._measure_group(group, limits, on_visit, tls=tls) for group in stage))

    async def _measure_group(
        self, group: Group, limits: Limits, on_visit: Callable[[float], None], *, tls: bool
    ) -> None:
        flows = [self._flow(group, slot, tls=tls) for slot in range(len(group.pairs))]
        self._flows += flows
        for flow in flows:
            flow.error = flow.source.error or flow.target.error
        able = [flow for flow in flows if flow.error is None]
        if group.incast > 1 and len(able) < len(flows):
            able = []
        await sweep(able, self._payloads, limits, on_visit, all_or_none=group.incast > 1)
        for flow in flows:
            try:
                flow.fit = _fit(flow)
            except KVFerryError as error:
                flow.error = error
            if not self._keeps_samples:
                flow.samples.clear()
                flow.seconds.clear()

    def _flow(self, group: Group, number: int, *, tls: bool) -> Flow:
        source, target = (self._sites[node] for node in group.pairs[number])
        flow = Flow(
            source,
            target,
            group.mode,
            group.transport,
            Conditions(
                mode=group.mode,
                tls=tls and group.transport == "tcp",
                incast=group.incast,
                under_load=group.under_load,
            ),
            slot=number if group.incast > 1 else 0,
        )
        way = (self._name(flow.claimant), self._name(flow.holder), group.transport)
        flow.is_new = way not in self._connected
        self._connected.add(way)
        return flow

    def _describe(self, stage: Stage) -> str:
        group = stage[0]
        pairs = [pair for each in stage for pair in each.pairs]
        source, target = (self._names[node] for node in pairs[0])
        more = f" and {len(pairs) - 1} more" if len(pairs) > 1 else ""
        return f"{source} to {target}{more}, {group.transport}, {group.mode}"

    def _name(self, site: Site) -> str:
        return self._names[self._sites.index(site)]

    # What came of it.

    def _result(self) -> ProbeResult:
        failures: list[Failure] = []
        notes: list[str] = []
        by_pair: dict[tuple[str, str, str], list[Flow]] = {}
        order = {name: index for index, name in enumerate(self._names)}
        for flow in sorted(
            self._flows, key=lambda flow: (order[self._name(flow.source)], order[self._name(flow.target)])
        ):
            key = (self._name(flow.source), self._name(flow.target), flow.transport)
            by_pair.setdefault(key, []).append(flow)
        profiles = []
        now = dt.datetime.now(dt.UTC)
        for (source, target, transport), flows in by_pair.items():
            fits, samples = [], []
            for flow in flows:
                if flow.error is None and flow.fit is not None:
                    fits.append(flow.fit)
                    samples += flow.samples
                    notes += _notes(source, target, flow)
                    continue
                error = flow.error or LocalError("it was not measured")
                failures.append(
                    Failure(
                        from_node=source,
                        to_node=target,
                        transport=transport,
                        conditions=str(flow.conditions),
                        kind=error.kind,
                        reason=str(error),
                    )
                )
            if fits:
                profiles.append(self._profile((source, target, transport), flows, fits, samples, now))
        if not self._keeps_samples:
            notes.append(
                f"{len(self._flows)} measurements, more than {FLOWS_WITH_SAMPLES}: their fits are kept, and "
                "not each copy"
            )
        links = LinkFile(nodes=tuple(self._nodes()), pairs=tuple(profiles))
        return ProbeResult(links, failures, notes)

    def _profile(
        self,
        pair: tuple[str, str, str],
        flows: Sequence[Flow],
        fits: list[ConditionFit],
        samples: list[Sample],
        now: dt.datetime,
    ) -> LinkProfile:
        first = next(flow for flow in flows if flow.error is None)
        contacts = [flow.first_contact_seconds for flow in flows if flow.first_contact_seconds is not None]
        return LinkProfile(
            from_node=pair[0],
            to_node=pair[1],
            transport=pair[2],
            path=", ".join(dict.fromkeys(flow.path for flow in flows if flow.path)),
            via=self._plan.via,
            link_class=link_class(first.source, first.target),
            line_rate=self._plan.line_rate,
            measured=True,
            date=now,
            fits=tuple(fits),
            registration=first.target.opened.registration,
            first_contact_seconds=contacts[0] if contacts else None,
            samples=tuple(samples),
        )

    def _nodes(self) -> Iterator[Node]:
        for name, site in zip(self._names, self._sites, strict=True):
            about = site.about
            yield Node(
                name=name,
                address=site.address,
                host=about.host,
                software=about.software,
                facts=about.facts | ({"zone": about.zone} if about.zone else {}),
            )


def _fit(flow: Flow) -> ConditionFit:
    if flow.error is not None:
        raise flow.error
    warm = [sample for sample in flow.samples if not sample.is_cold]
    if not warm:
        raise NoPlanError("the time was over before a copy", next_step="give more --seconds")
    try:
        fit = fit_link(warm)
    except NoPlanError as error:
        raise error.with_context(next_step="give more --seconds, or a smaller --bytes") from None
    return ConditionFit(**msgspec.structs.asdict(flow.conditions), fit=fit)


def _notes(source: str, target: str, flow: Flow) -> Iterator[str]:
    if flow.skipped:
        largest = max(payload.nbytes for payload in flow.skipped)
        shapes = "1 shape" if len(flow.skipped) == 1 else f"{len(flow.skipped)} shapes"
        yield (
            f"{source} -> {target}, {flow.transport}, {flow.conditions}: no time for {shapes} "
            f"of up to {largest} bytes; give more --seconds"
        )
