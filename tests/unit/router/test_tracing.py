"""Spans: one per request, one per leg beneath it, and the context on its way to the engines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from disagg.errors import ConfigError
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet
from disagg.router.observer import Observer
from disagg.router.tracing import OtelTracer
from disagg.topology.router_spec import Router as RouterSpec
from tests.support import mock_engine as mock
from tests.support.mock_engine import PrimingDialect
from tests.support.rig import MODEL, Call, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@contextmanager
def recorded() -> Iterator[tuple[OtelTracer, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    yield OtelTracer(SimpleSpanProcessor(exporter)), exporter


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def span_id(span: ReadableSpan) -> str:
    return f"{span.context.span_id:016x}"


async def test_a_request_and_its_legs_are_one_trace_below_the_clients_span() -> None:
    """The client's context is continued, and each engine gets the context of its own leg."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            await r.ask(STREAM, traceparent=f"00-{TRACE}-{PARENT}-01", tracestate="vendor=1")
            (prefill,), (decode,) = r.p.seen, r.d.seen
        spans = by_name(exporter)
        request, p, d = (spans[n] for n in ("POST /v1/completions", "prefill prefill-0", "decode decode-0"))
        assert {f"{s.context.trace_id:032x}" for s in spans.values()} == {TRACE}
        assert request.parent is not None
        assert f"{request.parent.span_id:016x}" == PARENT
        assert request.kind is SpanKind.SERVER
        for leg, sent in ((p, prefill), (d, decode)):
            assert leg.parent is not None
            assert leg.parent.span_id == request.context.span_id
            assert leg.kind is SpanKind.CLIENT
            assert sent.header(b"traceparent") == f"00-{TRACE}-{span_id(leg)}-01".encode()
            assert sent.header(b"tracestate") == b"vendor=1"
            assert sum(name == b"traceparent" for name, _ in sent.headers) == 1


async def test_a_leg_that_only_fetches_kv_is_told_apart_from_the_one_that_answers() -> None:
    """Three legs below one request, two of them on decode."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer, dialect=PrimingDialect()) as r:
            await r.ask(STREAM | {"n": 2})
        spans = exporter.get_finished_spans()
        legs = [s.attributes or {} for s in spans if s.name == "decode decode-0"]
        assert [a.get("disagg.priming") for a in legs] == [True, None]
        request = by_name(exporter)["POST /v1/completions"].attributes or {}
        assert (request["disagg.path"], request["disagg.primed"]) == ("disaggregated", "n-greater-1")


async def test_spans_say_what_happened() -> None:
    """Path, engines, tokens and times; names as the conventions for generative AI have them; no text."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            await r.ask({"model": MODEL, "prompt": "private words", "stream": True}, x_request_id="mine")
        spans = by_name(exporter)
        request = dict(spans["POST /v1/completions"].attributes or {})
        assert request["gen_ai.operation.name"] == "text_completion"
        assert request["gen_ai.request.model"] == MODEL
        assert request["gen_ai.usage.input_tokens"] == 7
        assert request["disagg.path"] == "disaggregated"
        assert request["disagg.request_id"] == "mine"
        assert (request["disagg.prefill"], request["disagg.decode"]) == ("prefill-0", "decode-0")
        assert isinstance(request["gen_ai.response.time_to_first_chunk"], float)
        leg = dict(spans["prefill prefill-0"].attributes or {})
        assert (leg["disagg.stage"], leg["disagg.incarnation"]) == ("prefill", "inc-prefill-0")
        assert (leg["disagg.outcome"], leg["http.response.status_code"]) == ("ok", 200)
        assert "private" not in "".join(s.to_json() for s in spans.values())


async def test_each_try_has_its_own_spans_and_failures_are_errors() -> None:
    """Two decode legs for a request that was tried again: one with an error, one without."""
    with recorded() as (tracer, exporter):
        async with rig(decode=2, tracer=tracer) as r:
            r.decode[0].script.append(mock.error(503))
            await r.ask()
        legs = [s for s in exporter.get_finished_spans() if s.name.startswith("decode")]
        assert {s.name: s.status.status_code for s in legs} == {
            "decode decode-0": StatusCode.ERROR,
            "decode decode-1": StatusCode.UNSET,
        }
        assert dict(legs[0].attributes or {})["error.type"] == "503"
        assert by_name(exporter)["POST /v1/completions"].status.status_code is StatusCode.UNSET


async def test_refusals_and_departures_end_their_spans() -> None:
    """Every span that was begun is finished, whatever the end of its request."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            await r.ask(b"{")
            r.d.default = mock.hangs
            call = await r.call(STREAM)
            await r.d.arrived.wait()
            await call.close()
            await r.settled()
        outcomes = [
            dict(s.attributes or {})["disagg.outcome"]
            for s in exporter.get_finished_spans()
            if s.name.startswith("POST")
        ]
        assert outcomes == ["refused", "client_left"]
        assert dict(by_name(exporter)["decode decode-0"].attributes or {})["disagg.outcome"] == "cancelled"


async def test_requests_on_one_connection_are_not_each_others_children() -> None:
    """The context of a request ends with it."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            body = b'{"model": "m", "prompt": "x"}'
            request = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
            request += b"content-length: %d\r\n\r\n%b" % (len(body), body)
            call = await Call.open(r.router.port)
            # Both at once: the second one begins in the task of the first.
            call.send(request + request)
            for _ in range(2):
                await call.reply()
            await call.close()
            await r.settled()
        requests = [s for s in exporter.get_finished_spans() if s.kind is SpanKind.SERVER]
        assert [s.parent for s in requests] == [None, None]
        assert len({s.context.trace_id for s in requests}) == 2


async def test_a_client_that_does_not_sample_is_obeyed() -> None:
    """No span is exported, and the engines are told not to sample either."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            await r.ask(STREAM, traceparent=f"00-{TRACE}-{PARENT}-00")
            context = r.p.seen[0].header(b"traceparent") or b""
        assert exporter.get_finished_spans() == ()
        assert context.startswith(f"00-{TRACE}-".encode())
        assert context.endswith(b"-00")


async def test_nonsense_in_place_of_a_context_begins_a_new_trace() -> None:
    """What a client sends is not passed on in the name of ours."""
    with recorded() as (tracer, exporter):
        async with rig(tracer=tracer) as r:
            await r.ask(STREAM, traceparent="nonsense")
            assert (r.d.seen[0].header(b"traceparent") or b"").startswith(b"00-")
        assert by_name(exporter)["POST /v1/completions"].parent is None


async def test_without_a_tracer_the_clients_context_passes_through() -> None:
    """As it came, to both legs."""
    context = f"00-{TRACE}-{PARENT}-01"
    async with rig() as r:
        await r.ask(STREAM, traceparent=context, tracestate="a=b")
        for engine in (r.p, r.d):
            assert engine.seen[0].header(b"traceparent") == context.encode()
            assert engine.seen[0].header(b"tracestate") == b"a=b"


def observer(endpoint: str) -> Observer:
    return Observer(RouterConfig(("m",), RouterSpec(otlp_traces_endpoint=endpoint)), Fleet(()), Clocks())


def test_a_missing_extra_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the field and the command that helps."""
    monkeypatch.delitem(sys.modules, "disagg.router.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"router\.otlp_traces_endpoint: .*pip install 'disagg\[otel\]'"):
        observer("http://127.0.0.1:4318/v1/traces")


def test_an_endpoint_has_to_be_a_url() -> None:
    """Otherwise every batch would fail, silently for the user."""
    with pytest.raises(ValidationError, match=r"'127\.0\.0\.1:4317' is no URL"):
        RouterSpec(otlp_traces_endpoint="127.0.0.1:4317")
