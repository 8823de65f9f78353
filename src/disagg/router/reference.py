"""Writes the page of all metrics from the metrics themselves: ``python -m disagg.router.reference [--check]``.

It runs in a checkout: the page goes to ``docs/reference/metrics.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path

from disagg.engines.base import ReadinessProbe
from disagg.http.client import Client
from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.policy.breaker import Phase
from disagg.router.access_log import AccessLog
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet, State
from disagg.router.gauges import connection_gauges
from disagg.router.metrics import Metrics
from disagg.router.record import Outcome
from disagg.router.record import Path as Way
from disagg.router.series import SECONDS, TOKEN_SECONDS, Series
from disagg.router.steering import Steering
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

PAGE = Path("docs/reference/metrics.md")

_INTRO = """\
<!-- Made by `python -m disagg.router.reference` from the metrics in src/disagg/router. Edit those, not this page. -->

# Metrics reference

`GET /metrics` of the router, in Prometheus' text format. [Monitoring](../guides/monitoring.md) says what to look at.

A counter's samples end in `_total`, a histogram's in `_bucket`, `_sum` and `_count`. Times are seconds. Labels have
few values: names of stages, engines and keys, and words out of closed lists; nothing of what a client sends. Series
of an engine disappear when it leaves the fleet for good; a restart keeps them.

| Metric | Type | Labels | What it shows |
|---|---|---|---|
"""

_OUTRO = """
The process's own figures stand beside them under Prometheus' usual names: `process_cpu_seconds_total`,
`process_resident_memory_bytes`, `process_open_fds`, `process_max_fds`, `process_start_time_seconds`.

## What the labels say

"""


def make_page() -> str:
    """The page."""
    rows = [
        f"| `{series.name}{'_total' if series.kind == 'counter' else ''}` | {series.kind} |"
        f" {', '.join(f'`{label}`' for label in series.labels)} | {series.text} |"
        for series in sorted(every_series(), key=lambda s: s.name)
    ]
    return _INTRO + "\n".join(rows) + "\n" + _OUTRO + "\n".join(_labels()) + "\n"


def every_series() -> list[Series]:
    """Each metric of a router that has everything switched on."""
    fleet, clocks, client = Fleet((Stage.PREFILL, Stage.DECODE)), Clocks(), Client()
    probe = ReadinessProbe("/health", "/metrics", None, "running", "waiting", kv_events_path="/kv-events")
    spec = RouterSpec(prefill_policy="prefix-affinity", decode_policy="kv-affinity")
    steering = Steering(RouterConfig(("m",), spec, probe=probe), fleet, client, clocks, ())
    return [
        *Metrics(fleet, clocks.monotonic).series,
        *connection_gauges(Server(_nobody), client),
        *steering.series(),
        AccessLog(BytesIO()).dropped,
    ]


def main(argv: Sequence[str]) -> int:
    """Write the page, or with ``--check`` say whether it is current; 1 if it is not."""
    text = make_page()
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in argv:
        sys.stdout.write(f"{PAGE} is not current; run python -m disagg.router.reference\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
    return 0


def _labels() -> Iterator[str]:
    yield f"- `path`: {_words(Way)}. `none` is a request that was refused at the door."
    yield "- `api` of requests: the path that was called; `unread` is what could not be read as a request."
    yield f"- `outcome` of requests: {_words(Outcome)}."
    yield (
        "- `outcome` of legs: `ok`, `refused` (4xx and what an engine does not offer), `failed` (500, 502, 503, 504),"
        " `timeout`, `broken` (the connection, or the stream, ended too early), `unreachable`, `no-handle` and"
        " `foreign-engine` (prefill's answer cannot be used), `cancelled` (the client left, or the other leg failed)."
    )
    yield (
        "- `reason` of requests: why the path is not the disaggregated one (`n-greater-1`, `no-prefill-pool`, ...),"
        " else why the request was not served: the error (`bad-request`, `unknown-model`, `overloaded`,"
        " `no-instance`, ...), or stage and outcome of the leg (`decode-failed`, ...)."
    )
    yield f"- `state` of an engine: {_words(State)}; of a breaker: {_words(Phase)}; of a connection: `busy`, `kept`."
    yield "- `engine`: the instance's name, such as `prefill-0`. `instance` is Prometheus' own label: the router."
    yield f"- Buckets of times: {_bounds(SECONDS)}; between tokens: {_bounds(TOKEN_SECONDS)}."


def _words(words: Sequence[str] | type[Way] | type[Outcome] | type[State] | type[Phase]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _bounds(bounds: Sequence[float]) -> str:
    return ", ".join(f"{bound:g}" for bound in bounds)


async def _nobody(request: Request, respond: Responder) -> None:
    """A handler that is never called."""


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
