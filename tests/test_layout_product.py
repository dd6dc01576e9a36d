"""The product form of a plan copies the same bytes with fewer, strided copies."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.layout import BlockTable, CopyPlan, PoolLayout, Role, StridedPlan, copy_plan, source_pieces
from kvferry.layout.product import strided_plan
from layout_oracle import chunks, copy_by_plan, random_pool
from layout_strategies import Case, cases


def copy_strided(product: StridedPlan, src: np.ndarray, dst: np.ndarray) -> None:
    for to, of in product.views(src, dst):
        np.copyto(to, of)


def strided(plan: CopyPlan) -> StridedPlan:
    """The product form, also where the plan does not offer it because it saves nothing."""
    return strided_plan([(run.src_offset, run.dst_offset, template) for run, template in plan.runs])


@given(cases(), st.sampled_from([1, 30, 8 << 20]))
@settings(max_examples=80, deadline=None)
def test_product_copies_the_same_bytes(case: Case, limit: int) -> None:
    """For any pair, strided copies leave the destination as the pieces do, and touch each byte once."""
    plan = copy_plan(
        case.src, case.dst, case.src_tables, case.dst_tables, case.tokens, first_token=case.first_token
    )
    with mock.patch("kvferry.layout.product.COPY_NBYTES", limit):
        product = strided(plan)
    src, by_pieces = random_pool(case.src, 1), random_pool(case.dst, 2)
    by_product = by_pieces.copy()
    copy_by_plan(plan, src, by_pieces)
    copy_strided(product, src, by_product)
    np.testing.assert_array_equal(by_product, by_pieces)
    assert (plan.product is None) == (not 0 < 2 * len(strided(plan)) <= plan.num_pieces)
    sizes = product.planes * product.repeats * product.nbytes
    assert sizes.sum() == plan.total_nbytes
    assert np.all((sizes <= limit) | (product.planes * product.repeats == 1))


@pytest.mark.parametrize("cross_layer", [False, True])
@pytest.mark.parametrize("dst_cross_layer", [False, True])
def test_same_ids_in_every_layer_are_one_copy_a_block(cross_layer: bool, dst_cross_layer: bool) -> None:
    """Scattered blocks of 2 x 80 tensors take one copy a block, not one for each of 160 tensors."""
    form = {"kv_heads": 2, "head_dim": 4, "dtype": "float16", "block_size": 16, "num_blocks": 64}
    src = PoolLayout.paged(range(80), cross_layer=cross_layer, **form)
    dst = PoolLayout.paged(range(80), cross_layer=dst_cross_layer, **form)
    ids = np.random.default_rng(0).permutation(64)[:40]
    other = np.random.default_rng(1).permutation(64)[:40]
    plan = copy_plan(src, dst, [BlockTable(0, ids)], [BlockTable(0, other)], 640)
    assert plan.num_pieces == 160 * 40
    assert plan.product is not None
    # With a region for each of K and V, all layers of K are one progression and those of V another.
    regions = 2 if cross_layer or dst_cross_layer else 1
    assert len(plan.product) == regions * 40


def test_evenly_spaced_blocks_are_one_copy() -> None:
    """Blocks that are neighbours in one pool and lie apart in the other are repeats of one copy."""
    form = {"kv_heads": 2, "head_dim": 4, "dtype": "float16", "block_size": 16, "num_blocks": 64}
    src = PoolLayout.paged(range(4), **form)
    dst = PoolLayout.paged(range(4), cross_layer=True, joined_kv=True, **form)
    table = [BlockTable(0, range(10, 30))]
    plan = copy_plan(src, dst, table, table, 320)
    assert plan.product is not None
    assert plan.product.repeats.tolist() == [20]
    assert plan.product.planes.tolist() == [8]


@pytest.mark.parametrize("limit", [1, 256, 1024, 4096, 8 << 20])
def test_copies_are_cut_to_the_limit(limit: int) -> None:
    """No strided copy is larger than the limit, unless it is one piece of one plane."""
    form = {"kv_heads": 2, "head_dim": 4, "dtype": "float16", "block_size": 16, "num_blocks": 64}
    src = PoolLayout.paged(range(4), **form)
    dst = PoolLayout.paged(range(4), cross_layer=True, joined_kv=True, **form)
    table = [BlockTable(0, range(10, 30))]
    plan = copy_plan(src, dst, table, table, 320)
    with mock.patch("kvferry.layout.product.COPY_NBYTES", limit):
        product = strided(plan)
    sizes = product.planes * product.repeats * product.nbytes
    assert sizes.sum() == plan.total_nbytes == 20 * 8 * 256
    assert sizes.max() <= max(limit, 256)
    assert len(product) <= 2 * max(1, plan.total_nbytes // max(limit, 256))


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "tokens"),
    [
        ([10, 12, 14, 16, 17, 18, 19, 15, 11], range(1, 28, 3), 36),  # the steps change
        ([10, 12, 14, 16, 17, 18, 19, 15, 11], range(1, 28, 3), 34),  # the last block is short
        ([0, 1, 3, 6, 9], [0, 1, 3, 6, 9], 20),  # even steps, but the first piece is two blocks
        ([9, 6, 3, 0], [0, 3, 6, 9], 16),  # one side descends
        ([2, 4, 6, 8, 11, 14, 17], [2, 4, 6, 8, 11, 14, 17], 28),  # one run follows another at once
    ],
)
@pytest.mark.parametrize("cross_layer", [False, True])
def test_uneven_blocks_end_a_run(
    src_ids: list[int], dst_ids: list[int], tokens: int, cross_layer: bool
) -> None:
    """Runs end where a step or a length changes, and every byte still lands where the pieces put it."""
    form = {"kv_heads": 1, "head_dim": 4, "dtype": "uint8", "block_size": 4, "num_blocks": 32}
    src = PoolLayout.paged(range(3), cross_layer=cross_layer, **form)
    dst = PoolLayout.paged(range(3), cross_layer=cross_layer, joined_kv=cross_layer, **form)
    plan = copy_plan(src, dst, [BlockTable(0, src_ids)], [BlockTable(0, dst_ids)], tokens)
    source, by_pieces = random_pool(src, 1), random_pool(dst, 2)
    by_product = by_pieces.copy()
    copy_by_plan(plan, source, by_pieces)
    copy_strided(strided(plan), source, by_product)
    np.testing.assert_array_equal(by_product, by_pieces)
    assert len(strided(plan)) <= plan.num_pieces / 2


def test_no_product_where_it_saves_nothing() -> None:
    """A plan of single pieces has no product form."""
    pool = PoolLayout.paged([0], kv_heads=1, head_dim=4, dtype="float16", block_size=4, num_blocks=8)
    plan = copy_plan(pool, pool, [BlockTable(0, [1])], [BlockTable(0, [2])], 4, layers=[0])
    assert plan.num_pieces == 2
    assert plan.product is not None
    empty = copy_plan(pool, pool, [BlockTable(0, [1])], [BlockTable(0, [2])], 4, first_token=4)
    assert empty.product is None
    keys = [(Role.KEY, 0)]
    one = copy_plan(pool, pool, [BlockTable(0, [1])], [BlockTable(0, [2])], 4, parts=keys)
    assert one.num_pieces == 1
    assert one.product is None


def test_a_part_of_a_product_is_a_product() -> None:
    """Slices of a product, as threads take them, together copy the whole."""
    pool = PoolLayout.paged(range(5), kv_heads=1, head_dim=4, dtype="float16", block_size=4, num_blocks=16)
    plan = copy_plan(pool, pool, [BlockTable(0, [3, 9, 1, 12])], [BlockTable(0, [2, 4, 0, 7])], 16)
    src, expected = random_pool(pool, 1), random_pool(pool, 2)
    dst = expected.copy()
    copy_by_plan(plan, src, expected)
    assert plan.product is not None
    for part in (slice(0, 1), slice(1, None)):
        copy_strided(plan.product[part], src, dst)
    np.testing.assert_array_equal(dst, expected)


def test_chunks_can_be_digested_after_a_strided_copy() -> None:
    """The receiver copies by the product and still finds each exported chunk by the plan."""
    form = {"kv_heads": 2, "head_dim": 8, "dtype": "float16", "num_blocks": 20}
    src = PoolLayout.paged(range(6), block_size=4, **form)
    dst = PoolLayout.paged(range(6), block_size=8, cross_layer=True, joined_kv=True, **form)
    tables = [BlockTable(0, [3, 9, 1, 12, 5, 19])], [BlockTable(0, [2, 4, 0])]
    with mock.patch("kvferry.layout.clusters.CHUNK_NBYTES", 300):
        plan = copy_plan(src, dst, *tables, 23)
        exported = source_pieces(src, tables[0], 23)
    source, target = random_pool(src, 1), random_pool(dst, 2)
    copy_strided(strided(plan), source, target)
    assert chunks(plan, target, at="dst_offset") == chunks(exported, source, at="offset")


def test_a_view_outside_its_pool_is_refused() -> None:
    """A copy that leaves the memory it is given raises instead of touching other memory."""
    pool = PoolLayout.paged(range(3), kv_heads=1, head_dim=4, dtype="float16", block_size=4, num_blocks=8)
    plan = copy_plan(pool, pool, [BlockTable(0, [7])], [BlockTable(0, [7])], 4)
    memory = np.zeros(pool.nbytes, np.uint8)
    with pytest.raises((ValueError, TypeError)):
        copy_strided(strided(plan), memory, memory[:-100])
