"""No request outlives its limits, and each limit says which one it was."""

from __future__ import annotations

import asyncio

import pytest

from disagg.http.messages import Request
from disagg.http.responder import Responder
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prefill_that_never_answers(stream: bool) -> None:
    """504 with the instance's name; prefill sees the disconnect; decode is never asked; nothing is tried again."""
    async with rig(prefill=2, prefill_timeout_s=0.05) as r:
        r.prefill[0].script.append(mock.hangs)
        reply = await r.ask({"model": MODEL, "prompt": "x", "stream": stream})
        assert (reply.status, reply.json()["error"]["type"]) == (504, "GatewayTimeoutError")
        assert "prefill-0" in reply.json()["error"]["message"]
        await r.settled()
        assert r.p.departures == 1
        assert r.d.seen == []


async def test_a_decode_without_a_first_token() -> None:
    """A frozen prefill holds decode without limit: the stream's own deadline ends it."""
    async with rig(first_token_timeout_s=0.05) as r:
        r.d.script.append(mock.hangs)
        reply = await r.ask(STREAM)
        assert reply.status == 504
        await r.settled()
        assert r.d.departures == 1


async def test_headers_are_not_the_first_token() -> None:
    """An engine sends its status line before it has computed anything."""
    async with rig(first_token_timeout_s=0.05) as r:
        r.d.script.append(mock.streamed((), end="hang"))
        assert (await r.ask(STREAM)).status == 504
        await r.settled()


async def test_a_long_answer_that_is_not_streamed_is_not_cut_by_the_first_token_limit() -> None:
    """Its first byte comes with its last: only the limit of the whole request applies."""

    async def slow(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        await asyncio.sleep(0.2)
        await mock.decoded(engine, request, respond)

    async with rig(first_token_timeout_s=0.05) as r:
        r.d.script.append(slow)
        assert (await r.ask()).body == mock.WHOLE


@pytest.mark.parametrize("where", ["prefill", "decode"])
async def test_the_whole_request_has_a_limit(where: str) -> None:
    """Whichever leg it is in."""
    async with rig(request_timeout_s=0.1) as r:
        (r.p if where == "prefill" else r.d).default = mock.hangs
        assert (await r.ask()).status == 504
        await r.settled()


async def test_a_stream_that_goes_on_for_ever_is_ended() -> None:
    """Steady bytes satisfy the idle limit but not the limit of the request."""
    async with rig(request_timeout_s=0.2, idle_timeout_s=5) as r:
        r.d.script.append(mock.streamed([mock.EVENTS[0]] * 1000, pause_s=0.01))
        reply = await r.ask(STREAM)
        assert reply.body.count(b'{"error"') == 1
        assert b'"code":504' in reply.body
        assert reply.body.endswith(b"data: [DONE]\n\n")
        await r.settled()


async def test_tries_do_not_add_up_beyond_the_limit() -> None:
    """Retries share the time of the request."""

    async def late_503(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        await asyncio.sleep(0.1)
        await mock.error(503)(engine, request, respond)

    async with rig(prefill=2, request_timeout_s=0.15, retries=10) as r:
        for p in r.prefill:
            p.default = late_503
        assert (await r.ask()).status in {503, 504}
        assert 1 <= sum(len(p.seen) for p in r.prefill) <= 2
        await r.settled()
