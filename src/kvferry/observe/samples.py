"""Numbers that are read when somebody scrapes, for prometheus-client."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

__all__ = ["Sample", "Samples"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One number. ``is_total``: it only grows, and its name ends in ``_total``."""

    name: str
    says: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()
    is_total: bool = False


class Samples(Collector):
    """What ``read`` gives at each scrape; samples of one name have the same labels."""

    def __init__(self, read: Callable[[], Iterable[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for sample in self._read():
            if sample.name not in families:
                kind = CounterMetricFamily if sample.is_total else GaugeMetricFamily
                names = [name for name, _ in sample.labels]
                families[sample.name] = kind(sample.name, sample.says, labels=names)
            families[sample.name].add_metric([value for _, value in sample.labels], sample.value)
        return families.values()

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # nothing is read before the first scrape
