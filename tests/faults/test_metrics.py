"""What the metrics say about requests that went well, went wrong, or were never served."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disagg.http.messages import SSE_TYPE, Request
from disagg.http.responder import Responder
from disagg.router.fleet import State
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3}}\n\n'


async def test_the_page_is_well_formed() -> None:
    """A strict parser reads it; each family is there once, with a help text, and nothing has an engine's secrets."""
    async with rig() as r:
        await r.ask(STREAM, authorization="Bearer secret-key")
        await r.ask({"model": "nobody", "prompt": "hidden words"})
        page = (await r.get("/metrics")).body.decode()
        families = list(text_string_to_metric_families(page))
        names = [f.name for f in families]
        assert len(names) == len(set(names))
        assert all(f.documentation for f in families)
        assert {"disagg_build_info", "process_cpu_seconds", "disagg_requests"} <= set(names)
        assert "secret-key" not in page
        assert "nobody" not in page
        assert "hidden" not in page


async def test_a_stream_is_timed_from_event_to_event() -> None:
    """One first token, and one gap per further write; a whole answer has neither."""
    gates = [asyncio.Event() for _ in range(2)]

    async def stepwise(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        respond.start(200, (SSE_TYPE,), first=mock.EVENTS[0])
        for gate, event in zip(gates, mock.EVENTS[1:], strict=True):
            await gate.wait()
            respond.write(event)
        respond.finish()

    async with rig() as r:
        r.d.script.append(stepwise)
        call = await r.call(STREAM)
        await call.head()
        for gate in gates:
            await call.chunk()
            gate.set()
        assert await call.chunk() == mock.EVENTS[2]
        await call.close()
        await r.ask()
        path = {"path": "disaggregated"}
        assert await r.metric("disagg_time_to_first_token_seconds_count", **path) == 1
        assert await r.metric("disagg_inter_token_latency_seconds_count", **path) == 2
        assert await r.metric("disagg_request_duration_seconds_count", **path) == 2
        assert await r.metric("disagg_handoff_duration_seconds_count", engine="decode-0") == 1
        await r.settled()


async def test_handoffs_are_counted_where_decode_used_the_kv() -> None:
    """With the tokens that prefill has counted; not for local requests, nor for prompts that failed on decode."""
    async with rig(retries=0) as r:
        await r.ask()
        await r.ask(STREAM)
        await r.ask({"model": MODEL, "prompt": "x", "n": 2})
        r.d.script.append(mock.error(500))
        await r.ask()
        assert await r.metric("disagg_handoffs_total", engine="prefill-0") == 2
        assert await r.metric("disagg_handoff_tokens_total", engine="prefill-0") == 14
        assert await r.metric("disagg_handoff_failures_total", reason="decode-failed") == 1


async def test_tokens_are_counted_where_an_answer_tells_them() -> None:
    """Whole answers do, streams if the client asked for it; prefill has counted the prompt in any case."""
    async with rig() as r:
        r.d.script.append(mock.streamed((*mock.EVENTS[:2], USAGE, mock.EVENTS[2])))
        await r.ask(STREAM)
        await r.ask(STREAM)
        assert await r.metric("disagg_prompt_tokens_total", path="disaggregated") == 14
        assert await r.metric("disagg_completion_tokens_total", path="disaggregated") == 3
        r.d.script.append(mock.answers(200, b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":5}}'))
        await r.ask({"model": MODEL, "prompt": "x", "n": 2})
        assert await r.metric("disagg_prompt_tokens_total", path="local") == 4
        assert await r.metric("disagg_completion_tokens_total", path="local") == 5


@pytest.mark.parametrize(
    ("body", "reason", "status"),
    [(b"{", "bad-request", "4xx"), ({"model": "nobody", "prompt": "x"}, "unknown-model", "4xx")],
)
async def test_refusals_have_a_reason(body: object, reason: str, status: str) -> None:
    """A word out of a closed list, whatever the client sent."""
    async with rig() as r:
        await r.ask(body)
        labels = {"path": "none", "reason": reason, "outcome": "refused", "status": status}
        assert await r.metric("disagg_requests_total", **labels) == 1


async def test_failures_have_a_reason() -> None:
    """The stage and what happened there; no engine at all is a reason too."""
    async with rig(retries=0) as r:
        r.d.script.append(mock.breaks)
        await r.ask()
        labels = {"path": "disaggregated", "outcome": "failed", "status": "5xx"}
        assert await r.metric("disagg_requests_total", reason="decode-broken", **labels) == 1
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="abort"))
        await r.ask(STREAM)
        assert await r.metric("disagg_requests_total", reason="decode-broken", outcome="broken", status="2xx") == 1
        r.fleet.mark("decode-0", "inc-decode-0", State.DOWN)
        await r.ask()
        assert await r.metric("disagg_requests_total", reason="no-instance", status="5xx") == 1
        assert await r.metric("disagg_stage_ready", stage="decode") == 0
        assert await r.metric("disagg_stage_ready", stage="prefill") == 1


async def test_engines_and_breakers_are_shown_as_they_are() -> None:
    """Their states, addresses and incarnations; an engine that is removed is shown no more."""
    async with rig(decode=2, breaker_failures=1) as r:
        r.decode[0].script.append(mock.error(503))
        for _ in range(2):
            await r.ask()
        name = {"engine": "decode-0"}
        assert await r.metric("disagg_breaker_state", state="open", **name) == 1
        assert await r.metric("disagg_breaker_state", state="closed", **name) == 0
        assert await r.metric("disagg_engine_info", incarnation="inc-decode-0", url=r.d.url, **name) == 1
        assert await r.metric("disagg_engine_state", state="ready", **name) == 1
        r.skew[0] += 6
        assert await r.metric("disagg_breaker_state", state="half-open", **name) == 1
        r.fleet.remove("decode-0")
        page = (await r.get("/metrics")).body.decode()
        assert "decode-0" not in page
        assert 'disagg_legs_total{engine="decode-1"' in page


async def test_connections_are_shown() -> None:
    """Those of clients, and those to engines, kept for the next request."""
    async with rig() as r:
        await r.ask()
        assert await r.metric("disagg_upstream_connections", state="kept") == 2
        assert await r.metric("disagg_upstream_connections", state="busy") == 0
        assert await r.metric("disagg_client_connections") >= 1
