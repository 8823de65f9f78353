"""The limit on open files is raised as far as it may be."""

from __future__ import annotations

import logging
import resource

import pytest

from disagg.http.descriptors import raise_descriptor_limit


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    """A shell's low soft limit does not decide how many streams a router holds."""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        possible = raise_descriptor_limit(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
        assert possible >= 10 or hard < 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_what_is_not_enough_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where the system allows fewer requests than the setting, the log says how many, and what to do."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with caplog.at_level(logging.INFO, "disagg.http"):
        assert raise_descriptor_limit(32_768) == 384
    assert "384" in caplog.text
    assert "max_in_flight" in caplog.text
