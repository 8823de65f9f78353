"""`disagg.router.background`: a bounded number of tasks, and none of them after the end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from disagg.router.background import Background


async def test_what_is_over_the_limit_is_not_run() -> None:
    """A storm of small work stays small; whoever is refused is told."""
    gate = asyncio.Event()
    ran: list[int] = []

    async def work(number: int) -> None:
        ran.append(number)
        await gate.wait()

    background = Background(2)
    assert [background.spawn(work(n)) for n in range(4)] == [True, True, False, False]
    await asyncio.sleep(0)
    assert (ran, background.running) == ([0, 1], 2)
    gate.set()
    await asyncio.sleep(0.01)
    assert background.running == 0
    assert background.spawn(work(9))
    await background.close()


async def test_the_end_ends_them() -> None:
    """Nothing runs on when the router has stopped."""
    background = Background(1)
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    background.spawn(work())
    await asyncio.sleep(0)
    await background.close()
    assert ended.is_set()
    assert background.running == 0


async def test_a_failure_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it, so the log is the only place to tell."""

    async def work() -> None:
        raise ValueError("told")

    background = Background(1)
    with caplog.at_level(logging.ERROR):
        background.spawn(work())
        await asyncio.sleep(0.01)
    assert "told" in str(caplog.records[0].exc_info)
