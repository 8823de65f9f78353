"""Instances that fail are left out for a while; requests, clients and the innocent end of a handover never pay."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.http.messages import Request
from disagg.http.responder import Responder
from disagg.router.fleet import State
from tests.support import mock_engine as mock
from tests.support.rig import MODEL, Rig, rig

STREAM = {"model": MODEL, "prompt": "x", "stream": True}
LOAD_FAILED = mock.error(500, "KV load failed")
LOAD_FAILED_STREAM = mock.streamed(
    (b"data: " + mock.error_json(500, "KV load failed") + b"\n\n", b"data: [DONE]\n\n")
)


def counts(r: Rig) -> list[int]:
    return [len(e.seen) for e in [*r.prefill, *r.decode]]


async def test_an_instance_that_fails_is_left_out() -> None:
    """After three failures in a row its turns go to the others, and no request is spent on it."""
    async with rig(decode=2, breaker_failures=3) as r:
        await r.decode[0].stop()
        for _ in range(12):
            assert (await r.ask()).status == 200
        assert await r.metric("disagg_legs_total", engine="decode-0", outcome="unreachable") == 3
        assert await r.metric("disagg_breaker_opened_total", engine="decode-0") == 1
        await r.settled()


async def test_it_comes_back_after_one_good_trial() -> None:
    """Half open: a single request tries it out, and when that works it has its share again."""
    async with rig(decode=2, breaker_failures=1, breaker_open_s=5) as r:
        r.decode[0].script.append(mock.error(503))
        for _ in range(6):
            assert (await r.ask()).status == 200
        assert len(r.decode[0].seen) == 1
        r.skew[0] += 5.5
        for _ in range(6):
            assert (await r.ask()).status == 200
        assert len(r.decode[0].seen) == 4
        await r.settled()


async def test_a_failed_trial_leaves_it_out_for_twice_as_long() -> None:
    """5 s, then 10 s: each trial costs one request, which is served by another instance."""
    async with rig(decode=2, breaker_failures=1, breaker_open_s=5) as r:
        r.decode[0].default = mock.error(503)
        for skew, trials in ((0.0, 1), (5.5, 2), (5.5, 2), (5.5, 3)):
            r.skew[0] += skew
            for _ in range(4):
                assert (await r.ask()).status == 200
            assert len(r.decode[0].seen) == trials


@pytest.mark.parametrize("status", [400, 404, 422, 429, 501])
async def test_refusals_never_count(status: int) -> None:
    """What the engine says about a request says nothing about the engine, on either stage."""
    async with rig(breaker_failures=1) as r:
        for engine in (r.p, r.d):
            engine.script.extend([mock.error(status)] * 3)
        for _ in range(6):
            assert (await r.ask()).status == status
        assert await r.metric("disagg_breaker_opened_total") == 0


async def test_a_streams_own_refusal_never_counts() -> None:
    """A 4xx that comes as the first event of a stream is a refusal as well."""
    async with rig(breaker_failures=1) as r:
        r.d.script.append(mock.streamed((b"data: " + mock.error_json(400) + b"\n\n", b"data: [DONE]\n\n")))
        await r.ask(STREAM)
        assert await r.metric("disagg_breaker_opened_total") == 0
        assert await r.metric("disagg_legs_total", stage="decode", outcome="refused") == 1


@pytest.mark.parametrize("stage", ["prefill", "decode"])
async def test_clients_that_leave_never_count(stage: str) -> None:
    """Their cancelled legs are nobody's failure."""
    async with rig(breaker_failures=1) as r:
        engine = r.p if stage == "prefill" else r.d
        engine.default = mock.hangs
        for _ in range(3):
            engine.arrived.clear()
            call = await r.call()
            await engine.arrived.wait()
            await call.close()
            await r.settled()
        assert await r.metric("disagg_legs_total", stage=stage, outcome="cancelled") == 3
        assert await r.metric("disagg_breaker_opened_total") == 0


async def test_when_all_are_open_one_is_tried_all_the_same() -> None:
    """An open breaker alone refuses nobody; the metric shows that it was overridden."""
    async with rig(breaker_failures=1, retries=0) as r:
        r.p.script.append(mock.error(503))
        r.d.script.append(mock.breaks)
        assert [(await r.ask()).status for _ in range(4)] == [503, 502, 200, 200]
        assert await r.metric("disagg_breaker_opened_total") == 2
        assert await r.metric("disagg_breaker_overridden_total", stage="prefill") >= 1
        assert (await r.get("/health")).status == 200
        await r.settled()


async def test_a_new_incarnation_starts_with_a_clean_record() -> None:
    """What the old process did is not held against the one that replaces it."""
    async with rig(decode=2, breaker_failures=1) as r:
        r.decode[0].script.append(mock.error(503))
        for _ in range(2):
            await r.ask()
        r.fleet.update("decode-0", "second")
        r.fleet.mark("decode-0", "second", State.READY)
        for _ in range(4):
            assert (await r.ask()).status == 200
        assert len(r.decode[0].seen) >= 3


@pytest.mark.parametrize("stream", [False, True])
async def test_the_data_path_of_a_bad_decode_is_held_against_decode(stream: bool) -> None:
    """Every prefill works with the other decode instance: the one that fails with all of them is guilty."""
    async with rig(prefill=2, decode=2, breaker_failures=3) as r:
        r.decode[0].default = LOAD_FAILED_STREAM if stream else LOAD_FAILED
        for _ in range(20):
            assert (await r.ask({**STREAM, "stream": stream})).status == 200
        assert await r.metric("disagg_breaker_opened_total") == 1
        assert await r.metric("disagg_breaker_opened_total", engine="decode-0") == 1
        assert len(r.decode[0].seen) == 3
        await r.settled()


async def test_the_data_path_of_a_bad_prefill_is_held_against_prefill() -> None:
    """It answers 200 and hands out KV that nobody can fetch: its good answers do not save it."""

    async def picky(engine: mock.MockEngine, request: Request, respond: Responder) -> None:
        bad = b"engine-p0" in request.body
        await (LOAD_FAILED if bad else mock.decoded)(engine, request, respond)

    async with rig(prefill=2, decode=2, breaker_failures=3) as r:
        for d in r.decode:
            d.default = picky
        for _ in range(30):
            assert (await r.ask()).status == 200
        states = {m.name: m.held for m in r.fleet.members()}
        assert states == {"prefill-0": True, "prefill-1": False, "decode-0": False, "decode-1": False}
        assert len(r.prefill[0].seen) <= 6
        assert sum(len(d.seen) for d in r.decode) == 30 + len(r.prefill[0].seen)
        await r.settled()


async def test_a_connection_that_breaks_is_the_fault_of_its_own_end() -> None:
    """Decode is killed with many requests on it: no prefill instance suffers for that."""
    async with rig(prefill=2, decode=1, breaker_failures=1, retries=0) as r:
        r.d.script.append(mock.breaks)
        assert (await r.ask()).status == 502
        assert await r.metric("disagg_breaker_opened_total", stage="prefill") == 0
        assert await r.metric("disagg_breaker_opened_total", stage="decode") == 1


async def test_a_prefill_that_hands_nothing_over_is_left_out() -> None:
    """Status 200 without a handle is a failure of prefill, again and again."""
    async with rig(prefill=2, breaker_failures=2) as r:
        r.prefill[0].default = mock.answers(200, b"{}")
        for _ in range(10):
            assert (await r.ask()).status == 200
        assert len(r.prefill[0].seen) == 2


async def test_the_retry_budget_ends_a_storm_of_retries() -> None:
    """Ten retries are free; then failures reach the client after one try, and the metric says why."""
    async with rig(prefill=4, decode=4, breaker_failures=1000, retry_budget=0.0) as r:
        for d in r.decode:
            d.default = mock.error(503)
        statuses = [(await r.ask()).status for _ in range(10)]
        assert set(statuses) == {503}
        assert await r.metric("disagg_retries_total") == 10
        assert await r.metric("disagg_retries_refused_total", stage="decode") >= 5
        assert sum(len(d.seen) for d in r.decode) == 20
        r.skew[0] += 10
        assert (await r.ask()).status == 503
        assert await r.metric("disagg_retries_total") == 12
        await r.settled()


@pytest.mark.parametrize(("limit", "opened"), [("request_timeout_s", 0), ("idle_timeout_s", 1)])
async def test_a_stream_that_takes_all_of_its_time_is_nobodys_fault(limit: str, opened: int) -> None:
    """The request was too long for its limit; an engine that falls silent within a stream has failed."""
    spec: dict[str, Any] = {limit: 0.2}
    async with rig(breaker_failures=1, **spec) as r:
        r.d.script.append(mock.streamed(mock.EVENTS[:1], end="hang"))
        await r.ask(STREAM)
        assert await r.metric("disagg_legs_total", stage="decode", outcome="timeout") == 1
        assert await r.metric("disagg_breaker_opened_total") == opened
        await r.settled()
