"""Copy plans against a naive loop over every byte, for pairs of layouts drawn at random."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import IncompatibleError, InputError
from kvferry.layout import (
    BlockTable,
    CopyPlan,
    GroupLayout,
    LayerKind,
    PoolLayout,
    Role,
    TensorLayout,
    check_tables,
    chunk_name,
    copy_plan,
    source_pieces,
)
from layout_oracle import (
    byte_pairs,
    chunks,
    copy_by_plan,
    plan_pairs,
    random_pool,
    rows,
    source_order,
)
from layout_strategies import ROLES, Case, cases

CHUNK_SIZES = st.sampled_from([1, 7, 24, 100, 1 << 20])


def plan_of(case: Case, **options: object) -> CopyPlan:
    options.setdefault("first_token", case.first_token)
    return copy_plan(case.src, case.dst, case.src_tables, case.dst_tables, case.tokens, **options)


def expected_pairs(case: Case, first_token: int | None = None) -> set[tuple[int, int]]:
    first = case.first_token if first_token is None else first_token
    return byte_pairs(
        rows(case.src, case.src_tables, case.tokens, first),
        rows(case.dst, case.dst_tables, case.tokens, first),
        case.src,
        case.dst,
    )


def chunk_nbytes(value: int) -> mock._patch:
    return mock.patch("kvferry.layout.clusters.CHUNK_NBYTES", value)


@given(cases(), CHUNK_SIZES)
@settings(max_examples=120, deadline=None)
def test_moves_each_needed_byte_once_and_nothing_else(case: Case, limit: int) -> None:
    """The bytes of a plan are those of a loop over every row of both layouts, each exactly once."""
    with chunk_nbytes(limit):
        plan = plan_of(case)
    pairs = plan_pairs(plan)
    expected = expected_pairs(case)
    assert len(pairs) == len(set(pairs)) == len({dst for _, dst in pairs}) == plan.total_nbytes
    assert set(pairs) == expected
    src, dst = random_pool(case.src, 1), random_pool(case.dst, 2)
    wanted = dst.copy()
    for src_byte, dst_byte in expected:
        wanted[dst_byte] = src[src_byte]
    copy_by_plan(plan, src, dst)
    np.testing.assert_array_equal(dst, wanted)


@given(cases(), CHUNK_SIZES)
@settings(max_examples=50, deadline=None)
def test_order_is_the_sources(case: Case, limit: int) -> None:
    """A plan reads group, layer, cluster, block and then by address, whatever the destination is."""
    with chunk_nbytes(limit):
        plan = plan_of(case)
    place = source_order(case.src, case.src_tables, case.tokens, limit)
    found = [place[src] for src, _ in plan_pairs(plan)]
    assert found == sorted(found)


@given(cases(), CHUNK_SIZES)
@settings(max_examples=50, deadline=None)
def test_pieces_are_as_long_as_they_can_be(case: Case, limit: int) -> None:
    """Inside a chunk no two neighbouring pieces touch on both sides, and no piece is empty."""
    with chunk_nbytes(limit):
        plan = plan_of(case)
    touch = (np.diff(plan.src_offset) == plan.nbytes[:-1]) & (np.diff(plan.dst_offset) == plan.nbytes[:-1])
    first_of_chunk = np.zeros(plan.num_pieces + 1, bool)
    first_of_chunk[plan.chunk_start] = True
    assert not np.any(touch & ~first_of_chunk[1:-1])
    assert np.all(plan.nbytes > 0)


@given(cases(same_split=True), CHUNK_SIZES)
@settings(max_examples=50, deadline=None)
def test_digests_at_export_are_those_at_arrival(case: Case, limit: int) -> None:
    """The source's chunks of a whole request, taken without a destination, arrive byte for byte."""
    with chunk_nbytes(limit):
        exported = source_pieces(case.src, case.src_tables, case.tokens)
        plan = plan_of(case, first_token=0)
    src, dst = random_pool(case.src, 1), random_pool(case.dst, 2)
    copy_by_plan(plan, src, dst)
    assert exported.chunk_complete.all()
    assert plan.chunk_complete.all()
    assert exported.total_nbytes == plan.total_nbytes
    assert chunks(exported, src, at="offset") == chunks(plan, dst, at="dst_offset")


@pytest.mark.parametrize("kind", list(ROLES))
@given(st.data(), st.booleans(), CHUNK_SIZES)
@settings(max_examples=15, deadline=None)
def test_complete_chunks_are_those_that_can_be_compared(
    kind: LayerKind, data: st.DataObject, same_split: bool, limit: int
) -> None:
    """A chunk is complete exactly if a partial move has all its bytes, and those then equal the export's."""
    case = data.draw(cases(same_split=same_split, kinds=(kind,)))
    with chunk_nbytes(limit):
        exported = source_pieces(case.src, case.src_tables, case.tokens)
        plan = plan_of(case)
    src, dst = random_pool(case.src, 1), random_pool(case.dst, 2)
    copy_by_plan(plan, src, dst)
    whole, arrived = chunks(exported, src, at="offset"), chunks(plan, dst, at="dst_offset")
    assert arrived.keys() <= whole.keys()
    for chunk_id, complete in zip(plan.chunk_id.tolist(), plan.chunk_complete.tolist(), strict=True):
        assert complete == (len(arrived[chunk_id]) == len(whole[chunk_id]))
        if complete:
            assert arrived[chunk_id] == whole[chunk_id]


@pytest.mark.parametrize("kind", list(ROLES))
@given(st.data(), CHUNK_SIZES)
@settings(max_examples=15, deadline=None)
def test_chunks_are_absolute_and_bounded(kind: LayerKind, data: st.DataObject, limit: int) -> None:
    """Each source byte has one chunk id, of one layer, however the move is cut; chunks keep to the limit."""
    case = data.draw(cases(kinds=(kind,)))
    with chunk_nbytes(limit):
        exported = source_pieces(case.src, case.src_tables, case.tokens)
        plan = plan_of(case)
        names = {chunk: chunk_name(case.src, chunk) for chunk in exported.chunk_id.tolist()}
    owner = {}
    for chunk, start, stop in zip(exported.chunk_id.tolist(), *chunk_bounds(exported), strict=True):
        for offset, nbytes in zip(exported.offset[start:stop], exported.nbytes[start:stop], strict=True):
            owner.update(dict.fromkeys(range(offset, offset + nbytes), chunk))
    for chunk, start, stop in zip(plan.chunk_id.tolist(), *chunk_bounds(plan), strict=True):
        for offset, nbytes in zip(plan.src_offset[start:stop], plan.nbytes[start:stop], strict=True):
            assert {owner[byte] for byte in range(offset, offset + nbytes)} == {chunk}
    assert len(set(names.values())) == len(names)
    sizes = np.bincount([list(names).index(chunk) for chunk in owner.values()], minlength=len(names))
    for name, size in zip(names.values(), sizes, strict=True):
        entry = 200 if "slot" not in name else 1  # no entry of a drawn layer is longer
        assert size <= max(limit, entry)


def chunk_bounds(table: object) -> tuple[list[int], list[int]]:
    edges = table.chunk_start.tolist()
    return edges[:-1], edges[1:]


@given(cases(same_split=True, kinds=(LayerKind.FULL, LayerKind.MLA, LayerKind.COMPRESSED)))
@settings(max_examples=50, deadline=None)
def test_prefix_and_residual_are_the_whole(case: Case) -> None:
    """Moving [0, k) and then [k, n) moves the bytes of [0, n), each once, where every token is kept."""
    prefix = copy_plan(case.src, case.dst, case.src_tables, case.dst_tables, case.first_token)
    parts = plan_pairs(prefix) + plan_pairs(plan_of(case))
    assert sorted(parts) == sorted(plan_pairs(plan_of(case, first_token=0)))


@given(cases(kinds=(LayerKind.SLIDING, LayerKind.CROSS, LayerKind.LINEAR)))
@settings(max_examples=50, deadline=None)
def test_a_prefix_hit_shortens_no_window_state_or_cross_attention(case: Case) -> None:
    """What is not one entry a token moves whole even where decode holds every token."""
    assert plan_pairs(plan_of(case, first_token=case.tokens)) == plan_pairs(plan_of(case, first_token=0))


@given(cases(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_request_moves_in_parts(case: Case, data: st.DataObject) -> None:
    """Token ranges that follow each other move what one plan moves, each byte once, each part its own."""
    cut = data.draw(st.integers(0, case.tokens))
    moved = []
    for token_range in ((0, cut), (cut, case.tokens)) if cut < case.tokens else ((0, cut),):
        part = plan_pairs(plan_of(case, token_range=token_range))
        sides = (case.src, case.src_tables), (case.dst, case.dst_tables)
        src_rows, dst_rows = (rows(*side, case.tokens, case.first_token, token_range) for side in sides)
        assert set(part) == byte_pairs(src_rows, dst_rows, case.src, case.dst)
        moved += part
    assert sorted(moved) == sorted(plan_pairs(plan_of(case)))


@given(cases(), st.data())
@settings(max_examples=50, deadline=None)
def test_filters_choose_layers_parts_and_heads(case: Case, data: st.DataObject) -> None:
    """layers, parts and head_range each keep exactly the rows that they name."""
    common = sorted(set(case.src.layers) & set(case.dst.layers))
    layers = data.draw(st.lists(st.sampled_from(common), min_size=1, unique=True))
    parts = data.draw(st.sets(st.sampled_from([(role, 0) for role in Role])))
    low = data.draw(st.integers(0, 2))
    high = data.draw(st.integers(low + 1, 4))
    plan = plan_of(case, layers=layers, parts=parts, head_range=(low, high))
    names = {role.value for role, _ in parts}
    kept = {
        key: byte
        for key, byte in rows(case.src, case.src_tables, case.tokens, case.first_token).items()
        if key[0] in layers and key[1] in names and low <= key[4] < high
    }
    there = rows(case.dst, case.dst_tables, case.tokens, case.first_token)
    assert set(plan_pairs(plan)) == byte_pairs(kept, there, case.src, case.dst)


BASE = {"kv_heads": 2, "head_dim": 3, "dtype": "bfloat16", "num_blocks": 20}
FORMS = [
    {"axis_order": order, "joined_kv": joined, "cross_layer": cross}
    for order, joined, cross in itertools.product(("NHD", "HND"), (False, True), (False, True))
]


@pytest.mark.parametrize("sizes", [(16, 64), (64, 16), (48, 32), (32, 48), (16, 16)])
@pytest.mark.parametrize("src_form", FORMS)
def test_paged_forms_and_block_sizes(sizes: tuple[int, int], src_form: dict[str, object]) -> None:
    """Every axis order, K and V joined or apart, and one region or many convert into each other."""
    src = PoolLayout.paged(range(2), block_size=sizes[0], **BASE, **src_form)
    rng = np.random.default_rng(sizes[0])
    tokens = 150
    for dst_form in FORMS:
        dst = PoolLayout.paged(range(2), block_size=sizes[1], **BASE, **dst_form)
        case = Case(
            src,
            dst,
            *((BlockTable(0, rng.permutation(20)[: -(-tokens // size)]),) for size in sizes),
            tokens,
            0,
        )
        assert set(plan_pairs(plan_of(case))) == expected_pairs(case)


def test_blocks_of_one_form_are_one_piece_each() -> None:
    """Equal forms move a block at a time, neighbouring blocks together, and only live tokens of the last."""
    for form in FORMS:
        pool = PoolLayout.paged([0], block_size=4, **BASE, **form)
        block = 4 * 2 * 3 * 2
        table = (BlockTable(0, [5, 6, 9]),)
        plan = copy_plan(pool, pool, table, (BlockTable(0, [1, 2, 3]),), 12)
        sizes = [4 * block, 2 * block] if form["joined_kv"] else [2 * block, block] * 2
        assert plan.nbytes.tolist() == sizes
        assert copy_plan(pool, pool, table, table, 9).total_nbytes == 2 * 9 * 12


def test_full_hit_moves_only_what_tokens_do_not_shorten() -> None:
    """With every token held, nothing of a full group moves and the window's tail still does."""
    full = PoolLayout.paged([0], block_size=4, **BASE)
    both = PoolLayout.beside(full, PoolLayout.paged([1], block_size=4, **BASE, name="sliding", window=3))
    tables = (BlockTable(0, [0, 1, 2]), BlockTable(1, [7, 8]))
    assert copy_plan(full, full, tables[:1], tables[:1], 10, first_token=10).num_pieces == 0
    plan = copy_plan(both, both, tables, tables, 10, first_token=10)
    assert plan.total_nbytes == 3 * 2 * 12


def test_refuses_unlike_tensors_by_name() -> None:
    """A pair without a plan raises IncompatibleError that names tensor, field and layers."""
    one = PoolLayout.paged(range(3), block_size=4, **BASE)
    for field, value in (("dtype", "float32"), ("head_dim", 4)):
        other = PoolLayout.paged(range(3), block_size=4, **{**BASE, field: value})
        with pytest.raises(IncompatibleError, match=rf"key {field}: .* against {value}.* \(layers 0-2\)"):
            copy_plan(one, other, [BlockTable(0, [0])], [BlockTable(0, [0])], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 13}, "source table of group 'full': 3 blocks from block 0 on, but the request needs"),
        ({"dst": BlockTable(0, [0, 1])}, "destination table of group 'full': 2 blocks"),
        ({"dst": BlockTable(0, [4, 5, 4])}, "destination table of group 'full': block id 4 comes twice"),
        ({"src": BlockTable(0, [4, 5, 4])}, "source table of group 'full': block id 4 comes twice"),
        ({"dst": BlockTable(0, [4, 5, 20])}, "block id 20 is not below num_blocks 20"),
        ({"src": BlockTable(1, [4, 5, 6])}, "3 blocks from block 1 on, but the request needs blocks 0 to 2"),
        ({"tokens": -1}, "tokens: -1"),
        ({"tokens": 1 << 40}, "tokens: 1099511627776"),
        ({"first_token": 11}, "first_token: 11"),
        ({"token_range": (3, 11)}, "token_range stop: 11"),
        ({"token_range": (4, 3)}, "token_range start: 4"),
        ({"layers": [0, 7]}, "layers: 7 not held by both sides"),
        ({"head_range": (2, 2)}, "head_range"),
        ({"src": BlockTable(0, [4, 5, 6], tokens=3)}, "only a cross-attention table"),
        ({"tables": 2}, "source tables: 2 for 1 groups"),
    ],
)
def test_bad_requests_are_named(options: dict[str, object], message: str) -> None:
    """A wrong table or number raises InputError that says which."""
    pool = PoolLayout.paged([0], block_size=4, **BASE)
    good = BlockTable(0, [1, 2, 3])
    src = [options.pop("src", good)] * options.pop("tables", 1)
    dst = [options.pop("dst", good)]
    with pytest.raises(InputError, match=message):
        copy_plan(pool, pool, src, dst, options.pop("tokens", 10), **options)


@pytest.mark.parametrize(
    ("table", "tokens"),
    [
        (BlockTable(0, [1, 2, 3]), 12),
        (BlockTable(0, [1, 2, 3]), 13),
        (BlockTable(0, [4, 5, 4]), 12),
        (BlockTable(0, [4, 5, 20]), 12),
        (BlockTable(0, [4, 5, 20]), 8),
        (BlockTable(1, [4, 5]), 12),
        (BlockTable(0, []), 0),
        (BlockTable(0, [4], tokens=3), 4),
        (BlockTable(0, [4]), -1),
    ],
)
def test_tables_are_checked_as_a_plan_would(table: BlockTable, tokens: int) -> None:
    """Without making one: the same tables pass, and the same words refuse the others."""
    pool = PoolLayout.paged([0], block_size=4, **BASE)

    def refusal(call: Callable[[], object]) -> str | None:
        try:
            call()
        except InputError as error:
            return str(error).replace("source table", "block table")
        return None

    planned = refusal(lambda: copy_plan(pool, pool, [table], [table], tokens))
    assert refusal(lambda: check_tables(pool, [table], tokens)) == planned


@pytest.mark.parametrize("ids", [[-1], [1 << 31], [0.5], [[1]], ["a"], [1 << 70]])
def test_block_ids_are_whole_numbers(ids: list[object]) -> None:
    """A block table takes whole numbers that fit int32 and nothing else."""
    with pytest.raises(InputError, match="block ids"):
        BlockTable(0, ids)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_tables_keep_their_own_ids(dtype: type) -> None:
    """An engine that changes its array later does not change the table."""
    ids = np.array([1, 2], dtype)
    table = BlockTable(0, ids)
    ids[0] = 9
    assert table.ids.tolist() == [1, 2]
    assert table.ids.dtype == np.int32


def test_state_and_cross_tables_must_agree() -> None:
    """Unlike numbers of state slots, or of encoder tokens, on the two sides are refused; so is none."""
    tensor = TensorLayout(0, Role.SSM, "float32", 0, 8, 0, 4, 2, 1)
    state = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (tensor,)),), 24)
    with pytest.raises(InputError, match="'state': it is for 2 entries, the source has 1"):
        copy_plan(state, state, [BlockTable(0, [1])], [BlockTable(0, [1, 2])], 5)
    with pytest.raises(InputError, match="'state': the block table names no state slot"):
        copy_plan(state, state, [BlockTable(0, [])], [BlockTable(0, [])], 5)
    tensor = TensorLayout(0, Role.CROSS_KEY, "float32", 0, 16, 8, 4, 2, 1)
    cross = PoolLayout((GroupLayout("cross", LayerKind.CROSS, 2, 3, (tensor,)),), 48)
    with pytest.raises(InputError, match="'cross': it is for 3 entries, the source has 4"):
        copy_plan(cross, cross, [BlockTable(0, [1, 2], 4)], [BlockTable(0, [1, 2], 3)], 5)
    with pytest.raises(InputError, match="must state its tokens"):
        copy_plan(cross, cross, [BlockTable(0, [1, 2])], [BlockTable(0, [1, 2])], 4)


def test_some_heads_of_a_state_slot_keep_their_chunks() -> None:
    """A state slot is cut at fixed bytes of the whole slot, also where only its last heads move."""
    slot = {"block_stride": 64, "token_stride": 0, "head_stride": 4, "head_dim": 1}
    tensor = TensorLayout(0, Role.SSM, "float32", 0, heads=8, **slot)
    src = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (tensor,)),), 200)
    tensor = TensorLayout(0, Role.SSM, "float32", 0, heads=5, head_start=3, **slot)
    dst = PoolLayout((GroupLayout("state", LayerKind.LINEAR, None, 3, (tensor,)),), 200)
    with chunk_nbytes(8):
        whole = source_pieces(src, [BlockTable(0, [2])], 9)
        plan = copy_plan(src, dst, [BlockTable(0, [2])], [BlockTable(0, [1])], 9)
    assert whole.nbytes.tolist() == [8, 8, 8, 8]
    assert plan.nbytes.tolist() == [4, 8, 8]
    assert plan.src_offset.tolist() == [140, 144, 152]
    assert plan.chunk_id.tolist() == whole.chunk_id.tolist()[1:]
    assert plan.chunk_complete.tolist() == [False, True, True]


def test_totals_and_chunk_ids_do_not_overflow() -> None:
    """Offsets beyond 2**32 and a move of more than 2**32 bytes come out exact."""
    pool = PoolLayout.paged(
        range(4), kv_heads=8, head_dim=128, dtype="float32", block_size=1024, num_blocks=512
    )
    ids = np.arange(512)[::-1]
    plan = copy_plan(pool, pool, [BlockTable(0, ids)], [BlockTable(0, ids)], 512 * 1024)
    assert plan.total_nbytes == pool.nbytes == 1 << 34
    assert plan.src_offset.max() == plan.dst_offset.max() > 1 << 33
    assert len(set(plan.chunk_id.tolist())) == plan.chunk_id.size


def test_a_plan_too_large_to_hold_is_refused_before_it_is_made() -> None:
    """More pieces than fit in memory is an InputError, not an allocation."""
    nhd, hnd = (
        PoolLayout.paged(
            range(4),
            kv_heads=64,
            head_dim=1,
            dtype="uint8",
            block_size=1 << 20,
            num_blocks=4,
            axis_order=order,
        )
        for order in ("NHD", "HND")
    )
    table = [BlockTable(0, range(4))]
    with pytest.raises(InputError, match="pieces, more than"):
        copy_plan(nhd, hnd, table, table, 4 << 20)


def test_chunks_are_named_in_words() -> None:
    """A chunk id says layer, role and tokens; one that no layout has is refused."""
    form = {"kv_heads": 8, "head_dim": 128, "dtype": "float32", "block_size": 16, "num_blocks": 64}
    pool = PoolLayout.paged([3, 4], **form)
    pieces = source_pieces(pool, [BlockTable(0, range(64))], 1000)
    assert chunk_name(pool, int(pieces.chunk_id[0])) == "layer 3 key, tokens 0 to 255"
    assert chunk_name(pool, int(pieces.chunk_id[-1])) == "layer 4 value, tokens 768 to 1023"
    joined = PoolLayout.paged([3], joined_kv=True, **{**form, "block_size": 1024, "num_blocks": 1})
    pieces = source_pieces(joined, [BlockTable(0, [0])], 1000)
    assert chunk_name(joined, int(pieces.chunk_id[1])) == "layer 3 key, value, tokens 128 to 255"
    for unknown in (-1, 4 << 40):
        with pytest.raises(InputError, match="chunk_id"):
            chunk_name(pool, unknown)
