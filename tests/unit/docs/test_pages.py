"""The documentation points at things that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """A relative link names a file of the repository."""
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [t for t in targets if not (page.parent / t).exists()]
    assert missing == []


def test_every_symbol_that_the_architecture_page_names_exists() -> None:
    """The journeys can be followed in the code."""
    named = re.findall(r"`(src/[\w/]+\.py)::(\w+)`", (ROOT / "docs/architecture.md").read_text())
    assert len(named) > 15
    missing = [f"{path}::{symbol}" for path, symbol in named if symbol not in _symbols(ROOT / path)]
    assert missing == []


def test_every_package_stands_on_the_architecture_page() -> None:
    """The map is complete: one sentence per package, in the order of the layers."""
    text = (ROOT / "docs/architecture.md").read_text()
    table = text[text.index("## Packages") : text.index("## Journey of a request")]
    rows = [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    packages = {p.parent.name for p in (ROOT / "src/disagg").glob("*/__init__.py")}
    assert packages <= set(rows)
    layers = re.findall(r'^  "disagg\.(\w+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert [name for name in reversed(layers) if name in rows and name in packages] == [
        r for r in rows if r in packages
    ]


def test_the_readme_starts_with_a_sentence_and_its_two_commands() -> None:
    """The first screen is enough to begin."""
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:25])
    assert "make serve" in first_screen
    assert "make test" in first_screen


def _symbols(path: Path) -> set[str]:
    if not path.exists():
        return set()
    tree = ast.parse(path.read_text())
    return {n.name for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
