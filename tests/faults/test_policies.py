"""Policies as clients see them: which instance served, and why a request was not handed over."""

from __future__ import annotations

import asyncio

from disagg.engines.base import ReadinessProbe
from tests.support.mock_engine import MockEngine, answers
from tests.support.rig import rig

LONG = " ".join(f"word{i}" for i in range(300))
PROBE = ReadinessProbe("/health", "/load", None, "running", "waiting")


def prompt(text: str) -> dict[str, object]:
    return {"model": "m", "prompt": text}


async def test_a_repeated_prompt_is_served_by_the_same_instances() -> None:
    """On both stages; other prompts in between are spread over all of them."""
    async with rig(3, 3, prefill_policy="prefix-affinity", decode_policy="prefix-affinity") as r:
        first = await r.ask(prompt(LONG))
        others = [await r.ask(prompt(f"{i} {LONG}")) for i in range(6)]
        again = [await r.ask(prompt(f"{LONG} and {i}")) for i in range(4)]
        for header in ("x-disagg-prefill", "x-disagg-decode"):
            assert {a.headers[header] for a in again} == {first.headers[header]}
            assert len({o.headers[header] for o in others}) == 3
        await r.settled()


async def test_a_session_keeps_its_decode_instance_until_that_one_is_gone() -> None:
    """Then it moves, and stays where it has moved to."""
    async with rig(1, 3, decode_policy="session-affinity") as r:
        homes = {(await r.ask(x_session_id="s")).headers["x-disagg-decode"] for _ in range(5)}
        assert len(homes) == 1
        r.fleet.remove(homes.pop())
        moved = {(await r.ask(x_session_id="s")).headers["x-disagg-decode"] for _ in range(5)}
        assert len(moved) == 1


async def test_a_short_prompt_is_served_by_decode_alone_and_says_so() -> None:
    """The reason is in the answer's header, on the metrics page, and prefill hears nothing."""
    async with rig(local_prefill_tokens=50) as r:
        short = await r.ask(prompt("hello"))
        assert short.headers["x-disagg-path"] == "local;reason=short-prompt"
        assert r.p.seen == []
        long = await r.ask(prompt(LONG))
        assert long.headers["x-disagg-path"] == "disaggregated"
        assert await r.metric("disagg_requests_total", path="local", reason="short-prompt") == 1


async def test_a_strict_deployment_hands_over_short_prompts_too() -> None:
    """Strict refuses what cannot be handed over; a short prompt can."""
    async with rig(local_prefill_tokens=50, strict=True) as r:
        assert (await r.ask(prompt("hello"))).headers["x-disagg-path"] == "disaggregated"


async def test_the_load_that_engines_tell_decides_where_requests_go() -> None:
    """An instance that others keep busy gets none of ours, although we have nothing open on it."""
    async with rig(0, 2, decode_policy="least-loaded", probe=PROBE, load_interval_s=0.01) as r:
        for engine, load in zip(r.decode, (7, 0), strict=True):
            engine.pages["/load"] = answers(200, b"running %d\nwaiting 0\n" % load)
        while await r.metric("disagg_load_foreign_requests", engine="decode-0") != 7:
            await asyncio.sleep(0.01)
        served = {(await r.ask()).headers["x-disagg-decode"] for _ in range(6)}
        assert served == {"decode-1"}


async def test_an_engine_that_wants_a_key_for_its_load_is_used_as_before() -> None:
    """401 on the metrics page is not a reason to send it nothing; it shows on our own page."""
    async with rig(0, 2, decode_policy="least-loaded", probe=PROBE, load_interval_s=0.01) as r:
        for engine in r.decode:
            engine.pages["/load"] = answers(401, b"{}")
        while not await r.metric("disagg_load_failures_total", engine="decode-1", why="status-401"):
            await asyncio.sleep(0.01)
        served = {(await r.ask()).headers["x-disagg-decode"] for _ in range(6)}
        assert served == {"decode-0", "decode-1"}


async def test_a_silent_metrics_page_delays_no_request() -> None:
    """The question for the load stays open, and requests are served meanwhile."""
    asked = asyncio.Event()

    async def silent(engine: MockEngine, request: object, respond: object) -> None:
        asked.set()
        await asyncio.sleep(3600)

    async with rig(0, 1, probe=PROBE, load_interval_s=0.01) as r:
        r.d.pages["/load"] = silent
        await asked.wait()
        assert (await r.ask()).status == 200


async def test_nobody_is_asked_for_a_load_that_no_policy_looks_at() -> None:
    """Nor with an interval of 0."""
    async with rig(
        1, 1, probe=PROBE, load_interval_s=0.01, prefill_policy="random", decode_policy="round-robin"
    ) as r:
        assert (await r.ask()).status == 200
        assert b"disagg_load" not in (await r.get("/metrics")).body
    async with rig(1, 1, probe=PROBE, load_interval_s=0) as r:
        assert b"disagg_load" not in (await r.get("/metrics")).body
