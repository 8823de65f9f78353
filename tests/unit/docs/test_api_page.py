"""The page about the API names what there is."""

from __future__ import annotations

from pathlib import Path

from disagg.engines.api_fields import FIELDS
from disagg.router.apis import ENDPOINTS

PAGE = (Path(__file__).parents[3] / "docs/reference/api.md").read_text()


def test_every_path_is_on_the_page() -> None:
    """A user finds out what becomes of a request before sending it."""
    missing = [e.path for e in ENDPOINTS if f"`{e.path.removesuffix('/*')}" not in PAGE]
    assert not missing


def test_every_cap_is_on_the_page() -> None:
    """By API, in the table that says what prefill gets."""
    for api, fields in FIELDS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{api}`"))
        assert all(cap in row for cap in fields.caps)
