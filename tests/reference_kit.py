"""What the tests of the reference engine share: a tiny model, engines over it, and one whole handoff."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.engines.reference import Model, ReferenceEngine, StepOutput, tiny_model
from kvferry.layout import PoolLayout, copy_plan
from kvferry.state import (
    Exactness,
    ExecutionState,
    Expectation,
    GroupRoom,
    Limits,
    SamplingParameters,
    check_before_move,
    decode_state,
    encode_state,
)

GREEDY = SamplingParameters(temperature=0.0)
SAMPLED = SamplingParameters(temperature=1.2, top_k=60, top_p=0.98, min_p=0.001, seed=7)
PENALISED = SamplingParameters(
    temperature=0.8, repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.5, seed=11
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The freedoms of a pool that must not change a bit."""

    block_size: int = 16
    axis_order: str = "NHD"
    joined_kv: bool = False
    cross_layer: bool = False
    dtype: str = "float32"
    tokens: int = 2048
    draft_layers: int = 0


@functools.cache
def tiny(seed: int = 0) -> Model:
    """One tiny model a seed, shared: it is never written to."""
    return tiny_model(seed)


def pool_layout(layout: Layout = Layout(), *, seed: int = 0) -> PoolLayout:
    """The tiny model's layers, and a draft model's in a group of their own."""
    model = tiny(seed)
    layers = model.config.layers
    groups = {"full": range(layers), "draft": range(layers, layers + layout.draft_layers)}
    return PoolLayout.beside(
        *(
            PoolLayout.paged(
                which,
                kv_heads=model.config.kv_heads,
                head_dim=model.config.head_dim,
                dtype=layout.dtype,
                block_size=layout.block_size,
                num_blocks=layout.tokens // layout.block_size,
                axis_order=layout.axis_order,
                joined_kv=layout.joined_kv,
                cross_layer=layout.cross_layer,
                name=name,
            )
            for name, which in groups.items()
            if which
        )
    )


def make_engine(
    layout: Layout = Layout(),
    *,
    seed: int = 0,
    chunk_tokens: int = 32,
    num_drafts: int = 0,
    memory: NDArray[np.uint8] | None = None,
) -> ReferenceEngine:
    """An engine over a pool of its own, or over ``memory``, whose free blocks are in no order."""
    engine = ReferenceEngine(
        tiny(seed), pool_layout(layout, seed=seed), memory, chunk_tokens=chunk_tokens, num_drafts=num_drafts
    )
    shuffled = np.random.default_rng(layout.block_size + chunk_tokens).permutation(
        engine.pool.allocate(engine.pool.num_free_blocks)
    )
    engine.pool.free(shuffled)
    return engine


def prompt(tokens: int, salt: int = 0) -> list[int]:
    """Ids of no pattern, special tokens left out."""
    return np.random.default_rng((tokens, salt)).integers(0, 256, tokens).tolist()


def limits(max_tokens: int, **fields: object) -> Limits:
    """Limits that the end-of-reply token does not cut short, unless asked."""
    return Limits(max_tokens_left=max_tokens, **{"ignore_eos": True, **fields})


def start(
    engine: ReferenceEngine, request_id: str, ids: list[int], sampling: SamplingParameters, given: Limits
) -> None:
    """Submit and prefill."""
    engine.submit(request_id, ids, sampling, given)
    while not engine.prefill(request_id):
        pass


def take(engine: ReferenceEngine, request_id: str, steps: int) -> list[StepOutput]:
    """At most ``steps`` tokens of one request, fewer when it finishes."""
    out: list[StepOutput] = []
    while len(out) < steps and engine.request(request_id).finish is None:
        out += engine.step([request_id])
    return out


def seen(outputs: list[StepOutput]) -> list[tuple[object, ...]]:
    """Everything about some steps, logits as bits, for an equality that forgives nothing."""
    return [(out.token, out.text, out.finish, out.logits.tobytes()) for out in outputs]


def text_of(outputs: list[StepOutput]) -> str:
    """What a client has read."""
    return "".join(out.text for out in outputs)


def keep(state: ExecutionState) -> ExecutionState:
    """The change that changes nothing."""
    return state


def move(
    source: ReferenceEngine,
    target: ReferenceEngine,
    request_id: str,
    *,
    change: Callable[[ExecutionState], ExecutionState] = keep,
) -> None:
    """A handoff in one process: export, the record as bytes, checks 1 to 10, the KV bytes, import, release.

    ``change`` damages the record on the way. After an error the target holds nothing of it.
    """
    state = decode_state(encode_state(change(source.export_state(request_id, Exactness.BITS))))
    tables = target.allocate(len(state.tokens.ids) // 4 + 1)
    try:
        room = tuple(
            GroupRoom(group=group.name, num_blocks=len(table.ids))
            for group, table in zip(target.layout.groups, tables, strict=True)
        )
        expect = Expectation(
            request_id=request_id,
            room=room,
            batch_slots=1,
            lease_seconds_left=1.0,
            estimated_seconds=0.0,
            compiled_grammars=None,
        )
        check_before_move(state, target.requirements(), expect)
        copy_kv(source, target, request_id, tables)
        target.import_state(state, tables)
    except BaseException:
        target.free(tables)
        raise
    source.release(request_id)


def copy_kv(source: ReferenceEngine, target: ReferenceEngine, request_id: str, tables: tuple) -> None:
    """The bytes, piece by piece of the copy plan."""
    tokens = source.request(request_id).kv_tokens
    plan = copy_plan(source.layout, target.layout, source.tables(request_id), tables, tokens)
    for src, dst, nbytes in zip(plan.src_offset, plan.dst_offset, plan.nbytes, strict=True):
        target.memory[dst : dst + nbytes] = source.memory[src : src + nbytes]
