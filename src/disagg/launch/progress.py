"""What a user sees while a deployment starts and runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from disagg.launch import logs
from disagg.launch.instance import State
from disagg.launch.keeper import START_LINE
from disagg.launch.member import View

# A start that takes longer than this shows what the engine last said, so that waiting is not blind.
_SLOW_S = 15.0
_WORDS: Mapping[State, str] = {
    State.PLANNED: "waiting",
    State.STARTING: "starting",
    State.HEALTHY: "healthy",
    State.VERIFYING: "verifying handoff",
    State.READY: "ready",
    State.SUSPECT: "not answering",
    State.BACKOFF: "crashed, restarts soon",
    State.STOPPING: "stopping",
    State.STOPPED: "stopped",
    State.FAILED: "failed",
}
_STYLES: Mapping[State, str] = {
    State.READY: "green",
    State.FAILED: "bold red",
    State.BACKOFF: "red",
    State.SUSPECT: "yellow",
    State.STOPPED: "dim",
    State.PLANNED: "dim",
}
# Process, level, time and source file in front of a log line: of no use to somebody who waits, and a file's name may
# look like a phase.
_PREFIX = re.compile(r"^(?:\(\w+ pid=\d+\) )?(?:[A-Z]+ )?\d\d-\d\d [\d:]+ \[[^\]]*\] ")
# What engines write about a start, most advanced first; words that any of them uses.
_PHASES = (
    ("warming up", re.compile(r"warm|captur|compil|profil", re.IGNORECASE)),
    ("loading model", re.compile(r"load|weight|checkpoint|safetensors", re.IGNORECASE)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What does not change about one member."""

    name: str
    devices: str
    port: int | None


class Progress:
    """Follows the members of a deployment.

    Args:
        rows: One per member, in the order shown.
        console: Where to show.
        clock: Steady time in seconds.
    """

    def __init__(self, rows: Sequence[Row], console: Console, clock: Callable[[], float]) -> None:
        self._rows = {row.name: row for row in rows}
        self._views: Callable[[], Sequence[View]] = tuple
        self._console = console
        self._clock = clock
        self._began = clock()
        self._live: Live | None = None

    def follow(self, views: Callable[[], Sequence[View]]) -> None:
        """Take the members' states from here on from `views`."""
        self._views = views

    def start(self) -> None:
        """Show the live table, if the console is a terminal."""
        if self._console.is_terminal:
            self._live = Live(self.table(), console=self._console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)

    def tick(self) -> None:
        """Bring the table up to date."""
        if self._live is not None:
            self._live.update(self.table(), refresh=True)

    def settle(self) -> None:
        """Leave the table as it stands; later changes are lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            self._console.print(self.table())

    def on_state(self, view: View) -> None:
        """A member has changed."""
        if self._live is not None:
            self.tick()
            return
        line = Text(f"[{self._clock() - self._began:7.1f} s] {view.name} ")
        line.append(words(view), _STYLES.get(view.state, ""))
        if view.detail:
            line.append(f": {view.detail}")
        elif view.state is State.STARTING and view.starts == 1:
            line.append(self._place(view.name), "dim")
        self._console.print(line, soft_wrap=True)

    def table(self) -> Table:
        """One row per member."""
        table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
        for title in ("instance", "devices", "port", "state", "s"):
            table.add_column(title, justify="right" if title in ("port", "s") else "left", no_wrap=True)
        table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
        for view in self._views():
            row = self._rows[view.name]
            last = message(next(iter(logs.tail(view.log, 1, view.log_start)), ""))
            if last.startswith(START_LINE):
                last = ""
            saying = view.detail or (last if tells_log(view) else "")
            state = Text(words(view, last), _STYLES.get(view.state, "cyan"))
            port = "" if row.port is None else str(row.port)
            table.add_row(view.name, row.devices, port, state, f"{view.seconds:.0f}", Text(saying, "dim"))
        return table

    def _place(self, name: str) -> str:
        row = self._rows[name]
        port = "" if row.port is None else f", port {row.port}"
        return f" on {row.devices}{port}" if row.devices else port.removeprefix(",")


def message(line: str) -> str:
    """A log line without what its logger put in front."""
    return _PREFIX.sub("", line)


def words(view: View, last_line: str = "") -> str:
    """A member's state for people; while it starts, as far as its log tells."""
    if view.state is not State.STARTING:
        return _WORDS[view.state]
    phase = next((name for name, pattern in _PHASES if pattern.search(last_line)), _WORDS[State.STARTING])
    return phase if view.starts <= 1 else f"restarting, {phase}"


def tells_log(view: View) -> bool:
    """Whether the last line of its log is worth showing: it fails, or takes long to start."""
    return view.state is State.FAILED or (view.state is State.STARTING and view.seconds > _SLOW_S)
