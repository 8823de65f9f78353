"""`disagg.launch.keeper`, as a process: nothing of an engine outlives it, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from disagg.launch import procfs
from disagg.launch.keeper import read_order
from tests.support.launch_fakes import alive, fake_argv, free_port, segment_exists


class Kept:
    """A keeper and the pipe to it."""

    def __init__(self, folder: Path, argv: tuple[str, ...], *options: str) -> None:
        self.log = folder / "engine.log"
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.mark = uuid.uuid4().hex
        command = [sys.executable, "-m", "disagg.launch.keeper", "--name", "prefill-0", "--log", str(self.log)]
        command += ["--run-dir", str(self.run_dir), *options, "--", *argv]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, procfs.INCARNATION_MARK: self.mark},
            start_new_session=True,
        )

    def events(self) -> Iterator[dict[str, Any]]:
        for line in self.pipe(self.process.stdout):
            event = json.loads(line)
            if event["event"] != "holds":
                yield event

    def order(self, word: str) -> None:
        pipe = self.pipe(self.process.stdin)
        pipe.write(f"{word}\n".encode())
        pipe.flush()

    def tree(self) -> list[int]:
        """Every process of this keeper that lives, found by its environment, without the keeper."""
        return [p for p in procfs.marked(procfs.INCARNATION_MARK, self.mark) if p != self.process.pid]

    def wait_until_it_serves(self) -> None:
        wait_until(lambda: "fake engine serves" in self.log.read_text())

    @staticmethod
    def pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None
        return pipe

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                self.pipe(pipe).close()
        self.process.wait(timeout=30)
        for pid in self.tree():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def make(argv: tuple[str, ...], *options: str) -> Kept:
        made.append(Kept(tmp_path, argv, *options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        time.sleep(0.02)


def segment_name() -> str:
    return f"disagg-test-{uuid.uuid4().hex[:12]}"


def test_a_stop_ends_the_engine_and_every_orphan_of_it(kept: Callable[..., Kept]) -> None:
    """After a stop no helper is left, although they ignore SIGTERM, left the session and lost their parents."""
    shm = segment_name()
    keeper = kept(fake_argv(free_port(), "--children", "2", "--shm", shm))
    events = keeper.events()
    assert next(events)["event"] == "started"
    keeper.wait_until_it_serves()
    assert len(keeper.tree()) == 3
    assert segment_exists(shm)
    keeper.order("stop")
    died, cleaned = list(events)
    assert (died["event"], died["code"], died["signal"]) == ("died", 0, None)
    assert (cleaned["event"], cleaned["killed"], cleaned["left"]) == ("cleaned", 2, [])
    assert cleaned["removed"] == [shm]
    assert keeper.tree() == []
    assert not segment_exists(shm)
    assert not keeper.run_dir.exists()


def test_an_engine_that_ignores_sigterm_is_killed_after_the_grace_period(kept: Callable[..., Kept]) -> None:
    """The grace period bounds how long a stop takes."""
    keeper = kept(fake_argv(free_port(), "--ignore-term"), "--grace", "0.2")
    events = keeper.events()
    next(events)
    keeper.wait_until_it_serves()
    keeper.order("stop")
    assert next(events)["signal"] == signal.SIGKILL


@pytest.mark.parametrize("hurry", ["stop", "kill"])
def test_a_second_order_does_not_wait_for_the_grace_period(kept: Callable[..., Kept], hurry: str) -> None:
    """A second Ctrl-C ends an engine that would otherwise have a minute left."""
    keeper = kept(fake_argv(free_port(), "--ignore-term"), "--grace", "60")
    events = keeper.events()
    next(events)
    keeper.wait_until_it_serves()
    keeper.order("stop")
    keeper.order(hurry)
    assert next(events)["signal"] == signal.SIGKILL


def test_a_stopped_engine_can_be_asked_to_end(kept: Callable[..., Kept]) -> None:
    """SIGSTOP does not keep SIGTERM from being acted on, so that even a frozen engine ends in good order."""
    keeper = kept(fake_argv(free_port()), "--grace", "60")
    events = keeper.events()
    engine = next(events)["pid"]
    keeper.wait_until_it_serves()
    os.kill(engine, signal.SIGSTOP)
    keeper.order("stop")
    assert next(events)["code"] == 0


def test_the_end_of_the_launcher_ends_the_tree(kept: Callable[..., Kept]) -> None:
    """A launcher that is killed only closes its pipe; that is enough."""
    keeper = kept(fake_argv(free_port(), "--children", "1"))
    next(keeper.events())
    keeper.wait_until_it_serves()
    assert len(keeper.tree()) == 2
    keeper.pipe(keeper.process.stdin).close()
    wait_until(lambda: keeper.tree() == [])
    assert keeper.process.wait(timeout=20) == 0


def test_an_engine_does_not_outlive_a_killed_keeper(kept: Callable[..., Kept]) -> None:
    """The kernel ends the engine's main process when its keeper is killed."""
    keeper = kept(fake_argv(free_port()))
    engine = next(keeper.events())["pid"]
    keeper.process.kill()
    wait_until(lambda: not alive(engine))


def test_the_end_of_an_engine_is_reported_with_its_code_and_its_helpers_end_too(kept: Callable[..., Kept]) -> None:
    """A crash reaches the launcher at once, and leaves no worker that holds the device."""
    keeper = kept(fake_argv(free_port(), "--children", "1", "--die", "ValueError: no such model"))
    events = list(keeper.events())
    assert [e["event"] for e in events] == ["started", "died", "cleaned"]
    assert events[1]["code"] == 3
    assert keeper.tree() == []
    assert "ValueError: no such model" in keeper.log.read_text()


def test_a_killed_engine_is_reported_with_its_signal(kept: Callable[..., Kept]) -> None:
    """The launcher can tell a kill from an exit, and the killed engine's shared memory is removed."""
    shm = segment_name()
    keeper = kept(fake_argv(free_port(), "--shm", shm))
    events = keeper.events()
    engine = next(events)["pid"]
    # The keeper looks at /dev/shm every half second.
    wait_until(lambda: segment_exists(shm))
    time.sleep(1.0)
    os.kill(engine, signal.SIGKILL)
    died, cleaned = list(events)
    assert (died["code"], died["signal"]) == (None, signal.SIGKILL)
    assert cleaned["removed"] == [shm]


def test_semaphores_of_a_killed_engine_are_removed(kept: Callable[..., Kept]) -> None:
    """Whoever would have unlinked them is dead as well."""
    name = f"disagg-{uuid.uuid4().hex[:12]}"
    code = (
        f"import _multiprocessing, time; s = _multiprocessing.SemLock(1, 1, 1, '/{name}', False); "
        "print('fake engine', 'serves', flush=True); time.sleep(60)"
    )
    keeper = kept((sys.executable, "-c", code))
    events = keeper.events()
    next(events)
    keeper.wait_until_it_serves()
    assert segment_exists(f"sem.{name}")
    keeper.order("kill")
    assert list(events)[-1]["removed"] == [f"sem.{name}"]
    assert not segment_exists(f"sem.{name}")


def test_shared_memory_that_another_process_uses_stays(kept: Callable[..., Kept]) -> None:
    """A segment is only removed when nobody is left who maps it."""
    shm = segment_name()
    keeper = kept(fake_argv(free_port(), "--shm", shm))
    events = keeper.events()
    next(events)
    wait_until(lambda: segment_exists(shm))
    path = Path("/dev/shm") / shm
    try:
        with path.open("rb"):
            keeper.order("stop")
            assert list(events)[-1]["removed"] == []
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_shared_memory_from_before_the_start_stays(kept: Callable[..., Kept]) -> None:
    """An engine that opens what was there before does not make it its own."""
    shm = segment_name()
    path = Path("/dev/shm") / shm
    path.write_bytes(b"")
    try:
        keeper = kept(fake_argv(free_port(), "--shm", shm))
        events = keeper.events()
        next(events)
        wait_until(lambda: path.stat().st_size > 0)
        keeper.order("stop")
        assert list(events)[-1]["removed"] == []
        assert path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_a_command_that_does_not_exist_is_a_failed_start(kept: Callable[..., Kept]) -> None:
    """The launcher is told what could not be run."""
    keeper = kept(("/no/such/engine",))
    events = list(keeper.events())
    assert [e["event"] for e in events] == ["failed"]
    assert "/no/such/engine" in events[0]["error"]
    assert keeper.process.wait(timeout=20) == 1
    assert not keeper.run_dir.exists()


def test_an_engine_starts_although_its_log_folder_is_gone(tmp_path: Path, kept: Callable[..., Kept]) -> None:
    """Old folders get cleaned away; a restart weeks later makes its own again."""
    keeper = kept(("true",), "--log", str(tmp_path / "away" / "engine.log"))
    assert [e["event"] for e in keeper.events()] == ["started", "died", "cleaned"]
    assert "disagg starts prefill-0" in (tmp_path / "away" / "engine.log").read_text()


@pytest.mark.parametrize("log", ["file/engine.log", "/dev/full"])
def test_an_engine_starts_although_its_log_cannot_be_written(
    tmp_path: Path, kept: Callable[..., Kept], log: str
) -> None:
    """A log is no reason not to serve: a path that is none, a full disk. The launcher is told."""
    (tmp_path / "file").touch()
    keeper = kept(("true",), "--log", str(tmp_path / log))
    events = list(keeper.events())
    assert [e["event"] for e in events] == ["unlogged", "started", "died", "cleaned"]
    assert log in events[0]["error"]
    assert events[2]["code"] == 0


def test_cores_confine_the_engine_and_its_helpers(kept: Callable[..., Kept]) -> None:
    """Instances that get different cores do not compete for one."""
    core = min(os.sched_getaffinity(0))
    keeper = kept(fake_argv(free_port(), "--children", "1"), "--cores", str(core))
    next(keeper.events())
    keeper.wait_until_it_serves()
    assert len(keeper.tree()) == 2
    assert all(os.sched_getaffinity(pid) == {core} for pid in keeper.tree())


def test_cores_that_the_machine_lacks_are_a_failed_start(kept: Callable[..., Kept]) -> None:
    """A wrong core is said, not ignored."""
    keeper = kept(fake_argv(free_port()), "--cores", "1023")
    assert next(keeper.events())["event"] == "failed"


def test_zombies_of_lost_parents_are_collected(kept: Callable[..., Kept]) -> None:
    """Orphans that end while the engine runs do not pile up as zombies."""
    code = "import subprocess,sys,time; subprocess.run(['sh','-c','(sleep 0.1 &) ']); time.sleep(600)"
    keeper = kept((sys.executable, "-S", "-c", code))
    engine = next(keeper.events())["pid"]

    def only_the_engine() -> bool:
        return procfs.descendants(keeper.process.pid) == (engine,)

    time.sleep(0.5)
    wait_until(only_the_engine)


def test_the_command_line_is_read_as_written() -> None:
    """Options after -- belong to the engine."""
    order = read_order(["--name", "d", "--log", "l", "--cores", "0,2", "--grace", "1.5", "--", "x", "--name", "y"])
    assert order.argv == ("x", "--name", "y")
    assert order.cores == (0, 2)
    assert order.grace_s == 1.5
    assert order.run_dir is None
