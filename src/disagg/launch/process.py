"""The launcher's end of a keeper: start it, tell it to stop, hear what becomes of its engine."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import msgspec

from disagg.engines.base import PlannedProcess
from disagg.launch import procfs

log = logging.getLogger("disagg.launch")

# As `python -m disagg.launch.keeper`, but neither PYTHON* variables, nor the current directory, nor site hooks may
# change the keeper or slow it down. The module's name stays a word of its own, so that `ps` tells what this is.
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); del sys.argv[1]; "
    "from disagg.launch.keeper import main; sys.exit(main())"
)
_KEEPER = "disagg.launch.keeper"
# A driver may hold a dying process for a while: 20 s in all.
_SWEEP_PAUSE_S = 0.02
_SWEEP_ROUNDS = 1000
_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])


class Watcher(Protocol):
    """Who is told about a process. Each is called at most once, in this order; `died` always, then `cleaned`."""

    def started(self, pid: int) -> None:
        """The engine's main process runs."""
        ...

    def died(self, cause: str) -> None:
        """It ended, or could not be started."""
        ...

    def cleaned(self) -> None:
        """Nothing of its tree is left."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one start of a process writes and lives.

    Attributes:
        log: File that its output is appended to.
        run_dir: Private directory that is removed with it.
        grace_s: Seconds between SIGTERM and SIGKILL.
        run: Identity of the whole run, an environment mark of every process of it.
        incarnation: Identity of this start, a second mark.
    """

    log: Path
    run_dir: str
    grace_s: float
    run: str
    incarnation: str


class _Report(msgspec.Struct):
    event: str
    pid: int = 0
    code: int | None = None
    signal: int | None = None
    error: str = ""
    left: list[int] = []
    segments: list[tuple[str, int]] = []


class KeptProcess:
    """One start of one planned process, under a keeper. Orders may come at any time and are never lost."""

    def __init__(self, planned: PlannedProcess, placement: Placement, watcher: Watcher) -> None:
        self._planned = planned
        self._placement = placement
        self._watcher = watcher
        self._orders: list[bytes] = []
        self._keeper: asyncio.subprocess.Process | None = None
        self._segments: frozenset[procfs.Segment] = frozenset()
        self._died = False
        self._clean = False

    async def run(self) -> None:
        """Start the keeper and report until nothing of the process is left."""
        try:
            self._keeper = await self._spawn()
        except OSError as error:
            shutil.rmtree(self._placement.run_dir, ignore_errors=True)
            self._report_death(f"could not be started: {error}")
            self._watcher.cleaned()
            return
        for order in self._orders:
            self._send(order)
        if self._keeper.stdout is not None:
            await self._listen(self._keeper.stdout)
        await self._keeper.wait()
        self._report_death("lost the process that kept it")
        if not self._clean:
            await sweep(procfs.INCARNATION_MARK, self._placement.incarnation)
            procfs.remove_segments(self._segments)
            shutil.rmtree(self._placement.run_dir, ignore_errors=True)
        self._watcher.cleaned()

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._open_log() as errors:
            return await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                env=environment(self._planned, self._placement),
                start_new_session=True,
            )

    def _open_log(self) -> IO[bytes]:
        """Where the keeper's own errors go. The keeper itself tells of a log that cannot be written."""
        try:
            self._placement.log.parent.mkdir(parents=True, exist_ok=True)
            return self._placement.log.open("ab")
        except OSError:
            return open(os.devnull, "ab")

    def stop(self) -> None:
        """Ask the engine to end; after the grace period it is killed."""
        self._order(b"stop\n")

    def kill(self) -> None:
        """End the engine and everything below it now."""
        self._order(b"kill\n")

    def _order(self, order: bytes) -> None:
        if self._keeper is None:
            self._orders.append(order)
        else:
            self._send(order)

    def _send(self, order: bytes) -> None:
        pipe = self._keeper.stdin if self._keeper is not None else None
        if pipe is not None and not pipe.is_closing():
            pipe.write(order)

    async def _listen(self, reports: asyncio.StreamReader) -> None:
        async for line in reports:
            report = msgspec.json.decode(line, type=_Report)
            if report.event == "started":
                self._watcher.started(report.pid)
            elif report.event == "died":
                self._report_death(describe_exit(report.code, report.signal))
            elif report.event == "failed":
                self._report_death(f"could not be started: {report.error}")
            elif report.event == "unlogged":
                log.warning("%s is not logged: %s", self._planned.name, report.error)
            elif report.event == "holds":
                self._segments = frozenset(procfs.Segment(name, inode) for name, inode in report.segments)
            elif report.event == "cleaned":
                self._clean = True

    def _report_death(self, cause: str) -> None:
        if not self._died:
            self._died = True
            self._watcher.died(cause)

    def _command(self) -> list[str]:
        command = [sys.executable, "-I", "-S", "-c", _BOOT, _SOURCE_ROOT, _KEEPER, "--name", self._planned.name]
        command += ["--log", str(self._placement.log), "--grace", str(self._placement.grace_s)]
        command += ["--run-dir", self._placement.run_dir]
        if self._planned.cores is not None:
            command += ["--cores", ",".join(map(str, self._planned.cores))]
        return [*command, "--", *self._planned.argv]


def environment(planned: PlannedProcess, placement: Placement) -> dict[str, str]:
    """The whole environment of a process: this one's, changed as planned, with the marks of the run."""
    inherited: Mapping[str, str] = os.environ
    env = {name: value for name, value in inherited.items() if name not in planned.unset_env}
    env.update(planned.env)
    env[procfs.RUN_MARK] = placement.run
    env[procfs.INCARNATION_MARK] = placement.incarnation
    return env


def describe_exit(code: int | None, number: int | None) -> str:
    """An exit in words: ``exited with code 1``, ``was killed by SIGKILL (out of memory?)``."""
    if number is None:
        return f"exited with code {code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    if name == "SIGKILL":
        return "was killed by SIGKILL (by hand, or by the kernel for lack of memory)"
    return f"was killed by {name}"


async def sweep(variable: str, value: str) -> int:
    """Kill every process that carries an environment mark, wherever it hangs, and wait until all are gone.

    Returns:
        How many were killed.
    """
    killed: set[int] = set()
    segments: frozenset[procfs.Segment] = frozenset()
    for _ in range(_SWEEP_ROUNDS):
        found = [pid for pid in procfs.marked(variable, value) if pid != os.getpid()]
        segments |= procfs.segments_held_by(found)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            killed.add(pid)
        # A dying process loses its environment, and so its mark, before it closes its sockets.
        if not found and not any(procfs.is_running(pid) for pid in killed):
            break
        await asyncio.sleep(_SWEEP_PAUSE_S)
    procfs.remove_segments(segments)
    return len(killed)


def lost_processes() -> tuple[int, ...]:
    """Processes of runs whose launcher *and* keeper were killed, so that nobody is left to end them.

    They are only found, never ended: that is for their owner to decide, who may be debugging one. A process counts
    if its mark names a launcher of this process namespace that is gone, and no keeper of its run lives.
    """
    runs: dict[str, list[int]] = {}
    for pid in procfs.pids():
        run = procfs.mark_of(pid, procfs.RUN_MARK)
        if run is not None and procfs.is_running(pid) and procfs.same_pid_namespace(pid):
            runs.setdefault(run, []).append(pid)
    lost: list[int] = []
    for run, members in runs.items():
        if not run_is_alive(run) and not any(procfs.runs_module(pid, _KEEPER) for pid in members):
            lost += members
    return tuple(sorted(lost))


def new_run_id() -> str:
    """Unique identity of a run, from which anybody can tell whether its launcher still lives."""
    return f"{os.getpid()}.{procfs.start_ticks(os.getpid())}.{uuid.uuid4().hex[:8]}"


def run_is_alive(run: str) -> bool:
    """Whether the launcher that made this identity still runs; one that cannot be read counts as alive."""
    words = run.split(".")
    if len(words) != 3 or not words[0].isdecimal():
        return True
    return procfs.start_ticks(int(words[0])) == (int(words[1]) if words[1].isdecimal() else None)
