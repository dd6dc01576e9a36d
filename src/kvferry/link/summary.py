"""What a person or a matrix shows of each pair: one payload, its time, its rate, its share of the line."""

from __future__ import annotations

import math

import msgspec

from kvferry.errors import NoPlanError
from kvferry.link.profile import ConditionFit, LinkFile, LinkProfile
from kvferry.link.records import LinkFit
from kvferry.link.words import Conditions

__all__ = ["PairSummary", "summarise"]


class PairSummary(
    Conditions,
    frozen=True,
    kw_only=True,
    omit_defaults=False,
    rename={"from_node": "from", "to_node": "to", "link_class": "class", "transport": "transport_used"},
):
    """One pair under one set of conditions, for one payload.

    Args:
        label: ``measured DATE`` or ``unmeasured``.
        seconds, p95_seconds: of the payload; None where the fit does not know.
        at_least_seconds: of the terms that are known; all there is for an unmeasured link.
        bytes_per_second: payload over ``seconds``.
        share_of_line_rate: of the brochure rate, where one was given.
        unknown: why ``seconds`` or ``p95_seconds`` is None, or "".
        beyond: how the payload lies outside what was measured.
    """

    from_node: str
    to_node: str
    transport: str
    path: str
    via: str
    link_class: str
    measured: bool
    label: str
    nbytes: int
    descriptors: int
    seconds: float | None
    p95_seconds: float | None
    at_least_seconds: float
    bytes_per_second: float | None
    share_of_line_rate: float | None
    unknown: str
    beyond: tuple[str, ...]
    fit: LinkFit


def summarise(
    links: LinkFile, nbytes: int | None = None, block_bytes: int | None = None
) -> tuple[PairSummary, ...]:
    """Every pair and condition, for ``nbytes`` in pieces of ``block_bytes``.

    Without ``nbytes``: the largest that every measured fit covers; without ``block_bytes``: the fewest
    pieces that were measured. Presets alone are shown at 1 GB.
    """
    payload = _payload(links) if nbytes is None else nbytes
    return tuple(_summary(pair, entry, payload, block_bytes) for pair in links.pairs for entry in pair.fits)


def _payload(links: LinkFile) -> int:
    spans = [entry.fit.nbytes for pair in links.pairs for entry in pair.fits]
    return min((span.high for span in spans if span is not None), default=10**9)


def _summary(pair: LinkProfile, entry: ConditionFit, nbytes: int, block_bytes: int | None) -> PairSummary:
    fit = entry.fit
    descriptors = _pieces(fit, nbytes, block_bytes)
    unknown = ""
    seconds = tail = None
    try:
        seconds = fit.predict_quantile(0.5, nbytes, descriptors)
        tail = fit.predict_quantile(0.95, nbytes, descriptors)
    except NoPlanError as error:
        unknown = error.message
    rate = None if seconds is None else nbytes / seconds
    return PairSummary(
        **msgspec.structs.asdict(entry.conditions),
        from_node=pair.from_node,
        to_node=pair.to_node,
        transport=pair.transport,
        path=pair.path,
        via=pair.via,
        link_class=pair.link_class,
        measured=pair.measured,
        label=pair.label_of(entry),
        nbytes=nbytes,
        descriptors=descriptors,
        seconds=seconds,
        p95_seconds=tail,
        at_least_seconds=fit.at_least(nbytes, descriptors),
        bytes_per_second=rate,
        share_of_line_rate=None if rate is None or pair.line_rate is None else rate / pair.line_rate,
        unknown=unknown,
        beyond=fit.beyond(nbytes, descriptors) if fit.samples else (),
        fit=fit,
    )


def _pieces(fit: LinkFit, nbytes: int, block_bytes: int | None) -> int:
    if block_bytes is not None:
        return max(1, math.ceil(nbytes / block_bytes))
    if fit.descriptors is None or fit.block_bytes is None:
        return 1
    return min(max(round(nbytes / fit.block_bytes.high), fit.descriptors.low), fit.descriptors.high)
