"""The dashboard and the alerts ask for metrics and labels that a router really shows."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from disagg.engines.base import ReadinessProbe
from disagg.router.reference import every_series
from disagg.router.series import ENGINE, Counter
from tests.support import mock_engine as mock
from tests.support.promql import Query, read_query
from tests.support.rig import MODEL, Rig, rig

ROOT = Path(__file__).parents[3]
DASHBOARD: dict[str, Any] = json.loads((ROOT / "deploy/grafana/disagg.json").read_text())
PANELS: list[dict[str, Any]] = [p for p in DASHBOARD["panels"] if p["type"] != "row"]
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ADDED_BY_PROMETHEUS = frozenset({"job", "instance"})
QUIET = frozenset({
    "disagg_kv_event_batches", "disagg_kv_events_lost", "disagg_kv_left_to_lease", "disagg_kv_released",
    "disagg_priming_legs", "disagg_stream_recoveries",
})  # fmt: skip
"""Counters for which it takes more than mock engines; everything else has to come from traffic."""
STREAM = {"model": MODEL, "prompt": "x", "stream": True}


def queries() -> list[tuple[str, str]]:
    """Every query with the place where it stands."""
    found = [(p["title"], t["expr"]) for p in PANELS for t in p["targets"]]
    found += [(a["name"], a["expr"]) for a in DASHBOARD["annotations"]["list"] if "expr" in a]
    found += [(rule["alert"], rule["expr"]) for rule in RULES]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            inner = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            assert inner is not None
            found.append((variable["name"], f"sum by ({inner[2]}) ({inner[1]})"))
    return found


async def exposed() -> dict[str, set[str]]:
    """Sample names and their labels, of a router that has seen some of everything."""
    probe = ReadinessProbe("/health", "/metrics", None, "running", "waiting", kv_events_path="/kv-events")
    async with rig(
        prefill=2,
        decode=2,
        probe=probe,
        api_key=("k",),
        max_in_flight=1,
        breaker_failures=1,
        retry_budget=0.0,
        retries=9,
        prefill_policy="prefix-affinity",
        decode_policy="kv-affinity",
        access_log=True,
        access_stream=io.BytesIO(),
    ) as r:
        await _traffic(r)
        for member in r.fleet.members():
            member.set_foreign(1)
        for series in r.router.metrics.series:
            if series.name in QUIET and isinstance(series, Counter):
                series.values[tuple("prefill-0" if label == ENGINE else "x" for label in series.labels)] += 1
        page = (await r.get("/metrics")).body.decode()
    names: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            names[sample.name] |= set(sample.labels)
    return names


async def _traffic(r: Rig) -> None:
    key = {"authorization": "Bearer k"}
    for body in (STREAM, {"model": MODEL, "prompt": "x", "n": 2}, {"model": "nobody"}):
        await r.ask(body, **key)
    gate = asyncio.Event()
    held = mock.gated(gate, mock.EVENTS[:1], mock.EVENTS[1:])
    for d in r.decode:
        d.script.append(held)
    first = await r.call(STREAM, **key)
    await first.head()
    second = await r.call(STREAM, **key)
    while not r.router.metrics.queued:
        await asyncio.sleep(0)
    gate.set()
    for call in (first, second):
        await call.reply() if call is second else await call.chunk()
        await call.close()
    r.prefill[0].script.append(mock.answers(200, b"{}"))
    await r.ask(**key)
    for d in r.decode:
        d.default = mock.error(503)
    for _ in range(8):
        await r.ask(**key)


@pytest.fixture(scope="module")
def shown() -> dict[str, set[str]]:
    return asyncio.run(exposed())


@pytest.mark.parametrize(("where", "expr"), queries(), ids=[where for where, _ in queries()])
def test_a_query_names_what_there_is(where: str, expr: str, shown: dict[str, set[str]]) -> None:
    """Each metric is exposed, with each label that it is selected or grouped by."""
    query: Query = read_query(expr)
    known = {"up": set[str](), **shown}
    for name, labels in query.selectors:
        assert name in known, f"{where}: no router shows {name}"
        missing = (labels | query.grouping) - known[name] - ADDED_BY_PROMETHEUS
        assert not missing, f"{where}: {name} has no {sorted(missing)}"


def test_every_metric_of_the_reference_is_shown_with_its_labels(shown: dict[str, set[str]]) -> None:
    """A router with everything switched on, after some traffic; the reference invents and omits nothing."""
    endings = {"counter": "_total", "gauge": "", "histogram": "_count"}
    documented = {s.name + endings[s.kind]: set(s.labels) for s in every_series()}
    assert {n: shown[n] for n in documented if n in shown} == documented
    ours = {re.sub(r"_(bucket|sum)$", "_count", n) for n in shown if n.startswith("disagg_")}
    assert ours <= set(documented)


def test_every_metric_is_on_the_dashboard_or_in_an_alert() -> None:
    """What is counted is also looked at."""
    asked = {name for _, expr in queries() for name, _ in read_query(expr).selectors}
    stems = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert {s.name for s in every_series()} <= stems


@pytest.mark.parametrize("panel", PANELS, ids=[p["title"] for p in PANELS])
def test_a_panel_is_whole(panel: dict[str, Any]) -> None:
    """A title, a text, and legends out of labels that its queries keep; it stays within Grafana's 24 columns."""
    assert panel["title"]
    assert panel["description"].endswith(".")
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    for target in panel["targets"]:
        legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        query = read_query(target["expr"])
        grouped = query.grouping or ADDED_BY_PROMETHEUS | {"engine", "version"}
        assert legend <= grouped, target["expr"]
        assert target["datasource"]["uid"] == "${datasource}"


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    """Grafana would move them about."""
    assert len({p["id"] for p in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        g = panel["gridPos"]
        cells = {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_the_dashboard_has_its_rows() -> None:
    """What an operator looks for first."""
    rows = [p["title"] for p in DASHBOARD["panels"] if p["type"] == "row"]
    assert rows == [
        "Overview",
        "Latency for clients",
        "Stages and engines",
        "Handoff",
        "Errors, retries, breakers",
        "Queue and policies",
        "Router process",
    ]


@pytest.mark.parametrize("rule", RULES, ids=[r["alert"] for r in RULES])
def test_an_alert_says_how_bad_and_what(rule: dict[str, Any]) -> None:
    """A severity and a summary, whose labels the query keeps."""
    assert rule["labels"]["severity"] in {"warning", "critical"}
    used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    kept = read_query(rule["expr"]).grouping or ADDED_BY_PROMETHEUS
    assert used <= kept


def test_the_scrape_configuration_names_the_jobs_of_the_alerts() -> None:
    """Alerts that select a job would never fire for another one."""
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {c["job_name"] for c in config["scrape_configs"]}
    used = {job for rule in RULES for job in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert used <= jobs
    assert all((ROOT / "deploy/prometheus" / name).exists() for name in config["rule_files"])
