"""Checks on strided regions that may come from a hostile peer: exact integers, no arrays.

Whether two general strided sets meet is a hard question. The layouts that engines use are nested
(each axis steps over all of the inner ones), and two tensors whose spans overlap share their
outer strides, so the check asks for that form and refuses the rest: it may refuse a strange
layout that is in fact sound, and never accepts one that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.errors import InputError

__all__ = ["MAX_NBYTES", "Region", "check_apart", "check_int", "extent"]

MAX_NBYTES = 1 << 56  # 64 PiB: sums and products of a few offsets stay in int64


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Raise InputError naming ``name`` unless ``value`` is an integer in [low, high]."""
    if type(value) is not int or not low <= value <= high:
        raise InputError(f"{name}: {value!r} is not a whole number from {low} to {high}")


@dataclass(frozen=True, slots=True)
class Region:
    """A nested strided set of bytes. ``axes`` are (count, stride), longest stride first, count above 1."""

    where: str
    start: int
    axes: tuple[tuple[int, int], ...]
    inner_nbytes: int

    @property
    def stop(self) -> int:
        return self.start + self.inner_nbytes + sum((count - 1) * stride for count, stride in self.axes)


def extent(where: str, start: int, axes: Sequence[tuple[int, int, str]], inner_nbytes: int) -> Region:
    """The region of one tensor. Raises InputError naming the stride that steps into itself."""
    nested = sorted(((stride, count, name) for count, stride, name in axes if count > 1))
    covered = inner_nbytes
    for stride, count, name in nested:
        if stride < covered:
            raise InputError(f"{where}: {name} {stride} is less than the {covered} bytes that it steps over")
        covered += (count - 1) * stride
    return Region(where, start, tuple((count, stride) for stride, count, _ in reversed(nested)), inner_nbytes)


def check_apart(regions: Sequence[Region]) -> None:
    """Raise InputError naming two regions that share a byte, or that cannot be told apart."""
    for cluster in _clusters(regions):
        _check_cluster(cluster)


def _clusters(regions: Sequence[Region]) -> list[list[Region]]:
    """Split into sets whose spans overlap."""
    clusters: list[list[Region]] = []
    stop = -1
    for region in sorted(regions, key=lambda region: (region.start, region.stop)):
        if region.start >= stop:
            clusters.append([])
        clusters[-1].append(region)
        stop = max(stop, region.stop)
    return [cluster for cluster in clusters if len(cluster) > 1]


def _check_cluster(cluster: list[Region]) -> None:
    """Regions whose spans overlap must step alike; then one period decides."""
    first = cluster[0]
    for region in cluster[1:]:
        if not region.axes or not first.axes or region.axes[0][1] != first.axes[0][1]:
            raise InputError(f"{first.where} and {region.where} overlap")
    period = first.axes[0][1]
    inner = [
        Region(region.where, (region.start - first.start) % period, region.axes[1:], region.inner_nbytes)
        for region in cluster
    ]
    for region in inner:
        if region.stop > period:
            raise InputError(f"{first.where} and {region.where} overlap")
    check_apart(inner)
