"""Who computed a state: the fingerprint of a worker.

The numbers that decide are digests of what was loaded (weights, configuration, tokenizer) and,
for bit-exactness, the numerics probe: the same weights under another attention kernel give
other bits, and a name or a version does not show it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvferry.state.values import MAX_TOKENS, Count, Digest, Name, Record

__all__ = ["Fingerprint", "LoraAdapter", "Parallel", "RankPart"]

Degree = Annotated[int, Meta(ge=1, le=1 << 16)]


class LoraAdapter(Record, frozen=True, kw_only=True):
    """One adapter: its name here, the sha256 of its weights, the scale it is applied with."""

    name: Name
    weights: Digest
    scale: float


class RankPart(Record, frozen=True, kw_only=True):
    """What one rank holds: a run of layers and a run of KV heads."""

    rank: Count
    first_layer: Count
    num_layers: Count
    first_kv_head: Count
    num_kv_heads: Count


class Parallel(Record, frozen=True, kw_only=True):
    """How the model is split over ranks; ``ranks`` may be empty when there is one."""

    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    dp: Degree = 1
    ep: Degree = 1
    ranks: Annotated[tuple[RankPart, ...], Meta(max_length=1 << 16)] = ()


class Fingerprint(Record, frozen=True, kw_only=True):
    """The identity of a worker's model and numerics.

    In a worker's own fingerprint ``lora`` lists every adapter loaded there; in a state, those
    that the request uses. ``build`` names what decides the bits besides the weights: library
    versions, instruction set, BLAS, attention kernel.
    """

    engine: Name
    build: Name
    weights: Digest
    config: Digest
    tokenizer: Digest
    vocab_size: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    max_context: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    probe: Digest | None = None
    lora: Annotated[tuple[LoraAdapter, ...], Meta(max_length=1024)] = ()
    parallel: Parallel = Parallel()
