"""The command frame: finding commands, help, exit codes."""

import importlib

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


@pytest.mark.parametrize("name", list(COMMANDS))
def test_each_command_explains_itself_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`disagg X --help` works for every X, and shows how it is used."""
    assert callable(importlib.import_module(COMMANDS[name].module).main)
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    assert "examples:" in capsys.readouterr().out
