"""OpenTelemetry spans: one per request, and one per leg beneath it, whose context the engines continue.

::

    client's span  ─>  POST /v1/chat/completions   (server)
                         ├─ prefill prefill-0      (client)  ─>  the engine's own span
                         └─ decode decode-1        (client)  ─>  the engine's own span

This module needs the extra ``otel``; it is imported only where spans are wanted. The usual variables work:
``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator

import msgspec
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from disagg import __version__
from disagg.engines import bodies
from disagg.engines.base import Api, Body
from disagg.http.messages import Header, Request
from disagg.http.origin import Outgoing
from disagg.router.fleet import Member
from disagg.router.record import Record

_CLOSE_S = 3.0
_CONTEXT_HEADERS = frozenset({b"traceparent", b"tracestate"})
_OPERATIONS: dict[str, str] = {
    Api.CHAT: "chat",
    Api.COMPLETIONS: "text_completion",
    Api.RESPONSES: "chat",
    Api.MESSAGES: "chat",
    Api.GENERATE: "text_completion",
}
_name = msgspec.json.Decoder(str | None)
_propagator = TraceContextTextMapPropagator()


def otlp_tracer(endpoint: str) -> OtelTracer:
    """A tracer that sends its spans to an OTLP/HTTP collector, in batches, from a thread of its own.

    Spans that the collector does not take in time are dropped: requests never wait for it.
    """
    return OtelTracer(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


class OtelTracer:
    """Makes spans with the OpenTelemetry SDK.

    Args:
        processor: Where finished spans go.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        attributes = {SERVICE_NAME: "disagg-router", SERVICE_VERSION: __version__}
        if "OTEL_SERVICE_NAME" in os.environ:
            del attributes[SERVICE_NAME]
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("disagg.router", __version__)

    def request(self, request: Request) -> OtelRequestSpan:
        """A client's request has come; its own trace context is continued."""
        carrier = {k.decode("latin-1"): v.decode("latin-1") for k, v in request.headers if k in _CONTEXT_HEADERS}
        span = self._tracer.start_span(
            f"{request.method} {request.path}",
            _propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": request.method, "url.path": request.path},
        )
        return OtelRequestSpan(span)

    def leg(self, member: Member, outgoing: Outgoing) -> tuple[OtelLegSpan, Outgoing]:
        """A leg is about to be sent; its request carries the context of the new span."""
        span = self._tracer.start_span(
            f"{member.stage} {member.name}",
            kind=SpanKind.CLIENT,
            attributes={
                "http.request.method": outgoing.method,
                "url.path": outgoing.target,
                "server.address": member.origin.host,
                "server.port": member.origin.port,
                "disagg.stage": member.stage,
                "disagg.engine": member.name,
                "disagg.incarnation": member.incarnation,
            },
        )
        headers = tuple(h for h in outgoing.headers if h[0] not in _CONTEXT_HEADERS)
        outgoing = msgspec.structs.replace(outgoing, headers=(*headers, *_context_headers(span)))
        return OtelLegSpan(span), outgoing

    async def close(self) -> None:
        """Send what is left, if the collector takes it within a few seconds."""
        # The exporter's own time limit is longer than a stop should last; a daemon does not keep the process alive.
        closing = threading.Thread(target=self._provider.shutdown, name="traces-closing", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


class OtelRequestSpan:
    """The span of one client request, current in its task until its end."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._token = otel_context.attach(trace.set_span_in_context(span))
        self.trace_id = trace.format_trace_id(span.get_span_context().trace_id)

    def asked(self, body: Body) -> None:
        """The request was read and may be served."""
        self._span.set_attribute("gen_ai.request.stream", "stream" in body and bodies.is_true(body, "stream"))
        model = body.get("model")
        if model is not None:
            # The door has seen to it that it is the name of a model that is served here, or null.
            self._span.set_attribute("gen_ai.request.model", _name.decode(model) or "")

    def end(self, record: Record) -> None:
        """The request is over."""
        otel_context.detach(self._token)
        span = self._span
        if span.is_recording():
            span.set_attributes(dict(_story(record)))
            if record.outcome in {"failed", "broken"}:
                span.set_status(Status(StatusCode.ERROR, record.detail or None))
        span.end()


class OtelLegSpan:
    """The span of one leg."""

    def __init__(self, span: Span) -> None:
        self._span = span

    def primes(self) -> None:
        """The leg only fetches KV for another one."""
        self._span.set_attribute("disagg.priming", True)

    def end(self, outcome: str, status: int) -> None:
        """The leg is over."""
        self._span.set_attribute("disagg.outcome", outcome)
        if status:
            self._span.set_attribute("http.response.status_code", status)
        if outcome not in {"ok", "cancelled"}:
            self._span.set_attribute("error.type", str(status) if status >= 400 else outcome)
            self._span.set_status(Status(StatusCode.ERROR, outcome))
        self._span.end()


def _story(record: Record) -> Iterator[tuple[str, AttributeValue]]:
    """What a record adds to its span; names follow the conventions for generative AI where there is one."""
    yield "disagg.request_id", record.public_id.decode("latin-1")
    yield "disagg.path", record.path
    yield "disagg.outcome", record.outcome
    yield "disagg.retries", record.retries
    yield "http.response.status_code", record.status
    operation = _OPERATIONS.get(record.api)
    if operation is not None:
        yield "gen_ai.operation.name", operation
    for name, text in (
        ("disagg.reason", record.reason),
        ("disagg.primed", record.primed),
        ("disagg.prefill", record.prefill),
        ("disagg.decode", record.decode),
        ("error.type", record.error),
    ):
        if text:
            yield name, text
    for name, tokens in (
        ("gen_ai.usage.input_tokens", record.prompt_tokens),
        ("gen_ai.usage.output_tokens", record.completion_tokens),
        ("gen_ai.usage.cache_read.input_tokens", record.cached_tokens),
    ):
        if tokens:
            yield name, tokens
    if record.first_byte_at:
        yield "gen_ai.response.time_to_first_chunk", record.first_byte_at - record.started_at


def _context_headers(span: Span) -> tuple[Header, ...]:
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, trace.set_span_in_context(span))
    return tuple((k.encode("latin-1"), v.encode("latin-1")) for k, v in carrier.items())
