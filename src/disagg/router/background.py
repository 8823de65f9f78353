"""Small work that outlives the request that caused it: bounded, and ended with the router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

log = logging.getLogger("disagg.router")


class Background:
    """Runs so many tasks at once and no more.

    Args:
        limit: Most tasks at a time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Tasks that are not over."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[None, None, None]) -> bool:
        """Run something, if there is room.

        Returns:
            Whether there was; if not, nothing of it is run.
        """
        if len(self._tasks) >= self._limit:
            work.close()
            return False
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return True

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("work in the background failed", exc_info=task.exception())

    async def close(self) -> None:
        """End what is left."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
