"""Waiting times of one server: closed forms for Poisson arrivals, and the exact waits of given ones.

M/G/1 is Pollaczek and Khinchine's ``W = rate * E[S^2] / (2 (1 - rho))``. The quantile takes the wait
of those that wait as exponential: ``t(q) = W / rho * ln(rho / (1 - q))``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Service", "empirical_waits", "inter_op_seconds", "intra_op_seconds", "md1_seconds"]


class Service(msgspec.Struct, frozen=True):
    """A service time by its first two moments."""

    mean_seconds: float
    mean_square: float

    @staticmethod
    def fixed(seconds: float) -> Service:
        """Always the same."""
        return Service(seconds, seconds * seconds)

    @staticmethod
    def of(seconds: NDArray[np.float64]) -> Service:
        """The moments of a sample."""
        return Service(float(seconds.mean()), float((seconds * seconds).mean()))

    @staticmethod
    def mixture(parts: Sequence[Service], weights: Sequence[float]) -> Service:
        """One of these each time, as often as its weight says."""
        total = math.fsum(weights)
        pairs = list(zip(parts, weights, strict=True))
        return Service(
            math.fsum(part.mean_seconds * weight for part, weight in pairs) / total,
            math.fsum(part.mean_square * weight for part, weight in pairs) / total,
        )

    def times(self, normals: NDArray[np.float64]) -> NDArray[np.float64]:
        """Lognormal times of this mean and mean square, one for each standard normal number."""
        if self.mean_seconds <= 0:
            return np.zeros_like(normals)
        variance = max(0.0, math.log(self.mean_square / self.mean_seconds**2))
        return np.asarray(self.mean_seconds * np.exp(math.sqrt(variance) * normals - variance / 2))

    def load(self, requests_per_second: float) -> float:
        """rho: the share of its time that the server is busy."""
        return requests_per_second * self.mean_seconds

    def wait_seconds(self, requests_per_second: float) -> float:
        """Mean wait before service; infinite from rho = 1 on."""
        load = self.load(requests_per_second)
        if load >= 1:
            return math.inf
        return requests_per_second * self.mean_square / (2 * (1 - load))

    def wait_quantile_seconds(self, requests_per_second: float, q: float) -> float:
        """The wait that a share ``q`` of the requests stays within."""
        load = self.load(requests_per_second)
        wait = self.wait_seconds(requests_per_second)
        if load <= 1 - q or not math.isfinite(wait):
            return 0.0 if load <= 1 - q else math.inf
        return wait / load * math.log(load / (1 - q))


def md1_seconds(requests_per_second: float, service_seconds: float) -> float:
    """Mean time in an M/D/1 server, wait and service: DistServe's TTFT without parallelism."""
    return service_seconds + Service.fixed(service_seconds).wait_seconds(requests_per_second)


def inter_op_seconds(requests_per_second: float, service_seconds: float, stages: int) -> float:
    """The same with the service split over ``stages`` that work one after the other (DistServe 3.1)."""
    return service_seconds + Service.fixed(service_seconds / stages).wait_seconds(requests_per_second)


def intra_op_seconds(requests_per_second: float, service_seconds: float, speedup: float) -> float:
    """The same with the service ``speedup`` times as fast (DistServe 3.1)."""
    return md1_seconds(requests_per_second, service_seconds / speedup)


def empirical_waits(
    arrival_seconds: NDArray[np.float64], service_seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The wait of each request at one server, first come first served: Lindley's recursion.

    ``W[n+1] = max(0, W[n] + S[n] - (A[n+1] - A[n]))``, as a walk above its running minimum.
    For bursty traces, where Poisson formulas promise too much.
    """
    steps = service_seconds[:-1] - np.diff(arrival_seconds)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    return np.asarray(walk - np.minimum.accumulate(walk), dtype=np.float64)
