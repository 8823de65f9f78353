"""Counters, histograms and gauges: what is counted is what is exposed."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.samples import Sample

from disagg.router.series import ENGINE, SECONDS, TOKEN_SECONDS, Buckets, Counter, Gauge, Histogram


def samples(series: Counter | Histogram | Gauge) -> list[Sample]:
    return list(series.family().samples)


def test_a_counter_without_labels_is_there_from_the_start() -> None:
    """A rate over a series that appears with its first event would miss that event."""
    assert [(s.name, s.value) for s in samples(Counter("disagg_x", "X."))] == [("disagg_x_total", 0)]
    assert samples(Counter("disagg_x", "X.", ("stage",))) == []


def test_a_gauge_is_read_when_it_is_asked_for() -> None:
    """It holds nothing itself."""
    value = [1.0]
    gauge = Gauge("disagg_x", "X.", (), lambda: [((), value[0])])
    value[0] = 2.0
    assert [s.value for s in samples(gauge)] == [2.0]


def test_engines_that_are_gone_are_forgotten() -> None:
    """Their names would pile up; series without engines stay."""
    legs = Counter("disagg_legs", "Legs.", ("stage", ENGINE))
    times = Histogram("disagg_s", "Times.", (ENGINE,))
    paths = Counter("disagg_paths", "Paths.", ("path",))
    for engine in ("a", "b"):
        legs.values["prefill", engine] += 1
        times.values[engine,].observe(1.0)
    paths.values["a",] += 1
    for series in (legs, times, paths):
        series.keep({"b"})
    assert set(legs.values) == {("prefill", "b")}
    assert set(times.values) == {("b",)}
    assert set(paths.values) == {("a",)}


@given(st.lists(st.floats(0, 4000, allow_nan=False)))
def test_a_histogram_counts_what_is_at_most_the_bound(values: list[float]) -> None:
    """Cumulative, with everything in +Inf, and the sum beside it."""
    buckets = Buckets(SECONDS)
    for value in values:
        buckets.observe(value)
    for bound, count in buckets.cumulative():
        assert count == sum(v <= float(bound) for v in values)
    assert abs(buckets.total - sum(values)) <= 1e-6 * max(1.0, sum(values))


def test_bounds_grow() -> None:
    """Otherwise the search for the bucket is wrong."""
    assert list(SECONDS) == sorted(set(SECONDS))
    assert list(TOKEN_SECONDS) == sorted(set(TOKEN_SECONDS))
