"""The driver in virtual time: steps take what the pace says, whatever the machine does."""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import replace
from itertools import count

from disagg.engines.emulated.driver import Driver
from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.handoff import LocalSide
from disagg.engines.emulated.sequence import Sampling, Sequence
from disagg.engines.emulated.settings import SimplePace
from tests.unit.engines_emulated.running import SETTINGS


class VirtualClock:
    """Time that passes only when everybody sleeps."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), waiting))
        await waiting

    async def run_until(self, done: asyncio.Future[None]) -> None:
        """Let time pass until `done`."""
        while not done.done():
            for _ in range(5):
                await asyncio.sleep(0)
            if self._sleepers and not done.done():
                self._now, _, waiting = heapq.heappop(self._sleepers)
                if not waiting.done():
                    waiting.set_result(None)


async def timed(pace: SimplePace, prompts: list[int], max_tokens: int) -> list[list[float]]:
    """The times of each token of requests that arrive together."""
    clock = VirtualClock()
    engine = Engine(replace(SETTINGS, prefix_caching=False), LocalSide("e", "h", 1))
    driver = Driver(engine, pace, clock, None)
    times: list[list[float]] = [[] for _ in prompts]
    done = asyncio.get_running_loop().create_future()
    seqs: list[Sequence] = []

    def note(seq: Sequence) -> None:
        times[seqs.index(seq)].append(clock.now())
        if all(s.finish_reason for s in seqs):
            done.set_result(None)

    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    seqs += [Sequence(str(n), [1] * length, sampling, note, streaming=True) for n, length in enumerate(prompts)]
    for seq in seqs:
        driver.submit(seq)
    driver.start()
    await clock.run_until(done)
    await driver.stop()
    return times


def rounded(times: list[list[float]]) -> list[list[float]]:
    return [[round(t, 6) for t in row] for row in times]


async def test_prompts_take_their_length_and_decode_steps_their_time() -> None:
    """100 tokens at 1000/s, then a step each 20 ms."""
    times = await timed(SimplePace(1000, 0.02), [100], 4)
    assert rounded(times) == [[0.1, 0.12, 0.14, 0.16]]


async def test_sequences_in_one_batch_share_a_step() -> None:
    """Both prompts are one step; decode steps cost the same for two as for one."""
    times = await timed(SimplePace(1000, 0.02), [100, 50], 3)
    assert rounded(times) == [[0.15, 0.17, 0.19]] * 2


async def test_without_a_pace_no_time_passes() -> None:
    """The default answers as fast as the machine can."""
    assert await timed(SimplePace(), [100], 3) == [[0.0, 0.0, 0.0]]


async def test_leases_end_in_the_engines_own_time() -> None:
    """An abandoned handle is freed within a tick of its lease, though no request comes."""
    clock = VirtualClock()
    engine = Engine(SETTINGS, LocalSide("e", "h", 1))
    blocks = engine.pool.allocate(3)
    assert blocks is not None
    engine.leases.pin("r", blocks, 0.0)
    driver = Driver(engine, SimplePace(), clock, None)
    driver.start()
    freed = asyncio.get_running_loop().create_future()

    async def watch() -> None:
        while engine.pool.free_blocks < engine.pool.num_blocks:
            await clock.sleep(0.1)
        freed.set_result(None)

    watching = asyncio.ensure_future(watch())
    await clock.run_until(freed)
    await watching
    assert 30.0 <= clock.now() <= 30.7
    await driver.stop()
