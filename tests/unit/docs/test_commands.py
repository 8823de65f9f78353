"""Every `disagg` command that the documentation shows is one that the program takes."""

import re
import shlex
from pathlib import Path

import pytest

from disagg.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")])
_BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _commands() -> list[tuple[str, list[str]]]:
    found = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text()):
            for line in block.replace("\\\n", " ").splitlines():
                if command := re.match(r"(?:\$ )?(?:\.venv/bin/)?disagg (.*)", line):
                    found.append((page.name, shlex.split(command[1].split("    #")[0])))
    return found


COMMAND_LINES = _commands()


def test_the_documentation_shows_commands() -> None:
    """The search finds something to check."""
    assert len(COMMAND_LINES) >= 8


@pytest.mark.parametrize(("page", "words"), COMMAND_LINES, ids=[f"{p}: {' '.join(w)[:60]}" for p, w in COMMAND_LINES])
def test_a_documented_command_is_understood(
    page: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`serve` lines are read and planned (nothing is started); other commands exist and take these flags."""
    assert words[0] in COMMANDS, page
    if words[0] != "serve":
        assert set(_flags(words)) <= set(_flags(_help(words[0], capsys))), page
        return
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--model", "any-name", "--prefill-replicas", "2", "--print-config"]) == 2, (
        "decode is missing"
    )
    capsys.readouterr()
    assert (
        main(["serve", "--model", "any-name", "--prefill-replicas", "1", "--decode-replicas", "1", "--print-config"])
        == 0
    )
    Path("topology.yaml").write_text(capsys.readouterr().out)
    line = words[: words.index(">")] if ">" in words else words
    line = [str(ROOT / w) if w.startswith("examples/") else w for w in line]
    assert main([*line, "--dry-run"] if "--print-config" not in line else line) == 0, page
    assert capsys.readouterr().out


def _help(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    return re.findall(r"--?[\w-]+", capsys.readouterr().out)


def _flags(words: list[str]) -> list[str]:
    return [w.split("=")[0] for w in words if w.startswith("-")]
