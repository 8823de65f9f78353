"""Many requests, large ones, and a fleet that changes under them: nobody is lost, and refusals are counted."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from itertools import combinations

import pytest

from disagg.engines.emulated.settings import SimplePace
from tests.support import mock_engine as mock
from tests.support.client import Ask, Ending
from tests.support.cluster import body_of, cluster, streamed
from tests.support.rig import MODEL, rig

MIB = 1024**2


async def test_a_rolling_restart_under_load_fails_nobody() -> None:
    """Each engine in turn stops taking requests, finishes its own, and comes back as a new incarnation."""
    async with cluster(2, 2, pace=SimplePace(50_000, 0.001)) as c:
        over = False

        async def client() -> None:
            while not over:
                await c.ask(streamed(max_tokens=20))

        clients = [asyncio.create_task(client()) for _ in range(8)]
        for node in list(c.nodes.values()):
            before = len(c.results)
            await node.drain()
            await node.start()
            while len(c.results) < before + 16:
                await asyncio.sleep(0.01)
        over = True
        await asyncio.gather(*clients)
        assert {r.ending for r in c.results} == {Ending.ANSWERED}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_overload_is_answered_or_refused_and_the_sum_is_right(stream: bool) -> None:
    """What is over the limits is refused at once with the time to wait; what was taken is served like any other."""
    async with cluster(pace=SimplePace(20_000, 0.002), max_in_flight=4, max_queue=6) as c:
        results = await asyncio.gather(*(c.ask(stream=stream) for _ in range(60)))
        endings = Counter(r.ending for r in results)
        assert endings[Ending.ANSWERED] + endings[Ending.REFUSED] == 60
        assert endings[Ending.ANSWERED] >= 10
        assert endings[Ending.REFUSED] > 0
        refused = [r for r in results if r.ending is Ending.REFUSED]
        assert {r.status for r in refused} == {429}
        assert all(int(r.headers["retry-after"]) >= 1 for r in refused)
        assert (await c.ask()).ending is Ending.ANSWERED


@pytest.mark.slow
async def test_two_thousand_open_streams_leave_the_endpoint_responsive() -> None:
    """Pages answer while they are open, each stream is complete, and every connection is closed after them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 10_000:
        pytest.skip(f"needs 10,000 file descriptors, the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gate = asyncio.Event()
    try:
        async with rig(decode=2) as r:
            for engine in r.decode:
                engine.default = mock.gated(gate, mock.EVENTS[:1], mock.EVENTS[1:])
            calls = []
            for _ in range(20):
                calls += [await r.call({"model": MODEL, "prompt": "x", "stream": True}) for _ in range(100)]
                await asyncio.gather(*(call.head() for call in calls[-100:]))
            assert r.router.in_flight == 2_000
            assert (await r.get("/health")).status == 200
            assert await r.metric("disagg_requests_in_flight") == 2_000
            gate.set()
            for call in calls:
                body = b""
                while data := await call.chunk():
                    body += data
                assert body == b"".join(mock.EVENTS)
                await call.close()
            await r.settled()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("size", [1, 8, 32])
async def test_large_bodies_reach_both_stages_whole(size: int) -> None:
    """One limit for all tiers: what the endpoint takes, the engines get, byte for byte."""
    text = "x" * (size * MIB)
    async with rig() as r:
        assert (await r.ask({"model": MODEL, "prompt": text})).status == 200
        assert [body["prompt"] == text for body in (r.p.bodies[0], r.d.bodies[0])] == [True, True]
        await r.settled()


async def test_a_body_over_the_limit_is_refused_before_any_engine_sees_it() -> None:
    """With 413, however it is framed."""
    async with rig(max_body_bytes=MIB) as r:
        assert (await r.ask({"model": MODEL, "prompt": "x" * MIB})).status == 413
        assert r.p.seen == r.d.seen == []
        await r.settled()


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_engines_refusal_keeps_its_status_type_and_body(leg: str, stream: bool) -> None:
    """Also one that is not JSON: nothing becomes a 200, and credentials reach the engines as they were sent."""
    async with rig() as r:
        (r.p if leg == "prefill" else r.d).default = mock.answers(418, b"<p>teapot</p>", b"text/html")
        reply = await r.ask({"model": MODEL, "prompt": "x", "stream": stream}, authorization="Bearer mine")
        assert (reply.status, reply.headers["content-type"], reply.body) == (418, "text/html", b"<p>teapot</p>")
        for engine in (r.p, r.d):
            assert all(request.header(b"authorization") == b"Bearer mine" for request in engine.seen)
        await r.settled()


@pytest.mark.parametrize("down", [c for n in range(3) for c in combinations(("prefill-0", "decode-0"), n)], ids=str)
async def test_every_subset_of_stages_is_told_and_recovered_from(down: tuple[str, ...]) -> None:
    """Ready means that each stage has a member; without prefill requests are served, visibly, by decode."""
    async with cluster() as c:
        for name in down:
            await c.nodes[name].crash()
        assert c.fleet.missing_stages() == tuple(n.stage for n in c.nodes.values() if n.name in down)
        result = await c.ask()
        if "decode-0" in down:
            assert (result.status, result.ending) == (503, Ending.FAILED)
        else:
            assert result.ending is Ending.ANSWERED
            assert result.headers["x-disagg-path"].startswith("local" if down else "disaggregated")
        for name in down:
            await c.nodes[name].start()
        assert (await c.ask()).headers["x-disagg-path"] == "disaggregated"


async def test_the_neighbours_of_a_slow_engine_keep_serving() -> None:
    """One prefill engine that takes long does not hold requests that are on others."""
    async with cluster(2, 2, checked=False) as c:
        c.p.fault(delay_s=30.0)
        asks = [asyncio.create_task(c.ask(Ask(body_of(), leave_after_s=3.0))) for _ in range(8)]
        done, _ = await asyncio.wait(asks, timeout=2.0)
        assert [t.result().ending for t in done] == [Ending.ANSWERED] * len(done)
        assert len(done) >= 4
        await asyncio.gather(*asks)
