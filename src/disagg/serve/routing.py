"""One run of `disagg route`: a router in front of engines that somebody else started."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console

from disagg.engines.dialects import dialect_named, probe_named
from disagg.errors import DisaggError
from disagg.http.client import Client
from disagg.http.limits import ClientLimits
from disagg.router.admin import Admin
from disagg.router.config import Clocks, RouterConfig
from disagg.router.fleet import Fleet
from disagg.router.garbage import look_less_often
from disagg.router.keys import admin_key, engine_credentials
from disagg.router.probing import Prober
from disagg.router.roster import Roster
from disagg.router.workers import make_entrance
from disagg.topology.fleet_file import FleetFile, LoadedFleet
from disagg.topology.router_spec import Router as RouterSpec

log = logging.getLogger("disagg.serve.routing")

_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    """Where the fleet's description comes from.

    Attributes:
        path: The file to look after; None if everything was said with flags.
        load: Reads it again, with the flags of the command line on top.
        console: Where the user is told.
    """

    path: str | None
    load: Callable[[], LoadedFleet]
    console: Console = field(default_factory=Console)


def route(file: FleetFile, source: Source) -> int:
    """Serve until a signal says otherwise. The engines are left as they are.

    Args:
        file: Checked.
        source: Where it came from.

    Returns:
        0 after an orderly stop.

    Raises:
        ConfigError: If a key file is wrong.
        PreparationError: If the address cannot be bound.
    """
    look_less_often()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_route(file, source))


async def _route(file: FleetFile, source: Source) -> int:
    # Inside the loop: several router processes are waited for on it.
    return await Routing(file, source).serve()


class Routing:
    """A router, what looks after its engines, and what looks after its file."""

    def __init__(self, file: FleetFile, source: Source) -> None:
        self._file = file
        self._source = source
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._reload = asyncio.Event()
        self.fleet = Fleet(file.stages())
        config = RouterConfig(
            file.names,
            file.router,
            file.lease_s,
            file.max_model_len,
            probe=probe_named(file.engine),
            access_log=file.router.access_log,
        )
        clocks = Clocks()
        self.router = make_entrance(config, dialect_named(file.spoken), self.fleet)
        self.client = Client(ClientLimits(connect_timeout_s=file.router.connect_timeout_s))
        self.prober = Prober(self.fleet, self.client, self._spec, self.router.motion, engine_credentials(file.router))
        self.roster = Roster(self.fleet, self.prober, clocks.monotonic, self.router.settled)
        self.admin: Admin | None = None
        if file.router.admin_port is not None:
            self.admin = Admin(self.router, admin_key(file.router), clocks.monotonic, self.roster)

    def _spec(self) -> RouterSpec:
        return self.router.config.spec

    async def serve(self) -> int:
        """Serve until a signal comes."""
        self._catch_signals()
        await self.start()
        watching = asyncio.create_task(self._watch())
        try:
            await self._stop.wait()
            return 0
        finally:
            watching.cancel()
            await self._shut_down()

    async def start(self) -> None:
        """Listen, and begin to ask the engines how they are. It starts with whatever is there.

        Raises:
            PreparationError: If the address cannot be bound.
        """
        await self.router.start(self._file.host, self._file.port)
        if self.admin is not None:
            await self.admin.start(self._file.router.admin_host, self._file.router.admin_port or 0)
        self.roster.follow(self._file)
        host = f"[{self._file.host}]" if ":" in self._file.host else self._file.host
        counts = ", ".join(f"{len(self._file.endpoints(s))} {s}" for s in self._file.stages())
        self._say(f"Routing {self._file.names[0]} over {counts} at http://{host}:{self.router.port}; Ctrl-C stops.")

    async def stop(self) -> None:
        """End everything at once. The engines are left as they are."""
        if self.admin is not None:
            await self.admin.stop()
        await self.prober.stop()
        await self.roster.stop()
        await self.client.close()
        await self.router.stop()

    def take(self, file: FleetFile) -> list[str]:
        """Take over another version of the file.

        Returns:
            What has changed and what only a restart changes, in words.
        """
        if file.stages() != self._file.stages():
            return [f"other stages than {', '.join(self._file.stages())} need a restart; nothing was changed"]
        # Settings first: a policy may be refused, and then the engines stay as they are, too.
        taken, frozen = self.router.change(file.router)
        changes = self.roster.follow(file)
        changes += [f"router.{name} is {getattr(file.router, name)}" for name in taken]
        frozen = [f"router.{name}" for name in frozen]
        fixed = ("model", "served_model_name", "engine", "dialect", "host", "port", "lease_s", "max_model_len")
        frozen += [name for name in fixed if getattr(file, name) != getattr(self._file, name)]
        changes += [f"{name} changes with a restart" for name in frozen]
        return changes

    def reload(self) -> None:
        """Read the file again. One that is wrong is reported, and everything stays as it is."""
        try:
            changes = self.take(self._source.load().file)
        except DisaggError as error:
            self._say(f"{self._source.path} was not taken over: {error}", "yellow")
            return
        for change in changes:
            self._say(f"{self._source.path}: {change}")

    async def _watch(self) -> None:
        if self._source.path is None:
            return
        path = Path(self._source.path)
        seen = _stamp(path)
        gone = False
        while True:
            try:
                async with asyncio.timeout(_POLL_S):
                    await self._reload.wait()
            except TimeoutError:
                pass
            stamp = _stamp(path)
            if stamp is None and not gone:
                self._say(f"{path} cannot be looked at; everything stays as it is", "yellow")
            gone = stamp is None
            if self._reload.is_set() or (stamp != seen and stamp is not None):
                self._reload.clear()
                seen = stamp
                self.reload()

    def _catch_signals(self) -> None:
        def on_signal() -> None:
            if self._stop.is_set():
                self._hurry.set()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        loop.add_signal_handler(signal.SIGHUP, self._reload.set)

    async def _shut_down(self) -> None:
        if self.router.in_flight:
            self._say(f"Waiting for {self.router.in_flight} requests; Ctrl-C again does not wait.")
        draining = asyncio.create_task(self.router.drain(self._spec().drain_timeout_s))
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurrying):
            task.cancel()
        await self.stop()

    def _say(self, text: str, style: str | None = None) -> None:
        self._source.console.print(text, style=style, markup=False, soft_wrap=True)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file does, also when another one is renamed into its place; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_ino, found.st_size)
