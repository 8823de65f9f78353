"""The garbage collector of a routing process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from disagg.router.garbage import look_less_often


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """The collector as it was before."""
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def test_collects_less_often_but_still_collects() -> None:
    """Objects of requests in flight are not looked at every few requests; cycles are still found."""
    before = gc.get_threshold()
    look_less_often()
    young, *older = gc.get_threshold()
    assert gc.isenabled()
    assert young > 10 * before[0]
    assert tuple(older) == before[1:]
    assert gc.get_freeze_count() > 0
