"""Digests and coverage: only the exported bytes, each once, each in its place, pass."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import CorruptError
from kvferry.layout import BlockTable, CopyPlan, PoolLayout, copy_plan, source_pieces
from kvferry.transfer.integrity import (
    check_coverage,
    compare_digests,
    digest_pieces,
    digest_plan,
    join_digests,
    select_digests,
)
from kvferry.transport.base import Arrived
from kvferry.transport.table import chunk_nbytes

TOKENS = 37


def pool(block_size: int = 8, axis_order: str = "NHD", **more: object) -> PoolLayout:
    return PoolLayout.paged(
        range(3), kv_heads=2, head_dim=16, dtype="float32", block_size=block_size, num_blocks=32,
        axis_order=axis_order, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def table(block_size: int, seed: int) -> BlockTable:
    return BlockTable(0, np.random.default_rng(seed).permutation(32)[: -(-TOKENS // block_size)])


def whole(seed: int = 1, **parts: object) -> CopyPlan:
    return copy_plan(
        pool(8), pool(4, "HND", joined_kv=True), (table(8, seed),), (table(4, seed + 1),), TOKENS, **parts
    )  # type: ignore[arg-type]


def arrival(plan: CopyPlan) -> Arrived:
    return Arrived(
        "tcp", 0.0, plan.dst_offset, plan.nbytes, plan.chunk_id, chunk_nbytes(plan),
        np.zeros(len(plan.chunk_id), np.uint64),
    )  # fmt: skip


def test_the_plan_itself_is_covered_by_what_it_says() -> None:
    """One copy of the whole plan passes; so does none for an empty plan."""
    check_coverage(whole(), [arrival(whole())])
    nothing = whole(first_token=TOKENS)
    assert nothing.num_pieces == 0
    check_coverage(nothing, [])


@given(st.permutations(range(3)), st.integers(1, TOKENS - 1), st.data())
@settings(max_examples=40)
def test_parts_in_any_order_cover_it(layers: list[int], cut: int, data: st.DataObject) -> None:
    """Layer by layer and in two runs of tokens, in any order of layers, each byte arrives once."""
    parts = [
        arrival(whole(layers=[layer], token_range=bounds))
        for layer in layers
        for bounds in ((0, cut), (cut, TOKENS))
    ]
    check_coverage(whole(), parts)
    left_out = data.draw(st.integers(0, len(parts) - 1))
    with pytest.raises(CorruptError, match="are needed"):
        check_coverage(whole(), parts[:left_out] + parts[left_out + 1 :])
    with pytest.raises(CorruptError, match="are needed"):
        check_coverage(whole(), [*parts, parts[left_out]])


def test_one_layer_twice_instead_of_another_is_seen() -> None:
    """As many bytes as needed, but one layer twice and another never: refused."""
    one, two = arrival(whole(layers=[0, 1])), arrival(whole(layers=[0]))
    with pytest.raises(CorruptError, match="are needed"):
        check_coverage(whole(), [one, two])


@given(st.data())
@settings(max_examples=60)
def test_any_piece_somewhere_else_is_seen(data: st.DataObject) -> None:
    """A piece that went to another place, or under another chunk's name, is refused."""
    plan = whole()
    good = arrival(plan)
    which = data.draw(st.integers(0, plan.num_pieces - 1))
    kind = data.draw(st.sampled_from(["moved", "swapped", "renamed", "shorter"]))
    offset, nbytes, names = good.piece_offset.copy(), good.piece_nbytes.copy(), good.chunk_id.copy()
    if kind == "moved":
        offset[which] += data.draw(st.sampled_from([-64, 4, 64, 4096, 10**9]))
    elif kind == "swapped":
        other = data.draw(st.integers(0, plan.num_pieces - 1).filter(lambda i: i != which))
        offset[[which, other]] = offset[[other, which]]
    elif kind == "renamed":
        names[data.draw(st.integers(0, len(names) - 1))] += 1
    else:
        nbytes[which] -= 4
    with pytest.raises(CorruptError):
        check_coverage(plan, [replace(good, piece_offset=offset, piece_nbytes=nbytes, chunk_id=names)])


def test_digests_at_export_are_those_of_the_plan() -> None:
    """Digests of the source's pieces equal those of a plan's chunks, and plain xxh3 of the bytes."""
    memory = np.random.default_rng(3).integers(0, 256, pool(8).nbytes, np.uint8)
    pieces = source_pieces(pool(8), (table(8, 1),), TOKENS)
    exported, plan = digest_pieces(memory, pieces), whole(1)
    assert plan.chunk_complete.all()
    compare_digests(exported, join_digests([digest_plan(memory, plan)]))
    for number, (start, stop) in enumerate(zip(pieces.chunk_start[:-1], pieces.chunk_start[1:], strict=True)):
        rows = zip(pieces.offset[start:stop], pieces.nbytes[start:stop], strict=True)
        plain = b"".join(memory[at : at + size].tobytes() for at, size in rows)
        entry = int(np.searchsorted(exported[0], pieces.chunk_id[number]))
        assert int(exported[1][entry]) == xxhash.xxh3_64_intdigest(plain)


def test_some_chunks_are_digested_alone() -> None:
    """Asked for some chunks, the same digests come for those as in the whole table."""
    memory = np.random.default_rng(3).integers(0, 256, pool(8).nbytes, np.uint8)
    pieces = source_pieces(pool(8), (table(8, 1),), TOKENS)
    exported, some = digest_pieces(memory, pieces), pieces.chunk_id[[4, 1]]
    compare_digests(select_digests(exported, some), digest_pieces(memory, pieces, only=some))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids, sums: (ids[1:], sums[1:]), "1 missing"),
        (lambda ids, sums: (np.append(ids, 10**6), np.append(sums, sums[:1])), "1 unexpected"),
        (lambda ids, sums: (np.sort(np.append(ids, ids[:1])), np.append(sums, sums[:1])), "1 twice"),
        (lambda ids, sums: (ids, np.roll(sums, 1)), "are not the bytes"),
    ],
)
def test_unlike_digest_tables_are_refused(change: object, words: str) -> None:
    """Missing, unexpected, doubled and wrong chunks are refused by what they are."""
    ids, sums = np.arange(5), np.arange(10, 15, dtype=np.uint64)
    with pytest.raises(CorruptError, match=words):
        compare_digests((ids, sums), change(ids, sums))  # type: ignore[operator]
