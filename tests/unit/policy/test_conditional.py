"""Which prompts are too short to be handed over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.conditional import SHORT_PROMPT, local_reason


@pytest.mark.parametrize(
    ("prompt", "cached", "threshold", "reason"),
    [
        (99, [], 100, SHORT_PROMPT),
        (100, [], 100, None),
        (1000, [901], 100, SHORT_PROMPT),
        (1000, [0, 900], 100, None),
        (1000, [0, 950], 100, SHORT_PROMPT),
        (5, [], 0, None),
        (0, [], 100, None),
    ],
)
def test_the_threshold_counts_uncached_tokens(
    prompt: int, cached: list[float], threshold: int, reason: str | None
) -> None:
    """Below it decode does it alone; at it, without a threshold, or with an unknown prompt it is handed over."""
    assert local_reason(prompt, cached, threshold) == reason


@given(prompt=st.floats(0, 1e9), cached=st.lists(st.floats(0, 1e9)), threshold=st.integers(0, 10**6))
def test_a_longer_prompt_or_a_colder_cache_is_never_the_shorter_one(
    prompt: float, cached: list[float], threshold: int
) -> None:
    """Monotonic: what is handed over stays so when there is more to compute."""
    if prompt > 0 and local_reason(prompt, cached, threshold) is None:
        assert local_reason(prompt + 1000, cached, threshold) is None
        assert local_reason(prompt, cached[1:], threshold) is None
