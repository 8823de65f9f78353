"""More requests than may be served at once: who waits, in which order, for how long, and what is told."""

import asyncio

from tests.support.mock_engine import MockEngine, gated, hangs
from tests.support.rig import Call, Rig, rig

EVENTS = (b'data: {"n":1}\n\n', b"data: [DONE]\n\n")
STREAM = {"model": "m", "prompt": "x", "stream": True}


async def _occupy(r: Rig, gate: asyncio.Event, **headers: str) -> Call:
    """A stream that has begun and goes on until the gate opens."""
    r.d.script.append(gated(gate, EVENTS[:1], EVENTS[1:]))
    call = await r.call(STREAM, **headers)
    assert (await call.head()).status == 200
    return call


async def _queued(r: Rig, count: int) -> None:
    for _ in range(500):
        if r.router.admission.waiting == count:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{r.router.admission.waiting} wait, not {count}")


async def _quiet(r: Rig) -> None:
    await r.settled()
    assert r.router.admission.running == 0
    assert r.router.admission.waiting == 0
    assert await r.metric("disagg_requests_queued") == 0


async def test_a_request_over_the_limit_waits_and_is_then_served() -> None:
    """Waiting is no failure: the answer is that of an idle router."""
    async with rig(max_in_flight=1) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        waiting = asyncio.create_task(r.ask())
        await _queued(r, 1)
        assert await r.metric("disagg_requests_queued") == 1
        assert len(r.p.seen) == 1, "no engine hears of a request that waits"
        gate.set()
        assert (await waiting).status == 200
        assert await first.chunk()
        await first.close()
        assert await r.metric("disagg_queue_duration_seconds_count") == 1
        await _quiet(r)


async def test_urgent_requests_overtake_and_the_body_wins_over_the_header() -> None:
    """The order of service is priority first (lower is more urgent, as in vLLM), then arrival."""
    async with rig(max_in_flight=1) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        plan = [
            ("late", {"priority": 3}, {}),
            ("middle", {}, {}),
            ("header", {}, {"x_priority": "-1"}),
            ("body", {"priority": -9}, {"x_priority": "7"}),
            ("middle2", {}, {"x_priority": "soon"}),
        ]
        tasks = []
        for n, (name, extra, headers) in enumerate(plan, 1):
            tasks.append(asyncio.create_task(r.ask({"model": "m", "prompt": name, **extra}, **headers)))
            await _queued(r, n)
        gate.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 5
        assert [b["prompt"] for b in r.p.bodies[1:]] == ["body", "header", "middle", "middle2", "late"]
        await first.close()
        await _quiet(r)


async def test_a_full_queue_is_429_at_once_and_says_when_to_come_back() -> None:
    """Nothing is unbounded: who finds no place is told so, and no engine hears of it."""
    async with rig(max_in_flight=1, max_queue=1) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        waiting = asyncio.create_task(r.ask())
        await _queued(r, 1)
        refused = await r.ask()
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "RateLimitError"
        gate.set()
        assert (await waiting).status == 200
        assert len(r.p.seen) == 2
        await first.close()
        await _quiet(r)


async def test_an_urgent_request_takes_the_place_of_the_least_urgent_one() -> None:
    """In a full queue the one that is least urgent gets the 429, although it came first."""
    async with rig(max_in_flight=1, max_queue=1) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        patient = asyncio.create_task(r.ask({"model": "m", "prompt": "patient", "priority": 9}))
        await _queued(r, 1)
        urgent = asyncio.create_task(r.ask({"model": "m", "prompt": "urgent", "priority": 0}))
        assert (await patient).status == 429
        gate.set()
        assert (await urgent).status == 200
        await first.close()
        await _quiet(r)


async def test_a_request_that_waited_too_long_is_503_with_retry_after() -> None:
    """The deadline of the queue ends the wait, and frees the place in it."""
    async with rig(max_in_flight=1, queue_timeout_s=0.05) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        late = await r.ask()
        assert late.status == 503
        assert int(late.headers["retry-after"]) >= 1
        assert r.router.admission.waiting == 0
        gate.set()
        await first.chunk()
        await first.close()
        assert await r.metric("disagg_requests_total", outcome="failed") == 1
        await _quiet(r)


async def test_a_client_that_leaves_the_queue_frees_its_place() -> None:
    """Its place goes to the next one, and its permit is never taken."""
    async with rig(max_in_flight=1, max_queue=1) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        leaver = await r.call()
        await _queued(r, 1)
        await leaver.close()
        await _queued(r, 0)
        stayer = asyncio.create_task(r.ask())
        await _queued(r, 1)
        gate.set()
        assert (await stayer).status == 200
        assert await r.metric("disagg_requests_total", outcome="client_left") == 1
        await first.close()
        await _quiet(r)


async def test_a_client_that_leaves_in_mid_stream_hands_its_permit_on() -> None:
    """Permits are held until a request's end, whatever end that is."""
    async with rig(max_in_flight=1) as r:
        first = await _occupy(r, asyncio.Event())
        waiting = asyncio.create_task(r.ask())
        await _queued(r, 1)
        await first.close()
        assert (await waiting).status == 200
        await _quiet(r)


async def test_permits_survive_a_storm_of_departures() -> None:
    """Clients that leave while they wait or are served, many at once: every permit comes back."""
    async with rig(max_in_flight=3, max_queue=100) as r:

        async def slow(engine: MockEngine, request: object, respond: object) -> None:
            await hangs(engine, request, respond)  # type: ignore[arg-type]

        r.p.script.extend([slow] * 40)
        calls = [await r.call() for _ in range(40)]
        await _queued(r, 37)
        await asyncio.gather(*(call.close() for call in calls))
        for _ in range(500):
            if r.router.in_flight == 0:
                break
            await asyncio.sleep(0.01)
        r.p.script.clear()
        assert (await r.ask()).status == 200
        await _quiet(r)


async def test_pages_are_answered_while_the_queue_is_full() -> None:
    """What watches a deployment does not wait behind its load."""
    async with rig(max_in_flight=1, max_queue=0) as r:
        gate = asyncio.Event()
        first = await _occupy(r, gate)
        assert (await r.get("/health")).status == 200
        assert (await r.get("/v1/models")).status == 200
        gate.set()
        await first.chunk()
        await first.close()
        await _quiet(r)
