"""One of several router processes, seen from their parent."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from typing import Protocol

from disagg.errors import PreparationError
from disagg.router.worker_link import (
    Change,
    Doubt,
    Drain,
    Drained,
    FleetNews,
    Link,
    Listening,
    Numbers,
    Open,
    Refused,
    Setup,
    Stop,
    Whole,
)

log = logging.getLogger("disagg.router")

_STOP_S = 5.0
_NUMBERS_S = 1.0
_RESTART_S, _RESTART_MAX_S = 0.2, 10.0


class Pool(Protocol):
    """What a worker's place asks of the pool that it is in."""

    def setup(self) -> Setup:
        """What a worker that starts now is told."""
        ...

    def count(self) -> None:
        """Workers have reported."""
        ...

    def doubt(self, doubted: Doubt) -> None:
        """A worker doubts an engine."""
        ...

    async def whole(self, number: int) -> Whole:
        """The metrics page of all workers, and what they have open."""
        ...


class WorkerProcess:
    """One place for a worker, filled again when the process dies.

    Attributes:
        pid: Of the process that runs; 0 if none does.
        open: What it has told last.
        stopping: It may end, and is not started again.
        listening: Done when the first process listens.
        drained: Done when it has been drained, or has ended after that was asked.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._link: Link | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._asked: dict[int, asyncio.Future[Numbers]] = {}
        self.pid = 0
        self.open = Open()
        self.stopping = False
        loop = asyncio.get_running_loop()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.drained: asyncio.Future[bool] = loop.create_future()

    def send(self, message: FleetNews | Change | Drain | Stop | Numbers | Whole) -> None:
        """Tell it something; nothing happens while no process runs."""
        if self._link is not None:
            self._link.send(message)

    async def keep(self) -> None:
        """Run a process, and another one whenever it has died."""
        pause_s = _RESTART_S
        while not self.stopping:
            began = time.monotonic()
            process = await self._run()
            if self.stopping:
                break
            log.warning("router worker %d ended with %s; another one follows", process.pid, process.returncode)
            self.open = Open()
            self._pool.count()
            pause_s = _RESTART_S if time.monotonic() - began > _RESTART_MAX_S else min(pause_s * 2, _RESTART_MAX_S)
            await asyncio.sleep(pause_s)
        if not self.drained.done():
            self.drained.set_result(True)

    async def _run(self) -> asyncio.subprocess.Process:
        """Start a process and live with it to its end."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "disagg.router.worker", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self.pid = process.pid
        self._link = link = Link(*await asyncio.open_connection(sock=ours))
        link.send(self._pool.setup())
        try:
            await self._listen(link)
            await process.wait()
            return process
        finally:
            link.close()
            self._link = None
            self.pid = 0
            for asked in self._asked.values():
                asked.cancel()

    async def _listen(self, link: Link) -> None:
        chores: set[asyncio.Task[None]] = set()
        while (message := await link.receive()) is not None:
            match message:
                case Listening():
                    # The fleet may have changed since it was set up.
                    link.send(self._pool.setup().fleet)
                    if not self.listening.done():
                        self.listening.set_result(None)
                case Refused():
                    if self.listening.done():
                        log.error("a router worker cannot take requests: %s", message.message)
                    else:
                        self.listening.set_exception(PreparationError(message.message))
                case Open():
                    self.open = message
                    self._pool.count()
                case Doubt():
                    self._pool.doubt(message)
                case Numbers():
                    self.open = message.open
                    self._answer(message)
                case Whole():
                    task = asyncio.create_task(self._tell_whole(link, message.number))
                    chores.add(task)
                    task.add_done_callback(chores.discard)
                case Drained() if not self.drained.done():
                    self.drained.set_result(message.complete)

    async def _tell_whole(self, link: Link, number: int) -> None:
        link.send(await self._pool.whole(number))

    def _answer(self, message: Numbers) -> None:
        asked = self._asked.get(message.number)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def numbers(self, number: int) -> Numbers | None:
        """Its metrics page and what it has open; None if it does not answer."""
        if self._link is None:
            return None
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send(Numbers(number))
        done, _ = await asyncio.wait({asked}, timeout=_NUMBERS_S)
        del self._asked[number]
        return asked.result() if done and not asked.cancelled() else None

    async def end(self) -> None:
        """Wait until the process has ended, or kill it."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
