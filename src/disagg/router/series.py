"""Series of numbers that cost nothing to count: plain dictionaries and lists, made into the client library's objects
when somebody asks for the page."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, MutableMapping, Sequence
from typing import Any, ClassVar, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]

ENGINE = "engine"
"""Label with an instance's name. Not `instance`: that is the label in which Prometheus keeps what it scraped."""

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1800.0,
)  # fmt: skip
"""Upper bounds in seconds for everything from a refusal to the longest answer."""
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0,
    2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds in seconds for the time from one token to the next."""


class Series(Protocol):
    """One metric.

    Attributes:
        kind: Prometheus' type of it.
        name: As it is exposed, without the endings that its samples have.
        text: What it counts, in one sentence.
        labels: Their names.
    """

    kind: ClassVar[str]
    name: str
    text: str
    labels: Labels

    def family(self) -> Metric:
        """What is exposed."""
        ...

    def keep(self, engines: Container[str]) -> None:
        """Forget the samples of engines that are not among these."""
        ...


class Counter:
    """Numbers that only grow. `values[labels] += 1` counts."""

    kind: ClassVar[str] = "counter"

    def __init__(self, name: str, text: str, labels: Labels = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: defaultdict[Labels, float] = defaultdict(int)
        if not labels:
            self.values[()] = 0

    def family(self) -> Metric:
        """What is exposed."""
        family = CounterMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family

    def keep(self, engines: Container[str]) -> None:
        """Forget the samples of engines that are not among these."""
        _keep(self.labels, self.values, engines)


class Buckets:
    """One histogram: counts per bucket, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        so_far = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            result.append((bound, so_far))
        return result


class Histogram:
    """Histograms by labels. `values[labels].observe(...)` counts."""

    kind: ClassVar[str] = "histogram"

    def __init__(self, name: str, text: str, labels: Labels = (), bounds: Sequence[float] = SECONDS) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self.values: defaultdict[Labels, Buckets] = defaultdict(lambda: Buckets(bounds))

    def family(self) -> Metric:
        """What is exposed."""
        family = HistogramMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value.cumulative(), value.total)
        return family

    def keep(self, engines: Container[str]) -> None:
        """Forget the samples of engines that are not among these."""
        _keep(self.labels, self.values, engines)


class Gauge:
    """Numbers that are looked up when somebody asks.

    Args:
        name: As it is exposed.
        text: What it shows, in one sentence.
        labels: Their names.
        read: Gives the samples.
    """

    kind: ClassVar[str] = "gauge"

    def __init__(
        self, name: str, text: str, labels: Labels, read: Callable[[], Iterable[tuple[Labels, float]]]
    ) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._read = read

    def family(self) -> Metric:
        """What is exposed."""
        family = GaugeMetricFamily(self.name, self.text, labels=self.labels)
        for labels, value in self._read():
            family.add_metric(labels, value)
        return family

    def keep(self, engines: Container[str]) -> None:
        """Nothing to forget: it holds nothing."""


def _keep(labels: Labels, values: MutableMapping[Labels, Any], engines: Container[str]) -> None:
    if ENGINE in labels:
        position = labels.index(ENGINE)
        for key in [k for k in values if k[position] not in engines]:
            del values[key]
