"""Which domain gets how many prefill and decode instances, so that KV travels over the cheapest tiers.

Every prefill instance makes an equal share of the traffic, every decode instance takes an equal share.
KV that can stay in its domain stays, the rest stays in its rack, then in its pod: where a farther
tier never costs less this is the best flow for given counts, so only the counts are searched.

The heuristic fills domain after domain so that each domain, rack and pod makes what it takes as far
as it can, then exchanges and moves single instances while that lowers the mean cost; it begins from
several orders of the domains and keeps the best. ``kvferry.plan.place_exact`` solves small clusters
exactly; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.plan.fleet import TIERS, Spot

__all__ = ["Method", "Need", "Placement", "Site", "flow_shares", "place"]

Counts = NDArray[np.int64]
_MAX_TRIES = 4000
_FEW_SITES = 16


class Method(StrEnum):
    """How a placement was found."""

    EXACT = "exact"
    HEURISTIC = "heuristic"


class Site(msgspec.Struct, frozen=True):
    """The GPUs of one kind in one domain."""

    spot: Spot
    gpu: str
    num_gpus: int


class Need(msgspec.Struct, frozen=True):
    """Instances of one role: of which GPU, how many GPUs each, how many instances."""

    gpu: str
    size: int
    count: int


class Placement(msgspec.Struct, frozen=True):
    """Instances by site, and the share of the traffic over each of ``TIERS``.

    ``mean_seconds`` is the mean cost of a handoff by the tiers' costs alone.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    shares: tuple[float, ...]
    mean_seconds: float
    method: Method


class _Map(msgspec.Struct, frozen=True):
    """Sites as arrays: which rack and pod each is in, and who may use it."""

    racks: Counts
    pods: Counts
    gpus: Counts
    for_prefill: NDArray[np.bool_]
    for_decode: NDArray[np.bool_]


def place(
    sites: Sequence[Site], prefill: Need, decode: Need, tier_seconds: Sequence[float]
) -> Placement | None:
    """A placement by the heuristic; None where it finds no room for all instances.

    Args:
        sites: where GPUs are.
        prefill, decode: what is to be placed.
        tier_seconds: the cost of a typical handoff over each of ``TIERS``, the last for all beyond.
    """
    ground = _map(sites, prefill, decode)
    costs = np.array([tier_seconds[min(tier, len(tier_seconds) - 1)] for tier in range(len(TIERS))])
    best: tuple[float, Counts, Counts] | None = None
    for order in _orders(ground):
        for packs in (True, False):
            start = _fill(ground, (prefill, decode), costs, order, packs=packs)
            if start is None:
                continue
            x, y = _improve(ground, (prefill, decode), start, costs)
            cost = float(_shares(ground, x, y) @ costs)
            if best is None or cost < best[0] * (1 - 1e-12):
                best = cost, x, y
    if best is None:
        return None
    cost, x, y = best
    shares = tuple(_shares(ground, x, y).tolist())
    return Placement(tuple(x.tolist()), tuple(y.tolist()), shares, cost, Method.HEURISTIC)


def _orders(ground: _Map) -> Iterator[list[int]]:
    """As given; largest domains first; largest racks first; for few domains also from each on."""
    given = list(range(len(ground.gpus)))
    yield given
    yield sorted(given, key=lambda site: -ground.gpus[site])
    rack_gpus = np.bincount(ground.racks, ground.gpus)
    yield sorted(
        given, key=lambda site: (-rack_gpus[ground.racks[site]], ground.racks[site], -ground.gpus[site])
    )
    if len(given) <= _FEW_SITES:
        for first in given[1:]:
            yield [*given[first:], *given[:first]]


def flow_shares(sites: Sequence[Site], prefill: Sequence[int], decode: Sequence[int]) -> tuple[float, ...]:
    """The share of the traffic over each tier, for counts by site."""
    nothing = Need("", 1, 0)
    shares = _shares(_map(sites, nothing, nothing), np.array(prefill), np.array(decode))
    return tuple(shares.tolist())


def _map(sites: Sequence[Site], prefill: Need, decode: Need) -> _Map:
    racks: dict[tuple[str, str], int] = {}
    pods: dict[str, int] = {}
    return _Map(
        np.array([racks.setdefault((site.spot.pod, site.spot.rack), len(racks)) for site in sites]),
        np.array([pods.setdefault(site.spot.pod, len(pods)) for site in sites]),
        np.array([site.num_gpus for site in sites]),
        np.array([site.gpu == prefill.gpu for site in sites]),
        np.array([site.gpu == decode.gpu for site in sites]),
    )


def _shares(ground: _Map, x: Counts, y: Counts) -> NDArray[np.float64]:
    """Match what is made with what is taken, nearest first. Two kinds of GPU in a domain are two sites."""
    made, taken = x / max(1, x.sum()), y / max(1, y.sum())
    shares = np.zeros(len(TIERS))
    for tier, groups in enumerate((None, ground.racks, ground.pods, np.zeros_like(ground.pods))):
        if groups is not None:
            count = int(groups.max()) + 1
            made_in, taken_in = np.bincount(groups, made, count), np.bincount(groups, taken, count)
        else:
            made_in, taken_in = made, taken
        matched = np.minimum(made_in, taken_in)
        shares[tier] = matched.sum()
        left = (
            1 - matched / np.where(made_in > 0, made_in, 1),
            1 - matched / np.where(taken_in > 0, taken_in, 1),
        )
        made = made * (left[0] if groups is None else left[0][groups])
        taken = taken * (left[1] if groups is None else left[1][groups])
    return shares


def _fill(
    ground: _Map,
    needs: tuple[Need, Need],
    costs: NDArray[np.float64],
    order: Sequence[int],
    *,
    packs: bool,
) -> tuple[Counts, Counts] | None:
    """Site after site the pattern that leaves least to be sent far, then the rest wherever it fits."""
    prefill, decode = needs
    fill = _Filling(ground, needs, costs, packs=packs)
    for site in order:
        fill.take(site)
    for need, counts, left, allowed in sorted(
        (
            (prefill, fill.x, fill.left[0], ground.for_prefill),
            (decode, fill.y, fill.left[1], ground.for_decode),
        ),
        key=lambda entry: -entry[0].size,
    ):
        for _ in range(left):
            free = ground.gpus - fill.x * prefill.size - fill.y * decode.size
            room = np.flatnonzero((free >= need.size) & allowed)
            if not len(room):
                return None
            counts[room[np.argmin(free[room])]] += 1
    return fill.x, fill.y


class _Filling:
    """The sites filled so far, and what each rack, each pod and all of them make more than they take.

    The mean cost is the nearest tier's, and for each farther tier its extra cost times what groups
    below it could not match. So a pattern is judged by how it moves the surplus of its site, rack,
    pod and of all, each weighed by the extra cost of the tier above.
    """

    def __init__(
        self, ground: _Map, needs: tuple[Need, Need], costs: NDArray[np.float64], *, packs: bool
    ) -> None:
        prefill, decode = needs
        self.ground = ground
        self.needs = needs
        self.packs = packs
        self.x = np.zeros(len(ground.gpus), np.int64)
        self.y = np.zeros(len(ground.gpus), np.int64)
        self.left = [prefill.count, decode.count]
        self._extra = np.maximum(np.diff(costs), 0).tolist()
        self._rack: dict[int, float] = {}
        self._pod: dict[int, float] = {}
        self._all = 0.0
        usable = ground.gpus[ground.for_prefill | ground.for_decode]
        self._slack = int(usable.sum()) - prefill.count * prefill.size - decode.count * decode.size

    def take(self, site: int) -> None:
        """Choose the counts of one site."""
        rack, pod = int(self.ground.racks[site]), int(self.ground.pods[site])
        prefill, decode = self.needs
        best, best_key = (0, 0), (True, float("inf"))
        for x, y in self._patterns(site):
            skew = x / prefill.count - y / decode.count
            surplus = (skew, self._rack.get(rack, 0.0) + skew, self._pod.get(pod, 0.0) + skew)
            cost = sum(extra * abs(amount) for extra, amount in zip(self._extra, surplus, strict=True))
            cost += 1e-3 * max(self._extra) * abs(self._all + skew)
            idle = int(self.ground.gpus[site]) - x * prefill.size - y * decode.size
            key = (idle > self._slack, cost)
            if key < best_key:
                best, best_key = (x, y), key
        x, y = best
        self.x[site], self.y[site] = x, y
        self.left[0] -= x
        self.left[1] -= y
        skew = x / prefill.count - y / decode.count
        self._rack[rack] = self._rack.get(rack, 0.0) + skew
        self._pod[pod] = self._pod.get(pod, 0.0) + skew
        self._all += skew
        if x or y:
            self._slack -= int(self.ground.gpus[site]) - x * prefill.size - y * decode.size

    def _patterns(self, site: int) -> Iterator[tuple[int, int]]:
        """Counts to which nothing that is left could be added; or, without packing, in proportion too."""
        prefill, decode = self.needs
        gpus = int(self.ground.gpus[site])
        most_x = min(self.left[0], gpus // prefill.size) if self.ground.for_prefill[site] else 0
        for x in range(most_x + 1):
            room = (gpus - x * prefill.size) // decode.size
            y = min(self.left[1], room) if self.ground.for_decode[site] else 0
            could_add = x < most_x and gpus - x * prefill.size - y * decode.size >= prefill.size
            if not could_add:
                yield x, y
            if not self.packs and x:
                near = round(x * decode.count / prefill.count)
                yield x, min(y, near)


def _improve(
    ground: _Map, needs: tuple[Need, Need], start: tuple[Counts, Counts], costs: NDArray[np.float64]
) -> tuple[Counts, Counts]:
    """Take the first change that lowers the cost, again and again, up to a number of tries."""
    x, y = start
    cost = float(_shares(ground, x, y) @ costs)
    tries = 0
    better = True
    while better and tries < _MAX_TRIES:
        better = False
        for new_x, new_y in _changes(ground, needs, x, y):
            tries += 1
            new_cost = float(_shares(ground, new_x, new_y) @ costs)
            if new_cost < cost * (1 - 1e-9):
                x, y, cost, better = new_x, new_y, new_cost, True
                break
            if tries >= _MAX_TRIES:
                break
    return x, y


def _changes(ground: _Map, needs: tuple[Need, Need], x: Counts, y: Counts) -> Iterator[tuple[Counts, Counts]]:
    """Exchanges of a prefill with a decode instance between two sites, and moves into free room.

    Between sites that make more than they take and sites that take more; and from such a site to one
    with room, of which the emptiest are tried.
    """
    prefill, decode = needs
    surplus = x / prefill.count - y / decode.count
    givers = np.argsort(-surplus)[:24]
    takers = np.argsort(surplus)[:24]
    free = ground.gpus - x * prefill.size - y * decode.size
    for giver in givers:
        if surplus[giver] <= 1e-12:
            break
        for taker in takers:
            if surplus[taker] >= -1e-12:
                break
            yield from _between(ground, needs, x, y, giver=int(giver), taker=int(taker), free=free)
    roomy = np.argsort(-free, kind="stable")[:24]
    for site in (*givers, *takers):
        for target in roomy:
            if target == site:
                continue
            if (
                surplus[site] > 1e-12
                and x[site]
                and free[target] >= prefill.size
                and ground.for_prefill[target]
            ):
                yield _moved(x, site, target, 1), y
            if (
                surplus[site] < -1e-12
                and y[site]
                and free[target] >= decode.size
                and ground.for_decode[target]
            ):
                yield x, _moved(y, site, target, 1)


def _between(
    ground: _Map,
    needs: tuple[Need, Need],
    x: Counts,
    y: Counts,
    *,
    giver: int,
    taker: int,
    free: Counts,
) -> Iterator[tuple[Counts, Counts]]:
    """Some prefill instances go to the taker and some decode instances to the giver, if there is room."""
    prefill, decode = needs
    several = max(1, -(-decode.size // prefill.size)), max(1, -(-prefill.size // decode.size))
    for give, take in dict.fromkeys([(1, 0), (0, 1), (1, 1), (several[0], 1), (1, several[1])]):
        if give > x[giver] or take > y[taker]:
            continue
        if (give and not ground.for_prefill[taker]) or (take and not ground.for_decode[giver]):
            continue
        grows = give * prefill.size - take * decode.size
        if grows <= free[taker] and -grows <= free[giver]:
            yield _moved(x, giver, taker, give), _moved(y, taker, giver, take)


def _moved(counts: Counts, source: int, target: int, number: int) -> Counts:
    new = counts.copy()
    new[source] -= number
    new[target] += number
    return new
