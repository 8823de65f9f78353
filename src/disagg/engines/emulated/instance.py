"""One emulated engine with its HTTP server and side channel: start, serve, die, start again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from disagg.engines.emulated.bootstrap import Bootstrap
from disagg.engines.emulated.cache_events import CacheLog, EventsConfig
from disagg.engines.emulated.core import Core
from disagg.engines.emulated.driver import Driver, WallClock
from disagg.engines.emulated.engine import Engine
from disagg.engines.emulated.exchange import ENGINE_DEAD
from disagg.engines.emulated.faults import FaultBox, Faults
from disagg.engines.emulated.handoff import LocalSide
from disagg.engines.emulated.server import Api
from disagg.engines.emulated.settings import EngineSettings, Pace, Role
from disagg.engines.emulated.sglang_server import SglangServer
from disagg.engines.emulated.side_channel import SideChannel
from disagg.engines.emulated.transfer import Puller
from disagg.http.limits import ServerLimits
from disagg.http.server import Server

if TYPE_CHECKING:
    from disagg.engines.emulated.kv_events import Publisher

log = logging.getLogger("disagg.emulated")

# As the real server: a connection without a request is closed after 5 s, and bodies have no practical limit.
_LIMITS = ServerLimits(idle_timeout_s=5.0, max_body_bytes=512 * 1024**2, max_header_bytes=256 * 1024)
# How long a dead engine's server still answers, so that everybody who waits for it is told.
_LAST_WORDS_S = 0.1


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where an instance listens; port 0 takes a free one."""

    host: str
    port: int
    side_channel_host: str
    side_channel_port: int
    bootstrap_port: int = 0


def _door(core: Core) -> Api:
    """Whose API the engine speaks."""
    return SglangServer(core) if core.engine.settings.dialect == "sglang" else Api(core)


class Instance:
    """An emulated engine.

    Args:
        settings: The engine.
        pace: How long its steps take.
        addresses: Where it listens.
        faults: What goes wrong from the start.
        on_death: Called once it is down: after a fatal request or a crash.
    """

    def __init__(
        self,
        settings: EngineSettings,
        pace: Pace,
        addresses: Addresses,
        *,
        faults: tuple[Faults, ...] = (),
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self.settings = settings.checked()
        self.addresses = addresses
        self._pace = pace
        self._faults = FaultBox(faults, time.monotonic)
        self._faults.arm()
        self._on_death = on_death
        self._background: set[asyncio.Task[None]] = set()
        self._core: Core | None = None
        self._server: Server | None = None
        self._side: SideChannel | None = None
        self._events: Publisher | None = None
        self._bootstrap: Server | None = None

    @property
    def url(self) -> str:
        """Base URL of its HTTP server, once started."""
        host = self.addresses.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.addresses.port}"

    @property
    def core(self) -> Core:
        """The running engine."""
        if self._core is None:
            raise RuntimeError("the instance has not been started")
        return self._core

    async def start(self) -> None:
        """Listen and run.

        Raises:
            PreparationError: If a port cannot be bound.
        """
        settings, where = self.settings, self.addresses
        connected = settings.role is not Role.NONE
        engine = Engine(settings, LocalSide(settings.engine_id, where.side_channel_host, where.side_channel_port))
        puller = None
        if connected:
            puller = Puller(
                settings.model,
                settings.block_size,
                settings.handshake_timeout_s,
                settle_failures=not settings.recompute,
            )
        driver = Driver(engine, self._pace, WallClock(), puller, self._faults)
        driver.on_failure = self.die
        publisher = self._publisher(settings.kv_events)
        if publisher is not None:
            engine.pool.log = CacheLog(settings.block_size)
            driver.publisher = publisher
        core = Core(engine, driver, self._faults, self.die, self._control, created=time.time())
        server = Server(_door(core).handle, _LIMITS)
        try:
            await server.start(where.host, where.port)
        except BaseException:
            self._close_publisher()
            raise
        self._server = server
        side_port = where.side_channel_port
        if connected:
            self._side = SideChannel(engine, driver.clock.now, driver.gate)
            try:
                side_port = await self._side.start(where.side_channel_host, where.side_channel_port)
            except BaseException:
                self._close_publisher()
                await server.stop()
                raise
        self.addresses = replace(where, port=server.port, side_channel_port=side_port)
        if settings.role in {Role.PRODUCER, Role.BOTH} and settings.dialect in {"mooncake", "sglang"}:
            try:
                await self._start_bootstrap(settings.engine_id)
            except BaseException:
                await self.stop()
                raise
        engine.side = LocalSide(settings.engine_id, where.side_channel_host, side_port)
        self._core = core
        driver.start()

    async def stop(self) -> None:
        """Close everything at once."""
        server, side, core, bootstrap = self._server, self._side, self._core, self._bootstrap
        self._server = self._side = self._core = self._bootstrap = None
        if bootstrap is not None:
            await bootstrap.stop()
        if side is not None:
            side.stop()
        if server is not None:
            await server.stop()
        if core is not None:
            await core.driver.stop()
        self._close_publisher()

    async def _start_bootstrap(self, engine_id: str) -> None:
        where = self.addresses
        known = Bootstrap(engine_id, f"{where.side_channel_host}:{where.side_channel_port}")
        server = Server(known.handle, _LIMITS)
        await server.start(where.host, where.bootstrap_port)
        self._bootstrap = server
        self.addresses = replace(where, bootstrap_port=server.port)

    def _publisher(self, config: EventsConfig) -> Publisher | None:
        if not config.on:
            return None
        # Only who publishes needs the package.
        from disagg.engines.emulated.kv_events import Publisher

        self._events = Publisher(config)
        return self._events

    def _close_publisher(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    async def drain(self, timeout_s: float) -> None:
        """Finish what is under way, then close."""
        if self._server is not None:
            await self._server.drain(timeout_s)
        await self.stop()

    async def restart(self, down_s: float = 0.0) -> None:
        """Start again on the same ports, as another incarnation with an empty cache, `down_s` seconds later."""
        await self.stop()
        if down_s:
            await asyncio.sleep(down_s)
        self.settings = replace(self.settings, engine_id=str(uuid4()))
        await self.start()

    def die(self) -> None:
        """A request has brought the engine down: everybody is told, and then it is gone."""
        core = self.core
        if core.dead:
            return
        core.dead = True
        log.error("engine %s died", self.settings.engine_id)
        for exchange in tuple(core.exchanges):
            exchange.fail(ENGINE_DEAD)
        self._later(self._go(_LAST_WORDS_S))

    async def _go(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await self.stop()
        if self._on_death is not None:
            self._on_death()

    async def _control(self, action: str, for_s: float) -> None:
        core = self.core
        match action:
            case "freeze" | "freeze-core":
                core.silent = action == "freeze"
                core.driver.freeze()
                if for_s:
                    self._later(self._thaw(core, for_s))
            case "thaw":
                core.silent = False
                core.driver.thaw()
            case "crash":
                self._later(self._go(0.0))
            case "kill-core":
                self._later(self._lose_core(for_s))
            case "refuse":
                self._later(self._refuse(for_s))
            case _:
                self._later(self.restart(for_s))

    @staticmethod
    async def _thaw(core: Core, after_s: float) -> None:
        await asyncio.sleep(after_s)
        core.silent = False
        core.driver.thaw()

    async def _lose_core(self, after_s: float) -> None:
        """The engine is gone at once; the door reports it for a while, and then ends as well."""
        core = self.core
        core.driver.freeze()
        core.dead = True
        for exchange in tuple(core.exchanges):
            exchange.fail(ENGINE_DEAD)
        await self._go(after_s or _LAST_WORDS_S)

    async def _refuse(self, for_s: float) -> None:
        """Close the door and keep the engine: connections are refused, and KV is kept."""
        server, core = self._server, self.core
        if server is None:
            return
        self._server = None
        await server.stop()
        if for_s:
            await asyncio.sleep(for_s)
            await self._open_door(core)

    async def _open_door(self, core: Core) -> None:
        server = Server(_door(core).handle, _LIMITS)
        await server.start(self.addresses.host, self.addresses.port)
        self._server = server

    def _later(self, work: Coroutine[None, None, None]) -> None:
        # Not awaited by the request that asked: stopping the server ends that request's own task.
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %s: %s", self.settings.engine_id, error)
