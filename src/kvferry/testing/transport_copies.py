"""The part of the transport suite about payload: every byte where it belongs, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import KVFerryError, LocalError, PeerError, TransportError
from kvferry.layout import BlockTable, CopyPlan, PoolLayout, copy_plan
from kvferry.testing.plans import expected_copy, expected_digests, make_plan, random_plan
from kvferry.testing.transport_fixture import (
    POOL_NBYTES,
    Case,
    TransportFixture,
    check_error,
    fill,
    refused,
)
from kvferry.testing.transport_pair import TRANSFER_ID, TransportPair
from kvferry.transport.base import Direction
from kvferry.transport.digest import digest_chunks

__all__ = ["CopyTests"]

# Piece sizes around everything that an implementation may treat apart: bytes, cache lines,
# pages, small-piece and staging limits, and pieces above the staging buffer.
SIZES = st.one_of(
    st.integers(1, 300),
    st.sampled_from([512, 2047, 2048, 4096, 4097, 16_384, 32_768, 65_537]),
    st.integers(1, 1 << 17),
)
TABLES = st.one_of(
    st.lists(SIZES, min_size=1, max_size=24),
    st.tuples(st.sampled_from([128, 1000, 4096, 32_768]), st.integers(1, 60)).map(lambda t: [t[0]] * t[1]),
    st.just([3 << 20]),
    st.just([1 << 20, 100, (1 << 20) + 1, 7]),
)
PROPERTY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class CopyTests(TransportFixture):
    """Copies against plain loops, digests against plain xxh3, and what the guard is told."""

    @PROPERTY
    @given(sizes=TABLES, num_chunks=st.integers(1, 5), seed=st.integers(0, 1 << 30), integrity=st.booleans())
    def test_a_copy_moves_its_bytes_and_no_others(
        self, steady_pair: TransportPair, sizes: list[int], num_chunks: int, seed: int, integrity: bool
    ) -> None:
        """Any plan, either direction, from either side: the whole destination is as loops make it."""
        plan = random_plan(seed, POOL_NBYTES, sizes, num_chunks)
        for case in self.cases(steady_pair.sides):
            self._copy_and_check(case, plan, integrity=integrity)

    def _copy_and_check(self, case: Case, plan: CopyPlan, *, integrity: bool) -> None:
        sent, before = fill(case.source, 1), fill(case.destination, 2)
        guard = case.other.guard
        guard.landed_copies.clear()
        arrived = case.copy(plan, integrity=integrity)
        assert np.array_equal(case.destination.memory.array, expected_copy(plan, sent, before))
        assert np.array_equal(case.source.memory.array, sent)
        assert arrived.nbytes == plan.total_nbytes
        assert arrived.descriptors == len(plan.nbytes)
        assert arrived.path == case.asking.connection.path
        landed = [arrived]
        if case.direction is Direction.WRITE:
            assert arrived.digests is None
            assert {transfer_id for transfer_id, _ in guard.landed_copies} == {TRANSFER_ID}
            landed = [landed for _, landed in guard.landed_copies]
        assert np.array_equal(np.concatenate([part.piece_offset for part in landed]), plan.dst_offset)
        assert np.array_equal(np.concatenate([part.piece_nbytes for part in landed]), plan.nbytes)
        sizes = {i: n for part in landed for i, n in zip(part.chunk_id, part.chunk_nbytes, strict=True)}
        assert [sizes[i] for i in plan.chunk_id] == np.add.reduceat(
            plan.nbytes, plan.chunk_start[:-1]
        ).tolist()
        assert sorted(i for part in landed for i in part.chunk_id.tolist()) == plan.chunk_id.tolist()
        if integrity:
            found = {i: d for part in landed for i, d in self._digest_items(part.chunk_id, part.digests)}
            assert [found[i] for i in plan.chunk_id.tolist()] == expected_digests(plan, sent)
        else:
            assert all(part.digests is None for part in landed)
        guard.wait_until_idle()

    @staticmethod
    def _digest_items(chunk_id: np.ndarray, digests: np.ndarray | None) -> list[tuple[int, int]]:
        assert digests is not None
        assert digests.dtype == np.uint64
        return list(zip(chunk_id.tolist(), digests.tolist(), strict=True))

    @pytest.mark.parametrize("same_ids", [True, False], ids=["same ids in every layer", "other ids at V"])
    @pytest.mark.parametrize("integrity", [True, False], ids=["summed", "not summed"])
    def test_a_plan_between_layouts_is_carried_out(
        self, steady_pair: TransportPair, same_ids: bool, integrity: bool
    ) -> None:
        """A plan of ``copy_plan``, whose product form may be used, lands as its pieces say."""
        pool = PoolLayout.paged(
            range(6), kv_heads=2, head_dim=64, dtype="float16", block_size=16, num_blocks=40
        )
        rng = np.random.default_rng(5)
        ids = [rng.permutation(40)[:20].astype(np.int32) for _ in range(2)]
        plan = copy_plan(pool, pool, [BlockTable(0, ids[0])], [BlockTable(0, ids[1])], tokens=317)
        if not same_ids:
            order = rng.permutation(len(plan.nbytes))
            plan = make_plan(
                plan.src_offset[order].tolist(), plan.dst_offset[order].tolist(), plan.nbytes[order].tolist()
            )
        for case in self.cases(steady_pair.sides):
            self._copy_and_check(case, plan, integrity=integrity)

    def test_digests_at_arrival_equal_those_at_export(self, steady_pair: TransportPair) -> None:
        """``digest_chunks`` over the source gives what the receiver finds; one flipped bit does not."""
        plan = random_plan(11, POOL_NBYTES, [4096] * 300 + [700] * 40, 9)
        asking, other = steady_pair.sides
        fill(other, 3)
        arrived = asking.copy(Direction.READ, plan)
        export = digest_chunks(other.memory.array, plan.src_offset, plan.nbytes, plan.chunk_start)
        assert arrived.digests is not None
        assert np.array_equal(arrived.digests, export)
        other.memory.array[plan.src_offset[200]] ^= 1
        after = asking.copy(Direction.READ, plan).digests
        assert after is not None
        assert int((after != export).sum()) == 1

    def test_an_empty_plan_moves_nothing(self, steady_pair: TransportPair) -> None:
        """No pieces: it returns at once and the pools stay as they were."""
        for case in self.cases(steady_pair.sides):
            before = fill(case.destination, 4)
            arrived = case.copy(make_plan([], [], []))
            assert (arrived.nbytes, arrived.descriptors, arrived.chunk_id.size) == (0, 0, 0)
            assert np.array_equal(case.destination.memory.array, before)

    def test_the_guard_sees_exactly_the_peers_descriptors(self, steady_pair: TransportPair) -> None:
        """``enter`` gets the transfer id, the direction and every byte range of this side, once."""
        plan = random_plan(12, POOL_NBYTES, [1 << 20, 4096, 17, 100_000], 2)
        for case in self.cases(steady_pair.sides):
            calls = case.other.guard.entered
            calls.clear()
            case.copy(plan)
            theirs = plan.src_offset if case.direction is Direction.READ else plan.dst_offset
            assert {(call.transfer_id, call.direction) for call in calls} == {(TRANSFER_ID, case.direction)}
            assert np.array_equal(np.concatenate([call.offset for call in calls]), theirs)
            assert np.array_equal(np.concatenate([call.nbytes for call in calls]), plan.nbytes)
            case.other.guard.wait_until_idle()

    def test_a_refusal_reaches_the_asker_and_changes_nothing(self, steady_pair: TransportPair) -> None:
        """The guard's words arrive in a PeerError, nothing changed, and the connection works on."""
        plan = random_plan(13, POOL_NBYTES, [4096] * 700, 3)
        for case in self.cases(steady_pair.sides):
            fill(case.source, 5)
            before = fill(case.destination, 6)
            case.other.guard.refusal = KVFerryError("block 7 is not in the ticket")
            with pytest.raises(PeerError) as caught:
                case.copy(plan)
            case.other.guard.refusal = None
            refused(caught.value, "block 7 is not in the ticket")
            assert np.array_equal(case.destination.memory.array, before)
            case.other.guard.wait_until_idle()
            case.check_landed(plan)

    def test_a_grant_that_ended_is_not_used(self, steady_pair: TransportPair) -> None:
        """A token set as soon as it is given ends the copy with the peer's reason, and the guard is left."""
        plan = random_plan(14, POOL_NBYTES, [32_768] * 100, 3)
        for case in self.cases(steady_pair.sides):
            guard = case.other.guard
            guard.on_enter = lambda token: token.cancel(KVFerryError("the lease is over"))
            with pytest.raises(PeerError) as caught:
                case.copy(plan)
            guard.on_enter = None
            refused(caught.value, "the lease is over")
            guard.wait_until_idle()
            case.check_landed(plan)

    @pytest.mark.parametrize("offset", [POOL_NBYTES, POOL_NBYTES - 99, -1, 1 << 62])
    def test_memory_outside_of_the_pools_is_never_touched(
        self, steady_pair: TransportPair, offset: int
    ) -> None:
        """A piece that leaves either pool is refused, on this side before anything is asked of the peer."""
        for case in self.cases(steady_pair.sides):
            before = fill(case.destination, 7)
            for here, there, kinds in ((offset, 0, LocalError), (0, offset, (LocalError, PeerError))):
                src, dst = (there, here) if case.direction is Direction.READ else (here, there)
                with pytest.raises(kinds) as caught:
                    case.copy(make_plan([0, src], [200, dst], [100, 100]))
                check_error(caught.value)
                case.other.guard.wait_until_idle()
            assert np.array_equal(case.destination.memory.array, before)

    def test_many_copies_at_once_on_one_connection(self, steady_pair: TransportPair) -> None:
        """Sixteen copies from both sides at once, each into its own part of the pool, all land right."""
        share = POOL_NBYTES // 16
        listening, connecting = steady_pair.sides
        contents = fill(listening, 8), fill(connecting, 9)
        half = np.arange(8) * share

        def one(index: int) -> None:
            asking = steady_pair.sides[index % 2]
            # The upper half of each pool is copied into the lower half of the other.
            start = int(half[index // 2])
            pieces = list(range(0, share, 4096))
            plan = make_plan(
                [POOL_NBYTES // 2 + start + at for at in pieces],
                [start + at for at in pieces[::-1]],
                [4096] * len(pieces),
            )
            asking.copy(Direction.READ, plan)

        for future in [steady_pair.threads.submit(one, index) for index in range(16)]:
            future.result()
        for side, sent in ((connecting, contents[0]), (listening, contents[1])):
            moved = sent[POOL_NBYTES // 2 :].reshape(8, -1, 4096)[:, ::-1].reshape(-1)
            assert np.array_equal(side.memory.array[: POOL_NBYTES // 2], moved)

    def test_copies_go_on_while_frames_wait_unread(self, pair: TransportPair) -> None:
        """Control frames that nobody receives do not hold up payload."""
        for side in pair.sides:
            for _ in range(20):
                pair.loop.run(side.connection.send(bytes(10_000)))
        for case in self.cases(pair.sides):
            case.check_landed(random_plan(15, POOL_NBYTES, [32_768] * 50))

    def test_after_a_close_no_copy_starts(self, pair: TransportPair) -> None:
        """On a closed connection, and at its peer, a copy raises TransportError and moves nothing."""
        closed, peer = pair.sides
        pair.loop.run(closed.connection.close())
        before = fill(peer, 11)
        with pytest.raises(TransportError):
            pair.loop.run(peer.connection.receive())
        for side in pair.sides:
            with pytest.raises(TransportError) as caught:
                side.copy(Direction.READ, make_plan([0], [0], [4096]))
            check_error(caught.value)
        assert np.array_equal(peer.memory.array, before)
