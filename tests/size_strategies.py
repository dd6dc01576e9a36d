"""Random model shapes and requests for the property tests of size, and a slow oracle for them.

The oracle walks layers, ranks, blocks and tokens one by one and asks of each token whether it is
still needed; it shares no formula with the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvferry.model import CacheTensor, LayerGroup, LayerKind, ModelShape, TensorRole

ITEM_NBYTES = 2
GROWING = (LayerKind.FULL, LayerKind.MLA, LayerKind.COMPRESSED)
KINDS = (
    LayerKind.FULL,
    LayerKind.WINDOW,
    LayerKind.CHUNKED,
    LayerKind.MLA,
    LayerKind.COMPRESSED,
    LayerKind.MAMBA2,
    LayerKind.CROSS,
)
ENCODER_TOKENS = 7


@dataclass(frozen=True)
class Asked:
    """What is asked about a shape. ``tokens`` and ``cached`` are small, so that the oracle can walk them."""

    tokens: int
    cached: int
    block: int | None
    tp: int
    pp: int


def tensors_of(kind: LayerKind, heads: int, width: int) -> tuple[CacheTensor, ...]:
    if kind is LayerKind.MLA:
        return (CacheTensor(TensorRole.LATENT, 1, width),)
    if kind is LayerKind.COMPRESSED:
        return (CacheTensor(TensorRole.COMPRESSED, 1, width),)
    if kind is LayerKind.MAMBA2:
        conv = CacheTensor(TensorRole.CONV, 8, width, is_replicable=False)
        return (conv, CacheTensor(TensorRole.STATE, 8, 2 * width, is_replicable=False))
    return (CacheTensor(TensorRole.K, heads, width), CacheTensor(TensorRole.V, heads, 2 * width))


@st.composite
def groups(draw: st.DrawFn, num_layers: int, kinds: tuple[LayerKind, ...] = KINDS) -> LayerGroup:
    kind = draw(st.sampled_from(kinds))
    layers = tuple(sorted(draw(st.sets(st.integers(0, num_layers - 1), min_size=1))))
    heads, width = draw(st.sampled_from((1, 2, 4, 8))), draw(st.integers(1, 5))
    limit = draw(st.integers(1, 40)) if kind in {LayerKind.WINDOW, LayerKind.CHUNKED} else 0
    ratio = draw(st.sampled_from((2, 4))) if kind is LayerKind.COMPRESSED else 1
    return LayerGroup(kind, layers, tensors_of(kind, heads, width), limit, ratio)


@st.composite
def shapes(draw: st.DrawFn, kinds: tuple[LayerKind, ...] = KINDS) -> ModelShape:
    num_layers = draw(st.integers(1, 8))
    chosen = draw(st.lists(groups(num_layers, kinds), min_size=1, max_size=4))
    return ModelShape("made", num_layers, tuple(chosen), "bf16", encoder_tokens=ENCODER_TOKENS)


@st.composite
def asked(draw: st.DrawFn, max_pp: int = 1) -> Asked:
    tokens = draw(st.integers(1, 100))
    return Asked(
        tokens=tokens,
        cached=draw(st.integers(0, tokens)),
        block=draw(st.sampled_from((None, 1, 4, 16))),
        tp=draw(st.sampled_from((1, 2, 4, 8))),
        pp=draw(st.integers(1, max_pp)),
    )


def is_live(group: LayerGroup, token: int, tokens: int) -> bool:
    """Whether the state after ``tokens`` tokens still needs the row of ``token``."""
    if group.kind is LayerKind.WINDOW:
        return tokens - token <= group.limit_tokens
    if group.kind is LayerKind.CHUNKED:
        return token // group.limit_tokens == tokens // group.limit_tokens
    if group.kind is LayerKind.COMPRESSED:
        return (token + 1) % group.ratio == 0  # a row appears with the last token of its group
    return True


def live_rows(group: LayerGroup, tokens: int) -> int:
    """Rows of one layer, counted one by one."""
    if group.kind is LayerKind.MAMBA2:
        return 1
    if group.kind is LayerKind.CROSS:
        return ENCODER_TOKENS
    return sum(is_live(group, token, tokens) for token in range(tokens))


def row_nbytes(group: LayerGroup) -> int:
    """Bytes of one copy of a row."""
    return sum(ITEM_NBYTES * tensor.width for tensor in group.tensors for _head in range(tensor.heads))


def rank_row_nbytes(group: LayerGroup, rank: int, tp: int) -> int:
    """Bytes of a row on one rank, head by head: rank r holds the heads that its query heads read."""
    nbytes = 0
    for tensor in group.tensors:
        copies = max(1, tp // tensor.heads)
        holders = [head * copies + copy for head in range(tensor.heads) for copy in range(copies)]
        for i in range(len(holders)):
            head, owner = i // copies, i * tp // len(holders)
            if owner == rank:
                nbytes += ITEM_NBYTES * tensor.width
                assert head < tensor.heads
    return nbytes
