"""KV that prefill holds and nobody will fetch is let go at once where that is safe; else its lease ends it."""

from __future__ import annotations

import asyncio

import pytest

from disagg.http.messages import Request
from disagg.http.responder import Responder
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Rig, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}


async def told(r: Rig, count: int = 1) -> list[tuple[str, object]]:
    """What decode engines were told, once it is so much."""
    for _ in range(500):
        seen = [call for d in r.decode for call in d.told]
        if len(seen) >= count:
            return seen
        await asyncio.sleep(0.01)
    raise AssertionError(f"decode was told {seen}, not {count} things")


async def hold_decode(r: Rig, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Keep decode legs from leaving; returns what is set when one would."""
    request = r.router.client.request
    reached = asyncio.Event()

    async def slow_to_connect(origin, outgoing, *rest):  # type: ignore[no-untyped-def]
        if origin.authority in r.d.url and outgoing.target.startswith("/v1/"):
            reached.set()
            await asyncio.sleep(3600)
        return await request(origin, outgoing, *rest)

    monkeypatch.setattr(r.router.client, "request", slow_to_connect)
    return reached


async def test_a_client_that_leaves_between_the_legs_leaves_no_kv_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode never ran, so nobody reads the blocks: they are let go long before their lease ends."""
    async with rig() as r:
        reached = await hold_decode(r, monkeypatch)
        call = await r.call()
        await asyncio.wait_for(reached.wait(), 5)
        await call.close()
        assert await told(r) == [(mock.RELEASE, {"release": {"engine": "engine-p0", "blocks": [1, 2], "odd": 1.50}})]
        await r.settled()
        assert r.d.seen == []
        assert await r.metric("disagg_kv_released_total", reason="client-left-or-failed") == 1
        assert await r.metric("disagg_kv_left_to_lease_total") == 0
        assert all(m.idle(0) for m in r.fleet.members())


@pytest.mark.parametrize("status", [400, 422, 500, 503])
async def test_kv_that_decode_refuses_is_let_go(status: int) -> None:
    """The engine's answer ends its request, so it reads no more."""
    async with rig(retries=0) as r:
        r.d.script.append(mock.error(status))
        assert (await r.ask(STREAM)).status == status
        assert len(await told(r)) == 1
        await r.settled()
        assert await r.metric("disagg_kv_released_total", reason="decode-failed") == 1


async def test_kv_that_decode_may_be_reading_is_left_to_its_lease() -> None:
    """The connection broke, which says nothing about the engine: blocks that are freed while it reads them would put
    another prompt's KV into its cache."""
    async with rig(retries=0) as r:
        r.d.script.append(mock.breaks)
        assert (await r.ask(STREAM)).status == 502
        await r.settled()
        assert r.d.told == []
        member = r.fleet.get("prefill-0")
        assert member is not None
        assert not member.idle(asyncio.get_running_loop().time())


async def test_kv_that_went_with_its_process_needs_no_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new incarnation on the same port would be told of blocks that it has never had."""
    async with rig() as r:
        reached = await hold_decode(r, monkeypatch)
        call = await r.call()
        await asyncio.wait_for(reached.wait(), 5)
        r.fleet.update("prefill-0", "another")
        await call.close()
        await r.settled()
        assert r.d.told == []
        assert await r.metric("disagg_kv_left_to_lease_total") == 0


async def test_a_release_that_fails_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then only the lease frees the blocks, and the number says so."""
    async with rig() as r:
        reached = await hold_decode(r, monkeypatch)
        r.d.told_status = 500
        call = await r.call()
        await asyncio.wait_for(reached.wait(), 5)
        await call.close()
        await told(r)
        await r.settled()
        assert await r.metric("disagg_kv_left_to_lease_total", reason="release-failed") == 1


async def test_kv_of_a_prefill_that_ends_just_as_its_client_leaves_is_let_go() -> None:
    """The engine holds the blocks although nobody waits for its answer: that is awaited for a moment."""
    async with rig() as r:
        gate = asyncio.Event()

        async def when_told(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
            await gate.wait()
            await mock.prefilled(engine, request, respond)

        r.p.script.append(when_told)
        call = await r.call()
        await asyncio.wait_for(r.p.arrived.wait(), 5)
        await call.close()
        async with asyncio.timeout(5):
            while r.router.in_flight:
                await asyncio.sleep(0)
        gate.set()
        assert (await told(r))[0][0] == mock.RELEASE
        async with asyncio.timeout(5):
            while await r.metric("disagg_kv_released_total", reason="client-left-or-failed") != 1:
                await asyncio.sleep(0.01)
        assert all(m.idle(0) for m in r.fleet.members())
