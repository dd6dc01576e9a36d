"""ExecutionState: everything besides the KV bytes that decode needs to continue a request exactly.

K and V alone continued decode correctly on no engine that was tried; each field here is one
whose loss gave wrong tokens, other logits, or a request that could not start (docs/state.md
says which). The record says what the bytes are, never where an engine keeps them: it names
tensor roles, and decode fills its own objects from its own table of roles.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.state.cache import GroupBlocks, LayerState, Section, TensorEntry
from kvferry.state.fingerprint import Fingerprint
from kvferry.state.request import (
    Draft,
    Encoder,
    Grammar,
    Limits,
    Logprobs,
    Multimodal,
    Positions,
    Rng,
    SamplingParameters,
    TextPosition,
    Tokens,
    Usage,
)
from kvferry.state.values import Count, Exactness, Name, Record

__all__ = ["CURRENT_VERSION", "MAJOR_VERSION", "ExecutionState", "Extension", "Version"]

MAJOR_VERSION = 1


class Version(Record, frozen=True, kw_only=True):
    """Majors must be equal. A minor only adds optional extensions."""

    major: Annotated[int, Meta(ge=0, le=2**16)]
    minor: Annotated[int, Meta(ge=0, le=2**16)]


CURRENT_VERSION = Version(major=MAJOR_VERSION, minor=0)


class Extension(Record, frozen=True, kw_only=True):
    """A field unknown to this version: refused when its name is in ``must_understand``, else ignored."""

    name: Name
    data: bytes


class ExecutionState(Record, frozen=True, kw_only=True):
    """The versioned record that travels with the KV. ``kv_tokens``: tokens that the cache covers.

    ``must_understand`` names fields of this record, or extensions, that decode has to know.
    ``transfer_id`` is random per attempt. Clocks of two machines are never compared:
    ``created_unix_ns`` is for logs, and decode counts ``lease_ms`` from when it arrived.
    """

    version: Version = CURRENT_VERSION
    must_understand: Annotated[tuple[Name, ...], Meta(max_length=256)] = ()
    transfer_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    request_id: Name
    attempt: Count
    created_unix_ns: Annotated[int, Meta(ge=0, le=2**62)]
    lease_ms: Count
    exactness: Exactness
    fingerprint: Fingerprint
    layers: Annotated[tuple[LayerState, ...], Meta(max_length=1 << 13)]
    tensors: Annotated[tuple[TensorEntry, ...], Meta(max_length=1 << 16)]
    blocks: Annotated[tuple[GroupBlocks, ...], Meta(max_length=1 << 10)]
    kv_tokens: Count
    tokens: Tokens
    positions: Positions
    sampling: SamplingParameters
    limits: Limits
    rng: Rng | None = None
    draft: Draft | None = None
    grammar: Grammar | None = None
    text: TextPosition | None = None
    encoder: Encoder | None = None
    multimodal: Multimodal | None = None
    logprobs: Logprobs | None = None
    usage: Usage | None = None
    sections: Annotated[tuple[Section, ...], Meta(max_length=1 << 12)] = ()
    ext: Annotated[tuple[Extension, ...], Meta(max_length=1 << 8)] = ()
