"""The fault list: what can be wrong with a state before it moves, and which check must say so."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvferry import state as s
from kvferry.errors import (
    CapacityError,
    DeadlineError,
    IncompatibleError,
    KVFerryError,
    LocalError,
    PeerError,
)
from kvferry.layout import LayerKind, Role
from state_cases import IDS, TRANSFER_ID, VOCAB_SIZE, drop, inline, put, with_last_logits


@dataclass(frozen=True)
class Damage:
    """One thing wrong: which check must refuse it, what the message names, and whose fault it is."""

    check: int
    what: str
    names: str
    state: Callable[[s.ExecutionState], s.ExecutionState] = lambda state: state
    local: Callable[[s.Requirements], s.Requirements] = lambda local: local
    expect: Callable[[s.Expectation], s.Expectation] = lambda expect: expect
    error: type[KVFerryError] = IncompatibleError


def change(path: str, value: Any) -> Callable[[Any], Any]:
    return lambda record: put(record, path, value)


def without(path: str) -> Callable[[Any], Any]:
    return lambda record: drop(record, path)


def both(*changes: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def apply(record: Any) -> Any:
        for one in changes:
            record = one(record)
        return record

    return apply


def tokens(ids: list[int] | np.ndarray[Any, Any], **more: Any) -> Callable[[Any], Any]:
    """Replace the history; the digest is right, so that only the damage is wrong."""
    raw = np.asarray(ids, "<i4").tobytes()
    fields = {"ids": raw, "digest": hashlib.sha256(raw).hexdigest(), **more}
    return lambda state: msgspec.structs.replace(
        state, tokens=msgspec.structs.replace(state.tokens, **fields)
    )


def slide(state: s.ExecutionState) -> s.ExecutionState:
    """The window's cache taken for all there is: the damage that no engine notices."""
    return put(state, "layers.1.cumulative_length", 8)


OTHER = "f" * 64
EXPORT_TWICE = both(change("ext.1.name", "trace"))
GREEDY = change("sampling.temperature", 0.0)

DAMAGES = [
    # 1 envelope
    Damage(1, "other major version", "version.major", change("version", s.Version(major=2, minor=0))),
    Damage(1, "unknown part that must be understood", "'telepathy'",
           change("must_understand", ("telepathy",))),
    Damage(1, "known extension gone from here", "'trace'", local=change("extensions", ())),
    Damage(1, "extension twice", "ext", EXPORT_TWICE, error=PeerError),
    Damage(1, "extension named like a field", "ext", change("ext.1.name", "rng"), error=PeerError),
    # 2 identity
    Damage(
        2, "transfer seen before", "transfer_id",
        expect=change("known_transfer_ids", (TRANSFER_ID,)), error=PeerError,
    ),
    Damage(2, "another request's state", "'req-2'", change("request_id", "req-2")),
    Damage(2, "older attempt", "attempt is 1", change("attempt", 1)),
    # 3 fingerprint
    *[
        Damage(3, f"other {field}", f"fingerprint.{field}", change(f"fingerprint.{field}", value))
        for field, value in (
            ("engine", "toy/2"), ("build", "numpy-1"), ("weights", OTHER), ("config", OTHER),
            ("tokenizer", OTHER), ("vocab_size", VOCAB_SIZE + 1), ("parallel", s.Parallel(tp=2)),
        )
    ],
    Damage(
        3, "adapter of one name, other weights", "lora 'pirate'", change("fingerprint.lora.0.weights", OTHER)
    ),
    Damage(3, "adapter at another scale", "scale 2", change("fingerprint.lora.0.scale", 1.0)),
    # 4 exactness
    Damage(4, "other probe", "fingerprint.probe", change("fingerprint.probe", OTHER)),
    Damage(4, "probe missing at the peer", "missing", change("fingerprint.probe", None)),
    Damage(4, "probe missing here", "missing", local=change("fingerprint.probe", None)),
    Damage(
        4, "probe missing on both sides", "missing",
        change("fingerprint.probe", None), local=change("fingerprint.probe", None),
    ),
    Damage(4, "placement out of control", "exactness", local=change("placement", s.Placement.UNCONTROLLED)),
    Damage(4, "placement lost", "'full'.placement", change("blocks.0.placement", None)),
    Damage(4, "placement short", "38 unlike", change("blocks.0.placement", s.pack_ids(range(38)))),
    Damage(4, "placement twice in one slot", "38 unlike",
           change("blocks.0.placement", s.pack_ids([*range(38), 0]))),
    Damage(4, "window placement short", "'window'.placement",
           change("blocks.1.placement", s.pack_ids(range(7)))),
    Damage(4, "other axis order", "'full'.layout", change("blocks.0.layout", "HND")),
    Damage(4, "other block size", "'full'.block_tokens", change("blocks.0.block_tokens", 8)),
    # 5 tokens
    Damage(5, "history lost", "tokens.ids is empty", tokens([])),
    Damage(5, "id at the vocabulary's end", "tokens.ids[3]", tokens([*IDS[:3], VOCAB_SIZE, *IDS[4:]])),
    Damage(5, "negative id", "tokens.ids[0] is -1", tokens([-1, *IDS[1:]])),
    Damage(5, "prompt border lost", "tokens.prompt_tokens", change("tokens.prompt_tokens", 0)),
    Damage(5, "prompt longer than the history", "tokens.prompt_tokens", change("tokens.prompt_tokens", 41)),
    Damage(5, "ids changed under their digest", "tokens.digest",
           change("tokens.ids", s.pack_ids([*IDS[1:], IDS[0]]))),
    Damage(5, "pending is not the last id", "tokens.pending", change("tokens.pending", IDS[0])),
    # 6 lengths
    Damage(6, "one token less in the history", "kv_tokens", tokens(IDS[:-1], pending=IDS[-2])),
    Damage(6, "cache one short", "kv_tokens is 38", change("kv_tokens", 38)),
    Damage(6, "cache one long", "kv_tokens is 40", both(
        change("exactness", s.Exactness.TOKENS), change("kv_tokens", 40))),
    Damage(6, "pending forgotten", "kv_tokens is 39, expected 40", change("tokens.pending", None)),
    Damage(6, "window's length for the tokens seen", "layers 1.cumulative_length", slide),
    Damage(6, "compressed rows miscounted", "layers 5.entry_count", change("layers.5.entry_count", 10)),
    Damage(6, "more emitted than produced", "tokens.emitted_tokens", change("tokens.emitted_tokens", 4)),
    Damage(6, "position off by one", "positions.next is 37", change("positions.next", 37)),
    Damage(6, "rope offset lost", "positions.next", change("positions.rope_delta", 0)),
    Damage(6, "grammar ahead of the output", "grammar.accepted_tokens", change("grammar.accepted_tokens", 4)),
    Damage(6, "log-probability row lost", "is 1 rows, expected 2, one", without("logprobs.output.0")),
    Damage(6, "draft cache ahead of its tokens", "draft.kv_tokens is 44", change("draft.kv_tokens", 44)),
    Damage(
        6, "draft window miscounted", "draft.layers 0.cumulative_length",
        change("draft.layers.0.cumulative_length", 4),
    ),
    Damage(6, "block lost", "'full'.ids is 2 blocks", change("blocks.0.ids", s.pack_ids([5, 3]))),
    Damage(6, "block too many", "'full'.ids is 4 blocks", change("blocks.0.ids", s.pack_ids([5, 3, 9, 1]))),
    Damage(6, "block twice", "each block once", change("blocks.0.ids", s.pack_ids([5, 3, 5]))),
    Damage(6, "negative block", "each block once",
           change("blocks.0.ids", np.array([5, -3, 9], "<i4").tobytes())),
    Damage(
        6, "window starts too late", "'window'.first_logical_block is token 32",
        change("blocks.1", s.GroupBlocks(
            group="window", block_tokens=4, layout="NHD", first_logical_block=8, ids=s.pack_ids([0, 1]),
            placement=s.pack_ids(range(8)),
        )),
    ),
    Damage(6, "window's first block misnumbered", "'window'.ids", change("blocks.1.first_logical_block", 6)),
    Damage(6, "full cache starts late", "'full'.first_logical_block", both(
        change("blocks.0.first_logical_block", 1), change("blocks.0.ids", s.pack_ids([3, 9])),
    )),
    Damage(6, "state slot lost", "'state'.ids is 0 slots", change("blocks.2.ids", b"")),
    Damage(6, "state slot too many", "'state'.ids is 2 slots", change("blocks.2.ids", s.pack_ids([6, 7]))),
    Damage(6, "state slot with an order", "'state'.first_logical_block",
           change("blocks.2.first_logical_block", 1)),
    Damage(6, "cross block lost", "'cross'.ids is 1 blocks", change("blocks.4.ids", s.pack_ids([4]))),
    Damage(6, "draft block lost", "'draft'.ids is 2 blocks", change("blocks.5.ids", s.pack_ids([0, 1]))),
    # 7 completeness
    *[Damage(7, f"layer {i} missing", f"layers {i} is missing", without(f"layers.{i}")) for i in range(7)],
    *[Damage(7, f"tensor {i} missing", "is missing", without(f"tensors.{i}")) for i in range(15)],
    *[
        Damage(7, f"table of {name} missing", f"blocks '{name}' is missing", without(f"blocks.{i}"))
        for i, name in enumerate(("full", "window", "state", "compressed", "cross", "draft"))
    ],
    *[Damage(7, f"section {i} missing", "section '", without(f"sections.{i}")) for i in range(4)],
    Damage(7, "layer of another kind", "layers 0 is missing, expected full",
           change("layers.0.kind", LayerKind.MLA)),
    Damage(7, "layer that is not here", "layers 9 is full", lambda state: put(
        state, "layers", (*state.layers, s.LayerState(layer=9, kind=LayerKind.FULL)))),
    Damage(7, "layer twice", "layers is a layer and kind twice", lambda state: put(
        state, "layers", (*state.layers, state.layers[0]))),
    Damage(7, "other window", "layers 1.window is 8", change("layers.1.window", 8)),
    Damage(7, "tokens seen lost", "layers 1.cumulative_length is missing",
           change("layers.1.cumulative_length", None)),
    Damage(7, "rollback flag lost", "layers 1.record_past", change("layers.1.record_past", None)),
    Damage(7, "rollback flag other", "layers 2.record_past", change("layers.2.record_past", True)),
    Damage(7, "recurrent layer starts anew", "layers 2.has_previous_state",
           change("layers.2.has_previous_state", False)),
    Damage(7, "recurrent flag lost", "layers 2.has_previous_state",
           change("layers.2.has_previous_state", None)),
    Damage(7, "compressed rows lost", "layers 5.entry_count is missing",
           change("layers.5.entry_count", None)),
    Damage(7, "tensor that is not here", "no such tensor", lambda state: put(
        state, "tensors", (*state.tensors, put(state.tensors[0], "layer", 3)))),
    Damage(7, "tensor twice", "tensors is a tensor twice", lambda state: put(
        state, "tensors", (*state.tensors, state.tensors[0]))),
    Damage(7, "K and V swapped for another role", "key is missing", change("tensors.0.role", Role.LATENT)),
    Damage(7, "recurrent state in bf16", "ssm.dtype is bfloat16", change("tensors.5.dtype", "bfloat16")),
    Damage(7, "axes swapped", "key.axes is head token dim", change(
        "tensors.0.axes", (s.Axis.HEAD, s.Axis.TOKEN, s.Axis.DIM))),
    Damage(7, "one token short", "key.shape is [38, 2, 16]", change("tensors.0.shape", (38, 2, 16))),
    Damage(7, "whole history in a window", "key.shape is [39, 2, 16]",
           change("tensors.2.shape", (39, 2, 16))),
    Damage(7, "half the heads", "key.shape is [39, 1, 16]", change("tensors.0.shape", (39, 1, 16))),
    Damage(7, "tensor in another group", "key.group is window", change("tensors.0.group", "window")),
    Damage(7, "other quantisation", "index.quantisation is int8",
           change("tensors.8.quantisation.scheme", "int8")),
    Damage(7, "quantisation lost", "index.quantisation", change("tensors.8.quantisation", None)),
    Damage(7, "alias lost", "alias_of", both(change("tensors.10.alias_of", None))),
    Damage(7, "alias of another tensor", "alias_of", change(
        "tensors.10.alias_of", s.TensorKey(layer=0, role=Role.KEY))),
    Damage(7, "bytes nowhere", "in 0 places",
           both(change("tensors.11.section", None), without("sections.1"))),
    Damage(7, "bytes in two places", "in 2 places", change("tensors.0.section", "layer5.buffer")),
    Damage(7, "section of no tensor", "section 'stray'", lambda state: put(
        state, "sections", (*state.sections, s.Section(name="stray", data=b"")))),
    Damage(7, "section twice", "section 'native:toy'", lambda state: put(
        state, "sections", (*state.sections, state.sections[3]))),
    Damage(7, "section shared by two tensors", "section 'layer5.buffer'", change(
        "tensors.12.section", "layer5.buffer")),
    Damage(7, "table of no group here", "blocks 'extra' is there", lambda state: put(
        state, "blocks", (*state.blocks, put(state.blocks[2], "group", "extra")))),
    Damage(7, "table twice", "blocks is a group twice", lambda state: put(
        state, "blocks", (*state.blocks, state.blocks[2]))),
    Damage(7, "encoder identity lost", "encoder is missing", both(
        change("encoder", None), change("blocks.4.ids", b""))),
    # 8 request
    Damage(8, "request's grammar lost", "grammar is missing", change("grammar", None)),
    Damage(8, "request's log-probabilities lost", "logprobs is missing", change("logprobs", None)),
    Damage(8, "request's images lost", "multimodal is missing", change("multimodal", None)),
    Damage(8, "both pending and logits", "both are there", change(
        "tokens.last_logits", inline(np.zeros(VOCAB_SIZE, np.float32)))),
    Damage(8, "neither pending nor logits", "neither is there", both(
        with_last_logits, change("tokens.last_logits", None))),
    Damage(8, "logits of another vocabulary", "float32[319]", both(
        with_last_logits, change("tokens.last_logits", inline(np.zeros(319, np.float32))))),
    Damage(8, "logits rounded", "float16[320]", both(
        with_last_logits, change("tokens.last_logits", inline(np.zeros(VOCAB_SIZE, np.float16))))),
    *[
        Damage(8, f"{field} {value}", f"sampling.{field}", change(f"sampling.{field}", value))
        for field, values in {
            "temperature": (float("nan"), float("inf"), -0.1),
            "top_p": (0.0, 1.01, float("nan")),
            "min_p": (-0.1, 1.1, float("nan")),
            "repetition_penalty": (0.0, float("nan"), float("inf")),
            "presence_penalty": (float("nan"), float("inf")),
            "frequency_penalty": (float("nan"), float("-inf")),
            "n": (2,),
            "allowed_tokens": (s.pack_ids([VOCAB_SIZE]), np.array([-1], "<i4").tobytes()),
            "bad_tokens": ((s.pack_ids([1]), s.pack_ids([VOCAB_SIZE])),),
            "logit_bias": (
                (s.LogitBias(token=VOCAB_SIZE, bias=1.0),),
                (s.LogitBias(token=1, bias=float("nan")),)),
        }.items()
        for value in values
    ],
    Damage(8, "random state lost", "rng is missing", change("rng", None)),
    Damage(8, "random state of a kind unknown here", "rng.kind is counter",
           change("rng.kind", s.RngKind.COUNTER)),
    Damage(8, "engine that loads no random state", "loads: none", local=change("rng_kinds", ())),
    Damage(8, "random state of a kind: which are known", "loads: philox, torch_mt19937_cpu, pcg64",
           change("rng.kind", s.RngKind.REPLAY)),
    Damage(8, "seed lost", "philox without a seed", change("rng.seed", None)),
    Damage(8, "seeds differ", "rng.seed is 9", change("rng.seed", 9)),
    Damage(8, "torch state cut", "without a state of 5056", change(
        "rng", s.Rng(kind=s.RngKind.TORCH_MT19937_CPU, state=bytes(5055)))),
    Damage(8, "pcg64 state lost", "pcg64 without a state", change("rng", s.Rng(kind=s.RngKind.PCG64))),
    Damage(8, "draft group lost", "draft is missing", both(change("draft", None), without("blocks.5"))),
    Damage(8, "drafts for an engine that does not draft", "draft is eagle", local=change("draft", None)),
    Damage(8, "no drafts pending, but bits asked", "draft is eagle", both(
        change("draft.between_rounds", True), change("draft.tokens", b""), change("draft.probs", None)),
        local=change("draft", None)),
    Damage(8, "drafts pending, best effort", "draft is eagle", change("exactness", s.Exactness.BEST_EFFORT),
           local=change("draft", None)),
    Damage(8, "other draft method", "draft.method is mtp", change("draft.method", "mtp")),
    Damage(8, "other draft model", "draft.fingerprint", change("draft.fingerprint.weights", OTHER)),
    Damage(8, "draft model unnamed", "draft.fingerprint is missing", change("draft.fingerprint", None)),
    Damage(8, "draft tokens lost", "draft.tokens is empty", change("draft.tokens", b"")),
    Damage(8, "draft token outside", "draft.tokens is an id outside", change(
        "draft.tokens", s.pack_ids([1, 2, VOCAB_SIZE]))),
    Damage(8, "draft probabilities lost", "draft.probs is missing", change("draft.probs", None)),
    Damage(8, "draft probabilities one row short", "expected 3 rows", change(
        "draft.probs", inline(np.zeros((2, VOCAB_SIZE), np.float32)))),
    Damage(8, "draft probabilities of no shape", "expected 3 rows", change(
        "draft.probs", inline(np.zeros((), np.float32)))),
    Damage(8, "pending between rounds", "3 pending", change("draft.between_rounds", True)),
    Damage(8, "probabilities between rounds", "expected none, between rounds", both(
        change("draft.between_rounds", True), change("draft.tokens", b""))),
    Damage(8, "hidden row lost", "draft.hidden is missing", change("draft.hidden", None)),
    Damage(8, "draft layer lost", "draft.layers 0 is missing", without("draft.layers.0")),
    Damage(8, "draft cache lost", "draft.tensors layer 0 value is missing", without("draft.tensors.1")),
    Damage(8, "draft cache one short", "value.shape", change("draft.tensors.1.shape", (38, 1, 8))),
    Damage(8, "grammar of a kind unknown here", "grammar.kind is lark", change("grammar.kind", "lark")),
    Damage(8, "grammar of a kind: which are known", "one of: regex, json", change("grammar.kind", "lark")),
    Damage(8, "engine that knows no grammar", "one of: none", local=change("grammar_kinds", ())),
    Damage(8, "grammar text changed", "grammar.digest", change("grammar.text", "[a-z]+")),
    Damage(8, "grammar not compiled", "not compiled here", expect=change("compiled_grammars", ())),
    Damage(8, "adapter not loaded", "lora 'pirate'", local=change("fingerprint.lora", ())),
    Damage(8, "image not known", "multimodal.hashes is img-2", expect=change("known_multimodal", ("img-1",))),
    Damage(8, "limit used up", "limits.max_tokens_left", change("limits.max_tokens_left", 0)),
    Damage(8, "half a stop string lost", "text is missing", change("text", None)),
    # 9 room
    Damage(9, "context too short", "40 + 1", local=change("fingerprint.max_context", 40)),
    Damage(9, "no place in the batch", "batch slots", expect=change("batch_slots", 0), error=CapacityError),
    *[
        Damage(
            9, f"room in {group} one short", f"'{group}' is {blocks - 1}, expected at least {blocks}",
            expect=change(f"room.{i}.num_blocks", blocks - 1), error=CapacityError,
        )
        for i, (group, blocks) in enumerate(
            {"full": 3, "window": 5, "state": 1, "compressed": 3, "cross": 2, "draft": 3}.items()
        )
    ],
    Damage(9, "no reservation", "'full' is 0", expect=without("room.0"), error=CapacityError),
    Damage(
        9, "drafts do not fit", "expected at least 4", local=change("draft.tokens_per_round", 8),
        error=CapacityError,
    ),
    # 10 time
    Damage(10, "lease over", "lease left", expect=change("lease_seconds_left", -1.0), error=DeadlineError),
    Damage(10, "lease too short", "more than 2 s",
           expect=change("estimated_seconds", 2.0), error=DeadlineError),
    Damage(10, "lease unknown", "nan", expect=change("lease_seconds_left", float("nan")), error=LocalError),
    Damage(10, "estimate infinite", "inf",
           expect=change("estimated_seconds", float("inf")), error=LocalError),
]  # fmt: skip
