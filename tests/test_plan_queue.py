"""Waits of one server: against the published figures, and against a walk through every request."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.plan.public_profiles import public_profile
from kvferry.plan.queue import Service, empirical_waits, inter_op_seconds, intra_op_seconds, md1_seconds

OPT_13B = public_profile("distserve-opt-13b-a100-tp1").prefill.seconds(512)


@pytest.mark.parametrize(("rate", "seconds"), [(1, 0.0750), (4, 0.0868), (8, 0.1214), (10, 0.1656)])
def test_md1_of_distserve(rate: float, seconds: float) -> None:
    """DistServe 3.1, OPT-13B with prompts of 512: ``D + R D^2 / (2 (1 - R D))``."""
    assert md1_seconds(rate, OPT_13B) == pytest.approx(seconds, abs=5e-5)


@pytest.mark.parametrize(
    ("rate", "inter", "intra"),
    [(1, 0.0728, 0.0518), (5, 0.0761, 0.0590), (10, 0.0823, 0.0763), (15, 0.0934, 0.1293)],
)
def test_inter_op_and_intra_op_cross(rate: float, inter: float, intra: float) -> None:
    """DistServe 3.1: two stages against two ranks (K = 1.43); the second is better until the load rises."""
    speedup = OPT_13B / public_profile("distserve-opt-13b-a100-tp2").prefill.seconds(512)
    assert inter_op_seconds(rate, OPT_13B, 2) == pytest.approx(inter, abs=2e-4)
    assert intra_op_seconds(rate, OPT_13B, speedup) == pytest.approx(intra, abs=5e-4)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=60))
def test_empirical_waits_are_those_of_a_queue(requests: list[tuple[float, float]]) -> None:
    """The vector of waits is what serving one request after the other gives."""
    gaps, services = np.array(requests).T
    arrivals = np.cumsum(gaps)
    free = 0.0
    waits = []
    for arrival, service in zip(arrivals, services, strict=True):
        start = max(free, arrival)
        waits.append(start - arrival)
        free = start + service
    assert empirical_waits(arrivals, services) == pytest.approx(waits, abs=1e-9)


def test_formulas_meet_the_empirical_waits() -> None:
    """With Poisson arrivals the mean of the empirical waits is M/G/1's within 2 %."""
    rng = np.random.default_rng(7)
    count, rate = 400_000, 0.6
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    for services in (np.ones(count), rng.choice([0.5, 2.0], count, p=[2 / 3, 1 / 3])):
        waits = empirical_waits(arrivals, services)
        assert waits.mean() == pytest.approx(Service.of(services).wait_seconds(rate), rel=0.02)


def test_quantile_of_the_wait() -> None:
    """The p95 of an M/M/1 wait is exact; below 5 % load nobody of the 95 % waits; at 100 % all do."""
    exponential = Service(1.0, 2.0)
    assert exponential.wait_quantile_seconds(0.5, 0.95) == pytest.approx(2 * math.log(0.5 / 0.05))
    assert exponential.wait_quantile_seconds(0.05, 0.95) == 0
    assert exponential.wait_quantile_seconds(1.0, 0.95) == math.inf
    assert exponential.wait_seconds(1.5) == math.inf


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.floats(0.5, 0.99))
def test_more_load_never_waits_less(low: float, high: float, q: float) -> None:
    """Mean and quantile rise with the rate."""
    low, high = sorted((low, high))
    service = Service(1.0, 1.5)
    assert service.wait_seconds(low) <= service.wait_seconds(high)
    assert service.wait_quantile_seconds(low, q) <= service.wait_quantile_seconds(high, q) + 1e-12


def test_drawn_times_have_the_moments() -> None:
    """Lognormal times of a service have its mean and mean square; a fixed one is always the same."""
    normals = np.random.default_rng(5).standard_normal(400_000)
    drawn = Service.of(Service(0.3, 0.3**2 + 0.2**2).times(normals))
    assert drawn.mean_seconds == pytest.approx(0.3, rel=0.01)
    assert drawn.mean_square == pytest.approx(0.13, rel=0.03)
    assert Service.fixed(0.3).times(normals[:9]) == pytest.approx(0.3)
    mixed = Service.mixture([Service.fixed(1.0), Service.fixed(3.0)], [3, 1])
    assert mixed == Service.of(np.array([1.0, 1.0, 1.0, 3.0]))
