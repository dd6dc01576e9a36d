"""Shared by the planner's tests: links that cost exactly what is said, profiles, promises, traces."""

from __future__ import annotations

import datetime as dt
import os
from pathlib import Path

import pytest

from kvferry.link import ConditionFit, LinkFile, LinkFit, LinkProfile, Mode, Node, Span, Spread
from kvferry.model import ModelShape, load_shape
from kvferry.plan.compute import ComputeProfile, DecodeLaw, PrefillLaw
from kvferry.plan.handoff import Way
from kvferry.plan.payload import PoolFormat
from kvferry.plan.promise import GivenPrefill, Promise

LLAMA_70B = load_shape("shape:80x8x128")
LLAMA_8B = load_shape("shape:32x8x128")


def exact_fit(a: float, o: float, rate: float, *, spread: float = 1.0) -> LinkFit:
    """A fit of these numbers whose p95 and p99 are ``spread`` times the typical copy, at any size."""
    everywhere = Span(low=1, high=2**50)
    band = Spread(up_to_nbytes=2**50, samples=100, p50=1.0, p95=spread, p99=spread, mean=1.0, deviation=0.0)
    return LinkFit(
        a_seconds=a,
        o_seconds=o,
        bytes_per_second=rate,
        samples=100,
        nbytes=everywhere,
        descriptors=everywhere,
        block_bytes=everywhere,
        spreads=(band,),
    )


def link(
    a: float = 0.0,
    o: float = 0.0,
    rate: float = 10e9,
    *,
    spread: float = 1.0,
    names: tuple[str, str] = ("p", "d"),
) -> LinkProfile:
    """A measured pair with that fit, pulled."""
    return LinkProfile(
        from_node=names[0],
        to_node=names[1],
        transport="tcp",
        measured=True,
        date=dt.datetime(2026, 3, 1, tzinfo=dt.UTC),
        fits=(ConditionFit(mode=Mode.PULL, fit=exact_fit(a, o, rate, spread=spread)),),
    )


def link_file(*pairs: LinkProfile) -> LinkFile:
    """A file of them."""
    names = sorted({name for pair in pairs for name in (pair.from_node, pair.to_node)})
    return LinkFile(nodes=tuple(Node(name=name) for name in names), pairs=pairs)


def profile(**changes: object) -> ComputeProfile:
    """A small instance: 10 ms + 0.1 ms a token, decode 20 ms + 0.1 ms a request."""
    fields: dict[str, object] = {
        "model": "m",
        "gpu": "g",
        "tp": 1,
        "prefill": PrefillLaw(0.01, 1e-4, 0.0),
        "decode": DecodeLaw(0.02, 1e-7, 1e-4),
    }
    return ComputeProfile(**{**fields, **changes})  # type: ignore[arg-type]


def promise(**changes: object) -> Promise:
    """4,096 prompt tokens of Llama-3.1-70B's KV, 80 ms of prefill, 10 GB/s, 200 ms promised."""
    fields: dict[str, object] = {
        "shape": LLAMA_70B,
        "pool": PoolFormat(),
        "prompt_tokens": 4096,
        "cached_tokens": 0,
        "target_seconds": 0.2,
        "prefill": GivenPrefill(0.08, 4096, 0),
        "way": Way(link()),
    }
    return Promise(**{**fields, **changes})  # type: ignore[arg-type]


def shape_of(**config: object) -> ModelShape:
    """A shape from config fields."""
    return ModelShape.from_config(config)


def traces() -> Path:
    """The folder with the public traces; without it the test is skipped and says why."""
    folder = os.environ.get("KVFERRY_TRACES")
    if not folder:
        pytest.skip("KVFERRY_TRACES is not set: a folder with the public traces named in docs/planning.md")
    return Path(folder)
