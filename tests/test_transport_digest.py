"""Digests, staging and tables, each against a plain loop."""

from __future__ import annotations

import time

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import LocalError
from kvferry.testing.plans import expected_digests, make_plan, random_plan
from kvferry.transport import table
from kvferry.transport.base import Copy, Direction
from kvferry.transport.digest import ChunkDigests, digest_chunks
from kvferry.transport.staging import STEP_NBYTES, Pieces, step_starts
from kvferry.transport.table import first_outside, lanes_for, split_copy, split_pieces

POOL_NBYTES = 4 << 20
SIZES = st.one_of(
    st.lists(st.integers(1, 5000), min_size=1, max_size=50),
    st.tuples(st.sampled_from([1, 2, 64, 4096]), st.integers(1, 100)).map(lambda t: [t[0]] * t[1]),
    st.lists(st.sampled_from([2048, 4096, 6144, 32_768]), min_size=1, max_size=50),
    st.lists(st.integers(1, 3 * STEP_NBYTES), min_size=1, max_size=2).filter(lambda s: sum(s) < POOL_NBYTES),
)


@pytest.fixture(scope="module")
def pool() -> np.ndarray:
    return np.frombuffer(np.random.default_rng(1).bytes(POOL_NBYTES), np.uint8)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, num_chunks=st.integers(1, 9), seed=st.integers(0, 99))
def test_digests_are_xxh3_of_each_chunks_bytes(
    pool: np.ndarray, sizes: list[int], num_chunks: int, seed: int
) -> None:
    """Whatever the sizes and places of the pieces, the sum is that of the joined bytes of the chunk."""
    plan = random_plan(seed, POOL_NBYTES, sizes, num_chunks)
    found = digest_chunks(pool, plan.src_offset, plan.nbytes, plan.chunk_start)
    assert found.dtype == np.uint64
    assert found.tolist() == expected_digests(plan, pool)


def test_digests_of_nothing() -> None:
    """No chunks give no sums; a chunk without bytes gives the sum of no bytes."""
    empty = np.empty(0, np.int64)
    assert digest_chunks(np.zeros(8, np.uint8), empty, empty, np.zeros(1, np.int64)).size == 0
    one = np.array([8], np.int64), np.array([4], np.int64), np.array([0, 0, 1, 1], np.int64)
    nothing = xxhash.xxh3_64_intdigest(b"")
    assert digest_chunks(np.zeros(16, np.uint8), *one).tolist() == [
        nothing,
        xxhash.xxh3_64_intdigest(bytes(4)),
        nothing,
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_stream_may_be_fed_in_any_slices(pool: np.ndarray, data: st.DataObject) -> None:
    """The sums depend on the chunk borders alone, not on how the bytes came."""
    total = data.draw(st.integers(1, 20_000))
    ends = sorted({*data.draw(st.lists(st.integers(1, total), max_size=6)), total})
    slices = sorted(data.draw(st.lists(st.integers(0, total), max_size=12)))
    sums = ChunkDigests(np.array(ends, np.int64))
    for first, last in zip([0, *slices], [*slices, total], strict=True):
        sums.feed(pool[first:last])
    starts = [0, *ends[:-1]]
    expected = [xxhash.xxh3_64_intdigest(pool[a:b].tobytes()) for a, b in zip(starts, ends, strict=True)]
    assert sums.digests().tolist() == expected


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES.filter(lambda sizes: sum(sizes) <= 2 * STEP_NBYTES), seed=st.integers(0, 99))
def test_gather_and_scatter_move_each_piece(pool: np.ndarray, sizes: list[int], seed: int) -> None:
    """Gather joins the pieces in order; scatter puts them where they belong and nothing else changes."""
    plan = random_plan(seed, POOL_NBYTES, sizes)
    staged = np.zeros(sum(sizes), np.uint8)
    cut = len(sizes) // 2
    at = sum(sizes[:cut])
    pieces = Pieces(pool, plan.src_offset, plan.nbytes)
    for first, last, part in ((0, cut, staged[:at]), (cut, len(sizes), staged[at:])):
        if last > first:
            pieces.gather(first, last, part)
    joined = b"".join(
        pool[at : at + n].tobytes() for at, n in zip(plan.src_offset.tolist(), sizes, strict=True)
    )
    assert staged.tobytes() == joined
    target = np.zeros(POOL_NBYTES, np.uint8)
    pieces = Pieces(target, plan.dst_offset, plan.nbytes)
    for first, last, part in ((0, cut, staged[:at]), (cut, len(sizes), staged[at:])):
        if last > first:
            pieces.scatter(first, last, part)
    expected, taken = np.zeros(POOL_NBYTES, np.uint8), 0
    for at, nbytes in zip(plan.dst_offset.tolist(), sizes, strict=True):
        expected[at : at + nbytes] = staged[taken : taken + nbytes]
        taken += nbytes
    assert np.array_equal(target, expected)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=60), limit=st.integers(1, 40))
def test_split_pieces_keep_every_byte_in_order(sizes: list[int], limit: int) -> None:
    """No piece is above the limit, and byte by byte both offsets are what they were."""
    nbytes = np.array(sizes, np.int64)
    src, dst = np.cumsum(nbytes) * 2, np.cumsum(nbytes[::-1]) + 1000
    cut, (cut_src, cut_dst) = split_pieces(nbytes, src, dst, limit=limit)
    assert cut.max() <= limit

    def spread(offset: np.ndarray, sizes: np.ndarray) -> list[int]:
        return [at + i for at, n in zip(offset.tolist(), sizes.tolist(), strict=True) for i in range(n)]

    assert spread(cut_src, cut) == spread(src, nbytes)
    assert spread(cut_dst, cut) == spread(dst, nbytes)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=80), step=st.integers(100, 300))
def test_steps_are_bounded_and_nest(sizes: list[int], step: int) -> None:
    """Steps cover the table, hold less than two step sizes, and larger ones end where smaller do."""
    nbytes = np.array(sizes, np.int64)
    starts = step_starts(nbytes, step)
    assert starts[0] == 0
    assert starts[-1] == len(sizes)
    assert np.all(np.diff(starts) > 0)
    assert np.add.reduceat(nbytes, starts[:-1]).max() < 2 * step
    assert set(step_starts(nbytes, 4 * step).tolist()) <= set(starts.tolist())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1 << 17), min_size=1, max_size=30),
    num_chunks=st.integers(1, 9),
    streams=st.integers(1, 4),
)
def test_parts_are_whole_chunks_in_order(sizes: list[int], num_chunks: int, streams: int) -> None:
    """Parts joined are the plan again; at most ``streams`` of them; each says where its chunks end."""
    plan = random_plan(3, POOL_NBYTES, sizes, num_chunks)
    for direction in Direction:
        parts = split_copy(Copy(bytes(16), plan, time.monotonic()), direction, POOL_NBYTES, "peer", streams)
        reads = direction is Direction.READ
        assert len(parts) <= lanes_for(plan.total_nbytes, streams)
        assert np.array_equal(
            np.concatenate([p.here for p in parts]), plan.dst_offset if reads else plan.src_offset
        )
        assert np.array_equal(
            np.concatenate([p.there for p in parts]), plan.src_offset if reads else plan.dst_offset
        )
        assert np.array_equal(np.concatenate([p.nbytes for p in parts]), plan.nbytes)
        assert np.array_equal(np.concatenate([p.chunk_id for p in parts]), plan.chunk_id)
        chunk_nbytes = np.add.reduceat(plan.nbytes, plan.chunk_start[:-1])
        assert np.array_equal(np.concatenate([np.diff(p.chunk_end, prepend=0) for p in parts]), chunk_nbytes)
        assert all(p.total_nbytes == p.nbytes.sum() for p in parts)


@pytest.mark.parametrize(
    ("mib", "streams", "expected"), [(16, 3, 3), (16, 1, 1), (9, 4, 2), (3, 4, 1), (8, 2, 2)]
)
def test_large_plans_are_spread_over_streams(mib: int, streams: int, expected: int) -> None:
    """Each stream gets about its share, at least 4 MiB; a smaller copy gets fewer."""
    size = 1 << 20
    offsets = [i * size for i in range(mib)]
    plan = make_plan(offsets, offsets, [size] * mib, [*range(mib + 1)])
    parts = split_copy(Copy(bytes(16), plan, time.monotonic()), Direction.READ, mib * size, "peer", streams)
    assert len(parts) == expected
    assert max(part.total_nbytes for part in parts) - min(part.total_nbytes for part in parts) <= size


def test_a_plan_of_many_pieces_is_cut_into_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request has more pieces than a peer accepts, and none is lost."""
    monkeypatch.setattr(table, "MAX_PIECES", 100)
    monkeypatch.setattr(table, "_PART_PIECES", 80)
    plan = make_plan([*range(0, 4000, 4)], [*range(0, 4000, 4)], [4] * 1000, [*range(0, 1001, 10)])
    parts = split_copy(Copy(bytes(16), plan, time.monotonic()), Direction.READ, 4000, "peer")
    assert max(len(part.nbytes) for part in parts) <= 100
    assert np.array_equal(np.concatenate([part.there for part in parts]), plan.src_offset)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 0), (0, -1), (-1, 5), (96, 5), (100, 1), (1 << 62, 1 << 62), (5, 1 << 62), (-(1 << 63), 1)],
)
def test_pieces_outside_are_found_without_overflow(offset: int, nbytes: int) -> None:
    """Negative, empty, beyond the end, and numbers whose sum would wrap around, as a LocalError too."""
    offsets, sizes = np.array([0, 95, offset], np.int64), np.array([100, 5, nbytes], np.int64)
    assert first_outside(offsets[:2], sizes[:2], 100) is None
    assert first_outside(offsets, sizes, 100) == 2
    plan = make_plan([0, 0, 0], offsets.tolist(), sizes.tolist())
    with pytest.raises(LocalError, match="piece 2") as caught:
        split_copy(Copy(bytes(16), plan, time.monotonic()), Direction.READ, 100, "peer")
    assert caught.value.next_step
