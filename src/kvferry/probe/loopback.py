"""Measure this host against itself: two nodes of this process, one direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from kvferry.probe.pair import NAMES
from kvferry.probe.payload import MAX_PAYLOAD_NBYTES
from kvferry.probe.run import ProbePlan, ProbeResult, Progress, probe_sites
from kvferry.probe.site import LocalSite

__all__ = ["probe_loopback"]


async def probe_loopback(plan: ProbePlan, on_progress: Callable[[Progress], None]) -> ProbeResult:
    """``probe_sites`` for two endpoints on this host, each with its transfer process."""
    sites = [LocalSite(name, 4 * MAX_PAYLOAD_NBYTES) for name in NAMES]
    return await probe_sites(sites, dataclasses.replace(plan, ways=(0,)), on_progress)
