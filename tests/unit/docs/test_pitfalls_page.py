"""The page of known failures names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`", (ROOT / "docs/pitfalls.md").read_text())


def test_every_test_that_the_page_names_exists() -> None:
    """A case whose test was renamed or removed is a case without a test."""
    assert len(NAMED) > 60
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).exists() or not re.search(rf"def {name}\(", (ROOT / path).read_text())
    ]
    assert [m for m in missing if not m.endswith("::")] == []


def test_every_test_of_pitfalls_is_on_the_page() -> None:
    """What was found once is shown to the next reader."""
    named = {name for _, name in NAMED}
    tests = {
        name
        for path in (ROOT / "tests/faults").glob("test_pitfalls_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    allowed = {
        # Parts of the matrix, which the page names once.
        "test_a_fault_that_passes_is_not_seen_by_the_client",
        "test_a_client_that_leaves_engines_that_are_slow_leaves_nothing",
        "test_a_pair_that_restarts_together_serves_again",
    }
    assert tests - named == allowed
