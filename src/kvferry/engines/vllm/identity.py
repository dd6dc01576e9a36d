"""Who this vLLM is, what it needs to start a request, and the record of a prompt that was computed.

Weights are identified by the checkpoint's files: their names, sizes, headers, and pages taken at
fixed distances, at most 64 MiB a model. It tells checkpoints and fine-tunes apart in a moment;
it does not see weights that were changed in memory.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvferry.errors import LocalError
from kvferry.layout import BlockTable, PoolLayout, Role
from kvferry.state import (
    FINGERPRINT_CLASSES,
    Axis,
    Conversion,
    Exactness,
    ExecutionState,
    Fingerprint,
    FitClass,
    GroupBlocks,
    GroupNeed,
    LayerNeed,
    LayerState,
    Limits,
    Positions,
    Requirements,
    RngKind,
    RowRule,
    SamplingParameters,
    TensorEntry,
    TensorNeed,
    Tokens,
    config_digest,
    unpack_ids,
)

__all__ = ["files_digest", "fingerprint", "model_digest", "prompt_state", "requirements"]

ENGINE = "vllm"
_MAX_SAMPLED_NBYTES = 64 << 20
_PAGE_NBYTES = 4096
# What says where a configuration came from, not what the model computes.
_NOT_THE_MODEL = frozenset({"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype"})


def files_digest(files: list[Path]) -> str:
    """sha256 over each file's name, size and pages at fixed distances; whole files where they are small.

    Raises LocalError when there is no file: then nothing would tell two models apart.
    """
    if not files:
        raise LocalError("no checkpoint files were found, so this worker's weights have no identity")
    share = max(_PAGE_NBYTES, _MAX_SAMPLED_NBYTES // len(files))
    digest = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        nbytes = path.stat().st_size
        digest.update(f"{path.name}\0{nbytes}\0".encode())
        with path.open("rb") as file:
            if nbytes <= share:
                while piece := file.read(1 << 20):
                    digest.update(piece)
                continue
            digest.update(file.read(1 << 16))  # a safetensors header starts here
            for at in range(0, nbytes, max(_PAGE_NBYTES, nbytes // (share // _PAGE_NBYTES))):
                file.seek(at)
                digest.update(file.read(_PAGE_NBYTES))
    return digest.hexdigest()


def fingerprint(
    *,
    build: str,
    weights: str,
    config: Mapping[str, Any],
    cache: Mapping[str, Any],
    tokenizer: str,
    vocab_size: int,
    max_context: int,
) -> Fingerprint:
    """This worker's identity. ``cache``: vLLM's settings that change the KV, besides the model's config."""
    model = {key: value for key, value in config.items() if key not in _NOT_THE_MODEL}
    return Fingerprint(
        engine=ENGINE,
        build=build[:256],
        weights=weights,
        config=config_digest({"model": model, "cache": dict(cache)}),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_context=max_context,
    )


def model_digest(identity: Fingerprint) -> str:
    """sha256 of all that has to be equal at both sides of a pair: two that differ in it never fit."""
    classes = FINGERPRINT_CLASSES.items()
    equal = {field: getattr(identity, field) for field, fit in classes if fit is FitClass.MUST_EQUAL}
    return config_digest(msgspec.to_builtins(equal))


def requirements(identity: Fingerprint, layout: PoolLayout, kv_heads: int, layout_name: str) -> Requirements:
    """What this engine needs to start a request: every tensor of its pool, for every token but the last.

    ``kv_heads``: of all ranks together.
    """
    cache = []
    for group in layout.groups:
        cache += [
            TensorNeed(
                layer=tensor.layer,
                role=tensor.role,
                dtype=tensor.dtype,
                axes=(Axis.TOKEN, Axis.HEAD, Axis.DIM),
                shape=(0, kv_heads, tensor.head_dim),
                rows=RowRule(most=group.window),
                group=group.name,
            )
            for tensor in group.tensors
        ]
    return Requirements(
        fingerprint=identity,
        layers=tuple(
            LayerNeed(layer=layer, kind=group.kind, window=group.window)
            for group in layout.groups
            for layer in _layers(group.tensors)
        ),
        cache=tuple(cache),
        groups=tuple(GroupNeed.of(group, layout=layout_name) for group in layout.groups),
        rng_kinds=(RngKind.REPLAY,),
        proven=(Conversion.BLOCK_TOKENS,),
    )


def prompt_state(
    request_id: str, ids: bytes, needs: Requirements, tables: tuple[BlockTable, ...]
) -> ExecutionState:
    """A prompt before its last token: the KV of all others, and that token as what decode runs next.

    Decode's own request brings sampling parameters and limits, so the record's are the neutral ones.
    """
    prompt = unpack_ids(ids)
    kv_tokens = prompt.size - 1
    return ExecutionState(
        transfer_id=secrets.token_bytes(16),
        request_id=request_id,
        attempt=0,
        created_unix_ns=time.time_ns(),
        lease_ms=0,
        exactness=Exactness.TOKENS,
        fingerprint=needs.fingerprint,
        layers=tuple(
            LayerState(
                layer=need.layer,
                kind=need.kind,
                window=need.window,
                cumulative_length=None if need.window is None else kv_tokens,
            )
            for need in needs.layers
        ),
        tensors=tuple(_entry(need, kv_tokens) for need in needs.cache),
        blocks=tuple(
            GroupBlocks.of(need.group, table, block_tokens=need.block_tokens, layout=need.layout)
            for need, table in zip(needs.groups, tables, strict=True)
        ),
        kv_tokens=kv_tokens,
        tokens=Tokens.of(prompt, prompt_tokens=prompt.size, emitted_tokens=0, pending=int(prompt[-1])),
        positions=Positions(next=kv_tokens),
        sampling=SamplingParameters(temperature=0.0),
        limits=Limits(max_tokens_left=1),
    )


def _entry(need: TensorNeed, kv_tokens: int) -> TensorEntry:
    spec = need.spec(kv_tokens, 0)
    return TensorEntry(
        layer=need.layer,
        role=need.role,
        dtype=spec.dtype,
        axes=spec.axes,
        shape=spec.shape,
        group=need.group,
    )


def _layers(tensors: Any) -> list[int]:
    return sorted({tensor.layer for tensor in tensors if tensor.role is Role.KEY})
