"""Placement: the flow by tier, the heuristic against the exact solver and against all placements."""

from __future__ import annotations

import itertools
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import NoPlanError
from kvferry.plan.fleet import Spot
from kvferry.plan.place import Method, Need, Placement, Site, flow_shares, place
from kvferry.plan.place_exact import MAX_EXACT_SITES, place_best, place_exact

COSTS = (0.01, 0.08, 0.16, 0.3)


def sites_of(sizes: list[int], *, per_rack: int = 2, per_pod: int = 4, gpu: str = "a") -> list[Site]:
    return [
        Site(Spot(f"n{n}", f"d{n}", f"r{n // per_rack}", f"p{n // per_pod}"), gpu, size)
        for n, size in enumerate(sizes)
    ]


def assert_sound(sites: list[Site], prefill: Need, decode: Need, found: Placement) -> None:
    assert sum(found.prefill) == prefill.count
    assert sum(found.decode) == decode.count
    for site, x, y in zip(sites, found.prefill, found.decode, strict=True):
        assert x * prefill.size + y * decode.size <= site.num_gpus
        assert not x or site.gpu == prefill.gpu
        assert not y or site.gpu == decode.gpu
    assert sum(found.shares) == pytest.approx(1)
    assert found.mean_seconds == pytest.approx(np.dot(found.shares, COSTS), rel=1e-6)


def test_traffic_stays_as_near_as_it_can() -> None:
    """What a domain makes and takes stays in it, the rest in the rack, then the pod, then beyond."""
    sites = sites_of([8] * 8)
    assert flow_shares(sites, [1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]) == (1, 0, 0, 0)
    assert flow_shares(sites, [2, 0, 0, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0, 0, 0]) == (0, 1, 0, 0)
    assert flow_shares(sites, [2, 0, 0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]) == (0, 0, 1, 0)
    found = flow_shares(sites, [2, 0, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 0, 0, 0])
    assert found == pytest.approx((0.25, 0.25, 0.25, 0.25))


@settings(deadline=None)
@given(st.integers(0, 10**6))
def test_flow_is_the_cheapest(seed: int) -> None:
    """No exchange of traffic between pairs of sites is cheaper: against an exact transport by SciPy."""
    linprog = pytest.importorskip("scipy.optimize", reason="extra [plan] is not installed").linprog
    rng = np.random.default_rng(seed)
    sites = sites_of([8] * 6)
    x, y = rng.integers(0, 3, 6), rng.integers(0, 3, 6)
    if not x.sum() or not y.sum():
        return
    pair = np.array([[COSTS[one.spot.tier(other.spot)] for other in sites] for one in sites])
    rows = [np.kron(np.eye(6)[n], np.ones(6)) for n in range(6)] + [
        np.kron(np.ones(6), np.eye(6)[n]) for n in range(6)
    ]
    best = linprog(pair.ravel(), A_eq=np.array(rows), b_eq=np.concatenate([x / x.sum(), y / y.sum()]))
    assert np.dot(flow_shares(sites, x.tolist(), y.tolist()), COSTS) == pytest.approx(best.fun, rel=1e-6)


@settings(deadline=None)
@given(
    sizes=st.lists(st.sampled_from([4, 8, 16]), min_size=1, max_size=8),
    prefill=st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 6)),
    decode=st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 6)),
)
def test_a_placement_is_sound(sizes: list[int], prefill: tuple[int, int], decode: tuple[int, int]) -> None:
    """All instances are placed, no domain has more than its GPUs, shares and cost agree."""
    sites = sites_of(sizes)
    needs = Need("a", *prefill), Need("a", *decode)
    found = place(sites, *needs, COSTS)
    if found is not None:
        assert_sound(sites, *needs, found)
    elif needs[0].size == needs[1].size:  # then first fit cannot miss
        size = needs[0].size
        assert sum(site.num_gpus // size for site in sites) < needs[0].count + needs[1].count


def all_placements(sites: list[Site], prefill: Need, decode: Need) -> float | None:
    """The least cost by trying everything."""
    best: float | None = None
    per_site = [
        [
            (x, y)
            for x in range(site.num_gpus // prefill.size + 1)
            for y in range((site.num_gpus - x * prefill.size) // decode.size + 1)
        ]
        for site in sites
    ]
    for counts in itertools.product(*per_site):
        x, y = [one for one, _ in counts], [other for _, other in counts]
        if (sum(x), sum(y)) == (prefill.count, decode.count):
            cost = float(np.dot(flow_shares(sites, x, y), COSTS))
            best = cost if best is None else min(best, cost)
    return best


def cases(count: int, most_sites: int) -> list[tuple[list[Site], Need, Need]]:
    rng = random.Random(5)
    found = []
    while len(found) < count:
        sites = sites_of([rng.choice([8, 8, 8, 16]) for _ in range(rng.randint(2, most_sites))])
        gpus = sum(site.num_gpus for site in sites)
        a, b = rng.choice([(4, 4), (2, 4), (8, 8), (4, 8), (8, 4), (2, 2)])
        prefill = rng.randint(1, max(1, gpus // a - 1))
        room = (gpus - prefill * a) // b
        if room >= 1:
            found.append((sites, Need("a", a, prefill), Need("a", b, rng.randint(1, room))))
    return found


def test_exact_is_exact() -> None:
    """The solver's cost is the least of all placements."""
    pytest.importorskip("scipy", reason="extra [plan] is not installed")
    for sites, prefill, decode in cases(12, 3):
        found, best = place_exact(sites, prefill, decode, COSTS), all_placements(sites, prefill, decode)
        assert (found is None) == (best is None)
        if found is not None:
            assert_sound(sites, prefill, decode, found)
            assert found.mean_seconds == pytest.approx(best, rel=1e-6)
            assert found.method is Method.EXACT


def test_heuristic_against_exact() -> None:
    """Where both run: it finds a place when there is one, costs 3 % more on average, never 30 % more."""
    pytest.importorskip("scipy", reason="extra [plan] is not installed")
    ratios = []
    for sites, prefill, decode in cases(40, 7):
        found, best = place(sites, prefill, decode, COSTS), place_exact(sites, prefill, decode, COSTS)
        assert (found is None) == (best is None)
        if found is not None and best is not None:
            assert found.mean_seconds >= best.mean_seconds * (1 - 1e-6)
            ratios.append(found.mean_seconds / best.mean_seconds)
    assert len(ratios) > 25
    assert np.mean(ratios) < 1.03
    assert max(ratios) < 1.3


def test_the_exact_one_is_used_where_it_runs() -> None:
    """Few domains are solved, many are not, and the placement says which."""
    pytest.importorskip("scipy", reason="extra [plan] is not installed")
    needs = Need("a", 8, 3), Need("a", 4, 4)
    few, many = (place_best(sites_of([8] * count), *needs, COSTS) for count in (6, MAX_EXACT_SITES + 1))
    assert few is not None
    assert many is not None
    assert (few.method, many.method) == (Method.EXACT, Method.HEURISTIC)
    assert few.mean_seconds <= many.mean_seconds * (1 + 1e-9)


def test_without_scipy_the_heuristic_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional: without it a small cluster is placed too, and the exact one says what to do."""
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    needs = Need("a", 8, 1), Need("a", 8, 1)
    found = place_best(sites_of([8, 8]), *needs, COSTS)
    assert found is not None
    assert found.method is Method.HEURISTIC
    with pytest.raises(NoPlanError, match=r"kvferry\[plan\]"):
        place_exact(sites_of([8, 8]), *needs, COSTS)


def test_a_thousand_nodes() -> None:
    """1,024 nodes of 8 GPUs: all placed, and less than 2 % of the traffic leaves its pod."""
    sites = sites_of([8] * 1024, per_rack=4, per_pod=64)
    needs = Need("a", 4, 700), Need("a", 4, 1300)
    found = place(sites, *needs, COSTS)
    assert found is not None
    assert_sound(sites, *needs, found)
    assert found.shares[3] < 0.02
    assert found.shares[0] > 0.5


def test_two_kinds_of_gpu_stay_on_their_own() -> None:
    """Prefill and decode on unlike GPUs: each on its kind, in the same rack where there are both."""
    sites = [
        Site(Spot("a", "a", "r0"), "big", 8),
        Site(Spot("b", "b", "r1"), "big", 8),
        Site(Spot("c", "c", "r1"), "small", 8),
    ]
    needs = Need("big", 8, 1), Need("small", 4, 2)
    found = place(sites, *needs, COSTS)
    assert found is not None
    assert_sound(sites, *needs, found)
    assert found.prefill == (0, 1, 0)
    assert found.shares[1] == 1


def test_what_cannot_be_placed_or_solved() -> None:
    """No room gives None from both; too many domains are refused by the exact one."""
    sites = sites_of([8, 8])
    needs = Need("a", 8, 2), Need("a", 8, 1)
    assert place(sites, *needs, COSTS) is None
    pytest.importorskip("scipy", reason="extra [plan] is not installed")
    assert place_exact(sites, *needs, COSTS) is None
    with pytest.raises(NoPlanError, match=f"{MAX_EXACT_SITES} domains or fewer"):
        place_exact(sites_of([8] * (MAX_EXACT_SITES + 1)), *needs, COSTS)
