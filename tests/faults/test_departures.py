"""The client leaves, in each phase of its request: the engines see it at once, and every book closes."""

from __future__ import annotations

import asyncio

import pytest

from disagg.http.messages import SSE_TYPE, Request
from disagg.http.responder import Responder
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Call, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 5)


async def test_before_the_request_is_complete() -> None:
    """Half a body starts nothing."""
    async with rig() as r:
        call = await Call.open(r.router.port)
        call.send(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 99\r\n\r\n{")
        await asyncio.sleep(0.02)
        await call.close()
        await r.settled()
        assert r.p.seen == []


@pytest.mark.parametrize("stream", [False, True])
async def test_during_prefill(stream: bool) -> None:
    """Prefill sees the disconnect, decode is never asked."""
    async with rig() as r:
        r.p.script.append(mock.hangs)
        call = await r.call({"model": MODEL, "prompt": "x", "stream": stream})
        await soon(r.p.arrived)
        await call.close()
        await soon(r.p.left)
        await r.settled()
        assert r.d.seen == []
        assert await r.metric("disagg_requests_total", outcome="client_left") == 1
        assert await r.metric("disagg_legs_total", stage="prefill", outcome="cancelled") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_before_the_first_token(stream: bool) -> None:
    """Decode sees the disconnect when its time for a first output is over, and no second attempt is made."""
    async with rig(decode=2) as r:
        r.d.script.append(mock.hangs)
        call = await r.call({"model": MODEL, "prompt": "x", "stream": stream})
        await soon(r.d.arrived)
        await call.close()
        await soon(r.d.left)
        await r.settled()
        assert r.decode[1].seen == []
        assert await r.metric("disagg_kv_left_to_lease_total") == 0


async def test_decode_is_not_ended_while_kv_may_be_landing() -> None:
    """Its connection is closed with its first output: an engine that is aborted earlier may crash or leak blocks."""
    async with rig(linger_s=3600) as r:
        gate = asyncio.Event()
        r.d.script.append(mock.gated(gate, (), mock.EVENTS))
        call = await r.call(STREAM)
        await soon(r.d.arrived)
        await call.close()
        while await r.metric("disagg_requests_total", outcome="client_left") < 1:
            await asyncio.sleep(0.01)
        assert r.d.departures == 0
        assert r.d.open_requests == 1
        gate.set()
        await r.settled()


async def test_in_mid_stream() -> None:
    """Decode sees the disconnect while it is silent."""
    async with rig() as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="hang"))
        call = await r.call(STREAM)
        await call.head()
        await call.chunk()
        await call.close()
        await soon(r.d.left)
        await r.settled()
        assert await r.metric("disagg_requests_total", outcome="client_left") == 1


async def test_a_client_that_stops_reading_stops_decode() -> None:
    """Backpressure passes through: the engine cannot fill the router's memory, and nothing is lost."""
    sent = 0
    event = b"data: " + b"x" * 65_536 + b"\n\n"

    async def floods(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        nonlocal sent
        respond.start(200, (SSE_TYPE,))
        for _ in range(800):
            respond.write(event)
            sent += 1
            await respond.drain()
        respond.finish(b"data: [DONE]\n\n")

    async with rig(idle_timeout_s=0.2) as r:
        r.d.script.append(floods)
        call = await r.call(STREAM)
        await asyncio.sleep(0.5)
        assert sent < 700
        reply = await call.reply()
        assert reply.body == event * 800 + b"data: [DONE]\n\n"
        await call.close()
        await r.settled()


async def test_many_clients_that_give_up_leave_nothing_behind() -> None:
    """An abort storm: afterwards the next request is served as if nothing had been."""
    async with rig(prefill=2, decode=2) as r:
        for engine in r.decode:
            engine.default = mock.streamed(mock.EVENTS[:1], end="hang")
        calls = [await r.call(STREAM) for _ in range(40)]
        await asyncio.sleep(0.1)
        for call in calls:
            await call.close()
        await r.settled()
        for engine in r.decode:
            engine.default = mock.decoded
        assert (await r.ask(STREAM)).body == b"".join(mock.EVENTS)
