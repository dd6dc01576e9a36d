"""Opens a cluster file and all that it names; names of files are seen from the cluster file's folder."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvferry.cli.plan_files import load_profile, open_trace, read_text
from kvferry.errors import InputError
from kvferry.plan.cluster import Cluster, build_cluster
from kvferry.plan.cluster_file import parse_cluster, placed
from kvferry.plan.cluster_tables import ClusterFile
from kvferry.plan.trace import TraceRow

if TYPE_CHECKING:
    from kvferry.link import LinkFile
    from kvferry.plan.compute import ComputeProfile
    from kvferry.plan.compute_file import ProfileChoice

__all__ = ["MAX_PLAN_ROWS", "Opened", "open_cluster"]

MAX_PLAN_ROWS = 200_000
"""A plan reads no more of a trace: its lengths are known by then."""

MAX_SAME_ROWS = 20_000
"""Requests that are made of lengths."""


class Opened(msgspec.Struct, frozen=True):
    """A cluster file with everything that it names.

    Args:
        file, cluster: as parsed and as built.
        rows: the workload's requests, at most :data:`MAX_PLAN_ROWS` of them.
        requests_per_second: as given, else the trace's own.
        is_rate_stated: whether it was given.
        trace: the trace file, or None for lengths.
        source, text: the file as a message names it, and what is in it.
    """

    file: ClusterFile
    cluster: Cluster
    rows: tuple[TraceRow, ...]
    requests_per_second: float
    is_rate_stated: bool
    trace: Path | None
    source: str
    text: str


def open_cluster(path: Path, trace: Path | None = None, rate: float | None = None) -> Opened:
    """Read it all; ``trace`` and ``rate`` replace the file's own, a trace both. Raises InputError."""
    from kvferry.model import load_shape

    text, source = read_text(path, "cluster"), f"cluster: {path}"
    file = parse_cluster(text, source)
    folder = path.parent
    workload = file.workload
    if rate is None and trace is None:
        rate = workload.rate
    if trace is None and workload.trace is not None:
        trace = folder / workload.trace
    if trace is not None:
        rows = tuple(islice(open_trace(trace), MAX_PLAN_ROWS))
    else:
        assert workload.prompt_tokens is not None
        assert workload.output_tokens is not None
        rows = (TraceRow(None, workload.prompt_tokens, workload.output_tokens),) * MAX_SAME_ROWS
    is_rate_stated = rate is not None
    if rate is None:
        rate = _own_rate(rows, trace)
    model = file.model if file.model.startswith("shape:") else str(folder / file.model)
    p95 = int(np.quantile([row.prompt_tokens for row in rows], 0.95, method="higher"))
    with placed(source, text):
        cluster = build_cluster(
            file,
            load_shape(model),
            open_links=lambda name: _links(folder, name),
            open_profile=lambda name, choice: _profile(folder, name, choice),
            payload_tokens=p95,
        )
    return Opened(file, cluster, rows, rate, is_rate_stated, trace, source, text)


def _own_rate(rows: tuple[TraceRow, ...], trace: Path | None) -> float:
    span = rows[-1].arrival_seconds
    if span is None:
        raise InputError(f"rate: {trace} has no times; give a rate in requests a second")
    if not span:
        raise InputError(f"rate: all requests of {trace} arrive at once; give a rate")
    return len(rows) / span


def _links(folder: Path, name: str) -> LinkFile:
    from kvferry.link import PRESETS
    from kvferry.link.load import load_links

    return load_links(name if name in PRESETS else folder / name)


def _profile(folder: Path, name: str, choice: ProfileChoice) -> ComputeProfile:
    from kvferry.plan.compute_aiconfigurator import PREFIX
    from kvferry.plan.public_profiles import PUBLIC_PROFILES

    is_name = name in PUBLIC_PROFILES or name.startswith(PREFIX) or not Path(name).suffix
    return load_profile(name if is_name else str(folder / name), choice)
