"""When two workers fit: each fingerprint field has a class, and the class decides.

The same comparison runs once a connection, at the handshake, and for each state record.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvferry.state.fingerprint import Fingerprint, LoraAdapter
from kvferry.state.values import Exactness

__all__ = [
    "FINGERPRINT_CLASSES",
    "Conversion",
    "Difference",
    "FitClass",
    "brief",
    "compare_fingerprints",
    "describe_lora",
    "fingerprint_differences",
]


class FitClass(enum.Enum):
    """What a difference in a field means for the pair."""

    MUST_EQUAL = "must be equal"
    CONVERTIBLE = "may differ, but not for bits unless proven"
    EQUAL_FOR_BITS = "must be equal for bits"
    OWN = "each side's own"


class Conversion(enum.StrEnum):
    """Differences that a copy plan bridges. A pair that was proven bit-exact across one may say so."""

    LAYOUT = "layout"
    BLOCK_TOKENS = "block_tokens"
    PARALLEL = "parallel"


FINGERPRINT_CLASSES = {
    "engine": FitClass.EQUAL_FOR_BITS,
    "build": FitClass.EQUAL_FOR_BITS,
    "weights": FitClass.MUST_EQUAL,
    "config": FitClass.MUST_EQUAL,
    "tokenizer": FitClass.MUST_EQUAL,
    "vocab_size": FitClass.MUST_EQUAL,
    "max_context": FitClass.OWN,  # check 9 compares it with the request's length
    "probe": FitClass.EQUAL_FOR_BITS,
    "lora": FitClass.MUST_EQUAL,
    "parallel": FitClass.CONVERTIBLE,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which a pair does not fit, both values as text, and the rule it breaks."""

    field: str
    local: str
    peer: str
    rule: str

    def __str__(self) -> str:
        return f"{self.field}: {self.local} here, {self.peer} at the peer ({self.rule})"


def compare_fingerprints(
    local: Fingerprint, peer: Fingerprint, exactness: Exactness, proven: Collection[Conversion] = ()
) -> tuple[str, ...]:
    """Why two workers cannot serve one request with this exactness; empty when they can.

    Each reason names the field, both values and the rule. ``proven``: conversions that were
    shown to keep the bits for this pair. An adapter that only one side has loaded is no reason
    here; a request that uses it is refused by check 8.
    """
    return tuple(str(difference) for difference in fingerprint_differences(local, peer, exactness, proven))


def fingerprint_differences(
    local: Fingerprint, peer: Fingerprint, exactness: Exactness, proven: Collection[Conversion] = ()
) -> Iterator[Difference]:
    """The same, as records, in the order of the fields."""
    for field, fit in FINGERPRINT_CLASSES.items():
        if field == "lora":
            yield from _lora_differences(local.lora, peer.lora)
            continue
        ours, theirs = getattr(local, field), getattr(peer, field)
        if ours == theirs and not (ours is None and exactness is Exactness.BITS):
            continue
        if _matters(fit, exactness, proven):
            yield Difference(field, brief(ours), brief(theirs), fit.value)


def _matters(fit: FitClass, exactness: Exactness, proven: Collection[Conversion]) -> bool:
    if fit is FitClass.CONVERTIBLE:
        return exactness is Exactness.BITS and Conversion.PARALLEL not in proven
    return fit is FitClass.MUST_EQUAL or (fit is FitClass.EQUAL_FOR_BITS and exactness is Exactness.BITS)


def _lora_differences(local: tuple[LoraAdapter, ...], peer: tuple[LoraAdapter, ...]) -> Iterator[Difference]:
    """Adapters of one name have to be one adapter."""
    ours = {adapter.name: adapter for adapter in local}
    for theirs in peer:
        if theirs.name in ours and (mine := ours[theirs.name]) != theirs:
            rule = FitClass.MUST_EQUAL.value
            yield Difference(f"lora {theirs.name!r}", describe_lora(mine), describe_lora(theirs), rule)


def describe_lora(adapter: LoraAdapter) -> str:
    """Digest and scale, short."""
    return f"{adapter.weights[:12]} at scale {adapter.scale:g}"


def brief(value: object) -> str:
    """A value for one line: a digest by its first 12 digits, which tell two apart."""
    if value is None:
        return "missing"
    text = str(value)
    return text[:12] if isinstance(value, str) and len(value) == 64 else text
