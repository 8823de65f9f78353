"""`disagg.launch.logs`: folders of runs, and what a log says about an end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.errors import PreparationError
from disagg.launch import logs
from disagg.launch.logs import KEPT_RUNS, likely_cause, open_run_folder, tail

# A prefix as vLLM writes it, for each of its processes.
PREFIX = "(EngineCore pid=4711) ERROR 11-30 19:36:01 [core.py:1005]"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        ([f"{PREFIX} ValueError: no valid config"], "ValueError: no valid config"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried"], "torch.OutOfMemoryError: CUDA out of memory. Tried"),
        (["OSError: [Errno 98] Address already in use"], "OSError: [Errno 98] Address already in use"),
        (
            ["python3: Error while finding specification of 'a.b' (ModuleNotFoundError: No module named 'a')"],
            "ModuleNotFoundError: No module named 'a'",
        ),
        (["api_server.py: error: unrecognized arguments: --foo"], "error: unrecognized arguments: --foo"),
        (["Segmentation fault (core dumped)"], "Segmentation fault (core dumped)"),
        (
            ["terminate called after throwing an instance of 'x'"],
            "terminate called after throwing an instance of 'x'",
        ),
        (["KeyError: 'a'", "INFO shutting down"], "KeyError: 'a'"),
        (
            [
                f"{PREFIX} ValueError: head_dim=16 is not supported",
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
            ],
            "ValueError: head_dim=16 is not supported",
        ),
        (["RuntimeError: first", "RuntimeError: second"], "RuntimeError: second"),
        (
            [
                "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig",
                "  Value error, Unsupported connector type: X [type=value_error, input_value=ArgsKwargs((), {})]",
                "    For further information visit https://errors.pydantic.dev/2/v/value_error",
            ],
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig: "
            "Value error, Unsupported connector type: X",
        ),
        (["ValidationError: 1 validation error for A"], "ValidationError: 1 validation error for A"),
        (["INFO all good", "loading weights"], None),
        ([], None),
    ],
)
def test_the_likely_cause_is_the_last_real_exception(lines: list[str], cause: str | None) -> None:
    """Log prefixes are left out, and a line that only points at an earlier one is passed over."""
    assert likely_cause(lines) == cause


@given(st.lists(st.text(max_size=80), max_size=20))
def test_any_log_has_a_cause_or_none(lines: list[str]) -> None:
    """Whatever an engine prints, looking for the cause of its end does not fail."""
    cause = likely_cause(lines)
    assert cause is None or any(cause in line for line in lines) or "ValidationError" in cause


def test_the_tail_is_of_this_start_alone_and_readable(tmp_path: Path) -> None:
    """Earlier starts, colours, progress bars and broken bytes do not get into a message."""
    log = tmp_path / "x.log"
    log.write_bytes(b"old start\n")
    since = logs.size_of(log)
    with log.open("ab") as file:
        file.write(b"\x1b[31mred\x1b[0m\n\n 10%\r 50%\r100%\nbad \xff byte\nlast")
    assert tail(log, 20, since) == ["red", "100%", "bad \ufffd byte", "last"]
    assert tail(log, 2, since) == ["bad \ufffd byte", "last"]


def test_a_log_that_is_not_there_has_no_lines(tmp_path: Path) -> None:
    """An engine that never wrote anything is no error of its own."""
    assert tail(tmp_path / "none.log", 20) == []
    assert logs.size_of(tmp_path / "none.log") == 0


def test_the_tail_of_a_huge_log_is_read_from_its_end(tmp_path: Path) -> None:
    """A log of gigabytes is not read into memory."""
    log = tmp_path / "x.log"
    with log.open("wb") as file:
        file.truncate(8 * 1024**3)
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe end\n")
    assert tail(log, 1) == ["the end"]


def test_runs_go_under_the_state_directory_and_old_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty runs are kept; a run whose launcher lives is never removed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    runs = tmp_path / "disagg" / "runs"
    for number in range(30):
        folder = runs / f"2026-{number:02}-{2**22 + number}"
        folder.mkdir(parents=True)
        os.utime(folder, (number, number))
    living = runs / f"2025-{os.getpid()}"
    living.mkdir()
    os.utime(living, (0, 0))
    run = open_run_folder(None)
    left = sorted(f.name for f in runs.iterdir())
    assert len(left) == KEPT_RUNS + 1
    assert run.path.parent == runs
    assert living.name in left
    assert f"2026-29-{2**22 + 29}" in left
    assert f"2026-00-{2**22}" not in left
    assert run.path.stat().st_mode & 0o077 == 0


def test_a_folder_of_the_users_own_is_never_pruned(tmp_path: Path) -> None:
    """With --log-dir nothing in it is removed, and it may exist already."""
    for number in range(30):
        (tmp_path / f"mine-{number}").mkdir()
    run = open_run_folder(str(tmp_path))
    assert run.path == tmp_path
    assert run.log_file("decode-0") == tmp_path / "decode-0.log"
    assert len([f for f in tmp_path.iterdir() if f.is_dir()]) == 30


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    """The message names the folder and the flag."""
    (tmp_path / "file").write_text("")
    with pytest.raises(PreparationError, match="--log-dir"):
        open_run_folder(str(tmp_path / "file" / "logs"))


def test_the_record_of_a_run_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A reader finds the old or the new record, and no scratch file is left."""
    run = open_run_folder(str(tmp_path))
    run.write_record({"pid": 1})
    run.write_record({"pid": 2})
    assert json.loads((tmp_path / "run.json").read_text()) == {"pid": 2}
    assert [f.name for f in tmp_path.iterdir()] == ["run.json"]


def test_a_log_that_cannot_be_read_has_no_lines_and_no_size(tmp_path: Path) -> None:
    """Its folder may have become anything since the run began."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "none.log", tmp_path / "file" / "x.log"):
        assert tail(path, 5) == []
        assert logs.size_of(path) == 0


def test_a_log_cannot_disturb_the_terminal(tmp_path: Path) -> None:
    """Neither colours nor window titles nor bells of an engine reach the user's screen."""
    log = tmp_path / "x.log"
    log.write_bytes(b"\x1b[31mred\x1b[0m\n\x1b]0;title\x07plain\tx\n")
    assert tail(log, 5) == ["red", "\\x1b]0;title\\x07plain\tx"]


def test_a_home_that_does_not_exist_is_named() -> None:
    """`~someone/logs` of a user that is unknown is a clear message, not a traceback."""
    with pytest.raises(PreparationError, match=r"~no-such-user-here/logs .*--log-dir"):
        open_run_folder("~no-such-user-here/logs")
