"""Dialects whose legs leave together: each leg's end decides what becomes of the other; the client sees one end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from disagg.http.messages import SSE_TYPE, Request
from disagg.http.responder import Responder
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, rig

PLAIN = {"model": MODEL, "prompt": "x"}
STREAM = {**PLAIN, "stream": True}
PAIRED: dict[str, Any] = {"dialect": mock.PairedDialect()}


async def soon(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), 5)


def tie(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(request.body)["tie"]
    return found


@pytest.mark.parametrize("body", [PLAIN, STREAM])
async def test_both_legs_leave_at_once_with_one_key(body: dict[str, Any]) -> None:
    """Prefill would wait for decode, and decode for prefill, if one of them had to end first."""
    together = asyncio.Barrier(2)

    async def meets(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        await together.wait()
        await engine.default(engine, request, respond)

    async with rig(**PAIRED) as r:
        r.p.script.append(meets)
        r.d.script.append(meets)
        reply = await asyncio.wait_for(r.ask(body), 5)
        assert reply.body == (b"".join(mock.EVENTS) if "stream" in body else mock.WHOLE)
        assert reply.headers["x-disagg-path"] == "disaggregated"
        assert reply.headers["x-disagg-prefill"] == "prefill-0"
        one, other = tie(r.p.seen[0]), tie(r.d.seen[0])
        assert one["key"] == other["key"]
        assert r.p.seen[0].header(b"x-request-id") == r.d.seen[0].header(b"x-request-id") == one["key"].encode()
        await r.settled()
        assert all(m.idle(0) for m in r.fleet.members())


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_a_refusal_of_prefill_is_the_answer_and_ends_decode(status: int) -> None:
    """Decode would wait for KV that never comes until its own time-out, and the client with it."""
    async with rig(**PAIRED, linger_s=3600) as r:

        async def refuses(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            await soon(r.d.arrived)
            await mock.error(status)(engine, request, respond)

        r.p.script.append(refuses)
        r.d.script.append(mock.hangs)
        reply = await asyncio.wait_for(r.ask(STREAM), 5)
        assert (reply.status, reply.body) == (status, mock.error_json(status))
        await soon(r.d.left)
        await r.settled()
        assert [path for path, _ in r.d.told] == [mock.ABORT]


@pytest.mark.parametrize("failure", [mock.error(503), mock.breaks, mock.error(500)])
@pytest.mark.parametrize("first", ["prefill", "decode"])
async def test_a_failed_leg_is_a_new_pair_with_a_new_key(failure: mock.Behaviour, first: str) -> None:
    """The other leg is ended at once, and its half of the transfer is not met again."""
    async with rig(prefill=2, decode=2, **PAIRED, linger_s=3600) as r:
        failing, waiting = (r.prefill, r.decode) if first == "prefill" else (r.decode, r.prefill)

        async def fails(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            await soon(waiting[0].arrived)
            await failure(engine, request, respond)

        failing[0].script.append(fails)
        waiting[0].script.append(mock.hangs)
        reply = await asyncio.wait_for(r.ask(STREAM), 5)
        assert (reply.status, reply.body) == (200, b"".join(mock.EVENTS))
        await soon(waiting[0].left)
        keys = [{tie(e[0].seen[0])["key"], tie(e[1].seen[0])["key"]} for e in (r.prefill, r.decode)]
        assert keys[0] == keys[1]
        assert len(keys[0]) == 2
        await r.settled()
        assert await r.metric("disagg_retries_total") == 1


async def test_a_decode_that_cannot_be_reached_ends_prefill() -> None:
    """Prefill would wait for its partner; the request goes to another pair at once."""
    async with rig(prefill=2, decode=2, **PAIRED) as r:
        r.p.script.append(mock.hangs)
        await r.d.stop()
        reply = await asyncio.wait_for(r.ask(PLAIN), 5)
        assert reply.status == 200
        assert reply.headers["x-disagg-decode"] == "decode-1"
        await r.settled()


async def test_without_another_pair_the_failure_is_the_answer() -> None:
    """502, not a hang."""
    async with rig(**PAIRED) as r:
        r.p.script.append(mock.hangs)
        await r.d.stop()
        assert (await asyncio.wait_for(r.ask(PLAIN), 5)).status == 502
        await r.settled()


@pytest.mark.parametrize("failure", [mock.error(500), mock.error(400), mock.breaks, mock.answers(200, b"{}")])
async def test_a_prefill_that_fails_behind_a_stream_ends_it_with_an_error(failure: mock.Behaviour) -> None:
    """Its failure is not only logged: the client hears of it once, and the stream has an end."""
    async with rig(**PAIRED) as r:
        seen = asyncio.Event()

        async def fails(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            await soon(seen)
            await failure(engine, request, respond)

        r.p.script.append(fails)
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="hang"))
        call = await r.call(STREAM)
        assert (await call.head()).status == 200
        assert await call.chunk() == mock.EVENTS[0]
        seen.set()
        rest = await asyncio.wait_for(call.chunk(), 5)
        assert rest.startswith(b'data: {"error"')
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await call.chunk() == b""
        await soon(r.d.left)
        await call.close()
        await r.settled()
        assert await r.metric("disagg_requests_total", outcome="broken") == 1
        assert await r.metric("disagg_legs_total", stage="decode", outcome="cancelled") == 1


async def test_a_slow_prefill_answer_does_not_hold_the_client() -> None:
    """Decode has all it needs when it begins to answer; prefill's leg ends in the background."""
    async with rig(**PAIRED) as r:
        gate = asyncio.Event()

        async def late(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            await gate.wait()
            await mock.prefilled(engine, request, respond)

        r.p.script.append(late)
        assert (await asyncio.wait_for(r.ask(PLAIN), 5)).body == mock.WHOLE
        assert r.p.open_requests == 1
        gate.set()
        await r.settled()
        assert await r.metric("disagg_legs_total", stage="prefill", outcome="ok") == 1
        assert all(m.idle(0) for m in r.fleet.members())


async def test_a_client_that_leaves_ends_prefill_at_once_and_decode_after_its_first_output() -> None:
    """KV may be landing on decode just then, which engines survive badly."""
    async with rig(**PAIRED, linger_s=3600) as r:
        gate = asyncio.Event()

        async def begins(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            respond.start(200, (SSE_TYPE,))
            await gate.wait()
            respond.write(mock.EVENTS[0])
            await asyncio.sleep(3600)

        r.p.script.append(mock.hangs)
        r.d.script.append(begins)
        call = await r.call(STREAM)
        await soon(r.p.arrived)
        await soon(r.d.arrived)
        await call.close()
        await soon(r.p.left)
        assert r.d.departures == 0
        gate.set()
        await soon(r.d.left)
        await r.settled()
        assert await r.metric("disagg_requests_total", outcome="client_left") == 1
        assert [path for path, _ in r.p.told] == [mock.ABORT]


async def test_kv_of_a_pair_whose_decode_was_refused_is_let_go() -> None:
    """Prefill has finished, decode has said no: nobody will fetch it."""
    async with rig(**PAIRED, retries=0) as r:

        async def refuses(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            while await r.metric("disagg_legs_total", stage="prefill", outcome="ok") < 1:
                await asyncio.sleep(0.01)
            await mock.error(400)(engine, request, respond)

        r.d.script.append(refuses)
        assert (await asyncio.wait_for(r.ask(PLAIN), 5)).status == 400
        await r.settled()
        assert await r.metric("disagg_kv_released_total") == 1
        assert [path for path, _ in r.d.told] == [mock.RELEASE]


async def test_a_pair_out_of_time_ends_both_legs() -> None:
    """No request outlives its deadline on either engine."""
    async with rig(**PAIRED, request_timeout_s=0.1) as r:
        r.p.script.append(mock.hangs)
        r.d.script.append(mock.hangs)
        assert (await asyncio.wait_for(r.ask(STREAM), 5)).status == 504
        await soon(r.p.left)
        await soon(r.d.left)
        await r.settled()
