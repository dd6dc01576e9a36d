"""Which pairs when, and when a shape has been copied often enough: pure, so every case is checked."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.layout import source_pieces
from kvferry.link import Mode
from kvferry.probe.payload import TOKENS, Payload, Room, sizes_up_to
from kvferry.probe.schedule import incast_stages, pair_stages, rounds
from kvferry.probe.settle import FEWEST, is_settled


@pytest.mark.parametrize("count", range(2, 17))
def test_rounds_are_of_disjoint_pairs_and_hold_every_pair_once(count: int) -> None:
    """N - 1 rounds for an even number of nodes, N for an odd one; no node twice in a round."""
    found = rounds(count)
    assert len(found) == (count - 1 if count % 2 == 0 else count)
    for pairs in found:
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes))
    pairs = [tuple(sorted(pair)) for pair in itertools.chain(*found)]
    assert sorted(pairs) == list(itertools.combinations(range(count), 2))


def test_eight_nodes_take_fourteen_stages_for_all_ordered_pairs() -> None:
    """On hosts of their own: 7 rounds both ways, four pairs at a time, 56 ordered pairs."""
    stages = pair_stages(list("abcdefgh"), ["tcp"], [Mode.PULL])
    assert len(stages) == 7 * 2
    flows = [group.pairs[0] for stage in stages for group in stage]
    assert sorted(flows) == list(itertools.permutations(range(8), 2))
    assert all(len(stage) == 4 for stage in stages)


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9))
def test_no_host_does_two_things_in_a_stage(hosts: list[str]) -> None:
    """Whatever nodes share a host; and every ordered pair is there once."""
    stages = pair_stages(hosts, ["tcp"], [Mode.PUSH])
    for stage in stages:
        busy = [frozenset(hosts[node] for node in group.pairs[0]) for group in stage]
        assert sum(len(each) for each in busy) == len(frozenset().union(*busy))
    flows = Counter(group.pairs[0] for stage in stages for group in stage)
    assert flows == Counter(itertools.permutations(range(len(hosts)), 2))


def test_under_load_a_round_runs_at_once_and_both_ways() -> None:
    """One group a round, mode and transport; every ordered pair under load once."""
    stages = pair_stages(["h"] * 4, ["tcp"], [Mode.PULL], under_load=True)
    assert [len(stage) for stage in stages] == [1, 1, 1]
    assert all(stage[0].under_load and len(stage[0].pairs) == 4 for stage in stages)
    flows = [pair for stage in stages for pair in stage[0].pairs]
    assert sorted(flows) == list(itertools.permutations(range(4), 2))


@given(st.integers(3, 9), st.data())
def test_an_incast_has_so_many_senders_and_each_node_receives_once(count: int, data: st.DataObject) -> None:
    """K senders, all different, none the receiver."""
    incast = data.draw(st.integers(2, count - 1))
    stages = incast_stages(count, incast, ["tcp"], [Mode.PUSH])
    receivers = []
    for (group,) in stages:
        senders = {source for source, _ in group.pairs}
        (receiver,) = {target for _, target in group.pairs}
        assert len(senders) == incast == group.incast
        assert receiver not in senders
        receivers.append(receiver)
    assert receivers == list(range(count))


@given(st.floats(1e-6, 10), st.integers(0, 40), st.integers(0, 1000))
def test_the_median_settles_with_its_interval_and_not_before(true: float, count: int, seed: int) -> None:
    """Copies within 1 % settle as soon as there are enough; ones that scatter by half never in 40."""
    rng = np.random.default_rng(seed)
    steady = (true * (1 + 0.01 * rng.uniform(-1, 1, count))).tolist()
    assert is_settled(steady) is (count >= FEWEST)
    wild = (true * rng.uniform(0.5, 1.5, count)).tolist()
    assert not is_settled(wild) or count > 20


def test_a_stall_does_not_unsettle_a_median() -> None:
    """One copy of 20 that takes a hundred times as long says nothing about the typical copy."""
    assert is_settled([1.0] * 19 + [100.0])
    assert not is_settled([1.0] * 10 + [100.0] * 10)


@given(st.integers(1, 3000), st.sampled_from([64, 4096, 32768]), st.integers(1, 3), st.integers(1, 40))
def test_all_payloads_of_a_sweep_have_room_in_one_pool(
    blocks: int, block_bytes: int, slots: int, layers: int
) -> None:
    """Each moves its own bytes in its own number of pieces; no source block is ever a destination."""
    largest = Payload(2 * blocks * block_bytes, block_bytes, layers)
    payloads = sizes_up_to(largest)
    assert largest in payloads
    room = Room.of(payloads, slots)
    layout = room.layout()
    sources: set[tuple[int, int]] = set()
    for payload in payloads:
        assert 2 * payload.nbytes > 2 * payload.moved_nbytes - 1
        assert payload.nbytes - 2 * payload.layers * block_bytes < payload.moved_nbytes
        pieces = source_pieces(layout, room.tables(payload), TOKENS)
        assert pieces.total_nbytes == payload.moved_nbytes
        assert len(pieces.nbytes) == payload.descriptors
        group = room.index(payload)
        sources |= {(group, block) for block in room.tables(payload)[group].ids.tolist()}
    seen: dict[tuple[int, int], int] = {}
    for slot in range(slots):
        for payload in payloads:
            group = room.index(payload)
            for block in room.tables(payload, slot)[group].ids.tolist():
                assert (group, block) not in sources
                assert seen.setdefault((group, block), slot) == slot
    assert layout.nbytes < room.nbytes + 64 * 2 * len(layout.layers)


def test_shapes_tell_bytes_and_descriptors_apart() -> None:
    """Two block sizes; the same number of pieces with unlike bytes, and the same bytes in unlike pieces."""
    shapes = sizes_up_to(Payload(16 << 20, 32 << 10))
    assert shapes[-1] == Payload(16 << 20, 32 << 10)
    # Nothing but a start, on any link, and within a token bucket's burst and beyond it.
    assert shapes[:2] == [Payload(2 << 10, 1 << 10), Payload(8 << 10, 4 << 10)]
    assert shapes[2].nbytes == 64 << 10
    by_size = [{s.block_bytes for s in shapes if s.nbytes == size} for size in (64 << 10, 4 << 20)]
    assert by_size == [{32 << 10, 4 << 10}] * 2
    assert [shape.nbytes for shape in shapes] == sorted(shape.nbytes for shape in shapes)
