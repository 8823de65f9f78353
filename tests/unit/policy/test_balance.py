"""What each load-spreading policy prefers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disagg.policy.balance import LeastLoaded, RoundRobin
from disagg.policy.base import Facts, Snapshot, choose


@given(loads=st.lists(st.integers(0, 1000), min_size=1, max_size=9), turn=st.integers(0, 99))
def test_least_loaded_takes_a_minimum(loads: list[int], turn: int) -> None:
    """No other candidate has fewer open requests."""
    chosen = choose(LeastLoaded(), [Snapshot(str(i), True, n) for i, n in enumerate(loads)], Facts(turn))
    assert chosen is not None
    assert chosen.in_flight == min(loads)


def test_round_robin_ignores_load_and_skips_what_is_not_ready() -> None:
    """The ready instances share the turns of one that is not."""
    fleet = [Snapshot("a", True, 50), Snapshot("b", False, 0), Snapshot("c", True, 0)]
    chosen = [choose(RoundRobin(), fleet, Facts(t)) for t in range(4)]
    assert [c.name for c in chosen if c] == ["a", "c", "a", "c"]
