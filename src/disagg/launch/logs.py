"""Where a run's log files are, and what they say about the end of an engine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from disagg.errors import PreparationError
from disagg.units import printable

KEPT_RUNS = 20
_TAIL_BYTES = 64 * 1024
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# What Python, argparse, the C++ runtime and the kernel print when a process cannot go on.
_CAUSE = re.compile(
    r"(?:^|[\s\]:(])(?P<cause>(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Refused|Exit|Timeout)\b.*"
    r"|error: .+|terminate called .+|Segmentation fault.*|Killed$|Out of memory.*|fatal error.*)",
)
# Lines that only point at the real cause further up.
_POINTER = re.compile(r"see (?:the )?(?:root cause|stack trace|error|traceback).{0,20}above", re.IGNORECASE)
_VALIDATION = re.compile(r"ValidationError: \d+ validation errors? for \S+$")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The folder of one run: a log file per instance and `run.json`."""

    path: Path

    def log_file(self, name: str) -> Path:
        """The file that takes an instance's stdout and stderr."""
        return self.path / f"{name}.log"

    def write_record(self, record: Mapping[str, object]) -> None:
        """Write `run.json`: who runs, with which pids. Replaced as a whole, so a reader never sees half of it."""
        target = self.path / "run.json"
        scratch = self.path / ".run.json.new"
        scratch.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        scratch.replace(target)


def open_run_folder(log_dir: str | None) -> RunFolder:
    """Make the folder for this run, and remove the oldest ones over the last 20.

    Args:
        log_dir: The user's own folder, which is used as it is and never pruned; None for one under the user's
            state directory.

    Raises:
        PreparationError: If it cannot be made or written to.
    """
    try:
        if log_dir is not None:
            folder = Path(log_dir).expanduser().absolute()
            folder.mkdir(parents=True, exist_ok=True)
        else:
            runs = state_dir() / "runs"
            folder = runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            folder.mkdir(parents=True, mode=0o700)
            _prune(runs, KEPT_RUNS)
        run = RunFolder(folder)
        run.write_record({})
    except (OSError, RuntimeError) as error:
        # A RuntimeError: there is no such user's home to begin the path with.
        where, why = (error.filename, error.strerror) if isinstance(error, OSError) else (log_dir, str(error))
        raise PreparationError(
            f"The log folder {where} cannot be used: {why}.",
            hint="Name a writable one with --log-dir.",
        ) from error
    return run


def state_dir() -> Path:
    """Where what outlives a run is kept: $XDG_STATE_HOME/disagg, or ~/.local/state/disagg."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "disagg"


def size_of(path: Path) -> int:
    """Bytes in the file; 0 if there is none to be read."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def tail(path: Path, lines: int, since: int = 0) -> list[str]:
    """The last lines of a log, without colour codes, trailing blanks and what else could disturb a terminal.

    Args:
        path: The log file; one that cannot be read has no lines.
        lines: How many at most.
        since: Only what was written after this many bytes.
    """
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            start = max(since, end - _TAIL_BYTES)
            file.seek(start)
            data = file.read()
    except OSError:
        return []
    text = _ANSI.sub("", data.decode("utf-8", errors="replace"))
    # A progress bar overwrites its line with carriage returns; what it showed last counts.
    found = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return [printable(line) for line in found if line][-lines:]


def likely_cause(lines: Sequence[str]) -> str | None:
    """The last line that looks like an exception, passing over those that only point at an earlier one.

    Returns:
        The exception or message, without the log prefix before it; None if no line looks like one.
    """
    for number, line in reversed(list(enumerate(lines))):
        match = _CAUSE.search(line)
        if match is not None and not _POINTER.search(line):
            cause = match["cause"].strip()
            if cause.count(")") > cause.count("("):
                # Some messages put the exception in brackets; the opening one is not part of the match.
                cause = cause.removesuffix(")")
            return _VALIDATION.sub(_first_finding(lines[number + 1 :]), cause)
    return None


def _first_finding(lines: Sequence[str]) -> Callable[[re.Match[str]], str]:
    """Pydantic puts what is wrong on the line below the exception, with a remark for programmers behind it."""
    below = lines[0].strip().partition(" [type=")[0] if lines else ""
    return lambda exception: f"{exception[0]}: {below}" if below else exception[0]


def _prune(runs: Path, keep: int) -> None:
    folders = sorted((f for f in runs.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime)
    for folder in folders[:-keep]:
        if not _is_live(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_live(folder: Path) -> bool:
    _, _, pid = folder.name.rpartition("-")
    with contextlib.suppress(OSError, ValueError):
        os.kill(int(pid), 0)
        return True
    return False
