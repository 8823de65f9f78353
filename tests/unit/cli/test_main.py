"""The command frame: finding commands, help, exit codes."""

import importlib
from pathlib import Path

import pytest

from disagg.cli.main import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """A newcomer sees what there is."""
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for name, info in COMMANDS.items():
        assert name in out
        assert info.summary in out


def test_without_a_command_the_usage_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts notice that they called nothing."""
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    """Typing errors are mended in one step."""
    assert main(["serv"]) == 2
    assert "Did you mean 'serve'" in capsys.readouterr().err


def test_ctrl_c_during_imports_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of a short command's time goes into importing it."""

    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["serve"]) == 130


def test_an_error_cannot_disturb_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a file or a server says is shown without its control characters."""
    (tmp_path / "t.yaml").write_text('"\\e[31mmodel\\0": m\n')
    assert main(["serve", "--config", str(tmp_path / "t.yaml")]) == 2
    err = capsys.readouterr().err
    assert "\\x1b[31mmodel\\x00" in err
    assert not {"\x1b", "\0"} & set(err)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_explains_itself_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`disagg X --help` works for every X, and shows how it is used."""
    assert callable(importlib.import_module(COMMANDS[name].module).main)
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert "examples:" in capsys.readouterr().out
