"""What the router counts, in Prometheus' format.

Counting happens on every request, reading once in a while: so the hot side is plain dictionaries and lists, and the
client library's objects are made when somebody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from disagg.router.fleet import Fleet, State
from disagg.router.record import Record
from disagg.topology.spec import Stage

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Labels = tuple[str, ...]


class Histogram:
    """Counts per bucket, and the sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(_SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Add one observation."""
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.total += seconds

    def buckets(self) -> Sequence[tuple[str, float]]:
        """Cumulative counts by upper bound."""
        cumulative = 0
        result: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self.counts, strict=True):
            cumulative += count
            result.append((bound, cumulative))
        return result


class Metrics(Collector):
    """All counters of one router.

    Attributes:
        in_flight: Requests that clients have open.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.in_flight = 0
        self._requests: defaultdict[Labels, int] = defaultdict(int)
        self._legs: defaultdict[Labels, int] = defaultdict(int)
        self._retries: defaultdict[Labels, int] = defaultdict(int)
        self._retries_refused: defaultdict[Labels, int] = defaultdict(int)
        self._breaker_opened: defaultdict[Labels, int] = defaultdict(int)
        self._breaker_overridden: defaultdict[Labels, int] = defaultdict(int)
        self._handoff_failures: defaultdict[Labels, int] = defaultdict(int)
        self._left_to_lease: defaultdict[Labels, int] = defaultdict(int)
        self._leg_seconds: defaultdict[Labels, Histogram] = defaultdict(Histogram)
        self._first_byte: defaultdict[Labels, Histogram] = defaultdict(Histogram)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def request_ended(self, record: Record) -> None:
        """A request is over."""
        self._requests[(record.api.value, record.path, record.reason, record.outcome)] += 1
        if record.first_byte_at:
            self._first_byte[(record.path,)].observe(record.first_byte_at - record.started_at)

    def leg_ended(self, stage: Stage, instance: str, outcome: str, seconds: float) -> None:
        """A leg is over, `seconds` after it was sent."""
        self._legs[(stage, instance, outcome)] += 1
        self._leg_seconds[(stage, instance)].observe(seconds)

    def retried(self, stage: Stage) -> None:
        """A request is tried again because of a leg on this stage."""
        self._retries[(stage,)] += 1

    def retry_refused(self, stage: Stage) -> None:
        """A request could have been tried again, but the retry budget is used up."""
        self._retries_refused[(stage,)] += 1

    def breaker_opened(self, stage: Stage, instance: str) -> None:
        """An instance has failed too often."""
        self._breaker_opened[(stage, instance)] += 1

    def breaker_overridden(self, stage: Stage) -> None:
        """Every instance of a stage has an open breaker, and one of them was chosen all the same."""
        self._breaker_overridden[(stage,)] += 1

    def handoff_failed(self, reason: str) -> None:
        """Prefill's answer could not be used for decode."""
        self._handoff_failures[(reason,)] += 1

    def left_to_lease(self, reason: str) -> None:
        """KV stays pinned on prefill until its lease ends, because no decode leg will fetch it."""
        self._left_to_lease[(reason,)] += 1

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the client library for each scrape."""
        yield _counter(
            "disagg_requests",
            "Requests by API, path taken, why, and outcome.",
            ("api", "path", "reason", "outcome"),
            self._requests,
        )
        yield _counter("disagg_legs", "Legs by instance and outcome.", ("stage", "instance", "outcome"), self._legs)
        yield _counter("disagg_retries", "Requests tried again, by the stage that failed.", ("stage",), self._retries)
        yield _counter(
            "disagg_retries_refused",
            "Failures passed on because the retry budget was used up, by the stage that failed.",
            ("stage",),
            self._retries_refused,
        )
        yield _counter(
            "disagg_breaker_opened",
            "Times that an instance was left out for its failures.",
            ("stage", "instance"),
            self._breaker_opened,
        )
        yield _counter(
            "disagg_breaker_overridden",
            "Legs sent although every instance of the stage had an open breaker.",
            ("stage",),
            self._breaker_overridden,
        )
        yield _counter(
            "disagg_handoff_failures",
            "Prefill answers that decode could not use.",
            ("reason",),
            self._handoff_failures,
        )
        yield _counter(
            "disagg_kv_left_to_lease", "Prefills whose KV only the lease frees.", ("reason",), self._left_to_lease
        )
        yield _histogram("disagg_leg_seconds", "Duration of a leg.", ("stage", "instance"), self._leg_seconds)
        yield _histogram(
            "disagg_time_to_first_byte_seconds",
            "From the complete request to the first byte of the answer's body.",
            ("path",),
            self._first_byte,
        )
        yield from self._gauges()

    def _gauges(self) -> Iterator[Metric]:
        open_requests = GaugeMetricFamily("disagg_requests_in_flight", "Requests that clients have open.")
        open_requests.add_metric((), self.in_flight)
        yield open_requests
        legs = GaugeMetricFamily("disagg_legs_in_flight", "Legs open on an instance.", labels=("stage", "instance"))
        states = GaugeMetricFamily(
            "disagg_instance_state", "1 for the state that an instance is in.", labels=("stage", "instance", "state")
        )
        for member in self._fleet.members():
            legs.add_metric((member.stage, member.name), member.in_flight)
            for state in State:
                states.add_metric((member.stage, member.name, state), float(member.state is state))
        yield legs
        yield states


def _counter(name: str, text: str, labels: Labels, values: dict[Labels, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: Labels, values: dict[Labels, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value.buckets(), value.total)
    return family
