"""Rank plans: every byte of every destination rank from one source rank, sources spread evenly."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest

from kvferry.errors import IncompatibleError
from kvferry.layout import (
    BlockTable,
    GroupLayout,
    LayerKind,
    PoolLayout,
    RankMove,
    Role,
    TensorLayout,
    copy_plan,
    mismatches,
    rank_plan,
)
from layout_oracle import copy_by_plan, random_pool, rows

FORM = {"head_dim": 2, "dtype": "float16", "num_blocks": 8}
TOKENS = 9


def ranks(tp: int, kv_heads: int, *, pp: int = 1, num_layers: int = 8, **form: object) -> list[PoolLayout]:
    """The layouts of tp x pp ranks; with more ranks than heads each head is held by several."""
    heads, copies = max(1, kv_heads // tp), max(1, tp // kv_heads)
    layers = np.array_split(range(num_layers), pp)
    return [
        PoolLayout.paged(
            stage.tolist(),
            kv_heads=heads,
            head_start=rank // copies * heads,
            **{"block_size": 4, **FORM, **form},
        )
        for stage in layers
        for rank in range(tp)
    ]


def move_all(src: list[PoolLayout], dst: list[PoolLayout], moves: tuple[RankMove, ...]) -> Counter[int]:
    """Carry out a rank plan on bytes that name their element; returns bytes given by each source rank.

    Asserts that each destination row arrived exactly once and is the model's row of that name.
    """
    given: Counter[int] = Counter()
    memories = [np.zeros(layout.nbytes, np.uint8) for layout in dst]
    for move in moves:
        source, target = src[move.src_rank], dst[move.dst_rank]
        size, other = source.groups[0].block_size, target.groups[0].block_size
        src_table = [BlockTable(0, range(-(-TOKENS // size)))]
        dst_table = [BlockTable(0, range(-(-TOKENS // other))[::-1])]
        memory = np.zeros(source.nbytes, np.uint8)
        for key, byte in rows(source, src_table, TOKENS).items():
            memory[byte : byte + 4] = tag(key)
        plan = copy_plan(
            source,
            target,
            src_table,
            dst_table,
            TOKENS,
            layers=move.layers,
            parts=move.parts,
            head_range=move.head_range,
        )
        given[move.src_rank] += plan.total_nbytes
        for start, nbytes in zip(plan.dst_offset, plan.nbytes, strict=True):
            assert not memories[move.dst_rank][start : start + nbytes].any(), "a byte crossed twice"
        copy_by_plan(plan, memory, memories[move.dst_rank])
    for layout, memory in zip(dst, memories, strict=True):
        other = layout.groups[0].block_size
        table = [BlockTable(0, range(-(-TOKENS // other))[::-1])]
        for key, byte in rows(layout, table, TOKENS).items():
            assert memory[byte : byte + 4].tobytes() == tag(key).tobytes()
    return given


def tag(key: tuple[int, str, int, int, int]) -> np.ndarray:
    layer, role, _, token, head = key
    return np.array([layer + 1, len(role), token + 1, head + 1], np.uint8)


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("src_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("dst_tp", [1, 2, 4, 8])
def test_tensor_parallel_both_ways(src_tp: int, dst_tp: int, kv_heads: int) -> None:
    """Every split of the heads into every other; with replicated heads each source gives the same."""
    src = ranks(src_tp, kv_heads, axis_order="HND")
    dst = ranks(dst_tp, kv_heads, block_size=8)
    given = move_all(src, dst, rank_plan(src, dst))
    assert sorted(given) == list(range(src_tp))
    assert len(set(given.values())) == 1


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(3, 1), (1, 3), (3, 3)])
def test_three_heads(src_tp: int, dst_tp: int) -> None:
    """A model of three KV heads goes from three ranks to one and back."""
    src, dst = ranks(src_tp, 3), ranks(dst_tp, 3, joined_kv=True)
    assert len(set(move_all(src, dst, rank_plan(src, dst)).values())) == 1


@pytest.mark.parametrize("other_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [24, 1])
def test_three_ranks_into_any_number_and_back(other_tp: int, kv_heads: int) -> None:
    """Three ranks' heads end inside those of two, four or eight; a replicated head is given by turns."""
    for src_tp, dst_tp in ((3, other_tp), (other_tp, 3)):
        src, dst = ranks(src_tp, kv_heads), ranks(dst_tp, kv_heads, axis_order="HND", block_size=3)
        given = move_all(src, dst, rank_plan(src, dst))
        assert sorted(given) == list(range(src_tp))
        # Each gives alike, or, of a head that all hold, up to one layer's K and V more.
        assert max(given.values()) - min(given.values()) <= (0 if kv_heads == 24 else 2 * TOKENS * 4)


@pytest.mark.parametrize(("src_pp", "dst_pp"), [(1, 2), (2, 1), (2, 4), (3, 2), (4, 4)])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)])
def test_pipeline_parallel_both_ways(src_pp: int, dst_pp: int, tp: tuple[int, int]) -> None:
    """Unlike splits of the layers, alone and with unlike splits of the heads."""
    src, dst = ranks(tp[0], 2, pp=src_pp), ranks(tp[1], 2, pp=dst_pp, cross_layer=True)
    move_all(src, dst, rank_plan(src, dst))


def mla_ranks(count: int, num_layers: int = 12) -> list[PoolLayout]:
    tensors = tuple(
        TensorLayout(layer, role, "float16", layer * 1000 + at, 4 * 12, 12, 12, 1, width)
        for layer in range(num_layers)
        for role, at, width in ((Role.LATENT, 0, 4), (Role.ROPE, 8, 2))
    )
    group = GroupLayout("mla", LayerKind.MLA, 4, 8, tensors)
    return [PoolLayout((group,), num_layers * 1000)] * count


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(8, 8), (8, 2), (2, 8), (3, 2), (2, 3), (4, 1), (1, 4)])
def test_mla_crosses_once_for_each_destination_and_is_spread(src_tp: int, dst_tp: int) -> None:
    """Each destination rank gets every layer once, latent and rope of one together; sources give alike."""
    moves = rank_plan(mla_ranks(src_tp), mla_ranks(dst_tp))
    got = Counter((move.dst_rank, layer) for move in moves for layer in move.layers)
    assert got == Counter({(rank, layer): 1 for rank in range(dst_tp) for layer in range(12)})
    assert all(move.parts == ((Role.LATENT, 0), (Role.ROPE, 0)) for move in moves)
    given = Counter()
    for move in moves:
        given[move.src_rank] += len(move.layers)
    assert set(given.values()) == {12 * dst_tp // src_tp}


def test_as_many_sources_as_destinations_pair_up() -> None:
    """Where it comes out even each destination has one source: as few connections as can be."""
    moves = rank_plan(mla_ranks(8), mla_ranks(8))
    assert [(move.src_rank, move.dst_rank) for move in moves] == [(rank, rank) for rank in range(8)]


def test_each_layer_kind_takes_its_own_turns() -> None:
    """Full layers that come one in six do not all fall to one of six ranks."""
    sliding = [layer for layer in range(36) if layer % 6 != 5]
    form = {"kv_heads": 1, "block_size": 4, **FORM}
    pool = PoolLayout.beside(
        PoolLayout.paged(sliding, name="sliding", window=8, **form),
        PoolLayout.paged([layer for layer in range(36) if layer % 6 == 5], **form),
    )
    moves = rank_plan([pool] * 6, [pool])
    full = Counter(move.src_rank for move in moves for layer in move.layers if layer % 6 == 5)
    assert full == Counter(range(6))


def test_heads_that_are_no_neighbours_are_moves_apart() -> None:
    """Where another rank gives the heads between, a rank gives its own in two moves."""
    outer = PoolLayout.paged(range(4), kv_heads=4, block_size=4, **FORM)
    inner = PoolLayout.paged(range(4), kv_heads=2, head_start=1, block_size=4, **FORM)
    moves = rank_plan([outer, inner], [outer])
    assert {(move.src_rank, move.head_range) for move in moves} == {
        (0, (0, 4)),
        (0, (0, 1)),
        (0, (3, 4)),
        (1, (1, 3)),
    }
    move_all([outer, inner], [outer], moves)


def test_heads_that_no_source_holds_are_named() -> None:
    """Layers or heads that are missing at the source raise IncompatibleError that names them."""
    src, dst = ranks(2, 4), ranks(1, 4)
    with pytest.raises(IncompatibleError, match=r"key heads 2 to 3 of destination rank 0: .* \(layers 0-7\)"):
        rank_plan(src[:1], dst)
    with pytest.raises(
        IncompatibleError, match=r"value heads 0 to 3 of destination rank 0: .* \(layers 4-7\)"
    ):
        rank_plan(ranks(1, 4, pp=2)[:1], dst)


def test_unlike_ranks_are_named() -> None:
    """A pair of ranks that does not match raises IncompatibleError that names both ranks and the field."""
    src, dst = ranks(2, 4), ranks(1, 4, dtype="float32")
    with pytest.raises(IncompatibleError, match="source rank 0 and destination rank 0: key dtype: float16"):
        rank_plan(src, dst)


def test_mismatches_are_words_that_name_the_field() -> None:
    """Each unlike field is one reason with its layers; unlike splits and forms are none."""
    one = PoolLayout.paged(range(4), kv_heads=2, block_size=4, **FORM)
    assert mismatches(one, ranks(2, 4, num_layers=6, block_size=8, cross_layer=True)[1]) == ()
    wide = PoolLayout.paged(range(2, 4), kv_heads=2, block_size=4, **{**FORM, "head_dim": 4})
    assert mismatches(one, wide) == (
        "key head_dim: 2 against 4 (layers 2-3)",
        "value head_dim: 2 against 4 (layers 2-3)",
    )
    sliding = PoolLayout.paged(range(4), kv_heads=2, block_size=4, window=9, **FORM)
    assert mismatches(one, sliding)[:2] == (
        "key kind: full against sliding (layers 0-3)",
        "key window: None against 9 (layers 0-3)",
    )
    tensor = TensorLayout(0, Role.COMPRESSED, "float16", 0, 16, 8, 8, 1, 4)
    by_four, by_two = (
        PoolLayout((GroupLayout("c", LayerKind.COMPRESSED, 4, 8, (tensor,), None, ratio),), 1000)
        for ratio in (4, 2)
    )
    assert mismatches(by_four, by_two) == ("compressed tokens_per_entry: 4 against 2 (layers 0)",)
    slot = msgspec.structs.replace(tensor, token_stride=0)
    state = PoolLayout((GroupLayout("c", LayerKind.COMPRESSED, None, 8, (slot,), None),), 1000)
    blocks = PoolLayout((GroupLayout("c", LayerKind.COMPRESSED, 1, 8, (tensor,), None),), 1000)
    assert mismatches(state, blocks) == (
        "compressed block_size: state slots against blocks of tokens (layers 0)",
    )
    elsewhere = PoolLayout.paged([7, 9], kv_heads=2, block_size=4, **FORM)
    assert mismatches(one, elsewhere) == ("layers: 0-3 against 7, 9, none in common",)
    group = one.groups[0]
    no_value = PoolLayout(
        (GroupLayout("full", group.kind, 4, 8, tuple(t for t in group.tensors if t.role is Role.KEY)),),
        one.nbytes,
    )
    assert mismatches(one, no_value) == ("value: held against none (layers 0-3)",)
    assert mismatches(no_value, one) == ("value: none against held (layers 0-3)",)


def test_source_bytes_are_random_enough() -> None:
    """The oracle's pools are not constant, so an unmoved byte is seen."""
    assert len(set(random_pool(ranks(1, 2)[0], 3).tolist())) > 100
