"""One run of `disagg serve`: start, serve, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop
from rich.console import Console

from disagg.engines.base import EngineAdapter
from disagg.errors import ConfigError, Problem
from disagg.http.client import Client
from disagg.http.limits import ClientLimits
from disagg.launch.instance import Limits
from disagg.launch.logs import RunFolder, open_run_folder
from disagg.launch.ports import reserved_ports
from disagg.launch.process import lost_processes
from disagg.launch.progress import Progress, Row
from disagg.launch.supervisor import Settings, Supervisor
from disagg.router.admin import Admin
from disagg.router.config import RouterConfig
from disagg.router.entrance import Entrance
from disagg.router.fleet import Fleet
from disagg.router.garbage import look_less_often
from disagg.router.keys import admin_key
from disagg.router.workers import make_entrance
from disagg.serve.deployment import Deployment, settle
from disagg.serve.first_token import first_token
from disagg.serve.fleet_link import FleetLink
from disagg.serve.members import members, probe_plan
from disagg.serve.summary import ready_summary
from disagg.topology.spec import Platform, Topology

log = logging.getLogger("disagg.serve")

START_TIMEOUT_S = 600.0
QAIC_START_TIMEOUT_S = 3600.0
"""Compiling a model for Cloud AI takes many minutes, the first time."""
_TICK_S = 0.25


@dataclass(frozen=True, slots=True)
class Ui:
    """How a run shows itself, and what the user chose about it.

    Attributes:
        console: Where progress and summary go.
        start_timeout_s: How long an instance may take until it answers its health check; None for the platform's.
        explain: Names the flags or lines behind problems that name places of the topology.
    """

    console: Console = field(default_factory=Console)
    start_timeout_s: float | None = None
    explain: Callable[[Sequence[Problem]], Sequence[Problem]] = tuple


def run(topology: Topology, adapter: EngineAdapter, model: str, ui: Ui) -> int:
    """Start a deployment and serve until a signal says otherwise. Nothing of it is left afterwards.

    Args:
        topology: Checked, with its platform resolved.
        adapter: Of that platform.
        model: The model string for every engine: an absolute path, or a hub name.
        ui: How to show it.

    Returns:
        0 after an orderly stop, 130 if it was stopped before it was ready.

    Raises:
        ConfigError: If devices are missing or ports are taken.
        LaunchError: If an instance does not start, or can prove no handoff.
    """
    began = time.monotonic()
    try:
        deployment = settle(topology, adapter, model)
    except ConfigError as error:
        raise ConfigError(ui.explain(error.problems)) from error
    for warning in deployment.warnings:
        ui.console.print(f"warning: {warning}", style="yellow", soft_wrap=True, markup=False)
    folder = open_run_folder(topology.log_dir)
    look_less_often()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, reserved_ports(deployment.processes):
        return runner.run(_Session(deployment, folder, ui, began).serve())


class _Session:
    def __init__(self, deployment: Deployment, folder: RunFolder, ui: Ui, began: float) -> None:
        self._deployment = deployment
        self._folder = folder
        self._ui = ui
        self._began = began
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def serve(self) -> int:
        topology = self._deployment.topology
        fleet = Fleet(topology.stages())
        link = FleetLink(fleet, self._deployment.instances, self._deployment.peer)
        router, admin = self._entrance(fleet)
        self._tell_of_lost_processes()
        await router.start(topology.host, topology.port)
        if admin is not None:
            await admin.start(topology.router.admin_host, topology.router.admin_port or 0)
        client = Client(ClientLimits())
        progress = self._progress()
        supervisor = Supervisor(members(self._deployment), self._settings(), client, [link, progress])
        progress.follow(supervisor.views)
        self._catch_signals(supervisor)
        try:
            return await self._until_stopped(supervisor, progress, client)
        finally:
            progress.settle()
            await self._shut_down(router, supervisor)
            if admin is not None:
                await admin.stop()
            await client.close()

    async def _until_stopped(self, supervisor: Supervisor, progress: Progress, client: Client) -> int:
        progress.start()
        ticking = asyncio.create_task(self._tick(supervisor, progress))
        try:
            if not await self._unless_stopped(supervisor.start()):
                return 128 + signal.SIGINT
            progress.settle()
            seconds = time.monotonic() - self._began
            # Everything is ready by now, whether a signal lets us say so or not.
            if await self._unless_stopped(self._greet(client, seconds)):
                await self._unless_stopped(supervisor.failed())
            return 0
        finally:
            ticking.cancel()

    async def _greet(self, client: Client, seconds: float) -> None:
        first = await first_token(client, self._deployment)
        summary = ready_summary(self._deployment, self._folder.path, seconds, first)
        self._ui.console.print(summary, soft_wrap=True)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> bool:
        """Do something until it is done, fails, or a signal comes.

        Returns:
            Whether it was done.
        """
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            return False
        finally:
            task.cancel()
            stopping.cancel()

    async def _tick(self, supervisor: Supervisor, progress: Progress) -> None:
        recorded = None
        while True:
            progress.tick()
            now = [(v.name, v.pid, v.state) for v in supervisor.views()]
            if now != recorded:
                self._record(supervisor)
                recorded = now
            await asyncio.sleep(_TICK_S)

    def _tell_of_lost_processes(self) -> None:
        lost = " ".join(map(str, lost_processes()))
        if lost:
            self._ui.console.print(
                f"Earlier runs that were killed left processes behind, which may hold devices and memory. "
                f"To end them: kill -9 {lost}",
                style="yellow",
                soft_wrap=True,
            )

    def _record(self, supervisor: Supervisor) -> None:
        supervisor.record_run(endpoint=self._deployment.url, shape=self._deployment.shape)

    async def _shut_down(self, router: Entrance, supervisor: Supervisor) -> None:
        if router.in_flight and not self._hurry.is_set():
            self._ui.console.print(f"Waiting for {router.in_flight} requests; Ctrl-C again does not wait.")
        draining = asyncio.create_task(router.drain(self._deployment.topology.router.drain_timeout_s))
        hurrying = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({draining, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, hurrying):
            task.cancel()
        await router.stop()
        await supervisor.stop(self._deployment.stop_groups())
        self._record(supervisor)

    def _catch_signals(self, supervisor: Supervisor) -> None:
        def on_signal() -> None:
            if self._stop.is_set():
                self._hurry.set()
                supervisor.hurry()
            self._stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, on_signal)

    def _entrance(self, fleet: Fleet) -> tuple[Entrance, Admin | None]:
        """What takes requests, in this process or in several, and its admin API."""
        topology = self._deployment.topology
        spec, config, dialect = topology.router, self._router_config(), self._deployment.adapter.dialect(topology)
        router = make_entrance(config, dialect, fleet)
        return router, None if spec.admin_port is None else Admin(router, admin_key(spec), time.monotonic)

    def _router_config(self) -> RouterConfig:
        topology = self._deployment.topology
        plan = probe_plan(self._deployment)
        return RouterConfig(
            self._deployment.served_model_names,
            topology.router,
            topology.link.lease_s,
            plan.max_model_len,
            self._deployment.adapter.probe(),
            access_log=topology.verbosity > 0,
        )

    def _settings(self) -> Settings:
        slow = self._deployment.topology.platform is Platform.QAIC
        timeout_s = self._ui.start_timeout_s or (QAIC_START_TIMEOUT_S if slow else START_TIMEOUT_S)
        return Settings(self._folder, Limits(start_timeout_s=timeout_s), probe=probe_plan(self._deployment))

    def _progress(self) -> Progress:
        rows = [Row(p.name, p.devices, next(iter(p.ports.values()), None)) for p in self._deployment.processes]
        return Progress(rows, self._ui.console, time.monotonic)
