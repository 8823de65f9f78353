"""The metrics page: the real engine's names, and numbers that add up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from disagg.engines.emulated.settings import Role, SimplePace
from disagg.engines.emulated.stats import Histogram
from tests.support.wire import metric, request
from tests.unit.engines_emulated.running import SETTINGS, running

BODY = {"prompt": list(range(300, 340)), "max_tokens": 5, "ignore_eos": True}
REAL = Path(__file__).with_name("vllm_metrics.txt")


def test_a_router_finds_every_name_that_it_may_want() -> None:
    """All families of a real engine that tell of requests, tokens, caches, times and transfers are there."""
    with running(replace(SETTINGS, role=Role.CONSUMER)) as up:
        request(up.url(), "/v1/completions", BODY)
        page = request(up.url(), "/metrics").body.decode()
    ours = {family.name: family.type for family in text_string_to_metric_families(page)}
    for line in REAL.read_text().splitlines():
        name, kind = line.split()
        assert ours.get(name) == kind, name


def test_times_are_observed_once_per_request_and_token() -> None:
    """At a known pace the sums are the pace's."""
    with running(replace(SETTINGS, role=Role.NONE), pace=SimplePace(decode_step_s=0.01)) as up:
        for _ in range(2):
            request(up.url(), "/v1/completions", BODY)
        page = request(up.url(), "/metrics").body.decode()
    assert metric(page, "vllm:time_to_first_token_seconds_count") == 2
    assert metric(page, "vllm:inter_token_latency_seconds_count") == 8
    assert metric(page, "vllm:inter_token_latency_seconds_sum") >= 8 * 0.01
    assert metric(page, "vllm:request_decode_time_seconds_sum") >= 8 * 0.01
    assert metric(page, "vllm:request_generation_tokens_sum") == 10
    assert metric(page, "vllm:e2e_request_latency_seconds_bucket", le="+Inf") == 2
    assert metric(page, "vllm:request_success_total", finished_reason="length") == 2
    assert metric(page, "http_requests_total", handler="/v1/completions", status="2xx") == 2
    assert re.search(
        r"^process_start_time_seconds 1\.\d+e\+09|^process_start_time_seconds \d{10}", page, re.MULTILINE
    )


def test_a_histogram_counts_its_bound_in() -> None:
    """A value equal to a bound is in that bucket, a larger one in the next."""
    data = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        data.observe(value)
    assert data.counts == [2, 2, 1]
    assert data.total == 14.0
