"""Measure this host against itself and fit the link model."""

from __future__ import annotations

import datetime as dt
import platform
import socket
from collections.abc import Callable, Sequence
from importlib import metadata

from kvferry.errors import NoPlanError
from kvferry.link import ConditionFit, LinkFile, LinkProfile, Mode, Node, Sample, fit_link
from kvferry.probe.pair import NAMES, LoopbackPair, sizes_up_to
from kvferry.probe.payload import Payload
from kvferry.transfer import TransferRecord

__all__ = ["probe_loopback"]


def probe_loopback(
    transports: Sequence[str],
    modes: Sequence[Mode],
    largest: Payload,
    repeats: int,
    *,
    integrity: bool = True,
    on_progress: Callable[[str, int, int], None],
) -> LinkFile:
    """A link file with one pair for each transport, samples included.

    Args:
        largest: the largest payload; smaller ones and smaller blocks are measured too, so that
            the costs of a copy, a descriptor and a byte separate.
        repeats: warm copies of each shape, after one cold.
        on_progress: told of a transport, copies done and copies in all.

    Raises the KVFerryError of a copy that failed, CorruptError where bytes differ.
    """
    profiles = []
    for transport in transports:
        payloads = sizes_up_to(largest)
        total, done = len(payloads) * len(modes) * (repeats + 1), 0

        def count(transport: str = transport, total: int = total) -> None:
            nonlocal done
            done += 1
            on_progress(transport, done, total)

        samples: list[Sample] = []
        for payload in payloads:
            with LoopbackPair(payload, transport, integrity=integrity) as pair:
                for mode in modes:
                    samples += pair.measure(mode, repeats, count)
                record = pair.record
        profiles.append(_profile(transport, record, samples, modes))
    return LinkFile(nodes=tuple(_node(name) for name in NAMES), pairs=tuple(profiles))


def _profile(
    transport: str, record: TransferRecord, samples: list[Sample], modes: Sequence[Mode]
) -> LinkProfile:
    now = dt.datetime.now(dt.UTC)
    fits = []
    for mode in modes:
        warm = [sample for sample in samples if sample.mode is mode and not sample.is_cold]
        try:
            fits.append(ConditionFit(mode=mode, fit=fit_link(warm), date=now))
        except NoPlanError as error:
            raise error.with_context(
                next_step="probe more sizes: a larger --bytes, or more --repeat"
            ) from None
    return LinkProfile(
        from_node=NAMES[0],
        to_node=NAMES[1],
        transport=transport,
        path=record.path,
        link_class="same host",
        measured=True,
        date=now,
        fits=tuple(fits),
        samples=tuple(samples),
    )


def _node(name: str) -> Node:
    software = {"kvferry": metadata.version("kvferry"), "python": platform.python_version()}
    facts = {"kernel": platform.release(), "machine": platform.machine()}
    return Node(name=name, host=socket.gethostname(), software=software, facts=facts)
