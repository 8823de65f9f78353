"""Traces that reach a collector, and requests that do not care whether there is one."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.http.server import Server
from disagg.router import tracing
from disagg.router.tracing import otlp_tracer
from tests.support.rig import MODEL, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


async def test_a_collector_gets_the_spans_over_http() -> None:
    """What waits is sent when the router stops; the service has its name."""
    received: list[ExportTraceServiceRequest] = []

    async def collect(request: Request, respond: Responder) -> None:
        assert request.path == "/v1/traces"
        message = ExportTraceServiceRequest()
        message.ParseFromString(request.body)
        received.append(message)
        respond.send(200, b"", ((b"content-type", b"application/x-protobuf"),))

    collector = Server(collect)
    await collector.start("127.0.0.1", 0)
    try:
        endpoint = f"http://127.0.0.1:{collector.port}/v1/traces"
        async with rig(otlp_traces_endpoint=endpoint) as r:
            assert (await r.ask(STREAM)).status == 200
        groups = [group for message in received for group in message.resource_spans]
        services = {a.value.string_value for g in groups for a in g.resource.attributes if a.key == "service.name"}
        assert services == {"disagg-router"}
        spans = [s for g in groups for scope in g.scope_spans for s in scope.spans]
        assert {s.name for s in spans} == {"POST /v1/completions", "prefill prefill-0", "decode decode-0"}
        assert len({s.trace_id for s in spans}) == 1
    finally:
        await collector.stop()


async def test_requests_do_not_wait_for_a_collector_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request is served, and the router stops."""
    # So that nothing is left of it when the test is over.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    monkeypatch.setattr(tracing, "_CLOSE_S", 30.0)
    tracer = otlp_tracer("http://127.0.0.1:9/v1/traces")
    async with asyncio.timeout(60), rig(tracer=tracer) as r:
        for _ in range(20):
            assert (await r.ask(STREAM)).status == 200
