"""What the demo's processes share: the model by name, an engine over a pool, and one process doing it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvferry.demo.records import Job, ModelName
from kvferry.engines.reference import Model, ReferenceEngine, load_smollm2, tiny_model
from kvferry.layout import PoolLayout
from kvferry.state import Exactness
from kvferry.transfer import DEFAULT_STAGING_NBYTES, Pool

__all__ = [
    "CHUNK_TOKENS",
    "REQUEST_ID",
    "Continuation",
    "continue_to_end",
    "load_model",
    "make_engine",
    "possible_tp",
    "run_alone",
]

REQUEST_ID = "demo"
# A part of the prompt that one engine call computes; alike everywhere, since it changes bits.
CHUNK_TOKENS = 256
# Room for the tiny model's byte tokens of the demo's own text.
TINY_CONTEXT = 16384
TINY_SEED = 7
TINY_KV_HEADS = (2, 3, 6)
# The draft model's part of the layers: of SmolLM2's 30 the first 25 propose what all of them would say
# about three times in four, the first 10 hardly ever.
DRAFT_SHARE = (5, 6)

OnProgress = Callable[[str, int, int, str], None]


def load_model(name: ModelName, splits: tuple[int, int]) -> Model:
    """The weights by name; LocalError says what to install when they are not there.

    Random ones have as many KV heads as the two numbers of ranks can share, where that can be.
    """
    if name == "smollm2":
        return load_smollm2()
    models = [tiny_model(TINY_SEED, kv_heads=heads, max_context=TINY_CONTEXT) for heads in TINY_KV_HEADS]
    return max(models, key=lambda model: sum(tp in possible_tp(model) for tp in splits))


def possible_tp(model: Model) -> list[int]:
    """Numbers of ranks that can share this model's heads: KV heads are split, or several ranks hold each."""
    heads, kv_heads = model.config.heads, model.config.kv_heads
    return [n for n in range(1, heads + 1) if heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def make_engine(model: Model, job: Job, *, shared: bool) -> tuple[ReferenceEngine, list[Pool]]:
    """An engine, and for each rank a pool of twice the request, so that block ids differ between workers."""
    tokens = len(job.prompt_ids) + job.limits.max_tokens_left + 1
    config = model.config
    kv_heads, copies = max(1, config.kv_heads // job.tp), max(1, job.tp // config.kv_heads)
    stop = config.layers + (config.layers * DRAFT_SHARE[0] // DRAFT_SHARE[1] if job.num_drafts else 0)
    groups = {"full": range(config.layers), "draft": range(config.layers, stop)}
    layouts = [
        PoolLayout.beside(
            *(
                PoolLayout.paged(
                    layers,
                    kv_heads=kv_heads,
                    head_start=rank // copies * kv_heads,
                    head_dim=config.head_dim,
                    dtype=job.dtype,
                    block_size=job.block_size,
                    num_blocks=2 * -(-(tokens + job.num_drafts) // job.block_size) + 1,
                    axis_order=job.axis_order.removesuffix("-transposed"),
                    transposed_keys=job.axis_order.endswith("-transposed"),
                    name=name,
                )
                for name, layers in groups.items()
                if layers
            )
        )
        for rank in range(job.tp)
    ]
    pools = [
        Pool.allocate(layout, staging_nbytes=DEFAULT_STAGING_NBYTES if job.conversions else 0)
        if shared
        else Pool(np.zeros(layout.nbytes, np.uint8), layout)
        for layout in layouts
    ]
    memories = [pool.array for pool in pools]
    engine = ReferenceEngine(model, layouts, memories, chunk_tokens=CHUNK_TOKENS, num_drafts=job.num_drafts)
    return engine, pools


@dataclass(slots=True)
class Continuation:
    """Tokens, text and one digest for each token's logits, made in so many steps."""

    tokens: list[int] = field(default_factory=list)
    logits_digest: list[int] = field(default_factory=list)
    text: str = ""
    rounds: int = 0

    def step(self, engine: ReferenceEngine) -> str:
        """One step of the request; returns the text that it added."""
        outputs = engine.step([REQUEST_ID])
        self.rounds += 1
        self.tokens += [output.token for output in outputs]
        self.logits_digest += [digest(output.logits) for output in outputs]
        text = "".join(output.text for output in outputs)
        self.text += text
        return text


def digest(logits: NDArray[np.float32]) -> int:
    """xxh3-64 of the bits of one step's logits."""
    return xxhash.xxh3_64_intdigest(logits.data)


def continue_to_end(
    engine: ReferenceEngine, into: Continuation, max_tokens: int, on_progress: OnProgress
) -> None:
    """Step until the request is finished."""
    while engine.request(REQUEST_ID).finish is None:
        text = into.step(engine)
        on_progress("decode", len(into.tokens), max_tokens, text)


def run_alone(model: Model, job: Job, on_progress: OnProgress) -> Continuation:
    """Prefill and decode in this one process: what the handoff is compared with.

    Where decode stores in a wider dtype, so does this, from the same point on. Rounding is not repeated
    here: a lossy handoff is compared with what it would have been without.
    """
    engine, _ = make_engine(model, job, shared=False)
    engine.submit(REQUEST_ID, job.prompt_ids, job.sampling, job.limits, job.grammar)
    while not engine.prefill(REQUEST_ID):
        on_progress("alone", engine.request(REQUEST_ID).kv_tokens, len(job.prompt_ids), "")
    if job.exactness is Exactness.TOKENS and job.decode_dtype != job.dtype:
        engine = _stored_as(model, msgspec.structs.replace(job, dtype=job.decode_dtype), engine)
    alone = Continuation()

    def count(_: str, done: int, total: int, text: str) -> None:
        on_progress("alone", len(job.prompt_ids) + done, len(job.prompt_ids) + total, text)

    continue_to_end(engine, alone, job.limits.max_tokens_left, count)
    return alone


def _stored_as(model: Model, job: Job, engine: ReferenceEngine) -> ReferenceEngine:
    """Another engine with the request as it is, its K and V read and stored anew in ``job.dtype``."""
    state = engine.export_state(REQUEST_ID, Exactness.TOKENS)
    other, _ = make_engine(model, job, shared=False)
    tables = other.allocate(state.kv_tokens + 2)
    for layer in range(model.config.layers):
        keys, values = engine.pool.read(layer, engine.tables(REQUEST_ID)[0], state.kv_tokens)
        other.pool.write(layer, tables[0], 0, keys.transpose(1, 0, 2), values.transpose(1, 0, 2))
    tensors = tuple(msgspec.structs.replace(entry, dtype=job.dtype) for entry in state.tensors)
    other.import_state(msgspec.structs.replace(state, tensors=tensors), tables)
    return other
