"""`disagg.launch.progress`: what a user sees."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from disagg.launch.instance import State
from disagg.launch.member import View
from disagg.launch.progress import Progress, Row, message, words


def view(state: State, log: Path, detail: str = "", seconds: float = 1.0, starts: int = 1) -> View:
    return View("prefill-0", state, "i", detail, seconds, starts, 1, log, 0)


def shown(progress: Progress) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(progress.table())
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def make(console: Console) -> Progress:
    return Progress([Row("prefill-0", "CPU cores 0", 9900)], console, lambda: 12.0)


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("", "starting"),
        ("INFO hello", "starting"),
        ("INFO Loading safetensors checkpoint shards: 50 %", "loading model"),
        ("INFO Warming up the model for the compilation", "warming up"),
        ("INFO Capturing CUDA graphs", "warming up"),
    ],
)
def test_a_start_is_told_as_far_as_the_log_says(line: str, phase: str, tmp_path: Path) -> None:
    """Minutes of waiting have a name."""
    assert words(view(State.STARTING, tmp_path), line) == phase
    assert words(view(State.STARTING, tmp_path, starts=2), line) == f"restarting, {phase}"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("(APIServer pid=1) INFO 11-30 20:34:51 [compilation.py:303] Enabled fusions", "Enabled fusions"),
        ("INFO 11-30 20:34:51 [loader.py:3] Loading weights", "Loading weights"),
        ("plain [text] stays", "plain [text] stays"),
        ("", ""),
    ],
)
def test_what_a_logger_puts_in_front_is_no_phase(line: str, text: str) -> None:
    """The source file `compilation.py` does not mean that the engine compiles."""
    assert message(line) == text


def test_a_terminal_of_ordinary_width_keeps_state_and_seconds(tmp_path: Path) -> None:
    """A long log line takes the room that is left, and no more."""
    log = tmp_path / "x.log"
    log.write_text("word " * 60)
    progress = make(Console(file=io.StringIO()))
    progress.follow(lambda: [view(State.STARTING, log, seconds=42.0)])
    console = Console(file=io.StringIO(), width=80)
    console.print(progress.table())
    output = console.file
    assert isinstance(output, io.StringIO)
    row = output.getvalue().splitlines()[1]
    for part in ("prefill-0", "CPU cores 0", "9900", "starting", "42", "word word"):
        assert part in row


def test_every_state_has_words(tmp_path: Path) -> None:
    """No state is shown by its internal name alone by accident."""
    assert all(words(view(state, tmp_path)) for state in State)


def test_rows_have_devices_port_state_and_seconds(tmp_path: Path) -> None:
    """One row per instance has what a user needs to find it."""
    progress = make(Console(file=io.StringIO()))
    progress.follow(lambda: [view(State.READY, tmp_path / "x.log", seconds=7.4)])
    text = shown(progress)
    for part in ("prefill-0", "CPU cores 0", "9900", "ready", "7"):
        assert part in text


def test_a_slow_start_shows_what_the_engine_says(tmp_path: Path) -> None:
    """The last log line appears when waiting gets long, and not before."""
    log = tmp_path / "x.log"
    log.write_text("downloading [1/2]\n")
    progress = make(Console(file=io.StringIO()))
    progress.follow(lambda: [view(State.STARTING, log, seconds=5)])
    assert "downloading" not in shown(progress)
    progress.follow(lambda: [view(State.STARTING, log, seconds=50)])
    assert "downloading [1/2]" in shown(progress)


def test_the_reason_of_a_state_is_shown(tmp_path: Path) -> None:
    """A handoff that fails says why, in brackets or not."""
    progress = make(Console(file=io.StringIO()))
    progress.follow(lambda: [view(State.HEALTHY, tmp_path / "x.log", detail="no handle [/x]")])
    assert "no handle [/x]" in shown(progress)


def test_without_a_terminal_changes_are_plain_lines(tmp_path: Path) -> None:
    """A log file gets a line per change and no control characters."""
    out = io.StringIO()
    progress = make(Console(file=out, width=60))
    progress.start()
    progress.on_state(view(State.STARTING, tmp_path / "x.log"))
    progress.tick()
    progress.on_state(view(State.BACKOFF, tmp_path / "x.log", detail="was killed by SIGKILL " + "long " * 30))
    progress.settle()
    lines = out.getvalue().splitlines()
    assert lines[0] == "[    0.0 s] prefill-0 starting on CPU cores 0, port 9900"
    assert lines[1].startswith("[    0.0 s] prefill-0 crashed, restarts soon: was killed by SIGKILL")
    assert len(lines) == 2
    assert "\x1b" not in out.getvalue()


def test_a_terminal_gets_a_live_table_that_stays(tmp_path: Path) -> None:
    """After the start the table is left on the screen, and later changes are lines again."""
    out = io.StringIO()
    progress = make(Console(file=out, force_terminal=True, width=120))
    progress.follow(lambda: [view(State.READY, tmp_path / "x.log")])
    progress.start()
    progress.on_state(view(State.READY, tmp_path / "x.log"))
    assert "crashed" not in out.getvalue()
    progress.settle()
    progress.on_state(view(State.BACKOFF, tmp_path / "x.log"))
    assert "crashed, restarts soon" in out.getvalue()
