"""Everything that looks on: metrics, traces and the logs. A request is told to them once, when it is over."""

from __future__ import annotations

import logging
import sys

from disagg.errors import ConfigError, Problem
from disagg.http.messages import Request
from disagg.router.access_log import AccessLog, make_line
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet
from disagg.router.metrics import Metrics
from disagg.router.record import Record
from disagg.router.spans import RequestSpan, Tracer
from disagg.topology.router_spec import Router as RouterSpec

text_log = logging.getLogger("disagg.access")


class Observer:
    """What is known about the requests of one router, and who is told.

    Args:
        config: Which of it is wanted.
        fleet: Shown by the metrics.
        clocks: Where time comes from.

    Attributes:
        metrics: Always there.
        tracer: Makes spans; None if no traces are wanted.

    Raises:
        ConfigError: If traces are wanted and cannot be made.
    """

    def __init__(self, config: RouterConfig, fleet: Fleet, clocks: Clocks) -> None:
        spec = config.spec
        self.metrics = Metrics(fleet, clocks.monotonic)
        self.tracer = config.tracer or _tracer(spec)
        self._clocks = clocks
        self._text = config.access_log
        self._access: AccessLog | None = None
        if spec.access_log:
            self._access = AccessLog(config.access_stream or sys.stdout.buffer)
            self.metrics.add(self._access.dropped)

    def began(self, request: Request, record: Record) -> RequestSpan | None:
        """A request has come.

        Returns:
            Its span, which `ended` wants back.
        """
        if self.tracer is None:
            return None
        span = self.tracer.request(request)
        record.trace_id = span.trace_id
        return span

    def ended(self, request: Request, record: Record, span: RequestSpan | None) -> None:
        """A request is over, whatever its end."""
        now = self._clocks.monotonic()
        self.metrics.request_ended(record, now)
        if span is not None:
            span.end(record)
        if self._access is not None:
            self._access.add(make_line(record, request, now, self._clocks.wall()))
        if self._text and text_log.isEnabledFor(logging.INFO):
            text_log.info("%s", record.log_line(now))

    async def close(self) -> None:
        """Send and write what waits."""
        if self._access is not None:
            await self._access.close()
        if self.tracer is not None:
            await self.tracer.close()


def _tracer(spec: RouterSpec) -> Tracer | None:
    endpoint = spec.otlp_traces_endpoint
    if endpoint is None:
        return None
    where = "router.otlp_traces_endpoint"
    try:
        from disagg.router.tracing import otlp_tracer
    except ImportError as error:
        raise ConfigError(
            [Problem(where, f"traces need the extra otel ({error}): pip install 'disagg[otel]'")]
        ) from error
    return otlp_tracer(endpoint)
