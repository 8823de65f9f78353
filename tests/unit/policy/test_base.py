"""How a policy is applied: filter, score, pick."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from disagg.policy.base import Facts, Need, Snapshot, choose


class Fixed:
    needs: frozenset[Need] = frozenset()

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def score(self, candidates: Sequence[Snapshot], facts: Facts) -> Sequence[float]:
        return self.scores


A, B, C = (Snapshot(n, True, 0) for n in "abc")


def test_the_highest_score_wins_wherever_the_search_begins() -> None:
    """The turn decides among equals only."""
    for turn in range(6):
        assert choose(Fixed(0.2, 0.9, 0.3), [A, B, C], Facts(turn)) == B


def test_equals_take_turns() -> None:
    """Two best instances share the work, the worse one gets none."""
    assert [choose(Fixed(1.0, 0.0, 1.0), [A, B, C], Facts(t)) for t in (0, 1, 2)] == [A, C, C]


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan")])
def test_a_score_out_of_range_is_a_bug_that_shows(bad: float) -> None:
    """Scores are not clamped: a policy that computes nonsense must not route silently."""
    with pytest.raises(ValueError, match="scores are from 0 to 1"):
        choose(Fixed(0.5, bad), [A, B], Facts(0))


def test_a_missing_score_is_a_bug_that_shows() -> None:
    """One score per candidate."""
    with pytest.raises(ValueError, match="1 scores for 2 candidates"):
        choose(Fixed(0.5), [A, B], Facts(0))
