"""Keeps the members of a deployment running: carries out what `transitions` decides, and tells it what happened."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import uuid
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from disagg.errors import InstanceDiedError, LaunchError
from disagg.http.client import Client
from disagg.launch import logs
from disagg.launch.handoff_probe import ProbePlan
from disagg.launch.health import Rhythm, watch
from disagg.launch.instance import (
    OVER,
    Abort,
    Action,
    Cleaned,
    Died,
    Event,
    Kill,
    Limits,
    Record,
    Silent,
    Spawn,
    Spawned,
    Start,
    State,
    StopRequested,
    Stuck,
    Terminate,
)
from disagg.launch.logs import RunFolder
from disagg.launch.member import Member, View
from disagg.launch.process import KeptProcess, Placement, new_run_id
from disagg.launch.prover import Prover
from disagg.launch.transitions import decide

log = logging.getLogger("disagg.launch")

_SHOWN_LOG_LINES = 20
# Beyond the grace period: what the keeper needs to end a tree, with room for a busy machine.
_STOP_MARGIN_S = 30.0
# States whose duration for people is that of the whole start.
_ON_THE_WAY = frozenset({State.STARTING, State.HEALTHY, State.VERIFYING, State.READY})


class Listener(Protocol):
    """Who hears of every change: the router's fleet, the progress display."""

    def on_state(self, view: View) -> None:
        """A member's state, incarnation or detail has changed."""
        ...


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all members.

    Attributes:
        folder: Where logs go.
        limits: Bounds on each member's life.
        rhythm: How often members are asked.
        grace_s: Seconds between SIGTERM and SIGKILL.
        probe: What to send to prove that requests work; None if nothing has to be proved.
    """

    folder: RunFolder
    limits: Limits = field(default_factory=Limits)
    rhythm: Rhythm = field(default_factory=Rhythm)
    grace_s: float = 10.0
    probe: ProbePlan | None = None


@dataclass(slots=True)
class _Life:
    member: Member
    record: Record
    process: KeptProcess | None = None
    pid: int | None = None
    log_start: int = 0
    told: tuple[State, str, str] = (State.PLANNED, "", "")


@dataclass(frozen=True, slots=True)
class _Start:
    """Turns the reports of one start's keeper into events about its incarnation."""

    supervisor: Supervisor
    name: str
    incarnation: str

    def started(self, pid: int) -> None:
        self.supervisor.has_pid(self.name, self.incarnation, pid)

    def died(self, cause: str) -> None:
        self.supervisor.has_pid(self.name, self.incarnation, None)
        self.supervisor.feed(self.name, Died(self.incarnation, self.supervisor.with_log_cause(self.name, cause)))

    def cleaned(self) -> None:
        self.supervisor.feed(self.name, Cleaned(self.incarnation))


class Supervisor:
    """All members of one deployment, from their first start to their end.

    Args:
        members: In start order.
        settings: What holds for all of them.
        client: Connections for health checks and probes.
        listeners: Who hears of every change.
    """

    def __init__(
        self, members: Sequence[Member], settings: Settings, client: Client, listeners: Iterable[Listener] = ()
    ) -> None:
        self.run_id = new_run_id()
        self._settings = settings
        self._client = client
        self._listeners = tuple(listeners)
        self._loop = asyncio.get_running_loop()
        self._lives = {m.name: _Life(m, Record(since=self._loop.time())) for m in members}
        self._prover = Prover(members, self, client, settings.probe)
        self._tasks: set[asyncio.Task[None]] = set()
        self._processes: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._look_planned = False
        self._starting = False
        self._error: BaseException | None = None

    async def start(self) -> None:
        """Start every member, and return when all of them are ready.

        Raises:
            InstanceDiedError: If a process ends before it was ready.
            LaunchError: If one is not ready in time, or no handoff through it works.
        """
        self._starting = True
        for life in self._lives.values():
            self.spawn(self._watch(life))
        self._start_due()
        while not all(life.record.state is State.READY for life in self._lives.values()):
            await self._next_change()
            self._raise_error()

    async def failed(self) -> None:
        """Wait until the deployment cannot go on; restarts are not failures.

        Raises:
            LaunchError: When that happens.
        """
        while True:
            self._raise_error()
            await self._next_change()

    async def stop(self, groups: Sequence[Sequence[str]] = ()) -> None:
        """Stop the members, group after group, and what is in no group last; nothing of them is left afterwards.

        Args:
            groups: Names of members that stop together, in order.
        """
        self._starting = False
        named = {name for group in groups for name in group}
        rest = [name for name in reversed(self._lives) if name not in named]
        for group in (*groups, rest):
            for name in group:
                record = self._lives[name].record
                if record.state is not State.STOPPING or record.restart:
                    self.feed(name, StopRequested())
            await self._until_over(group)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._processes, return_exceptions=True)

    def hurry(self) -> None:
        """Kill everything that still runs; `stop` then ends soon."""
        self._starting = False
        for name in self._lives:
            self.feed(name, StopRequested())
            self.feed(name, StopRequested())

    def views(self) -> list[View]:
        """All members at this moment, in start order."""
        return [self._view(life) for life in self._lives.values()]

    def record_run(self, **facts: object) -> None:
        """Write `run.json` with the pids of this moment and further facts."""
        members: Mapping[str, object] = {
            v.name: {"pid": v.pid, "incarnation": v.incarnation, "state": v.state, "log": str(v.log)}
            for v in self.views()
        }
        record = {"run": self.run_id, "pid": os.getpid(), **facts, "members": members}
        try:
            self._settings.folder.write_record(record)
        except OSError as error:
            # A full disk is no reason to stop serving.
            log.warning("run.json cannot be written: %s", error)

    # What the prover and the keepers' reports use.

    def record(self, name: str) -> Record:
        """What is known of a member now."""
        return self._lives[name].record

    def feed(self, name: str, event: Event) -> None:
        """Something happened to a member: decide, tell everybody who listens, and act."""
        life = self._lives[name]
        life.record, actions = decide(life.record, event, self._loop.time(), self._settings.limits)
        for action in actions:
            self._act(life, action)
        known = (life.record.state, life.record.incarnation, life.record.detail)
        if known != life.told:
            life.told = known
            view = self._view(life)
            log.info("%s is %s%s", name, view.state, f": {view.detail}" if view.detail else "")
            for listener in self._listeners:
                listener.on_state(view)
            self._changed.set()
            self._start_due()
            self.look_soon()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run in the background; an error in it ends the deployment."""
        self._run(work, self._tasks)

    def look_soon(self, delay_s: float = 0.0) -> None:
        """Let the prover look for what is due, once this turn of the loop is over."""
        if not self._look_planned:
            self._look_planned = True
            self._loop.call_later(delay_s, self._look)

    def has_pid(self, name: str, incarnation: str, pid: int | None) -> None:
        """The main process of an incarnation runs, or has ended."""
        life = self._lives[name]
        if life.record.incarnation == incarnation:
            life.pid = pid

    def with_log_cause(self, name: str, cause: str) -> str:
        """An exit together with what the log of this start says about it."""
        life = self._lives[name]
        found = logs.likely_cause(logs.tail(self._settings.folder.log_file(name), 200, life.log_start))
        return f"{cause}: {found}" if found else cause

    # Inside.

    def _look(self) -> None:
        self._look_planned = False
        if self._starting:
            self._prover.look()

    def _act(self, life: _Life, action: Action) -> None:
        match action:
            case Spawn():
                self._launch(life)
            case Terminate():
                if life.process is not None:
                    life.process.stop()
            case Kill():
                if life.process is not None:
                    life.process.kill()
            case Abort(reason):
                self._fail(self._story(life, reason))

    def _launch(self, life: _Life) -> None:
        name, incarnation = life.member.name, uuid.uuid4().hex
        log_file = self._settings.folder.log_file(name)
        life.log_start = logs.size_of(log_file)
        # Short, because names of sockets in it may not be longer than 107 bytes.
        run_dir = tempfile.mkdtemp(prefix="disagg-")
        placement = Placement(log_file, run_dir, self._settings.grace_s, self.run_id, incarnation)
        life.process = KeptProcess(life.member.plan(incarnation, run_dir), placement, _Start(self, name, incarnation))
        self.feed(name, Spawned(incarnation))
        self._run(life.process.run(), self._processes)

    def _start_due(self) -> None:
        if not self._starting:
            return
        for name, life in self._lives.items():
            needs = (self._lives[other].record.state for other in life.member.depends_on)
            if life.record.state is State.PLANNED and all(state is State.READY for state in needs):
                self.feed(name, Start())

    async def _watch(self, life: _Life) -> None:
        name = life.member.name
        await watch(
            life.member,
            self._client,
            self._settings.rhythm,
            lambda: self._lives[name].record,
            lambda event: self._heard(life, event),
        )

    def _heard(self, life: _Life, event: Event) -> None:
        pattern = life.member.never_ready
        if pattern is not None and isinstance(event, Silent) and life.record.state is State.STARTING:
            lines = logs.tail(self._settings.folder.log_file(life.member.name), 200, life.log_start)
            if any(pattern.search(line) for line in lines):
                cause = logs.likely_cause(lines) or "see its log"
                event = Stuck(event.incarnation, f"will never be ready, although it runs: {cause}")
        self.feed(life.member.name, event)

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _until_over(self, group: Sequence[str]) -> None:
        limit_s = self._settings.grace_s + _STOP_MARGIN_S
        try:
            async with asyncio.timeout(limit_s):
                while not all(self._lives[name].record.state in OVER for name in group):
                    await self._next_change()
        except TimeoutError:
            left = [name for name in group if self._lives[name].record.state not in OVER]
            log.error("%s did not end within %.0f s; see their logs", ", ".join(left), limit_s)

    def _run(self, work: Coroutine[None, None, None], kind: set[asyncio.Task[None]]) -> None:
        task = self._loop.create_task(work)
        kind.add(task)

        def ended(finished: asyncio.Task[None]) -> None:
            kind.discard(finished)
            error = None if finished.cancelled() else finished.exception()
            if error is not None:
                self._fail(error)

        task.add_done_callback(ended)

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _story(self, life: _Life, reason: str) -> LaunchError:
        log_file = self._settings.folder.log_file(life.member.name)
        lines = logs.tail(log_file, _SHOWN_LOG_LINES, life.log_start)
        shown = "".join(f"\n    {line}" for line in lines) or "\n    (nothing)"
        message = f"{life.member.name} {reason}\n  Last lines of {log_file}:{shown}"
        kind = LaunchError if life.record.present and life.pid is not None else InstanceDiedError
        missing = "ModuleNotFoundError" in reason or "ImportError" in reason
        hint = "\nA package is missing or broken: `disagg doctor` says which, and what cures it." if missing else None
        return kind(message, hint=hint)

    def _view(self, life: _Life) -> View:
        record = life.record
        since = record.started_at if record.state in _ON_THE_WAY else record.since
        until = record.ready_at if record.state is State.READY and record.ready_at is not None else self._loop.time()
        log_file = self._settings.folder.log_file(life.member.name)
        return View(
            life.member.name,
            record.state,
            record.incarnation,
            record.detail,
            max(0.0, until - since),
            record.starts,
            life.pid,
            log_file,
            life.log_start,
        )
