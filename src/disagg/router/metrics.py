"""What the router counts, in Prometheus' format.

Counting happens on every request, reading once in a while: see `disagg.router.series`. Labels have few values:
stages, engines of the fleet, and words out of closed lists, never anything that a client sends.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from disagg import __version__
from disagg.router.fleet import Fleet
from disagg.router.gauges import fleet_gauges
from disagg.router.record import Outcome, Path, Record
from disagg.router.series import ENGINE, TOKEN_SECONDS, Buckets, Counter, Gauge, Histogram, Series
from disagg.topology.spec import Stage

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
MAX_KEYS = 100
"""Names of client keys that are counted apart; all further ones share the name `other`."""
_CLASSES = {n: f"{n}xx" for n in range(1, 6)}


class Metrics(Collector):
    """All numbers of one router.

    Args:
        fleet: Shown as it is when somebody asks.
        now: Monotonic seconds.

    Attributes:
        in_flight: Requests that clients have open.
        queued: Those of them that wait for a permit.
        series: Everything that is exposed, apart from the process's own figures.
    """

    def __init__(self, fleet: Fleet, now: Callable[[], float]) -> None:
        self._fleet = fleet
        self.in_flight = 0
        self.queued = 0
        self._define_requests()
        self._define_legs()
        self._define_handoffs()
        self.series: list[Series] = [s for s in vars(self).values() if isinstance(s, Counter | Histogram)]
        self.series += [*_own_gauges(self), *fleet_gauges(fleet, now)]
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def _define_requests(self) -> None:
        self._requests = Counter(
            "disagg_requests",
            "Requests by API, path taken, why it was another one or why it failed, outcome, and class of status.",
            ("api", "path", "reason", "outcome", "status"),
        )
        self._duration = Histogram(
            "disagg_request_duration_seconds", "From the complete request to the end of its answer.", ("api", "path")
        )
        self._first_token = Histogram(
            "disagg_time_to_first_token_seconds",
            "From the complete request to the first event of a streamed answer.",
            ("path",),
        )
        self._token_gap = Histogram(
            "disagg_inter_token_latency_seconds",
            "Between two writes of a stream to its client; one write is one token, unless an engine sends more.",
            ("path",),
            TOKEN_SECONDS,
        )
        self._queue = Histogram("disagg_queue_duration_seconds", "How long requests waited for a permit.")
        self._by_key = Counter("disagg_key_requests", "Requests by the name of the client's key.", ("key", "outcome"))
        self._key_names: set[str] = set()
        self._prompt_tokens = Counter(
            "disagg_prompt_tokens", "Prompt tokens of answers that tell them, by path.", ("path",)
        )
        self._cached_tokens = Counter(
            "disagg_cached_prompt_tokens", "Those of them that prefill found in its own cache.", ("path",)
        )
        self._completion_tokens = Counter(
            "disagg_completion_tokens", "Tokens of answers that tell them, by path.", ("path",)
        )

    def _define_legs(self) -> None:
        self._legs = Counter("disagg_legs", "Legs by engine and outcome.", ("stage", ENGINE, "outcome"))
        self._leg_duration = Histogram("disagg_leg_duration_seconds", "Duration of a leg.", ("stage", ENGINE))
        self._leg_first_byte = Histogram(
            "disagg_leg_first_byte_seconds",
            "From sending a leg to the first byte of its answer's body.",
            ("stage", ENGINE),
        )
        self._retries = Counter("disagg_retries", "Requests tried again, by the stage that failed.", ("stage",))
        self._retries_refused = Counter(
            "disagg_retries_refused",
            "Failures passed on because the retry budget was used up, by the stage that failed.",
            ("stage",),
        )
        self._breaker_opened = Counter(
            "disagg_breaker_opened", "Times that an engine was left out for its failures.", ("stage", ENGINE)
        )
        self._breaker_overridden = Counter(
            "disagg_breaker_overridden",
            "Legs sent although every engine of the stage had an open breaker.",
            ("stage",),
        )

    def _define_handoffs(self) -> None:
        self._handoffs = Counter("disagg_handoffs", "Prompts whose KV decode has taken over, by prefill.", (ENGINE,))
        self._handoff_tokens = Counter(
            "disagg_handoff_tokens",
            "Prompt tokens of served requests whose KV was taken over, by prefill.",
            (ENGINE,),
        )
        self._handoff_duration = Histogram(
            "disagg_handoff_duration_seconds",
            "From prefill's answer to decode's first event, where they come in turn: queue, transfer, and one step.",
            (ENGINE,),
        )
        self._handoff_failures = Counter(
            "disagg_handoff_failures", "Prompts whose KV did not reach decode.", ("reason",)
        )
        self._primings = Counter(
            "disagg_priming_legs",
            "Decode legs of one token that only fetch KV, for a request of several answers, by engine and outcome.",
            (ENGINE, "outcome"),
        )
        self._recoveries = Counter(
            "disagg_stream_recoveries", "Streams whose decode instance failed, and what became of them.", ("outcome",)
        )
        self._released = Counter(
            "disagg_kv_released",
            "Prefills whose KV was let go unread before its lease ended.",
            ("reason",),
        )
        self._left_to_lease = Counter(
            "disagg_kv_left_to_lease", "Prefills whose KV only the lease frees.", ("reason",)
        )

    def add(self, series: Series) -> None:
        """Show a further number on the same page."""
        self.series.append(series)

    # Requests.

    def request_ended(self, record: Record, now: float) -> None:
        """A request is over at `now`, monotonic seconds."""
        path = record.path
        status = _CLASSES.get(record.status // 100, "none")
        self._requests.values[record.api, path, record.reason or record.error, record.outcome, status] += 1
        self._duration.values[record.api, path].observe(now - record.started_at)
        if record.key:
            self._by_key.values[self._key_label(record.key), record.outcome] += 1
        if record.outcome is Outcome.OK and record.prompt_tokens:
            self._prompt_tokens.values[path,] += record.prompt_tokens
            self._cached_tokens.values[path,] += record.cached_tokens
            self._completion_tokens.values[path,] += record.completion_tokens
            if path is Path.DISAGGREGATED:
                self._handoff_tokens.values[record.prefill,] += record.prompt_tokens

    def _key_label(self, name: str) -> str:
        if name not in self._key_names:
            if len(self._key_names) >= MAX_KEYS:
                return "other"
            self._key_names.add(name)
        return name

    def refused_unread(self, reason: str, status: int) -> None:
        """What has come was no request that could be read."""
        labels = ("unread", Path.NONE, reason, Outcome.REFUSED, _CLASSES.get(status // 100, "none"))
        self._requests.values[labels] += 1

    def stream_began(self, path: str, seconds: float) -> Buckets:
        """A stream's first event is sent, `seconds` after its request was complete.

        Returns:
            What counts the seconds from each write to the next.
        """
        self._first_token.values[path,].observe(seconds)
        return self._token_gap.values[path,]

    def queue_left(self, seconds: float) -> None:
        """A request waits no longer, after so many seconds, for better or for worse."""
        self._queue.values[()].observe(seconds)

    def retried(self, stage: Stage) -> None:
        """A request is tried again because of a leg on this stage."""
        self._retries.values[stage,] += 1

    def retry_refused(self, stage: Stage) -> None:
        """A request could have been tried again, but the retry budget is used up."""
        self._retries_refused.values[stage,] += 1

    # Legs.

    def leg_answered(self, stage: Stage, engine: str, seconds: float) -> None:
        """A leg's answer has begun, `seconds` after the leg."""
        self._leg_first_byte.values[stage, engine].observe(seconds)

    def leg_ended(self, stage: Stage, engine: str, outcome: str, seconds: float) -> None:
        """A leg is over, `seconds` after it began."""
        self._legs.values[stage, engine, outcome] += 1
        self._leg_duration.values[stage, engine].observe(seconds)

    def breaker_opened(self, stage: Stage, engine: str) -> None:
        """An engine has failed too often."""
        self._breaker_opened.values[stage, engine] += 1

    def breaker_overridden(self, stage: Stage) -> None:
        """Every engine of a stage has an open breaker, and one of them was chosen all the same."""
        self._breaker_overridden.values[stage,] += 1

    # Handoffs.

    def handed_over(self, prefill: str) -> None:
        """Decode has taken over the KV of a prompt."""
        self._handoffs.values[prefill,] += 1

    def priming_ended(self, decode: str, outcome: str) -> None:
        """A decode leg that only fetched KV is over."""
        self._primings.values[decode, outcome] += 1

    def handoff_took(self, decode: str, seconds: float) -> None:
        """Decode's stream began so many seconds after prefill's answer."""
        self._handoff_duration.values[decode,].observe(seconds)

    def handoff_failed(self, reason: str) -> None:
        """KV that prefill has made, or should have made, does not reach decode."""
        self._handoff_failures.values[reason,] += 1

    def left_to_lease(self, reason: str) -> None:
        """KV stays pinned on prefill until its lease ends, because no decode leg will fetch it."""
        self._left_to_lease.values[reason,] += 1

    def stream_recovered(self, outcome: str) -> None:
        """A stream has lost its decode instance: it was resumed or completed, or the word says why not."""
        self._recoveries.values[outcome,] += 1

    def released(self, reason: str) -> None:
        """KV that nobody would have fetched was let go before its lease ended."""
        self._released.values[reason,] += 1

    # The page.

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the client library for each scrape."""
        engines = {m.name for m in self._fleet.members()}
        for series in self.series:
            # Fleets change for months: names that are gone must not pile up.
            series.keep(engines)
            yield series.family()


def _own_gauges(metrics: Metrics) -> tuple[Gauge, ...]:
    build = (__version__, platform.python_version())
    return (
        Gauge("disagg_build_info", "1, with the versions that run.", ("version", "python"), lambda: [(build, 1)]),
        Gauge("disagg_requests_in_flight", "Requests that clients have open.", (), lambda: [((), metrics.in_flight)]),
        Gauge("disagg_requests_queued", "Requests that wait for a permit.", (), lambda: [((), metrics.queued)]),
    )
