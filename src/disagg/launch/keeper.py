"""A small process that keeps one engine: starts it, reports its end, and leaves nothing of it behind.

One keeper runs per engine, between the launcher and the engine::

    launcher ──stdin: "stop", "kill", end of file──▶ keeper ──▶ engine ──▶ its workers
             ◀──stdout: one JSON object per line────        (own session, log file as stdout and stderr)

It exists because a launcher cannot clean up after its own SIGKILL. The keeper can: end of file on its stdin means
that the launcher is gone, however that came about. It is the subreaper of the engine's whole tree, so a worker
whose parent dies becomes the keeper's child and cannot escape. If the keeper itself is killed, the kernel kills
the engine's main process (PR_SET_PDEATHSIG) and the launcher sweeps the rest by their environment mark.

Standard library only: importing this must take milliseconds.

Reports: ``{"event": "started", "pid": …}``, ``{"event": "failed", "error": …}`` (nothing was started),
``{"event": "died", "code": … | null, "signal": … | null}`` when the main process has ended, and
``{"event": "cleaned", "killed": …, "left": […], "removed": […]}`` as the last one, when the tree has ended.
``{"event": "unlogged", "error": …}`` says that the log cannot be written; the engine starts all the same.
``{"event": "holds", "segments": [[name, inode], …]}`` lists the shared memory to remove if the keeper is killed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import IO

from disagg.launch import procfs
from disagg.topology.secrets import masked_words

START_LINE = "--- disagg starts"
"""Begins the line that a keeper writes into the log before each start."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MIN_SCAN_INTERVAL_S = 0.5
# A scan reads every memory map of the tree; with this factor scanning takes at most 2 % of one core.
_SCAN_IDLE_FACTOR = 50
# Time for helpers such as Python's resource tracker to unlink what they know of, once the engine has ended.
_SETTLE_S = 0.5
# A process in an uninterruptible system call (a hung driver) outlives SIGKILL; it is reported, not waited for.
_UNKILLABLE_AFTER_S = 20.0


@dataclass(frozen=True, slots=True)
class Order:
    """What a keeper is told on its command line.

    Attributes:
        name: The instance's name, for the log.
        log: File that receives stdout and stderr, appended to.
        grace_s: Seconds between SIGTERM and SIGKILL.
        cores: CPU cores that the engine is confined to; empty leaves it alone.
        run_dir: Private directory that is removed at the end, if any.
        argv: The engine's command line.
    """

    name: str
    log: str
    grace_s: float
    cores: tuple[int, ...]
    run_dir: str | None
    argv: tuple[str, ...]


class Keeper:
    """One engine's life, in one thread: every step returns quickly, and `run` waits in `select` alone."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._engine: subprocess.Popen[bytes] | None = None
        self._before = procfs.segments()
        self._segments: frozenset[procfs.Segment] = frozenset()
        self._shm_changed_ns = -1
        self._next_scan = 0.0
        self._stops = 0
        self._kill_at: float | None = None
        self._commands = b""
        self._launcher_gone = False

    def run(self) -> int:
        """Start the engine, wait for its end or for an order to stop, clean up.

        Returns:
            The keeper's own exit code: 0 if the engine was started, 1 if it could not be.
        """
        wake_up = _wake_on_signals()
        try:
            engine = self._start()
        except OSError as error:
            self._remove_run_dir()
            self._report({"event": "failed", "error": f"{error.strerror}: {error.filename or self._order.argv[0]}"})
            return 1
        self._engine = engine
        self._report({"event": "started", "pid": engine.pid})
        while engine.poll() is None:
            self._wait(wake_up)
            _reap_orphans(engine.pid)
            self._look_at_segments()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._kill_at = None
                engine.kill()
        code = engine.returncode
        self._report({"event": "died", "code": code if code >= 0 else None, "signal": -code if code < 0 else None})
        self._look_at_segments(force=True)
        killed, left = _end_all_children()
        self._remove_run_dir()
        removed = procfs.remove_segments(self._segments)
        self._report({"event": "cleaned", "killed": killed, "left": left, "removed": removed})
        return 0

    def _start(self) -> subprocess.Popen[bytes]:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        if self._order.cores:
            os.sched_setaffinity(0, self._order.cores)
        keeper = os.getpid()

        def in_child() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != keeper:
                os._exit(1)  # the keeper died before the kernel knew that its death matters
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)

        with self._open_log() as log:
            return subprocess.Popen(
                self._order.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 - the keeper has one thread
            )

    def _open_log(self) -> IO[bytes]:
        """The log, its first line written; an engine whose log cannot be written runs without one."""
        first = f"{START_LINE} {self._order.name}: {shlex.join(masked_words(self._order.argv))}\n".encode()
        try:
            # Folders of old logs get cleaned away while an engine runs for weeks.
            os.makedirs(os.path.dirname(self._order.log) or ".", exist_ok=True)
            log = open(self._order.log, "ab", buffering=0)  # noqa: SIM115 - the caller closes it
        except OSError as error:
            self._report({"event": "unlogged", "error": f"{error.strerror}: {self._order.log}"})
            return open(os.devnull, "ab", buffering=0)
        try:
            log.write(first)
        except OSError as error:
            # A full disk: the engine may still find room later.
            self._report({"event": "unlogged", "error": f"{error.strerror}: {self._order.log}"})
        return log

    def _wait(self, wake_up: int) -> None:
        watched = [wake_up] if self._launcher_gone else [wake_up, 0]
        until = self._next_scan if self._kill_at is None else min(self._kill_at, self._next_scan)
        ready, _, _ = select.select(watched, [], [], max(0.0, until - time.monotonic()))
        if wake_up in ready:
            for number in os.read(wake_up, 512):
                if number == signal.SIGTERM:
                    self._stop()
        if 0 in ready:
            self._read_commands()

    def _read_commands(self) -> None:
        data = os.read(0, 4096)
        if not data:
            self._launcher_gone = True
            if self._stops == 0:
                self._stop()
            return
        *lines, self._commands = (self._commands + data).split(b"\n")
        for line in lines:
            if line == b"stop":
                self._stop()
            elif line == b"kill":
                self._stop(at_once=True)

    def _stop(self, *, at_once: bool = False) -> None:
        """Ask the engine to end; a second call, `at_once`, or the grace period ends it."""
        self._stops += 1
        if self._engine is None:
            return
        self._look_at_segments(force=True)
        if at_once or self._stops > 1:
            self._kill_at = time.monotonic()
            return
        self._kill_at = time.monotonic() + self._order.grace_s
        self._engine.terminate()
        self._engine.send_signal(signal.SIGCONT)  # a stopped process cannot act on SIGTERM

    def _look_at_segments(self, *, force: bool = False) -> None:
        """Note the segments that the tree has made, while its processes can still be asked."""
        began = time.monotonic()
        if not force and began < self._next_scan:
            return
        try:
            changed_ns = procfs.SHM_DIR.stat().st_mtime_ns
        except OSError:
            changed_ns = 0
        if force or changed_ns != self._shm_changed_ns:
            self._shm_changed_ns = changed_ns
            found = procfs.segments_held_by(procfs.descendants(os.getpid())) - self._before
            if not found <= self._segments:
                self._segments |= found
                self._report({"event": "holds", "segments": [(s.name, s.inode) for s in self._segments]})
        ended = time.monotonic()
        self._next_scan = ended + max(_MIN_SCAN_INTERVAL_S, _SCAN_IDLE_FACTOR * (ended - began))

    def _remove_run_dir(self) -> None:
        if self._order.run_dir is not None:
            shutil.rmtree(self._order.run_dir, ignore_errors=True)

    def _report(self, event: dict[str, object]) -> None:
        try:
            os.write(1, json.dumps(event).encode() + b"\n")
        except BrokenPipeError:
            self._launcher_gone = True


def read_order(arguments: Sequence[str]) -> Order:
    """Read the keeper's command line."""
    parser = argparse.ArgumentParser(prog="python -m disagg.launch.keeper", description="Keep one engine process.")
    parser.add_argument("--name", required=True, help="the instance's name")
    parser.add_argument("--log", required=True, help="file for the engine's stdout and stderr")
    parser.add_argument("--grace", type=float, default=10.0, help="seconds between SIGTERM and SIGKILL")
    parser.add_argument("--cores", default="", help="CPU cores, such as 0,1")
    parser.add_argument("--run-dir", help="private directory to remove at the end")
    parser.add_argument("argv", nargs="+", help="the engine's command line, after --")
    given = parser.parse_args(arguments)
    cores = tuple(int(core) for core in given.cores.split(",") if core)
    return Order(given.name, given.log, given.grace, cores, given.run_dir, tuple(given.argv))


def main() -> int:
    """Run a keeper as this process."""
    return Keeper(read_order(sys.argv[1:])).run()


def _reap_orphans(engine: int) -> None:
    """Collect ended children that are not the engine: orphans that the kernel gave to this subreaper."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None or ended.si_pid == engine:
            return
        os.waitpid(ended.si_pid, 0)


def _end_all_children() -> tuple[int, list[int]]:
    """Let what is left of the tree end by itself for a moment, then kill and reap until nothing is left.

    Returns:
        How many processes were killed, and those that even SIGKILL did not end in time.
    """
    killed: set[int] = set()
    began = time.monotonic()
    pause_s = 0.005
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return len(killed), []
        if pid:
            continue
        elapsed_s = time.monotonic() - began
        alive = [p for p in procfs.descendants(os.getpid()) if procfs.is_running(p)]
        if elapsed_s > _UNKILLABLE_AFTER_S:
            return len(killed), alive
        if elapsed_s > _SETTLE_S:
            for descendant in alive:
                _kill(descendant)
                killed.add(descendant)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.2)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _wake_on_signals() -> int:
    """Make SIGCHLD and SIGTERM end `select`; a terminal's Ctrl-C and hang-up are the launcher's to answer.

    Returns:
        The descriptor on which the numbers of these signals arrive, a byte each.
    """
    readable, writable = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, _ignore_here)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return readable


def _ignore_here(_number: int, _frame: FrameType | None) -> None:
    """A Python handler is needed for the wake-up descriptor to be written; the loop does the rest."""


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")


if __name__ == "__main__":
    sys.exit(main())
