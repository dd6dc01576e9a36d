"""Measure this host against itself: two nodes of this process, one direction."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.probe.pair import NAMES
from kvferry.probe.payload import MAX_PAYLOAD_NBYTES
from kvferry.probe.plan import ProbePlan
from kvferry.probe.run import ProbeResult, Progress, probe_sites
from kvferry.probe.site import LocalSite
from kvferry.transport.security import Identity

__all__ = ["probe_loopback"]


async def probe_loopback(plan: ProbePlan, on_progress: Callable[[Progress], None]) -> ProbeResult:
    """``probe_sites`` for two endpoints on this host, each with its transfer process.

    With encryption they get certificates of an authority that lives as long as the probe.
    """
    with _identities(wanted=bool(plan.tls and any(plan.tls))) as identities:
        sites = [
            LocalSite(name, 4 * MAX_PAYLOAD_NBYTES, tls) for name, tls in zip(NAMES, identities, strict=True)
        ]
        return await probe_sites(sites, dataclasses.replace(plan, ways=(0,)), on_progress)


@contextlib.contextmanager
def _identities(*, wanted: bool) -> Iterator[list[Identity | None]]:
    if not wanted:
        yield [None] * len(NAMES)
        return
    from kvferry.transport.certificates import init_authority, issue  # noqa: PLC0415 - an extra

    with tempfile.TemporaryDirectory(prefix="kvferry-probe-") as folder:
        init_authority(Path(folder), days=1)
        paths = [issue(Path(folder), name, hosts=("127.0.0.1",), days=1) for name in NAMES]
        yield [Identity.load(path) for path in paths]
