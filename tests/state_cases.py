"""A small model with every kind of layer, and one good state of it, written out by hand.

The numbers are typed, not derived by the code under test: 37 prompt tokens and 3 outputs, of
which the last is pending, so the cache covers 39 tokens.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import numpy as np

from kvferry import state as s
from kvferry.layout import LayerKind, Role

VOCAB_SIZE = 320
TRANSFER_ID = bytes(range(16))
IDS = [(7 * i) % VOCAB_SIZE for i in range(40)]
LORA = s.LoraAdapter(name="pirate", weights="a" * 64, scale=2.0)
FINGERPRINT = s.Fingerprint(
    engine="toy/1",
    build="numpy-2 openblas avx2",
    weights="1" * 64,
    config="2" * 64,
    tokenizer="3" * 64,
    vocab_size=VOCAB_SIZE,
    max_context=64,
    probe="4" * 64,
    lora=(LORA,),
)
DRAFT_FINGERPRINT = s.DraftFingerprint(weights="5" * 64, config="6" * 64)

THD = (s.Axis.TOKEN, s.Axis.HEAD, s.Axis.DIM)
TD = (s.Axis.TOKEN, s.Axis.DIM)
KEY_0 = s.TensorKey(layer=5, role=Role.COMPRESSED)


def _entry(
    layer: int, role: Role, shape: tuple[int, ...], axes: tuple[s.Axis, ...], **more: Any
) -> s.TensorEntry:
    return s.TensorEntry(layer=layer, role=role, shape=shape, axes=axes, **{"dtype": "bfloat16", **more})


def good_state() -> s.ExecutionState:
    """Every optional part is there, ``bits`` are asked for, sampled, with drafts pending."""
    kernel = (s.Axis.CHANNEL, s.Axis.KERNEL)
    ssm = (s.Axis.HEAD, s.Axis.STATE, s.Axis.DIM)
    scaled = s.Quantisation(scheme="fp8-block", scales="layer4.scales")
    layers = (
        s.LayerState(layer=0, kind=LayerKind.FULL),
        s.LayerState(layer=1, kind=LayerKind.SLIDING, window=9, cumulative_length=39, record_past=False),
        s.LayerState(layer=2, kind=LayerKind.LINEAR, has_previous_state=True, record_past=False),
        s.LayerState(layer=3, kind=LayerKind.DUMMY),
        s.LayerState(layer=4, kind=LayerKind.INDEXED),
        s.LayerState(layer=5, kind=LayerKind.COMPRESSED, cumulative_length=39, entry_count=9),
        s.LayerState(layer=6, kind=LayerKind.CROSS),
    )
    tensors = (
        _entry(0, Role.KEY, (39, 2, 16), THD, group="full"),
        _entry(0, Role.VALUE, (39, 2, 16), THD, group="full"),
        _entry(1, Role.KEY, (8, 2, 16), THD, group="window"),
        _entry(1, Role.VALUE, (8, 2, 16), THD, group="window"),
        _entry(2, Role.CONV, (24, 4), kernel, group="state"),
        _entry(2, Role.SSM, (4, 16, 8), ssm, group="state", dtype="float32"),
        _entry(4, Role.LATENT, (39, 32), TD, group="full"),
        _entry(4, Role.ROPE, (39, 8), TD, group="full"),
        _entry(4, Role.INDEX, (39, 16), TD, group="full", dtype="float8_e4m3fn", quantisation=scaled),
        _entry(5, Role.COMPRESSED, (9, 32), TD, group="compressed"),
        _entry(5, Role.VALUE, (9, 32), TD, alias_of=KEY_0),
        _entry(5, Role.BUFFER, (3, 8), (s.Axis.STATE, s.Axis.DIM), section="layer5.buffer", dtype="float32"),
        _entry(5, Role.BUFFER, (2, 8), (s.Axis.STATE, s.Axis.DIM), section="layer5.buffer1", part=1),
        _entry(6, Role.CROSS_KEY, (29, 4, 8), THD, group="cross"),
        _entry(6, Role.CROSS_VALUE, (29, 4, 8), THD, group="cross"),
    )
    blocks = (
        _blocks("full", 16, (5, 3, 9), placement=range(100, 139)),
        _blocks("window", 4, (2, 0, 1), first=7, placement=range(8)),
        _blocks("state", None, (6,)),
        _blocks("compressed", 16, (1, 2, 3), placement=range(39)),
        _blocks("cross", 16, (4, 8)),
        _blocks("draft", 16, (0, 1, 2)),
    )
    return s.ExecutionState(
        must_understand=("rng", "draft", "grammar", "trace"),
        transfer_id=TRANSFER_ID,
        request_id="req-1",
        attempt=2,
        created_unix_ns=1_700_000_000_000_000_000,
        lease_ms=30_000,
        exactness=s.Exactness.BITS,
        fingerprint=FINGERPRINT,
        layers=layers,
        tensors=tensors,
        blocks=blocks,
        kv_tokens=39,
        tokens=s.Tokens.of(IDS, prompt_tokens=37, emitted_tokens=1, pending=IDS[-1]),
        positions=s.Positions(next=36, rope_delta=-3, mrope=inline(np.zeros((3, 39), np.int32))),
        sampling=s.SamplingParameters(
            temperature=0.8,
            top_k=40,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            logit_bias=(s.LogitBias(token=5, bias=-100.0),),
            allowed_tokens=s.pack_ids(range(300)),
            bad_tokens=(s.pack_ids([9, 10]), s.pack_ids([11])),
            seed=1234,
        ),
        limits=s.Limits(
            max_tokens_left=10, min_tokens_left=1, stop_token_ids=(0,), stop_strings=("harbour town",)
        ),
        rng=s.Rng(kind=s.RngKind.PHILOX, seed=1234, draws=3),
        draft=good_draft(),
        grammar=good_grammar(),
        text=s.TextPosition(emitted_chars=12, tail=" harbour"),
        encoder=s.Encoder(cross_tokens=29, digest="7" * 64),
        multimodal=s.Multimodal(hashes=("img-1", "img-2")),
        logprobs=s.Logprobs(output=(_logprobs(1), _logprobs(2)), prompt=(_logprobs(3),)),
        usage=s.Usage(prompt_tokens=37, cached_tokens=16, image_tokens=8),
        sections=(
            s.Section(name="layer4.scales", data=bytes(78)),
            s.Section(name="layer5.buffer", data=bytes(3 * 8 * 4)),
            s.Section(name="layer5.buffer1", data=bytes(2 * 8 * 2)),
            s.Section(name="native:toy", data=b"opaque"),
        ),
        ext=(s.Extension(name="trace", data=b"t"), s.Extension(name="unknown", data=b"u")),
    )


def good_draft() -> s.Draft:
    """Three drafts pending, with their distributions and the drafter's cache."""
    return s.Draft(
        method="eagle",
        between_rounds=False,
        fingerprint=DRAFT_FINGERPRINT,
        tokens=s.pack_ids([1, 2, 3]),
        probs=inline(np.full((3, VOCAB_SIZE), 1 / VOCAB_SIZE, np.float32)),
        hidden=inline(np.ones(16, np.float16)),
        kv_tokens=39,
        layers=(s.LayerState(layer=0, kind=LayerKind.FULL),),
        tensors=(
            _entry(0, Role.KEY, (39, 1, 8), THD, group="draft"),
            _entry(0, Role.VALUE, (39, 1, 8), THD, group="draft"),
        ),
    )


def good_grammar() -> s.Grammar:
    """A regex and the digest of its mask."""
    text = "[a-z ]+"
    digest = hashlib.sha256(msgspec.msgpack.encode(["regex", text])).hexdigest()
    return s.Grammar(kind="regex", text=text, digest=digest, accepted_tokens=3, mask_digest="8" * 64)


def good_requirements() -> s.Requirements:
    """What the decode engine of the same model asks for."""
    window, compressed = s.RowRule(most=8), s.RowRule(tokens_per_row=4)
    kernel = (s.Axis.CHANNEL, s.Axis.KERNEL)
    ssm = (s.Axis.HEAD, s.Axis.STATE, s.Axis.DIM)
    cross = s.RowRule(of_encoder=True)
    return s.Requirements(
        fingerprint=FINGERPRINT,
        layers=(
            s.LayerNeed(layer=0, kind=LayerKind.FULL),
            s.LayerNeed(layer=1, kind=LayerKind.SLIDING, window=9, record_past=False),
            s.LayerNeed(layer=2, kind=LayerKind.LINEAR, record_past=False),
            s.LayerNeed(layer=3, kind=LayerKind.DUMMY),
            s.LayerNeed(layer=4, kind=LayerKind.INDEXED),
            s.LayerNeed(layer=5, kind=LayerKind.COMPRESSED, tokens_per_entry=4),
            s.LayerNeed(layer=6, kind=LayerKind.CROSS),
        ),
        cache=(
            _need(0, Role.KEY, (0, 2, 16), THD, group="full"),
            _need(0, Role.VALUE, (0, 2, 16), THD, group="full"),
            _need(1, Role.KEY, (0, 2, 16), THD, group="window", rows=window),
            _need(1, Role.VALUE, (0, 2, 16), THD, group="window", rows=window),
            _need(2, Role.CONV, (24, 4), kernel, group="state"),
            _need(2, Role.SSM, (4, 16, 8), ssm, group="state", dtype="float32"),
            _need(4, Role.LATENT, (0, 32), TD, group="full"),
            _need(4, Role.ROPE, (0, 8), TD, group="full"),
            _need(4, Role.INDEX, (0, 16), TD, group="full", dtype="float8_e4m3fn", scheme="fp8-block"),
            _need(5, Role.COMPRESSED, (0, 32), TD, group="compressed", rows=compressed),
            _need(5, Role.VALUE, (0, 32), TD, rows=compressed, alias_of=KEY_0),
            _need(5, Role.BUFFER, (3, 8), (s.Axis.STATE, s.Axis.DIM), dtype="float32"),
            _need(5, Role.BUFFER, (2, 8), (s.Axis.STATE, s.Axis.DIM), part=1),
            _need(6, Role.CROSS_KEY, (0, 4, 8), THD, group="cross", rows=cross),
            _need(6, Role.CROSS_VALUE, (0, 4, 8), THD, group="cross", rows=cross),
        ),
        groups=(
            s.GroupNeed(group="full", block_tokens=16, layout="NHD"),
            s.GroupNeed(group="window", block_tokens=4, layout="NHD", window=8),
            s.GroupNeed(group="state", block_tokens=None, layout="NHD"),
            s.GroupNeed(group="compressed", block_tokens=16, layout="NHD"),
            s.GroupNeed(group="cross", block_tokens=16, layout="NHD", covers=s.TokenSource.ENCODER),
            s.GroupNeed(group="draft", block_tokens=16, layout="NHD", covers=s.TokenSource.DRAFT),
        ),
        rng_kinds=(s.RngKind.PHILOX, s.RngKind.TORCH_MT19937_CPU, s.RngKind.PCG64),
        grammar_kinds=("regex", "json"),
        draft=s.DraftNeed(
            method="eagle",
            fingerprint=DRAFT_FINGERPRINT,
            layers=(s.LayerNeed(layer=0, kind=LayerKind.FULL),),
            tensors=(
                _need(0, Role.KEY, (0, 1, 8), THD, group="draft"),
                _need(0, Role.VALUE, (0, 1, 8), THD, group="draft"),
            ),
            hidden=True,
            tokens_per_round=4,
        ),
        sections=("native:toy",),
        extensions=("trace",),
        placement=s.Placement.RESTORABLE,
    )


def good_expectation() -> s.Expectation:
    """Just enough of everything: 40 tokens + 1 + 4 drafts are 45 of the target's and of the draft's."""
    room = {"full": 3, "window": 5, "state": 1, "compressed": 3, "cross": 2, "draft": 3}
    return s.Expectation(
        request_id="req-1",
        known_transfer_ids=(b"another-transfer",),
        newest_attempt=2,
        room=tuple(s.GroupRoom(group=group, num_blocks=blocks) for group, blocks in room.items()),
        batch_slots=1,
        lease_seconds_left=2.0,
        estimated_seconds=1.0,
        known_multimodal=("img-1", "img-2", "img-3"),
        compiled_grammars=(good_grammar().digest,),
        parts=("grammar", "logprobs", "multimodal", "sections"),
    )


def good_arrival() -> s.Arrival:
    """Every group came whole and lies in this transfer's blocks."""
    return s.Arrival(
        transfer_id=TRANSFER_ID,
        groups=tuple(
            s.GroupArrival(group=name, expected_nbytes=64, nbytes=64, peer_digest="d", local_digest="d")
            for name in ("full", "window", "state", "compressed", "cross", "draft")
        ),
        landed=tuple(
            s.LandedBlocks(blocks=blocks, owner=TRANSFER_ID)
            for blocks in (
                _blocks("full", 16, (0, 1, 2)),
                _blocks("window", 4, (7, 8, 9), first=7),
                _blocks("state", None, (3,)),
                _blocks("compressed", 16, (4, 5, 6)),
                _blocks("cross", 16, (1, 0)),
                _blocks("draft", 16, (9, 8, 7)),
            )
        ),
        lease_seconds_left=1.0,
    )


def good_import() -> s.ImportReport:
    """The engine took all bytes and says so."""
    positions = {
        "full": (0, 39),
        "window": (31, 39),
        "state": (None, 39),
        "compressed": (0, 39),
        "cross": (0, 29),
        "draft": (0, 39),
    }
    return s.ImportReport(
        given_nbytes=4096,
        accepted_nbytes=4096,
        positions=tuple(
            s.SequencePosition(group=group, first_token=first, num_tokens=tokens)
            for group, (first, tokens) in positions.items()
        ),
    )


def good_replay() -> s.Replay:
    """Sampler, text and grammar read back as they were."""
    return s.Replay(
        tokens_digest=hashlib.sha256(np.array(IDS, "<i4").tobytes()).hexdigest(),
        prompt_tokens=37,
        rng=s.Rng(kind=s.RngKind.PHILOX, seed=1234, draws=3),
        text=s.TextPosition(emitted_chars=12, tail=" harbour"),
        grammar_mask_digest="8" * 64,
    )


def with_last_logits(state: s.ExecutionState) -> s.ExecutionState:
    """The same request one step earlier: nothing pending, 39 tokens run, their last logits shipped."""
    logits = inline(np.linspace(-1, 1, VOCAB_SIZE, dtype=np.float32))
    tokens = s.Tokens.of(IDS[:39], prompt_tokens=37, emitted_tokens=1, last_logits=logits)
    state = put(state, "logprobs.output", state.logprobs.output[:1] if state.logprobs else ())
    return put(put(state, "grammar.accepted_tokens", 2), "tokens", tokens)


def put(record: Any, path: str, value: Any) -> Any:
    """A copy of a record with the field at ``path`` replaced: ``put(state, "layers.1.window", 4)``."""
    first, _, rest = path.partition(".")
    if isinstance(record, tuple):
        at = int(first)
        return (*record[:at], put(record[at], rest, value) if rest else value, *record[at + 1 :])
    inner = put(getattr(record, first), rest, value) if rest else value
    return msgspec.structs.replace(record, **{first: inner})


def get(record: Any, path: str) -> Any:
    """The field at ``path``."""
    for part in path.split("."):
        record = record[int(part)] if isinstance(record, tuple) else getattr(record, part)
    return record


def drop(record: Any, path: str) -> Any:
    """A copy without the tuple item at ``path``: ``drop(state, "tensors.3")``."""
    owner, _, at = path.rpartition(".")
    items = get(record, owner)
    return put(record, owner, items[: int(at)] + items[int(at) + 1 :])


def inline(array: np.ndarray[Any, Any]) -> s.InlineTensor:
    """An array as it travels."""
    return s.InlineTensor.of(array)


def _need(
    layer: int, role: Role, shape: tuple[int, ...], axes: tuple[s.Axis, ...], **more: Any
) -> s.TensorNeed:
    return s.TensorNeed(layer=layer, role=role, shape=shape, axes=axes, **{"dtype": "bfloat16", **more})


def _blocks(
    group: str,
    block_tokens: int | None,
    ids: tuple[int, ...],
    first: int = 0,
    placement: range | None = None,
) -> s.GroupBlocks:
    return s.GroupBlocks(
        group=group,
        block_tokens=block_tokens,
        layout="NHD",
        first_logical_block=first,
        ids=s.pack_ids(ids),
        placement=None if placement is None else s.pack_ids(placement),
    )


def _logprobs(token: int) -> s.LogprobRow:
    top = np.array([-0.1, -2.0], "<f4").tobytes()
    return s.LogprobRow(token=token, logprob=-0.1, top_ids=s.pack_ids([token, 0]), top_logprobs=top)
