"""Several router processes on one port, for machines where one core is not enough.

The kernel spreads connections over the workers (`SO_REUSEPORT`). This process keeps the fleet and has no part in
requests: it tells workers what has changed in the fleet, adds up what they have open, and starts one again that died.
What a worker learns from its own requests stays its own: load counts, affinities, breakers, budgets. Limits on open
and waiting requests are divided among them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from dataclasses import replace
from itertools import count
from typing import Protocol

from disagg.engines.base import Dialect
from disagg.errors import ConfigError, PreparationError, Problem
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.exposition import merge_pages
from disagg.router.fleet import Fleet
from disagg.router.worker_link import (
    Drain,
    Drained,
    FleetNews,
    Link,
    Listening,
    MemberNews,
    Numbers,
    Open,
    OpenLegs,
    Refused,
    Setup,
    Stop,
    Whole,
)
from disagg.topology.router_spec import Router as RouterSpec

log = logging.getLogger("disagg.router")

_START_S = 60.0
_STOP_S = 5.0
_NUMBERS_S = 1.0
# How late a worker may hear of a change in the fleet.
_WATCH_S = 0.02
_RESTART_S, _RESTART_MAX_S = 0.2, 10.0


class Entrance(Protocol):
    """What takes the requests of a deployment: one router, or several processes of it."""

    async def start(self, host: str, port: int) -> None:
        """Take requests; port 0 takes a free one."""
        ...

    @property
    def port(self) -> int:
        """The port that requests come in on."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests that clients have open."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way; whether all of them ended within so many seconds."""
        ...

    async def stop(self) -> None:
        """End everything at once."""
        ...


def make_entrance(config: RouterConfig, dialect: Dialect, fleet: Fleet) -> Entrance:
    """A router in this process, or as many worker processes as the settings ask for."""
    workers = config.spec.workers
    return Router(config, dialect, fleet) if workers == 1 else WorkerPool(config, dialect, fleet, workers)


def only_one_worker(spec: RouterSpec, what: str) -> None:
    """Refuse what acts on a router in this process alone.

    Raises:
        ConfigError: If the settings ask for several workers.
    """
    if spec.workers > 1:
        raise ConfigError([Problem("router.workers", f"{what} needs a single router process; set it to 1")])


class WorkerPool:
    """Router processes that share a port. An `Entrance`.

    Args:
        config: Of the whole; each worker gets its part of the limits.
        dialect: How legs are written.
        fleet: Who is there. Its members' counts are set from what the workers report.
        workers: How many.
        tick_s: How late a time limit may be noticed, in seconds.
    """

    def __init__(
        self, config: RouterConfig, dialect: Dialect, fleet: Fleet, workers: int, *, tick_s: float = 0.1
    ) -> None:
        spec = config.spec
        share = {"max_in_flight": -(-spec.max_in_flight // workers), "max_queue": -(-spec.max_queue // workers)}
        self.fleet = fleet
        self._setup = Setup(
            replace(config, spec=spec.model_copy(update=share)),
            dialect,
            fleet.needed,
            "",
            0,
            tick_s,
            FleetNews(()),
            logging.getLogger().level,
        )
        self._workers = [_WorkerProcess(self) for _ in range(workers)]
        self._tasks: list[asyncio.Task[None]] = []
        self._held: socket.socket | None = None
        self._news = FleetNews(())
        self._numbers = count()

    async def start(self, host: str, port: int) -> None:
        """Start the workers; returns when all of them listen.

        Raises:
            PreparationError: If the address cannot be bound, or a worker does not start.
        """
        self._held = _reserve(host, port)
        self._news = self._current()
        self._setup = replace(self._setup, host=host, port=self.port)
        self._tasks = [asyncio.create_task(worker.keep()) for worker in self._workers]
        self._tasks.append(asyncio.create_task(self._watch_fleet()))
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.gather(*(worker.listening for worker in self._workers))
        except TimeoutError as error:
            await self.stop()
            raise PreparationError(f"The router's workers did not start within {_START_S:g} s.") from error
        except PreparationError:
            await self.stop()
            raise
        log.info("%d workers listen on %s port %d", len(self._workers), host, self.port)

    @property
    def port(self) -> int:
        """The port that requests come in on; 0 before `start`."""
        return int(self._held.getsockname()[1]) if self._held is not None else 0

    @property
    def in_flight(self) -> int:
        """Requests that clients have open, a quarter of a second ago at most."""
        return sum(worker.open.in_flight for worker in self._workers)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run."""
        return tuple(worker.pid for worker in self._workers if worker.pid)

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests, and wait for those under way.

        Returns:
            Whether all of them ended within `timeout_s` seconds.
        """
        for worker in self._workers:
            worker.stopping = True
            worker.send(Drain(timeout_s))
        _, late = await asyncio.wait({worker.drained for worker in self._workers}, timeout=timeout_s + 1.0)
        return not late and all(worker.drained.result() for worker in self._workers)

    async def stop(self) -> None:
        """End everything at once, requests under way included."""
        for worker in self._workers:
            worker.stopping = True
            worker.send(Stop())
        await asyncio.gather(*(worker.end() for worker in self._workers))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._held is not None:
            self._held.close()

    # For the workers' processes.

    def setup(self) -> Setup:
        """What a worker that starts now is told."""
        return replace(self._setup, fleet=self._news)

    async def whole(self, number: int) -> Whole:
        """The metrics page of all workers, and what they have open."""
        answers = await asyncio.gather(*(worker.numbers(next(self._numbers)) for worker in self._workers))
        pages = [a.page for a in answers if a is not None and a.page is not None]
        return Whole(number, merge_pages(pages), self._sum())

    def count(self) -> None:
        """Workers have reported: the fleet's members show the sums."""
        legs = self._sum().legs
        for member in self.fleet.members():
            found = legs.get((member.name, member.incarnation), OpenLegs(0, 0, 0.0))
            member.count(found.in_flight - member.in_flight)
            member.pinned = found.pinned
            member.pinned_until_s = found.pinned_until_s

    def _sum(self) -> Open:
        legs: dict[tuple[str, str], OpenLegs] = {}
        for worker in self._workers:
            for key, more in worker.open.legs.items():
                so_far = legs.get(key, OpenLegs(0, 0, 0.0))
                legs[key] = OpenLegs(
                    so_far.in_flight + more.in_flight,
                    so_far.pinned + more.pinned,
                    max(so_far.pinned_until_s, more.pinned_until_s),
                )
        return Open(self.in_flight, legs)

    def _current(self) -> FleetNews:
        return FleetNews(
            tuple(
                MemberNews(m.name, m.stage, m.url, m.incarnation, m.peer, m.state, m.parked)
                for m in self.fleet.members()
            )
        )

    async def _watch_fleet(self) -> None:
        """Looked at instead of listened to: who changes members need not know that somebody copies them."""
        while True:
            news = self._current()
            if news != self._news:
                self._news = news
                for worker in self._workers:
                    worker.send(news)
            await asyncio.sleep(_WATCH_S)


class _WorkerProcess:
    """One place for a worker, filled again when the process dies.

    Attributes:
        pid: Of the process that runs; 0 if none does.
        open: What it has told last.
        stopping: It may end, and is not started again.
        listening: Done when the first process listens.
        drained: Done when it has been drained, or has ended after that was asked.
    """

    def __init__(self, pool: WorkerPool) -> None:
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

    def send(self, message: FleetNews | Drain | Stop | Numbers | Whole) -> None:
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


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that keeps a port for the workers without taking connections.

    Raises:
        PreparationError: If the address cannot be bound.
    """
    hint = "Choose another --port, or stop what uses it."
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # First without sharing: another program that shares its port would otherwise share ours.
        with socket.socket(family, kind, protocol) as alone:
            alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            alone.bind(address)
            taken = alone.getsockname()
        held = socket.socket(family, kind, protocol)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(taken)
    except (OSError, OverflowError, ValueError) as error:
        raise PreparationError(f"Cannot listen on {host} port {port}: {error}.", hint=hint) from error
    return held
