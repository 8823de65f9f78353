"""Every way of handing KV over, under the same faults: legs one after the other, or both at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from disagg.engines.emulated.settings import DialectName, SimplePace
from tests.support.client import Ask, Ending
from tests.support.cluster import SETTINGS, body_of, cluster, streamed
from tests.support.launch_fakes import until
from tests.support.storm import Storm, plan_asks, plan_strikes, stage_names
from tests.support.toy_fleet import DIALECTS

dialects = pytest.mark.parametrize("dialect", DIALECTS)
LIMITS: dict[str, Any] = {
    "prefill_timeout_s": 2.0,
    "first_token_timeout_s": 2.0,
    "idle_timeout_s": 0.5,
    "request_timeout_s": 8.0,
}
# A death is told by its connections; limits are there for a hang, and no busy machine may reach them.
DEATHS: dict[str, Any] = {
    "prefill_timeout_s": 20.0,
    "first_token_timeout_s": 20.0,
    "idle_timeout_s": 20.0,
    "request_timeout_s": 60.0,
}
LEASE = replace(SETTINGS, lease_s=4.0, meeting_s=4.0, num_blocks=1024, handshake_timeout_s=2.0)
# Where nothing fails no limit may be reached, on a busy machine either.
PATIENT = replace(SETTINGS, lease_s=30.0, meeting_s=30.0, handshake_timeout_s=30.0)


@dialects
async def test_many_requests_at_once_have_the_words_of_one_engine(dialect: DialectName) -> None:
    """No pair takes another's KV, whatever ties its legs together."""
    async with cluster(2, 2, settings=PATIENT, dialect=dialect) as c:
        asks = [streamed(max_tokens=n % 5 + 1) if n % 2 else Ask(body_of(max_tokens=n % 5 + 1)) for n in range(40)]
        results = await asyncio.gather(*(c.ask(a) for a in asks))
        assert {r.ending for r in results} == {Ending.ANSWERED}
        assert {r.headers["x-disagg-path"] for r in results} == {"disaggregated"}


@dialects
async def test_clients_that_leave_in_any_phase_leave_nothing_on_either_side(dialect: DialectName) -> None:
    """Before, during and after the transfer."""
    async with cluster(settings=LEASE, dialect=dialect, pace=SimplePace(20_000, 0.002)) as c:
        delays = (0.0, 0.005, 0.01, 0.02, 0.05)
        asks = [Ask(body_of(stream=n % 2 == 0, max_tokens=300), leave_after_s=delays[n % 5]) for n in range(40)]
        await asyncio.gather(*(c.ask(a) for a in asks))
        assert (await c.ask()).ending is Ending.ANSWERED


@dialects
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_restart_on_the_same_port_pairs_anew(dialect: DialectName, victim: str) -> None:
    """Noticed or not, the next requests get their own KV or none."""
    async with cluster(2, 2, settings=LEASE, dialect=dialect, **DEATHS) as c:
        assert (await c.ask()).ending is Ending.ANSWERED
        await c.nodes[victim].crash()
        assert (await c.ask()).ending is Ending.ANSWERED
        await c.nodes[victim].start()
        results = await asyncio.gather(*(c.ask() for _ in range(8)))
        assert {r.ending for r in results} == {Ending.ANSWERED}
        assert victim in set().union(*(r.instances for r in results))


@dialects
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_death_in_the_middle_ends_each_request_once(dialect: DialectName, victim: str) -> None:
    """The partner is told, and keeps nothing."""
    async with cluster(2, 2, settings=LEASE, dialect=dialect, pace=SimplePace(4_000, 0.005), **DEATHS) as c:
        tasks = [asyncio.create_task(c.ask(streamed(max_tokens=30))) for _ in range(12)]
        await until(lambda: sum(len(n.instance.core.engine.running) for n in c.nodes.values()) >= 4)
        await c.nodes[victim].crash()
        for result in await asyncio.gather(*tasks):
            assert result.ending is Ending.ANSWERED or victim in result.instances, result
        assert (await c.ask()).ending is Ending.ANSWERED


@pytest.mark.slow
@dialects
async def test_a_small_storm_of_faults(dialect: DialectName) -> None:
    """Three hundred requests over four engines that crash, freeze, restart and fail."""
    rng = random.Random(7)
    async with cluster(
        2, 2, settings=LEASE, dialect=dialect, pace=SimplePace(200_000, 0.0005), retries=4, retry_budget=1.0, **LIMITS
    ) as c:
        storm = Storm(c, plan_strikes(rng, stage_names(c), 300))
        asks = [a for a in plan_asks(rng, 300) if "n" not in a.body]
        async with asyncio.timeout(60):
            await storm.run(asks, 12)
        bad = [r for r in c.results if r.ending in {Ending.FAILED, Ending.BROKEN}]
        unexplained = [storm.story(r) for r in bad if not storm.may_have_failed(r)]
        assert unexplained == [], "\n".join(unexplained)
        assert Counter(r.ending for r in c.results)[Ending.ANSWERED] > len(asks) / 2
