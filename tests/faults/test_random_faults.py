"""Two thousand requests over eight engines that crash, freeze, restart, drain and lie, with clients that come and go.

``DISAGG_FAULT_SEED=17 pytest tests/faults/test_random_faults.py`` runs another storm, and repeats one that failed.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from disagg.engines.emulated.settings import SimplePace
from tests.support.client import Ending
from tests.support.cluster import SETTINGS, cluster
from tests.support.storm import KINDS, Storm, plan_asks, plan_strikes, stage_names

SEED = int(os.environ.get("DISAGG_FAULT_SEED", "1"))
REQUESTS = 2_000
CLIENTS = 24
LIMITS: dict[str, Any] = {
    "prefill_timeout_s": 2.0,
    "first_token_timeout_s": 2.0,
    "idle_timeout_s": 0.5,
    "request_timeout_s": 8.0,
    "retries": 4,
    "retry_budget": 1.0,
}


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_plan_follows_from_its_seed_and_has_every_fault() -> None:
    """What a failed run prints is enough to have it again."""
    names = [f"{stage}-{n}" for stage in ("prefill", "decode") for n in range(4)]
    first, second = (plan_strikes(random.Random(SEED), names, REQUESTS) for _ in range(2))
    assert first == second
    assert {s.kind for s in first} == set(KINDS)
    for strike in first:
        same = [s for s in first if s.node == strike.node and s is not strike]
        assert all(s.ends <= strike.begins or strike.ends <= s.begins for s in same)


@pytest.mark.slow
@pytest.mark.parametrize("recover", [False, True], ids=["plain", "recover-streams"])
def test_a_storm_of_faults_hangs_leaks_and_loses_nothing(recover: bool) -> None:
    """Each request ends once; blocks, leases, legs and sockets come home; what met no fault succeeds word by word."""
    print(f"DISAGG_FAULT_SEED={SEED}")
    # The loop that routers and engines run on.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(storm_of(SEED, recover=recover))


async def storm_of(seed: int, *, recover: bool) -> None:
    async with cluster() as c:
        # What a loop and a process open once.
        await c.ask()
    await asyncio.sleep(0)
    before = descriptors()
    rng = random.Random(seed)
    settings = replace(SETTINGS, lease_s=5.0, num_blocks=1024)
    async with cluster(
        4, 4, settings=settings, pace=SimplePace(200_000, 0.0005), checked=False, recover_streams=recover, **LIMITS
    ) as c:
        storm = Storm(c, plan_strikes(rng, stage_names(c), REQUESTS))
        async with asyncio.timeout(100):
            await storm.run(plan_asks(rng, REQUESTS), CLIENTS)
            await c.check()
        endings = Counter(r.ending for r in c.results)
        print(dict(endings), Counter(s.kind for s in storm.strikes))
        assert len(c.results) == REQUESTS
        assert endings[Ending.REFUSED] == 0
        bad = [r for r in c.results if r.ending in {Ending.FAILED, Ending.BROKEN}]
        unexplained = [storm.story(r) for r in bad if not storm.may_have_failed(r)]
        assert unexplained == [], "\n".join(unexplained)
        # A retry is what most of those that met a fault before their first byte need.
        assert endings[Ending.ANSWERED] > 0.8 * (REQUESTS - endings[Ending.LEFT])
        assert max(r.ended - r.began for r in c.results) < LIMITS["request_timeout_s"] + 5
    await asyncio.sleep(0)
    assert descriptors() <= before
