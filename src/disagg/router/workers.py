"""Several router processes on one port, for machines where one core is not enough.

The kernel spreads connections over the workers (`SO_REUSEPORT`). This process keeps the fleet and has no part in
requests: it tells workers what has changed in the fleet, adds up what they have open, and starts one again that died.
What a worker learns from its own requests stays its own: load counts, affinities, breakers, budgets. Limits on open
and waiting requests are divided among them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count

from disagg.engines.base import Dialect
from disagg.errors import PreparationError
from disagg.http.origin import Origin
from disagg.policy.base import Need
from disagg.policy.registry import make_policy
from disagg.router.affinity import needs_events
from disagg.router.app import Router
from disagg.router.config import RouterConfig
from disagg.router.entrance import Entrance
from disagg.router.exposition import merge_pages
from disagg.router.fleet import Fleet, Member
from disagg.router.live import policy_field, with_live_changes
from disagg.router.worker_link import (
    Change,
    Doubt,
    Drain,
    FleetNews,
    MemberNews,
    Open,
    OpenLegs,
    Setup,
    Stop,
    Whole,
)
from disagg.router.worker_process import WorkerProcess
from disagg.topology.router_spec import Router as RouterSpec
from disagg.topology.spec import Stage

log = logging.getLogger("disagg.router")

_START_S = 60.0
# How late a worker may hear of a change in the fleet.
_WATCH_S = 0.02
# How old a worker's news of an engine that goes on sending may be: it looks once a second.
_MOTION_S = 1.5


def make_entrance(config: RouterConfig, dialect: Dialect, fleet: Fleet) -> Entrance:
    """A router in this process, or as many worker processes as the settings ask for."""
    workers = config.spec.workers
    return Router(config, dialect, fleet) if workers == 1 else WorkerPool(config, dialect, fleet, workers)


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
        self.config = config
        self.fleet = fleet
        self._count = workers
        self._setup = Setup(
            replace(config, spec=self._share(config.spec)),
            dialect,
            fleet.needed,
            "",
            0,
            tick_s,
            FleetNews(()),
            logging.getLogger().level,
        )
        self._workers = [WorkerProcess(self) for _ in range(workers)]
        self._tasks: list[asyncio.Task[None]] = []
        self._held: socket.socket | None = None
        self._news = FleetNews(())
        self._parked: dict[str, int] = {}
        self._moved_at: dict[str, float] = {}
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

    # What an operator changes.

    def change(self, spec: RouterSpec) -> tuple[list[str], list[str]]:
        """Take other settings, in every worker, for requests that come from now on.

        Returns:
            Names of settings that have changed, and of those that only a restart changes.

        Raises:
            ConfigError: If a policy cannot be taken. Nothing is changed then.
        """
        in_force, taken, frozen = with_live_changes(self.config.spec, spec)
        for stage in Stage:
            if policy_field(stage) in taken:
                self._check_policy(stage, getattr(in_force, policy_field(stage)))
        self._change(in_force)
        return taken, frozen

    def set_policy(self, stage: Stage, name: str) -> None:
        """Choose the instances of a stage by another policy from now on, in every worker.

        Raises:
            ConfigError: If there is no policy of that name, or it needs what is only collected from the start.
        """
        self._check_policy(stage, name)
        self._change(self.config.spec.model_copy(update={policy_field(stage): name}))

    def set_log_level(self, level: int) -> None:
        """Say more or less from now on, here and in every worker."""
        logging.getLogger("disagg").setLevel(level)
        self._setup = replace(self._setup, log_level=level)
        self._change(self.config.spec)

    def settled(self, member: Member) -> bool:
        """Whether every worker has told what it has open since it knows that a member takes no more requests."""
        serial = self._parked.get(member.name)
        return serial is not None and all(worker.open.serial >= serial for worker in self._workers)

    def motion(self, origin: Origin) -> Callable[[], bool]:
        """A question to ask later: whether a worker has got anything from an engine since now, or shortly before."""
        asked_s = time.monotonic()
        return lambda: self._moved_at.get(origin.url, -math.inf) > asked_s - _MOTION_S

    def _change(self, spec: RouterSpec) -> None:
        self.config = replace(self.config, spec=spec)
        self._setup = replace(self._setup, config=replace(self._setup.config, spec=self._share(spec)))
        for worker in self._workers:
            worker.send(Change(self._setup.config.spec, self._setup.log_level))

    def _check_policy(self, stage: Stage, name: str) -> None:
        """What a worker would say of it.

        Raises:
            ConfigError: See `set_policy`.
        """
        field = policy_field(stage)
        policy = make_policy(name, f"router.{field}")
        before = make_policy(getattr(self.config.spec, field), f"router.{field}")
        if Need.HELD_BLOCKS in policy.needs and Need.HELD_BLOCKS not in before.needs:
            raise needs_events(stage)

    def _share(self, spec: RouterSpec) -> RouterSpec:
        """One worker's part of the limits."""
        share = {
            "max_in_flight": -(-spec.max_in_flight // self._count),
            "max_queue": -(-spec.max_queue // self._count),
        }
        return spec.model_copy(update=share)

    # For the workers' processes.

    def doubt(self, doubted: Doubt) -> None:
        """A worker doubts an engine: whoever looks after it should look now."""
        member = self.fleet.get(doubted.name)
        if member is not None and member.incarnation == doubted.incarnation:
            self.fleet.doubt(member, changed=doubted.changed)

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
        now_s = time.monotonic()
        for worker in self._workers:
            self._moved_at.update(dict.fromkeys(worker.open.moved, now_s))
            worker.open = replace(worker.open, moved=frozenset())
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
            ),
            self._news.serial,
        )

    async def _watch_fleet(self) -> None:
        """Looked at instead of listened to: who changes members need not know that somebody copies them."""
        while True:
            news = self._current()
            if news != self._news:
                self._news = news = replace(news, serial=news.serial + 1)
                parked = {m.name for m in news.members if m.parked}
                self._parked = {name: self._parked.get(name, news.serial) for name in parked}
                for worker in self._workers:
                    worker.send(news)
            await asyncio.sleep(_WATCH_S)


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
