"""`disagg.launch.procfs`: what is read about processes and shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.launch import procfs
from disagg.launch.procfs import Segment


@pytest.fixture
def name() -> Iterator[str]:
    name = f"disagg-test-{uuid.uuid4().hex[:12]}"
    yield name
    (procfs.SHM_DIR / name).unlink(missing_ok=True)


def segment(name: str) -> Segment:
    return Segment(name, (procfs.SHM_DIR / name).stat().st_ino)


def test_a_process_with_brackets_and_blanks_in_its_name_is_read() -> None:
    """The command in /proc/<pid>/stat may hold anything; the fields after it are still found."""
    rename = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) S 1 (b', 0, 0, 0)"
    code = f"{rename}; print('go', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert procfs.parent_of(child.pid) == os.getpid()
        assert procfs.is_running(child.pid)
        child.kill()
    assert not procfs.is_running(child.pid)


def test_a_zombie_is_not_running() -> None:
    """An ended process that nobody collected yet must not be waited for."""
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not procfs.is_running(child.pid)
    child.wait()


def test_a_pid_that_is_not_there_says_so() -> None:
    """A process may end between two looks."""
    assert procfs.parent_of(2**22 + 1) is None
    assert procfs.start_ticks(2**22 + 1) is None
    assert procfs.mark_of(2**22 + 1, "X") is None
    assert not procfs.is_running(2**22 + 1)
    assert procfs.segments_held_by([2**22 + 1]) == frozenset()


def test_marks_are_found_by_exact_value() -> None:
    """A value that another one begins with is not mistaken for it."""
    value = uuid.uuid4().hex
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, "DISAGG_TEST": value})
    try:
        assert procfs.marked("DISAGG_TEST", value) == (child.pid,)
        assert procfs.marked("DISAGG_TEST", value[:-1]) == ()
        assert procfs.mark_of(child.pid, "DISAGG_TEST") == value
        assert procfs.same_pid_namespace(child.pid)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("keep_open", [True, False])
def test_segments_are_seen_when_open_or_mapped(name: str, keep_open: bool) -> None:
    """Either way of holding shared memory counts."""
    with (procfs.SHM_DIR / name).open("w+b") as file:
        file.truncate(4096)
        held = None if keep_open else mmap.mmap(file.fileno(), 4096)
        if keep_open:
            assert segment(name) in procfs.segments_held_by([os.getpid()])
    if held is not None:
        assert segment(name) in procfs.segments_held_by([os.getpid()])
        held.close()
    assert segment(name) not in procfs.segments_held_by([os.getpid()])


def test_a_semaphore_is_seen_although_it_shows_under_another_name() -> None:
    """Engines that use multiprocessing have dozens; of a killed tree nobody else would remove them."""
    before = procfs.segments()
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    made = procfs.segments() - before
    mine = {s for s in made if s in procfs.segments_held_by([os.getpid()])}
    assert len(mine) == 1
    assert not set(procfs.remove_segments(mine)), "it is in use"
    del semaphore


def test_only_unused_segments_of_the_same_inode_are_removed(name: str) -> None:
    """A later segment under the same name belongs to somebody else."""
    path = procfs.SHM_DIR / name
    path.write_bytes(b"x")
    old = Segment(name, path.stat().st_ino + 1)
    assert procfs.remove_segments({old}) == ()
    with path.open("rb"):
        assert procfs.remove_segments({segment(name)}) == ()
    assert procfs.remove_segments({segment(name)}) == (name,)
    assert not path.exists()


def test_segments_of_other_users_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what this user owns is removed, also for root."""
    path = procfs.SHM_DIR / name
    path.write_bytes(b"x")
    monkeypatch.setattr("os.getuid", lambda: 12345)
    assert procfs.remove_segments({segment(name)}) == ()
    assert path.exists()


def test_a_machine_without_shared_memory_has_no_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some containers have no /dev/shm."""
    monkeypatch.setattr(procfs, "SHM_DIR", Path("/no/such/dir"))
    assert procfs.segments() == frozenset()
