"""The table of paths."""

from __future__ import annotations

import pytest

from disagg.engines.base import Api
from disagg.router.apis import ENDPOINTS, Way, find


def test_every_api_is_split_at_its_own_path() -> None:
    """The enumeration and the table name the same paths."""
    assert {e.api: e.path for e in ENDPOINTS if e.way is Way.SPLIT} == {api: api.value for api in Api}


def test_paths_are_there_once_and_say_what_they_are() -> None:
    """A second entry would never be found; a refusal without a reason helps nobody."""
    assert len({e.path for e in ENDPOINTS}) == len(ENDPOINTS)
    assert all(e.about for e in ENDPOINTS)


@pytest.mark.parametrize(
    ("path", "way"),
    [
        ("/v1/chat/completions", Way.SPLIT),
        ("/v1/chat/completions/render", Way.PASSED),
        ("/v1/chat/completions/chatcmpl-1", Way.REFUSED),
        ("/v1/responses/resp_1/cancel", Way.REFUSED),
        ("/v2/rerank", Way.PASSED),
    ],
)
def test_the_longest_path_wins(path: str, way: Way) -> None:
    """What stands below a path is found only if it has no entry of its own."""
    found = find(path)
    assert found is not None
    assert found.way is way


def test_unknown_paths_are_not_found() -> None:
    """Nothing is guessed."""
    assert find("/v1/respons") is None
    assert find("/") is None
