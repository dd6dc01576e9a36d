"""Shared links: rates are max-min fair, bytes are conserved, and waits are those of processor sharing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.plan.events import Events
from kvferry.plan.fairshare import Flow, Network, SharedLink, max_min_rates

DUST = 1e-6


def run(events: Events) -> None:
    while events.next_seconds < float("inf"):
        events.run_next()


def ignore(now: float, argument: object) -> None:
    pass


@st.composite
def tangles(draw: st.DrawFn) -> tuple[list[SharedLink], list[tuple[float, float, tuple[int, ...], float]]]:
    """Links, and flows with their bytes, cap, path and start."""
    rates = draw(st.lists(st.floats(1, 100), min_size=1, max_size=5))
    links = [SharedLink(f"l{n}", "link", rate) for n, rate in enumerate(rates)]
    path = st.lists(st.integers(0, len(rates) - 1), min_size=1, max_size=3, unique=True).map(tuple)
    flow = st.tuples(st.floats(1, 1000), st.floats(0.5, 200), path, st.floats(0, 20))
    return links, draw(st.lists(flow, min_size=1, max_size=12))


@given(tangles())
def test_rates_are_max_min_fair(tangle: tuple[list[SharedLink], list]) -> None:  # type: ignore[type-arg]
    """No link is overfull, and each flow is at its cap or has a full link on which nobody gets more."""
    links, specs = tangle
    flows = {
        Flow(nbytes, cap, tuple(links[n] for n in path), ignore, None): None for nbytes, cap, path, _ in specs
    }
    rates = max_min_rates(flows)
    carried = {link: sum(rate for flow, rate in rates.items() if link in flow.path) for link in links}
    for link in links:
        assert carried[link] <= link.bytes_per_second * (1 + DUST)
    for flow, rate in rates.items():
        bottlenecks = [
            link
            for link in flow.path
            if carried[link] >= link.bytes_per_second * (1 - DUST)
            and all(rates[other] <= rate * (1 + DUST) for other in flows if link in other.path)
        ]
        assert rate >= flow.cap * (1 - DUST) or bottlenecks


@settings(deadline=None)
@given(tangles())
def test_the_network_is_a_walk_with_fair_rates(tangle: tuple[list[SharedLink], list]) -> None:  # type: ignore[type-arg]
    """Every flow ends when a walk that works out all rates anew at every change says; all bytes arrive."""
    links, specs = tangle
    events = Events()
    network = Network(events)
    ends: dict[int, float] = {}
    for number, (nbytes, cap, path, start) in enumerate(specs):
        flow = Flow(
            nbytes, cap, tuple(links[n] for n in path), lambda now, n: ends.__setitem__(n, now), number
        )
        events.at(start, network.start, flow)
    run(events)
    expected = walk([link.bytes_per_second for link in links], specs)
    assert ends == pytest.approx(expected, rel=1e-6)
    assert network.carried_nbytes == pytest.approx(sum(spec[0] for spec in specs))
    for number, link in enumerate(links):
        assert link.work_nbytes == pytest.approx(sum(spec[0] for spec in specs if number in spec[2]))
        assert not link.flows


def walk(rates: list[float], specs: list[tuple[float, float, tuple[int, ...], float]]) -> dict[int, float]:
    """An independent oracle: small steps from change to change, rates by raising all together."""
    left = {number: spec[0] for number, spec in enumerate(specs)}
    ends: dict[int, float] = {}
    now = 0.0
    while left:
        running = [number for number in left if specs[number][3] <= now]
        speed = fill(rates, {number: specs[number][1:3] for number in running})
        starts = [specs[number][3] - now for number in left if specs[number][3] > now]
        step = min([*starts, *[left[number] / speed[number] for number in running]])
        now += step
        for number in running:
            left[number] -= speed[number] * step
            if left[number] <= 1e-9 * specs[number][0]:
                ends[number] = now
                del left[number]
    return ends


def fill(rates: list[float], flows: dict[int, tuple[float, tuple[int, ...]]]) -> dict[int, float]:
    speed = dict.fromkeys(flows, 0.0)
    rising = set(flows)
    while rising:
        room = [
            (rates[link] - sum(speed[n] for n in flows if link in flows[n][1]))
            / max(1, sum(link in flows[n][1] for n in rising))
            for link in range(len(rates))
            if any(link in flows[n][1] for n in rising)
        ]
        raise_by = max(0.0, min([*room, *[flows[n][0] - speed[n] for n in rising]]))
        for number in rising:
            speed[number] += raise_by
        full = {
            link
            for link in range(len(rates))
            if sum(speed[n] for n in flows if link in flows[n][1]) >= rates[link] * (1 - 1e-9)
        }
        rising = {n for n in rising if speed[n] < flows[n][0] * (1 - 1e-9) and full.isdisjoint(flows[n][1])}
    return speed


def test_a_dropped_flow_leaves_its_share() -> None:
    """What is dropped stops at once; the other flow has the link from then on."""
    events = Events()
    network = Network(events)
    link = SharedLink("l", "link", 10.0)
    ends = []
    gone = Flow(1000, 100, (link,), ignore, None)
    stays = Flow(50, 100, (link,), lambda now, _: ends.append(now), None)
    network.start(0.0, gone)
    network.start(0.0, stays)
    events.at(4.0, network.drop, gone)
    run(events)
    assert ends == pytest.approx([4 + 30 / 10])
    assert gone.left == pytest.approx(980)
    assert network.carried_nbytes == pytest.approx(70)


@pytest.mark.parametrize("load", [0.3, 0.6])
def test_sharing_waits_as_processor_sharing(load: float) -> None:
    """Poisson flows on one link: the mean time is E[S] / (1 - rho), whatever the sizes, within 2 %."""
    rng = np.random.default_rng(11)
    count = 40_000
    for sizes in (np.ones(count), rng.choice([0.4, 4.0], count, p=[5 / 6, 1 / 6])):
        arrivals = np.cumsum(rng.exponential(sizes.mean() / load, count))
        events = Events()
        network = Network(events)
        link = SharedLink("l", "link", 1.0)
        times: list[float] = []

        def end(now: float, begun: float, times: list[float] = times) -> None:
            times.append(now - begun)

        for start, size in zip(arrivals.tolist(), sizes.tolist(), strict=True):
            flow = Flow(size, 10.0, (link,), end, start)
            while events.next_seconds <= start:
                events.run_next()
            network.start(start, flow)
        run(events)
        assert len(times) == count
        assert np.mean(times) == pytest.approx(sizes.mean() / (1 - load), rel=0.02)
