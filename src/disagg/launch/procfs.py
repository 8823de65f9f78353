"""What the kernel tells about a tree of processes: who is in it, which shared memory it holds, which ports.

Linux only, standard library only: the keeper imports this file and has to start in milliseconds. A process may
end between two reads, so a file that vanishes means "no longer there" and is never an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
SHM_DIR = Path("/dev/shm")  # noqa: S108 - where the kernel keeps POSIX shared memory, not a scratch file of ours
_SHM_PREFIX = f"{SHM_DIR}/"
RUN_MARK = "DISAGG_RUN"
INCARNATION_MARK = "DISAGG_INCARNATION"
_LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Segment:
    """One file under /dev/shm, told apart from a later one of the same name by its inode."""

    name: str
    inode: int


def pids() -> tuple[int, ...]:
    """All processes that this one can see."""
    return tuple(int(entry) for entry in os.listdir(PROC) if entry.isdecimal())


def parent_of(pid: int) -> int | None:
    """The parent's pid, or None if the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else None


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; with the pid it identifies a process for good."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields else None


def descendants(root: int) -> tuple[int, ...]:
    """Every process below `root`, without `root`, parents first."""
    children: dict[int, list[int]] = {}
    for pid in pids():
        parent = parent_of(pid)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found: list[int] = []
    frontier = [root]
    while frontier:
        below = children.get(frontier.pop(0), [])
        found.extend(below)
        frontier.extend(below)
    return tuple(found)


def marked(variable: str, value: str) -> tuple[int, ...]:
    """Running processes that were started with this environment variable, wherever they hang in the tree."""
    wanted = f"{variable}={value}".encode()
    return tuple(pid for pid in pids() if wanted in _read(f"{PROC}/{pid}/environ").split(b"\0") and is_running(pid))


def mark_of(pid: int, variable: str) -> str | None:
    """The value that an environment variable had when the process started."""
    prefix = f"{variable}=".encode()
    for entry in _read(f"{PROC}/{pid}/environ").split(b"\0"):
        if entry.startswith(prefix):
            return entry[len(prefix) :].decode(errors="replace")
    return None


def same_pid_namespace(pid: int) -> bool:
    """Whether the pids that the process knows mean the same here; a container's do not."""
    try:
        return os.readlink(f"{PROC}/{pid}/ns/pid") == os.readlink(f"{PROC}/self/ns/pid")
    except OSError:
        return False


def runs_module(pid: int, module: str) -> bool:
    """Whether a word of the process's command line is this Python module."""
    return module.encode() in _read(f"{PROC}/{pid}/cmdline").split(b"\0")


def segments() -> frozenset[Segment]:
    """All shared-memory segments that exist now."""
    found = set()
    try:
        with os.scandir(SHM_DIR) as entries:
            for entry in entries:
                if entry.is_file(follow_symlinks=False):
                    found.add(Segment(entry.name, entry.inode()))
    except OSError:
        return frozenset(found)
    return frozenset(found)


def segments_held_by(processes: Iterable[int]) -> frozenset[Segment]:
    """Segments that any of the processes maps or has open, those already unlinked left out.

    They are matched by inode: the C library makes a semaphore under another name, links it to its own and unlinks
    the first, which is the one that the kernel goes on showing, as deleted.
    """
    held: set[int] = set()
    for pid in processes:
        held.update(_mapped(pid))
        held.update(_opened(pid))
    return frozenset(segment for segment in segments() if segment.inode in held) if held else frozenset()


def remove_segments(candidates: Collection[Segment]) -> tuple[str, ...]:
    """Unlink the candidates that still exist, belong to this user, and that no process holds.

    Returns:
        The names that were removed.
    """
    existing = frozenset(candidates) & segments()
    if not existing:
        return ()
    in_use = segments_held_by(pids())
    removed = []
    for segment in sorted(existing - in_use, key=lambda s: s.name):
        path = SHM_DIR / segment.name
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            path.unlink()
        except FileNotFoundError:
            continue
        removed.append(segment.name)
    return tuple(removed)


def listeners(ports: Collection[int]) -> Mapping[int, tuple[int, str]]:
    """Which process listens on each TCP port, as far as this user may see.

    Returns:
        Port to (pid, command name).
    """
    inodes: dict[int, int] = {}
    for table in ("tcp", "tcp6"):
        for line in _read(f"{PROC}/net/{table}").decode().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[3] == _LISTEN and port in ports:
                inodes[int(fields[9])] = port
    found: dict[int, tuple[int, str]] = {}
    if not inodes:
        return found
    for pid in pids():
        for _, target in _descriptors(pid):
            if target.startswith("socket:[") and int(target[8:-1]) in inodes:
                found[inodes[int(target[8:-1])]] = (pid, _read(f"{PROC}/{pid}/comm").decode(errors="replace").strip())
    return found


def _mapped(pid: int) -> Iterator[int]:
    for line in _read(f"{PROC}/{pid}/maps").splitlines():
        if f" {_SHM_PREFIX}".encode() in line:
            yield int(line.split(None, 5)[4])


def _opened(pid: int) -> Iterator[int]:
    for path, target in _descriptors(pid):
        if target.startswith(_SHM_PREFIX):
            try:
                yield os.stat(path).st_ino
            except OSError:
                continue


def _descriptors(pid: int) -> Iterator[tuple[str, str]]:
    """The open files of a process: where the kernel shows each, and what it is."""
    folder = f"{PROC}/{pid}/fd"
    try:
        numbers = os.listdir(folder)
    except OSError:
        return
    for number in numbers:
        try:
            yield f"{folder}/{number}", os.readlink(f"{folder}/{number}")
        except OSError:
            continue


def _stat_fields(pid: int) -> list[str]:
    """Fields of /proc/<pid>/stat from the state on; the command before it may hold spaces and brackets."""
    text = _read(f"{PROC}/{pid}/stat").decode(errors="replace")
    return text.rpartition(")")[2].split()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
