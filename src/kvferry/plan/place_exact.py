"""The best placement of a small cluster, by HiGHS through SciPy (extra ``plan``).

Integers: instances by site. Continuous: the traffic from site to site. The cost of the traffic is
minimised; sites that are alike are told apart by order, or the solver would try them all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.errors import NoPlanError
from kvferry.plan.fleet import TIERS
from kvferry.plan.place import Method, Need, Placement, Site, flow_shares, place

__all__ = ["MAX_EXACT_SITES", "place_best", "place_exact"]

MAX_EXACT_SITES = 12
_SECONDS = 20.0


def place_exact(
    sites: Sequence[Site], prefill: Need, decode: Need, tier_seconds: Sequence[float]
) -> Placement | None:
    """The placement of least mean cost; None where there is no room for all instances.

    Raises NoPlanError without SciPy, for more than :data:`MAX_EXACT_SITES` sites, and when the solver
    does not prove its answer in 20 s.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise NoPlanError("exact placement needs SciPy", next_step="pip install 'kvferry[plan]'") from error
    count = len(sites)
    if count > MAX_EXACT_SITES:
        raise NoPlanError(f"exact placement is for {MAX_EXACT_SITES} domains or fewer; here are {count}")
    costs = np.array([tier_seconds[min(tier, len(tier_seconds) - 1)] for tier in range(len(TIERS))])
    pair = np.array([[costs[_tier(one, other)] for other in sites] for one in sites])
    rows, low, high = _constraints(sites, prefill, decode)
    upper = np.concatenate([_most(sites, prefill), _most(sites, decode), np.full(count * count, 1.0)])
    found = milp(
        np.concatenate([np.zeros(2 * count), pair.ravel()]),
        constraints=LinearConstraint(rows, low, high),
        integrality=np.concatenate([np.ones(2 * count), np.zeros(count * count)]),
        bounds=Bounds(0, upper),
        options={"time_limit": _SECONDS},
    )
    if found.status == 2:  # infeasible
        return None
    if found.status != 0:
        raise NoPlanError(f"the solver did not finish: {found.message}")
    x, y = (np.rint(found.x[at * count : (at + 1) * count]).astype(int).tolist() for at in (0, 1))
    shares = flow_shares(sites, x, y)
    return Placement(tuple(x), tuple(y), shares, float(found.fun), Method.EXACT)


def place_best(
    sites: Sequence[Site], prefill: Need, decode: Need, tier_seconds: Sequence[float]
) -> Placement | None:
    """The exact placement where it can be had, else the heuristic's; ``method`` says which it is."""
    found = place(sites, prefill, decode, tier_seconds)
    if len(sites) > MAX_EXACT_SITES:
        return found
    try:
        return place_exact(sites, prefill, decode, tier_seconds)
    except NoPlanError:  # no SciPy, or no proof in time
        return found


def _tier(one: Site, other: Site) -> int:
    # Two kinds of GPU in one domain are two sites, and nearer than a rack.
    return one.spot.tier(other.spot)


def _most(sites: Sequence[Site], need: Need) -> NDArray[np.float64]:
    return np.array([site.num_gpus // need.size if site.gpu == need.gpu else 0 for site in sites], float)


def _constraints(
    sites: Sequence[Site], prefill: Need, decode: Need
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Rows over (x, y, flow): all placed, GPUs of each site, traffic made and taken, order of like sites."""
    n = len(sites)
    rows: list[NDArray[np.float64]] = []
    low: list[float] = []
    high: list[float] = []

    def add(row: NDArray[np.float64], least: float, most: float) -> None:
        rows.append(row)
        low.append(least)
        high.append(most)

    for at, need in ((0, prefill), (n, decode)):
        row = np.zeros(2 * n + n * n)
        row[at : at + n] = 1
        add(row, need.count, need.count)
    for site in range(n):
        row = np.zeros(2 * n + n * n)
        row[site], row[n + site] = prefill.size, decode.size
        add(row, 0, sites[site].num_gpus)
        made, taken = np.zeros(2 * n + n * n), np.zeros(2 * n + n * n)
        flow_from, flow_to = 2 * n + site * n, 2 * n + site
        made[flow_from : flow_from + n] = 1
        made[site] = -1 / prefill.count
        taken[flow_to::n] = 1
        taken[n + site] = -1 / decode.count
        add(made, 0, 0)
        add(taken, 0, 0)
    for site in range(n - 1):
        one, next_one = sites[site], sites[site + 1]
        alike = (one.gpu, one.num_gpus, one.spot.rack, one.spot.pod) == (
            *(next_one.gpu, next_one.num_gpus, next_one.spot.rack, next_one.spot.pod),
        )
        if alike and one.spot.domain != next_one.spot.domain:
            row = np.zeros(2 * n + n * n)
            row[site], row[site + 1] = 1, -1
            add(row, 0, np.inf)
    return np.array(rows), np.array(low), np.array(high)
