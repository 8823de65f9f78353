"""Metrics pages of several processes become one."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from disagg.router.exposition import merge_pages
from disagg.router.fleet import Fleet, State
from disagg.router.metrics import Metrics
from disagg.topology.spec import Stage


def test_counts_add_up_and_states_do_not() -> None:
    """Counters, histograms and gauges of load are summed; what all know of an engine is shown once."""
    fleet = Fleet((Stage.DECODE,))
    fleet.add("decode-0", Stage.DECODE, "http://127.0.0.1:1", "a")
    fleet.mark("decode-0", "a", State.READY)
    one, two = (Metrics(fleet, lambda: 0.0) for _ in range(2))
    for metrics in (one, two, two):
        metrics.retried(Stage.DECODE)
        metrics.queue_left(0.3)
    one.in_flight, two.in_flight = 2, 3
    merged = merge_pages([one.render(), two.render()])
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(merged.decode())
        for s in family.samples
    }
    assert samples["disagg_retries_total", (("stage", "decode"),)] == 3
    assert samples["disagg_stage_ready", (("stage", "decode"),)] == 1
    assert samples["disagg_engine_state", (("engine", "decode-0"), ("stage", "decode"), ("state", "ready"))] == 1
    assert 5 in [value for (name, _), value in samples.items() if "in_flight" in name]
    counts = [value for (name, _), value in samples.items() if "queue" in name and name.endswith("_count")]
    assert counts == [3]


def test_one_page_stays_as_it_is() -> None:
    """Merging one page keeps every family, sample and value."""
    page = Metrics(Fleet((Stage.DECODE,)), lambda: 0.0).render()
    parsed = [list(text_string_to_metric_families(p.decode())) for p in (page, merge_pages([page]))]
    assert parsed[0] == parsed[1]
    assert parsed[0]
