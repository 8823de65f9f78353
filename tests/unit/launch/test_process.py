"""`disagg.launch.process`: environments, exits in words, and runs that were lost."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from disagg.engines.base import PlannedProcess
from disagg.launch import procfs
from disagg.launch.process import (
    KeptProcess,
    Placement,
    describe_exit,
    environment,
    lost_processes,
    new_run_id,
    run_is_alive,
    sweep,
)


def test_the_environment_is_the_launchers_changed_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables are inherited, removed, then set, and the marks of the run are there."""
    monkeypatch.setenv("KEPT", "1")
    monkeypatch.setenv("GONE", "1")
    planned = PlannedProcess("x", ("x",), {"SET": "2"}, ("GONE",))
    env = environment(planned, Placement(Path("log"), "dir", 1, "run-1", "inc-1"))
    assert (env["KEPT"], env["SET"]) == ("1", "2")
    assert "GONE" not in env
    assert (env[procfs.RUN_MARK], env[procfs.INCARNATION_MARK]) == ("run-1", "inc-1")


@pytest.mark.parametrize(
    ("code", "number", "words"),
    [
        (0, None, "exited with code 0"),
        (137, None, "exited with code 137"),
        (None, 11, "was killed by SIGSEGV"),
        (None, 9, "was killed by SIGKILL (by hand, or by the kernel for lack of memory)"),
        (None, 77, "was killed by signal 77"),
    ],
)
def test_exits_are_told_in_words(code: int | None, number: int | None, words: str) -> None:
    """A user does not have to know signal numbers."""
    assert describe_exit(code, number) == words


def test_a_run_lives_as_long_as_its_launcher() -> None:
    """The identity tells it, also when the pid is used again by another process."""
    assert run_is_alive(new_run_id())
    pid, ticks, rest = new_run_id().split(".")
    assert not run_is_alive(f"{pid}.{int(ticks) + 1}.{rest}")
    assert not run_is_alive(f"{2**22 + 1}.1.x")


@pytest.mark.parametrize("text", ["", "x", "1.2", "a.b.c", "1.2.3.4"])
def test_a_mark_that_cannot_be_read_protects_its_process(text: str) -> None:
    """Nothing is killed on a guess."""
    assert run_is_alive(text)


def marked_sleep(run: str, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60", *words], env={**os.environ, procfs.RUN_MARK: run})


def test_processes_of_a_lost_run_are_found_and_left_alone() -> None:
    """What a launcher that was killed together with its keepers left behind is named, and nothing else."""
    lost = marked_sleep(f"{2**22 + 1}.1.{uuid.uuid4().hex[:8]}")
    living = marked_sleep(new_run_id())
    try:
        found = lost_processes()
        assert lost.pid in found
        assert living.pid not in found
        assert lost.poll() is None
    finally:
        for child in (lost, living):
            child.kill()
            child.wait()


async def test_a_run_whose_keeper_lives_is_not_lost() -> None:
    """A keeper is ending its tree in good order."""
    run = f"{2**22 + 1}.1.{uuid.uuid4().hex[:8]}"
    keeper = subprocess.Popen(
        ["sh", "-c", "sleep 60; :", "disagg.launch.keeper"], env={**os.environ, procfs.RUN_MARK: run}
    )
    engine = marked_sleep(run)
    try:
        assert not {keeper.pid, engine.pid} & set(lost_processes())
    finally:
        await sweep(procfs.RUN_MARK, run)
        for child in (keeper, engine):
            child.wait()


async def test_a_sweep_ends_everything_with_the_mark() -> None:
    """Wherever a process hangs in the tree, its environment tells whose it is."""
    run = uuid.uuid4().hex
    children = [marked_sleep(run) for _ in range(3)]
    assert await sweep(procfs.RUN_MARK, run) == 3
    assert [child.wait(timeout=20) for child in children] == [-signal.SIGKILL] * 3


async def test_a_process_runs_although_its_log_cannot_be_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What became of the log folder since the last start does not keep an instance down."""

    class Heard:
        def __init__(self) -> None:
            self.events: list[str] = []

        def started(self, pid: int) -> None:
            self.events.append("started")

        def died(self, cause: str) -> None:
            self.events.append(cause)

        def cleaned(self) -> None:
            self.events.append("cleaned")

    (tmp_path / "file").touch()
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    heard = Heard()
    placement = Placement(tmp_path / "file" / "x.log", str(run_dir), 1.0, new_run_id(), uuid.uuid4().hex)
    await KeptProcess(PlannedProcess("x", ("true",)), placement, heard).run()
    assert heard.events == ["started", "exited with code 0", "cleaned"]
    assert "x is not logged" in caplog.text
